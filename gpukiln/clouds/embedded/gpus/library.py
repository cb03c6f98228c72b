"""Compiles the double of NVML and its tools, and sets the environment for programs that use it."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpukiln import programs
from gpukiln.clouds.embedded.gpus.state import State, append_region, rows_of
from gpukiln.errors import UnavailableError
from gpukiln.files import atomic_path

COMPILE_S = 600.0
SONAME = "libnvidia-ml.so.1"
STATE = "GPUKILN_SIMULATED_GPUS"  # path of a file with a state, in place of the library's own
# -Werror: a warning in the double is a defect, for example a wrong size of a structure.
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")
LIBRARY_FLAGS = ("-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{SONAME}")


def build(folder: Path, *, branch: int) -> Path:
    """Compile the library, unless the folder has it.

    Args:
        branch: The driver's branch, for example 535; it decides which functions exist.

    Returns:
        The library, with an empty state at its end.

    Raises:
        UnavailableError: gcc is not installed, or fails.
    """
    return _compile(folder, "nvml", SONAME, *LIBRARY_FLAGS, f"-DDRIVER={branch}", state=True)


def build_smi(folder: Path) -> Path:
    """Compile the stand-in nvidia-smi, as `build`."""
    return _compile(folder, "smi", "nvidia-smi")


def build_load(folder: Path) -> Path:
    """Compile the program that gives a process memory and load of a GPU, as `build`."""
    return _compile(folder, "load", "gpukiln-gpu-load")


def _compile(folder: Path, name: str, output: str, *flags: str, state: bool = False) -> Path:
    files = sorted(Path(__file__).with_name(name).glob("*.[ch]"))
    # The folder is shared by machines with other branches, and by older versions of the sources.
    digest = hashlib.sha256(repr(flags).encode() + b"".join(file.read_bytes() for file in files))
    binary = folder / digest.hexdigest()[:16] / output
    if binary.exists():
        return binary
    if shutil.which("gcc") is None:
        raise UnavailableError(
            "simulated GPUs need gcc on this computer", hint="apt-get install gcc libc6-dev"
        )
    binary.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(binary) as part:
        sources = [str(file) for file in files if file.suffix == ".c"]
        command = ["gcc", *FLAGS, *flags, "-o", str(part), *sources, "-ldl", "-pthread"]
        done = programs.run(command, limit_s=COMPILE_S)
        if done.returncode:
            raise UnavailableError(
                f"gcc failed to build {output} with exit code {done.returncode}",
                details=tuple(done.stderr.decode(errors="replace").splitlines()[:10]),
                hint="gcc 10 or newer is needed: see gcc --version",
            )
        if state:
            append_region(part)
    return binary


def write_state(path: Path, machine: Mapping[str, Any], *, errors: Mapping[str, int] | None = None) -> None:
    """Write a state to a separate file, or to a library.

    Args:
        path: Created if it does not exist.
        machine: The section `nvml` of the facts, and more.
        errors: NVML's error number by function, or by GPU and function as `0.nvmlDeviceGetMemoryInfo`.
    """
    rows = dict(rows_of(machine))
    for name, code in (errors or {}).items():
        gpu, dot, function = name.rpartition(".")
        rows[f"gpus.{gpu}.fail.{function}" if dot else f"error.{function}"] = str(code)
    if not path.exists():
        append_region(path)
    State(path).write(rows)


def environment(library: Path, state: Path | None = None) -> dict[str, str]:
    """Environment in which a program loads the double in place of the driver's library."""
    named = {STATE: str(state)} if state else {}
    return {**os.environ, "LD_LIBRARY_PATH": str(library.parent), **named}
