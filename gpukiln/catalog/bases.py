"""ami/bases.yaml: the base images."""

from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.errors import UsageError
from gpukiln.typed import load, strict, template, unknown

# A template, checked when it is loaded: another placeholder would fail only in the call to SSM.
PublishedName = Annotated[str, template("kubernetes", "arch")]

EC2_CONFIG = "etc/cloud/cloud.cfg.d/20_ec2.cfg"
"""Where the embedded cloud's base has cloud-init ask EC2; removed where a disk is prepared for elsewhere."""

NO_KUBERNETES = "none"
"""What stands in the version's place, in tags and in a channel's parameter, where a base has none."""


@strict
class Base:
    """A base image and where to find the newest one.

    Args:
        title: What it is, in words.
        release: The distribution's release, for example "12".
        os_family: Ansible's family: debian or redhat.
        arch: For each architecture the publisher's own name of it.
        ssm: The publisher's parameter that holds the image id, with {kubernetes} and {arch}.
        owners: The accounts that publish it.
        name: The pattern of its name, with {kubernetes} and {arch}.
        ssh_user: Who logs in.
        root_device: The device name of the root volume.
        source: Where these facts come from.
        default_on: The clouds whose default it is.
        kubernetes: The first and the last version that it was seen published for.
        owner_by_region: The publishing account in regions where it is another one.
        kernel_package: The package that brings the newest kernel, where the build takes it.
        driver_preinstalled: The driver branches it was seen with; None: it has no driver.
    """

    title: str
    distribution: Literal["debian", "ubuntu", "amazon"]
    release: str
    os_family: Literal["debian", "redhat"]
    arch: Mapping[str, str]
    # A parameter, not a list of images: publishers update it with each release.
    ssm: PublishedName
    owners: tuple[str, ...]
    name: PublishedName
    ssh_user: str
    root_device: str
    source: str
    default_on: tuple[str, ...] = ()
    kubernetes: tuple[str, str] | None = None
    # Publishers have accounts of their own in some regions and partitions.
    owner_by_region: Mapping[str, str] = field(default_factory=dict)
    kernel_package: str | None = None
    # Observed, not queried: the driver of a published image is known only after it was booted.
    driver_preinstalled: tuple[int, ...] | None = None

    @property
    def cuda_distribution(self) -> str:
        """What NVIDIA's CUDA repository calls the distribution, for example ubuntu2204 or amzn2023."""
        # NVIDIA's repository names: developer.download.nvidia.com/compute/cuda/repos.
        return self.distribution.replace("amazon", "amzn") + self.release.replace(".", "")

    @property
    def system(self) -> str:
        """Distribution and release, for example ubuntu-24.04.

        >>> base("debian-12").system
        'debian-12'
        >>> base("eks-ubuntu-22.04").system
        'ubuntu-22.04'
        """
        return f"{self.distribution}-{self.release}"

    @property
    def has_kubernetes(self) -> bool:
        """Whether it is published per Kubernetes version and brings that version's kubelet."""
        return "{kubernetes}" in self.ssm

    @property
    def has_nodeadm(self) -> bool:
        """Whether EKS's nodeadm makes a node of it, by a NodeConfig in user data."""
        return self.has_kubernetes and self.distribution == "amazon"

    def parameter(self, *, kubernetes: str, architecture: str) -> str:
        """The name of the parameter that holds the image id."""
        return self.ssm.format(kubernetes=kubernetes, arch=self.arch[architecture])

    def name_pattern(self, *, kubernetes: str, architecture: str) -> str:
        """The pattern of the image's name, with * as the EC2 API understands it."""
        return self.name.format(kubernetes=kubernetes, arch=self.arch[architecture])

    def owners_in(self, region: str) -> tuple[str, ...]:
        """The accounts that publish it in a region."""
        # Exactly one account then: an image of the same name by another account is somebody else's.
        return (self.owner_by_region[region],) if region in self.owner_by_region else self.owners


@cache
def load_bases(path: Path = ROOT / "ami/bases.yaml") -> dict[str, Base]:
    """Read bases.yaml.

    Args:
        path: Another file of the same form.

    Returns:
        The bases by name.

    Raises:
        UsageError: The file is missing or does not fit.
    """
    return load(dict[str, Base], read_yaml(path).get("bases"), where=path.name)


def base(name: str) -> Base:
    """One base.

    Args:
        name: For example debian-12.

    Returns:
        Its facts.

    Raises:
        UsageError: There is no such base.
    """
    if existing_base := load_bases().get(name):
        return existing_base
    error = unknown("base", name, load_bases())
    error.hint = f"{error.hint} " * bool(error.hint) + "`invoke ami.bases` shows what each can carry"
    raise error


def default_base(cloud: str) -> str:
    """The default base of a cloud.

    Args:
        cloud: The cloud's name, for example aws.

    Returns:
        The base's name.

    Raises:
        UsageError: No base is marked as its default.
    """
    for name, existing_base in load_bases().items():
        if cloud in existing_base.default_on:
            return name
    raise UsageError(f"no base in bases.yaml is the default on {cloud!r}", hint="name one with --base")
