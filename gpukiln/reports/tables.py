"""Tables for a terminal, and for a pipe, where each row is one line."""

from collections.abc import Collection

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NARROW = 30  # columns; a last column with less space is printed on further lines


class Rows:
    """A table that is never truncated: one line for each row where it fits, else several.

    Rich drops whole columns that do not wrap, and a wrapped id can't be copied.

    Args:
        titles: Of the columns; the last may be empty.
        first: Columns on the first line of a row with several lines.
        folds: Whether the last column is text that may continue on further lines.
        right: Titles of the columns with numbers.
    """

    def __init__(self, *titles: str, first: int, folds: bool = False, right: Collection[str] = ()) -> None:
        self._titles, self._first, self._folds, self._right = titles, first, folds, right
        self._rows: list[tuple[list[Text], str]] = []

    def add(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; text is printed without markup."""
        # Rich would read [brackets] in a plain text as markup.
        self._rows.append(([Text(cell) if isinstance(cell, str) else cell for cell in cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See Rich, Console Protocol."""
        # cell_len counts columns of the terminal: CJK characters and emoji take two.
        *widths, last = [
            max([cell_len(title), *(cell.cell_len for cell in cells)])
            for title, *cells in zip(self._titles, *(cells for cells, _ in self._rows), strict=True)
        ]
        # Two blanks between columns.
        remaining = options.max_width - sum(widths) - 2 * len(widths)
        if remaining >= last or (self._folds and remaining >= NARROW):
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
            for title, width in zip(self._titles, (*widths, min(last, remaining)), strict=True):
                justify: JustifyMethod = "right" if title in self._right else "left"
                table.add_column(Text(title), justify=justify, width=width, overflow="fold")
            for cells, style in self._rows:
                table.add_row(*cells, style=style)
            yield table
            return
        for cells, style in self._rows:
            begin = Text("  ", style).join(cell for cell in cells[: self._first] if cell)
            yield Text("", style).append_text(begin)
            titles = (*self._titles[:-1], "" if self._folds else self._titles[-1])
            for title, cell in zip(titles[self._first :], cells[self._first :], strict=True):
                if cell:
                    yield Padding(Text(f"{title}: " if title else "", style).append_text(cell), (0, 0, 0, 4))
