"""Which base images can have which branch of the driver, and are published for which Kubernetes."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gpukiln.catalog.bases import Base, load_bases
from gpukiln.catalog.components import Component, Components
from gpukiln.catalog.load import version_key
from gpukiln.findings import Finding

# The remedy of `compat.branch_hint` and of `check_driver`: the branch is read from their text.
OTHER_BRANCH = re.compile(r"--set nvidia_driver\.branch=(\d+)")


def components_on_base(components: Components, system: str, overrides: Iterable[str]) -> dict[str, Component]:
    """The components with the versions that one system has.

    Args:
        components: What components.yaml and the overrides say.
        system: Distribution and release, for example ubuntu-24.04.
        overrides: What was chosen by hand, which counts for every system.
    """
    # An override is a decision of this build, and counts more than the pin of a system.
    by_hand = {override.partition(".")[0] for override in overrides}
    result = {}
    for name, component in components.items():
        pin = (component.by_system or {}).get(system)
        chosen = replace(component, by_system=None)
        if pin and name not in by_hand:
            chosen = replace(chosen, version=pin.version, branch=pin.branch, reason=pin.reason)
        result[name] = chosen
    return result


def has_every_branch(driver: Component, base: Base) -> bool:
    """Whether a base's sources have a package for each branch; Debian's archive has one branch a release."""
    # Ubuntu has a package for each branch; Debian has one `nvidia-driver` a release.
    packages = (driver.open_packages if driver.modules == "open" else driver.packages) or {}
    repository = driver.repository.of(base.os_family, base.distribution) if driver.repository else None
    return repository is not None or "{branch}" in (packages.get(base.distribution) or "")


def bases_with(driver: Component, branch: int) -> list[str]:
    """The bases that bring a branch, or whose sources have it."""
    return [
        name
        for name, base in load_bases().items()
        # A base with its own driver has exactly that one: a second one would break both.
        if branch in (base.driver_preinstalled or ())
        or (base.driver_preinstalled is None and has_every_branch(driver, base))
    ]


def suggest_bases(findings: Iterable[Finding], driver: Component, base: Base) -> list[Finding]:
    """Add bases to each remedy that names another branch, where the chosen base has no package of it.

    Args:
        findings: What the rules found.
        base: The base that was chosen.
    """
    if base.driver_preinstalled is not None or has_every_branch(driver, base):
        return list(findings)
    named = []
    for finding in findings:
        branch_match = OTHER_BRANCH.search(finding.remedy)
        # The chosen branch itself is what this base has.
        if branch_match and int(branch_match[1]) != driver.branch:
            bases = " or ".join(bases_with(driver, int(branch_match[1])))
            hint = finding.remedy.replace(branch_match[0], f"{branch_match[0]} --cloud aws --base {bases}")
            finding = replace(finding, remedy=hint)  # noqa: PLW2901 - the same finding, with a way that can be gone
        named.append(finding)
    return named


def check_published(name: str, base: Base, kubernetes: str) -> list[Finding]:
    """Warn of a Kubernetes version that a base was never seen for; whether there is one, the cloud says.

    Args:
        name: The base's name.
        base: Its facts.
        kubernetes: The version.
    """
    if base.kubernetes is None or _covers(base, kubernetes):
        return []
    others = [
        other
        for other, other_base in load_bases().items()
        if other_base.kubernetes and _covers(other_base, kubernetes)
    ]
    first, last = base.kubernetes
    return [
        Finding(
            "kubernetes-not-seen",
            "warning",
            f"{name} was seen published for Kubernetes {first} to {last}, not for {kubernetes}",
            remedy=f"--base {' or '.join(others)}, where it is missing" if others else "",
            source=base.source,
        )
    ]


def _covers(base: Base, kubernetes: str) -> bool:
    # As numbers: as text 1.9 is after 1.30.
    first, last = map(version_key, base.kubernetes or ("0", "0"))
    return first <= version_key(kubernetes) <= last


def base_rows(components: Components) -> list[dict[str, Any]]:
    """What each base can carry, for people who choose one.

    Args:
        components: What components.yaml says.

    Returns:
        Per base its name, title, the driver that a build takes there or that it brings, and why it is another
        one than elsewhere, the Kubernetes versions that it was seen for, and the clouds whose default it is.
    """
    usual = components["nvidia_driver"]
    rows: list[dict[str, Any]] = []
    for name, base in load_bases().items():
        driver = components_on_base(components, base.system, ())["nvidia_driver"]
        brings = base.driver_preinstalled
        rows.append(
            {
                "base": name,
                "title": base.title,
                "driver": f"brings {', '.join(map(str, brings))}" if brings else driver.version,
                "why": driver.reason if not brings and driver.version != usual.version else "",
                "any_branch": brings is None and has_every_branch(usual, base),
                "kubernetes": list(base.kubernetes) if base.kubernetes else None,
                "default_on": list(base.default_on),
            }
        )
    return rows
