"""Renders a job as manifests: plain dicts, with every quantity as a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.kubernetes import machines
from gpukiln.kubernetes.jobs import choice
from gpukiln.kubernetes.machines import GPU
from gpukiln.kubernetes.quantity import quantity

if TYPE_CHECKING:
    from gpukiln.kubernetes.jobs.job import GpuJob
    from gpukiln.kubernetes.manifest import Manifest

CONTAINER = "main"
INDEX = "batch.kubernetes.io/job-completion-index"  # k8s.io/api/batch/v1
JOB_NAME = "batch.kubernetes.io/job-name"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # kubernetes-sigs/kueue, docs of v1beta2
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
MASTER_PORT = 29500  # default of torch.distributed
GPU_TOLERATION = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
# What Pod Security `restricted` requires of a pod and of each container. Of the volumes that are rendered
# here it rejects hostPath (kubernetes.io/docs/concepts/security/pod-security-standards).
POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
HOST_LABEL = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"


def manifests(job: GpuJob) -> list[Manifest]:
    """The Job; before it, for several pods, the headless Service that gives them DNS names."""
    return [*([_service(job)] if job.nodes > 1 else []), _job(job)]


def _meta(job: GpuJob, **more: Any) -> dict[str, Any]:
    own = {"app.kubernetes.io/name": job.name, "app.kubernetes.io/managed-by": "gpukiln"}
    space = {"namespace": job.namespace} if job.namespace else {}
    return {"name": job.name, **space, "labels": {**own, **dict(job.labels)}, **more}


def _job(job: GpuJob) -> Manifest:
    meta = _meta(job)
    pod_labels = dict(meta["labels"])
    if job.queue:
        meta["labels"] = {**meta["labels"], QUEUE_LABEL: job.queue}
    indexed = {"completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes}
    template_meta: dict[str, Any] = {"labels": pod_labels}
    if not job.spot:  # a spot interruption removes the node in any case
        template_meta["annotations"] = {DO_NOT_DISRUPT: "true"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            **(indexed if job.nodes > 1 else {}),
            # backoffLimit counts failed pods, and a failure of one node makes all others fail.
            "backoffLimit": job.retries * job.nodes,
            "activeDeadlineSeconds": job.timeout_s,
            "ttlSecondsAfterFinished": job.ttl_s,
            "podFailurePolicy": {"rules": _failures(job)},
            "template": {"metadata": template_meta, "spec": _pod(job)},
        },
    }


def _failures(job: GpuJob) -> list[dict[str, Any]]:
    """The rules of podFailurePolicy; the first match applies. A disruption is no failure of the program."""
    rules: list[dict[str, Any]] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
    if job.give_up:
        codes = {"containerName": CONTAINER, "operator": "In", "values": list(job.give_up)}
        rules.append({"action": "FailJob", "onExitCodes": codes})
    return rules


def _pod(job: GpuJob) -> dict[str, Any]:
    required, preferred = _selection(job)
    selector = {"kubernetes.io/arch": machines.ARCHES[job.arch], **dict(job.node_labels)}
    selector |= {
        expression["key"]: expression["values"][0] for expression in required if _has_single_value(expression)
    }
    several = [expression for expression in required if not _has_single_value(expression)]
    affinity = _affinity(job, several, preferred)
    account = {"serviceAccountName": job.service_account} if job.service_account else {}
    return {
        # podFailurePolicy requires Never; each attempt is then a pod of its own with its own log.
        "restartPolicy": "Never",
        # With the headless Service the first pod has the DNS name NAME-0.NAME.
        **({"subdomain": job.name} if job.nodes > 1 else {}),
        "terminationGracePeriodSeconds": job.grace_s,
        # A training program needs no access to the API server.
        **(account or {"automountServiceAccountToken": False}),
        **({"runtimeClassName": job.runtime_class} if job.runtime_class else {}),
        **({"priorityClassName": job.priority_class} if job.priority_class else {}),
        **(
            {"imagePullSecrets": [{"name": secret} for secret in job.pull_secrets]}
            if job.pull_secrets
            else {}
        ),
        **({"securityContext": security} if (security := _security(job)) else {}),
        "nodeSelector": selector,
        **({"affinity": affinity} if affinity else {}),
        "tolerations": _tolerations(job),
        "containers": [_container(job)],
        **({"volumes": volumes} if (volumes := _volumes(job)) else {}),
    }


def _security(job: GpuJob) -> dict[str, Any]:
    user: dict[str, Any] = {}
    if job.run_as:
        uid, gid = job.run_as
        # fsGroup makes mounted volumes writable for the group of the user.
        group = {"fsGroup": gid, "fsGroupChangePolicy": "OnRootMismatch"}
        user = {"runAsUser": uid, "runAsGroup": gid, **group}
    return {**user, **(POD_SECURITY if job.security else {})}


def _selection(job: GpuJob) -> tuple[list[choice.Expression], list[tuple[int, list[choice.Expression]]]]:
    """Required expressions on nodes, and preferred ones with their weights."""
    how: dict[str, Any] = {"mig": job.mig, "shared": job.shared}
    required = choice.expressions(job.select_by, job.models, job.types, products=job.products, **how)
    if job.provider:
        key, value = choice.SPOT[job.provider]
        # NotIn spot instead of In on-demand: reserved capacity and capacity blocks are not spot either
        required.append({"key": key, "operator": "In" if job.spot else "NotIn", "values": [value]})
    preferred = [
        (weight, choice.expressions(job.select_by, [model], job.types, **how)) for model, weight in job.prefer
    ]
    return required, preferred


def _affinity(
    job: GpuJob,
    required: list[choice.Expression],
    preferred: list[tuple[int, list[choice.Expression]]],
) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    if required:
        terms = [{"matchExpressions": required}]
        nodes["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if preferred:
        nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": weight, "preference": {"matchExpressions": terms}} for weight, terms in preferred
        ]
    affinity: dict[str, Any] = {"nodeAffinity": nodes} if nodes else {}
    if job.nodes > 1:
        mates = {"labelSelector": {"matchLabels": {JOB_NAME: job.name}}}
        # Traffic between zones is slow and billed; one zone is preferred, not required.
        near = {"weight": 100, "podAffinityTerm": {**mates, "topologyKey": ZONE}}
        affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [near]}
        # One pod for each node: pods on one node would share its network adapters.
        apart = {**mates, "topologyKey": HOST_LABEL}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    return affinity


def _tolerations(job: GpuJob) -> list[dict[str, str]]:
    tolerations = [dict(GPU_TOLERATION)]
    if job.spot and (taint := choice.SPOT_TAINTS.get(str(job.provider))):
        tolerations.append({**taint, "operator": "Equal", "effect": "NoSchedule"})
    for key, value in job.tolerate:
        tolerations.append({"key": key, "operator": "Equal", "value": value} if value else _any_value(key))
    return tolerations


def _container(job: GpuJob) -> dict[str, Any]:
    words = {"args" if job.arguments else "command": list(job.command)} if job.command else {}
    env = [{"name": name, "value": value} for name, value in job.env] + _rendezvous(job)
    scratch = {"ephemeral-storage": size} if (size := _scratch(job)) else {}
    asked = {"cpu": job.cpu, "memory": job.memory, **scratch}
    # No CPU limit: a limit would throttle data loaders while CPUs are idle.
    limits = {"memory": job.memory, **scratch, _resource(job): str(job.gpus), **dict(job.resources)}
    return {
        "name": CONTAINER,
        "image": job.image,
        **words,
        **({"securityContext": CONTAINER_SECURITY} if job.security else {}),
        **({"env": env} if env else {}),
        **(
            {"envFrom": [{"secretRef": {"name": secret}} for secret in job.env_secrets]}
            if job.env_secrets
            else {}
        ),
        "resources": {"requests": asked, "limits": limits},
        **({"volumeMounts": mounts} if (mounts := _mounts(job)) else {}),
    }


def _rendezvous(job: GpuJob) -> list[dict[str, Any]]:
    """Variables of torch.distributed, and with PET_ of torchrun (torch.distributed.run).

    RANK and WORLD_SIZE belong to a process; torchrun sets them.
    """
    if job.nodes == 1:
        return []
    values = {
        "MASTER_ADDR": f"{job.name}-0.{job.name}",
        "MASTER_PORT": str(MASTER_PORT),
        "NNODES": str(job.nodes),
        "NPROC_PER_NODE": str(job.gpus),
    }
    rank = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}}
    variables: list[dict[str, Any]] = []
    for begin in ("", "PET_"):
        variables += [{"name": f"{begin}{name}", "value": value} for name, value in values.items()]
        variables.append({"name": f"{begin}NODE_RANK", **rank})
    return variables


def _resource(job: GpuJob) -> str:
    """The name of the plugin's resource: whole GPUs, or a MIG profile with the strategy `mixed`."""
    return f"nvidia.com/mig-{job.mig.replace('+', '.')}" if job.mig else GPU


