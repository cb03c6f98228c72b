"""A checked GPU job, and the volumes that it mounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.kubernetes.jobs.choice import Provider, SelectBy
from gpukiln.kubernetes.jobs.notes import notes
from gpukiln.kubernetes.jobs.render import manifests
from gpukiln.kubernetes.jobs.values import object_name
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.units import Memory

Security = Literal["", "restricted"]


@dataclass(frozen=True)
class Mount:
    """A volume of the container.

    Args:
        source: Name of a claim, a folder of the node (begins with /), or empty: a folder of the pod.
        size: Of a folder of the pod: its size limit.
    """

    path: str
    source: str = ""
    size: str = ""

    @classmethod
    def parse_cache(cls, text: str) -> Mount:
        """Read --cache.

        >>> Mount.parse_cache("models:/models")
        Mount(path='/models', source='models', size='')

        Raises:
            UsageError: The text has another form.
        """
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/"):
            raise UsageError(
                f"--cache {text!r}, wanted CLAIM:/PATH or /FOLDER-OF-THE-NODE:/PATH", hint="models:/models"
            )
        return cls(path, source if source.startswith("/") else object_name(source, "--cache"))

    @classmethod
    def parse_scratch(cls, text: str) -> Mount:
        """Read --scratch.

        >>> Mount.parse_scratch("200Gi:/scratch")
        Mount(path='/scratch', source='', size='200Gi')

        Raises:
            UsageError: The text has another form.
        """
        size, _, path = text.partition(":")
        if not path.startswith("/"):
            raise UsageError(f"--scratch {text!r}, wanted SIZE:/PATH", hint="200Gi:/scratch")
        return cls(path, size=Memory.parse(size, "--scratch").quantity)


def checked_mounts(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """The mounts, if the API server accepts them together.

    Raises:
        UsageError: A path is not valid, or is used twice.
    """
    for mount in mounts:
        for path in (mount.path, mount.source):
            if ".." in path.split("/"):
                raise UsageError(
                    f"{path} has the step `..`, which the API server rejects",
                    hint="write the path without it",
                )
        if ":" in mount.path:
            raise UsageError(f"{mount.path}: a path in a container can't have `:`", hint="use another path")
    paths = ["/dev/shm", *(mount.path.rstrip("/") for mount in mounts)]  # noqa: S108 - the container's
    for path in paths:
        if not path or paths.count(path) > 1:
            raise UsageError(f"{path or '/'} can't be mounted {'twice' if path else 'over'}")
    return tuple(mounts)


@dataclass(frozen=True)
class GpuJob:
    """A checked job; its quantities are texts in Kubernetes' form.

    Args:
        models: Catalogue keys; none: any GPU.
        products: Values of the label nvidia.com/gpu.product that were given instead of models.
        prefer: Models with weights of 1 to 100.
        types: Instance types that can run it; empty with `products`, which name nodes outside EC2.
        mig: MIG profile that `gpus` counts, instead of whole GPUs.
        shared: Whether GPUs that several pods share are accepted.
        memory: Of the container, /dev/shm included.
        timeout_s: Of the whole Job, retries and waiting for a node included.
        ttl_s: How long the Job and its logs stay after its end.
        retries: For failures of the program; interruptions by the cluster don't count.
        give_up: Exit codes after which it is not retried.
        nodes: Pods that run at once and can reach each other.
        provider: What starts the nodes; without `spot` it excludes spot nodes.
        arguments: Whether `command` is passed to the image's entrypoint instead of replacing it.
        security: restricted: pods that meet that Pod Security level; empty: the image's own settings.
        run_as: User and group instead of the image's; None: the image's.
    """

    name: str
    image: str
    command: tuple[str, ...]
    namespace: str
    gpus: int
    models: tuple[str, ...]
    products: tuple[str, ...]
    prefer: tuple[tuple[str, int], ...]
    select_by: SelectBy
    types: tuple[str, ...]
    mig: str
    shared: bool
    arch: str
    cpu: str
    memory: str
    shm: str
    timeout_s: int
    ttl_s: int
    grace_s: int
    retries: int
    give_up: tuple[int, ...]
    nodes: int
    queue: str
    provider: Provider | None
    spot: bool
    mounts: tuple[Mount, ...]
    env: tuple[tuple[str, str], ...]
    env_secrets: tuple[str, ...]
    service_account: str
    pull_secrets: tuple[str, ...]
    runtime_class: str
    priority_class: str
    tolerate: tuple[tuple[str, str], ...]
    node_labels: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...]
    resources: tuple[tuple[str, str], ...]
    arguments: bool
    security: Security
    run_as: tuple[int, int] | None

    def manifests(self) -> list[Manifest]:
        """The Job; before it, for several pods, the Service by which they find each other."""
        return manifests(self)

    def notes(self) -> list[str]:
        """Consequences that the user should know."""
        return list(notes(self))

    def host_folders(self) -> list[str]:
        """The options --cache that mount folders of the node."""
        return [f"{mount.source}:{mount.path}" for mount in self.mounts if mount.source.startswith("/")]

    def restricted(self) -> GpuJob:
        """The job with pods that meet the Pod Security level `restricted`.

        Raises:
            IncompatibleError: It mounts a folder of the node, or runs as root.
        """
        if mounted := self.host_folders():
            raise IncompatibleError(
                f"--cache {mounted[0]}: Pod Security restricted admits no hostPath",
                hint="use --cache CLAIM:/PATH, or --scratch SIZE:/PATH",
            )
        # runAsNonRoot would keep such a container from starting.
        if self.run_as and self.run_as[0] == 0:
            raise IncompatibleError(
                "--run-as 0 is root, which Pod Security restricted does not admit",
                hint="use another user, such as --run-as 1000",
            )
        return replace(self, security="restricted")
