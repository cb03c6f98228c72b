"""YAML and JSON as plain data that knows its lines, and tells keys that stand twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml

from gpukiln.kubernetes import scalars
from gpukiln.kubernetes.check.workload import Path
from gpukiln.parsing import MAX_DEPTH, MAX_VALUES, LimitError, check_yaml

_Place = tuple[yaml.Mark, yaml.Node]
_SPLIT = re.compile(r"^---(?=\s|$)", re.MULTILINE)


class BrokenError(Exception):
    """A document that can't be read.

    Args:
        text: Why.
        line: Where in the file, from 1.
    """

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.text, self.line = text, line


@dataclass(frozen=True)
class Document:
    """One document of a stream.

    Args:
        value: Plain data, as the API server reads it (scalars.py).
        twice: Line and key of each key that stands twice in one mapping; the last one counted.
        text: Of the document alone; its nodes, of which few are ever asked for a line, are not kept.
        above: How many lines of the file stand above it.
    """

    value: Any
    twice: tuple[tuple[int, str], ...]
    text: str = field(compare=False, repr=False)
    above: int = field(compare=False, repr=False)

    @cached_property
    def _keys(self) -> dict[int, dict[str, _Place]]:
        return {}  # of each mapping whose keys were asked for, by its node

    @cached_property
    def _node(self) -> yaml.Node:
        node: yaml.Node = _nodes(self.text)
        return node

    def line_of(self, path: Path) -> int:
        """The line of a path's key, or of the nearest one above it that is there."""
        line = self._node.start_mark.line
        for mark, _ in self._way(path):
            line = mark.line
        return self.above + line + 1

    def written(self, path: Path) -> str:
        """The text of a scalar as it stands in the file; empty where there is none at the path."""
        *_, (_, node) = ((None, self._node), *self._way(path))
        return str(node.value) if isinstance(node, yaml.ScalarNode) else ""

    def _way(self, path: Path) -> Iterator[_Place]:
        """What stands at each step of a path, as far as it goes."""
        node = self._node
        for step in path:
            if (found := self._below(node, step)) is None:
                return
            yield found
            node = found[1]

    def _below(self, node: yaml.Node, step: str | int) -> _Place | None:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            return node.value[step].start_mark, node.value[step]
        if not isinstance(node, yaml.MappingNode):
            return None
        if (known := self._keys.get(id(node))) is None:  # lines are asked for by thousands in one mapping
            pairs = ((key, value) for key, value in node.value if key.tag != scalars.MERGE)
            known = {scalars.key(key): (key.start_mark, value) for key, value in pairs}
            self._keys[id(node)] = known
        if (found := known.get(str(step))) is not None:
            return found
        merged = (self._below(value, step) for key, value in node.value if key.tag == scalars.MERGE)
        return next((one for one in merged if one is not None), None)


def documents(text: str, above: int = 0) -> Iterator[Document | BrokenError]:
    """The documents of a stream, each read on its own: what follows a broken one is read.

    Args:
        text: YAML or JSON; empty documents are left out.
        above: How many lines of the file stand above the text.
    """
    starts = [0, *(match.start() for match in _SPLIT.finditer(text))]
    lines, counted = above, 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        part = text[start:end]
        if part.strip() in ("", "---"):
            continue
        lines += text.count("\n", counted, start)
        counted = start
        try:
            if (one := _document(part, lines)) is not None:
                yield one
        except BrokenError as broken:
            yield broken


def _document(text: str, above: int) -> Document | None:
    if text.lstrip().startswith(("{", "[")):
        text = text.replace("\t", " ")  # JSON may be indented by them, and YAML not
    try:
        check_yaml(text)
        node = _nodes(text)
    except LimitError as error:
        raise BrokenError(str(error), above + 1) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = above + (mark.line + 1 if mark else 1)
        kind = "" if isinstance(error, yaml.constructor.ConstructorError) else "no YAML: "
        raise BrokenError(f"{kind}{error.problem or error.context}", line) from None
    except yaml.YAMLError as error:
        raise BrokenError(f"no YAML: {' '.join(str(error).split())}", above + 1) from None
    if node is None:
        return None
    reader = _NodeReader(above)
    value, _ = reader.read(node, 0)
    return None if value is None else Document(value, tuple(reader.twice), text, above)


def _nodes(text: str) -> Any:
    loader = scalars.Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


class _NodeReader:
    """Makes plain data of nodes; an alias is the same object again, and counts as often as it stands."""

    def __init__(self, above: int) -> None:
        self.above = above
        self.twice: list[tuple[int, str]] = []
        self._known: dict[int, tuple[Any, int]] = {}
        self._open: set[int] = set()

    def read(self, node: yaml.Node, level: int) -> tuple[Any, int]:
        """The value of a node, and how many values it is made of."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, scalars.value), 1
        if (known := self._known.get(id(node))) is not None:
            return known
        if id(node) in self._open or level > MAX_DEPTH:  # aliases may add levels
            raise BrokenError("an alias within itself, or too many levels", self._line(node))
        self._open.add(id(node))
        made, size = (
            self._mapping(node, level) if isinstance(node, yaml.MappingNode) else self._list(node, level)
        )
        self._open.discard(id(node))
        self._known[id(node)] = made, size
        return made, size

    def _list(self, node: yaml.Node, level: int) -> tuple[list[Any], int]:
        parts = [self.read(one, level + 1) for one in node.value]
        return [value for value, _ in parts], 1 + sum(size for _, size in parts)

    def _mapping(self, node: yaml.Node, level: int) -> tuple[dict[str, Any], int]:
        made: dict[str, Any] = {}
        written: set[str] = set()
        size = 1
        for key_node, value_node in node.value:
            value, count = self.read(value_node, level + 1)
            size += count
            if size > MAX_VALUES:
                text = f"more than {MAX_VALUES:,} values once its aliases are written out"
                raise BrokenError(text, self._line(key_node))
            if key_node.tag == scalars.MERGE:
                # go.yaml.in/yaml/v2, decode.go: it replaces keys above it, and the first of a list wins
                for one in reversed(value) if isinstance(value, list) else [value]:
                    if not isinstance(one, dict):
                        raise BrokenError("`<<` takes a mapping or a list of mappings", self._line(key_node))
                    made.update(one)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise BrokenError("a key that is no text", self._line(key_node))
            key = self._scalar(key_node, scalars.key)
            if key in written:
                self.twice.append((self._line(key_node), key))
            written.add(key)
            made[key] = value
        return made, size

    def _scalar(self, node: yaml.ScalarNode, read: Callable[[yaml.ScalarNode], Any]) -> Any:
        try:
            return read(node)
        except ValueError as error:
            raise BrokenError(str(error), self._line(node)) from None

    def _line(self, node: yaml.Node) -> int:
        return self.above + int(node.start_mark.line) + 1
