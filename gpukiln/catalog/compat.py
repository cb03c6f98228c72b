"""The rules of what can work with what.

Each rule is a function that returns its findings; an empty tuple means that nothing is wrong. An error can
never work and is refused before anything is started, a warning works today.
"""

from collections.abc import Iterable
from datetime import date, timedelta
from typing import Literal

from gpukiln.catalog import container_toolkit, cuda, drivers, kubernetes
from gpukiln.catalog.bases import Base
from gpukiln.catalog.gpus import architectures, gpu
from gpukiln.catalog.instance_types import instance_type
from gpukiln.catalog.load import version_key
from gpukiln.compatibility import NATIVE
from gpukiln.findings import Finding

# From this branch on NVIDIA's installer takes the open modules by default, too.
OPEN_SUGGESTED = 560
"""The first branch whose open kernel modules NVIDIA suggests (Driver Installation Guide)."""

# Two months are enough for a new image and its roll-out.
SOON = timedelta(days=60)
"""How long before an end of support a warning starts."""


Findings = tuple[Finding, ...]


def check_instance_type(name: str, *, architecture: str) -> Findings:
    """Whether a machine can run an image that gpukiln builds.

    Args:
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
        # The other rules speak of NVIDIA's drivers, so that this one ends the list.
        message = f"{name} has a {board.manufacturer} {board.name}, which NVIDIA's driver can't drive"
        hint = "take g4dn, g5 or g6 of the same size"
        return (Finding("not-nvidia", "error", message, remedy=hint, source=source),)
    findings = []
    if machine.status == "retired":
        message = f"AWS has retired {name} ({board.name})"
        findings.append(Finding("retired", "error", message, remedy=instead, source=source))
    elif machine.status == "previous":
        message = f"{name} ({board.name}) is of a previous generation"
        findings.append(Finding("previous-generation", "warning", message, remedy=instead, source=source))
    # The GRID driver is in none of the package repositories that the roles use.
    if machine.driver == "grid":
        message = f"{name} has a fraction of a {board.name}: a vGPU that only NVIDIA's GRID driver can drive"
        findings.append(Finding("grid-only", "error", message, remedy=instead, source=source))
    if machine.arch != architecture:
        message = f"{name} is {machine.arch} and the image is {architecture}"
        hint = f"take an {architecture} type"
        findings.append(Finding("architecture", "error", message, remedy=hint, source=source))
    return tuple(findings)


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
    what = f"the {board.name} of {name} ({board.arch})"
    if findings := check_driver_knows(
        driver, instance_type(name).gpu, what=what, alternative=f"leave {name} out"
    ):
        return findings
    # Grace Hopper and Blackwell require the open modules (NVIDIA Driver Installation Guide).
    if board.modules == "open" and modules == "proprietary":
        message = f"proprietary kernel modules can't drive {what}"
        hint = "--set nvidia_driver.modules=open"
        return (Finding("modules-open", "error", message, remedy=hint, source=board.source),)
    # The open modules drive Turing and newer GPUs, and only those in their table of device ids.
    listed = board.open_first is not None and version_key(driver) >= version_key(board.open_first)
    if modules == "open" and not listed:
        since = f"first in {board.open_first}" if board.open_first else "no release does"
        message = f"the open kernel modules of {driver} do not list {what} ({since})"
        hint = "--set nvidia_driver.modules=proprietary"
        return (Finding("modules-proprietary", "error", message, remedy=hint, source=board.source),)
    return ()


def check_driver_knows(driver: str, key: str, *, what: str, alternative: str) -> Findings:
    """Whether a driver knows a GPU, whatever kind of kernel modules it has.

    Args:
        driver: The driver's version.
        key: The GPU, for example a10g.
        what: The GPU in words, for the message.
        alternative: What to do instead of taking another driver.

    Returns:
        Findings of the rules gpu-too-old and gpu-too-new.

    Raises:
        UsageError: The catalogue does not know the GPU.
    """
    model = gpu(key)
    # The architecture is NVIDIA's; GPUs of other makers have none here.
    if model.arch is None:
        return ()
    return check_driver_range(
        driver, model.arch, first=model.min_driver, what=what, alternative=alternative, source=model.source
    )


def check_driver_range(
    driver: str, arch: str, *, first: str | None, what: str, alternative: str, source: str
) -> Findings:
    """Whether a driver is one of those that know a GPU.

    Args:
        driver: The driver's version.
        arch: The GPU's architecture.
        first: The first driver that knows it; None: every one.
        what: The GPU in words, for the message.
        alternative: What to do instead of taking another driver.
        source: Where `first` comes from.

    Returns:
        As of `check_driver_knows`.
    """
    # Too old first: for a dropped GPU no newer driver helps, whatever its first driver was.
    last = architectures()[arch].last_driver
    if last and version_key(driver)[0] > last:
        message = f"driver {driver} has dropped {what}; the last branch is {last}"
        hint = f"--set nvidia_driver.branch={last}, or {alternative}"
        source = "NVIDIA Data Center Drivers, matrix"
        return (Finding("gpu-too-old", "error", message, remedy=hint, source=source),)
    if first and version_key(driver) < version_key(first):
        message = f"driver {driver} does not know {what}; the first one that does is {first}"
        hint = f"{branch_hint(first)}, or {alternative}"
        return (Finding("gpu-too-new", "error", message, remedy=hint, source=source),)
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

    >>> choose_modules("535.309.01", ["g5.xlarge"])
    'proprietary'
    >>> choose_modules("580.65.06", ["g5.xlarge"])
    'open'
    """
    # One image has one kind of modules: it must drive every GPU that the image is for.
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
    """Whether machines with NVSwitch get what CUDA does not start without there.

    That is the fabric manager, and for those of HGX B200 and B300 NVLink's subnet manager.

    Args:
        names: The instance types.

    Returns:
        Findings of the rule fabric-manager.

    Raises:
        UsageError: The catalogue does not know a type.
    """
    # Without the fabric manager CUDA fails with error 802 (system not yet initialized) on these machines.
    switched = [name for name in names if instance_type(name).interconnect == "nvswitch"]
    subnet = [name for name in switched if gpu(instance_type(name).gpu).nvlsm]
    if subnet and base.distribution != "amazon" and base.driver_preinstalled is None:
        message = (
            f"{', '.join(subnet)} needs NVLink's subnet manager (NVLSM) in addition to the fabric "
            f"manager, and no source of {base_name} has it"
        )
        hint = "take --base eks-al2023, where NVIDIA's repository has it, or leave these types out"
        return (Finding("fabric-manager", "error", message, remedy=hint, source="Fabric Manager user guide"),)
    # Debian packages the driver, and none of its companions for NVSwitch.
    if base.distribution != "debian" or not switched:
        return ()
    message = f"{', '.join(switched)} has NVSwitch, and Debian packages no fabric manager for {base_name}"
    hint = "take --base eks-ubuntu-22.04, whose archive has it, or types without NVSwitch"
    source = "Debian's archive; Fabric Manager user guide"
    return (Finding("fabric-manager", "error", message, remedy=hint, source=source),)


