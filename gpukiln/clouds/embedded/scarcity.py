"""Scripted shortages of capacity, quotas and reservations, to rehearse offers and launches.

A rule for launches that find no capacity is written ZONE:TYPE[:spot|on-demand][:TIMES][:+LAUNCHES], for
example

    us-west-2a:p4d.24xlarge         no capacity in that zone
    *:p4d.*:spot                    no spot capacity in any zone, for any size
    us-west-2a:g5.xlarge:1          EC2 refuses one launch, then there is capacity again
    *:g5.xlarge:+2                  two more instances start, then there is no capacity

A quota of the account is written quota:CODE:VCPUS, a capacity reservation reservation:ZONE:TYPE:INSTANCES:

    quota:L-DB2E81BA:8                      8 virtual CPUs of G and VT instances on demand, in each region
    reservation:us-west-2a:p5.48xlarge:2    two instances are reserved there, for every matching launch

All are in one file of the cloud's folder that each call reads, so they outlive the server.
"""

import contextlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from gpukiln.catalog.instance_types import every_instance_type
from gpukiln.catalog.quotas import QUOTAS
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.files import write_atomic
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.typed import dump, load, strict, unknown

ANY = "*"
RULE_SYNTAX = "ZONE:TYPE[:spot|on-demand][:TIMES][:+LAUNCHES]"
EXAMPLE = "for example us-west-2a:p4d.24xlarge, *:p4d.*:spot or us-west-2a:g5.xlarge:1"
QUOTA_SYNTAX, QUOTA_EXAMPLE = "quota:CODE:VCPUS", "for example quota:L-DB2E81BA:8"
RESERVATION_SYNTAX = "reservation:ZONE:TYPE:INSTANCES"
RESERVATION_EXAMPLE = "for example reservation:us-west-2a:p5.48xlarge:2"
MARKETS = ("on-demand", "spot")
PLENTY_VCPUS = 10_000  # of every quota without a line


@strict
class CapacityRule:
    """A rule for launches that find no capacity.

    Args:
        zone: An availability zone, or `*`.
        instance_type: A type, all of a family (`p4d.*`), or `*`.
        market: Its market; empty: both.
        left: Number of instances that start before the rule applies.
        times: Number of launches that it refuses; None: all.
        refused: Client tokens of the refused launches: a retry with the same token counts once.
    """

    zone: str
    instance_type: str
    market: Literal["", "on-demand", "spot"] = ""
    left: int = 0
    times: int | None = None
    refused: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """Zone, type and market; there is at most one rule for each key."""
        return self.zone, self.instance_type, self.market

    @property
    def spent(self) -> bool:
        """Whether it has refused its number of launches."""
        return self.times is not None and len(self.refused) >= self.times

    def __str__(self) -> str:
        """The line as `add` parses it, with the remaining numbers."""
        times = None if self.times is None else str(self.times - len(self.refused))
        launches = f"+{self.left}" if self.left else None
        return ":".join(filter(None, (*self.key, times, launches)))

    def fits(self, launch: "Launch", zone: str) -> bool:
        """Whether it applies to a launch in a zone."""
        return (
            self.zone in (ANY, zone)
            # fnmatchcase, because fnmatch compares by the rules of the operating system.
            and fnmatchcase(launch.instance_type, self.instance_type)
            and self.market in ("", launch.market)
        )

    def refuses(self, launch: "Launch") -> bool:
        """Whether it refuses a launch that it applies to."""
        # A retry of a refused launch is refused as well, as EC2 answers a client token as before.
        return self.left < launch.count and (not self.spent or launch.token in self.refused)


@strict
class QuotaLimit:
    """A quota of the account, in virtual CPUs."""

    code: str
    vcpus: int

    @property
    def key(self) -> tuple[str, ...]:
        return "quota", self.code

    def __str__(self) -> str:
        return f"quota:{self.code}:{self.vcpus}"


