"""Finds the module that modprobe would load for a GPU on each kernel, and the settings that decide it.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH110, PTH118, PTH119, PTH120, PTH123, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import glob
import gzip
import lzma
import os
import re
import subprocess
from typing import Any, BinaryIO

from gpukiln.probe.base import PATH, PCI, bus_gpus, check_output, in_container, read, run

TREES = "/lib/modules"
MODULE_NAMES = {"nvidia": "nvidia", "nvidia_uvm": "nvidia-uvm", "nvidia_modeset": "nvidia-modeset"}
# Where no GPU is on the bus, that of a Tesla T4: NVIDIA's module matches every 3D controller of NVIDIA.
MODALIAS = "pci:v000010DEd00001EB8sv000010DEsd000012A2bc03sc02i00"
MAX_DEPTH = 4  # of `install` commands that call modprobe, which may run the next one
BOOT_FILES = (
    "/boot/grub/grub.cfg",
    "/boot/grub2/grub.cfg",
    "/boot/grub2/grubenv",
    "/boot/loader/entries/*.conf",
    "/etc/kernel/cmdline",
)
# kernel-parameters.txt of the kernel: module_blacklist; modprobe(8): modprobe.blacklist.
BOOT_OPTION = re.compile(r"(?:^|[\s\"'=])(module_blacklist|modprobe\.blacklist|vfio[-_]pci\.ids)=([^\s\"']+)")
DRIVER_MODULE = re.compile(r"nvidia([-_][\w-]*)?\.ko(\.(xz|zst|gz))?")
VERSION = re.compile(rb"(?<![a-z])version=([\d.]+)\0")
# Magic numbers by which the kernel recognises a compressed initramfs: lib/decompress.c of the kernel, and
# lz4's frame format.
COMPRESSED = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ", "xz"),
    (b"\x5d\x00\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x02\x21\x4c\x18", "lz4"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"BZh", "bzip2"),
    (b"\x89LZO", "lzop"),
)


def loading() -> dict[str, Any]:
    """{modalias, kernels, copies, blacklist, softdeps, vfio_ids, boot_options, gsp_off, nova}.

    - kernels: {kernel: {nvidia, nvidia_uvm, nvidia_modeset, gpu: {files, commands, error}}}: what modprobe
      would load for each name and, as udev asks it, for the GPU with that modalias; commands are
      `install` commands of modprobe.d(5) that load no module.
    - copies: {kernel: {module: [{file, version}]}} where a tree has several of a name.
    - blacklist, softdeps, vfio_ids: of modprobe's configuration, which includes the running kernel's command
      line.
    - boot_options: {file: {option: [value]}} of the running kernel and of those that the boot loader starts.
    - gsp_off: whether an option of the module keeps it from using GSP firmware.
    - nova: whether the kernel's nova_core is loaded.
    """
    config = check_output("modprobe", "--showconfig")
    modalias = _modalias()
    releases = sorted(os.path.basename(os.path.dirname(path)) for path in glob.glob(f"{TREES}/*/kernel"))
    return {
        "modalias": modalias,
        "kernels": {
            release: {
                **{key: would_load(release, name) for key, name in MODULE_NAMES.items()},
                "gpu": would_load(release, modalias, "-b"),
            }
            for release in releases
        },
        "copies": {release: copies(release) for release in releases},
        "blacklist": sorted(set(re.findall(r"(?m)^blacklist (\S+)$", config))),
        "softdeps": re.findall(r"(?m)^softdep (nvidia\S* .*)$", config),
        "vfio_ids": [
            pair
            for values in re.findall(r"(?m)^options vfio[-_]pci .*?\bids=(\S+)", config)
            for pair in values.lower().split(",")
        ],
        "boot_options": boot_options(),
        "gsp_off": re.search(r"(?m)^options nvidia\S* .*\bNVreg_EnableGpuFirmware=0\b", config) is not None,
        "nova": os.path.exists("/sys/module/nova_core"),
    }


def _modalias() -> str:
    said = (read(f"{PCI}/{gpu['address']}/modalias") for gpu in bus_gpus())
    return next((text.strip() for text in said if text), MODALIAS)


def would_load(release: str, name: str, *options: str, depth: int = 0) -> dict[str, Any]:
    """{files, commands, error}: what modprobe would load on a kernel; see `loading`.

    modprobe runs an `install` command instead of loading the module, and most of them run modprobe again:
    Debian's turns nvidia into nvidia-current. With `alias NAME off` modprobe loads nothing and succeeds.
    """
    said = run("modprobe", "-S", release, "--show-depends", *options, name)
    if said["rc"] != 0:
        return {"files": [], "commands": [], "error": said["err"][:300] or f"exit {said['rc']}"}
    answer: dict[str, Any] = {"files": [], "commands": [], "error": None}
    for line in said["out"].splitlines():
        what, _, rest = line.strip().partition(" ")
        if what in ("insmod", "builtin"):
            answer["files"].append(rest.split(" ")[0])
        elif what == "install":
            calls = re.findall(r"modprobe((?:\s+-[-\w]+)*)\s+([\w-]+)", rest)
            loads = [(flags.split(), module) for flags, module in calls if "-r" not in flags.split()]
            if not loads or depth == MAX_DEPTH:
                answer["commands"].append(rest.strip())
            for flags, module in loads if depth < MAX_DEPTH else ():
                ignore = ("-i",) if {"-i", "--ignore-install"} & set(flags) else ()
                more = would_load(release, module, *ignore, depth=depth + 1)
                answer["files"] += more["files"]
                answer["commands"] += more["commands"]
                answer["error"] = answer["error"] or more["error"]
    return answer


def copies(release: str) -> dict[str, list[dict[str, Any]]]:
    """{module: [{file, version}]} of the driver's modules that a kernel's tree has more than once.

    depmod uses one of them, by depmod.d(5): that in `updates`, unless a file there has another order.
    """
    files: dict[str, dict[str, str]] = {}
    for folder, _, names in os.walk(f"{TREES}/{release}"):
        for name in filter(DRIVER_MODULE.fullmatch, names):
            path = os.path.join(folder, name)
            files.setdefault(name.partition(".ko")[0].replace("-", "_"), {})[os.path.realpath(path)] = path
    return {
        module: [{"file": path, "version": _version(path)} for path in sorted(paths.values())]
        for module, paths in sorted(files.items())
        if len(paths) > 1
    }


def _version(path: str) -> str | None:
    said = run("modinfo", "-F", "version", path)
    return said["out"].strip() or None


def boot_options() -> dict[str, dict[str, list[str]]]:
    """{file: {option: [value]}}: kernel options that block modules or give GPUs to vfio-pci."""
    sources = [] if in_container() else ["/proc/cmdline"]  # in a container it is the host's
    sources += [path for pattern in BOOT_FILES for path in sorted(glob.glob(pattern))]
    by_file: dict[str, dict[str, list[str]]] = {}
    for source in sources:
        for option, values in BOOT_OPTION.findall(read(source) or ""):
            known = by_file.setdefault(source, {}).setdefault(option, [])
            # grub.cfg has an entry for each kernel, most with the same options.
            known += [value for value in values.split(",") if value not in known]
    return by_file


def modules_in(image: str) -> dict[str, str | None]:
    """{file: version}: the driver's modules that an initramfs carries; null where the version can't be read.

    The format is in buffer-format.rst of the kernel's documentation: several cpio archives in
    sequence, of which the last may be compressed.
    """
    modules: dict[str, str | None] = {}
    with open(image, "rb") as file:
        while _read_archive(file, modules):
            pass
        start = file.peek(6)[:6]
        tool = next((tool for magic, tool in COMPRESSED if start.startswith(magic)), None)
        if tool is None:
            return modules
        os.lseek(file.fileno(), file.tell(), os.SEEK_SET)
        with subprocess.Popen(
            (tool, "-dc"),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": PATH},
        ) as process:
            assert process.stdout is not None  # noqa: S101 - it was asked for
            while _read_archive(process.stdout, modules):
                pass
            # The rest of the archive is not needed.
            process.kill()
    return modules


def _read_archive(stream: Any, modules: dict[str, str | None]) -> bool:
    """Add the driver's modules of the archive at this position; False where there is no archive."""
    # Archives are padded with zero bytes.
    while stream.peek(1)[:1] == b"\0":
        stream.read(1)
    if stream.peek(6)[:6] not in (b"070701", b"070702"):
        return False
    while True:
        header = stream.read(110)
        if len(header) < 110:  # truncated
            return False
        size, length = int(header[54:62], 16), int(header[94:102], 16)
        name = stream.read(length).rstrip(b"\0").decode("utf-8", "replace")
        # Header and name, and then the data, are padded to four bytes (cpio, newc).
        stream.read(-(110 + length) % 4)
        if name == "TRAILER!!!":
            return True
        driver_module = DRIVER_MODULE.fullmatch(os.path.basename(name))
        if driver_module and size:
            modules[name] = _version_of(stream.read(size), driver_module.group(3))
        else:
            _skip(stream, size)
        stream.read(-size % 4)


def _skip(stream: BinaryIO, size: int) -> None:
    while size > 0:
        got = len(stream.read(min(size, 1 << 20)))
        if not got:
            return
        size -= got


def _version_of(module: bytes, packed: str | None) -> str | None:
    """The version in a module's section .modinfo, where every text ends with a zero byte."""
    try:
        if packed == "zst":
            done = subprocess.run(
                ("zstd", "-dc"), input=module, capture_output=True, check=False, env={"PATH": PATH}
            )
            module = done.stdout
        elif packed:
            module = lzma.decompress(module) if packed == "xz" else gzip.decompress(module)
    except (OSError, lzma.LZMAError, EOFError):
        return None
    version = VERSION.search(module)
    return version.group(1).decode() if version else None
