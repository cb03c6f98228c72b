"""The document of `k8s.job --json`."""

from __future__ import annotations

from typing import Any

from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.jobs.job import GpuJob
from gpukiln.kubernetes.jobs.state import JobEnd
from gpukiln.typed import strict

JOB = "k8s.job/1"


@strict
class JobDocument:
    """A job, and how it ended.

    Args:
        context: Where it was submitted; empty: it was only rendered.
        instance_types: Types that can run it, smallest first; none with --product.
        manifests: As they are sent to the API server; none for a Job that was only followed.
        notes: Consequences that the user should know.
        end: Null if it was not followed.
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
    """The document of a job that was rendered, and possibly run."""
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
    """The document of an existing Job that was followed."""
    return JobDocument(JOB, name, namespace or cluster.namespace, cluster.context, (), (), (), end)
