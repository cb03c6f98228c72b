"""One digest over what judges a machine: the checks, what gathers the facts, and what both import."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gpukiln.probe.scripts import FILES

ROOT = Path(__file__).resolve().parents[2]
SHOWS_ONLY = tuple(f"gpukiln/verify/{name}.py" for name in ("html", "junit", "verification"))
"""What the plugin imports only to show a verdict: another page is no other judgement."""


@cache
def suite_digest(root: Path = ROOT) -> str:
    """Digest of the suite: another one may come to another verdict on the same machine.

    Args:
        root: A checkout.

    Returns:
        64 hexadecimal digits.
    """
    found = hashlib.sha256()
    for path in suite_files(root):
        found.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    bindings = importlib.util.find_spec("pynvml")  # packing.py sends them along
    if bindings and bindings.origin:
        found.update(hashlib.sha256(Path(bindings.origin).read_bytes()).digest())
    return found.hexdigest()


def suite_files(root: Path) -> list[Path]:
    """The files that the suite is made of, by what they import.

    Args:
        root: A checkout.
    """
    ours, found = root / "gpukiln", set[Path]()
    todo = [root / name for name in FILES.values()]  # sent along too
    todo += [*root.glob("tests/host/*.py"), ours / "probe" / "gather.py", ours / "verify" / "plugin.py"]
    while todo:
        path = todo.pop()
        if path in found or str(path.relative_to(root)) in SHOWS_ONLY:
            continue
        found.add(path)
        if path.suffix == ".py":
            todo += _needed(root, ast.parse(path.read_text(encoding="utf-8")))
    return sorted(found)


def _needed(root: Path, code: ast.Module) -> Iterator[Path]:
    """Modules of ours that a module imports, and files of the catalogue that it reads with `data(NAME)`."""
    names: list[str] = []
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "data":
            texts = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
            yield from (root / "gpukiln/catalog/data" / f"{name}.yaml" for name in texts)
    for name in names:
        path = root / f"{name.replace('.', '/')}.py"
        if name.startswith("gpukiln.") and path.exists():
            yield path
