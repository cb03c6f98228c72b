"""What `workspace.up` is going to start and what that costs, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from rich.console import RenderableType

from gpukiln.clouds.base import Cloud
from gpukiln.offers.cost import MachineUsage, Month, month
from gpukiln.offers.model import ImageChoice, Offer
from gpukiln.reports.tables import Rows
from gpukiln.units import Memory
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.lifecycle import Found, only
from gpukiln.workspaces.plan import Plan
from gpukiln.workspaces.volumes import DEFAULT_SIZE, Home

PLAN = "workspace.plan/1"
SHOWN = 3


@dataclass(frozen=True)
class Priced:
    """A machine that a workspace may get.

    Args:
        gpu: The GPU's name; empty: it has none.
        usd_hour: None: not known.
        usd_month: Of machine, home and public address, all hours; None: the price of one is not known.
        estimated_hour: What it probably costs where `usd_hour` is not known; None: it is, or nothing says so.
        estimated_month: Likewise for `usd_month`.
    """

    instance_type: str
    market: str
    gpu: str
    gpus: int
    vcpu: int
    memory_mib: int
    usd_hour: Decimal | None
    usd_month: Decimal | None
    estimated_hour: Decimal | None = None
    estimated_month: Decimal | None = None


@dataclass(frozen=True)
class Preview:
    """What workspace.up --dry-run prints with --json.

    Args:
        runs: The machine that the workspace has already, so that none is started; empty: none.
        offers: The best first: what has no capacity is followed by the next. Empty where it has a machine.
        image: What the machine is started from; null where it has a machine.
        verdict: Of the image, in words; empty where nobody judged it.
        home_gib: Of the home volume; 0: it has none.
    """

    schema: str
    name: str
    owner: str
    cloud: str
    region: str
    runs: str
    offers: tuple[Priced, ...]
    image: ImageChoice | None
    verdict: str
    home_gib: int


def use_of(wanted: Workspace, homes: Sequence[Home]) -> MachineUsage:
    """How a workspace uses a machine: all hours of a month, with its home and a public address.

    Args:
        homes: Those that are there.
    """
    if not wanted.capabilities.persistent_home:
        return MachineUsage()
    asked = wanted.compute_profile.storage
    size = Memory.parse(asked or (DEFAULT_SIZE if not homes else "1Gi"), "storage").gib
    return MachineUsage(volume_gb=max(size, *(one.size_gib for one in homes), 0))


def preview(cloud: Cloud, plan: Plan, today: date) -> Preview:
    """What a plan starts, with its prices."""
    wanted = plan.wanted
    return Preview(
        PLAN,
        wanted.workspace_name,
        wanted.owner,
        cloud.name,
        cloud.region,
        "",
        tuple(_priced(one, month(one, plan.use, today, cloud=cloud.name)) for one in plan.offers),
        plan.choice,
        plan.verdict,
        plan.use.volume_gb,
    )


def _priced(offer: Offer, costs: Month) -> Priced:
    return Priced(
        offer.instance_type,
        offer.market,
        offer.gpu,
        offer.gpus,
        offer.vcpu,
        offer.memory_mib,
        offer.price.value if offer.price else None,
        costs.usd,
        offer.estimate.value if offer.estimate else None,
        costs.estimate,
    )


def running(cloud: Cloud, found: Found) -> Preview:
    """What is there already, so that nothing is started."""
    runs, home_gib = only(found).instance_id, sum(one.size_gib for one in found.homes)
    return Preview(PLAN, found.name, found.owner, cloud.name, cloud.region, runs, (), None, "", home_gib)


def parts(found: Preview) -> Iterator[RenderableType]:
    """A preview for people."""
    if found.runs:
        yield f"{found.name} has a machine already, {found.runs}: none is started"
        return
    table = Rows(
        *("machine", "GPU", "vCPU", "memory", "market", "USD/hour", "USD/month"),
        first=7,
        right=("vCPU", "memory", "USD/hour", "USD/month"),
    )
    for one in found.offers[:SHOWN]:
        table.add(
            one.instance_type,
            f"{one.gpus} {one.gpu}" if one.gpu else "-",
            str(one.vcpu),
            Memory.of_mib(one.memory_mib).shown,
            one.market,
            _usd(one.usd_hour, one.estimated_hour),
            _usd(one.usd_month, one.estimated_month),
        )
    yield table
    if any(one.estimated_hour is not None for one in found.offers):
        yield "~ estimated, for no price is known: `invoke offer.list` says from what"
    if rest := found.offers[SHOWN:]:
        known = [usd for one in rest if (usd := one.usd_hour or one.estimated_hour) is not None]
        most = f"up to {max(known)} USD/hour" if known else "of prices that are not known"
        if known and len(known) < len(rest):
            most += ", some of prices that are not known"
        yield f"and where these have no capacity {len(rest)} more, {most}; --max-price limits it"
    home = f"a home of {found.home_gib} GiB and " if found.home_gib else ""
    yield f"a month counts 730 hours, {home}a public address; not what leaves AWS's network"
    if found.image:
        proof = found.verdict or "nobody has judged it"
        yield f"image {found.image.image_id}: {found.image.why[0]}; {proof}"
        if found.image.trust:
            yield f"note: {found.image.trust}"


def _usd(usd: Decimal | None, estimated: Decimal | None) -> str:
    if usd is None:
        return "not known" if estimated is None else f"~{estimated}"
    return str(usd)
