"""Machine images: what changes when one replaces another, and release notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import Command, print_document, results, words
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.release.osv import OsvEntry

VULNERABILITIES = option(
    "files with OSV records (JSON or zip) to look up the packages in, separated by commas"
)


@dataclass(frozen=True)
class AmiDiff(Command):
    """Show what changes when an image replaces another: versions, vulnerabilities, checks, packages."""

    old: str = option(
        "the image that runs today: build id, AMI id, `last`, or a record file", first=True, required=True
    )
    new: str = option("the image that is to replace it, named likewise", first=True, required=True)
    vulnerabilities: str = VULNERABILITIES
    format: str = option("text (the default), markdown or json", "text")
    json: bool = option("the same as --format json", False)

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.release.compared_image import find_compared_image
        from gpukiln.release.diff import compare
        from gpukiln.release.diff_view import check_format, sections, to_markdown, to_terminal
        from gpukiln.state import state_home

        form = check_format("json" if self.json else self.format)
        builds = Builds(state_home())
        old, new = find_compared_image(builds, self.old), find_compared_image(builds, self.new)
        found = compare(old, new, _osv(self.vulnerabilities))
        if form == "json":
            print_document("ami.diff/1", dump(found))
        elif form == "markdown":
            print(to_markdown(sections(found)), end="")
        else:
            results().print(to_terminal(sections(found)))


@dataclass(frozen=True)
class AmiNotes(Command):
    """Write the release notes of an image, as Markdown, to standard output."""

    build: str = option(
        "the image to release: build id, AMI id, `last`, or a record file", first=True, required=True
    )
    since: str = option(
        "the image that it replaces, named likewise; default: the last one that was proven before"
    )
    vulnerabilities: str = VULNERABILITIES

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.release.compared_image import find_compared_image
        from gpukiln.release.notes import make_notes, predecessor
        from gpukiln.state import state_home

        builds = Builds(state_home())
        new = find_compared_image(builds, self.build)
        old = find_compared_image(builds, self.since) if self.since else predecessor(builds, new)
        print(make_notes(new, old, _osv(self.vulnerabilities)), end="")


def _osv(option: str) -> list[OsvEntry] | None:
    from pathlib import Path

    from gpukiln.errors import UsageError
    from gpukiln.release.osv import load_osv

    if not option:
        return None
    if not (names := words(option)):
        raise UsageError(f"--vulnerabilities {option!r} names no file", hint="leave it out, or name one")
    return load_osv(Path(name) for name in names)
