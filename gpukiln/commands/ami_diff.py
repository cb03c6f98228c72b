"""Machine images: what changes when one replaces another, and release notes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, words
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.release.osv import OsvEntry

WHICH = "build id, AMI id, `last`, or a record file"
VULNERABILITIES = "files with OSV records (JSON or zip) to look up the packages in, separated by commas"


@command(
    help={
        "old": f"the image that runs today: {WHICH}",
        "new": "the image that is to replace it, named likewise",
        "vulnerabilities": VULNERABILITIES,
        "format": "text (the default), markdown or json",
        "json": "the same as --format json",
    }
)
def diff(
    _: Any, old: str, new: str, vulnerabilities: str = "", format: str = "text", json: bool = False
) -> None:
    """Show what changes when an image replaces another: versions, vulnerabilities, checks, packages."""
    from gpukiln.images.builds import Builds
    from gpukiln.release.compared_image import find_compared_image
    from gpukiln.release.diff import compare
    from gpukiln.release.diff_view import check_format, sections, to_markdown, to_terminal
    from gpukiln.state import state_home

    form = check_format("json" if json else format)
    builds = Builds(state_home())
    found = compare(find_compared_image(builds, old), find_compared_image(builds, new), _osv(vulnerabilities))
    if form == "json":
        print_document("ami.diff/1", dump(found))
    elif form == "markdown":
        print(to_markdown(sections(found)), end="")
    else:
        results().print(to_terminal(sections(found)))


@command(
    help={
        "build": f"the image to release: {WHICH}",
        "since": "the image that it replaces, named likewise; default: the last one that was proven before",
        "vulnerabilities": VULNERABILITIES,
    }
)
def notes(_: Any, build: str, since: str = "", vulnerabilities: str = "") -> None:
    """Write the release notes of an image, as Markdown, to standard output."""
    from gpukiln.images.builds import Builds
    from gpukiln.release.compared_image import find_compared_image
    from gpukiln.release.notes import make_notes, predecessor
    from gpukiln.state import state_home

    builds = Builds(state_home())
    new = find_compared_image(builds, build)
    old = find_compared_image(builds, since) if since else predecessor(builds, new)
    print(make_notes(new, old, _osv(vulnerabilities)), end="")


def _osv(option: str) -> list[OsvEntry] | None:
    from pathlib import Path

    from gpukiln.errors import UsageError
    from gpukiln.release.osv import load_osv

    if not option:
        return None
    if not (names := words(option)):
        raise UsageError(f"--vulnerabilities {option!r} names no file", hint="leave it out, or name one")
    return load_osv(Path(name) for name in names)
