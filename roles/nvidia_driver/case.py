"""The role as it was asked for, on a node as it was seen: what both mean together."""

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ..package_repository.decide import Repository
from ..plan import MANAGED, Node, Role
from . import gpus, kernels, packages
from .origin import Origin, precompiled_names

MODPROBE = "/etc/modprobe.d/gpukiln-nvidia.conf"
DKMS_SIGNING = "/etc/dkms/framework.conf.d/gpukiln.conf"
STREAM_FILE = "/etc/dnf/modules.d/nvidia-driver.module"
NO_COMPILER = "gpukiln-no-compiler"
"""Stands for the compiler that DKMS's package wants; files/remove-compilers.sh makes it."""
INSTALLER_NEEDS = ("gcc", "make", "dkms")
UMAD = "ib_umad"
HELPERS = (
    "glx-alternative-nvidia",
    "nvidia-alternative",
    "nvidia-installer-cleanup",
    "nvidia-kernel-common",
    "nvidia-support",
)
"""Debian's packages around the driver, in versions of their own."""
KERNEL_RPMS = re.compile(r"kernel[0-9.]*(-core|-modules.*|-devel.*)?$")


@dataclass(frozen=True)
class Case:
    """What both mean together.

    Args:
        precompiled: The package of modules that the distribution compiled, where it is to be taken.
    """

    role: Role
    node: Node
    precompiled: str = ""

    @classmethod
    def of(cls, role: Role, node: Node) -> "Case":
        """The one of what is installed."""
        # The first installed candidate: two kinds of modules can't be installed at once.
        case = cls(role, node)
        return case.taking(next((name for name in case.candidates if name in case.packages), ""))

    def taking(self, precompiled: str) -> "Case":
        """This one with the distribution's modules, or with DKMS's."""
        return replace(self, precompiled=precompiled)

    @property
    def branch(self) -> int:
        return int(self.role["branch"])

    @property
    def version(self) -> str:
        """The one that was asked for; the branch's last one that the catalogue knows."""
        return str(self.role["version"]) or gpus.last_release(self.branch)

    @property
    def source(self) -> str:
        return str(self.role["source"])

    @property
    def apt(self) -> bool:
        return self.role.system.apt

    @property
    def packages(self) -> packages.Packages:
        """What is installed."""
        installed: packages.Packages = self.node["packages"]
        return installed

    @cached_property
    def fit(self) -> gpus.Fit:
        present = [device["id"] for device in self.node["pci"]["gpus"]]
        return gpus.driver_fit(self.version, self.role["modules"], present, self.role["gpus"])

    @cached_property
    def fabric(self) -> bool:
        """Whether the fabric manager is wanted."""
        there = self.node["pci"]
        # NVLink 5 switches are no PCI devices, so the GPUs' ids decide there.
        switched = there["switches"] or any(device["id"] in gpus.nvlink5_ids() for device in there["gpus"])
        asked = self.role["fabric_manager"]
        return asked == "always" or bool(asked == "auto" and there["gpus"] and switched)

    @property
    def nvlink5(self) -> bool:
        """Whether it needs NVLink's subnet manager."""
        return self.fabric and self.fit.nvlink5

    @cached_property
    def origin(self) -> Origin:
        by_source = Origin.of(self.role.system, self.source, self.branch, self.fit.modules, self.precompiled)
        # Debian's own packages name the module after their alternatives.
        if self.source == "preinstalled" and "nvidia-alternative" in self.packages:
            return replace(by_source, module="nvidia-current")
        return by_source

    @cached_property
    def wanted(self) -> list[str]:
        """The packages of the driver's version."""
        # Only where there is NVSwitch: the package's service fails elsewhere.
        fabric = self.origin.fabric if self.fabric else ()
        return [*self.origin.packages, *self.role["extra_packages"], *fabric]

    @cached_property
    def others(self) -> list[str]:
        """Installed packages of another branch, or that bring the modules in another way."""
        of = packages.driver_branches(self.packages)
        # DKMS's and precompiled modules of the same branch exclude each other.
        built = self.origin.other_build
        return [
            name
            for name in {**of, **self.packages}
            if of.get(name, self.branch) != self.branch or (built and re.match(built, name))
        ]

    @cached_property
    def kernels(self) -> list[str]:
        """Releases that can boot, the oldest first."""
        return kernels.kernel_release_sort(self.node["kernels"])

    @property
    def series(self) -> list[str]:
        """What metapackages of the kernel end with; an LTS release's cloud images follow a series of it."""
        flavour = kernels.kernel_flavour(self.kernels[-1]) if self.kernels else ""
        # Ubuntu's metapackages of an LTS release: linux-aws-lts-22.04
        return [f"{flavour}-lts-{self.role.system.version}", flavour]

    @property
    def updates(self) -> list[str]:
        """What the kernel's updates come by: linux-aws with linux-image-aws and linux-headers-aws."""
        return [f"linux-{suffix}" for suffix in self.series] + [
            f"linux-image-{suffix}" for suffix in self.series
        ]

    @property
    def followers(self) -> list[str]:
        """Metapackages that go along with the kernel.

        All of them are named: apt gives up at a held one that is not.
        """
        images = [f"linux-image-{suffix}" for suffix in self.series]
        image = next((name for name in images if name in self.packages), images[-1])
        headers = image.replace("-image-", "-headers-")
        compiles = self.origin.dkms and self.role["keep_build_tools"]
        installed = [name for name in self.updates if name in self.packages]
        added = [headers] if headers in self.packages or compiles else []
        return list(dict.fromkeys([image, *installed, *added]))

    @property
    def kernel_names(self) -> list[str]:
        """Packages of kernels, which are held."""
        parts = ("image", "headers", "modules", "modules-extra")
        names = [f"linux-{part}-{suffix}" for part, suffix in product(parts, [*self.kernels, *self.series])]
        return names + [f"linux-{suffix}" for suffix in self.series]

    @property
    def headers(self) -> list[str]:
        return [f"linux-headers-{kernel}" for kernel in self.kernels]

    @property
    def modules_extra(self) -> list[str]:
        """Where Ubuntu's kernels for clouds have ib_umad."""
        return [f"linux-modules-extra-{kernel}" for kernel in self.kernels] if self.nvlink5 else []

    @property
    def candidates(self) -> list[str]:
        """Packages of precompiled modules, those of the series that the installed kernel follows first."""
        if not (self.source == "distribution" and self.role.system.distribution == "Ubuntu"):
            return []
        if self.role["build"] != "precompiled":
            return []
        followed = [suffix for suffix in self.series if f"linux-image-{suffix}" in self.packages]
        ordered = list(dict.fromkeys([*followed, *self.series]))
        return precompiled_names(self.branch, self.fit.modules, ordered)

    def module(self, kernel: str) -> dict[str, Any]:
        """{version, sig_key} of the driver's module of a kernel; empty where it has none."""
        facts: dict[str, Any] = self.node["kernels"][kernel]["modules"].get(self.origin.module) or {}
        return facts

    @property
    def bad(self) -> list[str]:
        """Kernels without a module of the version."""
        return [kernel for kernel in self.kernels if self.module(kernel).get("version") != self.version]

    @property
    def unbuilt(self) -> list[str]:
        """Kernels that DKMS has no module of the version for."""
        built = [
            row["kernel"]
            for row in self.node["dkms"]
            if row["module"].startswith("nvidia")
            and row["version"].startswith(self.version)
            and row["state"] == "installed"
        ]
        return [kernel for kernel in self.kernels if kernel not in built]

    def stale(self, *, written: bool = False) -> list[str]:
        """Kernels whose initramfs is missing, or older than the settings that belong into it.

        Args:
            written: Whether these are written now.
        """
        # The initramfs has a copy of this file, which nouveau's block depends on.
        settings = self.node["files"].get(MODPROBE)
        since = settings["mtime"] if settings else 0
        return [
            kernel
            for kernel in self.kernels
            if written or (self.node["kernels"][kernel]["initramfs"] or -1) < since
        ]

    @property
    def signs(self) -> bool:
        return bool(self.role["sign"])

    @property
    def private_key(self) -> str:
        """The path of the private key: on Ubuntu that of DKMS itself."""
        # DKMS 2.8 of Ubuntu 22.04 has no setting for another path.
        ubuntus, others = "/var/lib/shim-signed/mok/MOK.priv", "/etc/gpukiln/secure-boot/module-signing.key"
        return str(self.role["private_key"] or (ubuntus if self.ubuntu else others))

    @property
    def certificate(self) -> str:
        ubuntus, others = "/var/lib/shim-signed/mok/MOK.der", "/etc/gpukiln/secure-boot/module-signing.der"
        return ubuntus if self.ubuntu else others

    @property
    def ubuntu(self) -> bool:
        return self.role.system.distribution == "Ubuntu"

    @property
    def signing_packages(self) -> list[str]:
        return ["openssl", "mokutil", *(("sbsigntool", "kmod") if self.ubuntu else ())]

    @property
    def signing_text(self) -> str:
        """DKMS's configuration with the paths of the pair."""
        return f"# {MANAGED}\nmok_signing_key={self.private_key}\nmok_certificate={self.certificate}\n"

    @property
    def exported(self) -> str:
        """Where the certificate lies for enrolment, on the machine that runs Ansible; empty where nowhere."""
        folder = self.role["certificate_dir"]
        return f"{folder}/{self.role.host}.der" if folder else ""

    @property
    def has_pair(self) -> bool:
        """Whether the pair is there, the given one where one is given, and DKMS knows of it."""
        files = self.node["files"]
        settings, key, certificate = (
            files[path] or {} for path in (DKMS_SIGNING, self.private_key, self.certificate)
        )
        given = ((key, self.role["signing_key"]), (certificate, self.role["signing_certificate"]))
        return bool(
            key
            and certificate
            and settings.get("text") == self.signing_text
            and all(not path or file["sha256"] == _sha256(path) for file, path in given)
            and (not self.exported or _sha256(self.exported) == certificate["sha256"])
            and all(name in self.packages for name in self.signing_packages)
        )

    @property
    def signer(self) -> str:
        """The certificate's serial number, as modinfo shows who signed: 3A:0B; empty where there is none."""
        answer = self.node["answers"].get("serial", {"stdout": ""})
        # openssl prints serial=3A0B.
        number = answer["stdout"].strip().partition("=")[2].upper()
        return ":".join(re.findall("..", number))

    @property
    def missigned(self) -> list[str]:
        """Kernels whose module is signed by another key, or by none."""
        if not self.signs or not self.origin.dkms:
            return []
        return [
            kernel
            for kernel in self.kernels
            if self.module(kernel)
            and self.module(kernel)["sig_key"].upper()[: len(self.signer)] != self.signer
        ]

    @property
    def repositories(self) -> list[Repository]:
        """NVIDIA's, and that of DKMS where the distribution has none."""
        system, sources = self.role.system, []
        if self.source == "nvidia":
            sources.append(Repository.of(system, "cuda", self.role["repository"]))
        if self.dkms_from_elsewhere:
            sources.append(Repository.of(system, "epel-dkms", self.role["dkms_repository"]))
        return sources

    @property
    def dkms_from_elsewhere(self) -> bool:
        # RHEL and its kin have no DKMS; EPEL has.
        distributions = self.role["dkms_repository"].get("rpm", {}).get("distributions", [])
        return (
            not self.apt
            and self.source != "preinstalled"
            and self.role.system.distribution.lower() in distributions
        )

    @property
    def in_stream(self) -> bool:
        """Whether dnf has the branch's stream enabled, where it is to."""
        # The file of dnf's own state; `dnf module list` takes seconds.
        said = (self.node["files"][STREAM_FILE] or {"text": ""})["text"].splitlines()
        return not self.origin.stream or {f"stream={self.origin.stream}", "state=enabled"} <= set(said)

    @property
    def settled(self) -> bool:
        """Whether all of it is there, so that no archive has to be asked."""
        tools = self.origin.dkms and self.role["keep_build_tools"]
        return (
            not self.role["upgrade_kernel"]
            and not self.others
            and not self.bad
            and not packages.driver_strangers(self.packages, self.version)
            and self.has_packages
            and self.in_stream
            and not any(
                plan.acts or plan.refusal
                for plan in (repository.have(self.node) for repository in self.repositories)
            )
            and (not self.signs or self.has_pair)
            and not (
                self.nvlink5
                and any(UMAD not in self.node["kernels"][kernel]["modules"] for kernel in self.kernels)
            )
            and (not tools or all(self.node["kernels"][kernel]["headers"] for kernel in self.kernels))
            and (not tools or NO_COMPILER not in self.packages)
        )

    @property
    def has_packages(self) -> bool:
        if self.source == "runfile":
            libraries = any(self.node["globs"][pattern] for pattern in libraries_of(self.version))
            return libraries and all(name in self.packages for name in INSTALLER_NEEDS)
        there = packages.driver_packages(self.packages, self.version)
        nvlink5 = self.origin.nvlink5 if self.nvlink5 else ()
        # Precompiled ones that could not be had before may have come.
        preferred = not self.candidates or bool(self.precompiled)
        return preferred and set(self.wanted) <= set(there) and all(name in self.packages for name in nvlink5)


def libraries_of(version: str) -> list[str]:
    """Where a driver's library may be, whoever installed it."""
    folders = ("/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
    return [f"{folder}/libnvidia-ml.so.{version}" for folder in folders]


def _sha256(path: str) -> str:
    """Checksum of a file on the machine that runs Ansible; empty where there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
