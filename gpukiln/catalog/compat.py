"""The rules of what can work with what.

Each rule is a function that returns its findings; an empty tuple means that nothing is wrong. An error can
never work and is refused before anything is started, a warning works today.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

from gpukiln.catalog import container_toolkit, cuda, drivers, kubernetes
from gpukiln.catalog.bases import Base
from gpukiln.catalog.gpus import architectures, gpu
from gpukiln.catalog.instance_types import instance_type
from gpukiln.catalog.load import version_key

ROLE_FAMILIES = ("debian",)
"""The families that roles/ has tasks for."""

OPEN_SUGGESTED = 560
"""The first branch whose open kernel modules NVIDIA suggests (Driver Installation Guide)."""

SOON = timedelta(days=60)
"""How long before an end of support a warning starts."""


@dataclass(frozen=True)
class Finding:
    """What a rule found.

    Args:
        level: error can never work, warning works today.
        rule: The rule's name.
        message: What was found.
        hint: The way out.
        source: Where the fact comes from.
    """

    level: Literal["error", "warning"]
    rule: str
    message: str
    hint: str = ""
    source: str = ""


Findings = tuple[Finding, ...]


def check_instance_type(name: str, *, architecture: str) -> Findings:
    """Whether a machine can run an image of ours at all.

    Args:
        name: The instance type.
        architecture: The image's.

    Returns:
        Findings of the rules not-nvidia, grid-only, retired, previous-generation and architecture.

    Raises:
        UsageError: The catalogue does not know the type.
    """
    machine, source = instance_type(name), "catalogue gpu_instances.yaml"
    board = gpu(machine.gpu)
    instead = f"take {' or '.join(machine.alternatives)}" if machine.alternatives else ""
    if board.manufacturer != "NVIDIA":
        message = f"{name} has a {board.manufacturer} {board.name}, which NVIDIA's driver can't drive"
        return (Finding("error", "not-nvidia", message, "take g4dn, g5 or g6 of the same size", source),)
    found = []
    if machine.status == "retired":
        found.append(Finding("error", "retired", f"AWS has retired {name} ({board.name})", instead, source))
    elif machine.status == "previous":
        message = f"{name} ({board.name}) is of a previous generation"
        found.append(Finding("warning", "previous-generation", message, instead, source))
    if machine.driver == "grid":
        message = f"{name} has a fraction of a {board.name}: a vGPU that only NVIDIA's GRID driver can drive"
        found.append(Finding("error", "grid-only", message, instead, source))
    if machine.arch != architecture:
        message = f"{name} is {machine.arch} and the image is {architecture}"
        found.append(Finding("error", "architecture", message, f"take an {architecture} type", source))
    return tuple(found)


def check_driver_gpu(driver: str, modules: str, name: str) -> Findings:
    """Whether a driver knows the GPU of a machine.

    Args:
        driver: The driver's version.
        modules: proprietary or open.
        name: The instance type.

    Returns:
        Findings of the rules gpu-too-old, gpu-too-new, modules-open and modules-proprietary.

    Raises:
        UsageError: The catalogue does not know the type.
    """
    board = gpu(instance_type(name).gpu)
    if board.manufacturer != "NVIDIA" or board.arch is None:
        return ()
    architecture, number = architectures()[board.arch], version_key(driver)[0]
    what = f"the {board.name} of {name} ({board.arch})"
    if architecture.last_driver and number > architecture.last_driver:
        message = f"driver {driver} has dropped {what}; the last branch is {architecture.last_driver}"
        hint = f"--set nvidia_driver.branch={architecture.last_driver}, or leave {name} out"
        return (Finding("error", "gpu-too-old", message, hint, "NVIDIA Data Center Drivers, matrix"),)
    if board.min_driver and version_key(driver) < version_key(board.min_driver):
        message = f"driver {driver} does not know {what}; the first one that does is {board.min_driver}"
        return (Finding("error", "gpu-too-new", message, _branch_hint(board.min_driver, name), board.source),)
    if board.modules == "open" and modules == "proprietary":
        message = f"proprietary kernel modules can't drive {what}"
        return (Finding("error", "modules-open", message, "--set nvidia_driver.modules=open", board.source),)
    listed = board.open_first is not None and version_key(driver) >= version_key(board.open_first)
    if modules == "open" and not listed:
        since = f"first in {board.open_first}" if board.open_first else "no release does"
        message = f"the open kernel modules of {driver} do not list {what} ({since})"
        hint = "--set nvidia_driver.modules=proprietary"
        return (Finding("error", "modules-proprietary", message, hint, board.source),)
    return ()


def choose_modules(driver: str, names: Iterable[str]) -> Literal["proprietary", "open"]:
    """Choose the kind of kernel modules for machines; roles/nvidia_driver does the same for a live node.

    Args:
        driver: The driver's version.
        names: The instance types.

    Returns:
        Open modules where a GPU needs them, and from branch 560 on, where NVIDIA suggests them, when the
        driver's open modules list every GPU; else proprietary ones.

    Raises:
        UsageError: The catalogue does not know a type.
    """
    boards = [gpu(instance_type(name).gpu) for name in names]
    if any(board.modules == "open" for board in boards):
        return "open"
    listed = (
        board.modules != "proprietary"
        and board.open_first is not None
        and version_key(driver) >= version_key(board.open_first)
        for board in boards
    )
    return "open" if boards and version_key(driver)[0] >= OPEN_SUGGESTED and all(listed) else "proprietary"


def check_fabric_manager(base_name: str, base: Base, names: Iterable[str]) -> Findings:
    """Whether machines with NVSwitch get the fabric manager, without which CUDA does not start there.

    Args:
        base_name: The base's name.
        base: The base.
        names: The instance types.

    Returns:
        Findings of the rule fabric-manager.

    Raises:
        UsageError: The catalogue does not know a type.
    """
    switched = [name for name in names if instance_type(name).interconnect == "nvswitch"]
    if base.distribution != "debian" or not switched:
        return ()
    message = f"{', '.join(switched)} has NVSwitch, and Debian packages no fabric manager for {base_name}"
    hint = "take --base eks-ubuntu-22.04, whose archive has it, or types without NVSwitch"
    return (Finding("error", "fabric-manager", message, hint, "Debian's archive; Fabric Manager user guide"),)


def _branch_hint(first_driver: str, name: str) -> str:
    number = version_key(first_driver)[0]
    fit = [row for row in drivers.branches().values() if row.branch >= number and row.type == "LTSB"]
    best = min((row.branch for row in fit), default=number)
    return f"--set nvidia_driver.branch={best}, or leave {name} out"


def check_driver(driver: str, modules: str, *, today: date) -> Findings:
    """Whether a driver is still looked after.

    Args:
        driver: Its version.
        modules: proprietary or open.
        today: The day to judge by.

    Returns:
        Findings of the rules driver-end-of-life, driver-flaws and driver-modules.

    Raises:
        UsageError: The catalogue does not know the branch.
    """
    row, found = drivers.branch(version_key(driver)[0]), []
    forward = drivers.way_forward(today)
    way = f"--set nvidia_driver.branch={forward.branch}"
    hint = f"move to branch {forward.branch}, supported until {forward.eol}: {way}"
    if row.eol and row.eol <= today + SOON and row.branch != forward.branch:
        past = row.eol <= today
        message = (
            f"driver branch {row.branch} {'reached' if past else 'reaches'} its end of life on {row.eol}"
        )
        message += f"; flaws found since stay open in {row.latest}" if past else ""
        found.append(Finding("warning", "driver-end-of-life", message, hint, "NVIDIA Data Center Drivers"))
    for bulletin in drivers.bulletins():
        fixed = bulletin.fixed.get(row.branch)
        if fixed and version_key(driver) < version_key(fixed):
            message = f"driver {driver} has known flaws ({', '.join(bulletin.cves)})"
            fix = f"{fixed} mends them: --set nvidia_driver.version={fixed}"
            found.append(
                Finding("warning", "driver-flaws", message, fix, f"NVIDIA bulletin {bulletin.bulletin}")
            )
    absent = {"none": "open", "only": "proprietary"}.get(row.open_modules)
    if modules == absent:
        message = f"driver branch {row.branch} has no {absent} kernel modules"
        other = "proprietary" if absent == "open" else "open"
        fix = f"--set nvidia_driver.modules={other}"
        found.append(Finding("error", "driver-modules", message, fix, "NVIDIA Driver Installation Guide"))
    return tuple(found)


def check_cuda(version: str, driver: str) -> Findings:
    """Whether a driver runs what was built with a CUDA version.

    Args:
        version: The CUDA version, for example "12.1".
        driver: The driver's version.

    Returns:
        Findings of the rules cuda-driver and cuda-minor-version.

    Raises:
        UsageError: The catalogue does not know the CUDA version or the branch.
    """
    floor, row = cuda.floor(version), drivers.branch(version_key(driver)[0])
    source = "CUDA Compatibility, chapter Minor Version Compatibility"
    if version_key(driver) < version_key(floor):
        message = f"CUDA {version} needs driver {floor} or later; found {driver}"
        hint = f"a driver from branch {version_key(floor)[0]} on, or an older CUDA"
        return (Finding("error", "cuda-driver", message, hint, source),)
    if version_key(version)[:2] > version_key(row.native_cuda):
        message = f"CUDA {version} is newer than the {row.native_cuda} of driver branch {row.branch}"
        hint = "it runs, but nothing that is compiled at run time (PTX), nor features of newer drivers"
        return (Finding("warning", "cuda-minor-version", message, hint, source),)
    return ()


def check_cuda_gpu(version: str, name: str) -> Findings:
    """Whether a CUDA version compiles for the GPU of a machine.

    The toolkit is in the containers and not on the node, so this is a warning.

    Args:
        version: The CUDA version.
        name: The instance type.

    Returns:
        Findings of the rule cuda-gpu.

    Raises:
        UsageError: The catalogue does not know the type.
    """
    board = gpu(instance_type(name).gpu)
    if board.manufacturer != "NVIDIA" or board.arch is None:
        return ()
    row, wanted = architectures()[board.arch], version_key(version)
    too_early = wanted[:2] < version_key(row.first_cuda)
    if not too_early and not (row.last_cuda and wanted[0] > row.last_cuda):
        return ()
    message = f"CUDA {version} can't compile for the {board.name} of {name} ({board.arch})"
    hint = (
        f"containers for it need CUDA {row.first_cuda} or later"
        if too_early
        else f"stay at {row.last_cuda}.x"
    )
    return (Finding("warning", "cuda-gpu", message, hint, "CUDA Toolkit, Driver, and Architecture Matrix"),)


def check_container_toolkit(version: str) -> Findings:
    """Whether a container can get out of the container toolkit by a known flaw.

    Args:
        version: The toolkit's version.

    Returns:
        Findings of the rule toolkit-flaws.
    """
    if not (flaws := container_toolkit.flaws(version)):
        return ()
    safe = container_toolkit.first_safe()
    message = f"container toolkit {version} has known flaws: {', '.join(row.cve for row in flaws)}"
    hint = f"--set nvidia_container_toolkit.version={safe}, or later"
    bulletins = sorted({row.bulletin for row in flaws})
    source = f"NVIDIA bulletin{'s' if len(bulletins) > 1 else ''} {', '.join(map(str, bulletins))}"
    return (Finding("error", "toolkit-flaws", message, hint, source),)


def check_kubernetes(version: str, *, today: date) -> Findings:
    """Whether EKS still supports a Kubernetes version.

    Args:
        version: For example "1.34".
        today: The day to judge by.

    Returns:
        Findings of the rules kubernetes-ended, kubernetes-extended, kubernetes-ends-soon and
        kubernetes-unknown.
    """
    known, source = kubernetes.versions(), "endoflife.date, Amazon EKS"
    if version not in known:
        message = f"Kubernetes {version} is not in the catalogue ({', '.join(known)})"
        return (Finding("warning", "kubernetes-unknown", message, "is it a version of EKS?", source),)
    support = known[version]
    newest = max(known, key=version_key)
    hint = f"--set kubernetes.version={newest}, supported until {known[newest].standard_until}"
    if support.extended_until < today:
        message = f"EKS ended Kubernetes {version} on {support.extended_until}"
        return (Finding("error", "kubernetes-ended", message, hint, source),)
    if support.standard_until < today:
        message = f"Kubernetes {version} is in paid extended support until {support.extended_until}"
        return (Finding("warning", "kubernetes-extended", message, hint, source),)
    if support.standard_until <= today + SOON:
        message = f"standard support of Kubernetes {version} ends on {support.standard_until}"
        return (Finding("warning", "kubernetes-ends-soon", message, hint, source),)
    return ()


def check_base(name: str, base: Base, *, branch: int, architecture: str) -> Findings:
    """Whether an image can be built on a base.

    Args:
        name: The base's name.
        base: The base.
        branch: The driver branch that is wanted.
        architecture: The image's.

    Returns:
        Findings of the rules base-driver, base-family and base-architecture.
    """
    found = []
    has = base.driver_preinstalled
    if has is not None and branch not in has:
        brings = " or ".join(map(str, has))
        message = (
            f"base {name} comes with driver {brings}; wanted: {branch}. A second driver beside it breaks both"
        )
        hint = f"take a base without a driver, or --set nvidia_driver.branch={has[0]}"
        found.append(Finding("error", "base-driver", message, hint, base.source))
    if base.os_family not in ROLE_FAMILIES:
        message = (
            f"base {name} is of the {base.os_family} family; the roles support {', '.join(ROLE_FAMILIES)}"
        )
        hint = "take eks-ubuntu-22.04 on aws, or debian-12"
        found.append(Finding("error", "base-family", message, hint, "roles/"))
    if architecture not in base.arch:
        message = f"base {name} is published for {', '.join(base.arch)}; wanted: {architecture}"
        found.append(Finding("error", "base-architecture", message, "", base.source))
    return tuple(found)
