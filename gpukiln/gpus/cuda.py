"""CUDA installations of this machine, and whether its driver runs each."""

from __future__ import annotations

import glob
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln import compatibility
from gpukiln.compatibility import MINOR_VERSION, version_key
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.gpus.facts import facts
from gpukiln.parsing import parse_json

NATIVE, LIMITS, COMPAT, NO, UNKNOWN = "runs", "runs-with-limits", "needs-compat", "no", "unknown"
ANSWERS = {
    compatibility.NATIVE: NATIVE,
    MINOR_VERSION: LIMITS,
    compatibility.FORWARD_COMPAT: COMPAT,
    compatibility.NO: NO,
}
QUERY_S = 30.0  # for one program: nvcc, a Python, a container engine
TOOLKIT_PATTERN = "/usr/local/cuda*"
# Runs in the other interpreter, which may be any Python with importlib.metadata (3.8 and later).
LIST_WHEELS = """
import importlib.metadata as metadata, json
print(json.dumps([[d.metadata["Name"], d.version] for d in metadata.distributions()]))
"""
# The version of this wheel is CUDA's; other wheels name in their version the CUDA that built them.
RUNTIME_WHEEL = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
CUDNN_WHEEL = re.compile(r"nvidia-cudnn-cu(?P<major>\d+)")
BUILT_WITH = re.compile(r"\+cu(?P<digits>\d{3})$")  # torch 2.4.0+cu121


@dataclass(frozen=True)
class DriverSupport:
    """Whether a driver runs what was built with a CUDA version.

    Args:
        word: runs; runs-with-limits (minor-version compatibility: nothing that is compiled at run time);
            needs-compat (it needs a forward-compatibility package, on data-centre boards); no; unknown.
        why: The versions that were compared.
        package: The forward-compatibility package that makes it run; null where none does or none is needed.
    """

    word: str
    why: str
    package: str | None


@dataclass(frozen=True)
class CudaInstallation:
    """A CUDA installation.

    Args:
        kind: toolkit, wheel, image or compat.
        name: Of the package, image or folder.
        where: Its path; of a wheel the Python interpreter; of an image the container engine.
        cuda: The CUDA version; null where the installation does not name it.
        more: What else it contains, such as cuDNN's version.
    """

    kind: str
    name: str
    where: str
    cuda: str | None
    verdict: DriverSupport
    more: str


def check_driver(cuda: str | None, driver: str | None, others: Sequence[str] = ()) -> DriverSupport:
    """Whether a driver runs what was built with a CUDA version.

    >>> check_driver("12.1", "530.30.02").word
    'runs'
    >>> check_driver("13.0", "535.309.01", ["NVIDIA GeForce RTX 4090"]).word
    'no'

    Args:
        cuda: For example 12.1 or 12.1.1.
        driver: The driver's version.
        others: As `not_data_center` returns them.
    """
    if cuda is None:
        return DriverSupport(UNKNOWN, "it does not name its CUDA version", None)
    if driver is None:
        return DriverSupport(UNKNOWN, "there is no driver", None)
    needed = compatibility.required_drivers(cuda, facts()["cuda"]["toolkits"], facts()["cuda"]["floors"])
    if needed is None:
        return DriverSupport(UNKNOWN, f"the catalogue has no CUDA {cuda}", None)
    answer = compatibility.driver_support(cuda, needed, driver, others)
    why = f"{answer.message}; {answer.limits}" if answer.way == MINOR_VERSION else answer.message
    return DriverSupport(ANSWERS[answer.way], why, answer.package)


def compilers(cuda: str, architecture: str) -> str | None:
    """The CUDA versions that compile for an architecture, in words; None where this version does."""
    row = facts()["architectures"].get(architecture)
    return compatibility.compilers(cuda, row["first_cuda"], row["last_cuda"]) if row else None


