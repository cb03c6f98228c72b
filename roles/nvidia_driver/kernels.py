"""Kernel releases: their order, their flavour, and the packages that bring their parts."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from .packages import Packages, rows


def kernel_release_sort(releases: Iterable[str]) -> list[str]:
    """Sort kernel releases by their numbers, the oldest first.

    Args:
        releases: For example `["6.1.0-9-cloud-amd64", "6.1.0-56-cloud-amd64"]`.

    Returns:
        The sorted releases; the last one is what the bootloader starts.
    """
    # Numbers as numbers; text sorts before them, as -rc before the release.
    return sorted(releases, key=lambda r: [(int(p), "") if p.isdigit() else (-1, p) for p in _parts(r)])


def _parts(release: str) -> list[str]:
    return re.findall(r"\d+|[^\d.+~-]+", release)


def kernel_flavour(release: str) -> str:
    """Take the flavour from a kernel release.

    Args:
        release: For example `6.1.0-56-cloud-amd64` or `6.8.0-1040-aws`.

    Returns:
        For example `cloud-amd64` or `aws`; empty when it has none.
    """
    match = re.match(r"\d[\d.]*(?:-\d+)?(?:\.\d+)?(?:\+[\w.]+)?-(.+)", release)
    return match.group(1) if match else ""


def precompiled_lag(
    trial: dict[str, Any],
    kernels: list[str],
    prefix: str,
    packages: Packages,
    updates: Sequence[str] | None,
) -> str:
    """Say why Canonical's precompiled modules can't be taken.

    Args:
        trial: {rc, stdout, stderr} of `apt-get install --simulate` of the driver with them.
        kernels: The machine's kernel releases, the oldest first.
        prefix: Of a package of modules for one kernel, for example `linux-modules-nvidia-535-server`.
        packages: What is installed.
        updates: What the kernel's updates come by, as linux-aws, which must not go with a purged kernel; None
            where kernels without a module are not purged.

    Returns:
        The reason; empty where every kernel that stays has its modules.
    """
    if trial["rc"] != 0:
        # apt's own reason, from `The following packages have unmet dependencies`.
        wants = "; ".join(re.findall(r"Depends: (.+)", trial["stdout"]))
        return f"its packages can't be installed with it ({wants or trial['stderr'].strip()})"
    brought, gone = (
        re.findall(rf"(?m)^{kind} ([^ :]+)", trial["stdout"]) for kind in ("Inst", "(?:Remv|Purg)")
    )
    names = {*brought, *packages} - set(gone)
    image, modules = (
        re.compile(r"linux-image-(?:unsigned-)?(\d.*)"),
        re.compile(rf"{re.escape(prefix)}-(\d.*)"),
    )
    new = {match[1] for name in names if (match := image.fullmatch(name)) and name not in packages}
    covered = {match[1] for name in names if (match := modules.fullmatch(name))}
    # Kernels that stay or come; only the newest counts where the others are purged.
    after = kernel_release_sort([*kernels, *(new - set(kernels))])
    bare = [kernel for kernel in (after if updates is None else after[-1:]) if kernel not in covered]
    if bare:
        return f"it has none for kernel {', '.join(bare)}"
    behind = [name for name in updates or [] if name in packages and name not in brought]
    if behind and kernels[-1] not in covered:
        return f"it has none for kernel {kernels[-1]}, which {', '.join(behind)} still wants"
    return ""


def kernel_parts(text: str, packages: Packages, releases: Sequence[str], part: str) -> list[str]:
    """Name the rpm packages of kernels that bring one part, such as their headers.

    Args:
        text: Rows `name | epoch:version-release | architecture` of packages that can be had.
        packages: What is installed.
        releases: Kernel releases, which are version-release.architecture of their packages.
        part: `devel` (the headers) or `modules-extra`.

    Returns:
        Specifications for dnf, one for each kernel whose part is installed or can be had.
    """
    offered = [(row[0], re.sub(r"^\d+:", "", row[1]), row[2]) for row in rows(text) if len(row) == 3]
    offered += [
        (name, re.sub(r"^\d+:", "", row["version"]), row["arch"])
        for name, versions in packages.items()
        if re.fullmatch(rf"kernel[0-9.]*-{part}", name)
        for row in versions
    ]
    name_by_kernel = {
        f"{version}.{arch}": name for name, version, arch in offered if name.endswith(f"-{part}")
    }
    return [f"{name_by_kernel[release]}-{release}" for release in releases if release in name_by_kernel]