def _volumes(job: GpuJob) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = []
    if job.shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}})
    for number, mount in enumerate(job.mounts):
        name = f"mount-{number}"
        if mount.source.startswith("/"):
            # The folder may not exist on a new node.
            volumes.append({"name": name, "hostPath": {"path": mount.source, "type": "DirectoryOrCreate"}})
        elif mount.source:
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": mount.source}})
        else:
            volumes.append({"name": name, "emptyDir": {"sizeLimit": mount.size}})
    return volumes


def _mounts(job: GpuJob) -> list[dict[str, str]]:
    shm = [{"name": "shm", "mountPath": "/dev/shm"}] if job.shm else []  # noqa: S108 - the container's
    more = [{"name": f"mount-{number}", "mountPath": mount.path} for number, mount in enumerate(job.mounts)]
    return shm + more


def _scratch(job: GpuJob) -> str:
    """The ephemeral storage that all scratch folders need together."""
    sizes = [mount.size for mount in job.mounts if mount.size]
    if len(sizes) < 2:
        return "".join(sizes)
    return str(int(sum(quantity(size) or 0 for size in sizes)))


def _service(job: GpuJob) -> Manifest:
    """The headless Service; it publishes the first pod before it is ready, which needs the other pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_NAME: job.name},
            "ports": [{"name": "rendezvous", "port": MASTER_PORT}],
        },
    }


def _any_value(key: str) -> dict[str, str]:
    return {"key": key, "operator": "Exists"}


def _has_single_value(expression: choice.Expression) -> bool:
    return bool(expression["operator"] == "In" and len(expression["values"]) == 1)
