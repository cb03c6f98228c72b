"""The driver's packages and their versions: what is installed, what can be had, what apt would do."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..plan import upstream

# Names of the driver's packages of Debian, Ubuntu, NVIDIA, and their rpms.
NAME = re.compile(
    r"(lib|kmod-|xserver-xorg-video-|firmware-)?(nvidia|cuda|nvcuvid|nvoptix)"
    r"|libnv|linux-(modules|objects|signatures)-nvidia"
)
# Three digits from 300 on: CUDA's and the toolkit's versions begin with one or two.
VERSION = re.compile(r"[3-9]\d\d\.\d+(\.\d+)?$")
OWN_PACE = frozenset(
    ("nvidia-persistenced", "nvidia-modprobe", "nvidia-settings", "nvidia-xconfig", "libxnvctrl0")
)
"""Packages that a distribution builds apart: of the branch, in a release of their own."""

OWN_VERSION = frozenset(("nvlsm",))
"""Packages that go with the driver and have versions of their own: NVLink's subnet manager."""

Packages = dict[str, list[dict[str, Any]]]
"""Installed versions by name, as the module node_facts returns them."""


def rows(text: str) -> list[list[str]]:
    """The cells of `apt-cache madison`, or of dnf asked for the same form."""
    return [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]


def madison_versions(text: str, package: str) -> list[str]:
    """List the archive's versions of a package.

    Args:
        text: The output of `apt-cache madison`.

    Returns:
        The versions in apt's order.
    """
    # Warnings of apt between the rows have no columns.
    return [row[1] for row in rows(text) if len(row) >= 2 and row[0] == package]


def driver_pins(
    text: str, names: Iterable[str], version: str, packages: Packages
) -> tuple[list[str], list[str]]:
    """Pin packages to the full version that has a driver's version.

    Args:
        text: The output of `apt-cache madison`.
        names: The packages.
        version: The driver's version, for example `535.309.01`.
        packages: What is installed needs no archive.

    Returns:
        Pins, name=version, and the names of those that can't be had.
    """
    pins, missing = [], []
    for name in names:
        installed = [p["version"] for p in packages.get(name, [])]
        # The installed version first, so that nothing is moved without need.
        versions = [v for v in installed + madison_versions(text, name) if upstream(v) == version]
        if versions:
            pins.append(f"{name}={versions[0]}")
        else:
            missing.append(name)
    return pins, missing


def driver_branches(packages: Packages) -> dict[str, int]:
    """Name the installed packages of the driver, whatever its version.

    Returns:
        Package to driver branch. CUDA's and the container toolkit's packages are not among them.
    """
    branches = {}
    for name, installed in packages.items():
        if not NAME.match(name):
            continue
        # Modules built by the distribution have the kernel's version, and the branch in their name.
        in_name = re.match(r"linux-(?:modules|objects|signatures)-nvidia-(\d{3})(?!\d)", name)
        version = upstream(installed[0]["version"])
        if in_name or VERSION.match(version):
            branches[name] = int(in_name[1]) if in_name else int(version.partition(".")[0])
    return dict(sorted(branches.items()))


def driver_packages(packages: Packages, version: str) -> list[str]:
    """Name the installed packages that carry the driver's version.

    Returns:
        Sorted names.
    """
    return [name for name in driver_branches(packages) if upstream(packages[name][0]["version"]) == version]


def driver_strangers(packages: Packages, version: str) -> list[str]:
    """Name the installed driver packages that do not belong to a version.

    Returns:
        `name version` of packages of another branch, or of another release where all go in step.
    """
    branch, strangers = int(version.partition(".")[0]), []
    for name, of_branch in driver_branches(packages).items():
        installed = upstream(packages[name][0]["version"])
        in_step = name not in OWN_PACE and VERSION.match(installed)
        if of_branch != branch or (in_step and installed != version):
            strangers.append(f"{name} {packages[name][0]['version']}")
    return strangers


def simulated_strangers(text: str, branch: int) -> list[str]:
    """Find another branch's packages in what apt would install.

    Args:
        text: The output of `apt-get install --simulate`.
        branch: The branch that was asked for.

    Returns:
        `name version` of each.
    """
    # apt's simulation: Inst NAME [OLD] (NEW SOURCE [ARCH])
    rows = re.findall(r"(?m)^Inst (\S+) (?:\[[^]]*\] )?\((\S+)", text)
    return [
        f"{name} {version}"
        for name, version in rows
        if NAME.match(name)
        and VERSION.match(upstream(version))
        and upstream(version).split(".")[0] != str(branch)
    ]


def newest_of(text: str, names: Iterable[str]) -> list[str]:
    """Pin packages to the newest version of the archive.

    Args:
        text: The output of `apt-cache madison`.
        names: The packages.

    Returns:
        name=version of those that the archive has.
    """
    return [f"{name}={versions[0]}" for name in names if (versions := madison_versions(text, name))]


def simulated_removals(text: str) -> list[str]:
    """Name what apt would remove, from the output of its `--simulate`."""
    return re.findall(r"(?m)^(?:Remv|Purg) ([^ :]+)", text)


def not_installed(pins: Sequence[str], packages: Packages) -> list[str]:
    """Name what a transaction would install.

    Args:
        pins: NAME or NAME=VERSION, as for apt.

    Returns:
        Those that are not there, or in another version.
    """
    there = {f"{name}={row['version']}" for name, versions in packages.items() for row in versions}
    return [pin for pin in pins if pin not in packages and pin not in there]
