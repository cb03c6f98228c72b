"""Adds the leases to a snapshot: on devices and processes, and which devices can be leased now."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpukiln.errors import GpukilnError
from gpukiln.gpus.collect import collect
from gpukiln.gpus.config import BUSY_KINDS
from gpukiln.gpus.config import load as load_config
from gpukiln.gpus.model import Device, GpuProcess, LeaseMark, Snapshot
from gpukiln.gpus.processes import PROC
from gpukiln.gpus.selection import SHARED, DeviceClaims, DeviceRequest, select
from gpukiln.gpus.store import Lease, boot_clock
from gpukiln.probe.base import read


def claims_by_device(leases: Sequence[Lease]) -> dict[str, DeviceClaims]:
    """The claims of leases on each device, by UUID."""
    claims: dict[str, DeviceClaims] = {}
    for lease in leases:
        for device in lease.devices:
            before = claims.get(device.device, DeviceClaims())
            claims[device.device] = DeviceClaims(
                exclusive=before.exclusive or lease.mode != SHARED,
                budget_mib=before.budget_mib + (device.memory_mib or 0),
                holders=(*before.holders, f"{lease.id} of {lease.user}"),
            )
    return claims


def snapshot() -> Snapshot:
    """The GPUs of this machine now, with its leases; `Snapshot.leases` says whether they could be read."""
    seen, counts = collect(), load_config().counts
    try:
        held = _current_leases()
    except (GpukilnError, OSError) as error:
        return dataclasses.replace(with_leases(seen, [], counts), leases=str(error))
    if held is None:
        return dataclasses.replace(with_leases(seen, [], counts), leases="none")
    return dataclasses.replace(with_leases(seen, held, counts), leases="yes")


def _current_leases() -> list[Lease] | None:
    """The active leases; None where this machine has none yet."""
    from gpukiln.gpus.client import MemberLeases, open_existing_leases  # noqa: PLC0415 - it imports this module

    leases = open_existing_leases()
    if leases is None:
        return None
    if isinstance(leases, MemberLeases):
        return leases.current()
    try:
        return [lease for lease in leases.store.leases() if leases.store.end_reason(lease) is None]
    finally:
        leases.close()


def with_leases(snapshot: Snapshot, held: Sequence[Lease], counts: tuple[str, ...] = BUSY_KINDS) -> Snapshot:
    """The snapshot with active leases.

    Args:
        counts: Kinds of processes that make a GPU busy without a lease.
    """
    marks: dict[str, list[LeaseMark]] = {}
    clock = boot_clock()
    for lease in held:
        for part in lease.devices:
            ends = lease.ends_boot
            left = round(ends - clock, 1) if ends is not None else None
            mark = LeaseMark(lease.id, lease.user, lease.mode, part.memory_mib, left)
            marks.setdefault(part.device, []).append(mark)
    processes = tuple(_with_lease(process, held) for process in snapshot.processes or ())
    taken = claims_by_device(held)
    plain = DeviceRequest(counts=counts)
    devices = []
    # Whether a device can be leased depends on the request: a GPU is asked for as a GPU, a MIG device as any
    # profile.
    for kind, asked in (("gpu", plain), ("mig", dataclasses.replace(plain, mig="any"))):
        chosen = [device for device in snapshot.devices if device.kind == kind]
        if not chosen:
            continue
        looked = select(asked, snapshot.devices, processes, snapshot.driver, taken).considered
        for device, candidate in zip(snapshot.devices, looked):
            if device.kind == kind:
                because = (*candidate.never, *candidate.not_now)
                devices.append(_with_marks(device, tuple(marks.get(device.uuid or "", ())), because))
    devices.sort(
        key=lambda device: (
            device.vendor != "nvidia",
            device.index,
            device.kind == "mig",
            device.mig_index or 0,
        )
    )
    return dataclasses.replace(
        snapshot, devices=tuple(devices), processes=processes if snapshot.processes is not None else None
    )


def _with_marks(device: Device, marks: tuple[LeaseMark, ...], because: tuple[str, ...]) -> Device:
    return dataclasses.replace(device, leases=marks, allocatable=not because, not_allocatable_because=because)


def _with_lease(process: GpuProcess, held: Sequence[Lease]) -> GpuProcess:
    """The process with the lease that covers it: on its device, and of an ancestor process or of its user."""
    on = [lease for lease in held if process.device in lease.uuids]
    if process.state == "foreign":  # its PID belongs to another namespace
        return dataclasses.replace(process, lease=None)
    if len(on) > 1:  # a shared GPU: the lease of its ancestor process, else of its user
        line = set(_ancestors(process.pid))
        of_job = [lease for lease in on if {lease.pid, lease.job_pid} & line]
        on = of_job or [lease for lease in on if lease.uid == process.uid]
    elif on and on[0].kind == "job" and process.uid not in (None, 0, on[0].uid):
        on = []  # another user's process on a leased GPU
    return dataclasses.replace(process, lease=on[0].id if on else None)


def _ancestors(pid: int) -> list[int]:
    """PIDs of a process and its ancestors (proc_pid_stat(5), field 4)."""
    pids = []
    while pid > 1 and pid not in pids:
        pids.append(pid)
        # The name in field 2 may have blanks and brackets: fields are counted behind the last one.
        fields = (read(f"{PROC}/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) < 2:
            break
        pid = int(fields[1])
    return pids
