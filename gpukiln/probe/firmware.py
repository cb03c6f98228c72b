"""Finds the firmware files of a kernel module, in the order in which the kernel searches.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH119, PTH120, PTH123, PTH202, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import glob
import os
import struct
from typing import Any, BinaryIO

from gpukiln.probe.base import read

CUSTOM = "/sys/module/firmware_class/parameters/path"
# fw_search_path.rst of the kernel's documentation, and the suffixes of drivers/base/firmware_loader/main.c.
FOLDERS = ("/lib/firmware/updates/{}", "/lib/firmware/updates", "/lib/firmware/{}", "/lib/firmware")
SUFFIXES = ("", ".zst", ".xz")
# The driver compares it with its own version: src/nvidia/src/kernel/gpu/gsp/kernel_gsp.c of
# NVIDIA/open-gpu-kernel-modules, GSP_VERSION_SECTION_NAME.
VERSION_SECTION = b".fwversion"
MAX_VERSION, MAX_NAMES = 64, 4096  # characters of a version, and of the names of all sections


def firmware(release: str, names: list[str]) -> list[dict[str, Any]]:
    """[{name, path, size, version, others}]: the file that a kernel would load for each name.

    path and size are null where there is none; version is that in the file, null where it is
    compressed or has none. others: the driver versions for which a file of that name exists.
    """
    # The parameter firmware_class.path has precedence over all other folders (fw_search_path.rst).
    custom = (read(CUSTOM) or "").strip()
    folders = [custom] if custom else []
    folders += [folder.format(release) for folder in FOLDERS]
    files = []
    for name in names:
        paths = (f"{folder}/{name}{suffix}" for suffix in SUFFIXES for folder in folders)
        path = next(filter(os.path.isfile, paths), None)
        base = os.path.basename(name)
        copies = [other for folder in folders for other in glob.glob(f"{folder}/nvidia/[0-9]*/{base}*")]
        files.append(
            {
                "name": name,
                "path": path,
                "size": os.path.getsize(path) if path else None,
                "version": version_in(path) if path else None,
                "others": sorted({os.path.basename(os.path.dirname(other)) for other in copies}),
            }
        )
    return files


def version_in(path: str) -> str | None:
    """The text of a file's section .fwversion, by elf(5) for 64 bits; None where it has none."""
    with open(path, "rb") as file:
        try:
            return _read_version_section(file)
        except (ValueError, OverflowError, struct.error):  # no ELF file, or a damaged one
            return None


def _read_version_section(file: BinaryIO) -> str | None:
    head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return None
    (start,) = struct.unpack_from("<Q", head, 40)
    size, count, names_at = struct.unpack_from("<HHH", head, 58)
    file.seek(start)
    table = file.read(size * count)
    sections = [struct.unpack_from("<IIQQQQ", table, size * number) for number in range(count)]
    # A damaged file: struct would read behind the table.
    if names_at >= count:
        return None
    file.seek(sections[names_at][4])
    names = file.read(min(sections[names_at][5], MAX_NAMES))
    for name, _kind, _flags, _address, offset, length in sections:
        if names[name:].partition(b"\0")[0] == VERSION_SECTION:
            file.seek(offset)
            return file.read(min(length, MAX_VERSION)).rstrip(b"\0").decode("ascii", "replace") or None
    return None
