"""Compiles the double of NVML and its tools, and says how a program finds the double."""

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
STATE = "GPUKILN_SIMULATED_GPUS"  # names a file with a state, where it is not the library's own
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")
LIBRARY_FLAGS = ("-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{SONAME}")


def build(folder: Path, *, branch: int) -> Path:
    """Compile the library, unless the folder has it.

    Args:
        branch: Branch of the driver whose functions it has, for example 535.

    Returns:
        The library, with an empty state at its end.

    Raises:
        UnavailableError: There is no gcc, or it refuses the sources.
    """
    return _compile(folder, "nvml", SONAME, *LIBRARY_FLAGS, f"-DDRIVER={branch}", state=True)


def build_smi(folder: Path) -> Path:
    """Compile the stand-in nvidia-smi, as `build`."""
    return _compile(folder, "smi", "nvidia-smi")


def build_load(folder: Path) -> Path:
    """Compile what gives a process a part of a GPU, as `build`."""
    return _compile(folder, "load", "gpukiln-gpu-load")


def _compile(folder: Path, name: str, output: str, *flags: str, state: bool = False) -> Path:
    files = sorted(Path(__file__).with_name(name).glob("*.[ch]"))
    digest = hashlib.sha256(repr(flags).encode() + b"".join(file.read_bytes() for file in files))
    binary = folder / digest.hexdigest()[:16] / output
    if binary.exists():
        return binary
    if shutil.which("gcc") is None:
        raise UnavailableError(
            "simulated GPUs are compiled here, and there is no gcc", hint="apt-get install gcc libc6-dev"
        )
    binary.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(binary) as part:
        sources = [str(file) for file in files if file.suffix == ".c"]
        command = ["gcc", *FLAGS, *flags, "-o", str(part), *sources, "-ldl", "-pthread"]
        done = programs.run(command, limit_s=COMPILE_S)
        if done.returncode:
            raise UnavailableError(
                f"gcc can't build {output}: it ended with {done.returncode}",
                details=tuple(done.stderr.decode(errors="replace").splitlines()[:10]),
                hint="gcc --version: 10 or newer",
            )
        if state:
            append_region(part)
    return binary


def write_state(path: Path, machine: Mapping[str, Any], *, errors: Mapping[str, int] | None = None) -> None:
    """Write a state to a file of its own, or to a library's.

    Args:
        path: Made where it does not exist.
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
    """Environment in which a program finds the double in place of the driver's library."""
    named = {STATE: str(state)} if state else {}
    return {**os.environ, "LD_LIBRARY_PATH": str(library.parent), **named}
