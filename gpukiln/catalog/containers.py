"""docker/<image>/image.yaml: what a container image is, and what it can be built from."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import PositiveFloat, StringConstraints

from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.errors import UsageError
from gpukiln.typed import load, strict, unknown


@strict
class ContainerBase:
    """What a container image starts from.

    Args:
        title: For people.
        release: For example "22.04".
        python: The version of its Python, which wheels are chosen for.
        cuda_from: nvidia: NVIDIA's apt repository, and every source must be reached; redistributables: the
            Python index, and what can't be reached is left out.
        size_budget_gib: What the image may have unpacked, in GiB.
        image: The image, by digest; None: made of this machine's own Debian mirror.
        codename: The release's name in that mirror.
    """

    title: str
    distribution: Literal["ubuntu", "debian"]
    release: str
    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")]
    cuda_from: Literal["nvidia", "redistributables"]
    # Of the unpacked image, which is what a node's disk has to hold.
    size_budget_gib: PositiveFloat
    image: str | None = None
    # A mirror of Debian is laid out by codename, not by number.
    codename: str | None = None

    @property
    def cuda_distribution(self) -> str:
        """What NVIDIA's CUDA repository calls the distribution, for example ubuntu2204."""
        return self.distribution + self.release.replace(".", "")


@strict
class ContainerImage:
    """What a container image is.

    Args:
        title: For people, and a label of the image.
        user: Who its processes run as.
        default_base: A key of `bases`.
        bases: What it can be built from.
        components: Names in components.yaml.
    """

    title: str
    user: str
    default_base: str
    bases: Mapping[str, ContainerBase]
    components: tuple[str, ...]

    def base(self, name: str) -> ContainerBase:
        """A base by its name.

        Args:
            name: A key of `bases`; empty is the default.

        Raises:
            UsageError: There is no such base.
        """
        name = name or self.default_base
        if name not in self.bases:
            raise unknown("base", name, self.bases)
        return self.bases[name]


def container_names(root: Path = ROOT) -> list[str]:
    """The container images that can be built."""
    return sorted(path.parent.name for path in (root / "docker").glob("*/image.yaml"))


def load_container(name: str, root: Path = ROOT) -> ContainerImage:
    """Read a container image's definition.

    Args:
        name: For example runner-gpu.

    Returns:
        The definition.

    Raises:
        UsageError: There is no such image, or its file does not fit.
    """
    if name not in container_names(root):
        raise unknown("container image", name, container_names(root))
    where = f"docker/{name}/image.yaml"
    image = load(ContainerImage, read_yaml(root / where), where=where)
    if image.default_base not in image.bases:
        raise UsageError(f"{where}: default_base {image.default_base!r} is none of {', '.join(image.bases)}")
    for base_name, base in image.bases.items():
        # One of the two: a registry's image, or a file system made from the Debian mirror.
        if base.image is None and base.codename is None:
            raise UsageError(f"{where}: base {base_name} needs an image by digest, or a codename of Debian")
        # A tag would make two builds of one commit differ.
        if base.image is not None and not re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", base.image):
            raise UsageError(f"{where}: base {base_name}: {base.image!r} has no digest (NAME@sha256:HEX)")
    return image
