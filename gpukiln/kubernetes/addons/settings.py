"""What somebody chose for the add-ons of a cluster: the one input of every module of this package.

`Settings` is also the form of the files of `--values`: a key that is not here is refused, with the nearest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gpukiln.catalog.components import load_components
from gpukiln.kubernetes.check.formats import LABEL
from gpukiln.kubernetes.machines import GPU
from gpukiln.kubernetes.quantity import quantity
from gpukiln.typed import strict, validated
from gpukiln.units import Memory

QUEUE = "gpu"  # the LocalQueue of every team's namespace

Strategy = Literal["none", "time-slicing", "mps", "mig-single", "mig-mixed"]
Provider = Literal["karpenter", "managed", "asg"]


def _label(text: str) -> str:
    if not LABEL.fullmatch(text):
        raise ValueError("wanted a name of at most 63 small letters, digits and dashes")
    return text


def _cpus(text: str) -> str:
    if (quantity(text) or 0) <= 0:
        raise ValueError('wanted CPUs such as "4" or "500m"')
    return text


def _minor(text: str) -> str:
    if not re.fullmatch(r"1\.\d{2}", text):
        raise ValueError('wanted a minor version such as "1.35"')
    return text


Name = Annotated[str, AfterValidator(_label)]
"""Of an object, a namespace or a label's value (RFC 1123)."""
Cpus = Annotated[str, AfterValidator(_cpus)]
MemoryQuantity = Annotated[str, validated(lambda text: Memory.parse(text, "").quantity)]
Minor = Annotated[str, AfterValidator(_minor)]
Count = Annotated[int, Field(ge=0)]


@strict
class Taint:
    """What keeps pods without a GPU off the nodes; every add-on that runs there tolerates it."""

    key: str = GPU
    value: str = "true"
    effect: Literal["NoSchedule", "NoExecute"] = "NoSchedule"

    def toleration(self) -> dict[str, str]:
        """Of any value: providers set different ones (true, present, the model)."""
        return {"key": self.key, "operator": "Exists", "effect": self.effect}


@strict
class SharingSettings:
    """How the GPUs of a node are shared.

    Args:
        replicas: Pods for each GPU, where it is time-sliced or shared by MPS; else 0.
    """

    strategy: Strategy = "none"
    replicas: Count = 0


@strict
class Flavor:
    """A kind of GPU node that quotas tell apart.

    Args:
        labels: What the nodes bear, and what pods that get this flavor are sent to; Kueue takes eight.
        resource: What its pods ask for; another one where MIG devices of several sizes are distinguished
            (mig-mixed), nvidia.com/mig-1g.10gb for example.
    """

    name: Name
    labels: Annotated[Mapping[str, str], Field(min_length=1, max_length=8)]
    resource: str = GPU


@strict
class Team:
    """Who shares the GPUs: a namespace, with a quota of its own.

    Args:
        gpus: By flavor, how many of its resource the team has when everybody wants some; it may borrow what
            others leave. Where GPUs are shared, these are shares.
        lends: Whether others may borrow what it leaves.
        weight: Its share of what is borrowed, against the others'.
    """

    name: Name
    gpus: Mapping[str, Count]
    lends: bool = True
    weight: Annotated[float, Field(gt=0)] = 1


@strict
class Runners:
    """A set of GitHub Actions runners on the project's runner image.

    Args:
        url: The repository, organisation or enterprise that they register with.
        image: With its digest, as `invoke docker.push` says it.
        secret: Of the runners' namespace: the keys of a GitHub App, or github_token.
        name: What workflows ask for by `runs-on`.
        labels: Further words for `runs-on`.
        most: Runners at the same time; there are none while there is no job.
        gpus: Of each runner.
        flavor: Of the queue's, whose nodes they run on; empty: any with a GPU.
        cpu: That each asks for; what a g4dn.xlarge has left beside its DaemonSets, unless set.
        memory: Of each, with the shared memory.
        shared_memory: Of each, in /dev/shm.
        ccache: Size of the compiler cache: a volume that the runners of one repository share. Runners of an
            organisation or enterprise have one each, which goes with its pod.
        storage_class: Of that volume; it must be one of which several nodes can mount a volume.
    """

    url: str
    image: str
    secret: str = "runner-gpu-github"  # noqa: S105 - its name
    name: Annotated[Name, Field(max_length=45)] = "runner-gpu"
    labels: tuple[str, ...] = ()
    most: Annotated[int, Field(ge=1)] = 4
    gpus: Annotated[int, Field(ge=1)] = 1
    flavor: str = ""
    cpu: Cpus = "3"
    memory: MemoryQuantity = "12Gi"
    shared_memory: MemoryQuantity = "2Gi"
    ccache: MemoryQuantity = "50Gi"
    storage_class: str = "efs"


@strict
class Settings:
    """Everything that somebody chose.

    Args:
        cluster: Its name, as metrics and rules tell it.
        region: Of AWS, whose prices count.
        kubernetes: The minor version of the cluster; that of our images, unless set.
        provider: Of the nodes, as for `k8s.nodes`: it decides which labels tell GPU models apart.
        namespace: Of the device plugin, the exporter and the nodes' health.
        monitoring_namespace: Of Prometheus and Grafana.
        monitoring_labels: What the cluster's Prometheus looks for on rules and monitors.
        idle_percent: Of a GPU's use, below which whoever holds it leaves it idle.
        idle_minutes: After how many of them that is reported.
        usd_per_hour: By instance type what you pay, where that is not the price on demand.
        taint: Of the GPU nodes.
        sharing: Of nodes that say nothing else.
        named_sharing: By the value of the node label nvidia.com/device-plugin.config, another one.
        flavors: Of the queue.
        teams: Of the queue.
        cpu_per_gpu: Of the quotas, where a flavor is no instance type, which says it better.
        memory_per_gpu: The same.
        runners: None: no runners.
    """

    cluster: Name = "gpu"
    region: str = "us-west-2"
    kubernetes: Minor = field(default_factory=lambda: load_components()["kubernetes"].version or "")
    provider: Provider = "karpenter"
    namespace: Name = "gpu-system"
    monitoring_namespace: Name = "monitoring"
    monitoring_labels: Mapping[str, str] = field(default_factory=lambda: {"release": "kube-prometheus-stack"})
    idle_percent: Annotated[int, Field(ge=1, le=100)] = 5
    idle_minutes: Annotated[int, Field(ge=1)] = 60
    usd_per_hour: Mapping[str, Decimal] = field(default_factory=dict)
    taint: Taint = Taint()
    sharing: SharingSettings = SharingSettings()
    named_sharing: Mapping[Name, SharingSettings] = field(default_factory=dict)
    flavors: tuple[Flavor, ...] = ()
    teams: tuple[Team, ...] = ()
    cpu_per_gpu: Cpus = "16"
    memory_per_gpu: MemoryQuantity = "64Gi"
    runners: Runners | None = None
