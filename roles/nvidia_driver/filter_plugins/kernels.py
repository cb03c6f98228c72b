"""Filters of the role nvidia_driver: the kernels of a machine."""

import re
from typing import Any


def kernel_release_sort(releases: list[str]) -> list[str]:
    """Sort kernel releases by their numbers, the oldest first.

    Args:
        releases: For example `["6.1.0-9-cloud-amd64", "6.1.0-56-cloud-amd64"]`.

    Returns:
        The sorted releases; the last one is what the bootloader starts.
    """
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
    found = re.match(r"\d[\d.]*(?:-\d+)?(?:\.\d+)?(?:\+[\w.]+)?-(.+)", release)
    return found.group(1) if found else ""


def boot_kernels(files: list[dict[str, Any]]) -> list[str]:
    """Name the kernels that a machine can boot.

    Args:
        files: What `ansible.builtin.find` saw of /boot.

    Returns:
        Kernel releases, the oldest first. A rescue kernel (vmlinuz-0-rescue-...) is none.
    """
    found = [re.match(r"/boot/vmlinuz-(\d+\.\d.*)", file["path"]) for file in files]
    return kernel_release_sort([one[1] for one in found if one])


def stale_initramfs(files: list[dict[str, Any]], configuration: str, initramfs: str) -> list[str]:
    """Name the kernels whose initramfs is missing or older than a file that belongs into it.

    Args:
        files: What `ansible.builtin.find` saw of /boot and of the configuration.
        configuration: The file's path.
        initramfs: Path of an initramfs, with %s for the kernel release.

    Returns:
        Kernel releases, the oldest first.
    """
    ages = {file["path"]: file["mtime"] for file in files}
    written = ages.get(configuration, 0)
    return [kernel for kernel in boot_kernels(files) if ages.get(initramfs % kernel, -1) < written]


def precompiled_lag(
    trial: dict[str, Any],
    kernels: list[str],
    prefix: str,
    packages: dict[str, Any],
    updates: list[str] | None,
) -> str:
    """Say why Canonical's precompiled modules can't be taken.

    Args:
        trial: {rc, stdout, stderr} of `apt-get install --simulate` of the driver with them.
        kernels: The machine's kernel releases, the oldest first.
        prefix: Of a package of modules for one kernel, for example `linux-modules-nvidia-535-server`.
        packages: The facts of `ansible.builtin.package_facts`.
        updates: What the kernel's updates come by, as linux-aws, which must not go with a purged kernel; None
            where kernels without a module are not purged.

    Returns:
        The reason; empty where every kernel that stays has its modules.
    """
    if trial["rc"] != 0:
        wants = "; ".join(re.findall(r"Depends: (.+)", trial["stdout"]))
        return f"its packages can't be installed beside it ({wants or trial['stderr'].strip()})"
    brought, gone = (
        re.findall(rf"(?m)^{kind} ([^ :]+)", trial["stdout"]) for kind in ("Inst", "(?:Remv|Purg)")
    )
    names = {*brought, *packages} - set(gone)
    image, modules = (
        re.compile(r"linux-image-(?:unsigned-)?(\d.*)"),
        re.compile(rf"{re.escape(prefix)}-(\d.*)"),
    )
    new = {found[1] for name in names if (found := image.fullmatch(name)) and name not in packages}
    covered = {found[1] for name in names if (found := modules.fullmatch(name))}
    after = kernel_release_sort([*kernels, *(new - set(kernels))])
    bare = [kernel for kernel in (after if updates is None else after[-1:]) if kernel not in covered]
    if bare:
        return f"it has none for kernel {', '.join(bare)}"
    behind = [name for name in updates or [] if name in packages and name not in brought]
    if behind and kernels[-1] not in covered:
        return f"it has none for kernel {kernels[-1]}, which {', '.join(behind)} still wants"
    return ""


def dkms_missing(status: str, releases: list[str], version: str) -> list[str]:
    """Name the kernels that DKMS has no module of a driver for.

    Args:
        status: The output of `dkms status`.
        releases: Kernel releases.
        version: The driver's version.

    Returns:
        Releases without a row `nvidia.../VERSION, RELEASE, ...: installed`.
    """
    built = re.findall(rf"(?m)^nvidia\S*/{re.escape(version)}\S*, ([^,]+), [^:]*: installed", status)
    return [release for release in releases if release not in built]


def kernel_parts(
    text: str, packages: dict[str, list[dict[str, Any]]], releases: list[str], part: str
) -> list[str]:
    """Name the rpm packages of kernels that bring one part, such as their headers.

    Args:
        text: Rows `name | epoch:version-release | architecture` of packages that can be had.
        packages: The facts of `ansible.builtin.package_facts`.
        releases: Kernel releases, which are version-release.architecture of their packages.
        part: `devel` (the headers) or `modules-extra`.

    Returns:
        Specifications for dnf, one for each kernel whose part is installed or can be had.
    """
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    offered = [(row[0], re.sub(r"^\d+:", "", row[1]), row[2]) for row in rows if len(row) == 3]
    offered += [
        (name, f"{one['version']}-{one['release']}", one["arch"])
        for name, found in packages.items()
        if re.fullmatch(rf"kernel[0-9.]*-{part}", name)
        for one in found
    ]
    found = {f"{version}.{arch}": name for name, version, arch in offered if name.endswith(f"-{part}")}
    return [f"{found[release]}-{release}" for release in releases if release in found]


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {
            "kernel_release_sort": kernel_release_sort,
            "boot_kernels": boot_kernels,
            "kernel_flavour": kernel_flavour,
            "dkms_missing": dkms_missing,
            "precompiled_lag": precompiled_lag,
            "kernel_parts": kernel_parts,
            "stale_initramfs": stale_initramfs,
        }
