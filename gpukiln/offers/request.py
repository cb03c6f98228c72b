"""Reads what people ask for: `A10G,L4:1..4`, `24GiB..:2`, `H100:8`.

The form of a request for GPUs is dstack's (dstackai/dstack, docs/docs/concepts/tasks.md, resources): parts
with `:` between them, in any order, each of them names, a memory or a count, and `..` for a range.
"""

from __future__ import annotations

import re
from typing import get_args

from gpukiln.catalog.gpu_names import keys_of
from gpukiln.catalog.gpus import gpus
from gpukiln.catalog.instance_types import instance_types
from gpukiln.errors import UsageError
from gpukiln.offers.model import Request, Spot
from gpukiln.typed import unknown
from gpukiln.units import Memory, Money, Span

GPU_SYNTAX = (
    "NAMES, MEMORY and COUNT with `:` between them, for example T4:1, 24GiB..:2, A10G,L4:1..4 or H100:80GB:8"
)
# `any` for workloads that are built for both.
ARCHES = ("x86_64", "arm64", "any")
_END = r"[\d.]{1,40}\s*(?:[KMG]i?B?|[TPE]i?B)"  # of a memory; 1080Ti is a GPU, and a number a count


def parse_request(
    gpu: str,
    *,
    cpu: int = 0,
    memory: str = "",
    disk: str = "",
    arch: str = "x86_64",
    efa: int = 0,
    max_price: str = "",
    spot: str = "no",
    fractions: bool = False,
) -> Request:
    """Read a request.

    Args:
        gpu: See above; empty: any GPU, one or more.
        memory: At least so much main memory, for example 32GiB.
        disk: At least so much local NVMe, for example 500GB.
        max_price: USD an hour.

    Raises:
        UsageError: It is none; says what was found and what is wanted.

    >>> parse_request("A10G,L4:1..4").gpus
    ('a10g', 'l4')
    >>> parse_request("24GiB..:2").gpu_memory_mib
    Span(low=24576, high=None)
    """
    if arch not in ARCHES:
        raise unknown("architecture", arch, ARCHES)
    if spot not in get_args(Spot):
        raise unknown("--spot", spot, get_args(Spot))
    count, names, mib, gb = _gpu(gpu)
    return Request(
        gpus=names,
        count=count,
        gpu_memory_mib=mib,
        gpu_memory_gb=gb,
        vcpu=cpu,
        memory_mib=Memory.parse(memory, "--memory", zero=True).mib if memory else 0,
        local_gb=Memory.parse(disk, "--disk", zero=True).gb if disk else 0,
        arch=arch,  # type: ignore[arg-type]  # one of ARCHES
        efa=efa,
        max_price=Money.parse(max_price, "--max-price") if max_price else None,
        spot=spot,  # type: ignore[arg-type]  # one of Spot
        fractions=fractions,
    )


def _gpu(text: str) -> tuple[Span, tuple[str, ...], Span | None, Span | None]:
    """Count, keys of GPUs, memory as counted, memory as sold."""
    parts: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(":"))):
        if re.fullmatch(r"\d{0,9}(\.\.)?\d{0,9}", part):
            what = "count"
        elif re.fullmatch(rf"(?:{_END}|[\d.]{{1,40}})?\.\.(?:{_END})?|{_END}", part, re.IGNORECASE):
            what = "memory"
        else:
            what = "names"
        if what in parts:
            raise UsageError(
                f"--gpu {text!r} has two {what}: {parts[what]} and {part}", hint=f"wanted: {GPU_SYNTAX}"
            )
        parts[what] = part
    names = _names(parts["names"]) if "names" in parts else ()
    count = Span.parse(parts["count"], "--gpu", least=1) if "count" in parts else Span(1)
    mib, gb = _memory(parts["memory"], text) if "memory" in parts else (None, None)
    return count, names, mib, gb


def _memory(part: str, text: str) -> tuple[Span | None, Span | None]:
    """As counted in MiB, or as sold in GB: `24GB` is what the label says."""
    low, _, high = (piece.strip() for piece in part.partition(".."))
    # A unit at the upper end alone is meant for both, as in prose.
    if low and high and low[-1].isdigit():
        part = (
            low + high.lstrip("0123456789. ") + ".." + high
        )  # the upper end's unit counts for both ends: 16..24GiB
    # GiB is what the driver counts, GB what the data sheet says: mixed they have no meaning.
    binary = {"i" in end.lower() for end in part.split("..") if end.strip()}
    if len(binary) == 2:
        raise UsageError(
            f"--gpu {text!r} mixes GiB and GB", hint="GiB is what the driver counts, GB what it is sold as"
        )
    if binary == {True}:
        return Span.parse(part, "--gpu", read=lambda end, option: Memory.parse(end, option).mib), None
    return None, Span.parse(part, "--gpu", read=lambda end, option: Memory.parse(end, option).gb)


def _names(part: str) -> tuple[str, ...]:
    """Keys of the catalogue."""
    keys_found: list[str] = []
    for word in (piece.strip() for piece in part.split(",") if piece.strip()):
        if word in instance_types():
            raise UsageError(
                f"--gpu {word!r} is an instance type, wanted GPUs",
                hint=f"`invoke offer.show {word}` shows it",
            )
        if not (keys := keys_of(word)):
            raise unknown("GPU", word, [board.name for board in gpus().values()])
        keys_found += keys
    if not keys_found:
        raise UsageError(f"--gpu {part!r} names no GPU", hint=f"wanted: {GPU_SYNTAX}")
    return tuple(dict.fromkeys(keys_found))
