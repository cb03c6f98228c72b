"""Hours and money of workspaces by owner, from what this computer saw of their machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal

from rich.console import RenderableType

from gpukiln.errors import UsageError
from gpukiln.offers.cost import CENT
from gpukiln.reports.tables import Rows
from gpukiln.workspaces.local_state import RunInterval

USAGE = "workspace.usage/1"


@dataclass(frozen=True)
class UsageSum:
    """What a workspace's machines used.

    Args:
        hours: Of the seen running time: a machine that ended by itself counts until it was
            last seen.
        usd: At the price that each had at its launch; None: one of them has no known price. Volumes,
            addresses and traffic are not in it.
        running: Whether one still runs.
    """

    owner: str
    name: str
    hours: Decimal
    usd: Decimal | None
    running: bool


@dataclass(frozen=True)
class OwnersUsage:
    """What workspace.usage prints with --json.

    Args:
        since: The first moment that counts, ISO 8601; empty: all that is known.
        workspaces: By owner and name.
        owners: The same by owner alone; `name` is empty.
    """

    schema: str
    since: str
    workspaces: tuple[UsageSum, ...]
    owners: tuple[UsageSum, ...]


def usage(spans: Iterable[RunInterval], *, since: str = "", owner: str = "") -> OwnersUsage:
    """Sum up times that machines ran.

    Args:
        since: A day, YYYY-MM-DD in UTC; what ran before does not count. Empty: all.
        owner: Only theirs; empty: everybody's.

    Raises:
        UsageError: `since` is no day.
    """
    first = _day(since)
    # An interval that ended before the day does not count; one that goes over it counts from the day on.
    kept = [span for span in spans if owner in ("", span.owner) and (first is None or _end(span) > first)]
    # By owner and name, since two owners may have used one name after the other.
    by_name = {(span.owner, span.name) for span in kept}
    by_owner = {span.owner for span in kept}
    return OwnersUsage(
        USAGE,
        first.isoformat() if first else "",
        tuple(
            _sum_usage(who, name, [span for span in kept if (span.owner, span.name) == (who, name)], first)
            for who, name in sorted(by_name)
        ),
        tuple(
            _sum_usage(who, "", [span for span in kept if span.owner == who], first)
            for who in sorted(by_owner)
        ),
    )


def usage_parts(answer: OwnersUsage) -> Iterator[RenderableType]:
    """Hours and money, by workspace and by owner."""
    table = Rows("owner", "workspace", "hours", "USD", "", first=3, right=("hours", "USD"))
    for total in answer.workspaces:
        table.add(*_row(total))
    for total in answer.owners:
        table.add(*_row(total), style="bold")
    yield table
    yield "machines alone, at their price at launch, as this computer saw them run"


def _row(total: UsageSum) -> tuple[str, ...]:
    money = "?" if total.usd is None else str(total.usd)
    return total.owner, total.name or "all", str(total.hours), money, "runs" if total.running else ""


def _sum_usage(owner: str, name: str, spans: list[RunInterval], first: datetime | None) -> UsageSum:
    hours, usd = Decimal(0), Decimal(0)
    for span in spans:
        started = datetime.fromisoformat(span.started)
        begin = max(started, first) if first else started
        ran = Decimal((_end(span) - begin).total_seconds()) / 3600
        hours += ran
        # Unrounded until the end: cents of many short intervals would add up.
        usd += ran * Decimal(span.usd_hour or 0)
    # One unknown price makes the sum unknown: a sum of the others would look like the whole.
    known = all(span.usd_hour for span in spans)
    money = usd.quantize(CENT, ROUND_HALF_UP) if known else None
    return UsageSum(
        owner, name, hours.quantize(CENT, ROUND_HALF_UP), money, not all(span.ended for span in spans)
    )


def _end(span: RunInterval) -> datetime:
    return datetime.fromisoformat(span.seen)


def _day(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) if text else None
    except ValueError:
        raise UsageError(f"--since {text!r} is no day", hint="wanted: for example 2026-11-01") from None
