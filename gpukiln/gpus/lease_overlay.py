"""Writes on a snapshot who has what: leases on devices and processes, and what could be leased now."""

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
    """By device what leases have of it."""
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
    """The GPUs of this machine now, with its leases where it keeps some that can be read."""
    seen, counts = collect(), load_config().counts
    try:
        held = _current_leases()
    except (GpukilnError, OSError) as error:
        return dataclasses.replace(with_leases(seen, [], counts), leases=str(error))
    if held is None:
        return dataclasses.replace(with_leases(seen, [], counts), leases="none")
    return dataclasses.replace(with_leases(seen, held, counts), leases="yes")


def _current_leases() -> list[Lease] | None:
    """The leases that hold; None where nobody keeps any here."""
    from gpukiln.gpus.client import MemberLeases, open_existing_leases  # noqa: PLC0415 - it knows this module

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
    """The snapshot with leases that hold.

    Args:
        counts: Kinds of processes that make a GPU busy.
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
    for kind, asked in (("gpu", plain), ("mig", dataclasses.replace(plain, mig="any"))):
        chosen = [device for device in snapshot.devices if device.kind == kind]
        if not chosen:
            continue
        looked = select(asked, snapshot.devices, processes, snapshot.driver, taken).considered
        for device, said in zip(snapshot.devices, looked):
            if device.kind == kind:
                because = (*said.never, *said.not_now)
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
    """The process with the lease that covers it: of its device, and its user's or its ancestor's."""
    on = [lease for lease in held if process.device in lease.uuids]
    if process.state == "foreign":  # its number is of another namespace
        return dataclasses.replace(process, lease=None)
    if len(on) > 1:  # shared: whose job it descends from, else whose user it is
        line = set(_ancestors(process.pid))
        of_job = [lease for lease in on if {lease.pid, lease.job_pid} & line]
        on = of_job or [lease for lease in on if lease.uid == process.uid]
    elif on and on[0].kind == "job" and process.uid not in (None, 0, on[0].uid):
        on = []  # somebody else's work on a leased GPU
    return dataclasses.replace(process, lease=on[0].id if on else None)


def _ancestors(pid: int) -> list[int]:
    """A process and its parents (proc_pid_stat(5), field 4)."""
    pids = []
    while pid > 1 and pid not in pids:
        pids.append(pid)
        fields = (read(f"{PROC}/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) < 2:
            break
        pid = int(fields[1])
    return pids
