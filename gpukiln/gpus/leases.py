"""Leases of this machine's GPUs: grants, renewals, releases, and the removal of those that have ended."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpukiln.errors import BusyError, IncompatibleError, RefusedError, UnavailableError, UsageError
from gpukiln.gpus.collect import collect, now
from gpukiln.gpus.config import Config, machine_price
from gpukiln.gpus.config import load as load_config
from gpukiln.gpus.lease_overlay import claims_by_device, with_leases
from gpukiln.gpus.model import Device, Snapshot
from gpukiln.gpus.processes import start_ticks, user_name
from gpukiln.gpus.selection import SHARED, DeviceCandidate, DeviceClaims, DeviceRequest, Selection, select
from gpukiln.gpus.store import (
    Lease,
    LeasedDevice,
    LeaseStore,
    boot_clock,
    boot_id,
    folder,
    number_of,
    read_ledger,
    read_lifelines,
    set_aside,
)
from gpukiln.units import Duration

JOB, DETACHED, CONTAINER = "job", "detached", "container"
# A waiting request reads the leases at these intervals, the first and the longest. A snapshot costs far more,
# so it takes one every SNAPSHOT_INTERVAL_S only.
POLL_S = (0.05, 0.5)
SNAPSHOT_INTERVAL_S = 5.0
# `LeaseStore.is_locked` of another process holds a lock for a moment: a grant waits for it.
LOCK_PATIENCE_S = 2.0
MAX_SNAPSHOT_AGE_S = 2.0  # of the snapshot by which a lease is granted
ContainerCheck = Callable[[Lease], bool]  # whether the container of a lease runs


@dataclass(frozen=True)
class LeaseHolder:
    """The user who leases.

    Args:
        user: Login name; under sudo that of the user who called it.
        project: The purpose, as the user typed it.
        pid: Of the process that leases; None for this one.
    """

    user: str
    uid: int
    project: str = ""
    pid: int | None = None

    @property
    def process(self) -> int:
        """PID of the process that leases."""
        return os.getpid() if self.pid is None else self.pid


def whoami(project: str = "") -> LeaseHolder:
    """The user who runs this program."""
    # The real user, not root: `sudo gpukiln-gpu run` leases for the user who called sudo.
    uid = os.getuid()
    if uid == 0 and (before := os.environ.get("SUDO_UID", "")).isdecimal():
        uid = int(before)
    return LeaseHolder(user_name(uid), uid, project)


@dataclass(frozen=True)
class LeaseGrant:
    """A granted lease with its locks.

    Args:
        descriptors: Of the locks; the job must inherit them (`pass_fds` of subprocess).
        considered: Every device, with the reason why it was or was not selected.
        indices: The driver's index of each GPU by UUID, at the time of the grant.
    """

    lease: Lease
    descriptors: tuple[int, ...]
    considered: tuple[DeviceCandidate, ...]
    why: str
    indices: Mapping[str, int] = field(default_factory=dict)

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the devices."""
        return self.lease.uuids

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that limit a job to these devices."""
        return device_environment(self.uuids)

    @property
    def environment_by_index(self) -> dict[str, str]:
        """As `environment`, for a job that reads CUDA_VISIBLE_DEVICES as numbers.

        Raises:
            UsageError: A device is a MIG device.
        """
        return device_environment(self.uuids, self.indices)


def device_environment(uuids: Sequence[str], indices: Mapping[str, int] | None = None) -> dict[str, str]:
    """Environment variables that limit programs to these devices.

    >>> device_environment(["GPU-7c49744b-522d-5193-a082-cff845997bfd"])
    {'CUDA_VISIBLE_DEVICES': 'GPU-7c49744b-522d-5193-a082-cff845997bfd'}
    >>> device_environment(["GPU-0b1c2d3e4f5a6b7c"])
    {'ROCR_VISIBLE_DEVICES': 'GPU-0b1c2d3e4f5a6b7c'}

    Args:
        indices: Names NVIDIA's GPUs by the driver's index in place of the UUID.

    Raises:
        UsageError: `indices` is given and a device is a MIG device.
    """
    # CUDA accepts UUIDs (CUDA C++ Programming Guide, environment variables). So does ROCr, the layer below
    # HIP and OpenCL; HIP_VISIBLE_DEVICES accepts indices only (ROCm, GPU isolation techniques). AMD's UUIDs
    # have 16 digits.
    amd = [uuid for uuid in uuids if re.fullmatch(r"GPU-[0-9a-f]{16}", uuid)]
    nvidia = [uuid for uuid in uuids if uuid not in amd]
    if indices is not None and nvidia:
        if mig := [uuid for uuid in nvidia if uuid not in indices or uuid.startswith("MIG-")]:
            raise UsageError(
                f"--ids index: the MIG device {mig[0]} has no index of its own", hint="--ids uuid"
            )
        return {
            # The driver numbers GPUs in the order of the bus, CUDA's default is the fastest first.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            **device_environment(amd),
            "CUDA_VISIBLE_DEVICES": ",".join(str(indices[uuid]) for uuid in nvidia),
        }
    both = (("CUDA_VISIBLE_DEVICES", nvidia), ("ROCR_VISIBLE_DEVICES", amd))
    return {name: ",".join(chosen) for name, chosen in both if chosen}


def mig_warning(uuids: Sequence[str]) -> str:
    """A warning with the commands that use several MIG devices; empty for fewer than two.

    >>> mig_warning(["MIG-ce769d44-ceaf-5389-8f46-5000d838bf14"])
    ''
    >>> mig_warning(["MIG-1", "MIG-2"]).count("CUDA_VISIBLE_DEVICES=MIG-")
    2
    """
    # A CUDA process enumerates one MIG device, the first that is visible (NVIDIA, MIG User Guide, "CUDA
    # Device Enumeration"): without a word the others would stay idle.
    devices = [uuid for uuid in uuids if uuid.startswith("MIG-")]
    if len(devices) < 2:
        return ""
    each = "".join(f"\n  CUDA_VISIBLE_DEVICES={uuid} COMMAND" for uuid in devices)
    return (
        f"warning: a CUDA process uses one MIG device, the first of CUDA_VISIBLE_DEVICES, but these are "
        f"{len(devices)}; start one process per device, or lease one device of a larger profile:{each}"
    )


class Leases:
    """The leases of this machine.

    Args:
        store: The database and the locks.
        take_snapshot: Returns a snapshot without leases.
        container_runs: Whether the container of a lease runs; None asks its engine.
    """

    def __init__(
        self,
        store: LeaseStore | None = None,
        *,
        take_snapshot: Callable[[], Snapshot] = collect,
        container_runs: ContainerCheck | None = None,
        config: Config | None = None,
    ) -> None:
        self.store = store or LeaseStore()
        self.take_snapshot = take_snapshot
        self.config = config or load_config()
        self._container_runs = container_runs

    def container_runs(self, lease: Lease) -> bool:
        """Whether the container of a lease runs; true where its engine does not answer."""
        if self._container_runs is None:
            from gpukiln.gpus.engines import is_container_running  # noqa: PLC0415 - most calls need no engine

            self._container_runs = is_container_running
        return self._container_runs(lease)

    def current(self) -> list[Lease]:
        """The active leases; those that have ended are removed first."""
        gone = self._containers_gone()
        with self.store.change():
            return self._reap(gone)

    def _containers_gone(self) -> set[int]:
        """Numbers of the leases whose container has ended."""
        gone = set()
        for lease in self.store.leases():
            held = self.store.is_locked(self.store.lifeline(lease))
            if (
                lease.kind == CONTAINER
                and self.store.end_reason(lease) is None
                and not held
                and not self.container_runs(lease)
            ):
                gone.add(lease.number)
        return gone

    def _reap(self, containers_gone: set[int]) -> list[Lease]:
        """Remove the leases that have ended, within a transaction; returns the active ones."""
        held = []
        for lease in self.store.leases():
            why = self.store.end_reason(lease) or ("gone" if lease.number in containers_gone else None)
            if why is None:
                held.append(lease)
            else:
                self._end(lease, why)
        kept = {lease.id for lease in held}
        for path in self.store.lifelines():
            with contextlib.suppress(OSError):  # not a regular file
                if path.name not in kept and not self.store.is_locked(path):
                    self.store.forget(path)  # left by a grant that was killed, or by an ended lease
        boot = boot_id()
        # Tickets of processes that were killed while they waited.
        for row in self.store.db.execute("select id, pid, ticks, boot_id from tickets").fetchall():
            if row["boot_id"] != boot or start_ticks(row["pid"]) != row["ticks"]:
                self.store.db.execute("delete from tickets where id = ?", (row["id"],))
        return held

    def _end(self, lease: Lease, why: str, energy: dict[str, float] | None = None) -> None:
        """Remove a lease and append its uses to the ledger, within a transaction."""
        seconds, ended_at = self._lasted(lease, why)
        price = machine_price(self.config)
        uses = []
        for device in lease.devices:
            used = None
            if device.energy_joules is not None and energy and device.device in energy:
                used = round(max(energy[device.device] - device.energy_joules, 0.0), 1)
            usd = price and round(price.usd_hour / lease.machine_gpus * device.share * seconds / 3600, 6)
            uses.append(
                (
                    lease.number,
                    lease.user,
                    lease.project,
                    device.device,
                    device.model,
                    device.share,
                    lease.granted_at,
                    ended_at,
                    round(seconds, 3),
                    used,
                    usd,
                    price.source if price else None,
                    why,
                )
            )
        self.store.remove(lease, uses)
        if not self.store.is_locked(self.store.lifeline(lease)):
            self.store.forget(self.store.lifeline(lease))

    def _lasted(self, lease: Lease, why: str) -> tuple[float, str]:
        """How many seconds a lease was held, and when it ended (RFC 3339)."""
        clock = boot_clock()
        if lease.boot_id == boot_id():
            seconds = clock - lease.granted_boot
            if why == "expired" and lease.ends_boot is not None:
                seconds = lease.ends_boot - lease.granted_boot
            ended = time.time() - (clock - lease.granted_boot - seconds)
        else:
            # Of an earlier boot only the wall clock is known; the lease ended at the start of this boot at
            # the latest.
            began = datetime.datetime.fromisoformat(lease.granted_at).timestamp()
            ended = max(time.time() - clock, began)
            seconds = ended - began
            if lease.ends_boot is not None:
                seconds = min(seconds, lease.ends_boot - lease.granted_boot)
                ended = began + seconds
        stamp = datetime.datetime.fromtimestamp(ended, datetime.timezone.utc)
        return max(seconds, 0.0), stamp.isoformat(timespec="milliseconds")

    def plan(self, request: DeviceRequest, snapshot: Snapshot | None = None) -> Selection:
        """What a request would get now; changes nothing."""
        snapshot = snapshot or self.take_snapshot()
        gone = self._containers_gone()
        with self.store.change():
            return self._select(request, snapshot, self._reap(gone), None)

    def _select(
        self, request: DeviceRequest, snapshot: Snapshot, held: list[Lease], ticket: int | None
    ) -> Selection:
        """What a request would get, within a transaction.

        Args:
            ticket: Its ticket in the queue; None for a request that does not wait yet.
        """
        # A locked device without a lease: its database was lost, and the job still runs.
        taken = claims_by_device(held)
        for device in snapshot.devices:
            if (
                device.uuid
                and device.uuid not in taken
                and self.store.is_locked(self.store.guard(device.uuid))
            ):
                taken[device.uuid] = DeviceClaims(exclusive=True, holders=("a job without a lease",))
        for row in self._before(ticket):
            for uuid in json.loads(row["devices"]):
                has = taken.get(uuid, DeviceClaims())
                if not has.exclusive:
                    since = row["at"][11:19]
                    mark = f"{row['user']} waits for {row['count']} since {since}"
                    taken[uuid] = dataclasses.replace(has, reserved=mark)
        seen = with_leases(snapshot, held, self.config.counts)
        if request.counts is None:
            request = dataclasses.replace(request, counts=self.config.counts)
        return select(request, seen.devices, seen.processes or (), seen.driver, taken)

    def queue(self) -> list[Any]:
        """The waiting requests in the order of service: rows with user, uid, pid, count, at, devices."""
        return self.store.db.execute("select * from tickets order by turn, id").fetchall()

    def _before(self, ticket: int | None) -> list[Any]:
        """The tickets that are served before a ticket; all of them for a request without one."""
        rows = self.queue()
        places = [row["id"] for row in rows]
        return rows[: places.index(ticket)] if ticket in places else rows

    def acquire(
        self,
        request: DeviceRequest,
        who: LeaseHolder,
        *,
        kind: str = JOB,
        hours: float | None = None,
        heartbeat_s: float | None = None,
        wait_s: float = 0.0,
        command: str = "",
        engine: str | None = None,
        on_wait: Callable[[str], None] | None = None,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> LeaseGrant:
        """Lease devices, or wait for them.

        Args:
            kind: JOB, DETACHED or CONTAINER.
            hours: Duration of a detached lease; None for the holder's limit, or for no end.
            heartbeat_s: A detached lease ends when it is not renewed within these seconds.
            wait_s: How long to wait for devices of other leases.
            command: The purpose, for people.
            engine: docker or podman, for kind CONTAINER.
            on_wait: Called with the reason when the request begins to wait.
            is_abandoned: Whether the caller no longer waits for the answer.

        Raises:
            IncompatibleError: This machine can never serve the request.
            BusyError: It can't serve the request now.
            RefusedError: A limit does not allow it.
            UnavailableError: The driver does not answer.
        """
        # Waiting uses a clock that nobody can set; deadlines of leases use the boot clock, which also counts
        # sleep.
        until = time.monotonic() + wait_s
        ticket: int | None = None
        pause, snapshot, looked = POLL_S[0], None, 0.0
        try:
            while True:
                if is_abandoned():
                    raise BusyError("the caller has closed its connection")
                if snapshot is None or time.monotonic() - looked > SNAPSHOT_INTERVAL_S:
                    snapshot, looked = self.take_snapshot(), time.monotonic()
                    check_usable(snapshot)
                gone = self._containers_gone()
                with self.store.change():
                    held = self._reap(gone)
                    selection = self._select(request, snapshot, held, ticket)
                    # Checked on every round: a GPU that is lost meanwhile can make a request impossible,
                    # which must not wait for ever.
                    if request.count > len(selection.possible):
                        raise IncompatibleError(
                            f"this machine can't serve the request: {selection.why}",
                            details=candidate_lines(selection.considered),
                            hint="ask for less; `gpukiln-gpu list` shows the devices",
                        )
                    self._check_limits(request, who, held, hours)
                    fresh = time.monotonic() - looked < MAX_SNAPSHOT_AGE_S
                    if selection.devices and fresh:
                        granted = self._grant(
                            request, who, selection, snapshot, kind, hours, heartbeat_s, command, engine
                        )
                        if ticket is not None:
                            self.store.db.execute("delete from tickets where id = ?", (ticket,))
                        return granted
                    if not selection.devices and time.monotonic() >= until:
                        raise BusyError(
                            f"not now: {selection.why}",
                            details=candidate_lines(selection.considered),
                            hint="wait with --wait 10m; `gpukiln-gpu leases` lists the leases",
                        )
                    if ticket is None and not selection.devices:
                        ticket = self._queue(request, who, selection)
                        if on_wait:
                            on_wait(selection.why)
                if selection.devices:
                    snapshot = None  # devices are free by an old snapshot: check with a new one
                    continue
                time.sleep(min(pause, max(until - time.monotonic(), 0.001)))
                pause = min(pause * 1.5, POLL_S[1])
        except BaseException:
            if ticket is not None:
                with contextlib.suppress(Exception), self.store.change():  # else `_reap` removes the ticket
                    self.store.db.execute("delete from tickets where id = ?", (ticket,))
            raise

    def _queue(self, request: DeviceRequest, who: LeaseHolder, selection: Selection) -> int:
        # Round robin: the first request of each user, then the second of each; a new user begins in the turn
        # that is served now. So nobody can fill the queue.
        waiting = self.queue()
        own = [row["turn"] + 1 for row in waiting if row["uid"] == who.uid]
        turn = max([*own, waiting[0]["turn"] if waiting else 0])
        done = self.store.db.execute(
            "insert into tickets (user, uid, pid, ticks, boot_id, devices, count, at, turn) "
            "values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                who.user,
                who.uid,
                who.process,
                start_ticks(who.process),
                boot_id(),
                json.dumps([device.uuid for device in selection.possible if device.uuid]),
                request.count,
                now(),
                turn,
            ),
        )
        return int(done.lastrowid or 0)

    def _check_limits(
        self, request: DeviceRequest, who: LeaseHolder, held: list[Lease], hours: float | None
    ) -> None:
        limit = self.config.limit(who.user, who.project)
        has = sum(len(lease.devices) for lease in held if lease.uid == who.uid)
        # A reset or a change of MIG by root is no use of GPUs.
        if request.repair:
            return
        if limit.gpus and has + request.count > limit.gpus:
            raise RefusedError(
                f"{who.user} has {has} GPUs and requests {request.count} more, "
                f"the limit of {limit.whose} is {limit.gpus}",
                hint=f"release some, or ask the administrator to change {self.config.path}",
            )
        if limit.hours and hours is not None and hours > limit.hours:
            raise RefusedError(
                f"--for {Duration(hours * 3600).shown} is longer than the {limit.hours:g} hours "
                f"of {limit.whose}",
                hint=f"lease for a shorter time and renew; {self.config.path} has the limits",
            )

    def _grant(
        self,
        request: DeviceRequest,
        who: LeaseHolder,
        selection: Selection,
        snapshot: Snapshot,
        kind: str,
        hours: float | None,
        heartbeat_s: float | None,
        command: str,
        engine: str | None,
    ) -> LeaseGrant:
        """Store a lease and take its locks, within a transaction."""
        clock = boot_clock()
        limit = self.config.limit(who.user, who.project)
        hours = limit.hours or None if hours is None else hours
        # The price of the machine is divided by its whole GPUs, whatever MIG makes of them.
        whole = [device for device in snapshot.devices if device.kind == "gpu"]
        lease = self.store.add(
            Lease(
                number=0,
                user=who.user,
                uid=who.uid,
                project=who.project,
                mode=request.mode,
                kind=kind,
                memory_mib=request.memory_mib if request.mode == SHARED else None,
                pid=who.process,
                ticks=start_ticks(who.process),
                boot_id=boot_id(),
                job_pid=None,
                job_ticks=None,
                command=command,
                engine=engine,
                container=None,
                machine_gpus=len(whole),
                granted_at=now(),
                granted_boot=clock,
                expires_boot=None if hours is None else clock + hours * 3600,
                heartbeat_s=heartbeat_s,
                beat_boot=clock if heartbeat_s is not None else None,
                devices=tuple(_leased_device(request, device, whole) for device in selection.devices),
            )
        )
        descriptors: list[int] = []
        try:
            # A detached lease has no process that could hold a lock: it lasts until its deadline.
            if kind != DETACHED:
                # Shared leases hold the guard of a device together; an exclusive one excludes all others.
                how = fcntl.LOCK_SH if request.mode == SHARED else fcntl.LOCK_EX
                locks = [(self.store.lifeline(lease), fcntl.LOCK_EX)]
                locks += [(self.store.guard(uuid), how) for uuid in lease.uuids]
                for path, way in locks:
                    number = self.store.open_locked(path, way, patience_s=LOCK_PATIENCE_S)
                    if number is None:  # locked since `_select`, by something that has no lease
                        raise BusyError(f"another process has locked {path} meanwhile", hint="try again")
                    descriptors.append(number)
            self.store.write(lease)
        except BaseException:
            _close(descriptors)
            with contextlib.suppress(OSError):
                self.store.forget(self.store.lifeline(lease))
            raise
        indices = {
            device.uuid: device.index for device in selection.devices if device.uuid and device.kind == "gpu"
        }
        return LeaseGrant(lease, tuple(descriptors), selection.considered, selection.why, indices)

    def is_running(self, lease: Lease) -> bool:
        """Whether a process of the lease's job still holds its GPUs."""
        return self.store.is_locked(self.store.lifeline(lease))

    def share(self, lease: Lease) -> tuple[int, ...]:
        """Descriptors of locks by which one more command uses the GPUs of a lease.

        Raises:
            RefusedError: A process without a lease holds a device.
        """
        descriptors: list[int] = []
        for uuid in lease.uuids:
            # A shared lock: several commands may run under one lease, and the next grant still sees the lock.
            guard = self.store.guard(uuid)
            number = self.store.open_locked(guard, fcntl.LOCK_SH, patience_s=LOCK_PATIENCE_S)
            if number is None:
                _close(descriptors)
                raise RefusedError(
                    f"a process without a lease holds {uuid}", hint="list it with `gpukiln-gpu processes`"
                )
            descriptors.append(number)
        return tuple(descriptors)

    def ledger(self) -> list[dict[str, Any]]:
        """The ended uses, the oldest first."""
        return self.store.ledger()

    def close(self) -> None:
        """Close the database."""
        self.store.close()

    def find(self, name: str) -> Lease | None:
        """An active lease by its id."""
        number = number_of(name)
        return next((lease for lease in self.current() if lease.number == number), None)

    def is_owner(self, lease: Lease, who: LeaseHolder) -> bool:
        """Whether a user can end or renew a lease without --force."""
        return lease.uid == who.uid

    def energy_counters(self, held: Sequence[Lease]) -> dict[str, float]:
        """Energy counters of leased devices in joules, by UUID; empty where no lease has a first reading."""
        if all(device.energy_joules is None for lease in held for device in lease.devices):
            return {}
        known = {uuid for lease in held for uuid in lease.uuids}
        return {
            device.uuid: device.energy_joules
            for device in self.take_snapshot().devices
            if device.uuid in known and device.energy_joules is not None
        }

    def release(
        self, lease: Lease, who: LeaseHolder, *, force: bool = False, energy: dict[str, float] | None = None
    ) -> bool:
        """End a lease; False where it had already ended.

        Raises:
            RefusedError: It is another user's lease, and `force` is not set.
        """
        if not self.is_owner(lease, who) and not force:
            raise RefusedError(
                f"{lease.id} belongs to {lease.user}, since {lease.granted_at[:19]}",
                hint=f"ask {lease.user}; or end it with --force, which the ledger records",
            )
        with self.store.change():
            row = self.store.db.execute("select 1 from leases where id = ?", (lease.number,)).fetchone()
            if row is None:
                return False
            # The ledger keeps who ended a lease of another user.
            why = "released" if self.is_owner(lease, who) else f"taken away by {who.user}"
            self._end(lease, why, energy)
        return True

    def renew(self, lease: Lease, who: LeaseHolder, hours: float | None = None) -> Lease:
        """Extend a detached lease: restart its heartbeat, and its deadline with `hours`.

        Raises:
            RefusedError: It is another user's lease, or `hours` exceeds the limit.
        """
        if not self.is_owner(lease, who):
            raise RefusedError(f"{lease.id} belongs to {lease.user}", hint=f"only {lease.user} can renew it")
        limit = self.config.limit(lease.user, lease.project)
        if hours is not None and limit.hours and hours > limit.hours:
            raise RefusedError(
                f"{Duration(hours * 3600).shown} is longer than the {limit.hours:g} hours of {limit.whose}"
            )
        clock = boot_clock()
        changed = dataclasses.replace(
            lease,
            beat_boot=clock if lease.heartbeat_s is not None else None,
            expires_boot=lease.expires_boot if hours is None else clock + hours * 3600,
        )
        with self.store.change():
            self.store.update(lease.number, beat_boot=changed.beat_boot, expires_boot=changed.expires_boot)
        # The lifeline has the new deadline too, for a rebuild of the database.
        self.store.write(changed)
        return changed

    def set_job(self, lease: Lease, pid: int) -> None:
        """Record the process that runs under a lease."""
        with self.store.change():
            self.store.update(lease.number, job_pid=pid, job_ticks=start_ticks(pid))

    def reconcile(self, who: LeaseHolder) -> list[str]:
        """Create leases for containers and processes that use GPUs without one; returns their ids.

        Args:
            who: The holder of the leases of containers.
        """
        from gpukiln.gpus.engines import running_containers  # noqa: PLC0415 - asks every engine

        snapshot = self.take_snapshot()
        running = running_containers(snapshot.devices)
        whole = [device for device in snapshot.devices if device.kind == "gpu"]
        adopted = []
        with self.store.change():
            held = self._reap(set())
            seen = with_leases(snapshot, held)
            known = {uuid for lease in held for uuid in lease.uuids}
            for box in running:
                uuids = [uuid for uuid in box.uuids if uuid not in known]
                if box.lease in {lease.id for lease in held} or not uuids:
                    continue
                name = f"container {box.id[:12]} ({box.image})"
                adopted.append(self._adopt(seen, uuids, whole, who, CONTAINER, name, box.engine, box.id))
                known |= set(uuids)
            for process in seen.processes or ():
                uses = process.kind in self.config.counts and process.state == "running"
                if process.lease or not uses or process.device in known:
                    continue
                owner = LeaseHolder(process.user or "", process.uid or 0)
                uuids = [process.device or ""]
                command = process.command or f"pid {process.pid}"
                adopted.append(self._adopt(seen, uuids, whole, owner, JOB, command, None, None, process.pid))
                known |= set(uuids)
        return [lease.id for lease in adopted]

    def _adopt(
        self,
        seen: Snapshot,
        uuids: Sequence[str],
        whole: Sequence[Device],
        who: LeaseHolder,
        kind: str,
        command: str,
        engine: str | None,
        container: str | None,
        pid: int | None = None,
    ) -> Lease:
        """Create a lease for a running process or container, within a transaction; it has no lock."""
        number = os.getpid() if pid is None else pid
        lease = self.store.add(
            Lease(
                number=0,
                user=who.user,
                uid=who.uid,
                project=who.project,
                mode="exclusive",
                kind=kind,
                memory_mib=None,
                pid=number,
                ticks=start_ticks(number),
                boot_id=boot_id(),
                job_pid=pid,
                job_ticks=None if pid is None else start_ticks(pid),
                command=command,
                engine=engine,
                container=container,
                machine_gpus=len(whole),
                granted_at=now(),
                granted_boot=boot_clock(),
                expires_boot=None,
                heartbeat_s=None,
                beat_boot=None,
                devices=tuple(
                    _leased_device(DeviceRequest(), device, whole)
                    for device in seen.devices
                    if device.uuid in uuids
                ),
            )
        )
        self.store.write(lease)
        return lease


