"""Runs a command under a lease, which lasts as long as any process of the command."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from gpukiln.errors import IncompatibleError, RefusedError, UnavailableError, UsageError
from gpukiln.gpus.client import AnyLeases
from gpukiln.gpus.leases import LeaseGrant, LeaseHolder, device_environment, mig_warning
from gpukiln.gpus.store import Lease, boot_clock

INDEX = "index"
NOT_FOUND, NOT_EXECUTABLE, TIMED_OUT = 127, 126, 124  # the exit codes of env(1) and timeout(1)
GRACE_S = 30.0  # between SIGTERM and SIGKILL for a job whose time is up
FORWARDED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
)
# si_code of a signal from the terminal (sigaction(2)): the kernel sends it to the whole foreground group, so
# the job has it already.
SI_KERNEL = 0x80


def run_and_release(
    leases: AnyLeases,
    granted: LeaseGrant,
    who: LeaseHolder,
    command: Sequence[str],
    *,
    engine: str | None = None,
    image: str = "",
    ids: str = "uuid",
) -> int:
    """Run a command under a lease that was granted for it, then release it; returns the exit code.

    Args:
        ids: uuid or index: how the command's environment names the GPUs.
    """
    lease, started = granted.lease, False
    try:
        environment = {**os.environ, "GPUKILN_LEASE": lease.id}
        if engine and "CUDA_VISIBLE_DEVICES" not in granted.environment:
            raise IncompatibleError(
                f"--{engine} does not support AMD's GPUs yet", hint="run the command without a container"
            )
        if engine:
            from gpukiln.gpus.engines import container_command  # noqa: PLC0415 - most runs need no engine

            argv = container_command(granted, engine, image, command)
        else:
            argv = list(command)
            environment.update(granted.environment_by_index if ids == INDEX else granted.environment)
        started = True
        code = _run(leases, lease, argv, environment, granted.descriptors)
        if engine and code == TIMED_OUT:
            _end_container(lease)
        return code
    finally:
        for number in granted.descriptors:
            os.close(number)
        _release(leases, lease, who, contained=started and engine is not None)


def _end_container(lease: Lease) -> None:
    """Kill the container of a job whose time is up."""
    # The first process of a container ignores a SIGTERM that it does not handle (pid_namespaces(7)), so it
    # outlives the engine's command.
    from gpukiln.gpus.engines import kill_container  # noqa: PLC0415 - most runs need no engine

    try:
        kill_container(lease)
    except UnavailableError as error:
        print(f"error: the container may still run: {error.message}", file=sys.stderr)


def _release(leases: AnyLeases, lease: Lease, who: LeaseHolder, *, contained: bool) -> None:
    if contained and leases.container_runs(lease):
        print(f"{lease.id} stays active: its container still runs", file=sys.stderr)
        return
    if leases.is_running(lease):
        # A process that the command started has inherited the lock and still uses the GPUs.
        print(f"{lease.id} stays active: a process that the command started still runs", file=sys.stderr)
        return
    leases.release(lease, who, force=True, energy=leases.energy_counters([lease]))


def run_in_lease(
    leases: AnyLeases,
    name: str,
    who: LeaseHolder,
    command: Sequence[str],
    limit_s: float | None,
    ids: str = "uuid",
) -> int:
    """Run a command under an existing lease, which stays active.

    Args:
        ids: As for `run_and_release`.
    """
    lease = leases.find(name)
    if lease is None:
        raise UsageError(
            f"--lease {name}: there is no such lease", hint="`gpukiln-gpu leases` lists the active ones"
        )
    if not leases.is_owner(lease, who):
        raise RefusedError(
            f"{lease.id} belongs to {lease.user}", hint="leave --lease out to lease GPUs of your own"
        )
    indices = None
    if ids == INDEX:
        indices = {
            device.uuid: device.index
            for device in leases.take_snapshot().devices
            if device.uuid and device.kind == "gpu"
        }
    names = device_environment(lease.uuids, indices)
    descriptors = leases.share(lease)
    if warning := mig_warning(lease.uuids):
        print(warning, file=sys.stderr, flush=True)
    try:
        environment = {
            **os.environ,
            **names,
            "GPUKILN_LEASE": lease.id,
        }
        limited = lease
        if limit_s is not None:
            limited = dataclasses.replace(lease, expires_boot=boot_clock() + limit_s)
        return _run(leases, limited, list(command), environment, descriptors)
    finally:
        for number in descriptors:
            os.close(number)


def _run(
    leases: AnyLeases,
    lease: Lease,
    argv: list[str],
    environment: dict[str, str],
    descriptors: tuple[int, ...],
) -> int:
    """Start a job, forward signals to it, end it when its time is up; returns its exit code."""
    watched = {*FORWARDED_SIGNALS, signal.SIGCHLD}
    # Blocked before the job starts, so that no signal gets lost between its start and `_wait`.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        try:
            job = subprocess.Popen(
                argv,
                env=environment,
                pass_fds=descriptors,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),  # noqa: PLW1509 - one thread
            )
        except (FileNotFoundError, PermissionError, OSError) as error:
            print(f"error: {argv[0]}: {error.strerror}", file=sys.stderr)
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        if lease.kind != "detached":
            leases.set_job(lease, job.pid)
        return _wait(job, lease.ends_boot, watched)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(job: subprocess.Popen[bytes], ends_boot: float | None, watched: set[signal.Signals]) -> int:
    """Wait for a job; returns its exit code, 128 plus the signal that ended it, or 124 for a timeout."""
    late = False
    while True:
        code = job.poll()
        if code is not None:
            return TIMED_OUT if late else 128 - code if code < 0 else code
        left = 3600.0
        if ends_boot is not None:
            left = max(ends_boot - boot_clock(), 0.0)
            if left == 0.0:
                print("error: the time of the lease is over (--for, or the user's limit)", file=sys.stderr)
                job.send_signal(signal.SIGKILL if late else signal.SIGTERM)
                late, ends_boot = True, boot_clock() + GRACE_S
                continue
        received = signal.sigtimedwait(watched, min(left, 3600.0))
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        terminal = received.si_code == SI_KERNEL and received.si_signo != signal.SIGTERM
        if not terminal:
            with contextlib.suppress(ProcessLookupError):
                job.send_signal(received.si_signo)
