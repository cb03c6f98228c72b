"""Working hours: in a time zone where schedules have one, in UTC for Karpenter's budgets."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import cached_property
from zoneinfo import ZoneInfo, available_timezones

from gpukiln.errors import UsageError
from gpukiln.typed import strict, unknown

DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")  # as cron counts them
HOURS_FORMAT = (
    "DAYS HH:MM-HH:MM, for example `mon-fri 08:00-18:00`, `daily 06:00-22:00` or `mon,wed 09:00-17:00`"
)
DAY_MIN = 24 * 60


@strict
class Hours:
    """The same hours on some days of the week.

    Args:
        days: Numbers, Sunday is 0.
        start_min: Minutes since midnight.
        end_min: Minutes since midnight of the same day, at most 24 hours.
        zone: Name in the IANA time zone database.
    """

    days: tuple[int, ...]
    start_min: int
    end_min: int
    zone: str = "UTC"

    @property
    def text(self) -> str:
        numbers = _ranges(list(self.days)) if len(self.days) < 7 else "daily"
        days = re.sub(r"\d", lambda match: DAYS[int(match[0])], numbers)
        return f"{days} {_clock(self.start_min)}-{_clock(self.end_min)} {self.zone}"

    @property
    def starts(self) -> str:
        """Cron schedule of the start, in `zone`."""
        return _cron(self.days, self.start_min)

    @property
    def ends(self) -> str:
        return _cron(self.days, self.end_min)

    @property
    def duration_min(self) -> int:
        return self.end_min - self.start_min

    @cached_property
    def in_utc(self) -> tuple[str, int]:
        """Cron schedule in UTC and a duration in minutes that cover the hours in summer and in winter."""
        offsets = [_offset_min(self.zone, month) for month in range(1, 13)]
        # In summer a zone is further ahead of UTC: the earliest start and the latest end of both cover the
        # hours.
        first, last = self.start_min - max(offsets), self.end_min - min(offsets)
        return _cron(self.days, first), min(last - first, DAY_MIN)


def parse(text: str, zone: str = "UTC") -> Hours:
    """Read --hours.

    >>> parse("mon-fri 08:00-18:00").text
    'mon-fri 08:00-18:00 UTC'
    >>> parse("daily 06:00-22:00", "Europe/Berlin").in_utc
    ('0 4 * * *', 1020)

    Raises:
        UsageError: The text has another form, or the time zone is unknown.
    """
    if zone not in available_timezones():
        raise unknown("time zone", zone, sorted(available_timezones()))
    clock = r"([01]?\d|2[0-4]):([0-5]\d)"
    match = re.fullmatch(rf"([a-z,-]+)\s+{clock}\s*-\s*{clock}", text.strip().lower())
    if not match:
        raise UsageError(f"--hours {text!r} is not valid", hint=f"wanted: {HOURS_FORMAT}")
    start, end = int(match[2]) * 60 + int(match[3]), int(match[4]) * 60 + int(match[5])
    if not start < end <= DAY_MIN:
        raise UsageError(
            f"--hours {text!r}: {_clock(start)} is not before {_clock(end)} on the same day",
            hint="hours can't span midnight: choose a start before the end",
        )
    return Hours(_days(match[1], text), start, end, zone)


def _days(part: str, text: str) -> tuple[int, ...]:
    if part == "daily":
        return tuple(range(7))
    numbers: set[int] = set()
    for day_or_range in part.split(","):
        first, dash, last = day_or_range.partition("-")
        for name in (first, last) if dash else (first,):
            if name not in DAYS:
                error = unknown("day", name, DAYS)
                raise UsageError(
                    f"--hours {text!r}: {error.message}", hint=error.hint or f"wanted: {HOURS_FORMAT}"
                )
        begin = DAYS.index(first)
        length = (DAYS.index(last or first) - begin) % 7  # modulo: fri-mon spans the end of the week
        numbers |= {(begin + step) % 7 for step in range(length + 1)}
    return tuple(sorted(numbers))


def _cron(days: tuple[int, ...], minute: int) -> str:
    """A cron schedule; a minute before or after the day (by a time zone) shifts the days."""
    shift, minute = divmod(minute, DAY_MIN)
    moved = sorted((day + shift) % 7 for day in days)
    return f"{minute % 60} {minute // 60} * * {'*' if len(moved) == 7 else _ranges(moved)}"


def _ranges(days: list[int]) -> str:
    if len(days) > 2 and days == list(range(days[0], days[-1] + 1)):
        return f"{days[0]}-{days[-1]}"
    return ",".join(map(str, days))


def _offset_min(zone: str, month: int) -> int:
    """Minutes that a zone is ahead of UTC in the middle of a month of this year."""
    year = datetime.now(UTC).year
    offset = datetime(year, month, 15, tzinfo=ZoneInfo(zone)).utcoffset() or timedelta()
    return int(offset.total_seconds() // 60)


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
