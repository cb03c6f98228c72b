"""The double of NVIDIA's NVML: builds the library, and writes the file that drives it.

    library = nvml.build(folder)
    nvml.write_spec(spec, machine)
    subprocess.run(["gpustat"], env=nvml.environment(library, spec))

`machine` is the document that gpukiln/probe/nvml.py makes, so that what was recorded on a real host
can be replayed. A GPU may have more than that document has, for programs that ask for more: `utilization`
{gpu, memory}, `fan`, `pstate`, `compute_capability`.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

SONAME = "libnvidia-ml.so.1"
SPEC = "NVML_DOUBLE_SPEC"
SOURCE = Path(__file__).with_name("nvml.c")


def build(folder: Path, *, old: bool = False) -> Path:
    """Compile the library.

    Args:
        folder: Where it goes; what loads it needs this folder in LD_LIBRARY_PATH.
        old: Leave out the functions that came after driver 535.

    Returns:
        The library.

    Raises:
        pytest.skip.Exception: There is no gcc.
        subprocess.CalledProcessError: gcc refuses it.
    """
    if shutil.which("gcc") is None:
        pytest.skip("missing packages: gcc libc6-dev (scripts/run installs them as root)")
    library = folder / SONAME
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    flags += [f"-Wl,-soname,{SONAME}", *(["-DOLD"] if old else [])]
    command = ["gcc", *flags, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def environment(library: Path, spec: Path) -> dict[str, str]:
    """Environment in which a program finds the double in place of the driver's library."""
    return {**os.environ, "LD_LIBRARY_PATH": str(library.parent), SPEC: str(spec)}


def write_spec(path: Path, machine: Mapping[str, Any], *, errors: Mapping[str, int] | None = None) -> None:
    """Write, whole or not at all, the file that drives the double.

    Args:
        path: The file.
        machine: The section `nvml` of the facts.
        errors: NVML's error number by function, or by GPU and function as `0.nvmlDeviceGetMemoryInfo`.
    """
    rows = dict(_rows("", machine))
    for name, code in (errors or {}).items():
        gpu, dot, function = name.rpartition(".")
        rows[f"gpus.{gpu}.fail.{function}" if dot else f"error.{function}"] = str(code)
    part = path.with_suffix(".part")
    part.write_text("".join(f"{key} {value}\n" for key, value in rows.items()), encoding="utf-8")
    part.replace(path)


def _rows(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Keys and values of a document, lists by position and with their length, nothing for null."""
    dot = f"{key}." if key else ""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _rows(f"{dot}{name}", inner)
    elif isinstance(value, list):
        yield f"{dot}count", str(len(value))
        for position, inner in enumerate(value):
            yield from _rows(f"{dot}{position}", inner)
    elif value is not None:
        yield key, str(int(value)) if isinstance(value, bool) else str(value).replace("\n", " ")
