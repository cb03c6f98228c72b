"""The options of a GPU job: those of `k8s.job`, and the arguments of `gpu_job`."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.options import option


@dataclass(frozen=True)
class JobOptions:
    """The options of a GPU job as they are typed; docs/k8s-jobs.md explains each.

    From Python an option with several values may also be a mapping, and a text with commas a list.
    """

    image: str = option("the container image, with its tag or digest")
    name: str = option("name of the Job; default: the last part of the image's name")
    namespace: str = option("namespace of the Job; default: the context's")
    gpus: int = option("GPUs of each pod, or instances of a MIG profile", 1)
    gpu_model: str = option(
        "GPU models that the job can use, separated by commas: T4, L4, A100-80GB; default: any"
    )
    product: str = option(
        "value of the nodes' label nvidia.com/gpu.product, for GPUs that the catalogue does not have"
    )
    prefer: tuple[str, ...] = option(
        "MODEL=WEIGHT (1 to 100): prefer nodes with this GPU; may be given several times", ()
    )
    select_by: str = option(
        "labels that select the nodes: product (set by feature discovery on existing nodes), instance-type, "
        "karpenter or auto-mode (nodes that do not exist yet)"
    )
    instance_type: str = option("only these instance types, separated by commas")
    mig: str = option("a MIG profile such as 1g.10gb instead of whole GPUs (MIG strategy mixed)")
    shared: bool = option("also use GPUs that several pods share", False)
    arch: str = option("x86_64 or arm64; default: the architecture of the machines with these GPUs")
    cpu: str = option("CPUs of each pod, for example 3500m; default: 3 for each GPU")
    memory: str = option(
        "memory of each pod, /dev/shm included, for example 14Gi; default: 12Gi for each GPU"
    )
    shm: str = option(
        "size of /dev/shm, which is part of --memory; 0: the 64 MiB that every container has", "2Gi"
    )
    timeout: str = option(
        "maximum duration of the Job, retries and waiting for a node included: 90m, 2h, 1d", "24h"
    )
    ttl: str = option("how long the Job and its logs are kept after its end", "24h")
    grace: str = option("time between SIGTERM and SIGKILL; default: 30s, with --spot 110s")
    retries: int = option(
        "retries after failures of the program; interruptions by the cluster do not count", 0
    )
    give_up: str = option("exit codes, separated by commas, after which the Job is not retried")
    nodes: int = option(
        "pods that run at the same time, each on its own node, with the variables of torchrun", 1
    )
    queue: str = option("name of a LocalQueue of Kueue")
    spot: bool = option("run on spot nodes; needs --provider", False)
    provider: str = option(
        "what starts the nodes: karpenter, auto-mode, managed, asg, aks or gke; without --spot the Job does "
        "not run on spot nodes"
    )
    cache: tuple[str, ...] = option(
        "CLAIM:/PATH (a PersistentVolumeClaim) or /FOLDER-OF-THE-NODE:/PATH; may be given several times", ()
    )
    scratch: tuple[str, ...] = option(
        "SIZE:/PATH: an empty folder on the node's disk, deleted with the pod; may be given several times", ()
    )
    env: tuple[str, ...] = option("NAME=VALUE of an environment variable; may be given several times", ())
    env_secret: tuple[str, ...] = option(
        "a Secret whose keys become environment variables; may be given several times", ()
    )
    service_account: str = option("service account of the pods")
    pull_secret: tuple[str, ...] = option(
        "a Secret with credentials of the image's registry; may be given several times", ()
    )
    runtime_class: str = option(
        "RuntimeClass of the pods: nvidia, if it is not the default runtime of the nodes"
    )
    priority_class: str = option("PriorityClass of the pods")
    tolerate: tuple[str, ...] = option(
        "KEY or KEY=VALUE of a taint; nvidia.com/gpu is always tolerated; may be given several times", ()
    )
    node_label: tuple[str, ...] = option(
        "KEY=VALUE of a label that the nodes must have; may be given several times", ()
    )
    label: tuple[str, ...] = option(
        "KEY=VALUE of a label of the Job and its pods; may be given several times", ()
    )
    resource: tuple[str, ...] = option(
        "NAME=AMOUNT of a further resource of each pod, for example vpc.amazonaws.com/efa=4; may be given "
        "several times",
        (),
    )
    arguments: bool = option("pass the command to the image's entrypoint instead of replacing it", False)
    security: str = option(
        "restricted: render pods that this Pod Security level admits; with --apply this is done without the "
        "option if the namespace enforces the level"
    )
    run_as: str = option("UID or UID:GID that the container runs as instead of the image's user")
    allow_latest: bool = option("accept an image without a tag, or with the tag latest", False)
    command: tuple[str, ...] = option("the command that the container runs", (), rest=True)
