"""The verbs for leases: lease, run, release, renew, leases."""

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
# Shared by lease, run and env.
REQUEST_OPTIONS = (
    Option("count", "number of GPUs", default=1, letter="n", value="N"),
    Option("memory", "memory that must be free on each GPU; with --shared the budget on each", value="24GiB"),
    Option("shared", "share each GPU with other leases; needs --memory", default=False),
    Option("model", "only these models, separated by commas", value="A100,H100"),
    Option("prefer", "prefer these models, in this order", value="H100,A100"),
    Option("capability", "the minimum compute capability", value="8.0"),
    Option("cuda", "condition on the driver's CUDA version", value="'>=12.1'"),
    Option("gpu", "only these GPUs, separated by commas: UUIDs or their beginnings, indices, PCI addresses"),
    Option("mig", "MIG devices of this profile, or of `any`, in place of GPUs", value="1g.10gb"),
    Option("linked", "only GPUs of which NVLinks join every two", default=False),
    Option("pack", "with --shared: fill GPUs that other leases share already", default=False),
    Option("ignore_unleased", "also use GPUs with processes without a lease", default=False),
    Option("wait", "wait up to this time for GPUs of other leases", value="10m"),
    Option("project", "the project, for limits and usage"),
    Option("explain", "print for each GPU why it was or was not selected", default=False),
)
IDS_OPTION = Option(
    "ids",
    "how CUDA_VISIBLE_DEVICES names GPUs: uuid, or index for programs that expect numbers",
    default="uuid",
    value="uuid|index",
)
DURATION_OPTION = Option("for_", "duration of the lease", value="2h")
LEASE_OPTION = Option("lease", "id of the lease, for example L-42", first=True)


@dataclass(frozen=True)
class LeaseReport:
    """A lease in a report.

    Args:
        id: For example L-42.
        uid: UID of the user.
        kind: job or container: until that ends; detached: until its deadline.
        devices: UUIDs.
        memory_mib: Budget on each device in mode shared; null in mode exclusive.
        command: The command, or the comment of a detached lease.
        granted_at: RFC 3339, UTC.
        held_s: Its age in seconds.
        ends_in_s: Seconds until it ends without a renewal; null for no deadline.
        job_pid: PID of the process that runs under it; null where it is not known.
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
    """The result of a request.

    Args:
        lease: Null with --dry-run.
        devices: UUIDs, in the order of their indices.
        environment: The environment variables for CUDA.
        considered: Every device, with the reason why it was or was not selected.
        why: How several devices are linked.
        dry_run: Whether this was a request with --dry-run.
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
    """The released leases.

    Args:
        released: Their ids; empty for none.
        still_running: Ids of those whose job still runs and keeps its GPUs until it ends.
    """

    node: str
    released: tuple[str, ...]
    still_running: tuple[str, ...]
    exit_code: int


@dataclass(frozen=True)
class QueuedRequest:
    """A waiting request.

    Args:
        count: Number of devices.
        since: RFC 3339, UTC.
    """

    user: str
    pid: int
    count: int
    since: str


@dataclass(frozen=True)
class LeasesReport:
    """The active leases and the waiting requests.

    Args:
        adopted: Ids of the leases that were created for processes and containers without one.
        set_aside: New paths of the files of a broken database.
    """

    node: str
    leases: tuple[LeaseReport, ...]
    waiting: tuple[QueuedRequest, ...]
    adopted: tuple[str, ...]
    set_aside: tuple[str, ...]
    exit_code: int


