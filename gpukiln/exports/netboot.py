"""A root file system that machines fetch over HTTP and keep in memory: kernel, initramfs, squashfs.

Debian's live-boot (live-boot(7)) fetches the squashfs, which is the image's root as it was verified, and
mounts a tmpfs over it. The machine's key and name come from cloud-init's NoCloud, over HTTP.
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
from gpukiln.files import atomic_path
from gpukiln.units import MIB

SEED = "seed"
"""The folder with cloud-init's data, which users change."""
PACKAGES = ("live-boot", "live-boot-initramfs-tools", "busybox")
SYSTEM_MIB = 1024  # the unpacked initramfs at first, then the system with what it writes to its overlay
MEMORY_STEP_MIB = 256
COMPRESSIONS = {
    # mksquashfs' default, 15, takes ten times as long and saves 8 %
    "ZSTD": ("-comp", "zstd", "-Xcompression-level", "6"),
    "XZ": ("-comp", "xz"),
    "ZLIB": ("-comp", "gzip"),
}
"""By the option of the kernel's configuration, mksquashfs' options; the fastest to unpack first."""
CLOUD_INIT = "cc:{datasource_list:[NoCloud,None]}"
"""Makes a cloud-init that is configured for EC2 alone use NoCloud. Two programs read it: cloudinit/util.py
(read_cc_from_cmdline), and tools/ds-identify, which understands neither spaces nor %5B."""
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
    """The folder that was written.

    Args:
        kernel: The kernel's version.
        memory_mib: The least memory that a machine boots with; jobs need more.
        missing_drivers: Drivers of common servers that this kernel lacks.
        files: Bytes by file name.
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
    """Write a folder from which machines boot an image's root over HTTP; the disk is only read.

    Args:
        disk: A raw disk that is not in use.
        folder: The output folder; it must not exist.
        url: Where the folder will be served, http only: busybox's wget, which fetches the root, has no TLS.
            None: the machine uses the next server of its DHCP answer, and the folder's name.
        name: The folder's name on the server, where the folder is renamed later.

    Raises:
        UsageError: The folder exists, or the address can't be used.
        IncompatibleError: The disk's system can't be booted this way; the message says why.
        UnavailableError: The mirror can't be reached, or a tool failed.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already", hint="name another folder, or remove it")
    # The address goes into iPXE's and GRUB's scripts, which would expand or end at these characters.
    if url is not None and not re.fullmatch(r"http://[^\s\"'$;]+", url):
        raise UsageError(f"a machine that boots can't fetch from {url}", hint="wanted: http://SERVER/FOLDER")
    with mounted_root(disk) as root, atomic_path(folder) as partial:
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
        for file in partial.rglob("*"):  # a web server runs as another user
            file.chmod(0o755 if file.is_dir() else 0o644)
        files = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
    return Netboot(folder, kernel.version, memory_mib, kernel.missing_drivers, files)


def needed_mib(squashfs: int) -> int:
    """The least memory that a machine boots with: it holds the squashfs and what the system writes.

    >>> needed_mib(700 << 20)
    1792
    >>> needed_mib(0)
    1280

    Args:
        squashfs: Its size in bytes.
    """
    return -(-(squashfs // MIB + 1 + SYSTEM_MIB) // MEMORY_STEP_MIB) * MEMORY_STEP_MIB


def kernel_arguments(kernel: Kernel, base: str) -> str:
    """The kernel's command line, the same for iPXE and GRUB.

    Args:
        base: Where the folder is served: an address, or a bootloader's variable.
    """
    words = (
        "boot=live",
        "nonetworking",  # no /etc/network/interfaces: the system configures its network itself
        f"fetch={base}/filesystem.squashfs",
        *kernel.arguments,  # consoles, and the arguments that keep nouveau away from the GPUs
        # Without dsmode cloud-init 22.4 fetches the seed, and then waits for a local one.
        f"ds=nocloud;dsmode=net;s={base}/seed/",
        CLOUD_INIT,
    )
    return " ".join(words)


def ipxe_script(kernel: Kernel, name: str, url: str | None) -> str:
    """The script that iPXE runs; ipxe.org/cfg documents its variables."""
    base = url or f"http://${{next-server}}/{name}"
    return (
        "#!ipxe\n"
        f"set base {base}\n"
        f"kernel ${{base}}/vmlinuz initrd=initrd.img {kernel_arguments(kernel, '${base}')}\n"
        "initrd ${base}/initrd.img\n"
        "boot\n"
    )


def grub_snippet(kernel: Kernel, name: str, url: str | None) -> str:
    """A menu entry for a GRUB that was booted from the network; GRUB manual, 16.1 documents its variables."""
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
            f"kernel {kernel.version} can't read a squashfs (CONFIG_SQUASHFS_{'|'.join(COMPRESSIONS)})",
            hint="bake the image on a base with Debian's own kernel",
        )
    command = ["mksquashfs", str(root), str(target), *compression, "-noappend", "-no-progress", "-quiet"]
    programs.tool(*command, folder=target.parent)


def _write_texts(
    root: Path, folder: Path, kernel: Kernel, name: str, url: str | None, memory_mib: int
) -> None:
    digest = sha256(folder / "filesystem.squashfs")
    # The id follows the content: cloud-init runs its once-per-instance modules again for another image.
    seed = folder / SEED
    seed.mkdir()
    (seed / "meta-data").write_text(f"instance-id: netboot-{digest[:12]}\n", encoding="utf-8")
    (seed / "user-data").write_text("#cloud-config\n{}\n", encoding="utf-8")
    (seed / "vendor-data").write_text("", encoding="utf-8")
    (folder / "boot.ipxe").write_text(ipxe_script(kernel, name, url), encoding="utf-8")
    (folder / "grub.cfg").write_text(grub_snippet(kernel, name, url), encoding="utf-8")
    (folder / "README").write_text(
        f"{image_name(root)}: serve this folder over HTTP, have machines boot boot.ipxe"
        f" or grub.cfg. Each needs at least {memory_mib} MiB of memory, which holds the root file system. Put"
        " keys into seed/user-data (cloud-init's NoCloud). /etc/gpukiln/image.json on the machine describes"
        " the image.\n",
        encoding="utf-8",
    )
    constant = [file for file in _files(folder) if file.parent == folder]  # users change the seed
    sums = "".join(f"{sha256(file)}  {file.name}\n" for file in constant)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
