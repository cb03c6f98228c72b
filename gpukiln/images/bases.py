"""Finds the newest base image on a cloud."""

import re
from dataclasses import dataclass
from typing import Any

from gpukiln.catalog import kubernetes as catalog_kubernetes
from gpukiln.catalog.bases import Base
from gpukiln.catalog.load import version_key
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import UnavailableError


@dataclass(frozen=True)
class ResolvedBase:
    """A base image on a cloud.

    Args:
        name: Its name in bases.yaml.
        id: The AMI id.
        resolved_by: How it was found, in words.
        ssh_user: The login user.
        root_device: The device name of the root volume.
        os_family: debian or redhat.
        distribution: debian, ubuntu or amazon.
        release: The distribution's release.
        image_name: Its publisher's name of it.
    """

    name: str
    id: str
    resolved_by: str
    ssh_user: str
    root_device: str
    os_family: str
    distribution: str
    release: str
    image_name: str


def resolve_base(name: str, base: Base, cloud: Cloud, *, kubernetes: str, architecture: str) -> ResolvedBase:
    """Find the newest image of a base: by the publisher's parameter, else by owner and name.

    Args:
        base: Its facts.
        cloud: The cloud that has it.
        kubernetes: The Kubernetes version, for bases that are published per version.
        architecture: x86_64 or arm64.

    Returns:
        The image.

    Raises:
        UnavailableError: The cloud has no such image, or does not answer.
    """
    parameter = base.parameter(kubernetes=kubernetes, architecture=architecture)
    pattern = base.name_pattern(kubernetes=kubernetes, architecture=architecture)
    owners = base.owners_in(cloud.region)
    with explain_aws_errors(f"look up base {name} in {cloud.region}"):
        ec2 = cloud.client("ec2")
        # The parameter first: it names the image that the publisher recommends.
        if image_id := _parameter(cloud, parameter):
            images = calls.images(ec2, {"image-id": [image_id]})
            how = f"SSM parameter {parameter}"
            if not images:
                raise UnavailableError(f"{how} names {image_id}, an image that {cloud.region} does not have")
            return _resolved(name, base, images[0], how)
        images = calls.images(ec2, {"name": [pattern], "state": ["available"]}, Owners=list(owners))
        if images:
            # CreationDate is ISO 8601, whose order is that of time.
            newest = max(images, key=lambda image: str(image.get("CreationDate", "")))
            return _resolved(name, base, newest, f"newest image of {', '.join(owners)} named {pattern}")
        nearest = _published(cloud, base, kubernetes, architecture)
    raise UnavailableError(
        f"{cloud.region} has no base {name}: neither SSM parameter {parameter} nor an image of "
        f"{', '.join(owners)} named {pattern}",
        hint=_hint(base, nearest, kubernetes),
        details=tuple(nearest),
    )


def _resolved(name: str, base: Base, image: dict[str, Any], how: str) -> ResolvedBase:
    return ResolvedBase(
        name=name,
        id=image["ImageId"],
        resolved_by=how,
        ssh_user=base.ssh_user,
        # The image's own name of the device: a mapping under another name would add a second disk.
        root_device=image.get("RootDeviceName") or base.root_device,
        os_family=base.os_family,
        distribution=base.distribution,
        release=base.release,
        image_name=image.get("Name", ""),
    )


def _parameter(cloud: Cloud, name: str) -> str | None:
    ssm = cloud.client("ssm")
    try:
        return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])
    # Bases without a parameter, and clouds without it, are found by name.
    except ssm.exceptions.ParameterNotFound:
        return None


def _published(cloud: Cloud, base: Base, kubernetes: str, architecture: str) -> list[str]:
    """What is published next to a missing parameter: Kubernetes versions, or parameter names."""
    ssm = cloud.client("ssm")
    if base.has_kubernetes:
        # Other Kubernetes versions of the same base, for the hint.
        names = {
            base.parameter(kubernetes=version, architecture=architecture): version
            for version in catalog_kubernetes.versions()
            if version != kubernetes
        }
        # GetParameters takes ten names a call; the folder itself holds thousands of dated parameters.
        answer = ssm.get_parameters(Names=list(names)[-10:])["Parameters"]
        return sorted((names[row["Name"]] for row in answer), key=version_key)
    name = base.parameter(kubernetes=kubernetes, architecture=architecture)
    folder = name.rpartition("/")[0]
    answer = ssm.get_parameters_by_path(Path=folder, Recursive=False)["Parameters"]
    return sorted(row["Name"] for row in answer)


def _hint(base: Base, nearest: list[str], kubernetes: str) -> str:
    if not nearest:
        return "name another base (--base), region or --cloud"
    if not base.has_kubernetes:
        return f"published there: {', '.join(nearest)}"
    asked = version_key(kubernetes) if re.fullmatch(r"\d+\.\d+", kubernetes) else (0, 0)
    # By minor version: EKS supports neighbours, and a major version 2 does not exist.
    closest = min(nearest, key=lambda version: abs(version_key(version)[1] - asked[1]))
    return f"published for Kubernetes {', '.join(nearest)}: --set kubernetes.version={closest}"
