"""Tables at every width: no name is broken or left out, and piped each row is one line without filling."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from gpukiln.progress import PlainConsole
from gpukiln.reports.tables import Rows

BUILD = "20261121-200000-eks-gpu-0000"
AMI = "ami-00000000000000001"
WHY = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64/InRelease can't be reached"


def rows():
    made = Rows("build", "AMI", "took", "why [not]", first=2, folds=True, right=("took",))
    made.add(BUILD, AMI, "3 min 07 s", WHY)
    made.add(Text(BUILD, style="red"), "-", "4.2 s", "", style="bold")
    return made


def shown(width):
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None, width=width).print(rows())
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 200])
def test_no_name_is_broken_and_nothing_is_left_out(width):
    text = shown(width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    for whole in (BUILD, AMI, "3 min 07 s", "4.2 s"):
        assert whole in text
    assert "".join(WHY.split()) in "".join(text.split())


def test_a_row_that_fits_is_one_line_below_its_titles():
    title, first, second = shown(200).splitlines()
    assert title.split() == ["build", "AMI", "took", "why", "[not]"]
    assert first.split()[:2] == [BUILD, AMI]
    assert WHY in first
    assert second.index("4.2 s") + len("4.2 s") == first.index("3 min 07 s") + len("3 min 07 s")


def test_a_text_that_folds_stays_beside_the_names_where_there_is_room():
    lines = shown(110).splitlines()
    assert lines[1].startswith(f"{BUILD}  {AMI}")
    assert lines[2].startswith(" " * len(f"{BUILD}  {AMI}"))


def test_piped_a_row_is_one_line_without_filling(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    console = PlainConsole()
    console.print(rows())
    console.print_text(f"[bold]{'x' * 300} y[/]")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert WHY in lines[1]
    assert lines[3] == f"[bold]{'x' * 300} y[/]"
    assert not [line for line in lines if line.endswith(" ")]


def test_an_empty_table_is_its_titles(capsys):
    PlainConsole().print(Rows("build", "AMI", first=1))
    assert capsys.readouterr().out == "build  AMI\n"
