"""Builds the stand-in nvidia-smi of machines with simulated GPUs (smi.c says what it is)."""

import shutil
import subprocess
from pathlib import Path

from gpukiln.errors import CheckFailedError, UnavailableError
from gpukiln.files import whole_or_not

NAME = "nvidia-smi"
SIGNATURE = b"gpukiln simulated nvidia-smi"  # is in the program and in what it says of itself
_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")


def build_smi(folder: Path) -> Path:
    """Compile the program into a folder that is there.

    Raises:
        UnavailableError: There is no gcc.
        CheckFailedError: gcc refuses it.
    """
    if shutil.which("gcc") is None:
        raise UnavailableError(
            f"No gcc is here, wanted to build the stand-in {NAME}", hint="apt-get install gcc libc6-dev"
        )
    program = folder / NAME
    sources = [str(path) for path in sorted(_SOURCES.glob("smi*.c"))]
    with whole_or_not(program) as partial:
        command = ["gcc", *_FLAGS, "-o", str(partial), *sources, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CheckFailedError(
                f"gcc can't build the stand-in {NAME} (status {done.returncode})",
                hint="see the compiler's messages",
                details=tuple(done.stderr.splitlines()[:20]),
            )
        partial.chmod(0o755)
    return program
