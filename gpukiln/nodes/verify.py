"""Verifies live nodes by the host suite, as many at a time as the machine that asks can take."""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpukiln.errors import CheckFailedError, GpukilnError, PartialError, UnavailableError, UsageError
from gpukiln.nodes.runs import RunStore
from gpukiln.parsing import parse_json
from gpukiln.progress import Progress
from gpukiln.verify.html import write_html
from gpukiln.verify.report import LiveReport, state
from gpukiln.verify.suite import MAX_SECONDS, run_suite
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import Verdict
from gpukiln.verify.verification import Verification

LEAST_SECONDS = 10  # a suite needs some to start, and a machine to answer
MIN_HOST_S = 5.0  # of time left, for beginning with a host


def examine(
    purpose: str,
    find_targets: Callable[[], Sequence[Target]],
    *,
    profile: str,
    expect_gpus: int,
    simulated: bool,
    forks: int,
    max_seconds: int,
    layers: Sequence[str] = (),
    require: Sequence[str] = (),
) -> tuple[list[Verification], Path]:
    """Verify hosts as `verify_hosts` does, show the progress, and write one page with all reports.

    Args:
        purpose: verify or doctor.
        find_targets: Finds the hosts; an inventory may take part of `max_seconds`.
        expect_gpus: Less than 0: the profile's number.

    Returns:
        One a host, and the page.

    Raises:
        UsageError: A number, a layer or the profile is wrong.
    """
    until = time.monotonic() + max_seconds
    if forks < 1:
        raise UsageError(f"--forks is {forks}, wanted 1 or more")
    if max_seconds < LEAST_SECONDS:
        raise UsageError(f"--max-seconds is {max_seconds}, wanted {LEAST_SECONDS} or more")
    targets = find_targets()
    run, progress = RunStore().create(purpose), Progress()
    with progress.step(f"verify {len(targets)} host{'s' if len(targets) > 1 else ''}"):
        verifications = verify_hosts(
            targets,
            run.folder,
            profile=profile,
            layers=layers,
            require=require,
            # Options of a command are never None: -1 stands for it.
            expect_gpus=None if expect_gpus < 0 else expect_gpus,
            simulated=simulated,
            forks=forks,
            max_seconds=until - time.monotonic(),
            on_host=lambda host, state: progress.say(f"{host}: {state}"),
            # The checks of several hosts would be mixed on the terminal.
            live=LiveReport(progress) if len(targets) == 1 and purpose == "verify" else None,
        )
        if not all(result.verdict and result.verdict.passed for result in verifications):
            progress.fail()
    page = run.folder / "report.html"
    write_html(verifications, page)
    return verifications, page


def exit_code(verdicts: Sequence[Verdict | None]) -> int:
    """The exit code of some verifications; None: a host could not be verified."""
    if any(verdict and verdict.failures for verdict in verdicts):
        return CheckFailedError.exit_code
    if all(verdict and verdict.passed for verdict in verdicts):
        return 0
    # No check failed, but a host could not be verified, or the time was up before all checks had run.
    return PartialError.exit_code if any(verdicts) else UnavailableError.exit_code


def verify_hosts(
    targets: Sequence[Target],
    folder: Path,
    *,
    profile: str,
    layers: Sequence[str] = (),
    require: Sequence[str] = (),
    expect_gpus: int | None = None,
    simulated: bool = False,
    forks: int = 1,
    max_seconds: float = MAX_SECONDS,
    on_host: Callable[[str, str], None],
    live: LiveReport | None = None,
) -> list[Verification]:
    """Verify every host.

    Args:
        folder: For the reports, one folder a host.
        profile: Key of `checks.PROFILES`.
        layers: Only these layers; empty means all.
        require: Layers in which a check that is not run counts as failed.
        expect_gpus: GPUs that each must have; None takes the profile's number.
        simulated: Whether simulated GPUs are verified too, as far as that makes sense.
        forks: Hosts that are verified at the same time.
        max_seconds: Seconds within which all of them are: what was not looked at by then is not reached, and
            a host whose turn had not come is not verified.
        on_host: Called with a host that is done, and its state.
        live: Shows each check, where there is one host alone.

    Returns:
        One a host, in the same order.

    Raises:
        UsageError: The profile or a layer is unknown.
    """
    until = time.monotonic() + max_seconds

    def one(target: Target) -> Verification:
        host, left = target.name, until - time.monotonic()
        if left < MIN_HOST_S:
            on_host(host, "not reached")
            reason = f"{host} was not reached: the {max_seconds:.0f} s of --max-seconds were up"
            return Verification(host, reason=reason)
        # Host names come from an inventory, and may have characters that a file name can't.
        reports = folder / re.sub(r"[^\w.@-]", "_", host)
        try:
            verdict = run_suite(
                target,
                profile=profile,
                out_dir=reports,
                layers=layers,
                require=require,
                expect_gpus=expect_gpus,
                simulated=simulated,
                max_seconds=left,
                on_start=live.start if live else None,
                on_check=live.check if live else None,
            )
        # One host that can't be reached must not cost the others their verdict.
        except UnavailableError as error:
            on_host(host, "could not be verified")
            return Verification(host, reason=error.message)
        on_host(host, state(verdict))
        facts = parse_json((reports / "facts.json").read_text(encoding="utf-8"))
        return Verification(host, verdict, facts)

    # Threads: the work is waiting for SSH, and testinfra's checks run on the host.
    with ThreadPoolExecutor(max_workers=forks) as pool:
        try:
            return list(pool.map(one, targets))
        except (GpukilnError, KeyboardInterrupt):
            pool.shutdown(cancel_futures=True)
            raise
