"""What the documents point at is there."""

import re
from collections.abc import Iterator
from pathlib import Path

from gpukiln.catalog.load import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
PATH = re.compile(r"`((?:ami|ansible|bench|docker|docs|examples|gpukiln|roles|scripts|tests)/[\w./-]+)`")


def dangling(page: Path, text: str) -> Iterator[str]:
    for name in LINK.findall(text):
        if not (page.parent / name).exists():
            yield f"{page.name} links to {name}"
    for name in PATH.findall(text):
        if "/ROLE/" not in name and not (ROOT / name).exists():
            yield f"{page.name} names {name}"


def test_every_link_and_path_leads_somewhere() -> None:
    assert [problem for page in PAGES for problem in dangling(page, page.read_text())] == []


def test_a_link_and_a_path_that_lead_nowhere_are_found() -> None:
    text = "[a](docs/none.md) [b](README.md#x) `gpukiln/none.py` `gpukiln/errors.py`"
    assert list(dangling(ROOT / "README.md", text)) == [
        "README.md links to docs/none.md",
        "README.md names gpukiln/none.py",
    ]
