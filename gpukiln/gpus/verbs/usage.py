"""The verb usage: GPU-hours, energy and price by user, from the ledger and the active leases."""

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
NO_PRICE = "the machine's price is not known: set [price] usd_hour in /etc/gpukiln/gpus.toml"
NO_ENERGY = (
    "the energy counter was not read at start and end: the GPU has none, or the lease ended without a release"
)


@dataclass(frozen=True)
class LeaseUse:
    """The use of a device by a lease, as far as it is in the window.

    Args:
        share: The share of the GPU.
        hours: In the window.
        energy_joules: Of the share, in the window; null where it is not known.
        usd: Price of the share, in the window; null where the machine's price is not known.
        holds: Whether the lease is active.
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
    """The sum of uses for a user, project, device or lease.

    Args:
        key: The user, project, device or lease; empty for leases without a project, and for the total.
        uses: Number of uses in the sum.
        leases: Number of leases.
        holding: Number of active leases.
        gpu_hours: A share of a GPU counts as that share.
        energy_joules: Of the uses with a known value; null for none.
        energy_uses: Number of these uses.
        usd: Of the uses with a known price; null for none.
        usd_uses: Number of these uses.
        unavailable: By field, the reason why it is null.
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
    """The use of GPUs in a window of time.

    Args:
        since: RFC 3339, UTC; earlier parts of uses are not counted.
        until: The current time.
        by: The grouping of the rows: user, project, device or lease.
        rows: Sorted by GPU-hours, the largest first.
        message: Why there are no rows; else empty.
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
    """The use in a row of the ledger, cut to the window; None where it is outside.

    Energy and price are spread evenly over the time of the use.
    """
    # The wall clock of the stamps may have been set in between: the duration is the ledger's `seconds`, not
    # the difference of the stamps.
    began, end = _time(row["started_at"]), _time(row["ended_at"])
    if end > began:
        part = max(min(end, until) - max(began, since), 0.0) / (end - began)
    else:
        # A use without a duration, or with a clock that was set back: it counts where it ended.
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
        # The ledger has the energy of the whole GPU; a shared lease used its share of it.
        energy_joules=None if row["energy_joules"] is None else row["energy_joules"] * row["share"] * part,
        usd=None if row["usd"] is None else row["usd"] * part,
        holds=False,
    )


def uses_of_lease(
    lease: Lease, window_s: float, usd_hour: float | None, counters: dict[str, float]
) -> list[LeaseUse]:
    """The uses of an active lease until now.

    Args:
        usd_hour: Price of the whole machine.
        counters: Energy counters in joules by device, as of now.
    """
    lasted = boot_clock() - lease.granted_boot
    inside = min(lasted, window_s)
    uses = []
    for device in lease.devices:
        energy = None
        if device.energy_joules is not None and device.device in counters and lasted > 0:
            energy = max(counters[device.device] - device.energy_joules, 0.0) * device.share * inside / lasted
        # The price of the whole machine, divided by its GPUs: idle GPUs are not charged to users.
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
    """The row of some uses."""
    energy = [use.energy_joules for use in uses if use.energy_joules is not None]
    usd = [use.usd for use in uses if use.usd is not None]
    unavailable = {} if energy else {"energy_joules": NO_ENERGY if uses else "nothing was used"}
    if not usd:
        unavailable["usd"] = NO_PRICE if uses else "nothing was used"
    return UsageRow(
        key=key,
        uses=len(uses),
        leases=len({use.lease for use in uses}),
        # Sets: a lease of several GPUs has several uses.
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
            f"--by {options.by!r} is unknown, wanted {', '.join(GROUPINGS)}", hint="such as --by project"
        )
    window = Duration.parse(options.since, "--since")
    until = time.time()
    uses: list[LeaseUse] = []
    message = ""
    leases = open_existing_leases()
    if leases is not None:
        held = leases.current()  # moves ended leases to the ledger
        uses = [use for row in leases.ledger() if (use := use_of_row(row, until - window, until))]
        # The ledger has the price of its time; active leases are charged at the current price.
        price = machine_price(load())
        usd_hour = price.usd_hour if price else None
        counters = leases.energy_counters(held)
        for lease in held:
            uses += uses_of_lease(lease, window, usd_hour, counters)
        if not uses:
            message = f"no lease since {_stamp(until - window)}"
    else:
        message = f"this machine has no leases yet: {folder()} is empty"
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
    """A sum, with the number of its uses where some have no value."""
    if value is None:
        return "-"
    return f"{value:{form}}" + (f" (of {known} of {uses})" if known < uses else "")


VERBS = (
    Verb(
        "usage",
        "Show GPU-hours, energy and price by user, project, device or lease.",
        (
            Option("since", "begin of the window, as a time before now", default="7d", value="7d"),
            Option("by", "one row for each user, project, device or lease", default="user"),
        ),
        _usage,
        _show,
        examples=("--since 30d --by project",),
    ),
)
