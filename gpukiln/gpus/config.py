"""/etc/gpukiln/gpus.toml: limits of leases, and the machine's price. The role gpu_tools writes the file.

[limits]              # of every user
gpus = 4              # at the same time; 0: no limit
hours = 24            # of one lease; 0: no limit

[limits.users.ann]    # for one user, in place of the limits above
gpus = 8

[limits.projects.training]
hours = 72
members = ["ann", "bob"]   # other users who name the project keep the general limits

[busy]                # GPUs that processes use without a lease
counts = ["compute"]  # kinds of processes that make a GPU busy: compute, graphics, compute+graphics

[price]               # of the whole machine; default: the catalogue's price of its instance type
usd_hour = 12.5
source = "contract 2026"
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpukiln.errors import UsageError

try:
    import tomllib
except ImportError:  # Python 3.9 and 3.10
    import tomli as tomllib  # type: ignore[no-redef]

COMPUTE, GRAPHICS, BOTH = "compute", "graphics", "compute+graphics"  # kinds of processes
# A display server has a graphics context on every GPU of a workstation and computes nothing: it must not keep
# leases away.
BUSY_KINDS = (COMPUTE,)
FILE = "/etc/gpukiln/gpus.toml"
ENVIRONMENT = "GPUKILN_GPUS_CONFIG"
# Vendor and product of the machine, readable for every user; on EC2 Nitro the product is the instance type.
DMI = "/sys/class/dmi/id"


@dataclass(frozen=True)
class LeaseLimit:
    """The limits of one user or project.

    Args:
        gpus: At the same time; 0 for no limit.
        hours: Of one lease; 0 for no limit.
        whose: Whose limit it is, for messages.
        members: Of a project, the users to whom the limit applies.
    """

    gpus: int = 0
    hours: float = 0
    whose: str = "everybody"
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachinePrice:
    """The price of the whole machine.

    Args:
        source: Where the price comes from, and its date.
    """

    usd_hour: float
    source: str


@dataclass(frozen=True)
class Config:
    """The content of the file.

    Args:
        counts: Kinds of processes that make a GPU busy without a lease.
    """

    path: Path
    everybody: LeaseLimit = field(default_factory=LeaseLimit)
    users: dict[str, LeaseLimit] = field(default_factory=dict)
    projects: dict[str, LeaseLimit] = field(default_factory=dict)
    price: MachinePrice | None = None
    counts: tuple[str, ...] = BUSY_KINDS

    def limit(self, user: str, project: str) -> LeaseLimit:
        """The limit that applies to a user: the user's own, else the project's, else the general one.

        Args:
            project: As the user typed it.
        """
        own = self.projects.get(project)
        # A user names the project freely: only membership gives its limits.
        return self.users.get(user) or (own if own and user in own.members else self.everybody)


def load(path: Path | None = None) -> Config:
    """Read the file; without a file nothing is limited.

    Raises:
        UsageError: The file is not TOML, or has an unknown key or a wrong value.
    """
    path = path or Path(os.environ.get(ENVIRONMENT) or FILE)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Config(path)
    except (ValueError, RecursionError) as error:  # not TOML or UTF-8, nested too deeply, too many digits
        raise UsageError(
            f"{path} is not TOML: {error}", hint="the role gpu_tools writes a new file"
        ) from error
    reader = _ConfigReader(path)
    reader.keys(data, "", ("limits", "busy", "price"))
    limits = reader.section(data, "limits")
    reader.keys(limits, "limits", ("gpus", "hours", "users", "projects"))
    everybody = reader.limit(limits, "limits", "everybody", LeaseLimit())
    price = None
    if table := reader.section(data, "price"):
        reader.keys(table, "price", ("usd_hour", "source"))
        price = MachinePrice(
            float(reader.number(table, "price", "usd_hour", 0)), str(table.get("source", path))
        )
    return Config(
        path,
        everybody,
        reader.limits(limits, "users", everybody),
        reader.limits(limits, "projects", everybody),
        price,
        reader.counts(data),
    )


class _ConfigReader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, what: str, expected: str) -> UsageError:
        return UsageError(f"{self.path}: {what}", hint=f"wanted: {expected}")

    def keys(self, data: dict[str, Any], where: str, known: tuple[str, ...]) -> None:
        if strange := [key for key in data if key not in known]:
            place = f"[{where}] has" if where else "it has"
            raise self.wrong(f"{place} {strange[0]!r}", ", ".join(known))

    def section(self, data: dict[str, Any], name: str) -> dict[str, Any]:
        table = data.get(name, {})
        if not isinstance(table, dict):
            raise self.wrong(f"{name} is {table!r}", f"a table [{name}]")
        return table

    def number(self, data: dict[str, Any], where: str, name: str, default: float) -> float:
        value = data.get(name, default)
        if isinstance(value, int) and value.bit_length() > 64:
            # A hexadecimal literal may have any length; printing it in decimal raises ValueError from 4,300
            # digits on.
            value = float("inf")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise self.wrong(f"[{where}] {name} is {value!r}", "a number of 0 or more")
        return value

    def counts(self, data: dict[str, Any]) -> tuple[str, ...]:
        busy = self.section(data, "busy")
        self.keys(busy, "busy", ("counts",))
        kinds, known = busy.get("counts", list(BUSY_KINDS)), (COMPUTE, GRAPHICS, BOTH)
        if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
            raise self.wrong(f"[busy] counts is {kinds!r}", f"a list of {', '.join(known)}")
        return tuple(kinds)

    def limit(self, data: dict[str, Any], where: str, whose: str, default: LeaseLimit) -> LeaseLimit:
        gpus = self.number(data, where, "gpus", default.gpus)
        if gpus != int(gpus):
            raise self.wrong(f"[{where}] gpus is {gpus!r}", "a whole number")
        return LeaseLimit(int(gpus), self.number(data, where, "hours", default.hours), whose)

    def limits(self, data: dict[str, Any], name: str, default: LeaseLimit) -> dict[str, LeaseLimit]:
        by_name = {}
        for key, table in self.section(data, name).items():
            where = f"limits.{name}.{key}"
            if not isinstance(table, dict):
                raise self.wrong(f"{where} is {table!r}", "gpus and hours")
            allowed = ("gpus", "hours", "members") if name == "projects" else ("gpus", "hours")
            self.keys(table, where, allowed)
            members = table.get("members", [])
            if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
                raise self.wrong(f"[{where}] members is {members!r}", "a list of users")
            limit = self.limit(table, where, f"{name[:-1]} {key}", default)
            by_name[key] = replace(limit, members=tuple(members))
        return by_name


def machine_price(config: Config) -> MachinePrice | None:
    """The price of this machine: from the file, else the catalogue's price of its instance type."""
    if config.price is not None:
        return config.price
    from gpukiln.gpus.facts import facts  # noqa: PLC0415 - rarely needed

    try:
        vendor = Path(DMI, "sys_vendor").read_text(encoding="utf-8").strip()
        name = Path(DMI, "product_name").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if vendor != "Amazon EC2":
        return None
    # Only the metadata service knows the region; the first list with this type serves, and its region is
    # named.
    for listed in facts()["prices"]:
        if name in listed["usd_hour"]:
            source = f"{name} on demand in {listed['region']}, {listed['as_of']} ({listed['source']})"
            return MachinePrice(float(listed["usd_hour"][name]), source)
    return None
