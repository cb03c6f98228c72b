"""Filters of the role image_record: put the plan and what was found together, and compare it later."""

import re
from collections.abc import Mapping
from typing import Any

DONE = {"install": "installed"}


def image_record(
    image: Mapping[str, Any],
    components: Mapping[str, Any],
    distribution: str,
    packages: Mapping[str, list[dict[str, Any]]],
    modinfo: list[dict[str, Any]],
    dpkg: str = "",
    copyright_lines: str = "",
    family: str = "",
) -> dict[str, Any]:
    """Make the record of an image.

    Args:
        image: What the plan decided.
        components: What components.yaml says; names each component's package.
        distribution: For example `debian`.
        packages: The facts of `ansible.builtin.package_facts`.
        modinfo: For each kernel and module name `{item: [kernel, name], stdout: version or empty}`.
        dpkg: Lines of package, source package, its version, installed KiB and architecture, with tabs.
        copyright_lines: Lines of `/usr/share/doc/PACKAGE/copyright:License: NAME`.
        family: Names a component's package where components.yaml has none for the distribution: `redhat`.

    Returns:
        The record: the plan with `kernel`, `kernels`, `packages`, `package_details` and `modules`. A
        component that was to be installed and is there has the status `installed` and its package's version,
        the driver also whether build tools were to stay; one that is not there keeps the status `install`.
    """
    branch = components.get("nvidia_driver", {}).get("branch")
    installed = _installed(packages)
    decided = {
        name: _component(dict(said), components.get(name, {}), (distribution, family), branch, installed)
        for name, said in image["components"].items()
    }
    kernels = sorted({result["item"][0] for result in modinfo}, key=_age)
    modules = {result["item"][0]: result["stdout"] for result in modinfo if result["stdout"]}
    return {
        **image,
        "components": decided,
        "kernel": kernels[-1] if kernels else None,
        "kernels": sorted(kernels),
        "packages": installed,
        "package_details": _details(packages, dpkg, copyright_lines),
        "modules": {"nvidia": modules},
    }


def _details(packages: Mapping[str, Any], dpkg: str, copyright_lines: str) -> dict[str, dict[str, Any]]:
    licenses: dict[str, set[str]] = {}
    for line in copyright_lines.splitlines():
        path, _, rest = line.partition(":")
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


def package_drift(recorded: Mapping[str, str], packages: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Tell how the installed packages differ from an image's record.

    Args:
        recorded: Names and versions in the record.
        packages: The facts of `ansible.builtin.package_facts`.

    Returns:
        Lines of a diff: `-name version` of the record, `+name version` of the machine.
    """
    installed = _installed(packages)
    lines = []
    for name in sorted({*recorded, *installed}):
        before, after = recorded.get(name), installed.get(name)
        if before != after:
            lines += [f"{sign}{name} {version}" for sign, version in (("-", before), ("+", after)) if version]
    return lines


def _installed(packages: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Version of each package, an rpm's with its release; of a kernel there may be several at once."""
    return {
        name: ", ".join(sorted({"-".join(filter(None, (p["version"], p.get("release")))) for p in found}))
        for name, found in sorted(packages.items())
    }


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
    found = packages[name]
    said["package"] = {"name": name, "version": found}
    said["version"] = said.get("version") or re.sub(r"^\d+:", "", found).split("-")[0]
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
    name = template.format(branch=number)
    for candidate in (name, name.replace("nvidia-dkms-", "nvidia-headless-no-dkms-")):
        if candidate in packages:
            return candidate
    return None


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {"image_record": image_record, "package_drift": package_drift}
