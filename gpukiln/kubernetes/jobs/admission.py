"""Adapts a job to the Pod Security level of its namespace.

kubernetes.io/docs/concepts/security/pod-security-admission
"""

from __future__ import annotations

from collections.abc import Callable

from gpukiln.errors import IncompatibleError
from gpukiln.kubernetes.cluster import AnswerError, Cluster
from gpukiln.kubernetes.jobs.job import GpuJob

ENFORCE = "pod-security.kubernetes.io/enforce"


def adapt_to_namespace(cluster: Cluster, job: GpuJob, say: Callable[[str], None]) -> GpuJob:
    """The job, restricted if the namespace enforces the level restricted.

    Raises:
        IncompatibleError: The namespace does not admit the job in any form.
    """
    namespace = job.namespace or cluster.namespace
    try:
        there = cluster.get("Namespace", namespace)
    # Reading a Namespace is often not allowed; the API server then rejects the pods if need be.
    except AnswerError as error:
        say(f"the Pod Security level of {namespace} is unknown: {error.message}")
        return job
    level = ((there or {}).get("metadata", {}).get("labels") or {}).get(ENFORCE, "")
    # hostPath is not allowed from baseline on (kubernetes.io/docs/concepts/security/pod-security-standards).
    if level in ("baseline", "restricted") and (mounted := job.host_folders()):
        raise IncompatibleError(
            f"--cache {mounted[0]}: {namespace} enforces Pod Security {level}, which admits no hostPath",
            hint="use --cache CLAIM:/PATH, or a namespace that admits hostPath",
        )
    if level != "restricted" or job.security == "restricted":
        return job
    say(f"{namespace} enforces Pod Security restricted: rendered as with --security restricted")
    return job.restricted()
