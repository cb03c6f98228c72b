"""The list of packages in CONTRIBUTING.md; scripts/generate writes the page with it.

Order and groups are those of the import contract in pyproject.toml; what a package is for is the first
sentence of its docstring. It is on standard output: the page is read before it is written again.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- packages: tests/packages.py -->\n", "<!-- end of packages -->\n"


def layers(root: Path) -> list[list[str]]:
    """The packages and modules of each line of the contract, the highest line first."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [lines] = [one["layers"] for one in contracts["contracts"] if one["type"] == "layers"]
    return [re.split(r" [|:] ", line) for line in lines]


def sentence(root: Path, name: str) -> str:
    package, module = root / "gpukiln" / name / "__init__.py", root / "gpukiln" / f"{name}.py"
    source = (package if package.is_file() else module).read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(first.split()))[0]


def table(root: Path) -> str:
    rows = ["| Package | What it is for |", "|---|---|"]
    for names in layers(root):
        rows += [f"| `{name}` | {sentence(root, name)} |" for name in names]
        rows += ["| | |"]
    return "\n".join(rows[:-1]) + "\n"


def page(root: Path, text: str) -> str:
    """CONTRIBUTING.md with its list as it should be."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(
            f"CONTRIBUTING.md lacks {BEGIN.strip()} or {END.strip()}; wanted: the list between the two"
        )
    return f"{before}{BEGIN}\n{table(root)}\n{END}{after}"


if __name__ == "__main__":
    sys.stdout.write(page(ROOT, PAGE.read_text(encoding="utf-8")))
