"""Checks whether the content of an image fits instance types: the same rules before a build and after it."""

from collections.abc import Sequence
from dataclasses import replace

from gpukiln.catalog import compat
from gpukiln.catalog.bases import base as find_base
from gpukiln.errors import IncompatibleError
from gpukiln.findings import Finding


def check_types(
    types: Sequence[str], *, base: str, architecture: str, driver: str, modules: str, cuda: str
) -> list[Finding]:
    """Check the content of an image, existing or planned, against instance types.

    Args:
        types: Instance types.
        base: The base's name.
        architecture: The image's.
        driver: The driver's version.
        modules: The kind of its kernel modules.
        cuda: The CUDA version of the containers that will run on it, or an empty string.

    Returns:
        Every finding, in the order of the rules.

    Raises:
        UsageError: The catalogue does not know a name or a version.
    """
    findings = list(compat.check_cuda(cuda, driver, types)) if cuda else []
    for name in types:
        own = compat.check_instance_type(name, architecture=architecture)
        # A type of another architecture or without an NVIDIA GPU has no driver to be checked.
        if all(finding.severity == "warning" for finding in own):
            own += compat.check_driver_gpu(driver, modules, name)
            own += compat.check_cuda_gpu(cuda, name) if cuda else ()
        findings += [replace(finding, object=name) for finding in own]
    # Once for all types: the base has a fabric manager or not.
    return [*findings, *compat.check_fabric_manager(base, find_base(base), types)]


def refuse(findings: Sequence[Finding]) -> None:
    """Raise the findings that are errors.

    Args:
        findings: The findings of the rules.

    Raises:
        IncompatibleError: At least one is an error; the details have each of them with its remedy.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    details = tuple(
        f"{finding.id}: {finding.message}" + (f" - {finding.remedy}" if finding.remedy else "")
        for finding in errors
    )
    raise IncompatibleError(
        # The first error in the order of the rules is the message, the others are its details.
        errors[0].message + more,
        hint=errors[0].remedy,
        details=details[: 20 if more else 0],
    )