def lease_report(lease: Lease) -> LeaseReport:
    """The report of a lease."""
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
    """The values in a list with commas.

    >>> split_commas("A100, H100,")
    ('A100', 'H100')
    >>> split_commas("")
    ()
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def request_of(options: Options, leases: AnyLeases) -> DeviceRequest:
    """The request in the options.

    Raises:
        UsageError: An option has a wrong value, or two contradict each other.
    """
    memory = Memory.parse(options.memory, "--memory").mib if options.memory else None
    # A share without a budget would be the whole memory, and no other lease could share the GPU.
    if options.shared and memory is None:
        raise UsageError(
            "--shared is given without --memory", hint="pass the budget on each GPU, such as --memory 8GiB"
        )
    if options.pack and not options.shared:
        raise UsageError(
            "--pack is given without --shared", hint="add --shared --memory 8GiB, or leave --pack out"
        )
    count, devices = options.count, split_commas(options.gpu)
    if count < 1:
        raise UsageError(f"--count {count} is too small", hint="wanted: 1 or more")
    uuids: list[str] = []
    if devices:
        snap = leases.take_snapshot()
        kept.check_usable(snap)
        for name in devices:
            device = snap.device(name)
            if device is None or device.uuid is None:
                there = ", ".join(f"{d.index}: {d.title}" for d in snap.devices)
                raise UsageError(
                    f"--gpu {name!r} matches no GPU, or several", hint=f"this machine has {there}"
                )
            uuids.append(device.uuid)
        # 1 is the default: the number of named GPUs is the count.
        if options.count not in (1, len(uuids)):
            raise UsageError(
                f"--count {count} does not match the {len(uuids)} GPUs of --gpu", hint="leave --count out"
            )
        count = len(uuids)
        # A UUID of a MIG device in --gpu says as much as --mig.
        mig = options.mig or ("any" if any(uuid.startswith("MIG-") for uuid in uuids) else "")
    else:
        mig = options.mig
    capability = version_key(options.capability) if options.capability else ()
    if options.capability and not capability:
        raise UsageError(
            f"--capability {options.capability!r} is not a compute capability", hint="wanted: such as 8.0"
        )
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
    """Print a notice to standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def _on_wait(why: str) -> None:
    say(f"waiting: {why}")


def _warn(uuids: Sequence[str]) -> None:
    if warning := mig_warning(uuids):
        say(warning)


def _ids(options: Options) -> str:
    if options.ids not in ("uuid", "index"):
        raise UsageError(f"--ids {options.ids!r} is unknown", hint="wanted: --ids uuid or --ids index")
    return str(options.ids)


def _hours(text: str) -> float | None:
    return Duration.parse(text, "--for") / 3600 if text else None


def _lease(options: Options) -> GrantReport:
    leases, node, ids = open_leases(), socket.gethostname(), _ids(options)
    request, who = request_of(options, leases), whoami(options.project)
    # The driver has indices of GPUs only; CUDA accepts MIG devices by UUID.
    if ids == "index" and request.mig:
        raise UsageError("--ids index: MIG devices have no index of their own", hint="leave --ids out")
    if options.dry_run:
        snap = leases.take_snapshot()
        kept.check_usable(snap)
        planned = leases.plan(request, snap)
        uuids = tuple(device.uuid for device in planned.devices if device.uuid)
        if options.json:
            _warn(uuids)
        # The codes that the same request would get without --dry-run.
        code = 0 if uuids else 3 if request.count > len(planned.possible) else 75
        return GrantReport(node, None, uuids, {}, planned.considered, planned.why, True, code)
    granted = leases.acquire(
        request,
        who,
        # No process of this command stays: the deadline, the heartbeat or `release` ends the lease.
        kind=kept.DETACHED,
        hours=_hours(options.for_),
        heartbeat_s=Duration.parse(options.heartbeat, "--heartbeat") if options.heartbeat else None,
        wait_s=Duration.parse(options.wait, "--wait") if options.wait else 0.0,
        command=options.comment,
        on_wait=_on_wait,
    )
    if options.json:  # else `_show_lease` prints the warning, also for the answer of another machine
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


# `run` works through `takes_over`; only --json reaches `answer`.
def _no_document(_: Options) -> GrantReport:
    raise UsageError(
        "run has no JSON document: its output is the command's",
        hint="use `lease --json`, or leave --json out",
    )


