"""What somebody typed, as the contract: a file, changed by options, changed by single fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from gpukiln.errors import UsageError
from gpukiln.offers.request import parse
from gpukiln.parsing import parse_yaml
from gpukiln.workspaces import read
from gpukiln.workspaces.contract import Workspace

COUNT = re.compile(r"\d{1,3}")


def wanted(
    document: Mapping[str, Any], options: Mapping[str, Any], gpu: str, fields: Iterable[str]
) -> Workspace:
    """The contract.

    Args:
        document: Of a file; empty: there is none.
        options: Fields by their path with dots, for example compute_profile.cpu.
        gpu: As `offer.list --gpu` takes it; empty: as the file says.
        fields: FIELD=YAML.

    Raises:
        UsageError: Something of it does not fit; says what, and what is wanted.
    """
    whole: dict[str, Any] = _copy(document)
    for path, value in (*options.items(), *_gpu(gpu).items(), *map(_field, fields)):
        _put(whole, path, value)
    missing = [name for name in ("workspace_name", "owner", "region") if not whole.get(name)]
    if missing:
        option = {"workspace_name": "--name", "owner": "--owner", "region": "--region"}[missing[0]]
        raise UsageError(f"{option} is missing", hint=f"for example {option} {EXAMPLES[missing[0]]}")
    return read.parse(whole, where="the workspace")


EXAMPLES = {"workspace_name": "vision", "owner": "ann", "region": "us-west-2"}


def _gpu(text: str) -> dict[str, Any]:
    """GPU and count apart: a workspace has so many GPUs and no other number."""
    if not text:
        return {}
    found = parse(text) if text != "0" else None
    if found and found.count.low != found.count.high:
        raise UsageError(f"--gpu {text}: {found.count} GPUs, wanted one number", hint="for example T4:1")
    kind = ":".join(part for part in text.split(":") if not COUNT.fullmatch(part.strip()))
    return {
        "compute_profile.gpu_type": kind,
        "compute_profile.gpu_count": found.count.low if found else 0,
        **({} if found else {"capabilities.gpu_support": False}),
    }


def _field(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", path.strip()):
        raise UsageError(f"--set {text!r}, wanted FIELD=YAML", hint="capabilities.network_egress=none")
    try:
        return path.strip(), parse_yaml(value)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--set {path}: {value!r} is no YAML: {error}", hint="quote it") from None


def _put(whole: dict[str, Any], path: str, value: Any) -> None:
    *folders, last = path.split(".")
    at = whole
    for name in folders:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise UsageError(f"--set {path}: {name} has no fields")
    at[last] = value


def _copy(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in document.items()}