def toolkits(pattern: str = TOOLKIT_PATTERN) -> list[tuple[str, str, str | None]]:
    """Toolkits in /usr/local, and the compiler on PATH: [name, path, CUDA version]."""
    rows: dict[str, tuple[str, str, str | None]] = {}
    for place in sorted(glob.glob(pattern)):  # noqa: PTH207 - the pattern is a whole path
        root = Path(place).resolve()
        if (version := _version_of(root)) and str(root) not in rows:
            rows[str(root)] = (root.name, str(root), version)
    if nvcc := shutil.which("nvcc"):
        # /usr/local/cuda is a link to one of the toolkits above: the same root is listed once.
        root = Path(nvcc).resolve().parents[1]
        output = _output_of([nvcc, "--version"])
        release = re.search(r"release (\d+\.\d+)", output)
        rows.setdefault(str(root), ("nvcc", nvcc, release[1] if release else None))
    return list(rows.values())


def _version_of(root: Path) -> str | None:
    """The CUDA version of a toolkit's folder: in version.json from 11.1 on, in version.txt before."""
    try:
        return str(parse_json((root / "version.json").read_text(encoding="utf-8"))["cuda"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        match = re.search(
            r"CUDA Version (\d+\.\d+(?:\.\d+)?)", (root / "version.txt").read_text(encoding="utf-8")
        )
    except OSError:
        return None
    return match[1] if match else None


def compat_libraries(pattern: str = f"{TOOLKIT_PATTERN}/compat/libcuda.so.*.*") -> list[str]:
    """Paths of the libcuda that forward-compatibility packages contain."""
    return sorted({str(Path(path).resolve()) for path in glob.glob(pattern)})  # noqa: PTH207


def wheels(python: str) -> list[tuple[str, str | None, str]]:
    """CUDA's wheels of a Python interpreter: [name and version, CUDA version, what else there is].

    Raises:
        UsageError: The file is not a Python interpreter.
    """
    try:
        listed = parse_json(_output_of([python, "-c", LIST_WHEELS]))
    except (ValueError, UnavailableError) as error:
        raise UsageError(
            f"--python {python} is not a working Python interpreter: {error}",
            hint="pass the path of its file",
        ) from None
    # The normal form of names, PEP 503: metadata has nvidia_cuda_runtime_cu12 too.
    names = {re.sub(r"[-_.]+", "-", str(name)).lower(): str(version) for name, version in listed if name}
    cudnn = next((f"cuDNN {names[name]}" for name in names if CUDNN_WHEEL.fullmatch(name)), "")
    rows: list[tuple[str, str | None, str]] = []
    for name, version in sorted(names.items()):
        if RUNTIME_WHEEL.fullmatch(name):
            rows.append((f"{name} {version}", ".".join(version.split(".")[:2]), cudnn))
        elif built := BUILT_WITH.search(version):
            digits = built["digits"]
            rows.append((f"{name} {version}", f"{digits[:-1]}.{digits[-1]}", cudnn))
    return rows


def images(engine: str, names: Sequence[str] = ()) -> list[tuple[str, str | None]]:
    """Images of an engine that name a CUDA version: [name, CUDA version]; the named images, or all.

    Raises:
        UnavailableError: The engine does not answer, or does not have a named image.
    """
    # An image with several tags is listed once for each of them.
    listed = list(names) or sorted(set(_output_of([engine, "images", "--quiet", "--no-trunc"]).split()))
    if not listed:
        return []
    rows = []
    for image in parse_json(_output_of([engine, "image", "inspect", *listed])):
        settings = dict(pair.partition("=")[::2] for pair in (image.get("Config") or {}).get("Env") or ())
        cuda = image_cuda(settings)
        if cuda or names:
            tags = image.get("RepoTags") or [str(image.get("Id", ""))[:19]]
            rows.append((str(tags[0]), cuda))
    return rows


def image_cuda(settings: dict[str, str]) -> str | None:
    """The CUDA version in an image's environment, which NVIDIA's images set.

    >>> image_cuda({"CUDA_VERSION": "12.1.1"})
    '12.1.1'
    >>> image_cuda({"NVIDIA_REQUIRE_CUDA": "cuda>=11.8 brand=tesla,driver>=450"})
    '11.8'
    """
    if match := re.match(r"\d+\.\d+(?:\.\d+)?", settings.get("CUDA_VERSION", "")):
        return match[0]
    required = re.search(r"cuda>=(\d+\.\d+)", settings.get("NVIDIA_REQUIRE_CUDA", ""))
    return required[1] if required else None


def _output_of(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except OSError as error:
        raise UnavailableError(f"{argv[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{argv[0]} does not answer within {QUERY_S:.0f} s") from None
    if done.returncode != 0:
        raise UnavailableError(
            f"{' '.join(argv[:3])}: {' '.join((done.stderr or done.stdout).split())[-200:]}"
        )
    return done.stdout


def find_installations(
    driver: str | None, others: Sequence[str] = (), *, python: str = "", image: Sequence[str] = ()
) -> tuple[list[CudaInstallation], list[str]]:
    """Every CUDA installation of this machine with its verdict, and what could not be examined.

    Args:
        others: As `not_data_center` returns them.
        python: The interpreter whose wheels are listed; empty for the one on PATH.
        image: Only these images, in place of everything.
    """
    rows: list[CudaInstallation] = []
    missing: list[str] = []

    def add(kind: str, name: str, where: str, cuda: str | None, more: str = "") -> None:
        rows.append(CudaInstallation(kind, name, where, cuda, check_driver(cuda, driver, others), more))

    if not image:
        for name, path, version in toolkits():
            add("toolkit", name, path, version)
        for path in compat_libraries():
            brought = Path(path).name.partition(".so.")[2]
            why = f"contains driver {brought}"
            newer = driver is not None and version_key(brought) > version_key(driver)
            # A package with an older driver than the machine's is of no use; consumer boards can't use any
            # (CUDA Compatibility, chapter Forward Compatibility).
            word = UNKNOWN if driver is None else NATIVE if newer and not others else NO
            text = why if newer or driver is None else f"{why}, but the machine's {driver} is not older"
            rows.append(
                CudaInstallation("compat", Path(path).name, path, None, DriverSupport(word, text, None), "")
            )
        interpreter = python or shutil.which("python3")
        if interpreter:
            for name, version, more in wheels(interpreter):
                add("wheel", name, interpreter, version, more)
    seen = set()
    for engine in ("docker", "podman"):
        if shutil.which(engine) is None:
            continue
        try:
            for name, version in images(engine, image):
                add("image", name, engine, version)
                seen.add(name)
        except UnavailableError as error:
            missing.append(f"images of {engine}: {error.message}")
    if image and not seen:
        raise UsageError(
            f"--image {', '.join(image)}: no container engine of this machine has it",
            details=tuple(missing),
            hint="pull the image first: docker pull IMAGE",
        )
    return rows, missing


def print_not_examined(lines: Sequence[str]) -> None:
    """Print to standard error what could not be examined."""
    for line in lines:
        print(f"not examined: {line}", file=sys.stderr)


def not_data_center(names: Sequence[Any]) -> tuple[str, ...]:
    """Those names that are not of data-centre boards.

    >>> not_data_center(["NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090"])
    ('NVIDIA GeForce RTX 4090',)
    >>> not_data_center(["Tesla T4"])
    ()
    """
    # The catalogue has no consumer boards, which forward compatibility does not support (CUDA Compatibility,
    # chapter Forward Compatibility).
    rows = [str(row["name"]).lower() for row in facts()["gpus"].values() if not row["data_center"]]
    others = (*rows, "geforce", "titan")
    return tuple(str(name) for name in names if any(other in str(name or "").lower() for other in others))
