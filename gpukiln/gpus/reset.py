"""Resets GPUs: what blocks a reset, the lease that keeps other users off, and the reset itself.

NVML has no function for a reset: `nvidia-smi --gpu-reset` requests it from the driver.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpukiln.errors import UnavailableError
from gpukiln.gpus.faults import ACTIONS
from gpukiln.gpus.kernel_log import RESET_NOTE
from gpukiln.gpus.leases import LeaseGrant, Leases, whoami
from gpukiln.gpus.model import Device, Snapshot
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.probe.base import PCI, NotReachedError, read, run_unrecorded

LIMIT_S = 300.0  # for nvidia-smi to reset all GPUs that were named
KERNEL_LOG = "/dev/kmsg"
# Up to Turing a GPU is reset together with all GPUs that NVLink joins to it. Ampere is reset alone where the
# fabric manager runs, later architectures always (nvidia-smi(1), --gpu-reset).
RESET_WITH_PEERS = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")
WITH_FABRIC_MANAGER = ("Ampere",)
# Actions that the driver requests and that a reset of the GPU does not carry out.
OTHER_ACTIONS = {
    action: how for action, how in ACTIONS.items() if action not in ("gpu reset", "drain and reset")
}
# How to stop the services that hold device nodes on an idle machine, by the first 15 characters of their
# name, which the kernel keeps. NVIDIA's own MIG manager stops the same ones (NVIDIA/mig-parted,
# deployments/systemd/hooks.sh), and leaves the persistence daemon and the fabric manager running.
STOP_COMMANDS = {
    "nv-hostengine": "systemctl stop nvidia-dcgm",
    "dcgm-exporter": "systemctl stop dcgm-exporter",
}
PERSISTENCE, FABRIC_MANAGER = "nvidia-persiste", "nv-fabricmanage"


@dataclass(frozen=True)
class Blocker:
    """Something that blocks a change of GPUs.

    Args:
        id: Names the rule: not-root, container, leases, lease, process, holder, recovery-action,
            unreadable, peers.
        device: UUID; null where it blocks the whole machine.
        text: What was found, and how to end it.
        passes: Whether it ends by itself, like a job.
    """

    id: str
    device: str | None
    text: str
    passes: bool = False


def reset_peers(snapshot: Snapshot, gpus: Sequence[Device], *, proc: str = "/proc") -> tuple[Device, ...]:
    """The further GPUs that a reset includes: the NVLink peers of GPUs that can't be reset alone."""
    managed = _is_running(FABRIC_MANAGER, proc)
    more: list[Device] = []
    todo = list(gpus)
    while todo:
        gpu = todo.pop()
        alone = gpu.architecture not in (*RESET_WITH_PEERS, *WITH_FABRIC_MANAGER, None)
        if alone or (gpu.architecture in WITH_FABRIC_MANAGER and managed):
            continue
        near = {peer.uuid for peer in gpu.peers if peer.nvlinks}
        for other in snapshot.devices:
            if other.uuid in near and other not in gpus and other not in more:
                more.append(other)
                todo.append(other)
    return tuple(more)


def is_root() -> bool:
    """Whether this program has the permission to reset GPUs."""
    return os.geteuid() == 0


def _is_running(name: str, proc: str) -> bool:
    """Whether a process of that name runs.

    Args:
        name: Its first 15 characters, which the kernel keeps (proc_pid_comm(5)).
    """
    return any((read(str(path)) or "").strip() == name for path in Path(proc).glob("[0-9]*/comm"))


def blockers(
    snapshot: Snapshot, gpus: Sequence[Device], *, own: str = "", held_open: bool = True, proc: str = "/proc"
) -> tuple[list[Blocker], list[str]]:
    """Everything that blocks a change of GPUs; and notes on what could not be examined.

    Args:
        snapshot: With the leases.
        own: Id of the lease by which this program keeps other users off.
        held_open: Whether an open device node blocks it too, as for a reset.
        proc: Where the kernel shows processes.
    """
    rows: list[Blocker] = []
    notes: list[str] = []
    if not is_root():
        rows.append(Blocker("not-root", None, "only root has the permission: sudo gpukiln-gpu ..."))
    if snapshot.scope == "container":
        rows.append(Blocker("container", None, "this is a container: run the command on its host"))
    if snapshot.leases not in ("yes", "none"):
        rows.append(Blocker("leases", None, f"the leases can't be read: {snapshot.leases}"))
    for gpu in gpus:
        parts = [device for device in snapshot.devices if device.parent and device.parent == gpu.uuid]
        for device in (gpu, *parts):
            what = "" if device is gpu else f"{device.profile} "
            for mark in device.leases:
                if mark.id != own:
                    text = f"{what}leased: {mark.id} of {mark.user}; gpukiln-gpu release {mark.id}"
                    rows.append(Blocker("lease", device.uuid, text, passes=True))
            for job in snapshot.processes or ():
                if job.device == device.uuid and job.state != "gone":
                    text = f"{what}in use: pid {job.pid} of {job.user or job.state}: {job.command or '-'}"
                    rows.append(Blocker("process", device.uuid, text, passes=True))
    if held_open:
        listed = {job.pid for job in snapshot.processes or () if job.state == "running"}
        rows += _holders(gpus, listed, notes, proc)
    return rows, notes


