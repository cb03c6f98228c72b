"""Reads what people ask for: `A10G,L4:1..4`, `24GiB..:2`, `H100:8`.

The form of a request for GPUs is dstack's (dstackai/dstack, docs/docs/concepts/tasks.md, resources): parts
with `:` between them, in any order, each of them names, a memory or a count, and `..` for a range.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import get_args

from gpukiln.catalog.gpu_names import keys_of
from gpukiln.catalog.gpus import gpus
from gpukiln.catalog.instance_types import instance_types
from gpukiln.errors import UsageError
from gpukiln.offers.model import Request, Span, Spot
from gpukiln.typed import unknown

FORM = (
    "NAMES, MEMORY and COUNT with `:` between them, for example T4:1, 24GiB..:2, A10G,L4:1..4 or H100:80GB:8"
)
ARCHES = ("x86_64", "arm64", "any")
_SIZE = r"(\d{1,12}(?:\.\d{1,12})?)\s*(MiB|GiB|TiB|MB|GB|TB)"
_BINARY = {"MIB": 1, "GIB": 1024, "TIB": 1024**2}
_DECIMAL = {"MB": Decimal("0.001"), "GB": Decimal(1), "TB": Decimal(1000)}


def parse(
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
        memory_mib=mebibytes(memory, "--memory") if memory else 0,
        local_gb=gigabytes(disk, "--disk") if disk else 0,
        arch=arch,  # type: ignore[arg-type]  # one of ARCHES
        efa=efa,
        max_price=money(max_price, "--max-price") if max_price else None,
        spot=spot,  # type: ignore[arg-type]  # one of Spot
        fractions=fractions,
    )


def mebibytes(text: str, option: str) -> int:
    """An amount of memory in MiB; GB counts as 10^9 bytes.

    Raises:
        UsageError: It is none.
    """
    found = re.fullmatch(_SIZE, text.strip(), re.IGNORECASE)
    if not found:
        raise UsageError(f"{option} {text!r} is no amount of memory", hint="wanted: for example 32GiB")
    unit = found[2].upper()
    if unit in _BINARY:
        return int(Decimal(found[1]) * _BINARY[unit])
    return int(Decimal(found[1]) * _DECIMAL[unit] * 10**9 / 2**20)


def gigabytes(text: str, option: str) -> int:
    """An amount of storage in GB of 10^9 bytes, as EC2 counts local storage.

    Raises:
        UsageError: It is none.
    """
    return -(-mebibytes(text, option) * 2**20 // 10**9)


def money(text: str, option: str) -> Decimal:
    """An amount of USD.

    Raises:
        UsageError: It is none, or not more than nothing.
    """
    try:
        found = Decimal(text.strip().removeprefix("$"))
    except InvalidOperation:
        found = Decimal(0)
    if not found.is_finite() or found <= 0:
        raise UsageError(f"{option} {text!r} is no price", hint="wanted: USD, for example 2.50")
    return found


def _gpu(text: str) -> tuple[Span, tuple[str, ...], Span | None, Span | None]:
    """Count, keys of GPUs, memory as counted, memory as sold."""
    found: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(":"))):
        if re.fullmatch(r"\d{0,9}(\.\.)?\d{0,9}", part):
            what = "count"
        elif re.fullmatch(rf"(?:{_SIZE}|\d{{1,12}})?\.\.(?:{_SIZE})?|{_SIZE}", part, re.IGNORECASE):
            what = "memory"
        else:
            what = "names"
        if what in found:
            raise UsageError(
                f"--gpu {text!r} has two {what}: {found[what]} and {part}", hint=f"wanted: {FORM}"
            )
        found[what] = part
    names = _names(found["names"]) if "names" in found else ()
    count = _count(found["count"], text) if "count" in found else Span(1)
    mib, gb = _memory(found["memory"], text) if "memory" in found else (None, None)
    return count, names, mib, gb


def _count(part: str, text: str) -> Span:
    low, dots, high = part.partition("..")
    if part == "..":
        raise UsageError(f"--gpu {text!r}: `..` has no end", hint=f"wanted: {FORM}")
    span = Span(int(low or 1), int(high) if high else (None if dots else int(low)))
    if span.low < 1:
        raise UsageError(
            f"--gpu {text!r} asks for no GPU", hint="machines without one are not in the catalogue"
        )
    return _ordered(span, text)


def _memory(part: str, text: str) -> tuple[Span | None, Span | None]:
    """As counted in MiB, or as sold in GB: `24GB` is what the label says."""
    low, dots, high = (one.strip() for one in part.partition(".."))
    if low and high and low[-1].isdigit():
        low += high.lstrip("0123456789. ")  # 16..24GiB
    binary = {"i" in end.lower() for end in (low, high) if end}
    if len(binary) == 2:
        raise UsageError(
            f"--gpu {text!r} mixes GiB and GB", hint="GiB is what the driver counts, GB what it is sold as"
        )
    size = (lambda end: mebibytes(end, "--gpu")) if binary == {True} else _label
    first = size(low) if low else 0
    span = _ordered(Span(first, size(high) if high else (None if dots else first)), text)
    return (span, None) if binary == {True} else (None, span)


def _label(text: str) -> int:
    number = text.rstrip("TGMBtgmb ")
    return int(Decimal(number) * _DECIMAL[text[len(number) :].strip().upper()])


def _ordered(span: Span, text: str) -> Span:
    if span.high is not None and span.high < span.low:
        raise UsageError(f"--gpu {text!r}: {span.low} is more than {span.high}", hint="the smaller one first")
    return span


def _names(part: str) -> tuple[str, ...]:
    """Keys of the catalogue."""
    found: list[str] = []
    for word in (one.strip() for one in part.split(",") if one.strip()):
        if word in instance_types():
            raise UsageError(
                f"--gpu {word!r} is an instance type, wanted GPUs",
                hint=f"`invoke offer.show {word}` shows it",
            )
        if not (keys := keys_of(word)):
            raise unknown("GPU", word, [board.name for board in gpus().values()])
        found += keys
    if not found:
        raise UsageError(f"--gpu {part!r} names no GPU", hint=f"wanted: {FORM}")
    return tuple(dict.fromkeys(found))
