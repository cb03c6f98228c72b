"""The best linked group of GPUs: the one whose worst link is the best."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpukiln.errors import BusyError, IncompatibleError
from gpukiln.gpus.model import Device, Peer

# Common ancestors of two GPUs, the nearest first; NVLinks are better than all of these.
ANCESTORS = (
    "one board",
    "one switch",
    "several switches",
    "one host bridge",
    "one NUMA node",
    "across NUMA nodes",
)
MAX_GROUPS = 50_000  # up to this number every group is compared; else one group grows from each GPU


@dataclass(frozen=True)
class GpuGroup:
    """GPUs for one job.

    Args:
        uuids: In the order of their indices.
        why: The worst link, in words.
    """

    uuids: tuple[str, ...]
    why: str


def link_quality(first: Device, other: Device) -> tuple[int, int, int]:
    """The quality of a link: NVLinks, common ancestor, P2P; higher is better."""
    way = next((peer for peer in first.peers if peer.index == other.index), None)
    if way is None:
        return (0, -len(ANCESTORS) - 1, 0)
    near = -ANCESTORS.index(way.ancestor) if way.ancestor in ANCESTORS else -len(ANCESTORS)
    return (way.nvlinks, near, 1 if way.p2p == "ok" else 0)


def worst_link(group: Sequence[Device]) -> tuple[int, int, int]:
    """The worst link of a group; a single GPU has the best of all."""
    return min((link_quality(a, b) for a, b in itertools.permutations(group, 2)), default=(99, 0, 1))


def linked_groups(devices: Sequence[Device], count: int) -> Iterable[tuple[Device, ...]]:
    """Groups of `count` devices to compare: all, or one grown from each device where there are too many."""
    total = 1
    for n in range(count):
        # The number of groups, a binomial coefficient: 12 of 24 GPUs are 2.7 million.
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
    """The rank of a group: its worst link, then whether it is on one NUMA node."""
    nodes = {gpu.numa_node for gpu in group}
    return worst_link(group), len(nodes) == 1


def describe(group: Sequence[Device]) -> str:
    """The worst link of a group, in words."""
    if len(group) < 2:
        return "a single GPU"
    links, near, _ = worst_link(group)
    if links:
        return f"at least {links} NVLinks join every two"
    pairs: list[Peer] = [
        peer for gpu in group for peer in gpu.peers if peer.index in {other.index for other in group}
    ]
    if near == -len(ANCESTORS) - 1 or not pairs:
        return "their links are not reported"
    word = ANCESTORS[-near] if -near < len(ANCESTORS) else "an unknown ancestor"
    return f"the worst linked pair has no NVLink; in common: {word}"


def best_group(devices: Sequence[Device], count: int, *, free: bool = False) -> GpuGroup:
    """The best linked group of a machine's GPUs.

    Args:
        free: Only GPUs that can be leased now.

    Raises:
        IncompatibleError: The machine has fewer GPUs.
        BusyError: Fewer GPUs are free.
    """
    whole = [device for device in devices if device.kind == "gpu" and device.readable and device.uuid]
    if count > len(whole):
        raise IncompatibleError(
            f"--best {count}: this machine has {len(whole)} readable GPUs", hint="ask for fewer"
        )
    able = [gpu for gpu in whole if gpu.allocatable] if free else whole
    if count > len(able):
        raise BusyError(f"--best {count}: {len(able)} of {len(whole)} GPUs are free", hint="try again later")
    group = max(linked_groups(able, count), key=lambda group: (rank(group), [-gpu.index for gpu in group]))
    return GpuGroup(tuple(gpu.uuid for gpu in group if gpu.uuid), describe(group))
