"""Which GPUs a request gets, with the reason why each was or was not selected."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpukiln.compatibility import version_key
from gpukiln.errors import UsageError
from gpukiln.gpus.config import BUSY_KINDS
from gpukiln.gpus.model import Device, Driver, GpuProcess
from gpukiln.gpus.topology import describe, linked_groups, rank

EXCLUSIVE, SHARED = "exclusive", "shared"
RESERVE_MIB = 512  # of each shared GPU, for CUDA contexts: their memory is in no budget
COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class DeviceRequest:
    """A request for devices.

    Args:
        memory_mib: Of each device: the budget in mode shared, else the memory that must be free.
        models: Words of the names of acceptable models; empty for any.
        prefer: Models to select first, the most preferred first.
        capability: The minimum compute capability, for example (8, 0).
        cuda: Conditions on the driver's CUDA version, for example ((">=", (12, 1)),).
        devices: Only these UUIDs.
        mig: A profile: MIG devices in place of GPUs; `any` for every profile.
        linked: Whether NVLinks must join every two devices.
        pack: In mode shared, whether to fill devices that other leases share already.
        ignore_unleased: Whether a device with processes without a lease counts as free.
        counts: Kinds of processes that make a GPU busy; None for those of the machine's configuration.
        repair: For a reset or a change of MIG: also selects sick GPUs and GPUs with MIG on, takes precedence
            over waiting requests, and counts for no limit.
    """

    count: int = 1
    memory_mib: int | None = None
    mode: str = EXCLUSIVE
    models: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    capability: tuple[int, ...] = ()
    cuda: tuple[tuple[str, tuple[int, ...]], ...] = ()
    devices: tuple[str, ...] = ()
    mig: str = ""
    linked: bool = False
    pack: bool = False
    ignore_unleased: bool = False
    counts: tuple[str, ...] | None = None
    repair: bool = False


@dataclass(frozen=True)
class DeviceClaims:
    """What active leases have of a device.

    Args:
        exclusive: Whether a lease has it exclusively.
        budget_mib: Sum of the budgets of shared leases.
        holders: The leases and their users, for people.
        reserved: The waiting request for which it is reserved, in words; empty for none.
    """

    exclusive: bool = False
    budget_mib: int = 0
    holders: tuple[str, ...] = ()
    reserved: str = ""


@dataclass(frozen=True)
class DeviceCandidate:
    """A device in a selection.

    Args:
        device: UUID; null for a lost GPU whose UUID is not known.
        taken: Whether it was selected.
        never: Why it can never serve this request.
        not_now: Why it can't serve the request now.
        score: The values by which it was compared, lower is better, in words.
    """

    device: str | None
    index: int
    name: str | None
    taken: bool
    never: tuple[str, ...]
    not_now: tuple[str, ...]
    score: str


@dataclass(frozen=True)
class Selection:
    """The result of a selection.

    Args:
        devices: The selected ones; empty where the request can't be served now.
        possible: The devices that could ever serve it.
        free: How many of them could serve it now.
        why: How several are linked, or why none is selected.
    """

    devices: tuple[Device, ...]
    possible: tuple[Device, ...]
    free: int
    why: str
    considered: tuple[DeviceCandidate, ...] = field(default=())


def parse_cuda_requirement(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Read conditions on a CUDA version.

    >>> parse_cuda_requirement(">=12.1,<13")
    (('>=', (12, 1)), ('<', (13,)))
    >>> parse_cuda_requirement("12.4")
    (('>=', (12, 4)),)

    Raises:
        UsageError: The text is not a list of conditions.
    """
    comparisons = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(>=|<=|==|>|<)?(\d+(?:\.\d+)?)", part)
        if match is None:
            raise UsageError(
                f"--cuda {text!r} is not a condition on a version",
                hint="wanted: such as '>=12.1' or '>=12.1,<13'",
            )
        comparisons.append((match[1] or ">=", version_key(match[2])))
    return tuple(comparisons)