def rebuild_leases() -> tuple[Leases, list[str], list[str]]:
    """Replace a broken database by a new one, with the leases of the lifelines and the readable ledger.

    Returns:
        The leases with the new database, the paths of the old files, and the ids of the leases.
    """
    # Everything is read before anything is moved: an error leaves the old files in their place.
    alive, uses = read_lifelines(folder()), read_ledger(folder())
    moved = [str(path) for path in set_aside(folder())]
    store = LeaseStore()
    ids = []
    with store.change():
        store.account(uses)
        for lease in alive:
            if store.end_reason(lease) is None:
                store.add(lease)
                ids.append(lease.id)
    return Leases(store), moved, ids


def _leased_device(request: DeviceRequest, device: Device, whole: Sequence[Device]) -> LeasedDevice:
    """A device of a lease, with its share of the GPU for the ledger: by memory, 1 for a whole GPU."""
    share = 1.0
    if device.kind == "mig":
        parent = next((gpu for gpu in whole if gpu.uuid == device.parent), None)
        total = parent.memory_total_mib if parent else None
        share = round((device.memory_total_mib or 0) / total, 4) if total else 1.0
    elif request.mode == SHARED and device.memory_total_mib:
        share = round((request.memory_mib or 0) / device.memory_total_mib, 4)
    return LeasedDevice(
        device=device.uuid or "",
        model=device.name or "",
        parent=device.parent,
        memory_mib=request.memory_mib if request.mode == SHARED else None,
        share=share,
        energy_joules=device.energy_joules,
    )


