"""HTML pages that load nothing: the template extends `frame.html.j2`, which has style, script and policy.

The only script opens the target of a link, and the policy allows only that script, by its hash; without it
links still work. Autoescape escapes every value, and `sanitize` redacts and cleans it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gpukiln.reports.sanitize import sanitize
from gpukiln.units import Duration

# A browser scrolls to a closed <details> and leaves it closed.
SCRIPT = """
function reveal(hash) {
  const found = document.getElementById(hash.slice(1));
  if (found instanceof HTMLDetailsElement) found.open = true;
}
addEventListener("hashchange", () => reveal(location.hash));
addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link) reveal(link.hash);
});
reveal(location.hash);
"""


def environment(folder: Path) -> Environment:
    """Jinja's environment for pages that extend the frame.

    Args:
        folder: The folder of their templates.
    """
    pages = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        # A misspelt name is an error, not an empty text in a report.
        undefined=StrictUndefined,
        finalize=_finalize,
        # Otherwise each line with a tag would leave an empty line in the page.
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.globals.update(
        script=Markup(SCRIPT),  # noqa: S704 - the constant above
        # The only script that the frame's Content-Security-Policy lets run; texts of machines can't run as
        # one.
        script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
    )
    pages.filters.update(
        took=_duration_text, when=_time_text, ticks=_ticks, words=lambda name: name.replace("_", " ")
    )
    return pages


def _finalize(value: Any) -> Any:
    """Applied to every expression of a template; the output of a macro has been through it before."""
    return sanitize(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _ticks(text: str) -> Markup:
    """A text with its `commands` as <code>; it is escaped before it becomes Markup (S704)."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(sanitize(text)))))  # noqa: S704 - escaped


def _duration_text(seconds: float) -> str:
    """A duration for readers.

    >>> _duration_text(0.0)
    '< 0.1s'
    >>> _duration_text(90)
    '1m30s'
    """
    # Most checks are functions of the facts and take microseconds; 0.0s would look like a missing value.
    return Duration(seconds).shown if seconds >= 0.1 else "< 0.1s"


def _time_text(time: str) -> str:
    """A time for readers.

    >>> _time_text("2026-03-01T10:00:00+00:00")
    '2026-03-01 10:00:00 UTC'
    >>> _time_text("2026-03-01T10:00:00+02:00")
    '2026-03-01T10:00:00+02:00'
    """
    return re.sub(r"T(\d\d:\d\d:\d\d)(\+00:00|Z)$", r" \1 UTC", time)
