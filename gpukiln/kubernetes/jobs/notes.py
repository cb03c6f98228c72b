"""Consequences of a GPU job that its user should know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpukiln.kubernetes.jobs import choice
from gpukiln.redact import redact

if TYPE_CHECKING:
    from gpukiln.kubernetes.jobs.job import GpuJob


def notes(job: GpuJob) -> Iterator[str]:
    """Each consequence of a job that its user should know."""
    # An instance of a MIG profile is a part of a GPU: what is left is no whole GPU.
    if job.types and not job.mig:
        smallest, others = choice.unused_gpus(job.types, job.gpus)
        if others > 0:
            yield (
                f"the smallest type with {job.gpus} GPUs is {smallest}: {others} more of its GPUs "
                "are paid for, whether other pods use them or not"
            )
    if job.gpus > 1 and (job.mig or any("-MIG-" in product for product in job.products)):
        yield (
            f"a CUDA process uses one MIG device, the first that it sees, and each pod has {job.gpus}: start "
            "one process per device with CUDA_VISIBLE_DEVICES=UUID (nvidia-smi -L in the container lists "
            "them), or take --gpus 1 in several Jobs, or a larger profile"
        )
    if job.arch == "arm64":
        yield "these machines are arm64: the image must be built for it"
    if job.security and not job.run_as:
        yield (
            "Pod Security restricted: a container whose image names root or no number as its user does not "
            "start; --run-as UID names another"
        )
    for name, value in job.env:
        # A secret in a manifest is stored in etcd in plain text, and shown by kubectl describe.
        if value and redact(f"{name}={value}") != f"{name}={value}":
            yield f"--env {name}: who may read Jobs reads it; --env-secret takes it from a Secret"
    # A scratch folder, which has no source, is deleted with the node.
    if job.spot and not any(mount.source for mount in job.mounts):
        yield "spot: a checkpoint must outlive the node: --cache CLAIM:/PATH, or write it to object storage"
    if job.spot and job.nodes > 1 and not job.retries:
        yield (
            "spot with --nodes: where one pod is taken away, the others fail, which counts: "
            "--retries says how often"
        )
    claims = [mount.source for mount in job.mounts if mount.source and not mount.source.startswith("/")]
    if job.nodes > 1 and claims:
        yield f"--nodes: {', '.join(claims)} must be ReadWriteMany or ReadOnlyMany (EFS, FSx): EBS is for one"
