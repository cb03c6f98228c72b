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
from gpukiln.workspaces.lifecycle import DONE, ExistingWorkspace, only_machine
from gpukiln.workspaces.local_state import RegionRecord
from gpukiln.workspaces.plan import WorkspacePlan
from gpukiln.workspaces.reach import HEALTHY

# Compared in `listing_parts`: an age of this is no reason to suggest --refresh.
JUST_NOW = "less than a minute ago"
LIST, SHOW, STATUS = "workspace.list/1", "workspace.show/1", "workspace.status/1"
PLAN = "workspace.plan/1"
# The first machine is the likely one; the sentence after the table gives the highest price of the rest.
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
        health: healthy or unhealthy with the reason, as the last deep look said; empty: not checked.
        busy: What counts as use, as its agent reported last: a reading that is `unknown: ...` counts, and
            comes first. Empty: nothing.
        good: Whether it runs, its stages are done, and no check found it unhealthy.
        verdict: Of a deep look now; null without one, or where it could not be verified.
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
class PricedOffer:
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
class WorkspacePreview:
    """What workspace.up --dry-run prints with --json.

    Args:
        runs: The machine that the workspace has already, so that none is started; empty: none.
        offers: The best first: what has no capacity is followed by the next. Empty where it has a machine.
        image: What the machine is started from; null where it has a machine.
        verdict: Of the image, in words; empty where it was not verified.
        home_gib: Of the home volume; 0: it has none.
    """

    schema: str
    name: str
    owner: str
    cloud: str
    region: str
    runs: str
    offers: tuple[PricedOffer, ...]
    image: ImageChoice | None
    verdict: str
    home_gib: int


def status(existing: ExistingWorkspace, health: str, verdict: Verdict | None, report: str) -> Status:
    """How a workspace with a machine is."""
    [machine] = existing.machines
    # A machine that was never checked counts as good: --deep costs minutes, and most users never run it.
    good = machine.state == "running" and machine.stage.startswith(DONE)
    return Status(
        STATUS,
        existing.name,
        machine.state,
        machine.stage,
        health,
        machine.busy,
        good and (health.startswith(HEALTHY) or not health),
        verdict,
        report,
    )


def preview(cloud: Cloud, plan: WorkspacePlan, today: date) -> WorkspacePreview:
    """What a plan starts, with its prices."""
    contract = plan.contract
    return WorkspacePreview(
        PLAN,
        contract.workspace_name,
        contract.owner,
        cloud.name,
        cloud.region,
        "",
        tuple(_priced_offer(offer, month(offer, plan.use, today, cloud=cloud.name)) for offer in plan.offers),
        plan.choice,
        plan.verdict,
        plan.use.volume_gb,
    )


