"""Interprets the status of a Job and of its pods; takes objects of the API and makes no requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from gpukiln.kubernetes.jobs.render import CONTAINER, INDEX
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.symptoms import STUCK_REASONS

# Reasons of the condition DisruptionTarget (kubernetes.io, "Pod disruption conditions").
DISRUPTIONS = {
    "PreemptionByScheduler": "a pod of higher priority preempted it",
    "DeletionByTaintManager": "its node is being removed or does not answer",
    "EvictionByEvictionAPI": "its node is drained: a spot interruption, a consolidation or an upgrade",
    "DeletionByPodGC": "its node was removed",
    "TerminationByKubelet": "the kubelet ended it: its node shuts down, or runs out of memory or disk",
}
DEADLINE_EXIT = 124  # as timeout(1)
# 128 and the number of the signal, as shells report it
SIGNAL_EXIT_CODES = {
    137: "SIGKILL: it did not end within its grace period, or the kernel killed it for lack of memory",
    139: "SIGSEGV: it accessed invalid memory",
    134: "SIGABRT: it aborted itself",
    143: "SIGTERM: it was asked to end",
}
COMMAND_EXIT_CODES = {126: "the command is not executable", 127: "the command is not in the image"}

Phase = Literal["waiting", "starting", "stuck", "running", "succeeded", "failed", "interrupted", "gone"]


@dataclass(frozen=True)
class Attempt:
    """A pod of a Job in its last known state.

    Args:
        index: Completion index in a Job on several nodes; None for one node.
        phase: stuck: the kubelet can't start it; interrupted: the cluster ended it, which is no failure of
            the program; gone: it was removed before its end was seen.
        reason: The reason in the API.
        why: The reason in words.
        exit_code: Of its container; None: it has not ended, or never started.
        started: Start of its container, as the API writes it; empty: it has not started.
        finished: End of its container.
    """

    pod: str
    node: str
    index: int | None
    phase: Phase
    reason: str = ""
    why: str = ""
    exit_code: int | None = None
    started: str = ""
    finished: str = ""


@dataclass(frozen=True)
class JobEnd:
    """How a Job ended.

    Args:
        state: failed: the program or the cluster failed; deadline: activeDeadlineSeconds are over.
        exit_code: Of its container; 124 at the deadline; 1 if no container ran.
        why: The reason in words.
        attempts: Its pods, oldest first.
        notes: What is incomplete, such as a log.
    """

    state: Literal["succeeded", "failed", "deadline"]
    reason: str
    why: str
    exit_code: int
    attempts: tuple[Attempt, ...]
    notes: tuple[str, ...] = ()


def attempt(pod: Manifest) -> Attempt:
    """The state of a pod."""
    meta, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    # Kubernetes 1.28 and later have the index as a label as well.
    place = {**meta.get("annotations", {}), **meta.get("labels", {})}.get(INDEX)
    base = Attempt(meta["name"], spec.get("nodeName", ""), None if place is None else int(place), "waiting")
    container: Manifest = next(
        (
            container_status
            for container_status in status.get("containerStatuses", ())
            if container_status["name"] == CONTAINER
        ),
        next(iter(status.get("containerStatuses", ())), {}),
    )
    state = container.get("state", {})
    if ended := state.get("terminated"):
        base = replace(
            base,
            exit_code=ended.get("exitCode"),
            started=ended.get("startedAt") or "",
            finished=ended.get("finishedAt") or "",
        )
    disrupted = _condition(status, "DisruptionTarget")
    phase = status.get("phase", "Pending")
    if phase == "Succeeded":
        return replace(base, phase="succeeded", reason="Completed")
    if phase == "Failed":
        if disrupted:
            return replace(
                base,
                phase="interrupted",
                reason=disrupted.get("reason", ""),
                why=_joined(
                    DISRUPTIONS.get(disrupted.get("reason", ""), "the cluster ended it"),
                    status.get("message") or disrupted.get("message", ""),
                ),
            )
        reason = (ended or {}).get("reason", "") or status.get("reason", "") or "Error"
        return replace(base, phase="failed", reason=reason, why=_why_failed(spec, status, ended or {}))
    if running := state.get("running"):
        return replace(base, phase="running", started=str(running.get("startedAt", "")))
    return _not_started(base, status, container)


def _not_started(base: Attempt, status: Manifest, container: Manifest) -> Attempt:
    # The scheduler sets it to False with the reason why no node fits.
    scheduled = _condition(status, "PodScheduled", "False")
    if scheduled:
        reason = scheduled.get("reason", "")
        if reason == "SchedulingGated":
            return replace(base, reason=reason, why="it waits until its queue admits it")
        return replace(base, reason=reason, why=scheduled.get("message", ""))
    waiting = container.get("state", {}).get("waiting", {})
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in STUCK_REASONS:
        return replace(base, phase="stuck", reason=reason, why=message or reason)
    if base.node:
        return replace(base, phase="starting", reason=reason)
    return base


def _why_failed(spec: Manifest, status: Manifest, ended: Manifest) -> str:
    code, reason = ended.get("exitCode", 0), ended.get("reason", "")
    limit = spec["containers"][0].get("resources", {}).get("limits", {}).get("memory", "")
    # The kubelet sets this reason; the exit code is 137 as for any SIGKILL.
    if reason == "OOMKilled":
        why = f"its memory with /dev/shm reached the limit{f' of {limit}' if limit else ''}; raise --memory"
    elif reason in ("StartError", "ContainerCannotRun"):
        why = "its container could not start"
    elif not ended:
        why = "its container never ran"
    else:
        known = SIGNAL_EXIT_CODES.get(code) or COMMAND_EXIT_CODES.get(code)
        why = f"exit code {code}" + (f" ({known})" if known else "")
    return _joined(why, ended.get("message") or status.get("message", ""))


def job_end(job: Manifest, attempts: list[Attempt], notes: list[str]) -> JobEnd | None:
    """How a Job ended; None if it has not."""
    status = job.get("status", {})
    if _condition(status, "Complete"):
        return JobEnd("succeeded", "Complete", "", 0, tuple(attempts), tuple(notes))
    failed = _condition(status, "Failed")
    if not failed:
        return None
    reason, message = failed.get("reason", ""), failed.get("message", "")
    details = (tuple(attempts), tuple(notes))
    if reason == "DeadlineExceeded":
        limit = job["spec"].get("activeDeadlineSeconds")
        # The time of waiting for a node counts, too.
        ran = any(attempt.started or attempt.exit_code is not None for attempt in attempts)
        why = f"its {limit} s are over" + ("" if ran else " before any of its pods ran")
        return JobEnd("deadline", reason, f"{why}; raise --timeout", DEADLINE_EXIT, *details)
    cause = decisive_failure(attempts, several=job["spec"].get("completionMode") == "Indexed")
    if cause is None:
        return JobEnd("failed", reason, message, 1, *details)
    return JobEnd("failed", reason, f"{cause.pod}: {cause.why}", cause.exit_code or 1, *details)


def decisive_failure(attempts: list[Attempt], *, several: bool) -> Attempt | None:
    """The pod whose failure decided: the last one; of several at once, the first one that failed."""
    failed = sorted(
        (attempt for attempt in attempts if attempt.phase == "failed"), key=lambda attempt: attempt.finished
    )
    if not failed:
        return None
    if not several:
        # Earlier ones were retried; the last one used up backoffLimit.
        return failed[-1]
    # The other pods fail because of it, after their timeout for each other.
    indices = {attempt.index for attempt in failed}
    last_round = [
        max((attempt for attempt in failed if attempt.index == index), key=_finished) for index in indices
    ]
    return min(last_round, key=_finished)


def has_ended(job: Manifest) -> bool:
    return any(_condition(job.get("status", {}), kind) for kind in ("Complete", "Failed"))


def _finished(attempt: Attempt) -> str:
    return attempt.finished


def _condition(status: Manifest, kind: str, value: str = "True") -> dict[str, Any]:
    matching = (
        condition
        for condition in status.get("conditions") or ()
        if condition["type"] == kind and condition["status"] == value
    )
    return next(matching, {})


def _joined(*parts: str) -> str:
    return ": ".join(part.strip() for part in parts if part and part.strip())
