"""What `k8s.job --json` prints."""

from __future__ import annotations

from typing import Any

from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.jobs.request import GpuJob
from gpukiln.kubernetes.jobs.state import JobEnd
from gpukiln.typed import strict

JOB = "k8s.job/1"


@strict
class JobDocument:
    """A job, and how it ended.

    Args:
        context: Where it was submitted; empty: it was only rendered.
        instance_types: Those that can run it, smallest first; none where its nodes were named by their label.
        manifests: As the API server takes them; none of a Job that was only followed.
        notes: What its user may not have in mind.
        end: Null where it was not followed.
    """

    schema: str
    name: str
    namespace: str
    context: str
    instance_types: tuple[str, ...]
    manifests: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    end: JobEnd | None


def document(job: GpuJob, *, cluster: Cluster | None = None, end: JobEnd | None = None) -> JobDocument:
    """A job that was rendered, and perhaps run."""
    return JobDocument(
        JOB,
        job.name,
        job.namespace or (cluster.namespace if cluster else ""),
        cluster.context if cluster else "",
        job.types,
        tuple(job.manifests()),
        tuple(job.notes()),
        end,
    )


def attached_document(cluster: Cluster, name: str, namespace: str, end: JobEnd) -> JobDocument:
    """A Job that was there already."""
    return JobDocument(JOB, name, namespace or cluster.namespace, cluster.context, (), (), (), end)