def _close(descriptors: Sequence[int]) -> None:
    for number in descriptors:
        os.close(number)


def check_usable(snapshot: Snapshot) -> None:
    """Raise where the machine has no usable GPU.

    Raises:
        IncompatibleError: The machine has no GPU.
        BusyError: The driver is still starting.
        UnavailableError: The driver does not answer.
    """
    if snapshot.state in ("no-device", "not-granted"):
        raise IncompatibleError(snapshot.message, hint=snapshot.fix)
    if snapshot.state == "starting":
        raise BusyError(snapshot.message, hint=snapshot.fix)
    if snapshot.state != "ok":
        raise UnavailableError(snapshot.message, hint=snapshot.fix)


def candidate_lines(considered: Sequence[DeviceCandidate]) -> tuple[str, ...]:
    """A line for each device: why it was or was not selected."""
    lines = []
    rest = "not needed" if any(candidate.taken for candidate in considered) else "free"
    for candidate in considered:
        text = "taken" if candidate.taken else rest
        if candidate.never or candidate.not_now:
            text = "; ".join((*candidate.never, *candidate.not_now))
        elif candidate.score:
            text += f" ({candidate.score})"
        lines.append(f"{candidate.index} {candidate.device or '-'} {candidate.name or ''}: {text}")
    return tuple(lines)


