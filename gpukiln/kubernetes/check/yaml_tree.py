"""YAML and JSON as plain data that knows its lines, and reports repeated keys."""

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
        repeated: Line and key of each key that a mapping has twice; `value` has the last.
        text: Of this document; nodes are composed again from it, because lines are rarely needed.
        above: Number of lines before it in the file.
    """

    value: Any
    repeated: tuple[tuple[int, str], ...]
    text: str = field(compare=False, repr=False)
    above: int = field(compare=False, repr=False)

    @cached_property
    def _keys(self) -> dict[int, dict[str, _Place]]:
        return {}  # id of a mapping node -> its keys

    @cached_property
    def _node(self) -> yaml.Node:
        node: yaml.Node = _nodes(self.text)
        return node

    def line_of(self, path: Path) -> int:
        """The line of a path's key, or of its nearest existing parent."""
        line = self._node.start_mark.line
        for mark, _ in self._steps(path):
            line = mark.line
        return self.above + line + 1

    def written(self, path: Path) -> str:
        """The text of the scalar at a path in the file; empty if there is none."""
        *_, (_, node) = ((None, self._node), *self._steps(path))
        return str(node.value) if isinstance(node, yaml.ScalarNode) else ""

    def _steps(self, path: Path) -> Iterator[_Place]:
        """Mark and node of each step of a path, as far as it exists."""
        node = self._node
        for step in path:
            if (place := self._below(node, step)) is None:
                return
            yield place
            node = place[1]

    def _below(self, node: yaml.Node, step: str | int) -> _Place | None:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            return node.value[step].start_mark, node.value[step]
        if not isinstance(node, yaml.MappingNode):
            return None
        if (
            known := self._keys.get(id(node))
        ) is None:  # cached: large mappings are searched thousands of times
            pairs = ((key, value) for key, value in node.value if key.tag != scalars.MERGE)
            known = {scalars.key(key): (key.start_mark, value) for key, value in pairs}
            self._keys[id(node)] = known
        if (place := known.get(str(step))) is not None:
            return place
        merged = (self._below(value, step) for key, value in node.value if key.tag == scalars.MERGE)
        return next((place for place in merged if place is not None), None)


def documents(text: str, above: int = 0) -> Iterator[Document | BrokenError]:
    """The documents of a stream, each parsed on its own, so that those after a broken one are read.

    >>> [document.value for document in documents("{a: 1, b: on, c: 1e-4}")]
    [{'a': 1, 'b': True, 'c': 0.0001}]

    Args:
        text: YAML or JSON; empty documents are skipped.
        above: Number of lines before the text in the file.
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
            if (document := _document(part, lines)) is not None:
                yield document
        except BrokenError as broken:
            yield broken


def _document(text: str, above: int) -> Document | None:
    if text.lstrip().startswith(("{", "[")):
        text = text.replace("\t", " ")  # JSON allows tabs for indentation, YAML does not
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
    return None if value is None else Document(value, tuple(reader.repeated), text, above)


def _nodes(text: str) -> Any:
    loader = scalars.Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


class _NodeReader:
    """Converts nodes to plain data; an alias is the same object, and counts for the size at each use."""

    def __init__(self, above: int) -> None:
        self.above = above
        self.repeated: list[tuple[int, str]] = []
        self._known: dict[int, tuple[Any, int]] = {}
        self._open: set[int] = set()

    def read(self, node: yaml.Node, level: int) -> tuple[Any, int]:
        """The value of a node, and how many values it is made of."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, scalars.value), 1
        if (known := self._known.get(id(node))) is not None:
            return known
        if id(node) in self._open or level > MAX_DEPTH:  # aliases can nest deeper than the text
            raise BrokenError("an alias that contains itself, or too many levels", self._line(node))
        # Nodes that are being read: an alias to one of them would never end.
        self._open.add(id(node))
        data, size = (
            self._mapping(node, level) if isinstance(node, yaml.MappingNode) else self._list(node, level)
        )
        self._open.discard(id(node))
        self._known[id(node)] = data, size
        return data, size

    def _list(self, node: yaml.Node, level: int) -> tuple[list[Any], int]:
        parts = [self.read(item, level + 1) for item in node.value]
        return [value for value, _ in parts], 1 + sum(size for _, size in parts)

    def _mapping(self, node: yaml.Node, level: int) -> tuple[dict[str, Any], int]:
        data: dict[str, Any] = {}
        written: set[str] = set()
        size = 1
        for key_node, value_node in node.value:
            value, count = self.read(value_node, level + 1)
            size += count
            if size > MAX_VALUES:
                text = f"more than {MAX_VALUES:,} values after its aliases are expanded"
                raise BrokenError(text, self._line(key_node))
            if key_node.tag == scalars.MERGE:
                # go.yaml.in/yaml/v2, decode.go: a merge overrides earlier keys, and the first mapping of a
                # list wins
                for source in reversed(value) if isinstance(value, list) else [value]:
                    if not isinstance(source, dict):
                        raise BrokenError("`<<` takes a mapping or a list of mappings", self._line(key_node))
                    data.update(source)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise BrokenError("a key that is not a text", self._line(key_node))
            key = self._scalar(key_node, scalars.key)
            if key in written:
                self.repeated.append((self._line(key_node), key))
            written.add(key)
            data[key] = value
        return data, size

    def _scalar(self, node: yaml.ScalarNode, read: Callable[[yaml.ScalarNode], Any]) -> Any:
        try:
            return read(node)
        except ValueError as error:
            raise BrokenError(str(error), self._line(node)) from None

    def _line(self, node: yaml.Node) -> int:
        return self.above + int(node.start_mark.line) + 1