@strict
class ReservedCapacity:
    """Instances of a type that are reserved in a zone, on demand."""

    zone: str
    instance_type: str
    count: int

    @property
    def key(self) -> tuple[str, ...]:
        return "reservation", self.zone, self.instance_type

    def __str__(self) -> str:
        return f"reservation:{self.zone}:{self.instance_type}:{self.count}"


Line = CapacityRule | QuotaLimit | ReservedCapacity


@strict
class Script:
    """All scripted lines."""

    rules: tuple[CapacityRule, ...] = ()
    limits: tuple[QuotaLimit, ...] = ()
    reserved: tuple[ReservedCapacity, ...] = ()

    @property
    def lines(self) -> tuple[Line, ...]:
        return *self.rules, *self.limits, *self.reserved

    def limit(self, code: str) -> int:
        """The value of a quota, in virtual CPUs."""
        return next((quota.vcpus for quota in self.limits if quota.code == code), PLENTY_VCPUS)

    def scarce(self, launch: "Launch", zone: str) -> bool:
        """Whether a zone has no capacity for a launch."""
        return any(rule.fits(launch, zone) and rule.refuses(launch) for rule in self.rules)


@dataclass(frozen=True)
class Launch:
    """A launch that needs capacity.

    Args:
        market: One of MARKETS.
        count: Number of instances; all of them start or none.
        token: The request's client token; without one each request is a separate launch.
    """

    instance_type: str
    market: str
    count: int
    token: str = ""


@dataclass(frozen=True)
class Capacity:
    """The zones with capacity for a launch.

    Args:
        zone: The first requested zone with capacity; None: no zone has any.
        elsewhere: The other zones with capacity.
    """

    zone: str | None
    elsewhere: tuple[str, ...] = ()


def script(layout: Layout) -> Script:
    """All scripted lines, with rules that are used up.

    Raises:
        UnavailableError: The file is damaged.
    """
    try:
        text = layout.scarcity.read_bytes()
    # No scarcity is no file, so that the default of the cloud needs none.
    except FileNotFoundError:
        return Script()
    except OSError as error:
        raise _damaged(layout, str(error)) from error
    try:
        return load(Script, parse_json(text), where="scarcity rules")
    except ValueError as error:
        raise _damaged(layout, f"it is not JSON: {error}") from error
    except UsageError as error:
        raise _damaged(layout, "; ".join([error.message, *error.details])) from error


def add(layout: Layout, text: str) -> Line:
    """Add a line; it replaces a line with the same key, and rules that are used up are removed.

    Args:
        text: A line, see the module.

    Raises:
        UsageError: It has another form, or the zone, type or quota does not exist.
        UnavailableError: The file is damaged.
    """
    line = _parse(text)
    # A misspelled zone or type would be a rule that never applies, without a word.
    _check_names(line)
    # The file may be written before the first start of the server.
    layout.create()
    with _locked(layout):
        lines = script(layout).lines
        # Rules that are spent go at the next change: until then a retry with a counted token must find them.
        kept = [
            other
            for other in lines
            if other.key != line.key and not (isinstance(other, CapacityRule) and other.spent)
        ]
        _write(layout, [*kept, line])
    return line


def clear(layout: Layout, text: str | None = None) -> tuple[Line, ...]:
    """Remove lines.

    Args:
        text: A line as it was added, or its key: ZONE:TYPE[:spot|on-demand], quota:CODE,
            reservation:ZONE:TYPE; a key without a market removes the rules of both. None removes all lines,
            also of a damaged file.

    Returns:
        The removed lines, as far as they can be read.

    Raises:
        UsageError: The line does not exist.
        UnavailableError: The file is damaged, and `text` is not None.
    """
    if not layout.scarcity.exists():
        if text is None:
            return ()
        raise unknown("scarcity rule", text, ())
    with _locked(layout):
        if text is None:
            # A damaged file can be removed only as a whole.
            with contextlib.suppress(UnavailableError):
                gone = script(layout).lines
                layout.scarcity.unlink()
                return gone
            layout.scarcity.unlink()
            return ()
        lines = script(layout).lines
        gone = tuple(line for line in lines if _is_about(line, text))
        if not gone:
            raise unknown("scarcity rule", text, map(str, lines))
        _write(layout, [line for line in lines if line not in gone])
    return gone


