"""Machine images: what changes when one replaces another, and release notes."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import Command, print_document, results
from gpukiln.options import option

VULNERABILITIES = option(
    "files with OSV records (JSON or zip) to look up the packages in, separated by commas"
)


@dataclass(frozen=True)
class AmiDiff(Command):
    """Show what changes when an image replaces another: versions, vulnerabilities, checks, packages."""

    old: str = option(
        "the image that runs today: build id, AMI id, `last`, or a record file", first=True, required=True
    )
    new: str = option("the image that replaces it, named likewise", first=True, required=True)
    vulnerabilities: str = VULNERABILITIES
    # This command has three forms and so no JsonOptions; --json is here because every other command has it.
    format: str = option("text (the default), markdown or json", "text")
    json: bool = option("the same as --format json", False)

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.release.compared_image import find_compared_image
        from gpukiln.release.diff import compare
        from gpukiln.release.diff_view import check_format, sections, to_markdown, to_terminal
        from gpukiln.release.osv import load_named

        # A misspelled format is refused before two records and the OSV files are read.
        form = check_format("json" if self.json else self.format)
        old, new = (find_compared_image(Builds(), name) for name in (self.old, self.new))
        diff = compare(old, new, load_named(self.vulnerabilities))
        if form == "json":
            print_document("ami.diff/1", diff)
        elif form == "markdown":
            # Not by `results`, which would wrap lines for the terminal: it goes into an issue or a file.
            print(to_markdown(sections(diff)), end="")
        else:
            results().print(to_terminal(sections(diff)))


@dataclass(frozen=True)
class AmiNotes(Command):
    """Write the release notes of an image, as Markdown, to standard output."""

    build: str = option(
        "the image to release: build id, AMI id, `last`, or a record file", first=True, required=True
    )
    since: str = option(
        "the image that it replaces, named likewise; default: the last verified one before it"
    )
    vulnerabilities: str = VULNERABILITIES

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.release.compared_image import find_compared_image
        from gpukiln.release.notes import make_notes, predecessor
        from gpukiln.release.osv import load_named

        new = find_compared_image(Builds(), self.build)
        old = find_compared_image(Builds(), self.since) if self.since else predecessor(Builds(), new)
        print(make_notes(new, old, load_named(self.vulnerabilities)), end="")
