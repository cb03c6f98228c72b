"""The embedded cloud's double of NVML, for tests: built where there is a compiler."""

import shutil
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.gpus import library


def build(folder: Path, *, branch: int = 580) -> Path:
    """Compile the library with the functions of a driver's branch."""
    if shutil.which("gcc") is None:
        pytest.skip("missing packages: gcc libc6-dev (scripts/run installs them as root)")
    return library.build(folder, branch=branch)
