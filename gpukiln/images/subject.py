"""An image that is to be verified: the facts that suite and rules need, by its record or its tags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpukiln.catalog.bases import base as find_base
from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.images import load_image
from gpukiln.catalog.instance_types import gpus_of, instance_type
from gpukiln.clouds.tags import (
    BASE_TAG,
    BUILD_ID_TAG,
    CUDA_TAG,
    DRIVER_TAG,
    MODULES_TAG,
    RECIPE_TAG,
    TYPES_TAG,
)
from gpukiln.errors import UsageError
from gpukiln.findings import Finding
from gpukiln.images.fit import check_types, refuse
from gpukiln.images.plan import ImagePlan


@dataclass(frozen=True)
class Subject:
    """An image.

    Args:
        image_id: The AMI.
        recipe: Its folder of ami/.
        profile: The verification profile.
        instance_types: The GPU instance types that it must run on.
        base: The name of its base.
        ssh_user: The login user.
        architecture: x86_64 or arm64.
        driver: The driver's version.
        modules: The kind of its kernel modules.
        cuda: The CUDA version of the containers that run there, or an empty string.
    """

    image_id: str
    build_id: str
    recipe: str
    profile: str
    instance_types: tuple[str, ...]
    base: str
    ssh_user: str
    architecture: str
    driver: str
    modules: str
    cuda: str


def subject_of(plan: ImagePlan, image_id: str, build_id: str) -> Subject:
    """The image of a build.

    Args:
        plan: The build's plan.
        image_id: The AMI.
    """
    return Subject(
        image_id=image_id,
        build_id=build_id,
        recipe=plan.image,
        profile=plan.profile,
        instance_types=plan.instance_types,
        base=plan.base.name,
        ssh_user=plan.base.ssh_user,
        architecture=plan.architecture,
        driver=plan.component("nvidia_driver").version or "",
        modules=plan.resolved["nvidia_driver"]["modules"],
        cuda=plan.resolved["cuda"].get("version", ""),
    )


def subject_tags(subject: Subject) -> dict[str, str]:
    """Tags by which another machine recognises the image, without its id."""
    return {
        RECIPE_TAG: subject.recipe,
        BUILD_ID_TAG: subject.build_id,
        TYPES_TAG: " ".join(subject.instance_types),
        DRIVER_TAG: subject.driver,
        MODULES_TAG: subject.modules,
        CUDA_TAG: subject.cuda,
    }


def subject_from_tags(image_id: str, tags: Mapping[str, str]) -> Subject:
    """An image that another machine built.

    Args:
        image_id: The AMI.

    Raises:
        UsageError: The tags are incomplete, or this checkout has no such image.
    """
    needed = (RECIPE_TAG, BUILD_ID_TAG, TYPES_TAG, DRIVER_TAG, MODULES_TAG, BASE_TAG)
    if missing := [name for name in needed if not tags.get(name)]:
        raise UsageError(
            f"{image_id} has no tag {' or '.join(missing)}, so its content is unknown here",
            hint="run the command on the machine that built it, or build it again",
        )
    # The tag has the base's name and id; only the name is a key of bases.yaml.
    definition, base = load_image(tags[RECIPE_TAG]), tags[BASE_TAG].partition(" ")[0]
    return Subject(
        image_id=image_id,
        build_id=tags[BUILD_ID_TAG],
        recipe=definition.name,
        profile=definition.profile,
        instance_types=tuple(tags[TYPES_TAG].split()),
        base=base,
        ssh_user=find_base(base).ssh_user,
        # of the checkout: a recipe never changes its architecture
        architecture=definition.architecture,
        driver=tags[DRIVER_TAG],
        modules=tags[MODULES_TAG],
        cuda=tags.get(CUDA_TAG, ""),
    )


def check_machines(subject: Subject, types: Sequence[str]) -> tuple[str, ...]:
    """Refuse instance types on which an image can't work, by the plan's rules and the image's content.

    Args:
        types: Instance types; may be empty.

    Returns:
        The types, each once.

    Raises:
        UsageError: The catalogue does not know a type.
        IncompatibleError: A type does not fit.
    """
    refuse(machine_findings(subject, types))
    return tuple(dict.fromkeys(types))


def machine_findings(subject: Subject, types: Sequence[str]) -> list[Finding]:
    """Findings on an image for instance types, by the plan's rules and the image's content.

    Args:
        types: Instance types.

    Raises:
        UsageError: The catalogue does not know a type.
    """
    findings = check_types(
        types,
        base=subject.base,
        architecture=subject.architecture,
        driver=subject.driver,
        modules=subject.modules,
        cuda=subject.cuda,
    )
    built_for, installed = gpus_of(subject.instance_types)
    # A build installs the fabric manager only where one of its instance types needs it.
    switched = [name for name in types if instance_type(name).interconnect == "nvswitch"]
    subnet = [name for name in switched if gpu(instance_type(name).gpu).nvlsm]
    if subnet and installed and not any(gpu(key).nvlsm for key in built_for):
        message = f"{', '.join(subnet)} needs NVLink's subnet manager, and {subject.image_id} has none"
        hint = f"build it with --instance-types {','.join([*subject.instance_types, *subnet])}"
        findings.append(
            Finding("fabric-manager", "error", message, remedy=hint, source="Fabric Manager user guide")
        )
    if switched and not installed:
        message = f"{', '.join(switched)} has NVSwitch, and {subject.image_id} has no fabric manager"
        hint = f"build it with --instance-types {','.join([*subject.instance_types, *switched])}"
        findings.append(
            Finding("fabric-manager", "error", message, remedy=hint, source="Fabric Manager user guide")
        )
    return findings