@contextlib.contextmanager
def capacity(
    layout: Layout, launch: Launch, zones: Sequence[str], others: Sequence[str]
) -> Iterator[Capacity]:
    """Take capacity for the launch in the block; a failed block takes none.

    Args:
        zones: The zones where it may start, the preferred one first.
        others: All zones that offer the type.

    Yields:
        The zones with capacity.

    Raises:
        UnavailableError: The file is damaged.
    """
    if not layout.scarcity.exists():
        yield Capacity(zones[0], tuple(zone for zone in others if zone != zones[0]))
        return
    # Without a token the launch gets one, so that its refusal is counted once.
    launch = replace(launch, token=launch.token or secrets.token_hex(8))
    # Held during the launch: two launches at once would both take the last free instance.
    with _locked(layout):
        known = script(layout)
        zone = next((zone for zone in zones if not known.scarce(launch, zone)), None)
        excluded_zones = {zone, *zones} if zone is None else {zone}
        yield Capacity(
            zone,
            tuple(
                other for other in others if other not in excluded_zones and not known.scarce(launch, other)
            ),
        )
        if zone is None:
            after = tuple(
                _count_refusal(rule, launch)
                if any(rule.fits(launch, candidate) for candidate in zones)
                else rule
                for rule in known.rules
            )
        else:
            after = tuple(
                replace(rule, left=rule.left - launch.count)
                if rule.fits(launch, zone) and rule.left >= launch.count
                else rule
                for rule in known.rules
            )
        # Most launches change no rule, and then nothing is written.
        if after != known.rules:
            _write(layout, replace(known, rules=after).lines)


def _count_refusal(rule: CapacityRule, launch: Launch) -> CapacityRule:
    counts = rule.times is not None and rule.refuses(launch) and launch.token not in rule.refused
    return replace(rule, refused=(*rule.refused, launch.token)) if counts else rule


def _is_about(line: Line, text: str) -> bool:
    if not isinstance(line, CapacityRule):
        return text in (":".join(line.key), str(line))
    if text.partition(":")[0] in _KINDS:
        return False
    rule = _parse_rule(text)
    return line.key[:2] == rule.key[:2] and rule.market in ("", line.market)


def _parse(text: str) -> Line:
    """Parse any line.

    >>> str(_parse("quota:L-DB2E81BA:8"))
    'quota:L-DB2E81BA:8'
    >>> _parse("us-west-2a:g5.xlarge:spot:1").key
    ('us-west-2a', 'g5.xlarge', 'spot')
    """
    return _KINDS.get(text.partition(":")[0], _parse_rule)(text)


def _parse_quota(text: str) -> Line:
    # Codes of Service Quotas are L- with digits and capitals, such as L-DB2E81BA.
    match = re.fullmatch(r"quota:(L-[0-9A-Z]+):([0-9]{1,6})", text)
    if not match:
        raise UsageError(f"{text!r} is not a quota, wanted {QUOTA_SYNTAX}", hint=QUOTA_EXAMPLE)
    return QuotaLimit(match[1], int(match[2]))


def _parse_reservation(text: str) -> Line:
    match = re.fullmatch(r"reservation:([^:*]+):([^:*]+):([1-9][0-9]{0,5})", text)
    if not match:
        raise UsageError(
            f"{text!r} is not a reservation, wanted {RESERVATION_SYNTAX}", hint=RESERVATION_EXAMPLE
        )
    return ReservedCapacity(match[1], match[2], int(match[3]))


