"""Which GPUs are best linked: the group whose worst link is best."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpukiln.errors import BusyError, IncompatibleError
from gpukiln.gpus.model import Device, Peer

# What joins two GPUs, the best first; NVLinks are better than all of these.
ANCESTORS = (
    "one board",
    "one switch",
    "several switches",
    "one host bridge",
    "one NUMA node",
    "across NUMA nodes",
)
MAX_GROUPS = 50_000  # of so many all are looked at; else the group grows from each GPU


@dataclass(frozen=True)
class GpuGroup:
    """GPUs that are to work together.

    Args:
        uuids: In the order of their indices.
        why: Its worst link, in words.
    """

    uuids: tuple[str, ...]
    why: str


def link_quality(first: Device, other: Device) -> tuple[int, int, int]:
    """How well two GPUs reach each other: NVLinks, what they have in common, P2P; more is better."""
    way = next((peer for peer in first.peers if peer.index == other.index), None)
    if way is None:
        return (0, -len(ANCESTORS) - 1, 0)
    near = -ANCESTORS.index(way.ancestor) if way.ancestor in ANCESTORS else -len(ANCESTORS)
    return (way.nvlinks, near, 1 if way.p2p == "ok" else 0)


def worst_link(group: Sequence[Device]) -> tuple[int, int, int]:
    """The worst link of a group; one GPU alone has the best of all."""
    return min((link_quality(a, b) for a, b in itertools.permutations(group, 2)), default=(99, 0, 1))


def linked_groups(devices: Sequence[Device], count: int) -> Iterable[tuple[Device, ...]]:
    """Groups of so many devices that are worth a look: every one, or where those are too many the likely."""
    total = 1
    for n in range(count):
        total = total * (len(devices) - n) // (n + 1)
    if total <= MAX_GROUPS:
        yield from itertools.combinations(devices, count)
        return
    for first in devices:
        group = [first]
        while len(group) < count:
            rest = [device for device in devices if device not in group]
            group.append(max(rest, key=lambda device: (worst_link([*group, device]), -device.index)))
        yield tuple(sorted(group, key=lambda device: device.index))


def rank(group: Sequence[Device]) -> tuple[tuple[int, int, int], bool]:
    """What makes a group of several better than another: its worst link, then one NUMA node."""
    nodes = {gpu.numa_node for gpu in group}
    return worst_link(group), len(nodes) == 1


def describe(group: Sequence[Device]) -> str:
    """The worst link of a group, in words."""
    if len(group) < 2:
        return "one GPU alone"
    links, near, _ = worst_link(group)
    if links:
        return f"every two are joined by {links} NVLinks or more"
    pairs: list[Peer] = [
        peer for gpu in group for peer in gpu.peers if peer.index in {other.index for other in group}
    ]
    if near == -len(ANCESTORS) - 1 or not pairs:
        return "how they reach each other is not told"
    word = ANCESTORS[-near] if -near < len(ANCESTORS) else "something that is not told"
    return f"the worst two have {word} in common, and no NVLink"


def best_group(devices: Sequence[Device], count: int, *, free: bool = False) -> GpuGroup:
    """The best linked GPUs of a machine.

    Args:
        free: Whether only those count that can be leased now.

    Raises:
        IncompatibleError: There are not so many.
        BusyError: There are, but not so many are free.
    """
    whole = [device for device in devices if device.kind == "gpu" and device.readable and device.uuid]
    if count > len(whole):
        raise IncompatibleError(
            f"--best {count}: this machine has {len(whole)} GPUs that can be read", hint="ask for fewer"
        )
    able = [gpu for gpu in whole if gpu.allocatable] if free else whole
    if count > len(able):
        raise BusyError(f"--best {count}: {len(able)} of {len(whole)} GPUs are free", hint="ask again later")
    group = max(linked_groups(able, count), key=lambda group: (rank(group), [-gpu.index for gpu in group]))
    return GpuGroup(tuple(gpu.uuid for gpu in group if gpu.uuid), describe(group))