def branch_hint(first_driver: str) -> str:
    """The setting that takes the nearest long-term branch that has a driver.

    >>> branch_hint("525.60.13")
    '--set nvidia_driver.branch=535'
    >>> branch_hint("570.26")
    '--set nvidia_driver.branch=580'
    """
    number = version_key(first_driver)[0]
    # NVIDIA supports its long-term branches for three years, production branches for one.
    fit = [row for row in drivers.branches().values() if row.branch >= number and row.type == "LTSB"]
    best = min((row.branch for row in fit), default=number)
    return f"--set nvidia_driver.branch={best}"


def check_driver(driver: str, modules: str, *, today: date) -> Findings:
    """Whether NVIDIA still supports a driver.

    Args:
        driver: Its version.
        modules: proprietary or open.
        today: The day that ends of support are compared with.

    Returns:
        Findings of the rules driver-end-of-life, driver-flaws and driver-modules.

    Raises:
        UsageError: The catalogue does not know the branch.
    """
    row, findings = drivers.branch(version_key(driver)[0]), []
    forward = drivers.recommended_branch(today)
    way = f"--set nvidia_driver.branch={forward.branch}"
    hint = f"move to branch {forward.branch}, supported until {forward.eol}: {way}"
    if row.eol and row.eol <= today + SOON and row.branch != forward.branch:
        past = row.eol <= today
        message = (
            f"driver branch {row.branch} {'reached' if past else 'reaches'} its end of life on {row.eol}"
        )
        message += f"; flaws found since stay open in {row.latest}" if past else ""
        source = "NVIDIA Data Center Drivers"
        findings.append(Finding("driver-end-of-life", "warning", message, remedy=hint, source=source))
    for bulletin in drivers.bulletins():
        fixed = bulletin.fixed.get(row.branch)
        if fixed and version_key(driver) < version_key(fixed):
            message = f"driver {driver} has known flaws ({', '.join(bulletin.cves)})"
            fix = f"{fixed} fixes them: --set nvidia_driver.version={fixed}"
            source = f"NVIDIA bulletin {bulletin.bulletin}"
            findings.append(Finding("driver-flaws", "warning", message, remedy=fix, source=source))
    # What `open_modules` says of the branch, as the kind of modules that it lacks.
    absent = {"none": "open", "only": "proprietary"}.get(row.open_modules)
    if modules == absent:
        message = f"driver branch {row.branch} has no {absent} kernel modules"
        other = "proprietary" if absent == "open" else "open"
        fix = f"--set nvidia_driver.modules={other}"
        source = "NVIDIA Driver Installation Guide"
        findings.append(Finding("driver-modules", "error", message, remedy=fix, source=source))
    return tuple(findings)


