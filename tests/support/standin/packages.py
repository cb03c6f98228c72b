"""What a stand-in package is, and those of the driver under their real names (reference: NVIDIA's and
Ubuntu's package lists). A branch's packages depend on each other as tightly as the real ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SOURCE = """\
#include <linux/module.h>
MODULE_LICENSE("GPL");
MODULE_VERSION("{version}");
MODULE_DESCRIPTION("stand-in for tests");
"""
DKMS = """\
PACKAGE_NAME="nvidia"
PACKAGE_VERSION="{version}"
BUILT_MODULE_NAME[0]="nvidia"
DEST_MODULE_LOCATION[0]="/updates/dkms"
MAKE[0]="make -C ${{kernel_source_dir}} M=${{dkms_tree}}/nvidia/{version}/build modules"
AUTOINSTALL="yes"
"""
UNIT = """\
[Unit]
Description=stand-in for {name}
[Service]
ExecStart=/usr/bin/{name}
[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Package:
    """A stand-in package.

    Args:
        version: Its full version; for rpm epoch:version-release.
        depends: What it needs, in the package manager's own words.
        provides: What it also is.
        conflicts: What can't be there at the same time.
        replaces: What it takes the place of (Obsoletes of an rpm).
        files: Path to text, to {name, version, license, kernel} of a kernel module, to {link} of a symbolic
            link, or to {copy} of a file that is on the machine. Text in a folder bin or sbin is executable.
        postinst: Shell code after the installation.
        prerm: Shell code before the removal.
        component: Component of an apt archive; empty in a flat repository.
    """

    name: str
    version: str
    depends: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    files: dict[str, str | dict[str, str]] = field(default_factory=dict)
    postinst: str = ""
    prerm: str = ""
    component: str = ""


def specification(
    packages: Iterable[Package],
    modules: str | None = None,
    release: Mapping[str, str] | None = None,
    carried: Sequence[str] = (),
) -> dict[str, Any]:
    """What build.py reads.

    Args:
        modules: Module metadata of an rpm repository (modulemd documents).
        release: Fields of an apt repository's Release file: Origin, Label, Suite, Codename.
        carried: Patterns of rpm files of another repository, which keep that one's signature.

    Returns:
        Plain data.
    """
    return {
        "carried": list(carried),
        "packages": [asdict(package) for package in packages],
        "modules": modules,
        "release": dict(release or {}),
    }


def dkms_files(version: str) -> dict[str, str | dict[str, str]]:
    """A driver's source that DKMS builds in seconds."""
    folder = f"/usr/src/nvidia-{version}"
    return {
        f"{folder}/nvidia.c": SOURCE.format(version=version),
        f"{folder}/Makefile": "obj-m := nvidia.o\n",
        f"{folder}/dkms.conf": DKMS.format(version=version),
    }


def daemon(name: str) -> dict[str, str | dict[str, str]]:
    """A service that starts and waits."""
    return {
        f"/usr/bin/{name}": "#!/bin/sh\nexec sleep infinity\n",
        f"/lib/systemd/system/{name}.service": UNIT.format(name=name),
    }


def exclusive(kind: str) -> dict[str, Any]:
    """Of a kind one package at a time, as NVIDIA's branches are."""
    return {"provides": (kind,), "conflicts": (kind,), "replaces": (kind,)}


def ubuntu_archive(
    version: str, package: str, kernel: str, flavour: str, *, modules: str = ""
) -> list[Package]:
    """Ubuntu's packages of a server branch.

    Args:
        version: The driver's version, for example 535.309.01.
        package: What follows it in the packages' versions, for example 0ubuntu0.22.04.1.
        kernel: Release of the kernel that precompiled modules are for.
        modules: Driver version of the precompiled modules; empty: the same. They want the driver of theirs
            (as apt says of Canonical's: `Depends: nvidia-kernel-common-535-server (<= 535.161.08-1)`), and
            bring their kernel.
    """
    modules = modules or version
    branch = version.partition(".")[0]
    suffix, full = f"{branch}-server", f"{version}-{package}"
    common = f"nvidia-kernel-common-{suffix} (= {full})"
    libraries = (
        f"libnvidia-compute-{suffix} (= {full})",
        f"libnvidia-cfg1-{suffix} (= {full})",
        f"nvidia-compute-utils-{suffix} (= {full})",
    )
    module = {"name": "nvidia", "version": modules, "license": "NVIDIA", "kernel": kernel}
    precompiled = f"linux-modules-nvidia-{suffix}-{kernel}"
    theirs = (
        f"nvidia-kernel-common-{suffix} (>= {modules})",
        f"nvidia-kernel-common-{suffix} (<= {modules}-1)",
    )
    image = f"linux-image-{kernel} | linux-image-unsigned-{kernel}"
    return [
        Package(f"nvidia-headless-{suffix}", full, (f"nvidia-dkms-{suffix} (= {full})", *libraries)),
        Package(f"nvidia-headless-no-dkms-{suffix}", full, libraries),
        Package(
            f"nvidia-dkms-{suffix}",
            full,
            ("dkms", common),
            files=dkms_files(version),
            postinst=f"/usr/lib/dkms/common.postinst nvidia {version} /usr/share/nvidia",
            prerm=f"dkms remove -m nvidia -v {version} --all",
            **exclusive("nvidia-dkms-kernel"),
        ),
        Package(f"nvidia-kernel-common-{suffix}", full, **exclusive("nvidia-kernel-common")),
        Package(
            f"nvidia-utils-{suffix}",
            full,
            libraries[:1],
            files={"/usr/bin/nvidia-smi": "#!/bin/sh\nexit 9\n"},
            **exclusive("nvidia-utils"),
        ),
        Package(
            f"nvidia-compute-utils-{suffix}",
            full,
            libraries[:1],
            files=daemon("nvidia-persistenced"),
            **exclusive("nvidia-compute-utils"),
        ),
        Package(
            f"libnvidia-compute-{suffix}",
            full,
            files={f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}": ""},
            **exclusive("libnvidia-compute"),
        ),
        Package(f"libnvidia-cfg1-{suffix}", full, **exclusive("libnvidia-cfg1")),
        Package(f"nvidia-fabricmanager-{branch}", full, files=daemon("nvidia-fabricmanager")),
        Package(f"linux-modules-nvidia-{suffix}-{flavour}", "6.1.0-1", (precompiled, *theirs)),
        Package(
            precompiled,
            "6.1.0-1",
            (image, *theirs),
            files={f"/lib/modules/{kernel}/kernel/nvidia-{suffix}/nvidia.ko": module},
            postinst=f"depmod {kernel}",
        ),
    ]


def ubuntu_kernel(kernel: str, flavour: str, version: str) -> list[Package]:
    """What a kernel's updates come by, as on Ubuntu: linux-FLAVOUR wants its image and its headers.

    Args:
        kernel: The release that they lead to.
    """
    same = (f"linux-image-{flavour} (= {version})", f"linux-headers-{flavour} (= {version})")
    return [
        Package(f"linux-{flavour}", version, same),
        Package(f"linux-image-{flavour}", version, (f"linux-image-{kernel}",)),
        Package(f"linux-headers-{flavour}", version),
    ]


def ubuntu_image(kernel: str) -> Package:
    """A kernel that can be booted, as far as files tell."""
    files: dict[str, str | dict[str, str]] = {
        f"/boot/vmlinuz-{kernel}": "a kernel\n",
        f"/boot/config-{kernel}": "CONFIG_RD_GZIP=y\nCONFIG_RD_ZSTD=y\n",
        f"/lib/modules/{kernel}/modules.order": "",
        f"/lib/modules/{kernel}/modules.builtin": "",
    }
    return Package(f"linux-image-{kernel}", "9.2", files=files, postinst=f"depmod {kernel}")


def ubuntu_transitional(version: str, package: str, onto: str) -> list[Package]:
    """Ubuntu's packages of a branch that leads to another one (24.04: 535-server is 580-server).

    Args:
        version: The old branch's version.
        package: What follows it in the packages' versions.
        onto: The branch that they bring.
    """
    old = f"{version.partition('.')[0]}-server"
    names = ("nvidia-headless", "nvidia-kernel-common", "nvidia-utils", "nvidia-compute-utils")
    return [
        Package(f"{name}-{old}", f"{version}-{package}", (f"{name}-{onto}-server",))
        for name in (*names, "libnvidia-compute", "libnvidia-cfg1")
    ]


def cuda_apt(version: str) -> list[Package]:
    """NVIDIA's apt repository for one driver version: metapackages, and what they bring.

    Args:
        version: The driver's version.
    """
    branch = int(version.partition(".")[0])
    full = f"{version}-0ubuntu1"
    fabric = "nvidia-fabricmanager" + (f"-{branch}" if branch < 580 else "")
    common = (f"libnvidia-compute-{branch} (= {full})", f"nvidia-utils-{branch} (= {full})")
    found = [
        # The metapackage alone takes whatever release of the branch is the newest.
        Package(f"cuda-drivers-{branch}", f"{version}-1", (f"nvidia-driver-{branch} (>= {version})",)),
        Package(f"nvidia-driver-{branch}", full, (f"nvidia-dkms-{branch} (= {full})", *common)),
        Package(f"nvidia-utils-{branch}", full, common[:1], **exclusive("nvidia-utils")),
        Package(f"libnvidia-compute-{branch}", full, **exclusive("libnvidia-compute")),
        Package(fabric, f"{version}-1", files=daemon("nvidia-fabricmanager")),
    ]
    kinds = {"": "cuda-drivers"} | ({"-open": "nvidia-open"} if branch >= 550 else {})
    for kind in kinds:
        found.append(
            Package(
                f"nvidia-dkms-{branch}{kind}",
                full,
                ("dkms",),
                files=dkms_files(version),
                postinst=f"/usr/lib/dkms/common.postinst nvidia {version} /usr/share/nvidia",
                prerm=f"dkms remove -m nvidia -v {version} --all",
                **exclusive("nvidia-dkms-kernel"),
            )
        )
    if branch >= 550:
        found += [
            Package(
                f"nvidia-open-{branch}", f"{version}-1", (f"nvidia-driver-{branch}-open (>= {version})",)
            ),
            Package(f"nvidia-driver-{branch}-open", full, (f"nvidia-dkms-{branch}-open (= {full})", *common)),
        ]
    return found


MODULE_DOCUMENT = """\
---
document: modulemd
version: 2
data:
  name: nvidia-driver
  stream: "{stream}"
  version: {number}
  context: abcdefgh
  arch: x86_64
  summary: stand-in
  description: stand-in
  license: {{module: [none]}}
  artifacts:
    rpms:
{rpms}
"""


def cuda_rpm(streams: Sequence[tuple[str, str]]) -> tuple[list[Package], str]:
    """What NVIDIA's rpm repository has of the driver: nothing of the kernel's, and for RHEL no dkms.

    Args:
        streams: Pairs of stream and driver version, for example ("535-dkms", "535.309.01").

    Returns:
        The packages, and the module metadata.
    """
    packages: dict[tuple[str, str], Package] = {}
    documents = []
    for number, stream in enumerate(dict.fromkeys(name for name, _ in streams), start=1):
        versions = [version for name, version in streams if name == stream]
        own = [package for version in versions for package in _rpms(version, open_=stream.endswith("open"))]
        packages |= {(package.name, package.version): package for package in own}
        rpms = "\n".join(f"    - {package.name}-{package.version}.x86_64" for package in own)
        documents.append(MODULE_DOCUMENT.format(stream=stream, number=number, rpms=rpms))
    return [*packages.values()], "".join(documents)


def _rpms(version: str, *, open_: bool) -> list[Package]:
    branch, full = int(version.partition(".")[0]), f"3:{version}-1.el9"
    kmod = "kmod-nvidia-open-dkms" if open_ else "kmod-nvidia-latest-dkms"
    fabric = "nvidia-fabricmanager" if branch >= 580 else "nvidia-fabric-manager"
    libraries = f"nvidia-driver-cuda-libs = {full}"
    common = f"nvidia-kmod-common = {full}"
    # As NVIDIA's: for the running kernel, and a failure is not the package's.
    built = f"dkms add -m nvidia -v {version} -q || :\ndkms build -m nvidia -v {version} -q || :"
    return [
        Package(
            kmod,
            full,
            # What 575 asks for on EL9 (stackhpc/ansible-slurm-appliance, pull request 703).
            ("dkms >= 3.1.8", common),
            files=dkms_files(version),
            postinst=built,
            prerm=f"dkms remove -m nvidia -v {version} -q --all || :",
            provides=(f"nvidia-kmod = {full}",),
            conflicts=("kmod-nvidia-latest-dkms" if open_ else "kmod-nvidia-open-dkms",),
        ),
        Package("nvidia-kmod-common", full, (f"nvidia-kmod = {full}",)),
        Package(
            "nvidia-driver-cuda",
            full,
            (libraries, common),
            files={"/usr/bin/nvidia-smi": "#!/bin/sh\nexit 9\n"},
        ),
        Package("nvidia-driver-cuda-libs", full, (f"libnvidia-ml = {full}",)),
        Package("libnvidia-ml", full, files={f"/usr/lib64/libnvidia-ml.so.{version}": ""}),
        Package("nvidia-persistenced", full, files=daemon("nvidia-persistenced")),
        Package(fabric, full, files=daemon("nvidia-fabricmanager")),
    ]


RUNFILE = """\
#!/bin/sh
# Stands in for NVIDIA's installer: the options that it must be given, and what it leaves.
set -eu
case "$*" in
  *--silent*--dkms*--skip-module-load*--kernel-name=*) ;;
  *) echo "ERROR: asks questions, or loads a module: $*" >&2; exit 1 ;;
esac
for option; do case $option in --kernel-name=*) kernel=${{option#*=}} ;; esac; done
mkdir -p /usr/src/nvidia-{version}
{sources}
: >/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}
dkms install -m nvidia -v {version} -k "$kernel"
cat >/usr/bin/nvidia-uninstall <<'UNINSTALL'
#!/bin/sh
set -eu
dkms remove -m nvidia -v {version} --all
rm -r /usr/src/nvidia-{version} /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version} /usr/bin/nvidia-uninstall
UNINSTALL
chmod +x /usr/bin/nvidia-uninstall
"""


def runfile(version: str) -> str:
    """NVIDIA's installer as a shell script.

    Args:
        version: The driver's version.
    """
    sources = "\n".join(f"cat >{path} <<'SOURCE'\n{text}SOURCE" for path, text in dkms_files(version).items())
    return RUNFILE.format(version=version, sources=sources)