def _holders(gpus: Sequence[Device], listed: set[int], notes: list[str], proc: str) -> list[Blocker]:
    """Processes that have a GPU's device node open and are not in the driver's list."""
    nodes = {f"/dev/nvidia{gpu.minor}": gpu for gpu in gpus if gpu.minor is not None}
    rows = []
    hidden = 0
    for folder in sorted(Path(proc).glob("[0-9]*"), key=lambda path: int(path.name)):
        opened = set()
        try:
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed in between
                    opened.add(os.readlink(link))  # noqa: PTH115 - a text, such as /dev/nvidia0 (deleted)
        except PermissionError:
            hidden += 1
        except OSError:  # the process has ended
            continue
        name = (read(str(folder / "comm")) or "").strip()
        held = sorted(opened & set(nodes))
        if name == PERSISTENCE and held:
            notes.append(
                f"nvidia-persistenced has {', '.join(held)} open: stop it if nvidia-smi refuses the reset"
            )
        if int(folder.name) in listed or name in (PERSISTENCE, FABRIC_MANAGER):
            continue
        for node in held:
            end = STOP_COMMANDS.get(name) or f"end pid {folder.name}"
            rows.append(
                Blocker("holder", nodes[node].uuid, f"{name} (pid {folder.name}) has {node} open: {end}")
            )
    if hidden:
        notes.append(
            f"{hidden} processes of other users may have it open: only root can read their open files"
        )
    return rows


def reset_blockers(snapshot: Snapshot, gpus: Sequence[Device], *, proc: str = "/proc") -> list[Blocker]:
    """What blocks a reset and no other change: another action that the driver requests, and peers."""
    rows = [
        Blocker(
            "recovery-action",
            gpu.uuid,
            f"the driver requests {gpu.recovery_action}: {OTHER_ACTIONS[gpu.recovery_action]}",
        )
        for gpu in gpus
        if gpu.recovery_action in OTHER_ACTIONS
    ]
    rows += [
        Blocker(
            "unreadable",
            gpu.uuid,
            f"it can't be read ({gpu.error}), so a reset does not reach it: reboot the machine",
        )
        for gpu in gpus
        if not gpu.readable
    ]
    if more := reset_peers(snapshot, gpus, proc=proc):
        names = ", ".join(gpu.title for gpu in more)
        how = "gpukiln-gpu reset all" + (
            "" if more[0].architecture in RESET_WITH_PEERS else ", or start nvidia-fabricmanager"
        )
        rows.append(Blocker("peers", None, f"NVLink joins it to {names}, which must be reset with it: {how}"))
    return rows


@contextlib.contextmanager
def exclusive_lease(gpus: Sequence[Device], why: str) -> Iterator[LeaseGrant]:
    """Lease GPUs for this program, whatever their health, while it changes them."""
    leases, who = Leases(), whoami()
    uuids = tuple(gpu.uuid for gpu in gpus if gpu.uuid)
    try:
        request = DeviceRequest(count=len(uuids), devices=uuids, repair=True)
        granted = leases.acquire(request, who, command=why)
        try:
            yield granted
        finally:
            try:
                leases.release(granted.lease, who, force=True)
            finally:
                for number in granted.descriptors:
                    os.close(number)
    finally:
        leases.store.close()


def reset_gpus(gpus: Sequence[Device]) -> str:
    """Reset GPUs together; returns the output of nvidia-smi.

    Raises:
        UnavailableError: The reset failed.
    """
    uuids = ",".join(gpu.uuid or "" for gpu in gpus)
    try:
        done = run_unrecorded("nvidia-smi", "--gpu-reset", "-i", uuids, timeout=LIMIT_S)
    except NotReachedError as error:
        raise UnavailableError(
            f"nvidia-smi --gpu-reset: {error}", hint="read `dmesg`, then reboot the machine"
        ) from error
    output = re.sub(r"\s*\n\s*", "; ", (done["out"] + done["err"]).strip())
    if done["rc"] != 0:
        raise UnavailableError(
            f"nvidia-smi --gpu-reset -i {uuids} exits with {done['rc']}: {output}",
            hint="end what it names; `dmesg` has the driver's messages",
        )
    _log_reset(gpus)
    return output


def _log_reset(gpus: Sequence[Device]) -> None:
    """Note in the kernel's log that GPUs were reset, so that their older faults count as cleared."""
    # Drivers from branch 570 on log it themselves (Xid 154).
    for gpu in gpus:
        if gpu.bus_id and Path(PCI, gpu.bus_id).exists():  # not for simulated GPUs, which are on no bus
            # <5> is the priority notice; each write is one record (Linux,
            # Documentation/ABI/testing/dev-kmsg).
            line = f"<5>{RESET_NOTE.format(address=gpu.bus_id.rpartition('.')[0])}"
            with contextlib.suppress(OSError), Path(KERNEL_LOG).open("w", encoding="ascii") as log:
                log.write(line + "\n")
