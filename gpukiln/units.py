"""Amounts as people type and read them: memory, time, money, ranges of numbers (docs/units.md).

A text has the same meaning in every option, settings file and contract. Kubernetes' manifests keep
Kubernetes' form (gpukiln/kubernetes/quantity.py). Standard library and Python 3.9: nodes run this module too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Callable

from gpukiln.errors import UsageError

# At most 15 digits before and after the point: no amount needs more, and longer ones would be slow to
# compute.
_NUMBER = r"\+?(?:[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15})(?:[eE][+-]?[0-9]{1,2})?"
# Exponents of 1024 or 1000 by the letter of the unit.
_BINARY = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MIB, GIB = 1 << 20, 1 << 30


class Memory(int):
    """Bytes of memory or storage: `24GiB` and `24Gi` are 2^30 each, `24GB` and `24G` 10^9, `8192` is MiB.

    Attributes:
        PATTERN: The form as a regular expression of Python and of JSON Schema.
    """

    # `m` alone is refused: it is a thousandth for Kubernetes and 2^20 for Docker.
    PATTERN = rf"({_NUMBER})[ ]*([KkMmGgTtPpEe][Ii][Bb]?|[KkGgTtPpEeM][Bb]?|[Mm][Bb]|[Bb])?"
    # A number without a unit is MiB. Below 256 the user probably means GiB, above 16 TiB bytes: both are
    # refused.
    LEAST_BARE, MOST_BARE = 256, 1 << 24
    LIMIT = 1 << 63
    WANTED = "wanted such as 24GiB, 24GB or 8192 (MiB)"

    @classmethod
    def parse(cls, text: str, option: str, *, zero: bool = False) -> Memory:
        """Read an amount.

        >>> Memory.parse("24GiB", "--memory").mib, Memory.parse("8192", "--memory").mib
        (24576, 8192)
        >>> int(Memory.parse("24GB", "--memory"))
        24000000000

        Args:
            option: The option of the text, for messages.
            zero: Whether 0 is allowed.

        Raises:
            UsageError: The text is not an amount of memory.
        """
        match = re.fullmatch(cls.PATTERN, text.strip())
        if match is None:
            thousandth = re.fullmatch(rf"({_NUMBER})m", text.strip())
            hint = (
                f"did you mean {thousandth[1]}Mi? m is a thousandth of a byte" if thousandth else cls.WANTED
            )
            raise UsageError(f"{option} {_short(text)} is not an amount of memory", hint=hint)
        number, unit = Decimal(match[1]), (match[2] or "").upper()
        if not unit and number:
            cls._check_bare(number, text.strip(), option)
        # IEC 80000-13: KiB is 1024 bytes, KB and K are 1000.
        base = 1024 if "I" in unit else 1000
        size = number * (base ** _BINARY[unit.rstrip("IB")] if unit else MIB)
        if not size and not zero:
            raise UsageError(f"{option} {_short(text)} is not more than 0", hint=cls.WANTED)
        if size >= cls.LIMIT:
            raise UsageError(f"{option} {_short(text)} is 8 EiB or more", hint=cls.WANTED)
        # Rounded up: a request for memory must not shrink.
        return cls(size.to_integral_value(ROUND_CEILING))

    @classmethod
    def _check_bare(cls, number: Decimal, text: str, option: str) -> None:
        if cls.LEAST_BARE <= number <= cls.MOST_BARE:
            return
        less = number < cls.LEAST_BARE
        raise UsageError(
            f"{option} {_short(text)} is too {'little' if less else 'much'} to be meant as MiB, "
            "which a number without a unit is",
            hint=f"wanted with its unit, such as {text}{'GiB' if less else 'B'}",
        )

    @classmethod
    def of_mib(cls, mib: float) -> Memory:
        return cls(mib * MIB)

    @property
    def mib(self) -> int:
        """Whole MiB, rounded up."""
        return -(-int(self) // MIB)

    @property
    def gib(self) -> int:
        """Whole GiB, rounded up."""
        return -(-int(self) // GIB)

    @property
    def gb(self) -> int:
        """Whole GB of 10^9 bytes, rounded up."""
        return -(-int(self) // 10**9)

    @property
    def quantity(self) -> str:
        """The same amount in Kubernetes' form, with the unit that needs the fewest digits."""
        exact = [(int(self), 0, "")]
        for power, unit in enumerate("KMGTPE", 1):
            for order, (base, name) in enumerate(((1024, f"{unit}i"), (1000, "k" if unit == "K" else unit))):
                if self and int(self) % base**power == 0:
                    exact.append((int(self) // base**power, order, name))
        number, _, unit = min(exact)
        return f"{number}{unit}"

    @property
    def shown(self) -> str:
        """For people: `24 GiB`, `22.35 GiB`, `512 MiB`, rounded to two places."""
        value, unit = float(self), "bytes"
        for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
            if round(value, 2) < 1024:
                break
            value, unit = value / 1024, larger
        return f"{_trimmed(value, 2)} {unit}"


class Duration(float):
    """Seconds: `90s`, `1h30m`, `7d`; a number without a unit is seconds.

    Attributes:
        PATTERN: The form as a regular expression of Python and of JSON Schema.
    """

    PATTERN = rf"{_NUMBER}|(?:[0-9]{{1,12}}(?:\.[0-9]{{1,12}})?[SsMmHhDdWw])+"
    WANTED = "wanted such as 90s, 10m, 2h, 1h30m, 7d or 90 (seconds)"

    @classmethod
    def parse(cls, text: str, option: str, *, least: float = 0, most: float = float("inf")) -> Duration:
        """Read a duration.

        >>> Duration.parse("1h30m", "--for"), Duration.parse("90", "--for")
        (5400.0, 90.0)
        >>> Duration.parse("7d", "--since").shown
        '7d'

        Args:
            option: The option of the text, for messages.
            least: The minimum in seconds.
            most: The maximum in seconds.

        Raises:
            UsageError: The text is not a duration, or outside the limits.
        """
        typed = text.strip().lower()
        if not re.fullmatch(cls.PATTERN, typed):
            raise UsageError(f"{option} {_short(text)} is not a duration", hint=cls.WANTED)
        if typed[-1] in _SECONDS:
            parts = re.findall(r"([0-9.]+)([smhdw])", typed)
            duration = cls(sum(float(number) * _SECONDS[unit] for number, unit in parts))
        else:
            duration = cls(typed)
        if duration < least:
            raise UsageError(f"{option} {_short(text)} is too short", hint=f"{cls(least).shown} or more")
        if duration > most:
            raise UsageError(f"{option} {_short(text)} is too long", hint=f"{cls(most).shown} or less")
        return duration

    @property
    def shown(self) -> str:
        """For people, in a form that `parse` reads: `4.2s`, `3m7s`, `2d3h`; two units at most."""
        if (tenths := round(max(self, 0.0), 1)) < 60:
            return f"{_trimmed(tenths, 1)}s"
        parts: list[str] = []
        rest = round(self)
        for unit in ("d", "h", "m", "s"):
            many, rest = divmod(rest, _SECONDS[unit])
            if many and len(parts) < 2:
                parts.append(f"{many}{unit}")
            elif parts:
                break
        return "".join(parts)


class Money(Decimal):
    """USD: `2.50`, `$2.50`."""

    @classmethod
    def parse(cls, text: str, option: str) -> Money:
        """Read an amount.

        >>> Money.parse("$2.50", "--max-price").shown, Money.parse("1234", "--max-price").shown
        ('2.50', '1,234.00')

        Raises:
            UsageError: The text is not an amount above 0.
        """
        try:
            amount = cls(text.strip().removeprefix("$"))
        except InvalidOperation:
            # Decimal accepts NaN and Infinity, and raises for other text; all of them are refused below.
            amount = cls(0)
        if not amount.is_finite() or amount <= 0:
            raise UsageError(f"{option} {_short(text)} is not a price", hint="wanted: USD, for example 2.50")
        return amount

    @property
    def shown(self) -> str:
        """For people: cents, and commas between thousands."""
        return f"{self:,.2f}"


@dataclass(frozen=True)
class Span:
    """A number, or a range with both ends; None for no upper end."""

    low: int
    high: int | None = None

    @classmethod
    def parse(
        cls, text: str, option: str, *, least: int = 0, read: Callable[[str, str], int] | None = None
    ) -> Span:
        """Read `2`, `1..4`, `2..` or `..4`.

        >>> Span.parse("1..4", "--gpus")
        Span(low=1, high=4)
        >>> str(Span.parse("2..", "--gpus"))
        '2 or more'

        Args:
            option: The option of the text, for messages.
            least: The minimum, at which `..4` begins.
            read: Reads an end; integers by default.

        Raises:
            UsageError: The text is not a number or a range.
        """
        read = read or whole
        low, dots, high = (part.strip() for part in text.partition(".."))
        if not low and not high:
            raise UsageError(
                f"{option} {_short(text)}: `..` has no end", hint="wanted such as 2, 1..4, 2.. or ..4"
            )
        first = read(low, option) if low else least
        last = read(high, option) if high else (None if dots else first)
        if first < least:
            raise UsageError(f"{option} {_short(text)} is less than {least}", hint=f"wanted {least} or more")
        if last is not None and last < first:
            raise UsageError(
                f"{option} {_short(text)}: {low} is more than {high}", hint="write the smaller number first"
            )
        return cls(first, last)

    def __contains__(self, number: int) -> bool:
        return self.low <= number and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{self.low} or more" if self.high is None else f"{self.low} to {self.high}"


# Fits into 64 bits; int() raises ValueError from 4,300 digits on (Python, "Integer string conversion length
# limitation").
MAX_DIGITS = 18


def is_whole(text: str) -> bool:
    """Whether a text is a decimal integer of up to 18 digits.

    >>> is_whole("12"), is_whole("-1"), is_whole("9" * 19)
    (True, False, False)
    """
    return len(text) <= MAX_DIGITS and text.isdecimal()


def whole(text: object, option: str, least: int = 0) -> int:
    """Read an integer.

    >>> whole("12", "--count")
    12

    Raises:
        UsageError: The text is not an integer of `least` or more.
    """
    typed = str(text)
    if not is_whole(typed) or int(typed) < least:
        raise UsageError(
            f"{option} {_short(typed)} is not a whole number of {least} or more",
            hint=f"such as {option} {least + 1}",
        )
    return int(typed)


def _trimmed(value: float, places: int) -> str:
    return f"{value:.{places}f}".rstrip("0").rstrip(".")


def _short(text: str) -> str:
    """A text for a message, cut where it is long: a user may have pasted a file."""
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
