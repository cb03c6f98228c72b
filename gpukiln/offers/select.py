"""Every machine that satisfies all of a request, in order of price, and what came near."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Literal

from gpukiln.catalog.gpus import Gpu, gpu
from gpukiln.catalog.instance_types import InstanceType, instance_types
from gpukiln.catalog.load import version_key
from gpukiln.errors import IncompatibleError
from gpukiln.findings import Finding
from gpukiln.offers import prices
from gpukiln.offers.estimate import estimate
from gpukiln.offers.model import Figure, NearMiss, Offer, Request

# Unknown price, price, age of the GPU (newest first), vCPUs, name.
_Order = tuple[bool, Decimal, tuple[int, ...], int, str]


@dataclass(frozen=True)
class MatchingOffers:
    """What a request gets.

    Args:
        offers: The best first.
        near: The nearest first.
    """

    offers: tuple[Offer, ...]
    near: tuple[NearMiss, ...]


def _mismatch(of: str, message: str) -> Finding:
    """One way in which a machine does not satisfy a request.

    Args:
        of: gpu: it has another GPU; count, memory: too few of them, or too small; size: what one of another
            size of the family has; market: it can't be had so; retired, arch.
    """
    return Finding(of, "error", message)


def select(request: Request, regions: Sequence[str], today: date, *, cloud: str = "aws") -> MatchingOffers:
    """What satisfies a request in regions, and what came near.

    Order: price an hour, where it is not known what is estimated; then the newer GPU; then the smaller
    machine; then the name. What nothing can be derived for is last, the smallest first.

    Args:
        cloud: Whose answers count: aws or embedded.
    """
    offers: list[Offer] = []
    near: list[tuple[NearMiss, tuple[int, int, int, int], _Order]] = []
    for name, machine in instance_types().items():
        board = gpu(machine.gpu)
        # AMD and Habana boards are offered only when they are named: no image of gpukiln drives them.
        if board.manufacturer != "NVIDIA" and machine.gpu not in request.gpus:
            continue
        # Once a type: they do not depend on the region.
        general = _mismatches(request, machine, board)
        for region in regions:
            offer = _offer(name, machine, region, request, today, cloud)
            mismatches = [*general, *_market_mismatches(request, machine, offer)]
            if not mismatches:
                offers.append(offer)
            elif (distance := _nearness(request, machine, mismatches)) is not None:
                missed = NearMiss(name, region, tuple(mismatches), offer.on_demand)
                near.append(
                    (missed, (*distance, len(mismatches)), _order(offer.on_demand or offer.estimate, name))
                )
    # Ties between regions keep the order in which the user named them.
    order = {region: place for place, region in enumerate(regions)}
    offers.sort(
        key=lambda offer: (*_order(offer.price or offer.estimate, offer.instance_type), order[offer.region])
    )
    near.sort(key=lambda row: (*row[1], *row[2], order[row[0].region]))
    return MatchingOffers(tuple(offers), tuple(row for row, *_ in near))


def offers_of(
    name: str, regions: Iterable[str], today: date, *, spot: bool = False, cloud: str = "aws"
) -> tuple[Offer, ...]:
    """One machine in regions, whether or not it can be started.

    Args:
        spot: Whether its spot price is the one that counts.

    Raises:
        UsageError: The catalogue does not know it.
    """
    from gpukiln.catalog.instance_types import instance_type  # noqa: PLC0415 - its name is a variable here

    machine, request = instance_type(name), Request(spot="only" if spot else "no")
    return tuple(_offer(name, machine, region, request, today, cloud) for region in regions)


def mismatches_of(request: Request, name: str) -> tuple[str, ...]:
    """The mismatches of a machine in every region, a line each; empty: it satisfies the request.

    Raises:
        UsageError: The catalogue does not know it.

    >>> from gpukiln.offers.request import parse_request
    >>> mismatches_of(parse_request("L4:1"), "g4dn.xlarge")
    ('it has 1 T4, wanted L4',)
    >>> mismatches_of(parse_request("T4:1"), "g4dn.xlarge")
    ()
    """
    from gpukiln.catalog.instance_types import instance_type  # noqa: PLC0415 - its name is a variable here

    machine = instance_type(name)
    return tuple(
        mismatch.message
        for mismatch in _mismatches(request, machine, gpu(machine.gpu))
        if mismatch.id != "retired"
    )


def no_match_error(request: Request, answer: MatchingOffers, regions: Sequence[str]) -> IncompatibleError:
    """Why nothing satisfies a request: the nearest machines, one for each GPU, and what they lack."""
    nearest: dict[tuple[str, int], NearMiss] = {}
    for miss in answer.near:
        machine = instance_types()[miss.instance_type]
        nearest.setdefault((machine.gpu, machine.gpus), miss)
    rows = tuple(
        f"{miss.instance_type}: {'; '.join(lack.message for lack in miss.lacks)}"
        for miss in list(nearest.values())[:6]
    )
    return IncompatibleError(
        f"no machine in {', '.join(regions)} has {describe_request(request)}",
        details=rows,
        hint="request less of what these lack" if rows else "`invoke offer.list` shows what there is",
    )


def describe_request(request: Request) -> str:
    """A request in words.

    >>> from gpukiln.offers.request import parse_request
    >>> describe_request(parse_request("T4:1", cpu=8))
    '1 T4, 8 vCPU, x86_64'
    >>> describe_request(parse_request("H100:80GB:8", spot="only"))
    '8 H100 SXM of 80 GB, x86_64, spot'
    """
    names = " or ".join(gpu(key).name for key in request.gpus) or "GPU"
    memory = ""
    if request.gpu_memory_mib:
        memory = f" of {request.gpu_memory_mib} MiB"
    elif request.gpu_memory_gb:
        memory = f" of {request.gpu_memory_gb} GB"
    words = [f"{request.count} {names}{memory}"]
    if request.vcpu:
        words.append(f"{request.vcpu} vCPU")
    if request.memory_mib:
        words.append(f"{request.memory_mib} MiB of memory")
    if request.local_gb:
        words.append(f"{request.local_gb} GB of local storage")
    if request.efa:
        words.append(f"{request.efa} EFA")
    if request.arch != "any":
        words.append(request.arch)
    if request.spot == "only":
        words.append("spot")
    if request.max_price:
        words.append(f"at most {request.max_price} USD/hour")
    return ", ".join(words)


def _mismatches(request: Request, machine: InstanceType, board: Gpu) -> list[Finding]:
    """The mismatches that hold in every region."""
    mismatches: list[Finding] = []
    if machine.status == "retired":
        instead = f", instead: {' or '.join(machine.alternatives)}" if machine.alternatives else ""
        mismatches.append(_mismatch("retired", f"retired {machine.retired_since}{instead}"))
    if request.gpus and machine.gpu not in request.gpus:
        names = " or ".join(gpu(key).name for key in request.gpus)
        mismatches.append(_mismatch("gpu", f"it has {machine.gpus} {board.name}, wanted {names}"))
    # A type of vGPUs has its fractions in `gpus`; no request gets them that wants whole GPUs.
    fraction = machine.gpu_fraction < 1
    if fraction and not request.fractions:
        mismatches.append(
            _mismatch("count", f"it has {machine.gpu_fraction:g} of one {board.name}, wanted whole ones")
        )
    elif machine.gpus not in request.count:
        mismatches.append(_mismatch("count", f"it has {machine.gpus} {board.name}, wanted {request.count}"))
    # The memory a GPU is sold with is a label (24 GB), not the size that the driver reports.
    sold = sold_gb(machine)
    if request.gpu_memory_mib and machine.gpu_memory_mib not in request.gpu_memory_mib:
        text = f"{board.name} has {machine.gpu_memory_mib} MiB"
        text += f" (sold as {sold} GB)" if sold else ""
        mismatches.append(_mismatch("memory", f"{text}, wanted {request.gpu_memory_mib} MiB"))
    if request.gpu_memory_gb and (sold is None or sold not in request.gpu_memory_gb):
        mismatches.append(
            _mismatch("memory", f"{board.name} is of {sold} GB, wanted {request.gpu_memory_gb} GB")
        )
    for has, wants, what in (
        (machine.vcpu, request.vcpu, "vCPU"),
        (machine.memory_mib, request.memory_mib, "MiB of memory"),
        (machine.local_nvme_gb, request.local_gb, "GB of local storage"),
        (machine.efa, request.efa, "EFA interfaces"),
    ):
        if has < wants:
            mismatches.append(_mismatch("size", f"it has {has} {what}, wanted {wants}"))
    if request.arch not in ("any", machine.arch):
        mismatches.append(_mismatch("arch", f"it is {machine.arch}, wanted {request.arch}"))
    return mismatches


def _market_mismatches(request: Request, machine: InstanceType, offer: Offer) -> list[Finding]:
    """The mismatches of one region."""
    mismatches: list[Finding] = []
    if machine.status == "retired":
        return mismatches
    # Empty means that the region was asked, or the shipped data has no zone; None is not known.
    if offer.zones is not None and not offer.zones:
        mismatches.append(_mismatch("market", f"it is not offered in {offer.region}"))
    if request.spot != "only" and not machine.on_demand:
        mismatches.append(_mismatch("market", "it is sold by capacity blocks alone"))
    if request.spot == "only" and not machine.spot:
        mismatches.append(_mismatch("market", "it is not sold as spot"))
    # An estimate is no price: a limit in money refuses what is not known.
    if request.max_price is not None:
        if offer.price is None:
            about = f" (about {offer.estimate.value} is estimated)" if offer.estimate else ""
            text = f"its price is not known{about}, wanted at most {request.max_price}"
            mismatches.append(_mismatch("market", text))
        elif offer.price.value > request.max_price:
            text = (
                f"it costs {offer.price.value} USD/hour ({offer.market}), wanted at most {request.max_price}"
            )
            mismatches.append(_mismatch("market", text))
    return mismatches


def _nearness(
    request: Request, machine: InstanceType, mismatches: list[Finding]
) -> tuple[int, int, int] | None:
    """How near it comes; None: too far away to be listed.

    Another GPU is near where it has the memory of the smallest that was named, and is no older.

    Returns:
        0 where it has the GPUs, 1 where it has them in another number or size, 2 where it has others; how
        many are missing; and MiB of memory that each lacks.
    """
    # One mismatch is near, two are another machine.
    kinds = {mismatch.id for mismatch in mismatches}
    if "retired" in kinds and not request.gpus:
        return None
    if "gpu" not in kinds:
        far = kinds & {"count", "memory"}
        if far and len(mismatches) > 1:
            return None
        least = request.gpu_memory_mib.low if request.gpu_memory_mib else 0
        counted = machine.gpus if machine.gpu_fraction == 1 or request.fractions else 0
        missing = max(request.count.low - counted, 0)
        return 1 if far else 0, missing, max(least - machine.gpu_memory_mib, 0)
    if len(mismatches) > 1:
        return None
    asked = [
        machine
        for machine in instance_types().values()
        if machine.gpu in request.gpus and machine.gpu_fraction == 1
    ]
    least = min((machine.gpu_memory_mib for machine in asked), default=0)
    # By compute capability: an older GPU may lack the number formats that the workload uses.
    oldest = min(version_key(gpu(key).cc or "0") for key in request.gpus)
    new_enough = version_key(gpu(machine.gpu).cc or "0") >= oldest
    return (2, 0, 0) if machine.gpu_memory_mib >= least and new_enough else None


def sold_gb(machine: InstanceType) -> int | None:
    """The memory of one of its GPUs or fractions as it is sold, in GB; None where no source says."""
    # A fraction is sold as its share of the board's label.
    labels = [round(label * machine.gpu_fraction) for label in gpu(machine.gpu).memory_gb]
    return min(labels, key=lambda label: abs(label * 1024 - machine.gpu_memory_mib), default=None)


def _offer(name: str, machine: InstanceType, region: str, request: Request, today: date, cloud: str) -> Offer:
    on_demand = prices.on_demand(name, region, today, cloud=cloud)
    spot = prices.spot(name, region, today, cloud=cloud) if machine.spot else ()
    cheapest = min(spot, key=lambda spot_price: spot_price.now.value, default=None)
    market: Literal["on-demand", "spot"] = "on-demand"
    price = on_demand
    if request.spot == "only" or (
        request.spot == "auto" and cheapest and (on_demand is None or cheapest.now.value < on_demand.value)
    ):
        market, price = "spot", cheapest.now if cheapest else None
    # Estimated only for the order and for display, never compared with --max-price.
    guess = None
    if price is None and machine.status != "retired":
        guess = estimate(name, region, today, spot=market == "spot", cloud=cloud)
    return Offer(
        instance_type=name,
        region=region,
        gpu=gpu(machine.gpu).name,
        gpus=machine.gpus,
        gpu_fraction=machine.gpu_fraction,
        gpu_memory_mib=machine.gpu_memory_mib,
        vcpu=machine.vcpu,
        memory_mib=machine.memory_mib,
        local_gb=machine.local_nvme_gb,
        arch=machine.arch,
        efa=machine.efa,
        market=market,
        price=price,
        on_demand=on_demand,
        spot=spot,
        zones=() if machine.status == "retired" else prices.offerings(name, region, cloud=cloud),
        notes=tuple(_notes(machine)),
        estimate=guess,
    )


def _notes(machine: InstanceType) -> Iterable[str]:
    if machine.status == "retired":
        yield f"retired {machine.retired_since}"
    if machine.status == "previous":
        yield "previous generation"
    if machine.driver == "grid":
        yield "a vGPU: NVIDIA's GRID driver alone drives it"
    if machine.arch != "x86_64":
        yield machine.arch
    if not machine.on_demand:
        yield "capacity blocks alone"
    if machine.hypervisor == "none":
        yield "bare metal"


def _order(price: Figure | None, name: str) -> _Order:
    machine = instance_types()[name]
    if price is None:  # nothing says what it costs: fewer GPUs cost less, whatever their age
        return True, Decimal(0), (machine.gpus,), machine.vcpu, name
    age = tuple(-number for number in version_key(gpu(machine.gpu).cc or "0"))
    return False, price.value, age, machine.vcpu, name
