"""Which launches find no capacity: rules that somebody wrote, so that a walk over zones can be rehearsed.

A rule is written ZONE:TYPE[:spot|on-demand][:TIMES][:+LAUNCHES], for example

    us-west-2a:p4d.24xlarge         no capacity in that zone
    *:p4d.*:spot                    no spot capacity in any zone, for any size
    us-west-2a:g5.xlarge:1          one launch is refused, then there is capacity again
    *:g5.xlarge:+2                  two instances still start, then there is no capacity

They are kept in one file of the cloud's folder and read at each launch, so they outlive the server.
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
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.files import write_whole
from gpukiln.locks import locked
from gpukiln.typed import dump, load, strict, unknown

ANY = "*"
FORM = "ZONE:TYPE[:spot|on-demand][:TIMES][:+LAUNCHES]"
EXAMPLE = "for example us-west-2a:p4d.24xlarge, *:p4d.*:spot or us-west-2a:g5.xlarge:1"
MARKETS = ("on-demand", "spot")


@strict
class Rule:
    """Launches that find no capacity.

    Args:
        zone: An availability zone, or `*`.
        instance_type: A type, all of a family (`p4d.*`), or `*`.
        market: The one it is about; empty: both.
        left: How many instances still start before it holds.
        times: How many launches are refused until there is capacity again; None: all.
        refused: The client tokens of those that were: what is sent again is no other launch.
    """

    zone: str
    instance_type: str
    market: Literal["", "on-demand", "spot"] = ""
    left: int = 0
    times: int | None = None
    refused: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is about; there is one rule of each."""
        return self.zone, self.instance_type, self.market

    @property
    def spent(self) -> bool:
        """Whether it refuses no other launch."""
        return self.times is not None and len(self.refused) >= self.times

    def __str__(self) -> str:
        """As `add` takes it, with what is left of it."""
        times = None if self.times is None else str(self.times - len(self.refused))
        launches = f"+{self.left}" if self.left else None
        return ":".join(filter(None, (*self.key, times, launches)))

    def fits(self, launch: "Launch", zone: str) -> bool:
        """Whether it is about a launch in a zone."""
        return (
            self.zone in (ANY, zone)
            and fnmatchcase(launch.instance_type, self.instance_type)
            and self.market in ("", launch.market)
        )

    def refuses(self, launch: "Launch") -> bool:
        """Whether a launch that it is about finds no capacity."""
        return self.left < launch.count and (not self.spent or launch.token in self.refused)


@strict
class _Document:
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Launch:
    """A launch that asks for capacity.

    Args:
        market: One of MARKETS.
        count: How many instances; all of them start or none.
        token: The request's client token; without one each request is a launch of its own.
    """

    instance_type: str
    market: str
    count: int
    token: str = ""


@dataclass(frozen=True)
class Capacity:
    """Where a launch finds capacity.

    Args:
        zone: The first zone asked for that has some; None: none has.
        elsewhere: The other zones that have some.
    """

    zone: str | None
    elsewhere: tuple[str, ...] = ()


def rules(layout: Layout) -> tuple[Rule, ...]:
    """Every rule, those that are spent too.

    Raises:
        UnavailableError: The file is damaged.
    """
    try:
        text = layout.scarcity.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _damaged(layout, str(error)) from error
    try:
        return load(_Document, json.loads(text), where="scarcity rules").rules
    except (ValueError, RecursionError) as error:
        raise _damaged(layout, f"it is no JSON: {error}") from error
    except UsageError as error:
        raise _damaged(layout, "; ".join([error.message, *error.details])) from error


def add(layout: Layout, text: str) -> Rule:
    """Add a rule; one about the same zone, type and market makes room for it, as do those that are spent.

    Args:
        text: See above.

    Raises:
        UsageError: It is no rule, or there is no such zone or type.
        UnavailableError: The file is damaged.
    """
    rule = _parse(text)
    _check_names(rule)
    layout.create()
    with _locked(layout):
        kept = [one for one in rules(layout) if one.key != rule.key and not one.spent]
        _write(layout, [*kept, rule])
    return rule


def clear(layout: Layout, text: str | None = None) -> tuple[Rule, ...]:
    """Remove rules.

    Args:
        text: ZONE:TYPE[:spot|on-demand], as a rule was added; without the market, those of both. None removes
            all, and the file with them where it is damaged.

    Returns:
        Those removed, as far as they can be read.

    Raises:
        UsageError: There is no such rule.
        UnavailableError: The file is damaged, and one rule of it was named.
    """
    if not layout.scarcity.exists():
        if text is None:
            return ()
        raise unknown("scarcity rule", text, ())
    with _locked(layout):
        if text is None:
            with contextlib.suppress(UnavailableError):
                gone = rules(layout)
                layout.scarcity.unlink()
                return gone
            layout.scarcity.unlink()
            return ()
        wanted, found = _parse(text), rules(layout)
        gone = tuple(
            one for one in found if one.key[:2] == wanted.key[:2] and wanted.market in ("", one.market)
        )
        if not gone:
            raise unknown("scarcity rule", text, map(str, found))
        _write(layout, [one for one in found if one not in gone])
    return gone


