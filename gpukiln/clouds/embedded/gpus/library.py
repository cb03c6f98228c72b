"""Builds the double of NVML, and the environment in which a program finds it."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.gpus.state import State, append_region, rows_of
from gpukiln.errors import UnavailableError
from gpukiln.files import whole_or_not

SONAME = "libnvidia-ml.so.1"
STATE = "GPUKILN_SIMULATED_GPUS"  # names a file with a state, where it is not the library's own
FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
SOURCES = Path(__file__).with_name("nvml")


def build(folder: Path, *, branch: int) -> Path:
    """Compile the library, unless the folder has it.

    Args:
        branch: Branch of the driver whose functions it has, for example 535.

    Returns:
        The library, with an empty state at its end.

    Raises:
        UnavailableError: There is no gcc, or it refuses the sources.
    """
    sources = sorted(SOURCES.glob("*.c"))
    text = b"".join(source.read_bytes() for source in [SOURCES / "double.h", *sources])
    library = folder / hashlib.sha256(text + str(branch).encode()).hexdigest()[:16] / SONAME
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_not(library) as part:
        flags = [*FLAGS, "-shared", "-fPIC", "-fvisibility=hidden"]
        compile_c([*flags, f"-Wl,-soname,{SONAME}", f"-DDRIVER={branch}"], sources, part)
        append_region(part)
    return library


def compile_c(flags: list[str], sources: list[Path], output: Path) -> None:
    """Compile C.

    Raises:
        UnavailableError: There is no gcc, or it refuses the sources.
    """
    if shutil.which("gcc") is None:
        raise UnavailableError(
            "simulated GPUs are compiled here, and there is no gcc", hint="apt-get install gcc libc6-dev"
        )
    command = ["gcc", *flags, "-o", str(output), *map(str, sources), "-ldl", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(
            f"gcc ended with {done.returncode}",
            details=tuple(done.stderr.splitlines()[:5]),
            hint="gcc --version",
        )


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


def build_tool(folder: Path, name: str) -> Path:
    """Compile a program of the folder `tools`, unless the folder has it.

    Raises:
        UnavailableError: There is no gcc, or it refuses the source.
    """
    source = Path(__file__).with_name("tools") / f"{name}.c"
    program = folder / hashlib.sha256(source.read_bytes()).hexdigest()[:16] / name
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with whole_or_not(program) as part:
            compile_c(FLAGS, [source], part)
    return program
