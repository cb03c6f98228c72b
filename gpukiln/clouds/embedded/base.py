"""The base image that the embedded cloud publishes: Debian 12, built from this computer's mirror.

It stands for Debian's official AMI: cloud-init with the EC2 data source, systemd-networkd, SSH, user `admin`;
it has nothing for GPUs. Its kernel is that of Debian's `generic` images, because images baked here are
exported to hypervisors and bare metal, and the cloud kernel has no driver for AHCI, nor for the network cards
of most servers (linux-image-6.1.0-56-cloud-amd64, config: SATA_AHCI, E1000E, IGB, IXGBE are not set).
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpukiln.catalog.bases import EC2_CONFIG
from gpukiln.clouds.embedded.block_devices import GUEST_FILES
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.disks.build import LAYOUT, build_disk
from gpukiln.errors import BusyError, UnavailableError
from gpukiln.files import remove, remove_partial, write_atomic
from gpukiln.locks import locked
from gpukiln.programs import require_space, tool
from gpukiln.sources.mirror import install_debian, mirror_options, mirror_sources, write_file

NAME = "debian-12"
BASE_NAME = "debian-12-amd64-embedded-"  # prefix of every base image's name
# Debian 12; the name stands in URLs of the mirror.
RELEASE = "bookworm"
OWNER = "136693071363"  # Debian's AWS account, as in ami/bases.yaml
SSM_PARAMETER = "/aws/service/debian/release/12/latest/amd64"
ROOT_DEVICE = "/dev/xvda"
NEED_BYTES = 3 << 30  # bytes: its files, and the disk made of them
SIZE_GIB = 8
PACKAGES = [
    "systemd",
    "systemd-sysv",
    "systemd-resolved",
    "systemd-timesyncd",
    "libpam-systemd",
    "dbus",
    "udev",
    "kmod",
    "linux-image-amd64",
    "initramfs-tools",
    "zstd",
    "grub2-common",
    "grub-pc-bin",
    "cloud-init",
    "locales",
    "cloud-guest-utils",
    "fdisk",
    "e2fsprogs",
    "openssh-server",
    "sudo",
    "python3",
    "python3-apt",  # the public image has it through unattended-upgrades
    "ca-certificates",
    "gpg",
    "iproute2",
    "netbase",
    "procps",
]
ROOT_DISKS = (
    *("ahci", "ata_piix", "nvme", "vmd", "sd_mod", "sr_mod", "usb_storage", "uas", "xhci_pci", "ehci_pci"),
    *("virtio_pci", "virtio_blk", "virtio_scsi", "vmw_pvscsi", "hv_storvsc", "xen_blkfront"),
    *("mptspi", "mptsas", "mpt3sas", "megaraid_sas", "smartpqi", "hpsa", "aacraid"),
)
"""Drivers of the first disk in hypervisors and servers."""
# With every driver of the generic kernel (MODULES=most) an initramfs takes 17 s of processor time and 30 MB
# at each change of a module during a bake.
INITRAMFS = {
    "etc/initramfs-tools/conf.d/base-disks": "MODULES=list\n",
    "etc/initramfs-tools/hooks/base-disks": (
        "#!/bin/sh\n# Drivers of the disk that the root is on; further ones: /etc/initramfs-tools/modules.\n"
        'set -e\nif [ "${1-}" = prereqs ]; then exit 0; fi\n. /usr/share/initramfs-tools/hook-functions\n'
        f"manual_add_modules ext4 usbhid hid_generic hyperv_keyboard {' '.join(ROOT_DISKS)}\n"
    ),
}
FILES = {
    **INITRAMFS,
    "etc/cloud/cloud.cfg.d/10_embedded.cfg": (
        "system_info:\n  default_user:\n    name: admin\nlocale: C.UTF-8\nssh_deletekeys: true\n"
        # as Amazon Linux 2023; under TCG an RSA host key takes 5 s of processor time
        "ssh_genkeytypes: [ed25519, ecdsa]\n"
        # cloud-init's module for debconf of grub-pc, which is not installed, takes 3 s under TCG
        "grub_dpkg: {enabled: false}\n"
    ),
    # Descriptions of packages are 6 of the 15 MB of Debian 12 that each `apt-get update` fetches and unpacks.
    "etc/apt/apt.conf.d/90languages": 'Acquire::Languages "none";\n',
    EC2_CONFIG: (
        "# EC2's data source without a look at the firmware: a container has none.\n"
        "datasource_list: [Ec2]\n"
        "datasource:\n  Ec2:\n    strict_id: false\n    timeout: 5\n    max_wait: 30\n"
        # cloud-init also tries `instance-data.`, before there is a DNS server: 4 s of each boot
        "    metadata_urls: ['http://169.254.169.254']\n"
        "network:\n  config: disabled\n"
    ),
    "etc/systemd/network/80-dhcp.network": "[Match]\nName=en* eth*\n[Network]\nDHCP=yes\n",
    # wait for any interface: a server has network cards without a cable
    "etc/systemd/system/systemd-networkd-wait-online.service.d/any.conf": (
        "[Service]\nExecStart=\nExecStart=/lib/systemd/systemd-networkd-wait-online --any\n"
    ),
    "etc/systemd/network/99-default.link": (
        "[Match]\nOriginalName=*\n[Link]\nNamePolicy=keep\nMACAddressPolicy=persistent\n"
    ),
    "etc/default/grub": (
        "GRUB_DEFAULT=0\nGRUB_TIMEOUT=0\nGRUB_DISTRIBUTOR=Debian\nGRUB_TERMINAL='console serial'\n"
        "GRUB_SERIAL_COMMAND='serial --unit=0 --speed=115200'\n"
        "GRUB_CMDLINE_LINUX='console=tty0 console=ttyS0,115200'\n"
    ),
    "etc/hostname": "localhost\n",
    **GUEST_FILES,
}


@dataclass(frozen=True)
class BaseImage:
    """A published base image.

    Args:
        key: Hash of the recipe.
        image_id: AMI id, the same in every region.
        snapshot_id: Snapshot id, likewise.
        name: AMI name.
    """

    key: str
    image_id: str
    snapshot_id: str
    name: str


def current_base(layout: Layout) -> BaseImage:
    """The base image that this computer publishes now.

    Args:
        layout: The embedded cloud's files.

    Returns:
        Its ids; its disk may still have to be built.
    """
    # The key covers all that can change the disk, the mirror's configuration too; so a change builds a new
    # image.
    recipe = json.dumps(
        [
            PACKAGES,
            FILES,
            SIZE_GIB,
            LAYOUT,
            mirror_sources(RELEASE),
            mirror_options(),
            _read_generation(layout),
        ]
    )
    key = hashlib.sha256(recipe.encode()).hexdigest()[:17]
    return BaseImage(key, f"ami-{key}", f"snap-{key}", f"{BASE_NAME}{key[:8]}")


def is_built(layout: Layout, base: BaseImage) -> bool:
    """Whether the disk of a base image exists.

    Args:
        layout: The embedded cloud's files.

    Returns:
        True if it does.
    """
    return layout.snapshot(base.snapshot_id).exists()


def refresh(layout: Layout) -> BaseImage:
    """Publish a new base image, to be built from the mirror's present packages.

    Args:
        layout: The embedded cloud's files.

    Returns:
        The new base image, not built yet; images baked from the old one stay.
    """
    layout.create()
    check_generation(layout)
    write_atomic(layout.bases / "generation", str(_read_generation(layout) + 1))
    return current_base(layout)


def build_base(layout: Layout, base: BaseImage, *, say: Callable[[str], None] = lambda _: None) -> Path:
    """Build the disk of a base image unless it exists; a second caller waits for the first.

    Args:
        layout: The embedded cloud's files.

    Returns:
        The disk.

    Raises:
        UnavailableError: The mirror is unreachable or a tool failed; the message has the log's path.
    """
    disk = layout.snapshot(base.snapshot_id)
    with locked(layout.bases / "lock"):
        if disk.exists():
            return disk
        require_space(layout.bases, NEED_BYTES)
        log = layout.bases / f"{base.key}.log"
        with tempfile.TemporaryDirectory(prefix="base-", dir=layout.bases) as folder:
            root = Path(folder) / "root"
            say(f"installing {RELEASE} from this computer's mirror")
            sources = Path(folder) / "debian.sources"
            install_debian(
                RELEASE,
                root,
                form="directory",
                variant="apt",
                packages=PACKAGES,
                sources=sources,
                log=log,
                files=INITRAMFS,
            )
            say("packing the disk")
            _configure(root)
            build_disk(root, disk, size_gib=SIZE_GIB)
    return disk


def _configure(root: Path) -> None:
    # mmdebstrap wrote the sources of the build; the image gets those of this computer's mirror.
    for stale in (root / "etc/apt/sources.list.d").iterdir():
        stale.unlink()
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    files = {**FILES, "etc/apt/sources.list.d/debian.sources": mirror_sources(RELEASE)}
    if options := mirror_options():
        files["etc/apt/apt.conf.d/90mirror"] = "".join(f"{option};\n" for option in options)
    for name, text in files.items():
        write_file(root, name, text)
    # Each machine generates host keys of its own (cloud-init, ssh_deletekeys).
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    # Empty: systemd creates one at the first boot (machine-id(5)).
    (root / "etc/machine-id").write_text("")
    resolv = root / "etc/resolv.conf"
    resolv.unlink(missing_ok=True)
    # systemd-resolved's stub, as in Debian's cloud images.
    resolv.symlink_to("../run/systemd/resolve/stub-resolv.conf")
    for unit in ("systemd-networkd", "systemd-resolved", "systemd-timesyncd", "ssh"):
        tool("systemctl", f"--root={root}", "enable", unit)


def _read_generation(layout: Layout) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((layout.bases / "generation").read_text())
    return 0


def check_generation(layout: Layout) -> None:
    """Check the file that selects the base image: with a wrong number another image would be published.

    Raises:
        UnavailableError: The file is damaged.
    """
    file = layout.bases / "generation"
    try:
        int(file.read_text())
    except FileNotFoundError:
        if not file.is_symlink():
            return  # never refreshed
        damage = "it is a dangling link"
    except OSError as error:
        damage = error.strerror or str(error)
    except ValueError:
        damage = "it is not a number"
    else:
        return
    raise UnavailableError(
        f"{file} is damaged ({damage}): it selects the base image",
        hint="write the number of runs of `invoke cloud.refresh` into it, or remove it to start at 0",
    )


def remove_unfinished(layout: Layout) -> None:
    """Remove what a killed build of a base image left, unless a build is running.

    Args:
        layout: The cloud's files.
    """
    busy = BusyError("a base image is being built")
    with contextlib.suppress(BusyError), locked(layout.bases / "lock", busy=busy):
        for folder in layout.bases.glob("base-*"):
            remove(folder)
        remove_partial(layout.bases)
