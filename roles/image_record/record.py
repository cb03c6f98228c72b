"""The record of an image: what the plan decided and what was found, put together, and compared later."""

import re
from collections.abc import Mapping
from typing import Any

DONE = {"install": "installed"}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
Packages = Mapping[str, list[dict[str, Any]]]
"""What node_facts says of packages."""


def image_record(
    image: Mapping[str, Any],
    components: Mapping[str, Any],
    platforms: tuple[str, str],
    packages: Mapping[str, str],
    modules: Mapping[str, str],
    dpkg: str = "",
    copyright_lines: str = "",
) -> dict[str, Any]:
    """Make the record of an image.

    Args:
        image: What the plan decided.
        components: What components.yaml says; names each component's package.
        platforms: Distribution and family, as components.yaml calls them: `rocky`, `redhat`. A component's
            package is the distribution's, or the family's.
        packages: What is installed, as `installed` returns it.
        modules: Version of NVIDIA's module for each kernel; empty where it has none.
        dpkg: Lines of package, source package, its version, installed KiB and architecture, with tabs.
        copyright_lines: Lines of `/usr/share/doc/PACKAGE/copyright:License: NAME`.

    Returns:
        The record: the plan with `kernel`, `kernels`, `packages`, `package_details` and `modules`. A
        component that was to be installed and is there has the status `installed` and its package's version,
        the driver also whether build tools were to stay; one that is not there keeps the status `install`.
    """
    branch = components.get("nvidia_driver", {}).get("branch")
    decided = {
        name: _component(dict(said), components.get(name, {}), platforms, branch, packages)
        for name, said in image["components"].items()
    }
    return {
        **image,
        "components": decided,
        # The newest kernel is what the boot loader starts, whatever runs during the bake.
        "kernel": max(modules, key=_age, default=None),
        "kernels": sorted(modules),
        "packages": dict(packages),
        "package_details": _details(packages, dpkg, copyright_lines),
        "modules": {"nvidia": {kernel: version for kernel, version in modules.items() if version}},
    }


def installed(packages: Packages, architecture: str, *, apt: bool) -> dict[str, str]:
    """Version of each package; of a kernel there may be several at once.

    An rpm's has its release and no epoch; a package of another architecture than Debian's own is
    NAME:ARCHITECTURE, as apt calls it.

    Args:
        architecture: The machine's: `x86_64`.
    """
    versions_by_name: dict[str, set[str]] = {}
    for name, versions in packages.items():
        for package in versions:
            foreign = apt and package["arch"] not in ("all", ARCHITECTURES.get(architecture))
            version = package["version"] if apt else re.sub(r"^\d+:", "", package["version"])
            versions_by_name.setdefault(f"{name}:{package['arch']}" if foreign else name, set()).add(version)
    return {name: ", ".join(sorted(versions_by_name[name])) for name in sorted(versions_by_name)}


def package_drift(recorded: Mapping[str, str], packages: Mapping[str, str]) -> list[str]:
    """Report how the installed packages differ from an image's record.

    Args:
        recorded: Names and versions in the record.
        packages: What is installed, as `installed` returns it.

    Returns:
        Lines of a diff: `-name version` of the record, `+name version` of the machine.
    """
    lines = []
    for name in sorted({*recorded, *packages}):
        before, after = recorded.get(name), packages.get(name)
        if before != after:
            lines += [f"{sign}{name} {version}" for sign, version in (("-", before), ("+", after)) if version]
    return lines


def _details(packages: Mapping[str, str], dpkg: str, copyright_lines: str) -> dict[str, dict[str, Any]]:
    licenses: dict[str, set[str]] = {}
    for line in copyright_lines.splitlines():
        path, _, rest = line.partition(":")
        # One package may have files of several licences.
        if name := " ".join(rest.partition(":")[2].split()):
            licenses.setdefault(path.split("/")[-2], set()).add(name)
    details: dict[str, dict[str, Any]] = {}
    for line in sorted(dpkg.splitlines()):
        name, source, version, size, architecture = line.split("\t")
        if name in packages:
            details[name] = {
                "source": source,
                "source_version": version,
                "architecture": architecture,
                "installed_kib": int(size or 0),
                "licenses": sorted(licenses.get(name, ())),
            }
    return details


def _age(release: str) -> list[tuple[int, str]]:
    """A key that sorts kernel releases by their numbers, the oldest first."""
    parts = re.findall(r"\d+|[^\d.+~-]+", release)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _component(
    said: dict[str, Any],
    component: Mapping[str, Any],
    platforms: tuple[str, str],
    branch: int | None,
    packages: Mapping[str, str],
) -> dict[str, Any]:
    name = _package(said, component, platforms, branch, packages)
    if name is None or said["status"] == "left_out":
        return said
    versions = packages[name]
    said["package"] = {"name": name, "version": versions}
    said["version"] = said.get("version") or re.sub(r"^\d+:", "", versions).split("-")[0]
    said["status"] = DONE.get(said["status"], said["status"])
    if said["status"] == "installed" and "keep_build_tools" in component:
        said["keep_build_tools"] = component["keep_build_tools"]
    return said


def _package(
    said: Mapping[str, Any],
    component: Mapping[str, Any],
    platforms: tuple[str, str],
    branch: int | None,
    packages: Mapping[str, str],
) -> str | None:
    """The component's installed package; precompiled modules come in another one than DKMS's."""
    kind = "open_packages" if component.get("modules") == "open" else "packages"
    named = component.get(kind) or {}
    template = next((named[platform] for platform in platforms if platform in named), None)
    if template is None:
        return None
    number = said.get("branch") or branch
    name = str(template).format(branch=number)
    for candidate in (name, name.replace("nvidia-dkms-", "nvidia-headless-no-dkms-")):
        if candidate in packages:
            return candidate
    return None
