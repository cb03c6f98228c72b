"""Which NVLinks should be active, for the check of the host suite and for `watch`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# Boards whose NVLinks are wired on a baseboard. The NVLinks of other boards end at a bridge between two
# cards, which is optional.
_WIRED = re.compile(r"(?i)SXM|\b(?:H20|G?[HB]\d00)\b")
_CARD = re.compile(r"(?i)\bPCIe?\b|\bNVL$|\bRTX\b")


@dataclass(frozen=True)
class GpuLinks:
    """The NVLinks of a GPU.

    Args:
        key: Identifies the GPU in its group.
        label: The GPU's name for people.
        name: The GPU's model.
        up: Numbers of active links; only their count matters.
        down: Numbers of inactive links.
        peers: Keys of the GPUs at the other end of active links.
    """

    key: Hashable
    label: str
    name: str
    up: Sequence[int]
    down: Sequence[int]
    peers: frozenset[Hashable]


def is_wired(name: str) -> bool:
    """Whether the NVLinks of a model are wired on a baseboard, so that some must be active.

    >>> is_wired("NVIDIA A100-SXM4-40GB"), is_wired("NVIDIA H200")
    (True, True)
    >>> is_wired("NVIDIA A100-PCIE-40GB"), is_wired("NVIDIA H100 NVL")
    (False, False)
    """
    # Not all of them: a virtual machine with 1 to 4 of an NVSwitch's GPUs has 0 to 6 of 12 links (Fabric
    # Manager user guide, "Full Passthrough Virtualization Model"), H100 NVL has 12 of 18
    # (Azure/azurehpc-health-checks#162).
    return _WIRED.search(name) is not None and _CARD.search(name) is None


def comparable_groups(cards: Iterable[GpuLinks]) -> list[tuple[GpuLinks, ...]]:
    """Groups of GPUs that must have equally many active links: wired ones of a model, bridged cards."""
    # A card without a bridge is a group of its own: three RTX A6000 with 4, 4 and 0 active links are healthy.
    models: dict[str, list[GpuLinks]] = defaultdict(list)
    for card in cards:
        models[card.name].append(card)
    groups: list[tuple[GpuLinks, ...]] = []
    for name, same in models.items():
        if is_wired(name):
            groups.append(tuple(same))
            continue
        rest = list(same)
        while rest:
            group = [rest.pop(0)]
            for gpu in group:  # the loop also reaches the GPUs that it appends
                near = [other for other in rest if other.key in gpu.peers or gpu.key in other.peers]
                group += near
                rest = [other for other in rest if other not in near]
            groups.append(tuple(sorted(group, key=same.index)))
    return groups


def links_text(group: Sequence[GpuLinks]) -> str:
    """The active links of each GPU in words."""
    return "; ".join(
        f"{card.label} {len(card.up)} of {len(card.up) + len(card.down)}"
        + (f", not {', '.join(map(str, card.down))}" if card.down else "")
        for card in group
    )


def link_mismatch(group: Sequence[GpuLinks]) -> str | None:
    """What is wrong with a group of `comparable_groups`; None for nothing."""
    if len({len(card.up) for card in group}) != 1:
        return f"active NVLinks of {group[0].name}: {links_text(group)}; wanted as many on each of them"
    if is_wired(group[0].name) and group[0].down and not group[0].up:
        return f"all NVLinks of all {group[0].name} are inactive, wanted some active"
    return None
