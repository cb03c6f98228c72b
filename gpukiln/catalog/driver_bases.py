"""Which base images can have which branch of the driver."""

import re
from collections.abc import Iterable
from dataclasses import replace

from gpukiln.catalog.bases import Base, load_bases
from gpukiln.catalog.compat import Finding
from gpukiln.catalog.components import Component

OTHER_BRANCH = re.compile(r"--set nvidia_driver\.branch=(\d+)")


def has_every_branch(driver: Component, base: Base) -> bool:
    """Whether a base's sources have a package for each branch; Debian's archive has one branch a release."""
    packages = (driver.open_packages if driver.modules == "open" else driver.packages) or {}
    repository = driver.repository.of(base.os_family, base.distribution) if driver.repository else None
    return repository is not None or "{branch}" in (packages.get(base.distribution) or "")


def bases_with(driver: Component, branch: int) -> list[str]:
    """The bases that bring a branch, or whose sources have it."""
    return [
        name
        for name, base in load_bases().items()
        if branch in (base.driver_preinstalled or ())
        or (base.driver_preinstalled is None and has_every_branch(driver, base))
    ]


def with_bases(findings: Iterable[Finding], driver: Component, base: Base) -> list[Finding]:
    """Name a base beside the advice to take another branch, where the chosen base can't have it.

    Args:
        findings: What the rules found.
        driver: The driver.
        base: The base that was chosen.
    """
    if base.driver_preinstalled is not None or has_every_branch(driver, base):
        return list(findings)
    named = []
    for finding in findings:
        found = OTHER_BRANCH.search(finding.hint)
        if found and int(found[1]) != driver.branch:
            bases = " or ".join(bases_with(driver, int(found[1])))
            hint = finding.hint.replace(found[0], f"{found[0]} --cloud aws --base {bases}")
            finding = replace(finding, hint=hint)  # noqa: PLW2901
        named.append(finding)
    return named
