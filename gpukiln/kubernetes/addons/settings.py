"""The settings of a cluster's add-ons: the input of every module of this package.

`Settings` is also the form of the files of `--values`; an unknown key is an error that names the nearest one.
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
    """The taint that keeps pods without a GPU off the nodes; every add-on that runs there tolerates it."""

    key: str = GPU
    value: str = "true"
    # Not PreferNoSchedule, which keeps no pod off a GPU node.
    effect: Literal["NoSchedule", "NoExecute"] = "NoSchedule"

    def toleration(self) -> dict[str, str]:
        """A toleration of any value: providers set different ones (true, present, the model)."""
        return {"key": self.key, "operator": "Exists", "effect": self.effect}


@strict
class SharingSettings:
    """How the GPUs of a node are shared.

    Args:
        replicas: Pods for each GPU with time-slicing or MPS; 0 with other strategies.
    """

    strategy: Strategy = "none"
    replicas: Count = 0


@strict
class Flavor:
    """A kind of GPU node with a quota of its own (a ResourceFlavor of Kueue).

    Args:
        labels: Labels of the nodes, to which Kueue sends pods with this flavor; at most eight.
        resource: The resource that pods request; with mig-mixed a MIG device, for example
            nvidia.com/mig-1g.10gb.
    """

    name: Name
    labels: Annotated[Mapping[str, str], Field(min_length=1, max_length=8)]
    resource: str = GPU


@strict
class Team:
    """A team: a namespace with a GPU quota.

    Args:
        gpus: Flavor -> its guaranteed GPUs, or shares of GPUs with sharing; the team may borrow unused quota
            of other teams beyond that.
        lends: Whether other teams may borrow its unused quota.
        weight: Its share of borrowed quota, relative to the other teams.
    """

    name: Name
    gpus: Mapping[str, Count]
    lends: bool = True
    weight: Annotated[float, Field(gt=0)] = 1


@strict
class Runners:
    """A set of GitHub Actions runners on gpukiln's runner image.

    Args:
        url: The repository, organisation or enterprise that the runners register with.
        image: With its digest, as `invoke docker.push` prints it.
        secret: A Secret in the runners' namespace with the keys of a GitHub App, or github_token.
        name: The name that workflows use in `runs-on`.
        labels: Further labels for `runs-on`.
        most: Most runners at the same time; without jobs there are none.
        gpus: GPUs of each runner.
        flavor: Name of the flavor whose nodes the runners use; empty: any node with a GPU.
        cpu: CPU request of each runner; the default fits a g4dn.xlarge with its DaemonSets.
        memory: Memory of each runner, /dev/shm included.
        shared_memory: Size of /dev/shm.
        ccache: Size of the compiler cache: one volume for all runners of a repository. Each runner of an
            organisation or enterprise has its own, which is removed with its pod.
        storage_class: Storage class of that volume; it must support ReadWriteMany.
    """

    url: str
    image: str
    secret: str = "runner-gpu-github"  # noqa: S105 - its name
    # The chart refuses longer names.
    name: Annotated[Name, Field(max_length=45)] = "runner-gpu"
    labels: tuple[str, ...] = ()
    most: Annotated[int, Field(ge=1)] = 4
    gpus: Annotated[int, Field(ge=1)] = 1
    flavor: str = ""
    cpu: Cpus = "3"
    memory: MemoryQuantity = "12Gi"
    shared_memory: MemoryQuantity = "2Gi"
    ccache: MemoryQuantity = "50Gi"
    # Of EFS, which supports ReadWriteMany; file systems on EBS do not.
    storage_class: str = "efs"


@strict
class Settings:
    """All settings.

    Args:
        cluster: Name of the cluster on the dashboard.
        region: AWS region, for prices.
        kubernetes: Minor version of the cluster; default: that of gpukiln's images.
        provider: What starts the nodes, as for `k8s.nodes`; it decides which labels name the GPU model.
        namespace: Namespace of the device plugin, the exporter and the health agent.
        monitoring_namespace: Namespace of Prometheus and Grafana.
        monitoring_labels: Labels by which the cluster's Prometheus selects rules and monitors.
        idle_percent: Utilisation of a GPU below which it counts as idle.
        idle_minutes: Minutes after which an idle GPU is reported.
        usd_per_hour: Instance type -> price, if it is not the on-demand price.
        taint: Taint of the GPU nodes.
        sharing: Sharing on nodes without the label nvidia.com/device-plugin.config.
        named_sharing: Value of that label -> sharing on these nodes.
        flavors: Flavors of the queue.
        teams: Teams of the queue.
        cpu_per_gpu: CPU quota for each GPU of a flavor that is not an instance type.
        memory_per_gpu: Memory quota, likewise.
        runners: None: no runners.
    """

    cluster: Name = "gpu"
    region: str = "us-west-2"
    kubernetes: Minor = field(default_factory=lambda: load_components()["kubernetes"].version or "")
    provider: Provider = "karpenter"
    namespace: Name = "gpu-system"
    monitoring_namespace: Name = "monitoring"
    # kube-prometheus-stack selects rules and monitors by the label of its release.
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
