"""A root file system that machines fetch over HTTP and keep in memory: kernel, initramfs, squashfs.

Debian's live-boot (live-boot(7)) fetches the squashfs, which is the image's root as it was proven, and lays a
tmpfs over it. What a machine needs beyond that, its key and its name, cloud-init's NoCloud fetches over HTTP.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpukiln import programs
from gpukiln.disks.mount import mounted_root
from gpukiln.disks.sparse import sha256
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.exports.initramfs import Kernel, build_initramfs, image_name, read_kernel, release_of
from gpukiln.files import whole_or_not
from gpukiln.units import MIB

SEED = "seed"
"""The folder of what cloud-init is told, which is the user's to change."""
PACKAGES = ("live-boot", "live-boot-initramfs-tools", "busybox")
SYSTEM_MIB = 1024  # the unpacked initramfs, then the system with what it writes below its overlay
MEMORY_STEP_MIB = 256
COMPRESSIONS = {
    "ZSTD": ("-comp", "zstd", "-Xcompression-level", "6"),  # 15, its default: ten times as long, 8 % less
    "XZ": ("-comp", "xz"),
    "ZLIB": ("-comp", "gzip"),
}
"""What a kernel's configuration calls them, and mksquashfs; the fastest to unpack first."""
CLOUD_INIT = "cc:{datasource_list:[NoCloud,None]}"
"""Has a cloud-init that was told to ask EC2 alone ask here. Both read it: cloudinit/util.py
(read_cc_from_cmdline), and tools/ds-identify, which knows neither spaces nor %5B."""
FSTAB = "etc/initramfs-tools/scripts/live-bottom/gpukiln"
FILES = {
    # The disk that the image's fstab names is not there; live-boot adds the line of its overlay.
    FSTAB: (
        "#!/bin/sh\n"
        '[ "$1" = prereqs ] && exit 0\n'
        "sed -i -E '/^(UUID|LABEL|PARTUUID|PARTLABEL)=/d' /root/etc/fstab\n"
    )
}


@dataclass(frozen=True)
class Netboot:
    """What was written.

    Args:
        kernel: Its version.
        memory_mib: What a machine needs at least to boot it; what jobs need comes on top.
        missing_drivers: Drivers of common servers that this kernel has not.
        files: Name -> bytes.
    """

    folder: Path
    kernel: str
    memory_mib: int
    missing_drivers: tuple[str, ...]
    files: dict[str, int]


