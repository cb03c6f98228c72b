"""What is to run on a machine, by the names that were typed: an image, a workload, or both."""

from __future__ import annotations

from collections.abc import Sequence

from gpukiln.catalog.components import load_components
from gpukiln.catalog.containers import container_names
from gpukiln.catalog.instance_types import instance_type, instance_types
from gpukiln.catalog.workloads import cuda_workload, workload
from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.images.builds import Builds
from gpukiln.offers.fit import subject_of_ami, subject_of_record
from gpukiln.offers.listing import RunSpec

AUTO = "auto"


def run_spec(needs: str, image: str, cloud: Cloud | None) -> RunSpec:
    """An image of docker/ is a workload; any other is what the machine is started from.

    Args:
        needs: The name of a workload; empty: none.
        image: A folder of docker/, an AMI, a build, `last` or `auto`; empty: none.
        cloud: Is asked for an AMI that this machine did not build; None: no cloud.

    Raises:
        UsageError: A name is unknown, or two workloads are named.
    """
    named = workload(needs) if needs else None
    if not image:
        return RunSpec(workload=named)
    if image == AUTO:
        return RunSpec(choose=True, workload=named)
    # A container brings its CUDA and no driver: it is a workload of whatever machine.
    if image in container_names():
        if named:
            raise UsageError(
                f"--needs {needs} and --image {image} are both what is to run", hint="one of them"
            )
        return RunSpec(workload=cuda_workload(load_components()["cuda"].version or ""))
    if not image.startswith("ami-"):
        return RunSpec(image=subject_of_record(Builds().find(image).read()), workload=named)
    # The record first: it needs no account, and tags may have been changed since.
    if build := Builds().of_image(image):
        return RunSpec(image=subject_of_record(build.read()), workload=named)
    if cloud is None:
        raise UsageError(
            f"{image} was not built here", hint="--cloud says where to look it up: aws or embedded"
        )
    return RunSpec(image=subject_of_ami(cloud, image), workload=named)


def split_machines(names: Sequence[str], image: str, needs: str) -> tuple[list[str], str]:
    """The instance types among some names, and the image.

    Args:
        image: As --image names it; empty: it may be among the names.
        needs: As --needs names a workload; empty: none.

    Raises:
        UsageError: No instance type or nothing to run is named, or more than one image.
    """
    machines = [name for name in names if name in instance_types()]
    images = [name for name in names if name not in machines]
    for name in images:
        # Types of EC2 have a dot, names of builds have none: a misspelled type is not taken for an image.
        if "." in name and not name.startswith("ami-"):
            instance_type(name)  # raises, with similar names
    if len(images) > 1 or (images and image):
        raise UsageError(f"{', '.join([*images, image])}: more than one image", hint="one at a time")
    if not machines:
        raise UsageError(
            "no instance type is named", hint="invoke offer.check ami-0123 g6.xlarge, for example"
        )
    if not (images or image or needs):
        raise UsageError("nothing to run is named", hint="an AMI, a build, --image or --needs")
    return machines, image or "".join(images)
