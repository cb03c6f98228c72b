"""The driver packages of Ubuntu's archive, read from its indexes without apt.

Ubuntu keeps the names of branches that it no longer builds: such a package is empty and depends on another
branch's. Its version may be of its own branch (nvidia-graphics-drivers-570 570.211.01-0ubuntu1.24.04.1 leads
to 580: canonical/core-base#439) or of the other one, so names and dependencies are looked at too. These
names change with time (nvidia-driver-535 on 22.04 and 24.04 since 2026-07: canonical/snapd#17399), so that
the archive is read instead of a list in gpukiln.
"""

import gzip
import re
import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException

from gpukiln.catalog.architectures import ARCHITECTURES
from gpukiln.errors import IncompatibleError, UnavailableError
from gpukiln.sources.apt import strip_credentials, upstream_version

CODE_NAMES = {"22.04": "jammy", "24.04": "noble"}
# Ubuntu has arm64 on ports only. HTTP, because the result is a hint for a plan and apt verifies signatures at
# build time.
ARCHIVES = {"x86_64": "http://archive.ubuntu.com/ubuntu", "arm64": "http://ports.ubuntu.com/ubuntu-ports"}
COMPANIONS = (
    *("nvidia-headless", "nvidia-kernel-common", "nvidia-utils", "nvidia-compute-utils"),
    *("libnvidia-compute", "libnvidia-cfg1"),
)
"""What the role installs with the module (roles/nvidia_driver/vars/ubuntu.yml), each -BRANCH-server."""
POCKETS = ("", "-security", "-updates")  # in this order, a later pocket has newer versions
COMPONENT = "restricted"  # the archive component of the driver
TIMEOUT_S = 30.0
# Matches nvidia-driver-570-server, libnvidia-compute-570 and nvidia-headless-570-open; the branch is three
# digits.
BRANCH = re.compile(r"\b(?:lib)?nvidia-[a-z0-9-]*?-?(\d{3})(?=-server|-open|\b)")


@dataclass(frozen=True)
class DebPackage:
    """A binary package of an index.

    Args:
        version: Its full version.
        depends: Its dependencies, as in the index.
        summary: The first line of its description.
    """

    name: str
    version: str
    depends: str = ""
    summary: str = ""

    def leads_to(self, branch: int) -> str:
        """The branch or package that a package really installs.

        Args:
            branch: The branch in its name.

        Returns:
            Text for messages; empty where it is the driver of that branch.

        >>> DebPackage("nvidia-driver-570", "570.211.01-0ubuntu1", "nvidia-driver-580").leads_to(570)
        'branch 580, by its dependencies'
        >>> DebPackage("nvidia-driver-570", "570.211.01-0ubuntu1").leads_to(570)
        ''
        """
        others = {other for other in BRANCH.findall(self.depends) if other != str(branch)}
        if others:
            return f"branch {', '.join(sorted(others))}, by its dependencies"
        if (head := upstream_version(self.version).partition(".")[0]) != str(branch):
            return f"branch {head}, by its version"
        # A transitional package of the same branch depends on the renamed package, which the role does not
        # know.
        is_empty = "transitional" in self.summary.lower()
        return "another package: its description says transitional" if is_empty else ""


Index = dict[str, tuple[DebPackage, ...]]


@lru_cache(maxsize=4)
def read_archive(release: str, architecture: str) -> Index | None:
    """Read the index of the component `restricted` of Ubuntu's archive.

    Args:
        release: For example "24.04".
        architecture: x86_64 or arm64.

    Returns:
        Versions by package, the newest pocket's last; None for an unknown release.

    Raises:
        UnavailableError: It can't be read.
    """
    if release not in CODE_NAMES:
        return None
    root, arch = ARCHIVES[architecture], ARCHITECTURES[architecture].debian
    index: dict[str, tuple[DebPackage, ...]] = {}
    for pocket in POCKETS:
        url = f"{root}/dists/{CODE_NAMES[release]}{pocket}/{COMPONENT}/binary-{arch}/Packages.gz"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - of ARCHIVES
                text = gzip.decompress(answer.read()).decode()
        except (OSError, EOFError, ValueError, HTTPException) as error:
            raise UnavailableError(
                f"{url} can't be read: {strip_credentials(str(error))}",
                hint="check the network: the plan reads there whether the driver's branch is available",
            ) from error
        for package in parse_index(text):
            index[package.name] = (*index.get(package.name, ()), package)
    return index


def parse_index(text: str) -> list[DebPackage]:
    r"""Read a Packages file.

    >>> [package] = parse_index("Package: nvidia-driver-570-server\nVersion: 570.211.01-0ubuntu1\n")
    >>> package.name, package.version
    ('nvidia-driver-570-server', '570.211.01-0ubuntu1')
    >>> parse_index("")
    []
    """
    packages = []
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Depends|Description): (.*)$", stanza, re.MULTILINE))
        if "Package" in fields and "Version" in fields:
            of = fields.get("Depends", ""), fields.get("Description", "")
            packages.append(DebPackage(fields["Package"], fields["Version"], *of))
    return packages


def driver_package(index: Index, package: str, version: str | None, branch: int | None, where: str) -> str:
    """The full version of the driver's package that a build would install.

    Args:
        index: What the archive has.
        package: Its name.
        version: The wanted version of the driver; None: any.
        where: The base, for the message.

    Raises:
        IncompatibleError: The archive has no such package or version, or it installs another branch.
    """
    # The companions too: Ubuntu may make only some packages of a branch transitional.
    for name in (package, *(f"{name}-{branch}-server" for name in COMPANIONS)):
        # The last pocket is the newest, see POCKETS.
        newest = _versions_of(index, name, version)[-1:]
        if branch and newest and (other := newest[0].leads_to(branch)):
            raise IncompatibleError(
                f"on {where} {name} {newest[0].version} installs {other}, wanted driver {branch}",
                hint="choose a base that still has the branch (--base), or another branch: "
                "--set nvidia_driver.branch=...",
            )
    there = index.get(package, ())
    chosen = _versions_of(index, package, version)[-1:]
    if not chosen or version not in (None, upstream_version(chosen[0].version)):
        has = (
            f"has {package} {', '.join(available.version for available in there)}"
            if there
            else f"has no {package}"
        )
        raise IncompatibleError(
            f"Ubuntu's archive for {where} {has}, wanted driver {version or branch}",
            hint="--set nvidia_driver.version=... to one of these, or another base",
        )
    return chosen[0].version


def _versions_of(index: Index, name: str, version: str | None) -> tuple[DebPackage, ...]:
    """The archive's entries of a package in the wanted version; where there are none, all of its entries."""
    there = index.get(name, ())
    return tuple(candidate for candidate in there if version == upstream_version(candidate.version)) or there
