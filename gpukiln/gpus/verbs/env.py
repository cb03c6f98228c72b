"""The verbs env and compute: an environment for machine learning, and a check that GPUs compute."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.gpus import leases as kept
from gpukiln.gpus.client import open_leases
from gpukiln.gpus.environments import (
    IMAGE,
    WHEELS,
    EnvironmentChoice,
    StartedEnvironment,
    choose,
    start_container,
    start_wheels,
)
from gpukiln.gpus.leases import whoami
from gpukiln.gpus.verb import Options, Verb
from gpukiln.gpus.verbs.lease import DURATION_OPTION, REQUEST_OPTIONS, LeaseReport, lease_report, request_of
from gpukiln.options import Option
from gpukiln.probe.cuda import cuda
from gpukiln.units import Duration

# Without cuda, which is the environment's here, and without the options of shared GPUs.
REQUEST_NAMES = (
    "count",
    "memory",
    "model",
    "prefer",
    "capability",
    "gpu",
    "mig",
    "linked",
    "wait",
    "project",
)


@dataclass(frozen=True)
class EnvironmentReport:
    """An environment for machine learning.

    Args:
        lease: Null with --dry-run.
        started: Null with --dry-run.
    """

    node: str
    choice: EnvironmentChoice
    lease: LeaseReport | None
    started: StartedEnvironment | None
    exit_code: int


@dataclass(frozen=True)
class GpuComputation:
    """The computation of a GPU.

    Args:
        elements: Number of results that were compared.
        kernel_ms: Duration of the kernel; null where it did not run.
        h2d_gb_s: Rate of copies from the host's memory to the GPU's, d2h_gb_s back; null like kernel_ms.
    """

    index: int
    name: str
    ok: bool
    elements: int
    kernel_ms: float | None
    h2d_gb_s: float | None
    d2h_gb_s: float | None


@dataclass(frozen=True)
class ComputeReport:
    """The computations of all GPUs that CUDA shows.

    Args:
        cuda: The driver's CUDA version; null where it does not answer.
        problems: What failed, one line each.
    """

    node: str
    cuda: str | None
    gpus: tuple[GpuComputation, ...]
    problems: tuple[str, ...]
    exit_code: int


def _compute(_: Options) -> ComputeReport:
    measured = cuda(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    problems = [measured["error"]] if measured["error"] else []
    for gpu in measured["gpus"]:
        if not gpu["ok"]:
            problems.append(
                f"GPU {gpu['index']} {gpu['name'] or ''}: {gpu['error'] or 'its results are wrong'}"
            )
    gpus = tuple(
        GpuComputation(
            gpu["index"],
            gpu["name"] or "",
            bool(gpu["ok"]),
            gpu["elements"],
            gpu["kernel_ms"],
            gpu["h2d_gb_s"],
            gpu["d2h_gb_s"],
        )
        for gpu in measured["gpus"]
    )
    # 4 where CUDA shows no GPU: nothing was computed, so nothing failed.
    code = 0 if gpus and not problems else 1 if gpus else 4
    return ComputeReport(socket.gethostname(), measured["driver_version"], gpus, tuple(problems), code)


def _show_compute(node: dict[str, Any], _: Options, print: Callable[[str], None]) -> None:
    for gpu in node["gpus"]:
        word = "computes" if gpu["ok"] else "does not compute"
        print(f"GPU {gpu['index']} {gpu['name']}: {word}, {gpu['elements']} numbers compared")
    for line in node["problems"]:
        print(line)


def _env(options: Options) -> EnvironmentReport:
    if options.docker and options.podman:
        raise UsageError("both --docker and --podman are given", hint="pass one of them")
    # See `mig_warning`: the other MIG devices would stay idle, which an environment can't repair.
    if options.mig and int(options.count) > 1:
        raise IncompatibleError(
            f"{options.count} MIG devices for one environment: a CUDA program uses only one",
            hint="request one MIG device, or whole GPUs",
        )
    kind = WHEELS if options.wheels else IMAGE
    leases, who = open_leases(), whoami(options.project)
    snap = leases.take_snapshot()
    # Before the lease: an unusable driver or a framework that can't run needs no GPU to find out.
    kept.check_usable(snap)
    gpus = [device for device in snap.devices if device.kind == "gpu" and device.readable]
    choice = choose(options.framework, kind, options.cuda, snap.driver.version, gpus)
    if options.dry_run:
        return EnvironmentReport(snap.node, choice, None, None, 0)
    engine = None if kind == WHEELS else "podman" if options.podman else "docker"
    request = Options(**{name: getattr(options, name) for name in REQUEST_NAMES})
    request.cuda, request.shared, request.pack, request.ignore_unleased = "", False, False, False
    granted = leases.acquire(
        request_of(request, leases),
        who,
        kind=kept.CONTAINER if engine else kept.DETACHED,
        hours=Duration.parse(options.for_, "--for") / 3600 if options.for_ else None,
        wait_s=Duration.parse(options.wait, "--wait") if options.wait else 0.0,
        command=f"{choice.framework} {choice.version}",
        engine=engine,
        on_wait=lambda why: say(f"waiting: {why}"),
    )
    try:
        if engine:
            started = start_container(choice, granted, engine, say)
        else:
            started = start_wheels(choice, granted, Path(options.folder or _folder(choice)), say)
    # Also on Ctrl-C: a lease without its environment would keep the GPUs.
    except BaseException:
        _close(granted.descriptors)
        leases.release(granted.lease, who, force=True)
        raise
    _close(granted.descriptors)  # from here on the container or the deadline keeps the lease
    return EnvironmentReport(snap.node, choice, lease_report(granted.lease), started, 0)


def _folder(choice: EnvironmentChoice) -> str:
    return str(Path.home() / ".local/share/gpukiln" / f"{choice.framework}-{choice.version}")


def _close(descriptors: tuple[int, ...]) -> None:
    for number in descriptors:
        os.close(number)


def say(text: str) -> None:
    """Print a notice to standard error."""
    print(text, file=sys.stderr, flush=True)


def _show_env(node: dict[str, Any], _: Options, print: Callable[[str], None]) -> None:
    choice, started = node["choice"], node["started"]
    print(f"{choice['framework']} {choice['version']}, CUDA {choice['cuda']}: {choice['verdict']['why']}")
    print(choice["image"] or " ".join(choice["wheels"]))
    if started is None:
        print("--dry-run: nothing was leased, nothing was started")
        return
    for line in started["evidence"]:
        print(f"verified: {line}")
    print(f"lease: {node['lease']['id']} on {', '.join(node['lease']['devices'])}")
    print(f"enter: {shlex.join(started['enter'])}")
    print(f"end:   {shlex.join(started['end'])}")


VERBS = (
    Verb(
        "env",
        "Start an environment for machine learning on leased GPUs, selected for the driver and verified.",
        (
            Option("framework", "pytorch, tensorflow or jax", default="pytorch"),
            Option("cuda", "the CUDA version of the environment, or auto", default="auto"),
            Option("wheels", "a virtual environment of wheels in place of a container", default=False),
            Option("folder", "folder of the virtual environment", value="FOLDER"),
            Option("docker", "use Docker, the default", default=False),
            Option("podman", "use Podman", default=False),
            *(option for option in REQUEST_OPTIONS if option.name in REQUEST_NAMES),
            DURATION_OPTION,
            Option("dry_run", "print what would be started, without a lease", default=False),
        ),
        _env,
        _show_env,
        changes=True,
        examples=("--framework pytorch -n 2", "--framework jax --wheels --dry-run"),
    ),
    Verb(
        "compute",
        "Check that every GPU that CUDA shows computes, by the check of the host suite.",
        (),
        _compute,
        _show_compute,
    ),
)
