"""Whether the machine that a workspace has is the one that is asked for now."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds.base import Cloud
from gpukiln.errors import IncompatibleError, RefusedError
from gpukiln.offers.cost import HOURS
from gpukiln.offers.select import lacks_of
from gpukiln.typed import dump
from gpukiln.units import Span
from gpukiln.workspaces.contract import ComputeProfile, Workspace
from gpukiln.workspaces.lifecycle import Found, Machine, only
from gpukiln.workspaces.plan import Limits, request_of, require_size, wants_gpus

TAG_CHARACTERS = 256  # EC2's limit of a value
MARK_CHARACTERS = 4
CUT = "..."
SHOWN_CHARACTERS = 120  # of a value in a message
# What EC2 says of a machine itself, or what may differ: a home grows.
BY_MACHINE = {
    "workspace_name",
    "owner",
    "region",
    "compute_profile",
    "image_id",
    "instance_types",
    "spot",
}


def marks(wanted: Workspace, roles: str) -> str:
    """The machine's tag that says by which options it was started: the name and a hash of each, no values.

    A field at its default has no entry. What does not fit is left out, and the end says so.
    """
    entries = [f"{name}={_mark(value)}" for name, value in _chosen(wanted, roles).items()]
    if len(" ".join(entries)) <= TAG_CHARACTERS:
        return " ".join(entries)
    while len(" ".join([*entries, CUT])) > TAG_CHARACTERS:
        entries.pop()
    return " ".join([*entries, CUT])


def require_same(
    cloud: Cloud, wanted: Workspace, found: Found, *, simulated: bool, roles: str, limits: Limits
) -> None:
    """Refuse where the machine of a workspace is not what is asked for now.

    What is not named asks for nothing: a field at its default is satisfied by every machine.

    Raises:
        RefusedError: Something differs; the details name all of it.
    """
    machine = only(found)
    rows = [
        *_machine_rows(cloud, wanted, machine),
        *_market_rows(wanted, machine, limits),
        *_marked_rows(wanted, roles, machine),
    ]
    if simulated and not machine.simulated:
        rows.append("it has no simulated GPUs, wanted --simulated")
    if rows:
        raise RefusedError(
            f"{found.name} has a machine already, {machine.instance_id} ({machine.instance_type}), and it "
            "differs from what is asked for",
            details=tuple(rows),
            hint=f"`invoke workspace.down {found.name} --keep-home` ends it, and the same command starts "
            "another with its home; or leave out what differs",
        )


def _machine_rows(cloud: Cloud, wanted: Workspace, machine: Machine) -> Iterator[str]:
    profile, name = wanted.compute_profile, machine.instance_type
    type_ = instance_types().get(name)
    gpus = wants_gpus(wanted)
    if wanted.instance_types and name not in wanted.instance_types:
        yield f"it is a {name}, wanted {' or '.join(wanted.instance_types)}"
    if type_ and gpus:
        request = replace(request_of(wanted), arch="any", spot="no")
        if not profile.gpu_type and profile.gpu_count == ComputeProfile().gpu_count:
            request = replace(request, count=Span(1), fractions=True)
        yield from lacks_of(request, name)
    elif type_ and not machine.lacks_gpus:
        yield f"it has {type_.gpus} {gpu(type_.gpu).name}, wanted none"
    elif gpus and (profile.gpu_type or profile.gpu_count != ComputeProfile().gpu_count):
        yield f"it has no GPU, wanted {profile.gpu_count} {profile.gpu_type}".rstrip()
    if not type_ and (profile.cpu or profile.memory):
        try:
            require_size(cloud, wanted, name)
        except IncompatibleError as error:
            yield error.message
    if wanted.image_id and wanted.image_id != machine.image_id:
        yield f"its image is {machine.image_id}, wanted {wanted.image_id}"


def _market_rows(wanted: Workspace, machine: Machine, limits: Limits) -> Iterator[str]:
    if wanted.spot and not machine.spot:
        yield "it is on demand, wanted spot"
    if limits == Limits():
        return
    if not machine.usd_hour:
        yield "its price is not known, wanted at most what --max-price and --budget say"
        return
    hour = Decimal(machine.usd_hour)
    if limits.hour is not None and hour > limits.hour:
        yield f"it costs {hour} USD/hour, wanted at most {limits.hour}"
    if limits.month is not None and hour * HOURS > limits.month:
        yield f"its machine alone costs {hour * HOURS:.2f} USD a month, wanted at most {limits.month}"


def _marked_rows(wanted: Workspace, roles: str, machine: Machine) -> Iterator[str]:
    if machine.asked is None:  # an earlier version started it, or Terraform
        return
    entries = dict(one.split("=", 1) for one in machine.asked.split() if "=" in one)
    cut = machine.asked.endswith(CUT)
    for name, value in _chosen(wanted, roles).items():
        if (name not in entries and cut) or name == "gpu_support":
            continue
        if entries.get(name) != _mark(value):
            how = "with another one" if name in entries else "without"
            yield f"{name}: it was started {how}, wanted {_words(value)}"


def _chosen(wanted: Workspace, roles: str) -> dict[str, Any]:
    """What was asked for and is no default, by the field's name."""
    plain = Workspace(wanted.workspace_name, wanted.owner, wanted.region)
    fields, defaults = _flat(wanted), _flat(plain)
    found = {name: value for name, value in fields.items() if value != defaults[name]}
    return {**found, **({"roles": roles} if roles else {})}


def _flat(wanted: Workspace) -> dict[str, Any]:
    document = dump(wanted)
    fields = {**document, **document.pop("capabilities"), "gpu_support": wants_gpus(wanted)}
    return {name: value for name, value in fields.items() if name not in {*BY_MACHINE, "capabilities"}}


def _mark(value: Any) -> str:
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return base64.urlsafe_b64encode(digest).decode()[:MARK_CHARACTERS]


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= SHOWN_CHARACTERS and value.isprintable() else "another text"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value)