def _priced_offer(offer: Offer, costs: Month) -> PricedOffer:
    return PricedOffer(
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


def preview_of(cloud: Cloud, ahead: WorkspacePlan | ExistingWorkspace, today: date) -> WorkspacePreview:
    """What `workspace.up` would start: nothing where the workspace has a machine already."""
    if isinstance(ahead, ExistingWorkspace):
        return running_preview(cloud, ahead)
    return preview(cloud, ahead, today)


def running_preview(cloud: Cloud, existing: ExistingWorkspace) -> WorkspacePreview:
    """What is there already, so that nothing is started."""
    # A preview has the same document, whether a machine would be started or runs already.
    runs, home_gib = only_machine(existing).instance_id, sum(home.size_gib for home in existing.homes)
    return WorkspacePreview(
        PLAN, existing.name, existing.owner, cloud.name, cloud.region, runs, (), None, "", home_gib
    )


def listing_parts(listing: WorkspaceListing) -> Iterator[RenderableType]:
    """Workspaces by region; orphaned parts are listed below the table."""
    table = Rows("name", "owner", "state", "machine", "zone", "home", "USD/hour", "health", "stage", first=3)
    orphans = []
    for region in listing.regions:
        for workspace in region.workspaces:
            if workspace.state == "orphaned":
                orphans.append(
                    f"orphaned in {region.region}: {workspace.name}, {', '.join(workspace.group_ids)}; "
                    f"`invoke workspace.down {workspace.name}` removes it"
                )
                continue
            # More than one machine is an interrupted or doubled launch; the user has to choose which one to
            # keep.
            [*machines] = workspace.machines
            machine = machines[0] if machines else None
            table.add(
                workspace.name,
                workspace.owner,
                workspace.state,
                f"{machine.instance_type} {machine.instance_id}" if machine else "-",
                machine.zone if machine else workspace.homes[0].zone,
                ", ".join(f"{home.volume_id} {home.size_gib} GiB" for home in workspace.homes) or "-",
                (machine.usd_hour or "?") if machine else "-",
                machine.health.partition(",")[0] if machine else "-",
                machine.stage if machine else "-",
            )
            if len(machines) > 1:
                ids = ", ".join(row.instance_id for row in machines)
                orphans.append(
                    f"{workspace.name} has {len(machines)} machines: {ids}; end all but one by hand"
                )
    yield table
    yield from orphans
    for region in listing.regions:
        # Each region has its own age: one that could not be queried keeps its old record.
        age = age_words(region.at, datetime.now(UTC))
        # The list is a memory: it asks no cloud unless --refresh is given.
        stale = "" if age == JUST_NOW else "; state and health may have changed, --refresh updates them"
        yield f"{region.cloud} {region.region} as of {region.at}, {age}{stale}"
    if not listing.regions:
        yield "no region was queried yet: --refresh queries one"


def shown_parts(shown: WorkspaceDetails) -> Iterator[RenderableType]:
    """A workspace, a fact a line."""
    workspace, out = shown.workspace, shown.outputs
    table = Rows("", "", first=1, folds=True)
    rows = [
        ("name", workspace.name),
        ("owner", workspace.owner),
        ("region", workspace.region),
        ("state", workspace.state),
    ]
    if out and workspace.machines:
        machine = workspace.machines[0]
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
    for home in workspace.homes:
        # A home without a machine costs money as well, so that it is always listed.
        where = f"on {home.instance_id}" if home.instance_id else "kept"
        rows.append(("home", f"{home.volume_id} {home.size_gib} GiB in {home.zone}, {where}"))
    for name, value in rows:
        table.add(name, value)
    yield table


def status_parts(answer: Status) -> Iterator[RenderableType]:
    """How a workspace is, in a few lines."""
    yield f"{answer.name}: {answer.state}, stage {answer.stage or 'none yet'}"
    yield f"health: {answer.health or 'not checked; --deep checks it'}"
    if answer.busy or (answer.state == "running" and answer.stage.startswith(DONE)):
        yield f"in use: {answer.busy or 'no'}"
    # A reading that fails counts as use, so that the idle rule would never stop this machine.
    if answer.busy.startswith(UNKNOWN):
        yield (
            "the idle rule does not stop it while a reading is unknown: "
            f"`invoke workspace.ssh {answer.name}` to look, `invoke workspace.stop {answer.name}` to stop it"
        )
    if answer.report:
        yield f"report: {answer.report}/report.html"


def loses_work(existing: ExistingWorkspace, *, keep_home: bool) -> bool:
    """Whether removing a workspace removes files of its user: a home, or a machine without one."""
    # Without a home volume the user's files are on the machine's own disk.
    return (bool(existing.homes) and not keep_home) or any(
        not machine.home_id for machine in existing.machines
    )


def removed_lines(existing: ExistingWorkspace, now: datetime, *, keep_home: bool) -> list[str]:
    """What removing a workspace removes, a line each; homes with their size and age."""
    lines = [
        f"machine {machine.instance_id}, {machine.instance_type} in {machine.zone}, {machine.state}, "
        f"started {age_words(machine.created_at, now)}"
        + ("" if machine.home_id else ", with all files on it: it has no home volume")
        for machine in existing.machines
    ]
    if not keep_home:
        lines += [
            f"home {home.volume_id} of {home.size_gib} GiB in {home.zone}, "
            f"made {age_words(home.created_at, now)}, with all files in it"
            for home in existing.homes
        ]
    return [*lines, f"network, rights and key of {existing.name}"]


def age_words(since: str, now: datetime) -> str:
    """How long ago something was, in its largest unit.

    Args:
        since: ISO 8601; empty: not known.

    >>> age_words("2026-11-23T10:00:00+00:00", datetime(2026, 11, 24, 12, tzinfo=UTC))
    '1 day ago'
    >>> age_words("", datetime(2026, 11, 24, 12, tzinfo=UTC))
    'at a time that is not known'
    """
    if not since:
        return "at a time that is not known"
    # Two clocks: an age is never negative.
    minutes = max(int((now - datetime.fromisoformat(since)).total_seconds()) // 60, 0)
    for name, size in (("day", 24 * 60), ("hour", 60), ("minute", 1)):
        if minutes >= size:
            count = minutes // size
            return f"{count} {name}{'s' * (count > 1)} ago"
    return JUST_NOW


def preview_parts(preview: WorkspacePreview) -> Iterator[RenderableType]:
    """A preview for people."""
    if preview.runs:
        yield f"{preview.name} has a machine already, {preview.runs}: none is started"
        return
    table = Rows(
        *("machine", "GPU", "vCPU", "memory", "market", "USD/hour", "USD/month"),
        first=7,
        right=("vCPU", "memory", "USD/hour", "USD/month"),
    )
    for offer in preview.offers[:SHOWN_OFFERS]:
        table.add(
            offer.instance_type,
            f"{offer.gpus} {offer.gpu}" if offer.gpu else "-",
            str(offer.vcpu),
            Memory.of_mib(offer.memory_mib).shown,
            offer.market,
            _usd(offer.usd_hour, offer.estimated_hour),
            _usd(offer.usd_month, offer.estimated_month),
        )
    yield table
    if any(offer.estimated_hour is not None for offer in preview.offers):
        yield "~ estimated, for no price is known: `invoke offer.list` says from what"
    # The launch goes on to these without asking again, so the highest price of them is part of the consent.
    if rest := preview.offers[SHOWN_OFFERS:]:
        # The range of the other offers: the launch may end at the most expensive of them.
        known = [usd for offer in rest if (usd := offer.usd_hour or offer.estimated_hour) is not None]
        most = f"up to {max(known)} USD/hour" if known else "of prices that are not known"
        if known and len(known) < len(rest):
            most += ", some of prices that are not known"
        yield f"and where these have no capacity {len(rest)} more, {most}; --max-price limits it"
    home = f"a home of {preview.home_gib} GiB and " if preview.home_gib else ""
    yield f"a month counts 730 hours, {home}a public address; not what leaves AWS's network"
    if preview.image:
        verdict = preview.verdict or "not verified"
        yield f"image {preview.image.image_id}: {preview.image.why[0]}; {verdict}"
        if preview.image.trust:
            yield f"note: {preview.image.trust}"


def _usd(usd: Decimal | None, estimated: Decimal | None) -> str:
    if usd is None:
        return "not known" if estimated is None else f"~{estimated}"
    return str(usd)
