"""Submits a Job and follows it: reports why it waits, prints its log, returns how it ended.

Requests that fail are repeated, because the Job continues without this process. A Job that has run is never
deleted here.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpukiln.errors import BusyError, GpukilnError, IncompatibleError, RefusedError, UnavailableError
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.jobs import state
from gpukiln.kubernetes.jobs.render import CONTAINER, JOB_NAME
from gpukiln.kubernetes.jobs.state import Attempt, JobEnd
from gpukiln.kubernetes.jobs.submission import MARK, Submission, submission
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.workloads import kueue_conditions
from gpukiln.typed import unknown
from gpukiln.units import Duration

if TYPE_CHECKING:
    from gpukiln.kubernetes.jobs.job import GpuJob

LOCAL_QUEUE = "kueue.x-k8s.io/v1beta2/LocalQueue"
POLL_S = 1.0
LOST_S = 300.0  # without an answer of the API server, after which the command gives up
STUCK_S = 120.0  # with a container that can't start: a registry may be down for a moment
EVENTS_S = 10.0  # between two reads of the events of waiting objects
FORBIDDEN = 403  # HTTP 403, for which a retry is useless
LOG_S = 15.0  # to read the rest of a log after the Job's end
GONE_S = 60.0  # to wait for the deletion of a Job
# Normal events of a waiting pod that are reported: of the autoscaler, Karpenter and the kubelet.
REPORTED_EVENTS = ("TriggeredScaleUp", "NotTriggerScaleUp", "Nominated", "Pulling", "Pulled")

T = TypeVar("T")
WriteLine = Callable[[str], None]


def submit(cluster: Cluster, job: GpuJob, say: WriteLine, *, replace_ended: bool = False) -> Submission:
    """Create a Job, and for several pods a Service that the Job owns.

    A Job that an interrupted run on this computer submitted is used as it is.

    Args:
        replace_ended: First delete a Job of that name if it has ended.

    Returns:
        The submission, which the caller ends after the end of the Job was reported.

    Raises:
        RefusedError: There is a Job of that name.
        IncompatibleError: Its queue does not exist, or the server rejects the Job.
    """
    namespace = job.namespace or cluster.namespace
    # Last in the list, and created first: the Job owns the Services.
    *services, manifest = job.manifests()
    record, existing = submission(cluster, namespace, manifest), cluster.get("Job", job.name, namespace)
    if existing and record.is_of(existing):
        for service in services:
            _create_service(cluster, service, existing, namespace)
        say(f"job {job.name}: an earlier run submitted it to {namespace} of {cluster.context}; it continues")
        return record
    if existing:
        if not (replace_ended and state.has_ended(existing)):
            ended = "has ended" if state.has_ended(existing) else "is running"
            raise RefusedError(
                f"there is already a Job {job.name} in {namespace}, which {ended}",
                hint="--attach follows it; --name gives the new Job another name"
                + ("; --replace removes it first" if state.has_ended(existing) else ""),
            )
        _delete_job(cluster, job.name, namespace)
        say(f"job {job.name}: the ended Job of that name was deleted")
    _require_queue(cluster, job.queue, namespace)
    created = _create_once(cluster, manifest, namespace, record.begin(say))
    try:
        for service in services:
            _create_service(cluster, service, created, namespace)
    # Ctrl-C as well: a Job without its Service would wait for its other pods until its deadline.
    except BaseException:
        cluster.delete("Job", job.name, namespace)
        raise
    say(f"job {job.name}: submitted to {namespace} of {cluster.context}")
    return record


def _create_once(cluster: Cluster, manifest: Manifest, namespace: str, mark: str) -> Manifest:
    """Create a Job; if the answer is lost, find the created Job by the mark of this call."""
    meta = manifest["metadata"]
    marked = {**manifest, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), MARK: mark}}}
    try:
        return cluster.create(marked)
    except UnavailableError as error:
        with contextlib.suppress(GpukilnError):
            there = cluster.get("Job", meta["name"], namespace)
            if there and there["metadata"].get("annotations", {}).get(MARK) == mark:
                return there
        raise error


def dry_run(cluster: Cluster, job: GpuJob) -> None:
    """Let the server validate and admit a job without storing it."""
    _require_queue(cluster, job.queue, job.namespace or cluster.namespace)
    for manifest in job.manifests():
        cluster.create(manifest, dry_run=True)


def _create_service(cluster: Cluster, service: Manifest, owner: Manifest, namespace: str) -> None:
    name, meta = service["metadata"]["name"], owner["metadata"]
    until = time.monotonic() + GONE_S
    while there := cluster.get("Service", name, namespace):
        # The pods would resolve each other's names to pods of another application.
        if there["spec"].get("selector") != service["spec"]["selector"]:
            raise RefusedError(
                f"there is a Service {name} in {namespace} that selects other pods",
                hint="choose another --name",
            )
        owners = [owner_reference["uid"] for owner_reference in there["metadata"].get("ownerReferences", ())]
        if not owners or meta["uid"] in owners:
            return  # it has the same selector
        if time.monotonic() > until:  # owned by an earlier Job: the garbage collector deletes it soon
            raise BusyError(
                f"the Service {name} belongs to an earlier Job {meta['name']} and still exists after "
                f"{GONE_S:.0f} s",
                hint="try again later",
            )
        time.sleep(0.2)
    # The garbage collector deletes the Service together with its owner.
    mine = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    cluster.create({**service, "metadata": {**service["metadata"], "ownerReferences": [mine]}})


def _require_queue(cluster: Cluster, name: str, namespace: str) -> None:
    """Check that the queue exists: without it, Kueue never admits the Job."""
    if not name or cluster.get(LOCAL_QUEUE, name, namespace):
        return
    there = [local_queue["metadata"]["name"] for local_queue in cluster.list(LOCAL_QUEUE, namespace)]
    if there:
        error = unknown(f"queue of {namespace}", name, there)
        raise IncompatibleError(error.message, hint=error.hint or "--queue names one of them")
    raise IncompatibleError(
        f"{namespace} has no LocalQueue {name}, nor any other",
        hint="`invoke k8s.addons --team NAME=GPUS` renders queues; without --queue the Job starts at once",
    )


def _delete_job(cluster: Cluster, name: str, namespace: str) -> None:
    cluster.delete("Job", name, namespace)
    until = time.monotonic() + GONE_S
    while cluster.get("Job", name, namespace):
        if time.monotonic() > until:
            raise BusyError(
                f"the Job {name} was deleted and still exists after {GONE_S:.0f} s", hint="try again later"
            )
        time.sleep(0.2)


@dataclass(frozen=True)
class WaitLimits:
    """How long to wait, in s.

    Args:
        start_s: For the first start; None: until the Job's deadline.
        stuck_s: For a container that can't start.
        lost_s: For an API server that does not answer.
        poll_s: Between two polls.
    """

    start_s: float | None = None
    stuck_s: float = STUCK_S
    lost_s: float = LOST_S
    poll_s: float = POLL_S


def follow(
    cluster: Cluster,
    name: str,
    namespace: str,
    *,
    write: WriteLine,
    say: WriteLine,
    patience: WaitLimits = WaitLimits(),
    is_submitter: bool = False,
) -> JobEnd:
    """Wait for a Job's end.

    Args:
        write: Gets each line of its log.
        say: Gets each change of its state.
        is_submitter: Whether this process submitted the Job: if it can't start, it is deleted and holds no
            GPU.

    Raises:
        UnavailableError: The Job was deleted, can't start, or the API server does not answer.
        BusyError: The Job did not start in time.
    """
    return _Follower(
        cluster, name, namespace or cluster.namespace, write, say, patience, is_submitter=is_submitter
    ).run()


def resume_hints(name: str, namespace: str, context: str) -> list[str]:
    """Lines that say how to follow or end a Job that continues to run."""
    return [
        f"job {name} continues in {namespace} of {context}",
        f"follow it: invoke k8s.job --attach --name {name} --namespace {namespace} --context {context}",
        f"end it: kubectl --context {context} -n {namespace} delete job {name}",
    ]


class _Follower:
    def __init__(
        self,
        cluster: Cluster,
        name: str,
        namespace: str,
        write: WriteLine,
        say: WriteLine,
        patience: WaitLimits,
        *,
        is_submitter: bool,
    ) -> None:
        self.cluster, self.name, self.namespace = cluster, name, namespace
        self.write, self.say, self.patience, self.is_submitter = write, say, patience, is_submitter
        self.attempts: dict[str, Attempt] = {}  # by the pod's uid, oldest first
        self.last_reported: dict[str, str] = {}  # subject -> the text that was reported last
        self.events: set[str] = set()
        self.notes: list[str] = []
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.readers: dict[str, threading.Thread] = {}
        self.stuck_since: float | None = None
        # Why the server rejects its pods, in the controller's words.
        self.refused, self.refused_since = "", 0.0
        self.lost_since: float | None = None
        self.begun = time.monotonic()
        self.events_read_at = self.begun

    def run(self) -> JobEnd:
        if self.cluster.get("Job", self.name, self.namespace) is None:
            there = [other["metadata"]["name"] for other in self.cluster.list("Job", self.namespace)]
            error = unknown(f"Job of {self.namespace}", self.name, there)
            raise UnavailableError(error.message, hint=error.hint or "check --namespace and --context")
        while True:
            job, pods = self._with_retries(self._job_and_pods)
            if job is not None:
                self._update(job, pods)
                if state.has_ended(job):
                    return self._finish(job)
                self._give_up_if_late()
            self._drain(self.patience.poll_s)

    def _job_and_pods(self) -> tuple[Manifest, list[Manifest]]:
        job = self.cluster.get("Job", self.name, self.namespace)
        if job is None:
            self._drain(0)
            raise _JobDeletedError(
                f"the Job {self.name} was deleted before its end was seen",
                hint="`kubectl get events` may show the reason; its pods are deleted with it",
            )
        pods = self.cluster.list("Pod", self.namespace, labels=f"{JOB_NAME}={self.name}")
        # A deleted Job of the same name may still have pods.
        owned = [pod for pod in pods if _is_owned_by(pod, job)]
        return job, sorted(owned, key=_age)

    def _with_retries(
        self, question: Callable[[], tuple[Manifest, list[Manifest]]]
    ) -> tuple[Any, list[Manifest]]:
        """The answer to a question, or (None, []) while the API server does not answer."""
        try:
            answer = question()
        except _JobDeletedError:
            raise
        except (UnavailableError, BusyError) as error:
            now = time.monotonic()
            self.lost_since = self.lost_since or now
            # Permissions don't come back by waiting.
            if getattr(error.__cause__, "status", 0) == FORBIDDEN:
                error.details = tuple(resume_hints(self.name, self.namespace, self.cluster.context))
                raise
            if now - self.lost_since > self.patience.lost_s:
                lines = resume_hints(self.name, self.namespace, self.cluster.context)
                raise UnavailableError(
                    f"the API server did not answer for {Duration(self.patience.lost_s).shown}: "
                    f"{error.message}",
                    details=tuple(lines[:2]),
                    hint=error.hint,
                ) from error
            self._report_change("api", f"the API server does not answer, trying again: {error.message}")
            return None, []
        if self.lost_since:
            self.lost_since = None
            self._report_change("api", "the API server answers again")
        return answer

    def _update(self, job: Manifest, pods: list[Manifest]) -> None:
        there = {pod["metadata"]["uid"] for pod in pods}
        for uid, attempt in self.attempts.items():
            if (
                # Deleted between two polls, for example with its node: its exit code is unknown.
                uid not in there
                and attempt.exit_code is None
                and attempt.phase not in ("failed", "interrupted")
            ):
                self.attempts[uid] = replace(
                    attempt, phase="gone", why="it was removed before its end was seen"
                )
        for pod in pods:
            uid = pod["metadata"]["uid"]
            attempt = self.attempts[uid] = state.attempt(pod)
            self._report_pod(attempt)
            # Also of a pod that ended between two polls.
            if uid not in self.readers and (attempt.phase == "running" or attempt.exit_code is not None):
                self._start_reader(uid, attempt)
        if not pods and not state.has_ended(job):
            self._report_waiting_job(job)
        # Since a pod exists, the rejections of earlier ones don't matter.
        if pods or job["spec"].get("suspend"):
            self.refused = ""
        now = time.monotonic()
        if now - self.events_read_at >= min(EVENTS_S, 10 * self.patience.poll_s):
            self.events_read_at = now
            waiting = [pod for pod in pods if self.attempts[pod["metadata"]["uid"]].phase in _NOT_STARTED]
            if waiting or not pods:
                self._report_events(*(waiting or [job]))

    def _report_pod(self, attempt: Attempt) -> None:
        texts = {
            "waiting": f"waits for a node: {attempt.why}" if attempt.why else "waits for a node",
            "starting": f"starts on {attempt.node}",
            "stuck": f"can't start on {attempt.node}: {attempt.reason}: {attempt.why}",
            "running": f"runs on {attempt.node}",
            "succeeded": "succeeded",
            "failed": f"failed on {attempt.node or 'no node'}: {attempt.why}",
            "interrupted": f"was interrupted on {attempt.node}: {attempt.why}; it will be restarted",
        }
        self._report_change(attempt.pod, f"pod {attempt.pod} {texts[attempt.phase]}")

    def _report_waiting_job(self, job: Manifest) -> None:
        if not job["spec"].get("suspend"):
            return
        why = self._why_queued(job["metadata"]["uid"]) or "it is suspended"
        self._report_change("job", f"job {self.name} waits in its queue: {why}")

    def _why_queued(self, uid: str) -> str:
        """Why Kueue has not admitted the Job, in Kueue's words."""
        try:
            conditions = kueue_conditions(self.cluster, self.namespace, {uid})
        except GpukilnError as error:
            return error.message
        return "; ".join(filter(None, (condition.get("message", "") for condition in conditions or ())))

    def _report_events(self, *manifests: Manifest) -> None:
        """Report events of waiting objects: autoscalers, volumes and quotas give reasons only there."""
        for manifest in manifests:
            meta = manifest["metadata"]
            try:
                events = self.cluster.list(
                    "Event", self.namespace, fields=f"involvedObject.uid={meta['uid']}"
                )
            except GpukilnError as error:
                self._report_change("events", f"events can't be read: {error.message}")
                return
            for event in events:
                if event.get("reason") == "FailedCreate" and not self.attempts:
                    # The time of the first rejection, because the limit is for rejections in a row.
                    self.refused_since = self.refused_since if self.refused else time.monotonic()
                    self.refused = str(event.get("message", "")).removeprefix(_COMBINED)
                text = f"{event.get('reason', '')}: {event.get('message', '')}"
                if event.get("reason") == "FailedScheduling" or text in self.events:
                    continue  # _report_pod reports the pod's condition
                if event.get("type") == "Warning" or event.get("reason") in REPORTED_EVENTS:
                    self.events.add(text)
                    self.say(f"{meta['name']}: {text}")

    def _report_change(self, about: str, text: str) -> None:
        if self.last_reported.get(about) != text:
            self.last_reported[about] = text
            self.say(text)

    def _give_up_if_late(self) -> None:
        """Give up a Job that does not start; if this process submitted it and it never ran, delete it."""
        phases = [attempt.phase for attempt in self.attempts.values()]
        now = time.monotonic()
        if "stuck" not in phases:
            self.stuck_since = None
        # Between two attempts the state is ErrImagePull, then ImagePullBackOff: both are stuck, and one time.
        elif self.stuck_since is None:
            self.stuck_since = now
        stuck = next((attempt for attempt in self.attempts.values() if attempt.phase == "stuck"), None)
        if stuck and self.stuck_since is not None and now - self.stuck_since >= self._stuck_for(stuck):
            raise UnavailableError(
                f"{stuck.pod} can't start: {stuck.reason}: {stuck.why}",
                details=self._remove_unstarted(),
                hint=_NOT_ROOT
                if "runAsNonRoot" in stuck.why
                else _STUCK_HINTS.get(stuck.reason, _STUCK_HINT),
            )
        if self.refused and now - self.refused_since >= self._refused_for():
            raise UnavailableError(
                f"job {self.name}: the server keeps rejecting its pods: {self.refused}",
                details=self._remove_unstarted(),
                hint=next(
                    (hint for text, hint in _REFUSED_HINTS.items() if text in self.refused), _REFUSED_HINT
                ),
            )
        if (
            not self._has_run()
            and self.patience.start_s is not None
            and now - self.begun >= self.patience.start_s
        ):
            why = next(
                (attempt.why for attempt in self.attempts.values() if attempt.why), ""
            ) or self.last_reported.get("job", "")
            raise BusyError(
                f"it did not start within {Duration(self.patience.start_s).shown}"
                + (f": {why}" if why else ""),
                details=self._remove_unstarted(),
                hint="try later, other GPUs (--gpu-model L4,T4), or less CPU and memory; "
                "`invoke k8s.doctor` finds the cause",
            )

    def _remove_unstarted(self) -> tuple[str, ...]:
        """Delete the Job if this process submitted it and it never ran; returns lines about what remains."""
        if not self.is_submitter or self._has_run():
            return tuple(resume_hints(self.name, self.namespace, self.cluster.context))
        try:
            self.cluster.delete("Job", self.name, self.namespace)
        except GpukilnError as error:
            lines = resume_hints(self.name, self.namespace, self.cluster.context)
            return (f"the Job could not be deleted: {error.message}", *lines)
        return ("the Job never ran and was deleted, so that it holds no GPU",)

    def _has_run(self) -> bool:
        return any(attempt.started or attempt.exit_code is not None for attempt in self.attempts.values())

    def _stuck_for(self, attempt: Attempt) -> float:
        # Of these the next attempt has the same result.
        return 0.0 if attempt.reason in ("InvalidImageName", "ErrImageNeverPull") else self.patience.stuck_s

    def _refused_for(self) -> float:
        if "exceeded quota" in self.refused:  # quota becomes free when other pods of the namespace end
            return math.inf
        # The level of the namespace does not change by itself; webhooks may come back.
        return 0.0 if _SECURITY in self.refused else self.patience.stuck_s

    # --- logs -----------------------------------------------------------------------------------------

    def _start_reader(self, uid: str, attempt: Attempt) -> None:
        begin = "" if attempt.index is None else f"[{attempt.index}] "
        before = [
            self.readers[other] for other in self.readers if self.attempts[other].index == attempt.index
        ]
        args = (uid, attempt.pod, begin, before)
        # A reader that hangs in a connection must not keep the process alive.
        reader = self.readers[uid] = threading.Thread(target=self._read_log, args=args, daemon=True)
        reader.start()

    def _read_log(self, uid: str, pod: str, begin: str, before: list[threading.Thread]) -> None:
        """Put each line of a pod's log into the queue exactly once, over any number of reconnections.

        Args:
            before: Readers of the pods that this pod replaced: their lines come first.
        """
        for reader in before:
            reader.join()
        done, failures, whole = 0, 0, True
        while True:
            attempt, opened = self.attempts[uid], False
            ended = attempt.exit_code is not None or attempt.phase == "gone"
            try:
                lines = self.cluster.logs(pod, self.namespace, container=CONTAINER, follow=not ended)
                for number, line in enumerate(lines):
                    opened = True
                    # A new connection sends the log from its start.
                    if number >= done:
                        self.lines.put(begin + line)
                        done, failures = number + 1, 0
                whole = True
                if ended:
                    return
            except GpukilnError as error:
                failures, whole = failures + 1, whole and not opened
                gone = attempt.phase == "gone"  # its log was deleted with the pod
                if gone or (ended and failures > _LAST_TRIES) or failures > _TRIES:
                    if not (gone and whole):
                        self.notes.append(f"the log of {pod} is incomplete: {error.message}")
                    return
            # A container may end between two connections; its log stays readable.
            time.sleep(min(self.patience.poll_s, 0.5))

    def _drain(self, for_s: float) -> None:
        """Write the lines that were read, for some seconds."""
        until = time.monotonic() + for_s
        while True:
            left = until - time.monotonic()
            try:
                self.write(self.lines.get(timeout=left) if left > 0 else self.lines.get_nowait())
            except queue.Empty:
                if left <= 0:
                    return

    def _finish(self, job: Manifest) -> JobEnd:
        until = time.monotonic() + LOG_S
        # The Job is reported as ended before the last lines have arrived.
        while any(reader.is_alive() for reader in self.readers.values()) and time.monotonic() < until:
            self._drain(min(0.05, self.patience.poll_s))
        self._drain(0)
        for uid, reader in self.readers.items():
            if reader.is_alive():
                self.notes.append(f"the log of {self.attempts[uid].pod} was not read completely")
        for note in self.notes:
            self.say(note)
        result = state.job_end(job, list(self.attempts.values()), self.notes)
        assert result is not None  # noqa: S101 - has_ended() said so
        return result


