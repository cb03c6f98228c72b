"""Environments for machine learning: chosen by the driver, started on leased GPUs, proven before use.

An environment is a container of a pinned image, or a virtual environment of wheels. Both are proven twice: by
the suite's compute check, and by the framework's own count of its GPUs. What fails is taken away again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpukiln.compatibility import version_key
from gpukiln.errors import CheckFailedError, IncompatibleError, UnavailableError, UsageError
from gpukiln.gpus.cuda import LIMITS, NATIVE, DriverSupport, check_driver, compilers, not_data_center
from gpukiln.gpus.engines import LABEL, arguments, injection_method, read_engine
from gpukiln.gpus.facts import facts
from gpukiln.gpus.leases import LeaseGrant
from gpukiln.gpus.model import Device
from gpukiln.gpus.store import boot_clock
from gpukiln.parsing import parse_json

IMAGE, WHEELS = "image", "wheels"
PULL_S, VERIFY_S, INSTALL_S = 3600.0, 900.0, 3600.0
PROGRAM_IN_CONTAINER = "/gpukiln-gpu"  # where a container has this program
# How each framework counts its GPUs.
GPU_COUNT_CODE = {
    "pytorch": "import torch; print(torch.cuda.device_count())",
    "tensorflow": "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))",
    "jax": "import jax; print(sum(d.platform == 'gpu' for d in jax.devices()))",
}


@dataclass(frozen=True)
class EnvironmentChoice:
    """An environment that runs on this machine.

    Args:
        kind: image or wheels.
        cuda: The CUDA version that it was built with.
        image: With its digest; null for wheels.
        wheels: As pip takes them; empty for an image.
        verdict: Why it runs here.
    """

    framework: str
    version: str
    kind: str
    cuda: str
    image: str | None
    wheels: tuple[str, ...]
    verdict: DriverSupport


def choose(
    framework: str, kind: str, cuda: str, driver: str | None, gpus: Sequence[Device]
) -> EnvironmentChoice:
    """The environment of a framework for this machine: the first that runs without limits, else with them.

    Args:
        kind: image or wheels.
        cuda: A CUDA version, or auto.
        driver: The machine's.
        gpus: Those that it could get.

    Raises:
        UsageError: The framework is unknown.
        IncompatibleError: None runs here; says why of each.
    """
    table = facts()["environments"]
    if framework not in table:
        raise UsageError(f"--framework {framework!r}", hint=f"there are {', '.join(table)}")
    others = not_data_center([gpu.name for gpu in gpus])
    architectures = sorted({gpu.architecture for gpu in gpus if gpu.architecture})
    able: list[EnvironmentChoice] = []
    refused: list[str] = []
    for row in table[framework]:
        said = f"{framework} {row['version']} (CUDA {row['cuda']})"
        if not (row["image"] if kind == IMAGE else row["wheels"]):
            refused.append(f"{said}: there is no {kind}")
            continue
        if cuda not in ("auto", row["cuda"]):
            refused.append(f"{said}: wanted CUDA {cuda}")
            continue
        support = check_driver(row["cuda"], driver, others)
        old = driver is not None and version_key(driver) < version_key(row["least_driver"])
        if support.word not in (NATIVE, LIMITS) or old:
            refused.append(f"{said}: {support.why}")
            continue
        needed = ((name, compilers(row["cuda"], name)) for name in architectures)
        if why := next((f"{name} wants {needed_cuda}" for name, needed_cuda in needed if needed_cuda), ""):
            refused.append(f"{said}: {why}")
            continue
        image = f"{row['image'].rpartition(':')[0]}@{row['digest']}" if kind == IMAGE else None
        wheels = tuple(row["wheels"]) if kind == WHEELS else ()
        able.append(EnvironmentChoice(framework, row["version"], kind, row["cuda"], image, wheels, support))
    if not able:
        raise IncompatibleError(
            f"no {kind} of {framework} runs on this machine",
            details=tuple(refused),
            hint=("--wheels takes wheels" if kind == IMAGE else "without --wheels it takes an image")
            + "; a newer driver runs more",
        )
    return min(able, key=lambda choice: choice.verdict.word != NATIVE)  # of equals the first


@dataclass(frozen=True)
class StartedEnvironment:
    """An environment that was proven.

    Args:
        name: Of the container, or the folder of the virtual environment.
        enter: The command line that leads into it.
        end: The command line that gives its GPUs back; a virtual environment's folder stays.
        evidence: What was shown, a line each.
    """

    name: str
    enter: tuple[str, ...]
    end: tuple[str, ...]
    evidence: tuple[str, ...]


@contextmanager
def program_file() -> Iterator[Path]:
    """This program as one file: itself on a node, packed anew in a checkout."""
    own = Path(sys.argv[0])
    if zipfile.is_zipfile(own):
        yield own.resolve()
        return
    from gpukiln.gpus import zipapp  # noqa: PLC0415 - not in the one file

    with tempfile.TemporaryDirectory() as folder:
        zipapp.build(Path(folder) / zipapp.PROGRAM)
        yield Path(folder) / zipapp.PROGRAM


def start_container(
    choice: EnvironmentChoice, granted: LeaseGrant, engine: str, say: Callable[[str], None]
) -> StartedEnvironment:
    """Start a container on leased GPUs and prove it; nothing of it is left where that fails.

    Raises:
        UnavailableError: The engine can't give GPUs, or has no such image.
        CheckFailedError: It does not compute.
    """
    name = f"gpukiln-{granted.lease.id.lower()}"
    ends = granted.lease.ends_boot
    # It ends with its first process, and all that was entered with it: so a deadline is kept.
    lasts = "infinity" if ends is None else f"{max(ends - boot_clock(), 0):.0f}"
    given = arguments(granted.uuids, engine, by=injection_method(read_engine(engine), granted.uuids))
    if not _succeeds([engine, "image", "inspect", str(choice.image)]):
        say(f"pulling {choice.image}")
        _run([engine, "pull", "--quiet", str(choice.image)], PULL_S)
    with program_file() as file:
        try:  # an engine that can't start a container leaves it there
            _run(
                [
                    *(engine, "run", "--detach", "--name", name, "--label", f"{LABEL}={granted.lease.id}"),
                    # PyTorch's loaders share memory, pinned memory is locked (PyTorch, README, Docker Image).
                    *("--ipc", "host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
                    *("--entrypoint", "sleep", *given, str(choice.image), lasts),
                ],
                PULL_S,
            )
            _run([engine, "cp", str(file), f"{name}:{PROGRAM_IN_CONTAINER}"], VERIFY_S)
            inside = [engine, "exec", name, "python3"]
            evidence = verify(
                choice, len(granted.uuids), inside, [*inside, PROGRAM_IN_CONTAINER], {**os.environ}
            )
        except BaseException:
            subprocess.run([engine, "rm", "--force", name], capture_output=True, check=False)
            raise
    return StartedEnvironment(
        name, (engine, "exec", "-it", name, "bash"), (engine, "rm", "--force", name), evidence
    )


def start_wheels(
    choice: EnvironmentChoice, granted: LeaseGrant, folder: Path, say: Callable[[str], None]
) -> StartedEnvironment:
    """Make a virtual environment, prove it on leased GPUs; nothing of it is left where that fails.

    Raises:
        UsageError: The folder is there.
        UnavailableError: The wheels can't be had.
        CheckFailedError: It does not compute.
    """
    if folder.exists():
        raise UsageError(f"{folder} is there", hint="--folder names one that is not, or remove it")
    python = str(folder / "bin/python3")
    try:
        maker = "python3" if zipfile.is_zipfile(sys.argv[0]) else sys.executable
        _run([maker, "-m", "venv", str(folder)], VERIFY_S)
        say(f"installing {' '.join(choice.wheels)}")
        _run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *choice.wheels],
            INSTALL_S,
        )
        with program_file() as file:
            environment = {**os.environ, **granted.environment}
            evidence = verify(choice, len(granted.uuids), [python], [python, str(file)], environment)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    enter = ("gpukiln-gpu", "run", "--lease", granted.lease.id, "--", python)
    return StartedEnvironment(str(folder), enter, ("gpukiln-gpu", "release", granted.lease.id), evidence)


def verify(
    choice: EnvironmentChoice,
    count: int,
    python: Sequence[str],
    gpukiln_gpu: Sequence[str],
    environment: dict[str, str],
) -> tuple[str, ...]:
    """Show that an environment computes on its GPUs; returns what was shown.

    Args:
        count: GPUs that it was given.
        python: The beginning of a command line that runs its Python.
        gpukiln_gpu: The beginning of one that runs this program in it.

    Raises:
        CheckFailedError: It does not.
    """
    done = _query([*gpukiln_gpu, "compute", "--json"], environment)
    try:
        document = parse_json(done.stdout)
        [node] = document["nodes"]
    except (ValueError, KeyError):
        raise _verification_error(
            choice, "the suite's compute check did not run", done.stderr or done.stdout
        ) from None
    if done.returncode != 0:
        problems = node["problems"] or ["no GPU computed"]
        raise _verification_error(choice, "the suite's compute check fails", "\n".join(problems))
    counted = _query([*python, "-c", GPU_COUNT_CODE[choice.framework]], environment)
    seen = counted.stdout.split()[-1:] if counted.returncode == 0 else []
    if seen != [str(count)]:
        text = f"{choice.framework} counts {seen[0] if seen else 'none'} of {count} GPUs"
        raise _verification_error(choice, text, counted.stderr)
    names = ", ".join(gpu["name"] for gpu in node["gpus"])
    return (f"computes on {names}", f"{choice.framework} {choice.version} counts {count} of {count} GPUs")


def _verification_error(choice: EnvironmentChoice, why: str, said: str) -> CheckFailedError:
    return CheckFailedError(
        f"{choice.framework} {choice.version} is not proven, and was taken away: {why}",
        details=tuple(said.strip().splitlines()[-8:]),
        hint="`gpukiln-gpu health` and `cuda` say how machine and driver are",
    )


def _query(argv: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv), env=environment, capture_output=True, text=True, timeout=VERIFY_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(list(argv), 124, "", f"no answer in {VERIFY_S:.0f} s")


def _succeeds(argv: Sequence[str]) -> bool:
    return subprocess.run(list(argv), capture_output=True, check=False).returncode == 0


def _run(argv: Sequence[str], limit_s: float) -> None:
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{argv[0]} {argv[1]}: {error}") from error
    if done.returncode != 0:
        lines = tuple((done.stderr or done.stdout).strip().splitlines()[-5:])
        # Its daemon looks for NVIDIA's hook on its PATH when it starts (moby, daemon/nvidia_linux.go).
        blind = any("could not select device driver" in line for line in lines)
        raise UnavailableError(
            f"{' '.join(argv[:4])} ... exits {done.returncode}",
            details=lines,
            hint="restart docker: its daemon started before NVIDIA's toolkit was there" if blind else "",
        )
