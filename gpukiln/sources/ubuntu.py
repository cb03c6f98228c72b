"""What Ubuntu's archive has of the driver, read from its indexes; no apt of Ubuntu's is needed.

Ubuntu keeps the names of branches that it no longer builds: such a package is empty and depends on another
branch's. Its version may be of its own branch (nvidia-graphics-drivers-570 570.211.01-0ubuntu1.24.04.1 leads
to 580: canonical/core-base#439) or of the other one, so names and dependencies are looked at too. Which names
these are changes with time (nvidia-driver-535 on 22.04 and 24.04 since 2026-07: canonical/snapd#17399), so
the archive is asked and no list is kept here.
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
ARCHIVES = {"x86_64": "http://archive.ubuntu.com/ubuntu", "arm64": "http://ports.ubuntu.com/ubuntu-ports"}
COMPANIONS = (
    *("nvidia-headless", "nvidia-kernel-common", "nvidia-utils", "nvidia-compute-utils"),
    *("libnvidia-compute", "libnvidia-cfg1"),
)
"""What the role installs beside the module (roles/nvidia_driver/vars/ubuntu.yml), each -BRANCH-server."""
POCKETS = ("", "-security", "-updates")  # the later, the newer
COMPONENT = "restricted"  # the driver's
TIMEOUT_S = 30.0
BRANCH = re.compile(r"\b(?:lib)?nvidia-[a-z0-9-]*?-?(\d{3})(?=-server|-open|\b)")


@dataclass(frozen=True)
class DebPackage:
    """A binary package of an index.

    Args:
        version: Its full version.
        depends: What it depends on, as the index has it.
        summary: The first line of its description.
    """

    name: str
    version: str
    depends: str = ""
    summary: str = ""

    def leads_to(self, branch: int) -> str:
        """Where the package of a branch really leads.

        Args:
            branch: The branch that its name promises.

        Returns:
            In words; empty where it is the driver of that branch.
        """
        others = {other for other in BRANCH.findall(self.depends) if other != str(branch)}
        if others:
            return f"branch {', '.join(sorted(others))}, by its dependencies"
        if (head := upstream_version(self.version).partition(".")[0]) != str(branch):
            return f"branch {head}, by its version"
        is_empty = "transitional" in self.summary.lower()
        return "another package: it calls itself transitional" if is_empty else ""


Index = dict[str, tuple[DebPackage, ...]]


@lru_cache(maxsize=4)
def read_archive(release: str, architecture: str) -> Index | None:
    """Read what Ubuntu's archive has in `restricted`.

    Args:
        release: For example "24.04".
        architecture: x86_64 or arm64.

    Returns:
        Per package its versions, the newest pocket's last; None for a release that is not known here.

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
                hint="the plan looks there whether the driver's branch can be had; check the network",
            ) from error
        for package in parse_index(text):
            index[package.name] = (*index.get(package.name, ()), package)
    return index


def parse_index(text: str) -> list[DebPackage]:
    """Read a Packages file."""
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
        version: The driver's version that is wanted; None: any.
        where: The base, for the message.

    Raises:
        IncompatibleError: The archive has no such package or version, or it leads to another branch.
    """
    for name in (package, *(f"{name}-{branch}-server" for name in COMPANIONS)):
        newest = _versions_of(index, name, version)[-1:]
        if branch and newest and (other := newest[0].leads_to(branch)):
            raise IncompatibleError(
                f"driver {branch} is wanted, and on {where} {name} {newest[0].version} leads to {other}",
                hint="another base that still has the branch (--base), or another branch: "
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
            f"driver {version or branch} is wanted, and Ubuntu's archive for {where} {has}",
            hint="--set nvidia_driver.version=... to one of these, or another base",
        )
    return chosen[0].version


def _versions_of(index: Index, name: str, version: str | None) -> tuple[DebPackage, ...]:
    """What the archive has of a package: in the wanted version, or where it has none of that, all."""
    there = index.get(name, ())
    return tuple(candidate for candidate in there if version == upstream_version(candidate.version)) or there
