"""An installation medium that writes an image to a disk: an ISO for CD and USB stick, BIOS and UEFI.

Its kernel is the image's own, so it sees exactly the disks that the image could start from. The initramfs
runs `installer.sh`; the image is on the medium, or is fetched over HTTP.
"""

import hashlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpukiln.disks import sparse
from gpukiln.disks.convert import compress
from gpukiln.disks.mount import mounted_root
from gpukiln.disks.table import read_table
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.exports.initramfs import Kernel, build_initramfs, image_name, read_kernel, release_of
from gpukiln.files import atomic_path, remove
from gpukiln.programs import tool

BLOCK = 4 << 20  # bytes: the unit of the map, so that a disk has hundreds of lines and not millions
PACKED = "disk.raw.zst"
PACKAGES = ("busybox", "gdisk", "zstd", "util-linux", "coreutils")
TOOLS = (
    *("/bin/dd", "/usr/bin/sha256sum", "/usr/bin/zstd", "/sbin/sgdisk", "/sbin/blkdiscard"),
    *("/sbin/blockdev", "/sbin/blkid", "/bin/mount", "/bin/umount"),
)
"""Programs that BusyBox lacks, or has with fewer options."""
# To mount the medium: a CD (sr_mod, isofs) or a USB stick, whose names need the tables of characters (nls_*).
MODULES = ("isofs", "sr_mod", "loop", "nls_utf8", "nls_ascii")
GRUB = (Path("/usr/lib/grub/i386-pc"), Path("/usr/lib/grub/x86_64-efi"))
CONSOLES = ("console=ttyS0,115200", "console=tty0")
"""The last one becomes /dev/console, where the installer asks (kernel-parameters.txt, console)."""
MENU_S = 10
BOOT = """\
# Sourced by the init of initramfs-tools in place of what mounts a root file system: initramfs-tools(7), boot=
mount_top() { :; }
mount_premount() { :; }
mount_bottom() { :; }
mountroot()
{
  wait_for_udev 10
  PATH=/gpukiln/bin:$PATH
  export PATH
  . /gpukiln/settings
  if [ -n "$url" ]; then
    configure_networking
    for server in "$IPV4DNS0" "$IPV4DNS1"; do
      case $server in ''|0.0.0.0) ;; *) echo "nameserver $server" >> /etc/resolv.conf ;; esac
    done
  fi
  sh /gpukiln/installer.sh < /dev/console > /dev/console 2>&1
  status=$?
  for word in $(cat /proc/cmdline); do
    case $word in
      gpukiln.then=poweroff) poweroff -f ;;
      gpukiln.then=reboot) [ "$status" != 0 ] || reboot -f ;;
    esac
  done
  echo "Take the medium out, then: reboot -f" > /dev/console
  while :; do setsid -c sh < /dev/console > /dev/console 2>&1; done
}
"""
HOOK = """\
#!/bin/sh
set -e
[ "$1" = prereqs ] && exit 0
. /usr/share/initramfs-tools/hook-functions
mkdir -p "$DESTDIR/gpukiln/bin"
cp /gpukiln-installer/* "$DESTDIR/gpukiln/"
for tool in {tools}; do copy_exec "$tool" "/gpukiln/bin/${{tool##*/}}"; done
manual_add_modules {modules}
"""


@dataclass(frozen=True)
class Content:
    """The parts of a raw disk that are not zero.

    Args:
        extents: Offset and length in bytes, of whole blocks.
        sha256: The digest of these bytes, in order.
    """

    extents: tuple[tuple[int, int], ...]
    sha256: str


@dataclass(frozen=True)
class Installer:
    """The medium that was written.

    Args:
        kernel: The kernel's version.
        missing_drivers: Drivers of common servers that this kernel lacks.
        sha256: The digest of the medium.
    """

    file: Path
    bytes: int
    sha256: str
    kernel: str
    missing_drivers: tuple[str, ...]


