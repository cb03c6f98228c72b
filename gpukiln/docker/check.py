"""Checks whether a container image runs on a node: its CUDA version against the node's driver and GPUs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpukiln.catalog import compat, cuda
from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_type
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud
from gpukiln.clouds.tags import DRIVER_TAG
from gpukiln.compatibility import FORWARD_COMPAT, NO, CudaSupport
from gpukiln.errors import CheckFailedError, IncompatibleError, UsageError
from gpukiln.findings import Finding
from gpukiln.images.builds import Record
from gpukiln.instances.tags import tags_of


@dataclass(frozen=True)
class Node:
    """A node that an image would run on.

    Args:
        name: The source of these facts, in words.
        driver: The driver's version.
        gpus: Keys of its GPUs; empty when they are not known.
    """

    name: str
    driver: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContainerCheck:
    """Whether an image runs on a node.

    Args:
        image: The image's name.
        cuda: Its CUDA version.
        support: How the driver runs that CUDA version.
        findings: GPUs that the driver or this CUDA version's compiler does not support.
    """

    image: str
    cuda: str
    node: Node
    support: CudaSupport
    findings: tuple[Finding, ...]

    def require_works(self) -> None:
        """Raise an error where the image does not run.

        Raises:
            IncompatibleError: It can never run.
            CheckFailedError: It runs only with a package in the container that gpukiln does not install.
        """
        problems = [(finding.message, finding.remedy) for finding in self.findings]
        newer = "a newer driver on the node, or an image with an older CUDA"
        # The driver first: without it no GPU of the node is usable, whatever its kind.
        if self.support.way == NO:
            problems.insert(0, (self.support.message, f"{newer}; {self.support.limits}"))
        where = f"on {self.node.name}"
        if problems:
            message, hint = problems[0]
            others = tuple(text for text, _ in problems[1:])
            raise IncompatibleError(f"{self.image} can't run {where}: {message}", hint=hint, details=others)
        # The package cuda-compat must be in the container, and works on data-centre GPUs only.
        if self.support.way == FORWARD_COMPAT:
            message = f"{self.image} does not run {where} as it is: {self.support.message}"
            raise CheckFailedError(message, hint=f"{newer}; or {self.support.limits}")


def node_of_record(record: Record) -> Node:
    """The node of a machine image that gpukiln built.

    Args:
        record: The record of a machine image.

    Raises:
        UsageError: The build has no image.
    """
    if record.bake is None:
        raise UsageError(f"build {record.build_id} has no image: {record.state}")
    # What was installed, not what was planned: a source may have another patch release.
    installed = record.bake.components.get("nvidia_driver", {}).get("version")
    if not installed:
        raise UsageError(f"{record.bake.image_id} has no NVIDIA driver", hint="name the node's with --driver")
    return Node(
        f"{record.bake.image_id} (driver {installed})", installed, gpus_of(record.plan.instance_types)
    )


def node_of_ami(cloud: Cloud, image_id: str) -> Node:
    """The node of an AMI, from its tags.

    Raises:
        UsageError: There is no such AMI, or gpukiln did not build it.
        UnavailableError: The cloud does not answer.
    """
    tags = tags_of(calls.require_image(cloud, image_id, hint="--cloud and --region say where to look"))
    if not (driver := tags.get(DRIVER_TAG)):
        raise UsageError(f"{image_id} has no tag {DRIVER_TAG}", hint="name its driver: --driver VERSION")
    return Node(f"{image_id} (driver {driver})", driver)


def gpus_of(instance_types: Iterable[str]) -> tuple[str, ...]:
    """Keys of the GPUs of instance types, each once.

    >>> gpus_of(["g4dn.xlarge", "g4dn.12xlarge", "g5.xlarge"])
    ('t4', 'a10g')

    Args:
        instance_types: For example g4dn.xlarge.

    Raises:
        UsageError: The catalogue does not know a type.
    """
    return tuple(dict.fromkeys(instance_type(name).gpu for name in instance_types))


def check_container(image: str, version: str, node: Node) -> ContainerCheck:
    """Check whether an image runs on a node.

    Args:
        image: The image's name.
        version: Its CUDA version.

    Raises:
        UsageError: The catalogue does not know the CUDA version, the driver's branch or a GPU.
    """
    findings: list[Finding] = []
    for key in node.gpus:
        board = gpu(key)
        # CUDA's rules say nothing of other makers' GPUs, so the remaining checks are skipped.
        if board.manufacturer != "NVIDIA":
            message = f"the {board.name} is {board.manufacturer}'s, and CUDA runs on NVIDIA's GPUs"
            hint = "a machine with an NVIDIA GPU"
            findings.append(Finding("not-nvidia", "error", message, remedy=hint, source=board.source))
            continue
        what = f"the {board.name} ({board.arch})"
        findings += [
            replace(finding, remedy=f"build the node's image with {finding.remedy}")
            for finding in compat.check_driver_knows(
                node.driver, key, what=what, alternative="take another GPU"
            )
        ]
        if required := cuda.compile_problem(version, key):
            message = f"CUDA {version} can't compile for {what}, compute capability {board.cc}"
            hint = f"an image with {required}, or another GPU"
            source = cuda.ARCHITECTURE_MATRIX
            findings.append(Finding("cuda-gpu", "error", message, remedy=hint, source=source))
    support = cuda.support(version, node.driver, node.gpus)
    return ContainerCheck(image, version, node, support, tuple(findings))