def select(
    request: DeviceRequest,
    devices: Sequence[Device],
    processes: Sequence[GpuProcess],
    driver: Driver,
    taken: Mapping[str, DeviceClaims],
) -> Selection:
    """Select devices for a request; changes nothing.

    Args:
        taken: The claims of active leases by UUID.
    """
    parents = {device.parent for device in devices if device.kind == "mig"}
    # A GPU whose MIG devices are leased can't be leased as a whole, whatever its own claims are.
    pieces = {
        device.uuid: taken[device.uuid]
        for device in devices
        if device.kind == "mig" and device.uuid and device.uuid in taken
    }
    rows: list[tuple[Device, list[str], list[str]]] = []
    for device in devices:
        never = _permanent_obstacles(request, device, driver, parents)
        not_now = [] if never else _current_obstacles(request, device, processes, taken)
        if device.kind == "gpu" and any(p.parent == device.uuid and p.uuid in pieces for p in devices):
            never = never or ["its MIG devices are leased"]
        rows.append((device, never, not_now))
    # A request that these can't serve is refused at once (exit code 3); the others may wait (75).
    possible = tuple(device for device, never, _ in rows if not never)
    able = [device for device, never, not_now in rows if not never and not not_now]
    chosen: tuple[Device, ...] = ()
    why = ""
    if request.count > len(possible):
        why = f"{len(possible)} of this machine's devices can serve it, wanted {request.count}"
    elif request.count > len(able):
        why = f"{len(able)} of {len(possible)} devices that can serve it are free, wanted {request.count}"
    else:
        # A single device has no links to compare: its score decides.
        groups = linked_groups(able, request.count) if request.count > 1 else ((device,) for device in able)
        # One environment can't use both: CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are for different
        # libraries.
        groups = (group for group in groups if len({device.vendor for device in group}) == 1)
        if request.linked and request.count > 1:
            groups = (group for group in groups if rank(group)[0][0] > 0)
        # min() keeps the first of equals: the lowest indices, for reproducible grants.
        best = min(groups, key=lambda group: _group_score(request, group, taken), default=None)
        if best is None:
            how = "joined by NVLinks" if request.linked else "of one vendor"
            why = f"no group of {request.count} free devices is {how}"
        else:
            chosen, why = tuple(best), describe(best) if request.count > 1 else ""
    considered = tuple(
        DeviceCandidate(
            device.uuid,
            device.index,
            device.name,
            device in chosen,
            tuple(never),
            tuple(not_now),
            "" if never or not_now else _score_words(request, device, taken),
        )
        for device, never, not_now in rows
    )
    return Selection(chosen, possible, len(able), why, considered)


def _permanent_obstacles(
    request: DeviceRequest, device: Device, driver: Driver, parents: set[str | None]
) -> list[str]:
    """Why a device can never serve a request."""
    reasons = []
    wants_mig = bool(request.mig)
    if device.kind == "mig":
        if request.mig not in ("any", device.profile) and device.uuid not in request.devices:
            reasons.append(
                f"it is a MIG device {device.profile}" + (f", wanted {request.mig}" if wants_mig else "")
            )
    elif wants_mig:
        reasons.append("it is not a MIG device")
    elif (device.mig_enabled or device.uuid in parents) and not request.repair:
        reasons.append("MIG is on: lease its MIG devices with --mig")
    if request.devices and device.uuid not in request.devices:
        reasons.append("the request names other devices")
    name = (device.name or "").lower()
    if request.models and device.readable and not any(_is_model(name, model) for model in request.models):
        reasons.append(f"it is {device.name}, wanted {' or '.join(request.models)}")
    total = device.memory_total_mib
    # Two processes on one GPU have two CUDA contexts; with budgets up to the last MiB one of them would fail
    # to start.
    reserve = RESERVE_MIB if request.mode == SHARED else 0
    if (
        request.memory_mib is not None
        and total is not None
        and total - (device.memory_reserved_mib or 0) < request.memory_mib + reserve
    ):
        reasons.append(
            f"it has {total} MiB, wanted {request.memory_mib}"
            + (f" and {reserve} in reserve" if reserve else "")
        )
    reasons += _cuda_obstacles(request, device, driver)
    # No program can create a CUDA context on such a device (nvml.h, NVML_COMPUTEMODE_PROHIBITED).
    if device.compute_mode == "prohibited":
        reasons.append("its compute mode is prohibited")
    return reasons


def _cuda_obstacles(request: DeviceRequest, device: Device, driver: Driver) -> list[str]:
    reasons = []
    if device.vendor != "nvidia" and (request.capability or request.cuda):
        return ["it is not an NVIDIA GPU, so it has no CUDA"]
    if (
        request.capability
        and device.compute_capability
        and version_key(device.compute_capability) < request.capability
    ):
        reasons.append(
            f"its compute capability is {device.compute_capability}, "
            f"wanted {'.'.join(map(str, request.capability))}"
        )
    for sign, version in request.cuda:
        if driver.cuda is None:
            reasons.append("the driver does not report its CUDA version")
        elif not COMPARISONS[sign](version_key(driver.cuda), version):
            reasons.append(f"the driver has CUDA {driver.cuda}, wanted {sign}{'.'.join(map(str, version))}")
    return reasons


