"""Packs this package into one file that needs nothing but Python 3.9.

    python -m gpukiln.gpus.zipapp FILE

The same sources result in the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from gpukiln.errors import UnavailableError, UsageError
from gpukiln.files import atomic_path, write_atomic
from gpukiln.gpus.manual import completion, man_page
from gpukiln.probe.scripts import constants

PROGRAM = "gpukiln-gpu"
SHEBANG = b"#!/usr/bin/python3\n"
MAIN = "import sys\n\nfrom gpukiln.gpus.cli import main\n\nsys.exit(main())\n"
# What runs on a node, relative to gpukiln/: these modules import nothing else of the project.
PACKED_SOURCES = (
    *("__init__.py", "compatibility.py", "errors.py", "files.py", "findings.py", "options.py", "parsing.py"),
    *("redact.py", "units.py", "probe", "gpus"),
)
# Parts of packages that only a checkout needs.
EXCLUDED = (
    "probe/contact",
    "probe/recording",
    "probe/packing",
    "probe/scripts",
    "gpus/zipapp",
    "gpus/manual",
)
# NVIDIA's bindings of NVML; TOML for Python 3.9 and 3.10; YAML for MIG's configurations. Compiled parts are
# left out: they fit one Python version on one architecture.
LIBRARIES = ("pynvml", "tomli", "yaml")
MODIFIED = (1980, 1, 1, 0, 0, 0)  # the earliest time of a ZIP file; a fixed one keeps the bytes the same


def build(file: Path) -> None:
    """Write the program; processes that run the old file keep it.

    Raises:
        UnavailableError: A library is not installed.
    """
    write_atomic(file, pack(), mode=0o755)


def pack() -> bytes:
    """The program.

    Raises:
        UnavailableError: A library is not installed.
    """
    written = BytesIO()
    written.write(SHEBANG)
    # Uncompressed: the output of zlib depends on its version, and the start is not faster with it.
    with zipfile.ZipFile(written, "a", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(contents().items()):
            info = zipfile.ZipInfo(name, MODIFIED)
            info.create_system = 3  # Unix, on every system that packs it
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    return written.getvalue()


def tree(folder: Path) -> Path:
    """Create the files of a machine: the program, its man page and its completion, in a tree of folders.

    Args:
        folder: Holds a tree for each digest; an existing tree of the same sources is used.

    Returns:
        The folder that corresponds to the machine's root folder.
    """
    target = folder / digest()[:16]
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_path(target) as partial:
            for name, (content, mode) in files().items():
                file = partial / name
                file.parent.mkdir(parents=True)
                write_atomic(file, content, mode=mode)
    except OSError:
        if (
            not target.is_dir()
        ):  # else another process has created the same tree: Ansible does it for each host
            raise
    return target


def files() -> dict[str, tuple[bytes, int]]:
    """The files of a machine: content and mode by path, without the leading slash."""
    return {
        f"usr/local/bin/{PROGRAM}": (pack(), 0o755),
        f"usr/local/share/man/man1/{PROGRAM}.1": (man_page().encode(), 0o644),
        f"usr/share/bash-completion/completions/{PROGRAM}": (completion().encode(), 0o644),
    }


def digest() -> str:
    """SHA-256 of all files of a machine, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    for name, (content, _) in files().items():
        sha256.update(f"{name} {len(content)}\n".encode() + content)
    return sha256.hexdigest()


def contents() -> dict[str, bytes]:
    """The content of every file in the program, by name."""
    root = Path(__file__).resolve().parents[1]
    files_by_name = {"__main__.py": MAIN.encode()}
    for path in _own_sources(root):
        files_by_name[f"gpukiln/{path.relative_to(root)}"] = path.read_bytes()
    files_by_name["gpukiln/probe/scripts.py"] = constants().encode()
    for name in LIBRARIES:
        for path, place in _library(name):
            files_by_name[place] = path.read_bytes()
    return files_by_name


def _own_sources(root: Path) -> Iterator[Path]:
    for name in PACKED_SOURCES:
        path = root / name
        files = [path] if path.is_file() else sorted((*path.rglob("*.py"), *path.rglob("*.json")))
        for file in files:
            if not str(file.relative_to(root)).startswith(EXCLUDED):
                yield file


def _library(name: str) -> Iterator[tuple[Path, str]]:
    """The Python files of a library, and their names in the program."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise UnavailableError(f"the Python module {name} is not installed", hint="scripts/run installs it")
    folders = spec.submodule_search_locations
    if not folders:
        yield Path(spec.origin), f"{name}.py"
        return
    folder = Path(folders[0])  # spec.origin may be a compiled __init__ next to the one in Python
    for path in sorted(folder.rglob("*.py")):
        yield path, f"{name}/{path.relative_to(folder)}"


def main(argv: list[str]) -> int:
    """Write the program to the file in `argv`."""
    if len(argv) != 1:
        raise UsageError("the name of the file is missing", hint="run python -m gpukiln.gpus.zipapp FILE")
    build(Path(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
