"""The verbs about leases: lease, run, release, renew, leases."""

from __future__ import annotations

import socket
import sys
import syslog
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpukiln.compatibility import version_key
from gpukiln.errors import GpukilnError, PartialError, RefusedError, UsageError
from gpukiln.gpus import leases as kept
from gpukiln.gpus.client import AnyLeases, MemberLeases, open_leases
from gpukiln.gpus.leases import Leases, candidate_lines, mig_warning, whoami
from gpukiln.gpus.selection import EXCLUSIVE, SHARED, DeviceCandidate, DeviceRequest, parse_cuda_requirement
from gpukiln.gpus.store import Lease, boot_clock, number_of
from gpukiln.gpus.text import printable, table
from gpukiln.gpus.verb import Options, Verb
from gpukiln.options import Option
from gpukiln.units import Duration, Memory

Print = Callable[[str], None]
REQUEST_OPTIONS = (
    Option("count", "how many GPUs", default=1, letter="n", value="N"),
    Option("memory", "what must be free on each, or what may be used of each with --shared", value="24GiB"),
    Option("shared", "leave the rest of each to others; needs --memory", default=False),
    Option("model", "only GPUs of these names, separated by commas", value="A100,H100"),
    Option("prefer", "the first of these that there is, before others", value="H100,A100"),
    Option("capability", "the least compute capability", value="8.0"),
    Option("cuda", "what the driver must offer", value="'>=12.1'"),
    Option("gpu", "exactly these, separated by commas: UUIDs or their beginnings, indices, PCI addresses"),
    Option("mig", "MIG devices of this profile instead of GPUs, or `any`", value="1g.10gb"),
    Option("linked", "several that are joined by NVLinks, every two", default=False),
    Option("pack", "with --shared: fill a GPU that somebody has a part of", default=False),
    Option("ignore_unleased", "take GPUs too that somebody uses without a lease", default=False),
    Option("wait", "wait so long for what others have, in the order of asking", value="10m"),
    Option("project", "what it is for; limits and usage go by it"),
    Option("explain", "say of each GPU why it was taken or not", default=False),
)
IDS_OPTION = Option(
    "ids",
    "how GPUs are named to CUDA: uuid, or index for programs that read CUDA_VISIBLE_DEVICES as numbers",
    default="uuid",
    value="uuid|index",
)
DURATION_OPTION = Option("for_", "how long at most", value="2h")
LEASE_OPTION = Option("lease", "its id, for example L-42", first=True)


@dataclass(frozen=True)
class LeaseReport:
    """A lease as it is shown and printed.

    Args:
        id: For example L-42.
        uid: Of the user.
        kind: job and container: as long as that lives; detached: until its deadline.
        devices: UUIDs.
        memory_mib: Of each device, where it is shared; null where it is not.
        command: What it is for.
        granted_at: RFC 3339, UTC.
        held_s: For how long by now.
        ends_in_s: When it ends unless it is renewed; null where it has no deadline.
        job_pid: What runs under it, null where that is not known.
    """

    id: str
    user: str
    uid: int
    project: str
    mode: str
    kind: str
    devices: tuple[str, ...]
    memory_mib: int | None
    command: str
    granted_at: str
    held_s: float
    ends_in_s: float | None
    job_pid: int | None


@dataclass(frozen=True)
class GrantReport:
    """What a request got.

    Args:
        lease: Null for a rehearsal.
        devices: UUIDs, in the order of their indices.
        environment: What CUDA has to be told.
        considered: What became of each device.
        why: What several have in common.
        dry_run: Whether nothing was leased.
    """

    node: str
    lease: LeaseReport | None
    devices: tuple[str, ...]
    environment: dict[str, str]
    considered: tuple[DeviceCandidate, ...]
    why: str
    dry_run: bool
    exit_code: int


@dataclass(frozen=True)
class ReleaseReport:
    """What was released.

    Args:
        released: Ids; empty where there was nothing to release.
        still_running: Ids of those whose job still has its GPUs, which nobody gets before it ends.
    """

    node: str
    released: tuple[str, ...]
    still_running: tuple[str, ...]
    exit_code: int


@dataclass(frozen=True)
class QueuedRequest:
    """Somebody who waits.

    Args:
        count: How many devices.
        since: RFC 3339, UTC.
    """

    user: str
    pid: int
    count: int
    since: str


@dataclass(frozen=True)
class LeasesReport:
    """Who has what, and who waits.

    Args:
        adopted: Ids of leases that were written for what ran without one.
        set_aside: Where the files of a broken database are now.
    """

    node: str
    leases: tuple[LeaseReport, ...]
    waiting: tuple[QueuedRequest, ...]
    adopted: tuple[str, ...]
    set_aside: tuple[str, ...]
    exit_code: int


