"""The verb reset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.gpus import reset
from gpukiln.gpus.lease_overlay import snapshot
from gpukiln.gpus.leases import check_usable
from gpukiln.gpus.model import Device, Snapshot
from gpukiln.gpus.reset import Blocker
from gpukiln.gpus.verb import Options, Verb
from gpukiln.gpus.verbs.devices import select_devices
from gpukiln.options import Option
from gpukiln.probe.base import bus_gpus
from gpukiln.probe.gpus import pci_state

CHECK_FAILED, REFUSED = 1, 6


@dataclass(frozen=True)
class ResetReport:
    """A reset, or what it would be.

    Args:
        devices: UUIDs of the GPUs.
        recovery_actions: What the driver itself asks for, by UUID; null where it does not tell.
        blockers: Everything that is in the way.
        notes: What else is to be known, such as what could not be looked at.
        done: Whether they were reset.
        problems: What is still wrong after it.
        devices_after: The GPUs after it; empty where none were reset.
    """

    node: str
    devices: tuple[str, ...]
    recovery_actions: dict[str, str | None]
    blockers: tuple[Blocker, ...]
    notes: tuple[str, ...]
    done: bool
    problems: tuple[str, ...]
    devices_after: tuple[Device, ...]
    exit_code: int


def _reset(options: Options) -> ResetReport:
    if not options.gpu:
        raise UsageError("which GPU is to be reset?", hint="its UUID or the beginning of it; or all")
    snap = snapshot()
    gpus = _select_gpus(snap, options.gpu)
    rows, notes = _find_blockers(snap, gpus)
    if rows or not options.yes:
        return _report(snap, gpus, rows, notes)
    with reset.exclusive_lease(gpus, "gpukiln-gpu reset") as granted:
        snap = snapshot()  # somebody may have come between the look and the lease
        gpus = tuple(
            device for device in snap.devices if device.kind == "gpu" and device.uuid in granted.uuids
        )
        rows, notes = _find_blockers(snap, gpus, own=granted.lease.id)
        if rows:
            return _report(snap, gpus, rows, notes)
        notes.append(reset.reset_gpus(gpus))
        after = snapshot()
    there = {device.uuid: device for device in after.devices}
    problems = [text for gpu in gpus for text in _remaining_problems(gpu, there.get(gpu.uuid))]
    devices = tuple(there[gpu.uuid] for gpu in gpus if gpu.uuid in there)
    return _report(snap, gpus, [], notes, done=True, problems=problems, after=devices)


def _select_gpus(snap: Snapshot, name: str) -> tuple[Device, ...]:
    """The whole GPUs that were named, separated by commas, or `all`.

    Raises:
        IncompatibleError: What was named is no GPU that can be reset, or the machine has none.
        UsageError: It names nothing.
    """
    check_usable(snap)
    if name == "all":
        return tuple(device for device in snap.devices if device.kind == "gpu" and device.vendor == "nvidia")
    gpus: list[Device] = []
    for part in (part.strip() for part in name.split(",")):
        address = part.lower()
        if any(gpu["address"] == address for gpu in bus_gpus()) and snap.device(address) is None:
            driver = pci_state(address)["driver"]
            raise IncompatibleError(
                f"{address} is bound to {driver or 'no driver'}, wanted nvidia"
                + (": a virtual machine has it, or may" if driver == "vfio-pci" else ""),
                hint="who has it resets it; or give it back to the driver nvidia",
            )
        named = select_devices(snap, part)[0]
        if named.kind != "gpu":
            raise IncompatibleError(
                f"{part} is a MIG device, wanted a GPU", hint=f"its GPU is {named.parent}: all of it is reset"
            )
        if named.vendor != "nvidia":
            raise IncompatibleError(f"GPU {part} is AMD's: reset is not for amd yet", hint="amd-smi reset")
        gpus.append(named)
    return tuple(gpus)


def _find_blockers(
    snap: Snapshot, gpus: tuple[Device, ...], own: str = ""
) -> tuple[list[Blocker], list[str]]:
    rows, notes = reset.blockers(snap, gpus, own=own)
    for gpu in gpus:
        if many := sum(1 for device in snap.devices if device.parent and device.parent == gpu.uuid):
            notes.append(
                f"{gpu.title}: its {many} MIG devices are gone after it; `mig apply` makes them again"
            )
    return [*reset.reset_blockers(snap, gpus), *rows], notes


def _remaining_problems(before: Device, now: Device | None) -> list[str]:
    if now is None or not now.readable:
        return [f"{before.title} can't be read after it{f': {now.error}' if now else ''}: reboot the machine"]
    problems = []
    if now.recovery_action not in (None, "none"):
        problems.append(f"{now.title}: the driver still asks for {now.recovery_action}")
    if now.mig_pending != now.mig_enabled:
        problems.append(f"{now.title}: its MIG mode still waits for a reset")
    return problems


def _report(
    snap: Snapshot,
    gpus: tuple[Device, ...],
    rows: list[Blocker],
    notes: list[str],
    *,
    done: bool = False,
    problems: list[str] | None = None,
    after: tuple[Device, ...] = (),
) -> ResetReport:
    return ResetReport(
        node=snap.node,
        devices=tuple(gpu.uuid for gpu in gpus if gpu.uuid),
        recovery_actions={gpu.uuid: gpu.recovery_action for gpu in gpus if gpu.uuid},
        blockers=tuple(rows),
        notes=tuple(notes),
        done=done,
        problems=tuple(problems or ()),
        devices_after=after,
        exit_code=REFUSED if rows else CHECK_FAILED if problems else 0,
    )


def show_blockers(node: dict[str, Any], print: Callable[[str], None]) -> None:
    """Write everything that is in the way."""
    for row in node["blockers"]:
        print(f"in the way: {row['device'] or 'this machine'}: {row['text']}")


def _show(node: dict[str, Any], _: Options, print: Callable[[str], None]) -> None:
    for uuid in node["devices"]:
        action = node["recovery_actions"][uuid]
        asks = "does not tell what it asks for" if action is None else f"asks for {action}"
        print(f"{uuid}: the driver {asks}")
    show_blockers(node, print)
    for note in node["notes"]:
        print(f"note: {note}")
    for problem in node["problems"]:
        print(f"wrong: {problem}")
    if node["done"]:
        print(f"reset: {', '.join(node['devices'])}")
    elif node["blockers"]:
        print("not reset")
    else:
        print("nothing is in the way; --yes resets it")


VERBS = (
    Verb(
        "reset",
        "Reset GPUs, or say everything that is in the way.",
        (
            Option("gpu", "its UUID or the beginning of it; several with commas; all", first=True),
            Option("yes", "do it; without, only say what would be", default=False),
        ),
        _reset,
        _show,
        changes=True,
        examples=("GPU-8c1f", "all --yes"),
    ),
)
