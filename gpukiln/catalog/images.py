"""ami/<image>/image.yaml: what an image is."""

from pathlib import Path
from typing import Literal

from gpukiln import recipes
from gpukiln.catalog.instance_types import every_instance_type
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.catalog.prices import machine_price
from gpukiln.errors import UsageError
from gpukiln.typed import load, strict, unknown

MIN_GIB = 8  # the embedded base image's size
MAX_GIB = 16384  # of a gp3 volume that boots (EC2 user guide, EBS volume constraints)


@strict
class ImageDefinition:
    """What an image is.

    Args:
        name: Its name, the same as its folder's.
        description: For the people who find it in an account.
        instance_types: The GPU machines that it must run on.
        builder_instance_type: The machine that it is built on.
        volume_size_gib: Size of its root volume in GiB.
        profile: The verification profile.
        required_layers: The layers whose checks must have run before a release.
        components: The components that go into it.
        encrypted: Whether its root volume is encrypted, with the account's default key.
    """

    name: str
    description: str
    architecture: Literal["x86_64", "arm64"]
    instance_types: tuple[str, ...]
    builder_instance_type: str
    volume_size_gib: int
    profile: str
    required_layers: tuple[str, ...]
    components: tuple[str, ...]
    encrypted: bool = True


def image_names(root: Path = ROOT) -> list[str]:
    """The images that can be built."""
    return sorted(recipes.images(root))


def load_image(name: str, root: Path = ROOT) -> ImageDefinition:
    """Read an image's definition.

    Args:
        name: For example eks-gpu.

    Raises:
        UsageError: There is no such image, or its file does not fit.
    """
    folders = recipes.images(root)
    if name not in folders:
        raise unknown("image", name, folders)
    path = folders[name] / "image.yaml"
    image = load(ImageDefinition, read_yaml(path), where=f"ami/{name}/image.yaml")
    if image.name != name:
        raise UsageError(f"ami/{name}/image.yaml names the image {image.name!r}; wanted: {name!r}")
    if "nvidia_driver" not in image.components:
        raise UsageError(f"ami/{name}/image.yaml has no component nvidia_driver; a GPU image needs one")
    if not image.instance_types:
        raise UsageError(f"ami/{name}/image.yaml names no instance type; the image is verified on the first")
    builder = image.builder_instance_type
    # what has a price exists: botocore's model takes a while to read
    if machine_price(builder, "us-east-1") is None and builder not in every_instance_type():
        raise unknown(f"builder_instance_type in ami/{name}/image.yaml:", builder, every_instance_type())
    # A volume can't be smaller than the snapshot that it is made of.
    if not MIN_GIB <= image.volume_size_gib <= MAX_GIB:
        size = f"{image.volume_size_gib} GiB"
        raise UsageError(f"ami/{name}/image.yaml: volume_size_gib is {size}; wanted {MIN_GIB} to {MAX_GIB}")
    return image
