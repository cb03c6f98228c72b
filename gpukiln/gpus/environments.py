"""Environments for machine learning: selected for the driver, started on leased GPUs, verified before use.

An environment is a container of a pinned image, or a virtual environment of wheels. Two checks verify both:
the compute check of the host suite, and the framework's own count of its GPUs. gpukiln removes an environment
that fails.
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
# Images and wheels of these frameworks have several GB.
PULL_S, VERIFY_S, INSTALL_S = 3600.0, 900.0, 3600.0
PROGRAM_IN_CONTAINER = "/gpukiln-gpu"
# Python that prints how many GPUs each framework sees.
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
        verdict: Why it runs on this machine.
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
    """The environment of a framework for this machine: the first that runs without limits, else with limits.

    Args:
        kind: image or wheels.
        cuda: A CUDA version, or auto.
        driver: Version of the machine's driver.
        gpus: The GPUs that it may use.

    Raises:
        UsageError: The framework is unknown.
        IncompatibleError: None runs on this machine; the details have the reason for each.
    """
    table = facts()["environments"]
    if framework not in table:
        raise UsageError(f"--framework {framework!r}", hint=f"known are {', '.join(table)}")
    others = not_data_center([gpu.name for gpu in gpus])
    architectures = sorted({gpu.architecture for gpu in gpus if gpu.architecture})
    able: list[EnvironmentChoice] = []
    refused: list[str] = []
    for row in table[framework]:
        release = f"{framework} {row['version']} (CUDA {row['cuda']})"
        if not (row["image"] if kind == IMAGE else row["wheels"]):
            refused.append(f"{release}: it has no {kind}")
            continue
        if cuda not in ("auto", row["cuda"]):
            refused.append(f"{release}: wanted CUDA {cuda}")
            continue
        support = check_driver(row["cuda"], driver, others)
        old = driver is not None and version_key(driver) < version_key(row["least_driver"])
        if support.word not in (NATIVE, LIMITS) or old:
            refused.append(f"{release}: {support.why}")
            continue
        needed = ((name, compilers(row["cuda"], name)) for name in architectures)
        if why := next((f"{name} wants {needed_cuda}" for name, needed_cuda in needed if needed_cuda), ""):
            refused.append(f"{release}: {why}")
            continue
        image = f"{row['image'].rpartition(':')[0]}@{row['digest']}" if kind == IMAGE else None
        wheels = tuple(row["wheels"]) if kind == WHEELS else ()
        able.append(EnvironmentChoice(framework, row["version"], kind, row["cuda"], image, wheels, support))
    if not able:
        raise IncompatibleError(
            f"no {kind} of {framework} runs on this machine",
            details=tuple(refused),
            hint=("try --wheels" if kind == IMAGE else "try an image: leave --wheels out")
            + ", or install a newer driver",
        )
    return min(able, key=lambda choice: choice.verdict.word != NATIVE)  # min() keeps the first of equals


@dataclass(frozen=True)
class StartedEnvironment:
    """An environment that was started and verified.

    Args:
        name: Of the container; or the folder of the virtual environment.
        enter: The command line that opens it.
        end: The command line that ends its lease; a virtual environment's folder stays.
        evidence: The results of the checks, one line each.
    """

    name: str
    enter: tuple[str, ...]
    end: tuple[str, ...]
    evidence: tuple[str, ...]


@contextmanager
def program_file() -> Iterator[Path]:
    """This program as one file: the running zipapp on a node; in a checkout a new one."""
    own = Path(sys.argv[0])
    if zipfile.is_zipfile(own):
        yield own.resolve()
        return
    from gpukiln.gpus import zipapp  # noqa: PLC0415 - the zipapp does not contain it

    with tempfile.TemporaryDirectory() as folder:
        zipapp.build(Path(folder) / zipapp.PROGRAM)
        yield Path(folder) / zipapp.PROGRAM


def start_container(
    choice: EnvironmentChoice, granted: LeaseGrant, engine: str, say: Callable[[str], None]
) -> StartedEnvironment:
    """Start a container on leased GPUs and verify it; a container that fails is removed.

    Raises:
        UnavailableError: The engine can't use GPUs, or can't pull the image.
        CheckFailedError: A check failed.
    """
    name = f"gpukiln-{granted.lease.id.lower()}"
    ends = granted.lease.ends_boot
    # The container ends with its first process, and every shell that was opened in it: this keeps the
    # deadline.
    lasts = "infinity" if ends is None else f"{max(ends - boot_clock(), 0):.0f}"
    given = arguments(granted.uuids, engine, by=injection_method(read_engine(engine), granted.uuids))
    if not _succeeds([engine, "image", "inspect", str(choice.image)]):
        say(f"pulling {choice.image}")
        _run([engine, "pull", "--quiet", str(choice.image)], PULL_S)
    with program_file() as file:
        try:  # Docker keeps a container that it created and could not start
            _run(
                [
                    *(engine, "run", "--detach", "--name", name, "--label", f"{LABEL}={granted.lease.id}"),
                    # PyTorch's data loaders use shared memory, and pinned memory is locked (PyTorch, README,
                    # Docker Image).
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
    """Create a virtual environment and verify it on leased GPUs; one that fails is removed.

    Raises:
        UsageError: The folder exists.
        UnavailableError: pip can't install the wheels.
        CheckFailedError: A check failed.
    """
    if folder.exists():
        raise UsageError(f"the folder {folder} exists", hint="pass a new folder with --folder, or remove it")
    python = str(folder / "bin/python3")
    try:
        # In a zipapp sys.executable is the node's python3; a checkout's Python has the modules of the
        # project.
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
    """Verify that an environment computes on its GPUs; returns the results in words.

    Args:
        count: GPUs of its lease.
        python: Command line of its Python, to be completed.
        gpukiln_gpu: Command line of this program in it, to be completed.

    Raises:
        CheckFailedError: A check failed.
    """
    done = _query([*gpukiln_gpu, "compute", "--json"], environment)
    try:
        document = parse_json(done.stdout)
        [node] = document["nodes"]
    except (ValueError, KeyError):
        raise _verification_error(
            choice, "the compute check of the host suite did not run", done.stderr or done.stdout
        ) from None
    if done.returncode != 0:
        problems = node["problems"] or ["no GPU computed"]
        raise _verification_error(choice, "the compute check of the host suite fails", "\n".join(problems))
    counted = _query([*python, "-c", GPU_COUNT_CODE[choice.framework]], environment)
    # Frameworks print warnings before the number.
    seen = counted.stdout.split()[-1:] if counted.returncode == 0 else []
    if seen != [str(count)]:
        text = f"{choice.framework} counts {seen[0] if seen else 'none'} of {count} GPUs"
        raise _verification_error(choice, text, counted.stderr)
    names = ", ".join(gpu["name"] for gpu in node["gpus"])
    return (f"computes on {names}", f"{choice.framework} {choice.version} counts {count} of {count} GPUs")


def _verification_error(choice: EnvironmentChoice, why: str, output: str) -> CheckFailedError:
    return CheckFailedError(
        f"{choice.framework} {choice.version} failed its verification and was removed: {why}",
        details=tuple(output.strip().splitlines()[-8:]),
        hint="check the machine with `gpukiln-gpu health`, the driver with `gpukiln-gpu cuda`",
    )


def _query(argv: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv), env=environment, capture_output=True, text=True, timeout=VERIFY_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(list(argv), 124, "", f"no answer within {VERIFY_S:.0f} s")


def _succeeds(argv: Sequence[str]) -> bool:
    return subprocess.run(list(argv), capture_output=True, check=False).returncode == 0


def _run(argv: Sequence[str], limit_s: float) -> None:
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{argv[0]} {argv[1]}: {error}") from error
    if done.returncode != 0:
        lines = tuple((done.stderr or done.stdout).strip().splitlines()[-5:])
        # Docker's daemon searches its PATH for NVIDIA's hook once, when it starts (moby,
        # daemon/nvidia_linux.go).
        blind = any("could not select device driver" in line for line in lines)
        raise UnavailableError(
            f"{' '.join(argv[:4])} ... exits with {done.returncode}",
            details=lines,
            hint="restart docker: its daemon started before NVIDIA's toolkit was installed" if blind else "",
        )