def write_netboot(
    disk: Path,
    folder: Path,
    *,
    url: str | None = None,
    name: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Netboot:
    """Write what boots an image's root from HTTP; the disk is only read.

    Args:
        disk: A raw disk that is not in use.
        folder: What is made; it must not exist.
        url: Where the folder will be served, http only: busybox's wget fetches the root. None: the machine
            takes the server that its DHCP names as the next one, and the folder's name.
        name: What the folder will be called there, where it gets another name later.

    Raises:
        UsageError: The folder is there, or the address can't be used.
        IncompatibleError: The disk's system can't be booted so; the message says why.
        UnavailableError: The mirror can't be reached, or a tool failed.
    """
    if folder.exists():
        raise UsageError(f"{folder} is there already", hint="name another folder, or remove it")
    if url is not None and not re.fullmatch(r"http://[^\s\"'$;]+", url):
        raise UsageError(
            f"{url} can't be fetched from while a machine boots", hint="wanted: http://SERVER/FOLDER"
        )
    with mounted_root(disk) as root, whole_or_not(folder) as partial:
        release = release_of(root, "netboot")
        kernel = read_kernel(root)
        partial.mkdir(mode=0o755)
        say(f"making an initramfs of {kernel.version} with {PACKAGES[0]}")
        build_initramfs(
            root, kernel, release=release, packages=PACKAGES, files=FILES, target=partial / "initrd.img"
        )
        (partial / "vmlinuz").write_bytes(kernel.file.read_bytes())
        say("packing the root file system")
        _squash(root, kernel, partial / "filesystem.squashfs")
        memory_mib = needed_mib((partial / "filesystem.squashfs").stat().st_size)
        _write_texts(root, partial, kernel, name or folder.name, url, memory_mib)
        for file in partial.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        files = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
    return Netboot(folder, kernel.version, memory_mib, kernel.missing_drivers, files)


def needed_mib(squashfs: int) -> int:
    """The memory with which a machine boots: the squashfs lies in it, and so does what the system writes.

    Args:
        squashfs: Its bytes.
    """
    return -(-(squashfs // MIB + 1 + SYSTEM_MIB) // MEMORY_STEP_MIB) * MEMORY_STEP_MIB


def kernel_arguments(kernel: Kernel, base: str) -> str:
    """What the kernel is told, in the one line that iPXE and GRUB share.

    Args:
        base: Where the folder is served: an address, or a bootloader's variable.
    """
    words = (
        "boot=live",
        "nonetworking",  # no /etc/network/interfaces: the system configures its network itself
        f"fetch={base}/filesystem.squashfs",
        *kernel.arguments,  # consoles, and whatever keeps nouveau away from the GPUs
        # without dsmode cloud-init 22.4 fetches the seed and then waits for one without a network
        f"ds=nocloud;dsmode=net;s={base}/seed/",
        CLOUD_INIT,
    )
    return " ".join(words)


def ipxe_script(kernel: Kernel, name: str, url: str | None) -> str:
    """The script that iPXE runs; its variables: ipxe.org/cfg."""
    base = url or f"http://${{next-server}}/{name}"
    return (
        "#!ipxe\n"
        f"set base {base}\n"
        f"kernel ${{base}}/vmlinuz initrd=initrd.img {kernel_arguments(kernel, '${base}')}\n"
        "initrd ${base}/initrd.img\n"
        "boot\n"
    )


def grub_snippet(kernel: Kernel, name: str, url: str | None) -> str:
    """A menu entry of a GRUB that was itself booted from the network; its variables: GRUB manual, 16.1."""
    server, _, path = (url or f"http://$net_default_server/{name}").removeprefix("http://").partition("/")
    files = f"(http,{server})/{path}".rstrip("/")
    arguments = " ".join(f'"{word}"' for word in kernel_arguments(kernel, "$base").split())
    return (
        "menuentry 'gpukiln' {\n"
        f"  set base=http://{server}/{path}\n"
        f"  linux {files}/vmlinuz {arguments}\n"
        f"  initrd {files}/initrd.img\n"
        "}\n"
    )


def _squash(root: Path, kernel: Kernel, target: Path) -> None:
    config = (root / f"boot/config-{kernel.version}").read_text(encoding="utf-8")
    compression = next(
        (words for option, words in COMPRESSIONS.items() if f"CONFIG_SQUASHFS_{option}=y" in config), None
    )
    if compression is None:
        raise IncompatibleError(
            f"kernel {kernel.version} unpacks no squashfs (CONFIG_SQUASHFS_{'|'.join(COMPRESSIONS)})",
            hint="bake the image on a base with Debian's own kernel",
        )
    command = ["mksquashfs", str(root), str(target), *compression, "-noappend", "-no-progress", "-quiet"]
    programs.tool(*command, folder=target.parent)


def _write_texts(
    root: Path, folder: Path, kernel: Kernel, name: str, url: str | None, memory_mib: int
) -> None:
    digest = sha256(folder / "filesystem.squashfs")
    seed = folder / SEED
    seed.mkdir()
    (seed / "meta-data").write_text(f"instance-id: netboot-{digest[:12]}\n", encoding="utf-8")
    (seed / "user-data").write_text("#cloud-config\n{}\n", encoding="utf-8")
    (seed / "vendor-data").write_text("", encoding="utf-8")
    (folder / "boot.ipxe").write_text(ipxe_script(kernel, name, url), encoding="utf-8")
    (folder / "grub.cfg").write_text(grub_snippet(kernel, name, url), encoding="utf-8")
    (folder / "README").write_text(
        f"{image_name(root)}: serve this folder over HTTP, have machines boot boot.ipxe"
        f" or grub.cfg; {memory_mib} MiB of memory at least, for the root lies in it; put keys into"
        " seed/user-data (cloud-init's NoCloud); /etc/gpukiln/image.json on the machine says what it is.\n",
        encoding="utf-8",
    )
    constant = [file for file in _files(folder) if file.parent == folder]  # the seed is the user's
    sums = "".join(f"{sha256(file)}  {file.name}\n" for file in constant)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
