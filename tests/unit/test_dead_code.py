"""What nobody uses, and explanations of what is gone."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT

FOLDERS = ("gpukiln", "ansible", "roles", "bench", "tests")
PROGRAMS = ("gpukiln", "ansible", "roles", "bench", "molecule", "tests/host", "tests/doubles")
PLUGINS = ("gpukiln/verify/plugin.py", "gpukiln/verify/buildah_backend.py")  # called by their names


@pytest.fixture(scope="module")
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """300 MiB, which would slow down each fork of later tests if they stayed."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in files)


def blocks(module: ast.Module) -> Iterator[ast.AST]:
    """The module, and every statement in it; expressions, most of a tree, have no blocks."""
    todo: list[ast.AST] = [module]
    while todo:
        yield (node := todo.pop())
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            todo += inner if isinstance(inner, list) else []


def stray_texts(module: ast.Module) -> list[int]:
    """Lines of texts that explain nothing: neither first in a body nor below an assignment."""
    found = []
    for node in blocks(module):
        body = getattr(node, "body", None)
        for number, line in enumerate(body if isinstance(body, list) else ()):
            is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
            before = body[number - 1] if number else None
            if (
                is_text
                and line.value.value is not ...
                and not isinstance(before, ast.Assign | ast.AnnAssign | None)
            ):
                found.append(line.lineno)
    return found


def test_every_text_explains_what_stands_above_it(modules: tuple[tuple[str, ast.Module], ...]) -> None:
    assert stray_texts(ast.parse("import a\n'b'\n")) == [2]
    assert stray_texts(ast.parse("'a'\nb = 1\n'b'\n")) == []
    nested = "def f():\n    try:\n        pass\n    except E:\n        import a\n        'b'\n"
    assert stray_texts(ast.parse(nested)) == [6]
    assert [f"{name}:{line}" for name, module in modules for line in stray_texts(module)] == []


def names_used(path: Path) -> Counter[str]:
    return Counter(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def unused(used: Counter[str], module: ast.Module) -> list[str]:
    """Functions and classes whose name stands nowhere else; a decorator may register one."""
    return [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.decorator_list
        and used[node.name] < 2
    ]


@pytest.fixture(scope="module")
def used() -> Counter[str]:
    """How often each word stands in the programs; what only tests of programs mention is used by nobody."""
    files = [path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py")]
    return sum((names_used(path) for path in [*files, ROOT / "tasks.py", ROOT / "pyproject.toml"]), Counter())


def steps(module: str) -> set[str]:
    """The functions that the action `decide` calls by the steps that a role's tasks name."""
    texts = [file.read_text() for file in (ROOT / module).parent.glob("tasks/*.yml")]
    named = {name for text in texts for name in re.findall(r'\n +step: "?(\w+)', text)}
    return {f"{verb}_{name}" for verb in ("look", "decide") for name in named}


def test_nothing_is_there_for_its_test_only(
    used: Counter[str], modules: tuple[tuple[str, ast.Module], ...]
) -> None:
    assert unused(Counter(f=1, g=2), ast.parse("def f(): pass\ndef g(): pass\n@a\ndef h(): pass\n")) == ["f"]
    found = [
        f"{name}: {function}"
        for name, module in modules
        if name.startswith(("gpukiln/", "roles/", "bench/")) and name not in PLUGINS
        for function in unused(used, module)
        if function not in ("FilterModule", "LookupModule")  # Ansible's names
        and function not in steps(name)
    ]
    assert found == []
