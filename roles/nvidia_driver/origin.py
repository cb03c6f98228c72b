"""Which packages are the driver: by where it comes from, branch and kind."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import System


@dataclass(frozen=True)
class Origin:
    """The driver's packages and names in one of its sources.

    Args:
        packages: All of the driver's version.
        fabric: Those of the fabric manager, of the driver's version; empty where there are none.
        nvlink5: Packages that the NVSwitches of HGX B200 and B300 need in addition.
        module: The kernel module's name.
        components: What of the distribution's archive has to be enabled.
        stream: The module stream of dnf.
        dkms: Whether the modules are compiled on the machine.
        precompiled: The package of modules that the distribution compiled.
        other_build: Pattern of the branch's packages that bring the modules in the other way.
    """

    packages: tuple[str, ...] = ()
    fabric: tuple[str, ...] = ()
    nvlink5: tuple[str, ...] = ()
    module: str = "nvidia"
    components: tuple[str, ...] = ()
    stream: str = ""
    dkms: bool = True
    precompiled: str = ""
    other_build: str = ""

    @classmethod
    def of(cls, system: System, source: str, branch: int, kind: str, precompiled: str = "") -> "Origin":
        """The one of a source on a system; its name in ORIGINS decides."""
        opened = kind == "open"
        if source == "distribution":
            return (
                _ubuntu(branch, opened, precompiled) if system.distribution == "Ubuntu" else _debian(opened)
            )
        if source == "nvidia":
            return _nvidia_apt(branch, opened) if system.apt else _nvidia_dnf(branch, opened)
        return cls(dkms=source == "runfile")


def _debian(opened: bool) -> Origin:
    # nvidia-driver itself would bring X; these are what CUDA and containers need. There is no fabric manager.
    return Origin(
        packages=(
            "nvidia-open-kernel-dkms" if opened else "nvidia-kernel-dkms",
            "nvidia-kernel-support",
            "nvidia-alternative",
            "nvidia-smi",
            "libcuda1",
            "libnvidia-ml1",
            "libnvidia-cfg1",
            "libnvidia-ptxjitcompiler1",
            "firmware-nvidia-gsp",
            "nvidia-modprobe",
        ),
        # Debian's modprobe install rules lead from nvidia to this one.
        module="nvidia-current",
        components=("contrib", "non-free", "non-free-firmware"),
    )


def _ubuntu(branch: int, opened: bool, precompiled: str) -> Origin:
    # Ubuntu's -server packages: long-lived branches, without a desktop's parts.
    suffix = f"{branch}-server"
    kind = f"{suffix}-open" if opened else suffix
    # Packages of the other kind of build: only one kind may bring the modules.
    built = rf"linux-(modules|objects|signatures)-nvidia-{branch}-"
    return Origin(
        packages=(
            f"nvidia-headless-no-dkms-{kind}" if precompiled else f"nvidia-headless-{kind}",
            f"nvidia-kernel-common-{suffix}",
            f"nvidia-utils-{suffix}",
            f"nvidia-compute-utils-{suffix}",
            f"libnvidia-compute-{suffix}",
            f"libnvidia-cfg1-{suffix}",
        ),
        fabric=(f"nvidia-fabricmanager-{branch}",),
        components=("restricted", "universe"),
        dkms=not precompiled,
        precompiled=precompiled,
        other_build=rf"nvidia-(dkms|headless)-{suffix}" if precompiled else built,
    )


def precompiled_names(branch: int, kind: str, series: Sequence[str]) -> list[str]:
    """Metapackages of Canonical's signed modules, for the kernels of each series."""
    prefix = precompiled_prefix(branch, kind)
    return [f"{prefix}-{suffix}" for suffix in series]


def precompiled_prefix(branch: int, kind: str) -> str:
    """What the packages of Canonical's signed modules begin with."""
    return f"linux-modules-nvidia-{branch}-server{'-open' if kind == 'open' else ''}"


def _nvidia_apt(branch: int, opened: bool) -> Origin:
    # Metapackages: NVIDIA renamed and merged what they bring from branch to branch.
    return Origin(
        packages=(f"{'nvidia-open' if opened else 'cuda-drivers'}-{branch}",),
        fabric=("nvidia-fabricmanager" if branch >= 580 else f"nvidia-fabricmanager-{branch}",),
        nvlink5=("nvlsm", "infiniband-diags"),
    )


def _nvidia_dnf(branch: int, opened: bool) -> Origin:
    return Origin(
        packages=(
            "kmod-nvidia-open-dkms" if opened else "kmod-nvidia-latest-dkms",
            "nvidia-driver-cuda",
            "nvidia-driver-cuda-libs",
            "nvidia-kmod-common",
            "nvidia-persistenced",
        ),
        fabric=("nvidia-fabricmanager" if branch >= 580 else "nvidia-fabric-manager",),
        nvlink5=("nvlsm", "infiniband-diags"),
        # NVIDIA's modular rpms have a stream a branch and kind of modules.
        stream=f"{branch}-{'open' if opened else 'dkms'}",
    )