def write_installer(
    disk: Path,
    file: Path,
    *,
    url: str | None = None,
    arguments: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Installer:
    """Write a medium that writes a disk; the disk is only read.

    Args:
        disk: A raw disk that is not in use.
        file: The ISO; it must not exist.
        url: Where the disk's raw.zst will be served, http only; None: it is on the medium.
        arguments: More of the kernel's command line, for example `gpukiln.device=nvme0n1`.

    Raises:
        UsageError: The file exists, the address can't be used, or an argument is malformed.
        IncompatibleError: The disk's system has no suitable kernel; the message says why.
        UnavailableError: The mirror can't be reached, or a tool is missing or failed.
    """
    if file.exists():
        raise UsageError(f"{file} exists already", hint="name another file, or remove it")
    # installer.sh reads the address as shell text, and BusyBox's wget has no TLS.
    if url is not None and not re.fullmatch(r"http://[^\s\"'$;]+", url):
        raise UsageError(f"the installer can't fetch {url}", hint="wanted: http://SERVER/FILE.raw.zst")
    for argument in arguments:
        if not re.fullmatch(r"[\w.-]+(=[\w.,:/+-]+)?", argument):
            raise UsageError(f"{argument!r} is no argument of a kernel's command line")
    # grub-mkrescue writes a medium for the platforms that are installed, and reports none that is missing.
    for folder in GRUB:
        if not folder.is_dir():
            raise UnavailableError(
                f"{folder} is missing: the medium would not start on machines with that firmware",
                hint="run the command by scripts/run, which installs missing programs",
            )
    say("reading the disk")
    content = read_content(disk)
    with mounted_root(disk) as root, atomic_path(file) as partial:
        release = release_of(root, "the installer")
        kernel = read_kernel(root)
        tree = partial.with_name(f"{partial.name}-tree")
        try:
            say("packing the disk, making an initramfs")
            _fill(tree, root, kernel, release, disk, content, url, arguments)
            say("putting the medium together")
            tool(
                *("grub-mkrescue", "-o", str(partial), "--locales=", "--themes=", str(tree)),
                *("--", "-volid", label_of(content)),
            )
        finally:
            remove(tree)
        digest = sparse.sha256(partial)
    return Installer(file, file.stat().st_size, digest, kernel.version, kernel.missing_drivers)


def read_content(disk: Path) -> Content:
    """Find the parts of a raw disk that are not zero; holes are not read."""
    digest, extents = hashlib.sha256(), list[tuple[int, int]]()
    with disk.open("rb") as file:
        for index in sparse.blocks(file.fileno(), BLOCK):
            offset = index * BLOCK
            file.seek(offset)
            block = file.read(BLOCK)
            if block.count(0) == len(block):
                continue
            digest.update(block)
            if extents and sum(extents[-1]) == offset:
                extents[-1] = (extents[-1][0], extents[-1][1] + len(block))
            else:
                extents.append((offset, len(block)))
    return Content(tuple(extents), digest.hexdigest())


def label_of(content: Content) -> str:
    """The volume id, by which the installer finds its own medium.

    >>> label_of(Content((), "0123456789abcdef"))
    'GPUKILN_01234567'
    """
    # ISO 9660 allows A-Z, 0-9 and _ in a volume id
    return f"GPUKILN_{content.sha256[:8].upper()}"


def _fill(
    tree: Path,
    root: Path,
    kernel: Kernel,
    release: str,
    disk: Path,
    content: Content,
    url: str | None,
    arguments: Sequence[str],
) -> None:
    name = image_name(root)
    boot = tree / "boot"
    (boot / "grub").mkdir(parents=True)
    (boot / "vmlinuz").write_bytes(kernel.file.read_bytes())
    (boot / "grub/grub.cfg").write_text(grub_menu(kernel, arguments, name), encoding="utf-8")
    packed = compress(disk, tree / PACKED) if url is None else ""
    build_initramfs(
        root,
        kernel,
        release=release,
        packages=PACKAGES,
        files={
            "etc/initramfs-tools/scripts/gpukiln": BOOT,
            "etc/initramfs-tools/hooks/gpukiln": HOOK.format(
                tools=" ".join(TOOLS), modules=" ".join(MODULES)
            ),
            "gpukiln-installer/installer.sh": Path(__file__).with_name("installer.sh").read_text("utf-8"),
            "gpukiln-installer/settings": render_settings(disk, content, packed, url, name),
            "gpukiln-installer/map": render_map(content),
        },
        target=boot / "initrd.img",
    )


def render_settings(disk: Path, content: Content, packed: str, url: str | None, name: str) -> str:
    """The settings of `installer.sh`, as shell assignments.

    Args:
        packed: The SHA-256 of the packed disk on the medium.
    """
    settings = {
        "image": name,
        "raw_bytes": str(disk.stat().st_size),
        "raw_zst": PACKED,
        "zst_sha256": packed,
        "data_sha256": content.sha256,
        "table": read_table(disk).label,
        "label": label_of(content),
        "url": url or "",
    }
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items())


def render_map(content: Content) -> str:
    """The extents that `installer.sh` reads back from the disk, one a line.

    >>> render_map(Content(((0, 4194304), (8388608, 4194304)), "")).splitlines()
    ['0 4194304', '8388608 4194304']
    """
    return "".join(f"{offset} {length}\n" for offset, length in content.extents)


def grub_menu(kernel: Kernel, arguments: Sequence[str], name: str) -> str:
    """The medium's grub.cfg: the first entry asks on the image's console, the second on the other one."""
    serial, screen = CONSOLES
    # The image's last console is its /dev/console; the menu's default asks there.
    last = [word for word in kernel.arguments if word.startswith("console=")][-1:]
    entries = {"serial console": (screen, serial), "screen": (serial, screen)}
    order = sorted(entries, key=lambda title: entries[title][-1].split(",")[0] not in "".join(last))
    kept = [word for word in kernel.arguments if not word.startswith("console=")]
    # GRUB's quotes would end at a quote in the name.
    title = re.sub(r"[^\w .:+-]", "", name)
    return (
        "serial --unit=0 --speed=115200\n"
        "terminal_input console serial\nterminal_output console serial\n"
        f"set timeout={MENU_S}\n"
        + "".join(
            f"menuentry 'Write {title} to a disk of this machine ({where})' {{\n"
            f"  linux /boot/vmlinuz boot=gpukiln {' '.join((*entries[where], *kept, *arguments))}\n"
            "  initrd /boot/initrd.img\n}\n"
            for where in order
        )
    )
