"""Manifests as text: a YAML stream that keeps the order of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from gpukiln.kubernetes import scalars
from gpukiln.kubernetes.check.yaml_tree import BrokenError, documents

Manifest = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Keeps the order of keys, indents lists below their key, and writes texts of many lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 - PyYAML's
        super().increase_indent(flow, indentless=False)

    # Anchors and aliases are hard to read, and users edit these files.
    def ignore_aliases(self, _: Any) -> bool:
        return True

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """The tag of a plain scalar; a text that some reader takes for a number or a bool gets quotes."""
        tag = str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
        ambiguous = tag == scalars.TEXT and kind is yaml.ScalarNode and implicit[0]
        return scalars.PLAIN if ambiguous and not scalars.is_text(value) else tag


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(*objects: Mapping[str, Any], head: Iterable[str] = ()) -> str:
    """Objects as one YAML stream.

    Args:
        head: Lines of a comment at the top.
    """
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return comment + yaml.dump_all(
        # `---` at the start: files can be concatenated.
        objects,
        Dumper=_Dumper,
        sort_keys=False,
        explicit_start=True,
        width=110,
        allow_unicode=True,
    )


def load(text: str) -> list[Manifest]:
    """The objects of a YAML or JSON stream, as kubectl reads them; empty documents are skipped.

    Raises:
        BrokenError: A document can't be read.
    """
    manifests = []
    for document in documents(text):
        if isinstance(document, BrokenError):
            raise document
        manifests.append(document.value)
    return manifests
