"""Which tests a change affects, the nearest first: `scripts/run pytest --changed` runs these first.

A test file is as far from a change as the shortest chain of imports between them. grimp, on which
import-linter is built, has the imports of the package; those of the tests are read here, because tests are no
package.
"""

from __future__ import annotations

import ast
import subprocess
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
MENTIONED = 3  # as far as a test that reaches a changed module by two others in between


def changed_files(revision: str, root: Path = ROOT) -> list[str]:
    """Files that differ from a revision, those that are not committed and new ones too.

    Args:
        revision: What git knows. Empty: HEAD, or its parent where nothing is changed since HEAD.

    Raises:
        ValueError: git does not know the revision.
    """

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"--changed {revision}: {done.stderr.strip()}")
        return done.stdout.splitlines()

    new = git("ls-files", "--others", "--exclude-standard")
    files = [*git("diff", "--name-only", revision or "HEAD", "--"), *new]
    return files or ([] if revision else git("diff", "--name-only", "HEAD~1", "--"))


def module_of(path: str) -> str:
    """Name of the module that a file is, by its path in the checkout.

    >>> module_of("gpukiln/offers/__init__.py")
    'gpukiln.offers'
    >>> module_of("tests/support/harness.py")
    'tests.support.harness'
    """
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(source: str) -> set[str]:
    """Every module that a source may import: `from a import b` is of a and of a.b.

    >>> sorted(imports_of("from gpukiln.offers import select"))
    ['gpukiln.offers', 'gpukiln.offers.select']
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def importers(root: Path = ROOT) -> dict[str, set[str]]:
    """Who imports a module, by the module's name: modules of the package and files of the tests."""
    graph = grimp.build_graph("gpukiln", cache_dir=None)
    by_module = {module: set(graph.find_modules_that_directly_import(module)) for module in graph.modules}
    for file in sorted((root / "tests").rglob("*.py")):
        name = module_of(file.relative_to(root).as_posix())
        for imported in imports_of(file.read_text(encoding="utf-8")):
            by_module.setdefault(imported, set()).add(name)
    return by_module


def distances(changed: Iterable[str], by_module: Mapping[str, set[str]]) -> dict[str, int]:
    """How many imports lie between a change and each module that it affects; 0: it is changed itself.

    >>> distances(["gpukiln/a.py"], {"gpukiln.a": {"gpukiln.b"}, "gpukiln.b": {"tests.unit.test_b"}})
    {'gpukiln.a': 0, 'gpukiln.b': 1, 'tests.unit.test_b': 2}
    """
    reached = {module_of(path): 0 for path in changed if path.endswith(".py")}
    queue = deque(reached)
    while queue:
        module = queue.popleft()
        for importer in sorted(by_module.get(module, ())):
            if importer not in reached:
                reached[importer] = reached[module] + 1
                queue.append(importer)
    return reached


def affected(revision: str, root: Path = ROOT) -> dict[Path, int]:
    """Test files by their distance from what changed since a revision.

    A file that is no Python counts for the tests that mention its name.
    """
    changed = changed_files(revision, root)
    near = distances(changed, importers(root))
    others = {Path(path).name for path in changed if not path.endswith(".py")}
    result: dict[Path, int] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        module = module_of(file.relative_to(root).as_posix())
        if module in near:
            result[file] = near[module]
        elif others and any(name in file.read_text(encoding="utf-8") for name in others):
            result[file] = MENTIONED
    return result
