"""The verb reset: resets GPUs, or prints what blocks a reset."""

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

# Exit codes as in gpukiln/errors.py; a report has them where no error is raised.
CHECK_FAILED, REFUSED = 1, 6


@dataclass(frozen=True)
class ResetReport:
    """A reset, or the plan of one.

    Args:
        devices: UUIDs of the GPUs.
        recovery_actions: The action that the driver requests, by UUID; null where it reports none.
        blockers: Everything that blocks the reset.
        notes: Further information, such as what could not be examined.
        done: Whether they were reset.
        problems: What is still wrong after the reset.
        devices_after: The GPUs after the reset; empty where none was reset.
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
        raise UsageError("no GPU is named", hint="pass a UUID or the beginning of it, or all")
    snap = snapshot()
    gpus = _select_gpus(snap, options.gpu)
    rows, notes = _find_blockers(snap, gpus)
    # Without --yes the command changes nothing: it is safe to run to see what blocks a reset.
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
    # By UUID: indices may change with a reset.
    there = {device.uuid: device for device in after.devices}
    problems = [text for gpu in gpus for text in _remaining_problems(gpu, there.get(gpu.uuid))]
    devices = tuple(there[gpu.uuid] for gpu in gpus if gpu.uuid in there)
    return _report(snap, gpus, [], notes, done=True, problems=problems, after=devices)


def _select_gpus(snap: Snapshot, name: str) -> tuple[Device, ...]:
    """The GPUs in a list with commas, or all of them for `all`.

    Raises:
        IncompatibleError: A name is not of a GPU that can be reset, or the machine has no GPU.
        UsageError: No device has a name of the list.
    """
    check_usable(snap)
    if name == "all":
        return tuple(device for device in snap.devices if device.kind == "gpu" and device.vendor == "nvidia")
    gpus: list[Device] = []
    for part in (part.strip() for part in name.split(",")):
        address = part.lower()
        if any(gpu["address"] == address for gpu in bus_gpus()) and snap.device(address) is None:
            # A GPU of a virtual machine is not in the snapshot, only on the bus.
            driver = pci_state(address)["driver"]
            raise IncompatibleError(
                f"{address} is bound to {driver or 'no driver'}, wanted nvidia"
                + (": it is reserved for virtual machines" if driver == "vfio-pci" else ""),
                hint="reset it in its virtual machine, or bind it to the driver nvidia",
            )
        named = select_devices(snap, part)[0]
        if named.kind != "gpu":
            raise IncompatibleError(
                f"{part} is a MIG device, wanted a GPU", hint=f"reset its whole GPU, {named.parent}"
            )
        if named.vendor != "nvidia":
            raise IncompatibleError(
                f"GPU {part} is AMD's: reset does not support AMD's GPUs yet", hint="run `amd-smi reset`"
            )
        gpus.append(named)
    return tuple(gpus)


def _find_blockers(
    snap: Snapshot, gpus: tuple[Device, ...], own: str = ""
) -> tuple[list[Blocker], list[str]]:
    rows, notes = reset.blockers(snap, gpus, own=own)
    for gpu in gpus:
        # MIG devices do not survive a reset (NVIDIA, MIG User Guide).
        if many := sum(1 for device in snap.devices if device.parent and device.parent == gpu.uuid):
            notes.append(
                f"{gpu.title}: the reset removes its {many} MIG devices; `mig apply` creates them again"
            )
    return [*reset.reset_blockers(snap, gpus), *rows], notes


def _remaining_problems(before: Device, now: Device | None) -> list[str]:
    if now is None or not now.readable:
        why = f": {now.error}" if now else ""
        return [f"{before.title} can't be read after the reset{why}: reboot the machine"]
    problems = []
    # Null: older drivers do not report the action.
    if now.recovery_action not in (None, "none"):
        problems.append(f"{now.title}: the driver still requests {now.recovery_action}")
    if now.mig_pending != now.mig_enabled:
        problems.append(f"{now.title}: its MIG mode is still pending")
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
    """Print everything that blocks the change."""
    for row in node["blockers"]:
        print(f"blocked by: {row['device'] or 'this machine'}: {row['text']}")


def _show(node: dict[str, Any], _: Options, print: Callable[[str], None]) -> None:
    for uuid in node["devices"]:
        action = node["recovery_actions"][uuid]
        asks = "reports no recovery action" if action is None else f"requests {action}"
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
        print("nothing blocks the reset; --yes carries it out")


VERBS = (
    Verb(
        "reset",
        "Reset GPUs; without --yes print everything that blocks the reset.",
        (
            Option("gpu", "UUID of the GPU or the beginning of it; several with commas; all", first=True),
            Option("yes", "reset the GPUs; without --yes print the plan", default=False),
        ),
        _reset,
        _show,
        changes=True,
        examples=("GPU-8c1f", "all --yes"),
    ),
)