def _is_model(name: str, model: str) -> bool:
    """Whether a name has all words of a model.

    >>> _is_model("nvidia rtx pro 6000 blackwell", "RTX Pro 6000")
    True
    >>> _is_model("nvidia l40s", "L4")
    False
    """
    # A100-SXM4-40GB and Tesla T4: a model is letters with a number; what follows is another word.
    words = re.findall(r"[a-z]+\d+[a-z]*|\w+", name)
    return all(word in words for word in re.findall(r"\w+", model.lower()))


def _current_obstacles(
    request: DeviceRequest, device: Device, processes: Sequence[GpuProcess], taken: Mapping[str, DeviceClaims]
) -> list[str]:
    """Why a device can't serve a request now."""
    if not device.readable:
        return [f"it can't be read: {device.error}"]
    if device.uuid is None:
        return ["it has no UUID"]
    reasons = [
        finding.message for finding in device.findings if finding.severity == "error" and not request.repair
    ]
    has, whole = taken.get(device.uuid, DeviceClaims()), taken.get(device.parent or "", DeviceClaims())
    if whole.exclusive:
        reasons.append(f"its GPU is leased: {', '.join(whole.holders)}")
    if has.exclusive:
        reasons.append(f"leased: {', '.join(has.holders)}")
    elif has.holders and request.mode == EXCLUSIVE:
        reasons.append(f"shared by {', '.join(has.holders)}")
    if has.reserved and not request.repair:
        reasons.append(has.reserved)
    # Displays count only where the machine's configuration says so.
    counts = BUSY_KINDS if request.counts is None else request.counts
    mine = [
        p
        for p in processes
        if p.device == device.uuid and p.lease is None and p.state != "gone" and p.kind in counts
    ]
    if mine and not request.ignore_unleased and not has.holders:
        who = ", ".join(_process_text(process) for process in mine)
        reasons.append(
            f"busy without a lease: {who}; --ignore-unleased selects it, and [busy] counts in "
            "/etc/gpukiln/gpus.toml has the kinds of processes that count"
        )
    if request.memory_mib is not None:
        if request.mode == SHARED:
            free = (
                (device.memory_total_mib or 0)
                - (device.memory_reserved_mib or 0)
                - RESERVE_MIB
                - has.budget_mib
            )
            if request.memory_mib > free:
                reasons.append(f"{free} MiB are in no budget, wanted {request.memory_mib}")
        elif (
            not has.holders
            and device.memory_free_mib is not None
            and device.memory_free_mib < request.memory_mib
        ):
            reasons.append(f"{device.memory_free_mib} MiB are free, wanted {request.memory_mib}")
    return reasons


def _process_text(process: GpuProcess) -> str:
    """A process with its kind and its user, for a message."""
    program = (process.command or "").split(" ")[0].rpartition("/")[2]
    whose = f"of {process.user}" if process.user else process.state
    return " ".join(word for word in (f"pid {process.pid}", program, f"({process.kind})", whose) if word)


def _score(request: DeviceRequest, device: Device, taken: Mapping[str, DeviceClaims]) -> tuple[float, ...]:
    """The values by which a device is compared; lower is better."""
    name = (device.name or "").lower()
    preferred = next(
        (n for n, model in enumerate(request.prefer) if _is_model(name, model)), len(request.prefer)
    )
    has = taken.get(device.uuid or "", DeviceClaims())
    shared = float(has.budget_mib if not request.pack else -has.budget_mib)
    return (
        float(preferred),
        # A GPU with a warning still works, so it is selected only after the healthy ones.
        float(device.health != "ok"),
        shared,
        float(device.memory_used_mib or 0),
        float(device.utilization_percent or 0),
        float(device.temperature_c or 0),
        (device.power_watts or 0.0) / (device.power_limit_watts or 1.0),
        float(device.index),
    )


def _group_score(
    request: DeviceRequest, group: Sequence[Device], taken: Mapping[str, DeviceClaims]
) -> tuple[object, ...]:
    scores = sorted(_score(request, device, taken) for device in group)
    # A group is as little preferred as its least preferred device.
    preferred = max(score[0] for score in scores)
    if len(group) == 1:
        return (preferred, (), tuple(scores))
    # Links decide before load: a group with a slow link slows down every step of a job on several GPUs.
    (links, near, p2p), one_node = rank(group)
    return (preferred, (-links, -near, -p2p, not one_node), tuple(zip(*scores)))


def _score_words(request: DeviceRequest, device: Device, taken: Mapping[str, DeviceClaims]) -> str:
    has = taken.get(device.uuid or "", DeviceClaims())
    words = [f"{device.memory_used_mib or 0} MiB used", f"{device.utilization_percent or 0}% busy"]
    if device.temperature_c is not None:
        words.append(f"{device.temperature_c} C")
    if request.mode == SHARED:
        words.insert(0, f"{has.budget_mib} MiB in budgets")
    if device.health != "ok":
        words.append(device.health)
    return ", ".join(words)
