"""Judges live nodes with the host suite, as many at a time as the machine that asks can take."""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.parsing import parse_json
from gpukiln.verify.html import Judged, write_html
from gpukiln.verify.report import Live, state
from gpukiln.verify.situation import situation
from gpukiln.verify.suite import MAX_SECONDS, run_suite
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import Verdict

WORTHWHILE_S = 5.0  # of time left, for beginning with a host


@dataclass(frozen=True)
class Judgement:
    """What came of one host.

    Args:
        host: Its name, as in the inventory.
        reason: Why it could not be judged.
        situation: One sentence: how it stands with its GPUs and their driver; empty where it was not judged.
        verdict: None where it could not be judged.
    """

    host: str
    reason: str = ""
    situation: str = ""
    verdict: Verdict | None = None


def host_folder(folder: Path, host: str) -> Path:
    """Where the reports of one host are, below those of the run."""
    return folder / re.sub(r"[^\w.@-]", "_", host)


def write_report(judged: list[Judgement], folder: Path) -> Path:
    """Write one page of all hosts.

    Args:
        folder: The one that `judge` was given.

    Returns:
        The page.
    """
    machines = []
    for one in judged:
        found = _facts(folder, one.host) if one.verdict else {}
        machines.append(Judged(one.host, one.verdict, found, one.reason))
    write_html(machines, folder / "report.html")
    return folder / "report.html"


def _facts(folder: Path, host: str) -> dict[str, Any]:
    found: dict[str, Any] = parse_json((host_folder(folder, host) / "facts.json").read_text(encoding="utf-8"))
    return found


def judge(
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
    live: Live | None = None,
) -> list[Judgement]:
    """Judge every host.

    Args:
        folder: For the reports, one folder a host.
        profile: Key of `checks.PROFILES`.
        layers: Only these layers; empty means all.
        require: Layers in which a check that is not run counts as failed.
        expect_gpus: GPUs that each must have; None takes the profile's number.
        simulated: Whether simulated GPUs are judged too, as far as that makes sense.
        forks: Hosts that are judged at the same time.
        max_seconds: Seconds within which all of them are: what was not looked at by then is not reached, and
            a host whose turn had not come is not judged.
        on_host: Told of a host when it is done.
        live: Told of each check, where there is one host alone.

    Returns:
        One judgement a host, in the same order.

    Raises:
        UsageError: The profile or a layer is unknown.
    """
    until = time.monotonic() + max_seconds

    def one(target: Target) -> Judgement:
        host, left = target.name, until - time.monotonic()
        if left < WORTHWHILE_S:
            on_host(host, "not reached")
            return Judgement(
                host, reason=f"{host} was not reached: the {max_seconds:.0f} s of --max-seconds were up"
            )
        try:
            verdict = run_suite(
                target,
                profile=profile,
                out_dir=host_folder(folder, host),
                layers=layers,
                require=require,
                expect_gpus=expect_gpus,
                simulated=simulated,
                max_seconds=left,
                on_start=live.start if live else None,
                on_check=live.check if live else None,
            )
        except UnavailableError as error:
            on_host(host, "could not be judged")
            return Judgement(host, reason=error.message)
        on_host(host, state(verdict))
        return Judgement(host, situation=situation(_facts(folder, host)), verdict=verdict)

    with ThreadPoolExecutor(max_workers=forks) as pool:
        try:
            return list(pool.map(one, targets))
        except (GpukilnError, KeyboardInterrupt):
            pool.shutdown(cancel_futures=True)
            raise