def lease_report(lease: Lease) -> LeaseReport:
    """A lease in words."""
    clock, ends = boot_clock(), lease.ends_boot
    return LeaseReport(
        id=lease.id,
        user=lease.user,
        uid=lease.uid,
        project=lease.project,
        mode=lease.mode,
        kind=lease.kind,
        devices=lease.uuids,
        memory_mib=lease.memory_mib,
        command=lease.command,
        granted_at=lease.granted_at,
        held_s=round(clock - lease.granted_boot, 1),
        ends_in_s=None if ends is None else round(ends - clock, 1),
        job_pid=lease.job_pid,
    )


def split_commas(text: str) -> tuple[str, ...]:
    """What was typed with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def request_of(options: Options, leases: AnyLeases) -> DeviceRequest:
    """The request that was typed.

    Raises:
        UsageError: It contradicts itself, or a part is not understood.
    """
    memory = Memory.parse(options.memory, "--memory").mib if options.memory else None
    if options.shared and memory is None:
        raise UsageError("--shared says not how much", hint="--memory 8GiB: what may be used of each GPU")
    if options.pack and not options.shared:
        raise UsageError(
            "--pack is about GPUs that are shared", hint="add --shared --memory 8GiB, or leave it out"
        )
    count, devices = options.count, split_commas(options.gpu)
    if count < 1:
        raise UsageError(f"--count {count}: nothing is wanted", hint="1 or more")
    uuids: list[str] = []
    if devices:
        snap = leases.take_snapshot()
        kept.check_usable(snap)
        for name in devices:
            device = snap.device(name)
            if device is None or device.uuid is None:
                there = ", ".join(f"{d.index}: {d.title}" for d in snap.devices)
                raise UsageError(f"--gpu {name!r} names no GPU, or several", hint=f"there are {there}")
            uuids.append(device.uuid)
        if options.count not in (1, len(uuids)):
            raise UsageError(f"--count {count} and {len(uuids)} GPUs are named", hint="leave --count out")
        count = len(uuids)
        mig = options.mig or ("any" if any(uuid.startswith("MIG-") for uuid in uuids) else "")
    else:
        mig = options.mig
    capability = version_key(options.capability) if options.capability else ()
    if options.capability and not capability:
        raise UsageError(f"--capability {options.capability!r} is none", hint="such as 8.0")
    return DeviceRequest(
        count=count,
        memory_mib=memory,
        mode=SHARED if options.shared else EXCLUSIVE,
        models=split_commas(options.model),
        prefer=split_commas(options.prefer),
        capability=capability,
        cuda=parse_cuda_requirement(options.cuda) if options.cuda else (),
        devices=tuple(uuids),
        mig=mig,
        linked=options.linked,
        pack=options.pack,
        ignore_unleased=options.ignore_unleased,
    )


def say(text: str) -> None:
    """A notice for people."""
    print(printable(text), file=sys.stderr, flush=True)


def _on_wait(why: str) -> None:
    say(f"waiting: {why}")


def _warn(uuids: Sequence[str]) -> None:
    if warning := mig_warning(uuids):
        say(warning)


def _ids(options: Options) -> str:
    if options.ids not in ("uuid", "index"):
        raise UsageError(f"--ids {options.ids!r} is neither", hint="--ids uuid, or --ids index")
    return str(options.ids)


def _hours(text: str) -> float | None:
    return Duration.parse(text, "--for") / 3600 if text else None


def _lease(options: Options) -> GrantReport:
    leases, node, ids = open_leases(), socket.gethostname(), _ids(options)
    request, who = request_of(options, leases), whoami(options.project)
    if ids == "index" and request.mig:
        raise UsageError("--ids index: MIG devices have no number of their own", hint="leave --ids out")
    if options.dry_run:
        snap = leases.take_snapshot()
        kept.check_usable(snap)
        planned = leases.plan(request, snap)
        uuids = tuple(device.uuid for device in planned.devices if device.uuid)
        if options.json:
            _warn(uuids)
        code = 0 if uuids else 3 if request.count > len(planned.possible) else 75
        return GrantReport(node, None, uuids, {}, planned.considered, planned.why, True, code)
    granted = leases.acquire(
        request,
        who,
        kind=kept.DETACHED,
        hours=_hours(options.for_),
        heartbeat_s=Duration.parse(options.heartbeat, "--heartbeat") if options.heartbeat else None,
        wait_s=Duration.parse(options.wait, "--wait") if options.wait else 0.0,
        command=options.comment,
        on_wait=_on_wait,
    )
    if options.json:  # else `_show_lease` does, which has another machine's answer too
        _warn(granted.uuids)
    return GrantReport(
        node,
        lease_report(granted.lease),
        granted.uuids,
        granted.environment_by_index if ids == "index" else granted.environment,
        granted.considered,
        granted.why,
        False,
        0,
    )


def _show_lease(node: dict[str, Any], options: Options, print: Print) -> None:
    lease = node["lease"]
    if getattr(options, "explain", False) or node["dry_run"]:  # renew has no such option
        for line in candidate_lines([DeviceCandidate(**data) for data in node["considered"]]):
            print(line)
    if node["dry_run"]:
        print(f"would lease: {', '.join(node['devices']) or 'nothing: ' + node['why']}")
        _warn(node["devices"])
        return
    ends = (
        f", ends in {Duration(lease['ends_in_s']).shown}"
        if lease["ends_in_s"] is not None
        else ", until it is released"
    )
    print(
        f"{lease['id']} {lease['user']} {lease['mode']}{ends}" + (f"; {node['why']}" if node["why"] else "")
    )
    for name, value in node["environment"].items():
        print(f"export {name}={value}")
    if node["environment"]:  # a renewed lease has none
        _warn(node["devices"])


def _no_document(_: Options) -> GrantReport:
    raise UsageError(
        "run prints what its command prints, and --json is given", hint="`lease --json`, or leave it out"
    )


def _run(options: Options) -> int:
    from gpukiln.gpus import run  # noqa: PLC0415 - signals are its business alone

    if not options.command and not (options.docker or options.podman):
        raise UsageError("run lacks its command", hint="gpukiln-gpu run -n 1 -- python3 train.py")
    if options.docker and options.podman:
        raise UsageError("--docker and --podman", hint="one of them")
    if options.lease and (options.docker or options.podman):
        raise UsageError(
            f"--lease {options.lease} runs a command, not a container",
            hint=f"gpukiln-gpu args {options.lease} says what gives its GPUs to a container",
        )
    ids = _ids(options)
    if ids == "index" and (options.docker or options.podman):
        raise UsageError("--ids index is for commands", hint="in a container GPUs are numbered from 0")
    if ids == "index" and options.mig:
        raise UsageError("--ids index: MIG devices have no number of their own", hint="leave --ids out")
    leases, who = open_leases(), whoami(options.project)
    limit_s = Duration.parse(options.for_, "--for") if options.for_ else None
    if options.lease:
        return run.run_in_lease(leases, options.lease, who, options.command, limit_s, ids)
    request = request_of(options, leases)
    engine = "docker" if options.docker else "podman" if options.podman else None
    granted = leases.acquire(
        request,
        who,
        kind=kept.CONTAINER if engine else kept.JOB,
        hours=limit_s / 3600 if limit_s else None,
        wait_s=Duration.parse(options.wait, "--wait") if options.wait else 0.0,
        command=" ".join(options.command) or options.docker or options.podman,
        engine=engine,
        on_wait=_on_wait,
    )
    if options.explain:
        for line in candidate_lines(granted.considered):
            say(line)
    _warn(granted.uuids)
    return run.run_and_release(
        leases,
        granted,
        who,
        options.command,
        engine=engine,
        image=options.docker or options.podman,
        ids=ids,
    )


def _release(options: Options) -> ReleaseReport:
    leases, who = open_leases(), whoami()
    asked = [bool(options.lease), bool(options.holder), options.mine]
    if sum(asked) != 1:
        raise UsageError(
            "which lease is to be released?", hint="a lease such as L-42, --mine, or --holder USER"
        )
    if options.lease:
        if number_of(options.lease) is None:
            raise UsageError(
                f"{options.lease!r} is no id of a lease",
                hint="wanted: such as L-42; `gpukiln-gpu leases` lists them",
            )
        held = [lease for lease in (leases.find(options.lease),) if lease is not None]
    else:
        user = who.user if options.mine else options.holder
        held = [lease for lease in leases.current() if lease.user == user]
    released, running, refused = [], [], []
    energy = leases.energy_counters(held)
    for lease in held:
        try:
            if leases.release(lease, who, force=options.force, energy=energy):
                released.append(lease.id)
                if isinstance(leases, Leases) and not leases.is_owner(
                    lease, who
                ):  # the service says it itself
                    syslog.syslog(
                        syslog.LOG_NOTICE, f"gpukiln-gpu: {who.user} took {lease.id} away from {lease.user}"
                    )
        except GpukilnError as error:
            refused.append(error)
            continue
        if leases.is_running(lease):
            running.append(lease.id)
    if refused and released:
        raise PartialError(
            f"released {', '.join(released)}, and {len(refused)} not",
            details=tuple(e.message for e in refused),
        )
    if refused:
        raise refused[0]
    return ReleaseReport(socket.gethostname(), tuple(released), tuple(running), 0)


def _show_release(node: dict[str, Any], _: Options, print: Print) -> None:
    print(f"released: {', '.join(node['released']) or 'nothing, there is no such lease'}")
    for id in node["still_running"]:
        print(f"{id}: its job still runs, and keeps its GPUs until it ends")


def _renew(options: Options) -> GrantReport:
    leases, who = open_leases(), whoami()
    lease = leases.find(options.lease) if options.lease else None
    if lease is None:
        raise UsageError(
            f"{options.lease or 'no lease'} is no lease that holds",
            hint="`gpukiln-gpu leases` lists them; lease anew",
        )
    changed = leases.renew(lease, who, _hours(options.for_))
    return GrantReport(socket.gethostname(), lease_report(changed), changed.uuids, {}, (), "", False, 0)


def _leases(options: Options) -> LeasesReport:
    leases: AnyLeases | None = None
    moved: list[str] = []
    adopted: list[str] = []
    if options.rebuild:
        if isinstance(open_leases(), MemberLeases):
            raise RefusedError("--rebuild is root's", hint="sudo gpukiln-gpu leases --rebuild")
        leases, moved, adopted = kept.rebuild_leases()
    leases = leases or open_leases()
    if options.reconcile:
        adopted += leases.reconcile(whoami())
    held = leases.current()
    waiting = leases.queue()
    return LeasesReport(
        socket.gethostname(),
        tuple(lease_report(lease) for lease in held),
        tuple(QueuedRequest(row["user"], row["pid"], row["count"], row["at"]) for row in waiting),
        tuple(adopted),
        tuple(moved),
        0,
    )


def _show_leases(node: dict[str, Any], _: Options, print: Print) -> None:
    for path in node["set_aside"]:
        print(f"set aside: {path}")
    if node["adopted"]:
        print(f"written for what ran without one: {', '.join(node['adopted'])}")
    rows = [
        (
            lease["id"],
            lease["user"],
            lease["project"] or "-",
            lease["mode"] if lease["memory_mib"] is None else f"{lease['mode']} {lease['memory_mib']} MiB",
            lease["kind"],
            Duration(lease["held_s"]).shown,
            "-" if lease["ends_in_s"] is None else Duration(lease["ends_in_s"]).shown,
            " ".join(lease["devices"]),
            lease["command"],
        )
        for lease in node["leases"]
    ]
    titles = ("LEASE", "USER", "PROJECT", "MODE", "KIND", "HELD", "ENDS IN", "DEVICES", "COMMAND")
    for line in table(titles, rows) or ["no lease"]:
        print(line)
    for request in node["waiting"]:
        print(
            f"waits: {request['user']} (pid {request['pid']}) for {request['count']} since {request['since'][:19]}"
        )


VERBS = (
    Verb(
        "lease",
        "Have GPUs until a deadline, or until they are released; prints what CUDA has to be told.",
        (
            *REQUEST_OPTIONS,
            DURATION_OPTION,
            IDS_OPTION,
            Option("heartbeat", "let it end when it is not renewed within so long", value="10m"),
            Option("comment", "what it is for, for people"),
            Option("dry_run", "lease nothing, say what would be", default=False),
        ),
        _lease,
        _show_lease,
        changes=True,
        examples=("-n 2 --memory 24GiB --for 2h", "--model A100 --explain --dry-run"),
    ),
    Verb(
        "run",
        "Run a command, or a container, on GPUs of its own; they are free again when it ends.",
        (
            *REQUEST_OPTIONS,
            DURATION_OPTION,
            IDS_OPTION,
            Option("lease", "run under a lease that there is already", value="L-42"),
            Option("docker", "run this image with Docker", value="IMAGE"),
            Option("podman", "run this image with Podman", value="IMAGE"),
        ),
        _no_document,
        _show_lease,
        takes_command="COMMAND",
        takes_over=_run,
        changes=True,
        examples=("-n 2 --memory 24GiB -- python3 train.py",),
    ),
    Verb(
        "release",
        "End a lease.",
        (
            LEASE_OPTION,
            Option("mine", "every one of yours", default=False),
            Option("holder", "every one of this user"),
            Option("force", "somebody else's too; it is written down", default=False),
        ),
        _release,
        _show_release,
        changes=True,
    ),
    Verb(
        "renew",
        "Let a lease go on: its heartbeat begins anew, its deadline with --for.",
        (LEASE_OPTION, DURATION_OPTION),
        _renew,
        _show_lease,
        changes=True,
    ),
    Verb(
        "leases",
        "Who has which GPUs, and who waits.",
        (
            Option("reconcile", "write leases for containers and processes that have none", default=False),
            Option("rebuild", "set a broken database aside and make it anew", default=False),
        ),
        _leases,
        _show_leases,
    ),
)
