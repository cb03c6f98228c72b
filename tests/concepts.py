"""Counts what gpukiln/ should implement once: `python -m tests.concepts` prints a table.

A row is a bar: what is counted, and how many there may be. It is counted in the syntax tree, so that words in
comments and docstrings are none. tests/unit/test_concepts.py asserts every bar.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Sent to machines, where gpukiln.programs is not; and the embedded cloud, whose machines are its processes.
WITHOUT_PROGRAMS = (
    "probe/",
    "gpus/",
    "workspaces/agent.py",
    "kubernetes/addons/health_agent.py",
    "clouds/embedded/",
)
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
WORDS = {"error", "warning", "info", "passed", "failed", "not_run", "not_reached"}


@dataclass(frozen=True)
class Module:
    """A file of the package; its path is from the package's folder."""

    path: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    def walk(self) -> Iterator[ast.AST]:
        return iter(self.nodes)

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Each call, and its dotted name: `subprocess.run`, `ec2.describe_images`."""
        for node in self.walk():
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node


def modules(root: Path) -> list[Module]:
    package = root / "gpukiln"
    return [
        Module(path.relative_to(package).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(package.rglob("*.py"))
    ]


def constants(node: ast.AST) -> list[str]:
    return [
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


def class_names_twice(package: list[Module]) -> Iterator[str]:
    places = defaultdict(list)
    for module in package:
        for node in module.walk():
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node))
    yield from (f"{name}: {' '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1)


def describe_images(package: list[Module]) -> Iterator[str]:
    for module in package:
        for name, call in module.calls():
            named = [one.value for one in call.args if isinstance(one, ast.Constant)]
            if name.endswith(".describe_images") or "describe_images" in named:
                yield module.at(call)


def ec2_wait_loops(package: list[Module]) -> Iterator[str]:
    """Loops that sleep, in functions that ask EC2: by a client, or by a condition of their caller's."""
    for module in package:
        if module.path.startswith(WITHOUT_PROGRAMS):
            continue
        for function in (node for node in module.walk() if isinstance(node, FUNCTIONS)):
            text = ast.unparse(function)
            asks = re.search(r"\.describe_|\bcondition\(\)|\bec2\.|\b(?:instance|image)\(cloud", text)
            for loop in (node for node in ast.walk(function) if isinstance(node, ast.While | ast.For)):
                calls = (ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call))
                if asks and any(re.fullmatch(r"(?:.*\.)?_?(?:sleep|pause)", name) for name in calls):
                    yield module.at(loop)


def ssh_command_lines(package: list[Module]) -> Iterator[str]:
    """Lists and tuples of words whose first is ssh, with an option or something that is put in."""
    for module in package:
        for node in module.walk():
            if isinstance(node, ast.List | ast.Tuple) and node.elts:
                first, *others = node.elts
                options = [
                    one for one in others if not isinstance(one, ast.Constant) or str(one.value)[:1] == "-"
                ]
                if isinstance(first, ast.Constant) and first.value == "ssh" and options:
                    yield module.at(node)


def patterns(module: Module) -> Iterator[tuple[ast.AST, re.Pattern[str]]]:
    """The regular expressions in a module; what an f-string puts in is taken for a number."""
    inside = {id(part) for node in module.walk() if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in module.walk():
        if isinstance(node, ast.JoinedStr):
            parts = (str(one.value) if isinstance(one, ast.Constant) else "[0-9]+" for one in node.values)
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if len(text) < 400 and re.search(r"[\[(\\]", text):
            try:
                with warnings.catch_warnings(action="ignore"):  # of texts that are no regular expressions
                    yield node, re.compile(text)
            except (re.error, OverflowError):
                continue


def parsers(
    package: list[Module], units: set[str], good: tuple[str, ...], bad: tuple[str, ...]
) -> Iterator[str]:
    """Modules that read a number with a unit: they have a regular expression for it, and the units' values.

    Kubernetes' own forms are its own: quantities, and Go's durations in CEL.
    """
    for module in package:
        tables = (node for node in module.walk() if isinstance(node, ast.Dict))
        keys = [{one.value for one in table.keys if isinstance(one, ast.Constant)} for table in tables]
        if module.path.startswith("kubernetes/") or not any(len(units & one) > 2 for one in keys):
            continue
        for node, pattern in patterns(module):
            matched = (pattern.fullmatch(one) for one in bad)
            if all(pattern.fullmatch(one) for one in good) and not any(matched):
                yield module.at(node)
                break


def size_parsers(package: list[Module]) -> Iterator[str]:
    yield from parsers(
        package, {"K", "M", "G", "Ki", "Mi", "Gi", "KiB", "MiB", "GiB"}, ("24Gi", "512Mi"), ("1abc", "Gi")
    )


def duration_parsers(package: list[Module]) -> Iterator[str]:
    yield from parsers(package, {"s", "m", "h", "d", "w"}, ("90s", "10m", "2h"), ("90x", "s", "1abc"))


def program_runners(package: list[Module]) -> Iterator[str]:
    for module in package:
        if not module.path.startswith(WITHOUT_PROGRAMS):
            for name, call in module.calls():
                if re.fullmatch(r"subprocess\.(?:run|Popen|call|check_call|check_output|getoutput)", name):
                    yield module.at(call)


def finding_classes(package: list[Module]) -> Iterator[str]:
    for module in package:
        for node in module.walk():
            if isinstance(node, ast.ClassDef) and node.name == "Finding":
                yield module.at(node)


def junit_writers(package: list[Module]) -> Iterator[str]:
    """Calls that make the root element of JUnit's XML."""
    for module in package:
        for _, call in module.calls():
            if any(isinstance(one, ast.Constant) and one.value == "testsuites" for one in call.args):
                yield module.at(call)


def vocabularies(package: list[Module]) -> Iterator[str]:
    """Modules that define severities or outcomes: a Literal or an Enum of nothing but such words."""
    for module in package:
        for node in module.walk():
            words: list[str] = []
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
                words = constants(node.slice)
            elif isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
                words = [
                    text for one in node.body if isinstance(one, ast.Assign) for text in constants(one.value)
                ]
            if len(words) > 1 and set(words) <= WORDS:
                yield module.path
                break


@dataclass(frozen=True)
class Bar:
    """What is counted, and how many there may be at most."""

    name: str
    most: int
    find: Callable[[list[Module]], Iterator[str]]


BARS = (
    Bar("class names that exist twice", 0, class_names_twice),
    Bar("call sites of DescribeImages", 5, describe_images),
    Bar("wait loops of EC2", 1, ec2_wait_loops),
    Bar("builders of ssh's command line", 1, ssh_command_lines),
    Bar("parsers of sizes", 1, size_parsers),
    Bar("parsers of durations", 1, duration_parsers),
    Bar("runners of programs", 4, program_runners),
    Bar("classes of findings", 1, finding_classes),
    Bar("writers of JUnit", 1, junit_writers),
    Bar("vocabularies of severities and outcomes", 1, vocabularies),
)


def main(root: Path = ROOT) -> int:
    """Print what is counted; the status is 1 where a bar is broken."""
    package, broken = modules(root), False
    for bar in BARS:
        found = list(bar.find(package))
        broken |= len(found) > bar.most
        print(f"{bar.name:42}{len(found):4} of {bar.most}")
        if len(found) > bar.most:
            print(*(f"    {one}" for one in found), sep="\n")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
