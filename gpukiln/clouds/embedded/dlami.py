"""AWS's Deep Learning AMIs: their public parameters, and images that have a name but no disk.

The image for a machine can be looked up as on AWS; launching it fails, as for any image without a disk.
Parameters and names: AWS Deep Learning AMIs developer guide and release notes. The instances in a description
are those of 2025-05-05; on arm64 that is the one family with a GPU.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from gpukiln.clouds.embedded import store

DAY = "20250505"
FAMILIES = {"x86_64": "G4dn, G5, G6, Gr6, G6e, P4d, P4de, P5, P5e, P5en", "arm64": "G5g"}
SYSTEMS = {  # end of the parameter's name: the system in the image's name, and its architectures
    "ubuntu-22.04": ("Ubuntu 22.04", ("x86_64", "arm64")),
    "ubuntu-24.04": ("Ubuntu 24.04", ("x86_64",)),
    "amazon-linux-2023": ("Amazon Linux 2023", ("x86_64", "arm64")),
}


@dataclass(frozen=True)
class SimulatedDlami:
    """One Deep Learning AMI; its ids are the same in every region."""

    parameter: str
    name: str
    arch: str
    key: str

    @property
    def image_id(self) -> str:
        return f"ami-{self.key}"

    @property
    def snapshot_id(self) -> str:
        return f"snap-{self.key}"


def _simulated_dlamis() -> tuple[SimulatedDlami, ...]:
    images = []
    for end, (system, architectures) in SYSTEMS.items():
        for arch in architectures:
            parameter = f"/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-{end}/latest/ami-id"
            # An id in the form of EC2's, 17 hexadecimal digits, the same in every start.
            key = hashlib.sha256(parameter.encode()).hexdigest()[:17]
            prefix = "ARM64 " if arch == "arm64" else ""
            name = f"Deep Learning {prefix}Base OSS Nvidia Driver GPU AMI ({system}) {DAY}"
            images.append(SimulatedDlami(parameter, name, arch, key))
    return tuple(images)


DLAMIS = _simulated_dlamis()


def publish_images(ec2: Any) -> None:
    """Add the images to a region.

    Args:
        ec2: moto's EC2 backend of the region.
    """
    for image in DLAMIS:
        snapshot = store.add_snapshot(
            ec2, image.snapshot_id, size_gib=75, owner_id=store.AMAZON, from_ami=image.image_id
        )
        store.add_image(
            ec2,
            image.image_id,
            snapshot,
            {
                "name": image.name,
                "description": f"Supported EC2 instances: {FAMILIES[image.arch]}. It has no disk here.",
                "owner_id": store.AMAZON,
                "owner_alias": "amazon",
                "virtualization_type": "hvm",
                "hypervisor": "xen",
                "architecture": image.arch,
                "root_device_type": "ebs",
                "root_device_name": "/dev/xvda" if "Amazon" in image.name else "/dev/sda1",
                "launch_permissions": [{"Group": "all"}],
                "creation_date": "2025-05-05T00:00:00",
            },
        )


def publish_parameters(ssm: Any) -> None:
    """Add the parameters to a region.

    Args:
        ssm: moto's SSM backend of the region.
    """
    for image in DLAMIS:
        store.add_parameter(
            ssm, {"name": image.parameter, "value": image.image_id, "data_type": "aws:ec2:image"}
        )
