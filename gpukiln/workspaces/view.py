"""Workspaces for people, and the documents that commands print with --json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal

from rich.console import RenderableType

from gpukiln.clouds.base import Cloud
from gpukiln.offers.cost import Month, month
from gpukiln.offers.model import ImageChoice, Offer
from gpukiln.reports.tables import Rows
from gpukiln.units import Memory
from gpukiln.verify.verdict import Verdict
from gpukiln.workspaces.agent import UNKNOWN
from gpukiln.workspaces.contract import Outputs
from gpukiln.workspaces.lifecycle import DONE, ExistingWorkspace, only
from gpukiln.workspaces.local_state import RegionRecord
from gpukiln.workspaces.plan import WorkspacePlan
from gpukiln.workspaces.reach import HEALTHY

NOW = "less than a minute ago"
LIST, SHOW, STATUS = "workspace.list/1", "workspace.show/1", "workspace.status/1"
PLAN = "workspace.plan/1"
SHOWN_OFFERS = 3


@dataclass(frozen=True)
class WorkspaceListing:
    """What workspace.list prints with --json; each region says when it was asked."""

    schema: str
    regions: tuple[RegionRecord, ...]


@dataclass(frozen=True)
class WorkspaceDetails:
    """What workspace.up, show, stop and start print with --json.

    Args:
        outputs: Those of the contract; null where it has no machine.
    """

    schema: str
    workspace: ExistingWorkspace
    outputs: Outputs | None


@dataclass(frozen=True)
class Status:
    """What workspace.status prints with --json.

    Args:
        state: Of its machine, as EC2 says it.
        stage: The last that its agent reported.
        health: healthy or unhealthy with the reason, as the last deep look said; empty: nobody looked.
        busy: What counts as use, as its agent reported last: a reading that is `unknown: ...` counts, and
            comes first. Empty: nothing.
        good: Whether it runs, its stages are done, and nobody found it unhealthy.
        verdict: Of a deep look now; null without one, or where it could not be judged.
        report: Folder of that look's report; empty without one.
    """

    schema: str
    name: str
    state: str
    stage: str
    health: str
    busy: str
    good: bool
    verdict: Verdict | None
    report: str


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


def status(found: ExistingWorkspace, health: str, verdict: Verdict | None, report: str) -> Status:
    """How a workspace with a machine is."""
    [machine] = found.machines
    good = machine.state == "running" and machine.stage.startswith(DONE)
    return Status(
        STATUS,
        found.name,
        machine.state,
        machine.stage,
        health,
        machine.busy,
        good and (health.startswith(HEALTHY) or not health),
        verdict,
        report,
    )


def preview(cloud: Cloud, plan: WorkspacePlan, today: date) -> Preview:
    """What a plan starts, with its prices."""
    contract = plan.contract
    return Preview(
        PLAN,
        contract.workspace_name,
        contract.owner,
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


def preview_of(cloud: Cloud, ahead: WorkspacePlan | ExistingWorkspace, today: date) -> Preview:
    """What `workspace.up` would start: nothing where the workspace has a machine already."""
    return running(cloud, ahead) if isinstance(ahead, ExistingWorkspace) else preview(cloud, ahead, today)


def running(cloud: Cloud, found: ExistingWorkspace) -> Preview:
    """What is there already, so that nothing is started."""
    runs, home_gib = only(found).instance_id, sum(one.size_gib for one in found.homes)
    return Preview(PLAN, found.name, found.owner, cloud.name, cloud.region, runs, (), None, "", home_gib)


def listing_parts(listing: WorkspaceListing) -> Iterator[RenderableType]:
    """Workspaces by region; what is left over of one is told apart."""
    table = Rows("name", "owner", "state", "machine", "zone", "home", "USD/hour", "health", "stage", first=3)
    orphans = []
    for region in listing.regions:
        for one in region.workspaces:
            if one.state == "left over":
                orphans.append(
                    f"left over in {region.region}: {one.name}, {', '.join(one.group_ids)}; "
                    f"`invoke workspace.down {one.name}` removes it"
                )
                continue
            [*machines] = one.machines
            machine = machines[0] if machines else None
            table.add(
                one.name,
                one.owner,
                one.state,
                f"{machine.instance_type} {machine.instance_id}" if machine else "-",
                machine.zone if machine else one.homes[0].zone,
                ", ".join(f"{home.volume_id} {home.size_gib} GiB" for home in one.homes) or "-",
                (machine.usd_hour or "?") if machine else "-",
                machine.health.partition(",")[0] if machine else "-",
                machine.stage if machine else "-",
            )
            if len(machines) > 1:
                ids = ", ".join(row.instance_id for row in machines)
                orphans.append(f"{one.name} has {len(machines)} machines: {ids}; end all but one by hand")
    yield table
    yield from orphans
    for region in listing.regions:
        age = age_words(region.at, datetime.now(UTC))
        stale = "" if age == NOW else "; state and health may have changed, --refresh asks"
        yield f"{region.cloud} {region.region} as of {region.at}, {age}{stale}"
    if not listing.regions:
        yield "no region was asked yet: --refresh asks"


def shown_parts(shown: WorkspaceDetails) -> Iterator[RenderableType]:
    """A workspace, a fact a line."""
    found, out = shown.workspace, shown.outputs
    table = Rows("", "", first=1, folds=True)
    rows = [("name", found.name), ("owner", found.owner), ("region", found.region), ("state", found.state)]
    if out and found.machines:
        machine = found.machines[0]
        rows += [
            ("machine", f"{out.instance_id} {out.instance_type} in {out.zone}" + " spot" * machine.spot),
            ("GPUs", f"{out.gpu_count} {out.gpu_type}" if out.gpu_count else "none"),
            ("driver", out.driver_version or "-"),
            ("address", out.agent_endpoint or "-"),
            (
                "reached by",
                "session manager" if machine.by_session_manager else f"SSH, {machine.ssh_address}",
            ),
            ("stage", machine.stage or "-"),
            ("health", out.health),
            ("in use", machine.busy or "no"),
            ("image", f"{out.metadata.image_id} {out.metadata.verdict}".strip()),
            ("plan", out.metadata.plan or "-"),
            ("since", out.metadata.launched_at),
        ]
    for home in found.homes:
        where = f"on {home.instance_id}" if home.instance_id else "kept"
        rows.append(("home", f"{home.volume_id} {home.size_gib} GiB in {home.zone}, {where}"))
    for name, value in rows:
        table.add(name, value)
    yield table


def status_parts(answer: Status) -> Iterator[RenderableType]:
    """How a workspace is, in a few lines."""
    yield f"{answer.name}: {answer.state}, stage {answer.stage or 'none yet'}"
    yield f"health: {answer.health or 'nobody looked; --deep does'}"
    if answer.busy or (answer.state == "running" and answer.stage.startswith(DONE)):
        yield f"in use: {answer.busy or 'no'}"
    if answer.busy.startswith(UNKNOWN):
        yield (
            "not stopped by its idle rule as long as a reading is unknown: "
            f"`invoke workspace.ssh {answer.name}` to look, `invoke workspace.stop {answer.name}` to stop it"
        )
    if answer.report:
        yield f"report: {answer.report}/report.html"


def loses_work(found: ExistingWorkspace, *, keep_home: bool) -> bool:
    """Whether removing a workspace removes files of its user: a home, or a machine without one."""
    return (bool(found.homes) and not keep_home) or any(not one.home_id for one in found.machines)


def removed_lines(found: ExistingWorkspace, now: datetime, *, keep_home: bool) -> list[str]:
    """What removing a workspace removes, a line each; homes with their size and age."""
    lines = [
        f"machine {one.instance_id}, {one.instance_type} in {one.zone}, {one.state}, "
        f"started {age_words(one.created_at, now)}"
        + ("" if one.home_id else ", with all files on it: it has no home volume")
        for one in found.machines
    ]
    if not keep_home:
        lines += [
            f"home {one.volume_id} of {one.size_gib} GiB in {one.zone}, "
            f"made {age_words(one.created_at, now)}, with all files in it"
            for one in found.homes
        ]
    return [*lines, f"network, rights and key of {found.name}"]


def age_words(since: str, now: datetime) -> str:
    """How long ago something was, in its largest unit.

    Args:
        since: ISO 8601; empty: not known.
    """
    if not since:
        return "at a time that is not known"
    minutes = max(int((now - datetime.fromisoformat(since)).total_seconds()) // 60, 0)
    for name, size in (("day", 24 * 60), ("hour", 60), ("minute", 1)):
        if minutes >= size:
            count = minutes // size
            return f"{count} {name}{'s' * (count > 1)} ago"
    return NOW


def preview_parts(found: Preview) -> Iterator[RenderableType]:
    """A preview for people."""
    if found.runs:
        yield f"{found.name} has a machine already, {found.runs}: none is started"
        return
    table = Rows(
        *("machine", "GPU", "vCPU", "memory", "market", "USD/hour", "USD/month"),
        first=7,
        right=("vCPU", "memory", "USD/hour", "USD/month"),
    )
    for one in found.offers[:SHOWN_OFFERS]:
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
    if rest := found.offers[SHOWN_OFFERS:]:
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
