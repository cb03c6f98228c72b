"""The verb usage: who had which GPUs for how long, from the ledger and from leases that still hold."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from gpukiln.errors import UsageError
from gpukiln.gpus.client import open_existing_leases
from gpukiln.gpus.config import load, machine_price
from gpukiln.gpus.store import Lease, boot_clock, folder
from gpukiln.gpus.text import short_uuid, table
from gpukiln.gpus.verb import Options, Verb
from gpukiln.options import Option
from gpukiln.units import Duration

Print = Callable[[str], None]
GROUPINGS = ("user", "project", "device", "lease")
NO_PRICE = "the machine's price is not known: [price] usd_hour in /etc/gpukiln/gpus.toml says it"
NO_ENERGY = "no counter was read at both ends: the GPU has none, or its lease was not released but ended"


@dataclass(frozen=True)
class LeaseUse:
    """A device, or a part of one, that a lease had, as far as it is in the window.

    Args:
        share: The part of the GPU.
        hours: In the window.
        energy_joules: Of the share, in the window; null where it is not known.
        usd: Of the share, in the window; null where the machine's price is not known.
        holds: Whether the lease still does.
    """

    user: str
    project: str
    device: str
    lease: str
    model: str
    share: float
    hours: float
    energy_joules: float | None
    usd: float | None
    holds: bool


@dataclass(frozen=True)
class UsageRow:
    """What one of them used.

    Args:
        key: The user, project, device or lease; empty for a project that nobody named, and for the sum.
        uses: Devices of leases that this is the sum of.
        leases: How many.
        holding: How many of these still hold.
        gpu_hours: Shares of GPUs count as shares.
        energy_joules: Of those uses where it is known; null where it is of none.
        energy_uses: How many these are.
        usd: Of those uses where it is known; null where it is of none.
        usd_uses: How many these are.
        unavailable: Field to the reason why it is null.
    """

    key: str
    uses: int
    leases: int
    holding: int
    gpu_hours: float
    energy_joules: float | None
    energy_uses: int
    usd: float | None
    usd_uses: int
    unavailable: dict[str, str]


@dataclass(frozen=True)
class UsageReport:
    """What was used in a window of time.

    Args:
        since: RFC 3339, UTC; what began before is cut off there.
        until: Now.
        by: What a row is of: user, project, device or lease.
        rows: Those with the most GPU-hours first.
        message: Why there is nothing to be found; empty where there is.
    """

    node: str
    since: str
    until: str
    by: str
    rows: tuple[UsageRow, ...]
    total: UsageRow
    message: str
    exit_code: int


def _stamp(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc).isoformat(timespec="seconds")


def _time(stamp: str) -> float:
    return datetime.datetime.fromisoformat(stamp).timestamp()


def use_of_row(row: dict[str, Any], since: float, until: float) -> LeaseUse | None:
    """A row of the ledger, cut to the window; None where it is outside.

    What a use took is spread evenly over its time; of a GPU's energy, which the ledger has whole, it took its
    share. The clock of the stamps may have been set meanwhile: how long it lasted is what the ledger counted,
    not what lies between them.
    """
    began, end = _time(row["started_at"]), _time(row["ended_at"])
    if end > began:
        part = max(min(end, until) - max(began, since), 0.0) / (end - began)
    else:
        part = 1.0 if since <= end <= until else 0.0
    if not part:
        return None
    return LeaseUse(
        user=row["user"],
        project=row["project"],
        device=row["device"],
        lease=f"L-{row['lease']}",
        model=row["model"],
        share=row["share"],
        hours=row["seconds"] * part / 3600,
        energy_joules=None if row["energy_joules"] is None else row["energy_joules"] * row["share"] * part,
        usd=None if row["usd"] is None else row["usd"] * part,
        holds=False,
    )


def uses_of_lease(
    lease: Lease, window_s: float, usd_hour: float | None, counters: dict[str, float]
) -> list[LeaseUse]:
    """What a lease that holds has used until now.

    Args:
        usd_hour: Of the whole machine.
        counters: Joules by device, as they are now.
    """
    lasted = boot_clock() - lease.granted_boot
    inside = min(lasted, window_s)
    uses = []
    for device in lease.devices:
        energy = None
        if device.energy_joules is not None and device.device in counters and lasted > 0:
            energy = max(counters[device.device] - device.energy_joules, 0.0) * device.share * inside / lasted
        usd = None if usd_hour is None else usd_hour / lease.machine_gpus * device.share * inside / 3600
        uses.append(
            LeaseUse(
                user=lease.user,
                project=lease.project,
                device=device.device,
                lease=lease.id,
                model=device.model,
                share=device.share,
                hours=inside / 3600,
                energy_joules=energy,
                usd=usd,
                holds=True,
            )
        )
    return uses


def sum_uses(key: str, uses: Sequence[LeaseUse]) -> UsageRow:
    """The sum of uses."""
    energy = [use.energy_joules for use in uses if use.energy_joules is not None]
    usd = [use.usd for use in uses if use.usd is not None]
    unavailable = {} if energy else {"energy_joules": NO_ENERGY if uses else "nothing was used"}
    if not usd:
        unavailable["usd"] = NO_PRICE if uses else "nothing was used"
    return UsageRow(
        key=key,
        uses=len(uses),
        leases=len({use.lease for use in uses}),
        holding=len({use.lease for use in uses if use.holds}),
        gpu_hours=round(sum(use.share * use.hours for use in uses), 4),
        energy_joules=round(sum(energy), 1) if energy else None,
        energy_uses=len(energy),
        usd=round(sum(usd), 4) if usd else None,
        usd_uses=len(usd),
        unavailable=unavailable,
    )


def _usage(options: Options) -> UsageReport:
    if options.by not in GROUPINGS:
        raise UsageError(
            f"--by {options.by!r} is none of {', '.join(GROUPINGS)}", hint="such as --by project"
        )
    window = Duration.parse(options.since, "--since")
    until = time.time()
    uses: list[LeaseUse] = []
    message = ""
    leases = open_existing_leases()
    if leases is not None:
        held = leases.current()  # what ended unseen is in the ledger from here on
        uses = [use for row in leases.ledger() if (use := use_of_row(row, until - window, until))]
        price = machine_price(load())
        usd_hour = price.usd_hour if price else None
        counters = leases.energy_counters(held)
        for lease in held:
            uses += uses_of_lease(lease, window, usd_hour, counters)
        if not uses:
            message = f"nothing was leased since {_stamp(until - window)}"
    else:
        message = f"nobody has leased anything here yet: {folder()} has no leases"
    keys = dict.fromkeys(getattr(use, options.by) for use in uses)
    rows = [sum_uses(key, [use for use in uses if getattr(use, options.by) == key]) for key in keys]
    return UsageReport(
        node=socket.gethostname(),
        since=_stamp(until - window),
        until=_stamp(until),
        by=options.by,
        rows=tuple(sorted(rows, key=lambda row: -row.gpu_hours)),
        total=sum_uses("", uses),
        message=message,
        exit_code=0,
    )


def _show(node: dict[str, Any], _: Options, print: Print) -> None:
    print(f"node {node['node']}   {node['since'][:19]} to {node['until'][:19]} UTC")
    if node["message"]:
        print(node["message"])
        return
    rows = []
    for row in (*node["rows"], {**node["total"], "key": "all"}):
        name = row["key"] or "(none)"
        kwh = None if row["energy_joules"] is None else row["energy_joules"] / 3.6e6
        rows.append(
            (
                short_uuid(name) if node["by"] == "device" and name != "all" else name,
                f"{row['gpu_hours']:.2f}",
                f"{row['leases']}" + (f" ({row['holding']} hold)" if row["holding"] else ""),
                _partial_sum(kwh, ".3f", row["energy_uses"], row["uses"]),
                _partial_sum(row["usd"], ".2f", row["usd_uses"], row["uses"]),
            )
        )
    for line in table((node["by"].upper(), "GPU-HOURS", "LEASES", "kWh", "USD"), rows, "GPU-HOURS"):
        print(line)
    for field, why in node["total"]["unavailable"].items():
        print(f"{field}: {why}")


def _partial_sum(value: float | None, form: str, known: int, uses: int) -> str:
    """A sum, with how many of its uses it is of where it is not of all."""
    if value is None:
        return "-"
    return f"{value:{form}}" + (f" (of {known} of {uses})" if known < uses else "")


VERBS = (
    Verb(
        "usage",
        "GPU-hours, energy and money by user, project, device or lease.",
        (
            Option("since", "of the time from so long ago until now", default="7d", value="7d"),
            Option("by", "what a row is of: user, project, device or lease", default="user"),
        ),
        _usage,
        _show,
        examples=("--since 30d --by project",),
    ),
)