def check_cuda(version: str, driver: str, names: Iterable[str] = ()) -> Findings:
    """Whether a driver runs what was built with a CUDA version.

    A driver that would need a forward-compatibility package in each container is an error too: nothing that
    is built here brings it.

    Args:
        version: The CUDA version, for example "12.1".
        driver: The driver's version.
        names: The instance types.

    Returns:
        Findings of the rules cuda-driver and cuda-minor-version.

    Raises:
        UsageError: The catalogue does not know the CUDA version, the branch or a type.
    """
    support = cuda.support(version, driver, [instance_type(name).gpu for name in names])
    # The driver is at least as new as the toolkit: nothing to report.
    if support.way == NATIVE:
        return ()
    if support.runs:
        hint = support.limits
        return (
            Finding("cuda-minor-version", "warning", support.message, remedy=hint, source=support.source),
        )
    hint = f"a driver from branch {version_key(cuda.needs(version).first)[0]} on, or an older CUDA"
    if support.package:
        hint += f"; containers with {support.package} may run there"
    return (Finding("cuda-driver", "error", support.message, remedy=hint, source=support.source),)


def check_cuda_gpu(version: str, name: str) -> Findings:
    """Whether a CUDA version compiles for the GPU of a machine.

    The toolkit is in the containers and not on the node, so this is a warning.

    Args:
        name: The instance type.

    Returns:
        Findings of the rule cuda-gpu.

    Raises:
        UsageError: The catalogue does not know the type.
    """
    board = gpu(instance_type(name).gpu)
    if (compilers := cuda.compile_problem(version, instance_type(name).gpu)) is None:
        return ()
    message = f"CUDA {version} can't compile for the {board.name} of {name} ({board.arch})"
    hint = f"containers for it need {compilers}"
    return (Finding("cuda-gpu", "warning", message, remedy=hint, source=cuda.ARCHITECTURE_MATRIX),)


def check_container_toolkit(version: str) -> Findings:
    """Whether a container can get out of the container toolkit by a known flaw.

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
    return (Finding("toolkit-flaws", "error", message, remedy=hint, source=source),)


def check_kubernetes(version: str, *, today: date) -> Findings:
    """Whether EKS still supports a Kubernetes version.

    Args:
        version: For example "1.34".
        today: The day that ends of support are compared with.

    Returns:
        Findings of the rules kubernetes-ended, kubernetes-extended, kubernetes-ends-soon and
        kubernetes-unknown.
    """
    known, source = kubernetes.versions(), "endoflife.date, Amazon EKS"
    if version not in known:
        message = f"Kubernetes {version} is not in the catalogue ({', '.join(known)})"
        hint = "is it a version of EKS?"
        return (Finding("kubernetes-unknown", "warning", message, remedy=hint, source=source),)
    # The end of extended support counts: EKS upgrades the control plane by itself after it.
    support = known[version]
    newest = max(known, key=version_key)
    hint = f"--set kubernetes.version={newest}, supported until {known[newest].standard_until}"
    if support.extended_until < today:
        message = f"EKS ended Kubernetes {version} on {support.extended_until}"
        return (Finding("kubernetes-ended", "error", message, remedy=hint, source=source),)
    if support.standard_until < today:
        message = f"Kubernetes {version} is in paid extended support until {support.extended_until}"
        return (Finding("kubernetes-extended", "warning", message, remedy=hint, source=source),)
    if support.standard_until <= today + SOON:
        message = f"standard support of Kubernetes {version} ends on {support.standard_until}"
        return (Finding("kubernetes-ends-soon", "warning", message, remedy=hint, source=source),)
    return ()


def check_base(
    name: str, base: Base, *, branch: int, architecture: str, keep_build_tools: bool = True
) -> Findings:
    """Whether an image can be built on a base.

    Args:
        branch: The driver branch that is wanted.
        architecture: The image's.
        keep_build_tools: Whether compilers stay when the modules are there.

    Returns:
        Findings of the rules base-driver, base-architecture and base-build-tools.
    """
    findings = []
    has = base.driver_preinstalled
    # Files of two drivers overwrite each other.
    if has is not None and branch not in has:
        brings = " or ".join(map(str, has))
        message = f"base {name} comes with driver {brings}; wanted: {branch}. A second driver breaks both"
        hint = f"take a base without a driver, or --set nvidia_driver.branch={has[0]}"
        findings.append(Finding("base-driver", "error", message, remedy=hint, source=base.source))
    if architecture not in base.arch:
        message = f"base {name} is published for {', '.join(base.arch)}; wanted: {architecture}"
        findings.append(Finding("base-architecture", "error", message, source=base.source))
    # DKMS of an rpm system requires gcc and make as dependencies, so dnf would remove DKMS with them.
    if not keep_build_tools and (base.os_family != "debian" or has is not None):
        why = "brings its own driver" if has is not None else "has DKMS as an rpm, which wants a compiler"
        message = f"base {name} {why}: its build tools can't be removed"
        hint = "--set nvidia_driver.keep_build_tools=true, or a base of Debian or Ubuntu without a driver"
        findings.append(
            Finding("base-build-tools", "error", message, remedy=hint, source="role nvidia_driver")
        )
    return tuple(findings)
