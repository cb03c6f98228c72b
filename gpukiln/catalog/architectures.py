"""What each of the two architectures is called, and by whom."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuArchitecture:
    """One.

    Args:
        name: EC2's and gpukiln's own.
        debian: dpkg's, and that of container images.
        machine: The kernel's (`uname -m`), dnf's ($basearch) and that of Python's wheels.
        cuda: NVIDIA's CUDA repository's.
    """

    name: str
    debian: str
    machine: str
    cuda: str

    @property
    def platform(self) -> str:
        """A container image's."""
        return f"linux/{self.debian}"


# sbsa: NVIDIA's name of its repositories for Arm servers.
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        CpuArchitecture("x86_64", debian="amd64", machine="x86_64", cuda="x86_64"),
        CpuArchitecture("arm64", debian="arm64", machine="aarch64", cuda="sbsa"),
    )
}
PLATFORMS = {architecture.platform: architecture for architecture in ARCHITECTURES.values()}
# By `uname -m`, which is what a machine reports of itself.
MACHINES = {architecture.machine: architecture for architecture in ARCHITECTURES.values()}