@contextlib.contextmanager
def lease(
    count: int = 1,
    *,
    memory_mib: int | None = None,
    shared: bool = False,
    wait_s: float = 0.0,
    project: str = "",
    **fields: Any,
) -> Iterator[LeaseGrant]:
    """Lease GPUs for a block of code, and for the programs that it starts with `pass_fds=gpus.descriptors`.

    Args:
        count: Of GPUs.
        memory_mib: Memory that must be free on each GPU; with `shared` the budget on each.
        shared: Whether other leases may use the rest.
        wait_s: How long to wait for GPUs of other leases.
        project: The project that it is accounted to.
        fields: Further fields of `DeviceRequest`.

    Yields:
        The grant: `uuids`, `environment`, `descriptors`.

    Raises:
        IncompatibleError, BusyError, RefusedError, UnavailableError: As `Leases.acquire`.
    """
    from gpukiln.gpus.client import open_leases  # noqa: PLC0415 - it imports this module

    leases = open_leases()
    mode: dict[str, Any] = {"mode": SHARED} if shared else {}
    request = DeviceRequest(count=count, memory_mib=memory_mib, **mode, **fields)
    who = whoami(project)
    granted = leases.acquire(request, who, wait_s=wait_s, command=" ".join(sys.argv))
    try:
        yield granted
    finally:
        try:
            leases.release(granted.lease, who)
        finally:
            _close(granted.descriptors)
            leases.close()