def _run(options: Options) -> int:
    from gpukiln.gpus import run  # noqa: PLC0415 - only this verb needs it

    if not options.command and not (options.docker or options.podman):
        raise UsageError("run lacks the command", hint="such as `gpukiln-gpu run -n 1 -- python3 train.py`")
    if options.docker and options.podman:
        raise UsageError("both --docker and --podman are given", hint="pass one of them")
    if options.lease and (options.docker or options.podman):
        raise UsageError(
            f"--lease {options.lease} can't run a container, only a command",
            hint=f"`gpukiln-gpu args {options.lease}` prints the options that pass its GPUs to a container",
        )
    ids = _ids(options)
    if ids == "index" and (options.docker or options.podman):
        raise UsageError(
            "--ids index is not for containers",
            hint="leave --ids out: in a container GPUs are numbered from 0",
        )
    if ids == "index" and options.mig:
        raise UsageError("--ids index: MIG devices have no index of their own", hint="leave --ids out")
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
    # Exactly one: `release L-7 --mine` could end more than the user meant.
    if sum(asked) != 1:
        raise UsageError(
            "no lease is named, or several options name leases",
            hint="pass a lease such as L-42, --mine, or --holder USER",
        )
    if options.lease:
        if number_of(options.lease) is None:
            raise UsageError(
                f"{options.lease!r} is not an id of a lease",
                hint="wanted: such as L-42; `gpukiln-gpu leases` lists the active ones",
            )
        held = [lease for lease in (leases.find(options.lease),) if lease is not None]
    else:
        user = who.user if options.mine else options.holder
        held = [lease for lease in leases.current() if lease.user == user]
    released, running, refused = [], [], []
    # Read once before the releases: afterwards the leases no longer name their devices.
    energy = leases.energy_counters(held)
    for lease in held:
        try:
            if leases.release(lease, who, force=options.force, energy=energy):
                released.append(lease.id)
                # Ending another user's lease is recorded in the system's log, for the ledger is root's file.
                if isinstance(leases, Leases) and not leases.is_owner(
                    lease, who
                ):  # the service writes it to the log itself
                    syslog.syslog(
                        syslog.LOG_NOTICE, f"gpukiln-gpu: {who.user} has ended {lease.id} of {lease.user}"
                    )
        except GpukilnError as error:
            # One lease that can't be released does not keep the others.
            refused.append(error)
            continue
        # The lease is over, but its job has the locks: no grant gets these GPUs before it ends.
        if leases.is_running(lease):
            running.append(lease.id)
    if refused and released:
        raise PartialError(
            f"released {', '.join(released)}; {len(refused)} could not be released",
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
            f"{options.lease or 'no lease'} is not an active lease",
            hint="`gpukiln-gpu leases` lists the active ones; or request a new lease",
        )
    changed = leases.renew(lease, who, _hours(options.for_))
    return GrantReport(socket.gethostname(), lease_report(changed), changed.uuids, {}, (), "", False, 0)


def _leases(options: Options) -> LeasesReport:
    leases: AnyLeases | None = None
    moved: list[str] = []
    adopted: list[str] = []
    if options.rebuild:
        if isinstance(open_leases(), MemberLeases):
            raise RefusedError("only root can run leases --rebuild", hint="sudo gpukiln-gpu leases --rebuild")
        # The database can't be opened here, so `open_leases` comes after it.
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
        print(f"renamed: {path}")
    if node["adopted"]:
        print(f"created for processes and containers without a lease: {', '.join(node['adopted'])}")
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
        who = f"{request['user']} (pid {request['pid']})"
        print(f"waits: {who} for {request['count']} since {request['since'][:19]}")


VERBS = (
    Verb(
        "lease",
        "Lease GPUs until a deadline or a release; prints the environment variables for CUDA.",
        (
            *REQUEST_OPTIONS,
            DURATION_OPTION,
            IDS_OPTION,
            Option("heartbeat", "the lease ends when it is not renewed within this time", value="10m"),
            Option("comment", "a comment for other users"),
            Option("dry_run", "print what would be leased, without a lease", default=False),
        ),
        _lease,
        _show_lease,
        changes=True,
        examples=("-n 2 --memory 24GiB --for 2h", "--model A100 --explain --dry-run"),
    ),
    Verb(
        "run",
        "Run a command or a container on leased GPUs; the lease ends with it.",
        (
            *REQUEST_OPTIONS,
            DURATION_OPTION,
            IDS_OPTION,
            Option("lease", "run under an existing lease", value="L-42"),
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
            Option("mine", "all of your leases", default=False),
            Option("holder", "all leases of this user"),
            Option("force", "also end other users' leases; the ledger records it", default=False),
        ),
        _release,
        _show_release,
        changes=True,
    ),
    Verb(
        "renew",
        "Extend a lease: restart its heartbeat, and its deadline with --for.",
        (LEASE_OPTION, DURATION_OPTION),
        _renew,
        _show_lease,
        changes=True,
    ),
    Verb(
        "leases",
        "List the active leases and the waiting requests.",
        (
            Option("reconcile", "create leases for containers and processes that have none", default=False),
            Option("rebuild", "replace a broken database by a new one", default=False),
        ),
        _leases,
        _show_leases,
    ),
)
