"""What the documents point at is there, and generated ones are as scripts/generate writes them."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT
from tests import packages

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
ROW = re.compile(r"^([a-z_.]+\w)( +)([\w./-]+\w)$")  # of scripts/generate
SAID = re.compile(r"python -m ([a-z_.]+\w) > ([\w./-]+\w)")
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


def generated(script: str) -> list[tuple[str, str]]:
    """The rows of scripts/generate: a module, and the file that its output is."""
    return [(module, file) for line in script.splitlines() for module, _, file in re.findall(ROW, line)]


GENERATED = generated((ROOT / "scripts/generate").read_text())


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # of runpy
@pytest.mark.parametrize(("module", "file"), [row for row in GENERATED if row[1].endswith(".md")])
def test_a_generated_page_is_up_to_date(module: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module(module, run_name="__main__")
    assert (ROOT / file).read_text() == capsys.readouterr().out, "run: scripts/run scripts/generate"


def ungenerated(sources: list[str], rows: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """What sources say is made by `python -m MODULE > FILE`, and scripts/generate does not make."""
    return {pair for text in sources for pair in re.findall(SAID, text)} - set(rows)


def test_one_command_writes_every_generated_file() -> None:
    sources = [path.read_text() for path in (ROOT / "gpukiln").rglob("*.py")]
    assert not ungenerated(sources, GENERATED)
    assert generated("gpukiln.b   docs/b.md\ndone\n") == [("gpukiln.b", "docs/b.md")]
    assert ungenerated(["`python -m gpukiln.a > docs/a.md`"], [("gpukiln.b", "docs/b.md")]) == {
        ("gpukiln.a", "docs/a.md")
    }


def test_every_package_is_in_the_list() -> None:
    listed = {name for names in packages.layers(ROOT) for name in names}
    there = (ROOT / "gpukiln").glob("[!_]*")
    assert listed == {path.stem for path in there if (path / "__init__.py").is_file() or path.suffix == ".py"}


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
