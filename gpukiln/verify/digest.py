"""The digest of the suite that verifies a machine: checks, probe, and the modules that both import."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

from gpukiln import recipes
from gpukiln.probe.scripts import FILES

PRESENTATION_FILES = tuple(f"gpukiln/verify/{name}.py" for name in ("html", "junit", "verification"))
"""Modules that only show a verdict: a change to the page does not change the verdict."""


@cache
def suite_digest(root: Path | None = None) -> str:
    """Digest of the suite: with another digest the suite may give another verdict on the same machine.

    Args:
        root: A checkout; None: the running gpukiln.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, path in suite_files(root).items():
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    # Other bindings may read other values from NVML.
    bindings = importlib.util.find_spec("pynvml")  # packing.py sends these bindings to the machine too
    if bindings and bindings.origin:
        digest.update(hashlib.sha256(Path(bindings.origin).read_bytes()).digest())
    return digest.hexdigest()


def suite_files(root: Path | None) -> dict[str, Path]:
    """The files of the suite by their names in a checkout, found by following imports.

    Args:
        root: A checkout; None: the running gpukiln.
    """
    folder = root or recipes.root()
    files: dict[str, Path] = {}
    # A worklist instead of recursion, because modules import each other.
    todo = [*FILES.values()]  # packing.py sends these files too
    todo += [f"tests/host/{path.name}" for path in folder.glob("tests/host/*.py")]
    todo += ["gpukiln/probe/gather.py", "gpukiln/verify/plugin.py"]
    while todo:
        name = todo.pop()
        if name in files or name in PRESENTATION_FILES:
            continue
        path = recipes.file(name, folder)
        files[name] = path
        if path.suffix == ".py":
            needed = _imported_files(path.read_text(encoding="utf-8"))
            todo += [needed_path for needed_path in needed if recipes.file(needed_path, folder).exists()]
    return dict(sorted(files.items()))


@cache
def _imported_files(source: str) -> tuple[str, ...]:
    """Modules of gpukiln that a module imports, and data files that it reads with `data(NAME)`."""
    names: list[str] = []
    files: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        # gpukiln.catalog.load.data(NAME) reads catalog/data/NAME.yaml.
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "data":
            texts = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
            files += [f"gpukiln/catalog/data/{name}.yaml" for name in texts]
    files += [f"{name.replace('.', '/')}.py" for name in names if name.startswith("gpukiln.")]
    return tuple(files)