_KINDS = {"quota": _parse_quota, "reservation": _parse_reservation}


def _parse_rule(text: str) -> CapacityRule:
    zone, _, rest = text.partition(":")
    instance_type, *more = rest.split(":")
    if not zone or not instance_type:
        raise UsageError(f"{text!r} is not a scarcity rule, wanted {RULE_SYNTAX}", hint=EXAMPLE)
    given: dict[str, str] = {}
    for word in more:
        if re.fullmatch(r"[0-9]{1,6}", word):
            what = "times"
        elif re.fullmatch(r"\+[0-9]{1,6}", word):
            what = "left"
        elif word in MARKETS:
            what = "market"
        elif re.fullmatch(r"[a-z-]+", word):
            raise unknown("market", word, MARKETS)
        else:
            raise UsageError(
                f"{text!r}: {word!r} is neither a market nor a number, wanted {RULE_SYNTAX}", hint=EXAMPLE
            )
        if what in given:
            raise UsageError(
                f"{text!r}: {given[what]!r} and {word!r} exclude each other, wanted {RULE_SYNTAX}",
                hint=EXAMPLE,
            )
        given[what] = word
    # 0 times would be a rule that never refuses.
    if given.get("times", "1").strip("0") == "":
        raise UsageError(f"{text!r} refuses no launch", hint="omit the number to refuse every launch")
    return CapacityRule(
        zone,
        instance_type,
        market=given.get("market", ""),  # type: ignore[arg-type]  # one of MARKETS
        left=int(given.get("left", 0)),
        times=int(given["times"]) if "times" in given else None,
    )


def _check_names(line: Line) -> None:
    if isinstance(line, QuotaLimit):
        codes = [quota.code for quota in QUOTAS]
        if line.code not in codes:
            raise unknown("quota", line.code, codes)
        return
    if line.zone != ANY:
        every = _zones_by_region()
        region = next((name for name in every if line.zone.startswith(name)), None)
        choices = every[region] if region else [zone for zones in every.values() for zone in zones]
        if line.zone not in choices:
            raise unknown("availability zone", line.zone, [*choices, ANY] if region else choices)
    types = every_instance_type()
    # A family is written as in a filter of EC2: p4d.*
    families = {f"{name.partition('.')[0]}.*" for name in types}
    if line.instance_type not in {*types, *families, ANY}:
        meant = families if line.instance_type.endswith(".*") else types
        raise unknown("instance type", line.instance_type, meant)


def _zones_by_region() -> dict[str, list[str]]:
    """The zones of each region, the longest names first: us-gov-west-1 is not in a region us-g."""
    from moto.ec2.models.availability_zones_and_regions import (  # noqa: PLC0415 - slow to import
        RegionsAndZonesBackend,
    )

    zones_by_region = {
        name: [zone.name for zone in zones] for name, zones in RegionsAndZonesBackend.zones.items()
    }
    return dict(sorted(zones_by_region.items(), key=lambda item: -len(item[0])))


# The server and commands change the file.
def _locked(layout: Layout) -> contextlib.AbstractContextManager[None]:
    return locked(layout.root / "scarcity.lock")


def _write(layout: Layout, lines: Sequence[Line]) -> None:
    if not lines:
        layout.scarcity.unlink(missing_ok=True)
        return
    document = Script(
        rules=tuple(line for line in lines if isinstance(line, CapacityRule)),
        limits=tuple(line for line in lines if isinstance(line, QuotaLimit)),
        reserved=tuple(line for line in lines if isinstance(line, ReservedCapacity)),
    )
    write_atomic(layout.scarcity, json.dumps(dump(document), indent=1))


def _damaged(layout: Layout, why: str) -> UnavailableError:
    return UnavailableError(
        f"{layout.scarcity}, the file of scripted shortages, can't be read: {why}",
        hint="`invoke cloud.gpus all --plenty all` removes it",
    )
