"""Every command that a message names is one that can be typed."""

import ast
import itertools
import re
from collections.abc import Iterator

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.cli.main import command, names
from gpukiln.errors import UsageError
from gpukiln.options import options_of, read

HINT = re.compile(r"`invoke ([^`]*)`")
VALUE = "\0"  # stands for what a message fills in


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a module with their lines."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(one.value) if isinstance(one, ast.Constant) else VALUE for one in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


def hints(source: str) -> list[tuple[int, str]]:
    return [(line, hint) for line, text in texts(ast.parse(source)) for hint in HINT.findall(text)]


def is_accepted(hint: str) -> bool:
    """Whether the parser takes a command, with one word or nothing for each value that a message fills in."""
    if hint in (*names(), "gpu.VERB", "COMMAND -h"):  # it is only named
        return True
    pieces = hint.split(VALUE)
    for fill in itertools.product(("x", ""), repeat=len(pieces) - 1):
        line = "".join(itertools.chain.from_iterable(itertools.zip_longest(pieces, fill, fillvalue="")))
        words = line.replace("...", "x").split()
        if words[0] in ("--list", "--help"):
            return True
        try:
            if words[0] in names():
                read(f"invoke {words[0]}", options_of(command(words[0])), words[1:])
                return True
        except UsageError:
            continue
    return False


FILES = sorted((ROOT / "gpukiln").rglob("*.py"))


def test_every_command_that_a_message_names_can_be_typed() -> None:
    found = [(file, line, hint) for file in FILES for line, hint in hints(file.read_text())]
    assert len(found) > 100
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {hint}" for file, line, hint in found if not is_accepted(hint)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "hint", ["workspace.upp", "workspace.up --zone x", "workspace.down a b", "ami.prune -x"]
)
def test_a_command_that_can_not_be_typed_is_found(hint: str) -> None:
    assert not is_accepted(hint)
    assert hints(f'raise E(f"`invoke {hint}` helps {{a}}")') == [(1, hint)]
