"""The embedded cloud's double of NVML, for tests: built where there is a compiler."""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.gpus import library


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """What this process has compiled; removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="gpukiln-nvml-")


@functools.cache
def _compiled(branch: int) -> Path:
    return library.build(Path(_folder().name), branch=branch)


def build(folder: Path, *, branch: int = 580) -> Path:
    """A copy of the library with the functions of a driver's branch: its state is at its end, and is its own.

    A compilation takes a second of a processor, so a process compiles each branch once.
    """
    if shutil.which("gcc") is None:
        pytest.skip("missing packages: gcc libc6-dev (scripts/run installs them as root)")
    compiled = _compiled(branch)
    binary = folder / compiled.parent.name / compiled.name
    if not binary.exists():
        binary.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(compiled, binary)
    return binary
