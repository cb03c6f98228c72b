"""Examples in docstrings are run: what a parser or a selector is documented to return, it returns."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for root in ("gpukiln", "tests")
    for path in sorted((ROOT / root).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8") and path != Path(__file__)
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings_return_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed


def test_a_wrong_example_is_a_failure() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(example, out=lambda _: None)
    assert runner.failures == 1
