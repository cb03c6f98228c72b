"""Filters of the role nvidia_driver: kernel releases and package versions."""

import re
from typing import Any

DRIVER_NAME = re.compile(
    r"(lib)?(nvidia|cuda|nv)|firmware-nvidia|xserver-xorg-video-nvidia|linux-(modules|objects|signatures)-nvidia"
)


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


def stale_initramfs(files: list[dict[str, Any]], configuration: str) -> list[str]:
    """Name the kernels whose initramfs is missing or older than a file that belongs into it.

    Args:
        files: What `ansible.builtin.find` saw of /boot and of the configuration.
        configuration: The file's path.

    Returns:
        Kernel releases, the oldest first.
    """
    ages = {file["path"]: file["mtime"] for file in files}
    written = ages.get(configuration, 0)
    prefix = "/boot/vmlinuz-"
    kernels = [path.removeprefix(prefix) for path in ages if path.startswith(prefix)]
    return kernel_release_sort([k for k in kernels if ages.get(f"/boot/initrd.img-{k}", -1) < written])


def madison_versions(text: str, package: str) -> list[str]:
    """List the archive's versions of a package.

    Args:
        text: The output of `apt-cache madison`.
        package: The package.

    Returns:
        The versions in apt's order.
    """
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    return [row[1] for row in rows if len(row) >= 2 and row[0] == package]


def driver_pins(text: str, wanted: list[str], version: str, packages: dict[str, Any]) -> dict[str, list[str]]:
    """Pin packages to the full version that has a driver's version.

    Args:
        text: The output of `apt-cache madison`.
        wanted: The packages.
        version: The driver's version, for example `535.309.01`.
        packages: The facts of `ansible.builtin.package_facts`: what is installed needs no archive.

    Returns:
        {pins: [name=version], missing: [name]}.
    """
    pins, missing = [], []
    for name in wanted:
        installed = [p["version"] for p in packages.get(name, [])]
        found = [v for v in installed + madison_versions(text, name) if _upstream(v) == version]
        if found:
            pins.append(f"{name}={found[0]}")
        else:
            missing.append(name)
    return {"pins": pins, "missing": missing}


def _upstream(version: str) -> str:
    return re.sub(r"^\d+:", "", version).split("-")[0]


def driver_packages(packages: dict[str, Any], version: str) -> list[str]:
    """Name the installed packages that carry the driver's version.

    Args:
        packages: The facts of `ansible.builtin.package_facts`.
        version: The driver's version.

    Returns:
        Sorted names.
    """
    return sorted(
        name
        for name, found in packages.items()
        if DRIVER_NAME.match(name) and any(_upstream(p["version"]) == version for p in found)
    )


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {
            "kernel_release_sort": kernel_release_sort,
            "kernel_flavour": kernel_flavour,
            "stale_initramfs": stale_initramfs,
            "madison_versions": madison_versions,
            "driver_pins": driver_pins,
            "driver_packages": driver_packages,
        }
