"""Kueue: jobs wait in the queue of their team, which has a GPU quota and may borrow unused quota of others.

Fields: kubernetes-sigs/kueue, apis/kueue/v1beta2 and apis/config/v1beta2.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from gpukiln.catalog.components import load_add_ons
from gpukiln.catalog.gpu_names import ec2_label, is_ambiguous
from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_type, instance_types
from gpukiln.catalog.load import version_key
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.kubernetes.addons import helm
from gpukiln.kubernetes.addons.settings import QUEUE, Flavor, Provider, Settings, Team
from gpukiln.kubernetes.addons.sharing import GPU_NAME, INSTANCE_TYPE, replicas
from gpukiln.kubernetes.machines import GPU, GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest, dump
from gpukiln.kubernetes.quantity import quantity
from gpukiln.kubernetes.scheduling import quantity_text
from gpukiln.typed import unknown
from gpukiln.units import Memory

VALUES, QUEUES = "queue/values.yaml", "queue/queues.yaml"
NAMESPACE = "kueue-system"
API = "kueue.x-k8s.io/v1beta2"
RESERVED_NAMESPACES = ("default", "kueue-system", "arc-systems", "arc-runners")
COHORT = "gpu"
TEAM_LABEL = "gpukiln.io/team"  # label of namespaces whose jobs must go through a queue
ANY_GPU = Flavor("gpu", {GPU_PRESENT: "true"})  # the only flavor, unless the settings name others

# Kinds that Kueue suspends until their queue admits them. Deployments and Pods are not among them.
FRAMEWORKS = (
    *("batch/job", "jobset.x-k8s.io/jobset", "ray.io/rayjob", "ray.io/raycluster", "kubeflow.org/mpijob"),
    *("kubeflow.org/pytorchjob", "kubeflow.org/jaxjob", "trainer.kubeflow.org/trainjob"),
)


def files(settings: Settings) -> dict[str, str]:
    _check(settings)
    return {
        VALUES: helm.values("kueue", _values()),
        QUEUES: dump(
            *(_flavor(settings, flavor) for flavor in _flavors(settings)),
            {"apiVersion": API, "kind": "Cohort", "metadata": {"name": COHORT}, "spec": {}},
            *(manifest for team in settings.teams for manifest in _team(settings, team)),
            head=(
                f"A job joins the queue of its namespace by the label kueue.x-k8s.io/queue-name: {QUEUE}.",
                "Other teams may borrow unused quota; when the team needs it, Kueue ends the newest of their "
                "jobs.",
            ),
        ),
    }


def install(_: Settings) -> tuple[str, ...]:
    return helm.upgrade_command("kueue", "kueue", NAMESPACE, VALUES), helm.apply_command(QUEUES)


def parse_flavor(text: str, provider: Provider) -> Flavor:
    """Read a flavor: [NAME=]WHAT[:RESOURCE], where WHAT is an instance type, a GPU or LABEL=VALUE.

    Raises:
        UsageError: It has another form, or names an unknown type or GPU.
    """
    text, _, resource = text.partition(":")
    first, equals, rest = text.partition("=")
    name, what = ("", text) if not equals or "/" in first else (first, rest)
    label, equals, value = what.partition("=")
    if equals:
        labels = {label: value}
        name = name or re.sub("[^a-z0-9]+", "-", value.lower()).strip("-")
    elif "." in what:
        machine = instance_type(what)
        if machine.status == "retired":
            raise IncompatibleError(
                f"{what} is retired: AWS starts no node of this flavor",
                hint=f"{' or '.join(machine.alternatives) or 'another type'} instead",
            )
        labels = {INSTANCE_TYPE: what}
    else:
        labels = _labels_of_gpu(what.lower(), provider)
    return Flavor(
        name or re.sub("[^a-z0-9]+", "-", what.lower()),
        labels,
        f"nvidia.com/{resource}" if resource else GPU,
    )


def _labels_of_gpu(key: str, provider: Provider) -> dict[str, str]:
    """Labels of nodes with a GPU that are known before a node exists, which feature discovery's are not.

    aws/karpenter-provider-aws, pkg/providers/instancetype/types.go: EC2's name in small letters, and MiB;
    cluster-autoscaler, cloudprovider/aws/README.md: the node group's own value of the label.
    """
    machines = [machine for machine in instance_types().values() if gpu(machine.gpu).manufacturer == "NVIDIA"]
    known = {machine.gpu for machine in machines}
    if key not in known:
        raise unknown("GPU", key, known)
    if provider != "karpenter":
        return {"k8s.amazonaws.com/accelerator": f"nvidia-{key}"}
    labels = {GPU_NAME: ec2_label(key)}
    if is_ambiguous(key):
        memory = next(
            machine.gpu_memory_mib for machine in machines if machine.gpu == key and machine.gpu_fraction == 1
        )
        labels["karpenter.k8s.aws/instance-gpu-memory"] = str(memory)
    return labels


def _check(settings: Settings) -> None:
    if not settings.teams:
        raise UsageError("the add-on queue needs a team", hint="--team vision=4, for example")
    least = load_add_ons()["kueue"].kubernetes or ""
    if version_key(settings.kubernetes) < version_key(least):
        raise IncompatibleError(
            f"Kueue {load_add_ons()['kueue'].version} needs Kubernetes {least} or later, "
            f"the cluster has {settings.kubernetes}",
            hint="upgrade the cluster; `--only` renders the other add-ons",
        )
    for kind, rows in (("team", settings.teams), ("flavor", settings.flavors)):
        names = [row.name for row in rows]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"{kind} {', '.join(twice)} is named twice", hint=f"one {kind} of each name")
    for team in settings.teams:
        if team.name in (*RESERVED_NAMESPACES, settings.namespace, settings.monitoring_namespace) or (
            team.name.startswith("kube-")
        ):
            raise UsageError(
                f"team {team.name} would use a namespace whose privileged pods a team's namespace does not "
                "admit",
                hint="give the team another name",
            )
    known = [flavor.name for flavor in _flavors(settings)]
    for team in settings.teams:
        for name in team.gpus:
            if name not in known:
                raise unknown(f"flavor of team {team.name}", name, known)
        if not any(team.gpus.values()) and not any(any(team.gpus.values()) for team in settings.teams):
            raise UsageError("no team has a GPU: no job would start", hint="--team vision=4")


def _flavors(settings: Settings) -> tuple[Flavor, ...]:
    return settings.flavors or (ANY_GPU,)


def _values() -> dict[str, Any]:
    configuration = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "metrics": {"bindAddress": ":8443", "enableClusterQueueResources": True},
        "webhook": {"port": 9443},
        # Two replicas run, and only the leader admits jobs.
        "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
        # A job without the queue label must not bypass the queue; namespaces without TEAM_LABEL stay
        # unmanaged.
        "manageJobsWithoutQueueName": True,
        "managedJobsNamespaceSelector": {"matchExpressions": [{"key": TEAM_LABEL, "operator": "Exists"}]},
        # After this time without a node, Kueue evicts the job and the next one gets its turn.
        "waitForPodsReady": {"timeout": "30m", "blockAdmission": False},
        # A framework whose CRD is missing is skipped by Kueue.
        "integrations": {"frameworks": list(FRAMEWORKS)},
        "fairSharing": {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]},
        # Kueue never admits a job that requests a resource without a quota, so it must not count these.
        "resources": {"excludeResourcePrefixes": ["ephemeral-storage", "hugepages-", "vpc.amazonaws.com/"]},
    }
    return {
        "controllerManager": {"replicas": 2, "podDisruptionBudget": {"enabled": True, "minAvailable": 1}},
        "managerConfig": {"controllerManagerConfigYaml": dump(configuration).removeprefix("---\n")},
    }


def _flavor(settings: Settings, flavor: Flavor) -> Manifest:
    return {
        "apiVersion": API,
        "kind": "ResourceFlavor",
        "metadata": {"name": flavor.name},
        "spec": {"nodeLabels": dict(flavor.labels), "tolerations": [settings.taint.toleration()]},
    }


def _team(settings: Settings, team: Team) -> tuple[Manifest, ...]:
    own = {"kubernetes.io/metadata.name": team.name}
    return (
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": team.name,
                "labels": {
                    TEAM_LABEL: team.name,
                    # A pod that is privileged or mounts /dev can use every GPU of the node.
                    "pod-security.kubernetes.io/enforce": "baseline",
                },
            },
        },
        {
            "apiVersion": API,
            "kind": "ClusterQueue",
            "metadata": {"name": team.name},
            "spec": {
                "cohortName": COHORT,
                "namespaceSelector": {"matchLabels": own},
                # A large job that does not fit must not block smaller ones behind it.
                "queueingStrategy": "BestEffortFIFO",
                # Lent quota comes back at once; within a team only a higher priority preempts.
                "preemption": {"reclaimWithinCohort": "Any", "withinClusterQueue": "LowerPriority"},
                # Use a free flavor before quota is borrowed, and before jobs are preempted.
                "flavorFungibility": {"whenCanBorrow": "TryNextFlavor", "whenCanPreempt": "TryNextFlavor"},
                "fairSharing": {"weight": _decimal_text(Decimal(str(team.weight)))},
                "resourceGroups": [_quotas(settings, team)],
            },
        },
        {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": QUEUE, "namespace": team.name},
            "spec": {"clusterQueue": team.name},
        },
    )


def _quotas(settings: Settings, team: Team) -> dict[str, Any]:
    """The quotas; every flavor lists every resource in the same order, or the API server refuses them."""
    kinds = _flavors(settings)
    resources = ["cpu", "memory", *dict.fromkeys(kind.resource for kind in kinds)]
    rows = []
    for kind in kinds:
        count = team.gpus.get(kind.name, 0)
        cpu, memory = _cpu_and_memory(settings, kind)
        amount = {
            "cpu": quantity_text("cpu", (quantity(cpu) or 0) * Decimal(count)),
            "memory": Memory(Memory.parse(memory, "memory_per_gpu") * count).quantity,
            kind.resource: str(count),
        }
        # lendingLimit 0: others can't borrow the quota; without the field they can borrow all of it.
        limit = {} if team.lends else {"lendingLimit": "0"}
        quotas = [{"name": name, "nominalQuota": amount.get(name, "0"), **limit} for name in resources]
        rows.append({"name": kind.name, "resources": quotas})
    return {"coveredResources": resources, "flavors": rows}


def _cpu_and_memory(settings: Settings, kind: Flavor) -> tuple[str, str]:
    """CPU and memory for one GPU, or for one share of a shared GPU."""
    machine = instance_types().get(kind.labels.get(INSTANCE_TYPE, ""))
    if machine is None:
        return settings.cpu_per_gpu, settings.memory_per_gpu
    shares = machine.gpus * replicas(settings.sharing)
    return f"{machine.vcpu * 1000 // shares}m", f"{machine.memory_mib // shares}Mi"


def _decimal_text(value: Decimal) -> str:
    return f"{value.normalize():f}"