@contextlib.contextmanager
def capacity(
    layout: Layout, launch: Launch, zones: Sequence[str], others: Sequence[str]
) -> Iterator[Capacity]:
    """Take capacity for what the block launches; it is given back where the block fails.

    Args:
        zones: Those that it may start in, the best first.
        others: All that have the type.

    Yields:
        Where it finds capacity.

    Raises:
        UnavailableError: The file is damaged.
    """
    if not layout.scarcity.exists():
        yield Capacity(zones[0], tuple(zone for zone in others if zone != zones[0]))
        return
    launch = replace(launch, token=launch.token or secrets.token_hex(8))
    with _locked(layout):
        known = rules(layout)

        def scarce(zone: str) -> bool:
            return any(rule.fits(launch, zone) and rule.refuses(launch) for rule in known)

        zone = next((zone for zone in zones if not scarce(zone)), None)
        told = {zone, *zones} if zone is None else {zone}
        yield Capacity(zone, tuple(one for one in others if one not in told and not scarce(one)))
        if zone is None:
            after = [
                _refused(rule, launch) if any(rule.fits(launch, one) for one in zones) else rule
                for rule in known
            ]
        else:
            after = [
                replace(rule, left=rule.left - launch.count)
                if rule.fits(launch, zone) and rule.left >= launch.count
                else rule
                for rule in known
            ]
        if after != list(known):
            _write(layout, after)


def _refused(rule: Rule, launch: Launch) -> Rule:
    counts = rule.times is not None and rule.refuses(launch) and launch.token not in rule.refused
    return replace(rule, refused=(*rule.refused, launch.token)) if counts else rule


def _parse(text: str) -> Rule:
    zone, _, rest = text.partition(":")
    instance_type, *more = rest.split(":")
    if not zone or not instance_type:
        raise UsageError(f"{text!r} is no scarcity rule, wanted {FORM}", hint=EXAMPLE)
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
            raise UsageError(f"{text!r}: {word!r} is no market and no number, wanted {FORM}", hint=EXAMPLE)
        if what in given:
            raise UsageError(f"{text!r}: {given[what]!r} and {word!r}, wanted {FORM}", hint=EXAMPLE)
        given[what] = word
    if given.get("times", "1").strip("0") == "":
        raise UsageError(f"{text!r} refuses no launch", hint="leave the number out to refuse every launch")
    return Rule(
        zone,
        instance_type,
        market=given.get("market", ""),  # type: ignore[arg-type]  # one of MARKETS
        left=int(given.get("left", 0)),
        times=int(given["times"]) if "times" in given else None,
    )


def _check_names(rule: Rule) -> None:
    if rule.zone != ANY:
        every = _zones()
        region = next((name for name in every if rule.zone.startswith(name)), None)
        choices = every[region] if region else [zone for zones in every.values() for zone in zones]
        if rule.zone not in choices:
            raise unknown("availability zone", rule.zone, [*choices, ANY] if region else choices)
    types = every_instance_type()
    families = {f"{name.partition('.')[0]}.*" for name in types}
    if rule.instance_type not in {*types, *families, ANY}:
        meant = families if rule.instance_type.endswith(".*") else types
        raise unknown("instance type", rule.instance_type, meant)


def _zones() -> dict[str, list[str]]:
    """The zones of each region, the longest names first: us-gov-west-1 is not in a region us-g."""
    from moto.ec2.models.availability_zones_and_regions import (  # noqa: PLC0415 - slow to import
        RegionsAndZonesBackend,
    )

    found = {name: [zone.name for zone in zones] for name, zones in RegionsAndZonesBackend.zones.items()}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _locked(layout: Layout) -> contextlib.AbstractContextManager[None]:
    return locked(layout.root / "scarcity.lock")


def _write(layout: Layout, known: Sequence[Rule]) -> None:
    if known:
        write_whole(layout.scarcity, json.dumps(dump(_Document(tuple(known))), indent=1))
    else:
        layout.scarcity.unlink(missing_ok=True)


def _damaged(layout: Layout, why: str) -> UnavailableError:
    return UnavailableError(
        f"{layout.scarcity} says which launches find no capacity, and can't be read: {why}",
        hint="`invoke cloud.gpus all --plenty all` removes it",
    )