class _JobDeletedError(UnavailableError):
    """The Job was deleted."""


_NOT_STARTED = ("waiting", "starting", "stuck")
_TRIES, _LAST_TRIES = 20, 2  # failures in a row to read a log: of a running pod, and of one that ended
_COMBINED = "(combined from similar events): "  # k8s.io/client-go/tools/record
_SECURITY = "violates PodSecurity"  # k8s.io/pod-security-admission/admission
_NOT_ROOT = "set a user other than root by --run-as UID"
_REFUSED_HINT = "`kubectl describe job` shows its events"
_REFUSED_HINTS = {
    _SECURITY: "--security restricted renders pods that this level admits",
    "serviceaccount": "name an existing one by --service-account",
    "RuntimeClass": "name an existing one by --runtime-class",
    "PriorityClass": "name an existing one by --priority-class",
}
_STUCK_HINT = "check --image, and --pull-secret for its registry"
_STUCK_HINTS = {
    "CreateContainerConfigError": "a Secret, ConfigMap or key does not exist: check --env-secret",
    "InvalidImageName": "--image has another form than NAME:TAG",
    "RunContainerError": "the node's container runtime rejects it: `invoke k8s.doctor` finds the cause",
}


def _age(pod: Manifest) -> tuple[str, int]:
    """Sort key, oldest first; within a second by resourceVersion, which grows (KEP-5504)."""
    meta = pod["metadata"]
    return str(meta.get("creationTimestamp")), int(meta.get("resourceVersion", 0))


def _is_owned_by(pod: Manifest, job: Manifest) -> bool:
    """Whether the Job owns a pod; an earlier Job of the same name may own it."""
    return any(
        owner_reference.get("uid") == job["metadata"]["uid"]
        for owner_reference in pod["metadata"].get("ownerReferences", ())
    )
