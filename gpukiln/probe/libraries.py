"""Finds every copy of the driver's libraries that a program could load, and the files that name its folder.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH110, PTH113, PTH119, PTH120, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import glob
import os
import re
from typing import Any

from gpukiln.probe.base import check_output, read

NAMES = ("libnvidia-ml.so", "libcuda.so")
LINKER_FILES = ("/etc/ld.so.conf", "/etc/ld.so.conf.d/*.conf")
# Files that set a variable for every login (pam_env(8), sh(1)) or every service (systemd-system.conf(5)).
ENVIRONMENT_FILES = (
    "/etc/environment",
    "/etc/profile",
    "/etc/profile.d/*.sh",
    "/etc/bash.bashrc",
    "/etc/bashrc",
    "/etc/security/pam_env.conf",
    "/etc/systemd/system.conf",
    "/etc/systemd/system.conf.d/*.conf",
)
# CUDA's toolkit and its package cuda-compat have libraries with the driver's names: stubs for linking,
# which fail at run time, and those of the CUDA Compatibility guide, "Forward Compatibility".
STANDS_IN = re.compile(r"/(stubs|compat)(/|$)")


def libraries() -> dict[str, list[dict[str, Any]]]:
    """{name: [{path, file, version, stands_in, named_in}]}: each copy, in the linker's order.

    path is the file that the linker opens, file the target of its links. version is null where the file's
    name has none.
    stands_in: `stub`, `compat` or null. named_in: the configuration files that
    name its folder; empty for a default folder.
    """
    cache = check_output("ldconfig", "-p")
    by_linker, by_variable = _linker_folders(), _variable_folders()
    copies: dict[str, list[dict[str, Any]]] = {}
    for name in NAMES:
        paths = [f"{folder}/{name}.1" for folder in by_variable if os.path.exists(f"{folder}/{name}.1")]
        # `ldconfig -p` lists the cache in the order in which ld.so uses it.
        paths += re.findall(rf"^\s*{re.escape(name)}\.1 .*=> (\S+)$", cache, re.M)
        copies[name] = [_copy(name, path, by_linker, by_variable) for path in dict.fromkeys(paths)]
    return copies


def _copy(name: str, path: str, *named: dict[str, list[str]]) -> dict[str, Any]:
    file, folder = os.path.realpath(path), os.path.dirname(path)
    version = re.match(rf"{re.escape(name)}\.(\d+(?:\.\d+)+)$", os.path.basename(file))
    kind = STANDS_IN.search(path) or STANDS_IN.search(file)
    return {
        "path": path,
        "file": file,
        "version": version.group(1) if version else None,
        "stands_in": {"stubs": "stub", "compat": "compat"}[kind.group(1)] if kind else None,
        "named_in": sorted({by for folders in named for by in folders.get(os.path.realpath(folder), ())}),
    }


def _linker_folders() -> dict[str, list[str]]:
    """The folders that ld.so.conf(5) adds, and which files name each."""
    folders: dict[str, list[str]] = {}
    for path in _files(LINKER_FILES):
        for line in (read(path) or "").splitlines():
            folder = line.partition("#")[0].strip()
            if folder.startswith("/"):
                folders.setdefault(os.path.realpath(folder), []).append(path)
    return folders


def _variable_folders() -> dict[str, list[str]]:
    """The folders of LD_LIBRARY_PATH as the system's files set it: they come first (ld.so(8))."""
    folders: dict[str, list[str]] = {}
    for path in _files(ENVIRONMENT_FILES):
        for line in (read(path) or "").splitlines():
            value = re.search(r"^[^#]*\bLD_LIBRARY_PATH\b(?:=|\s+DEFAULT=)(.*)", line)
            for folder in re.split(r"[:\s\"';$]+", value.group(1)) if value else ():
                if folder.startswith("/"):
                    folders.setdefault(os.path.realpath(folder), []).append(path)
    return folders


def _files(patterns: tuple[str, ...]) -> list[str]:
    return [path for pattern in patterns for path in sorted(glob.glob(pattern)) if os.path.isfile(path)]
