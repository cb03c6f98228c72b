"""What the documents point at is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT
from tests import packages

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


def test_the_list_of_packages_is_as_its_docstrings_and_the_contract_have_it() -> None:
    text = packages.PAGE.read_text(encoding="utf-8")
    assert packages.page(ROOT, text) == text, "scripts/generate writes it again"
    listed = {name for names in packages.layers(ROOT) for name in names}
    assert listed == {
        path.stem for path in (ROOT / "gpukiln").glob("[!_]*") if path.is_dir() or path.suffix == ".py"
    }


def test_a_list_of_packages_that_is_stale_is_another(tmp_path: Path) -> None:
    (tmp_path / "gpukiln" / "upper").mkdir(parents=True)
    (tmp_path / "gpukiln" / "upper" / "__init__.py").write_text('"""Above. And more.\n\nThe rest.\n"""\n')
    (tmp_path / "gpukiln" / "lower.py").write_text('"""Below: files of docs/a.md\nand others."""\n')
    contract = '[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["upper", "lower"]\n'
    (tmp_path / "pyproject.toml").write_text(contract)
    stale = f"before\n{packages.BEGIN}| `upper` | Below. |\n{packages.END}after\n"
    rows = packages.page(tmp_path, stale).splitlines()
    assert rows[0] == "before"
    assert rows[-1] == "after"
    assert [row for row in rows if row.startswith("| `")] == [
        "| `upper` | Above. |",
        "| `lower` | Below: files of docs/a.md and others. |",
    ]
    with pytest.raises(SystemExit, match="lacks <!-- packages"):
        packages.page(tmp_path, "no list")
