"""What may be said of a GPU job: the options of k8s.job, and the arguments of `gpu_job`."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.options import option


@dataclass(frozen=True)
class JobOptions:
    """A GPU job as it is typed; docs/k8s-jobs.md says what each means.

    In Python what has several values may be a mapping too, and one that is a text with commas a list.
    """

    image: str = option("with its tag or digest")
    name: str = option("of the Job; default: the last part of the image's name")
    namespace: str = option("default: the context's")
    gpus: int = option("GPUs of a pod, or instances of a MIG profile", 1)
    gpu_model: str = option("GPUs that will do, separated by commas: T4, L4, A100-80GB; default: any")
    product: str = option(
        "the value of the nodes' label nvidia.com/gpu.product, where the catalogue has it not"
    )
    prefer: tuple[str, ...] = option(
        "MODEL=WEIGHT (1 to 100): rather this one; may be given several times", ()
    )
    select_by: str = option(
        "product (feature discovery), instance-type, karpenter or auto-mode (nodes that are not there yet)"
    )
    instance_type: str = option("these types alone, separated by commas")
    mig: str = option("a profile such as 1g.10gb instead of whole GPUs (strategy mixed)")
    shared: bool = option("GPUs that several pods share will do, too", False)
    arch: str = option("x86_64 or arm64; default: what the GPUs' machines are")
    cpu: str = option("of a pod, for example 3500m; default: 3 a GPU")
    memory: str = option("of a pod, /dev/shm included, for example 14Gi; default: 12Gi a GPU")
    shm: str = option("size of /dev/shm, a part of --memory; 0: the 64 MiB that containers have", "2Gi")
    timeout: str = option("of the Job, retries and waiting for a node included: 90m, 2h, 1d", "24h")
    ttl: str = option("how long Job and logs stay after its end", "24h")
    grace: str = option("between SIGTERM and SIGKILL; default: 30s, on spot 110s")
    retries: int = option("for failures of its own; interruptions by the cluster are not counted", 0)
    give_up: str = option("exit codes, separated by commas, after which it is not tried again")
    nodes: int = option("pods that run at once, each on a node, with torchrun's variables", 1)
    queue: str = option("a LocalQueue of Kueue")
    spot: bool = option("on spot nodes; wants --provider", False)
    provider: str = option(
        "of the nodes: karpenter, auto-mode, managed, asg, aks or gke; on demand without --spot"
    )
    cache: tuple[str, ...] = option(
        "CLAIM:/PATH (a PersistentVolumeClaim) or /FOLDER-OF-THE-NODE:/PATH; several times", ()
    )
    scratch: tuple[str, ...] = option(
        "SIZE:/PATH on the node's disk, empty and gone with the pod; several times", ()
    )
    env: tuple[str, ...] = option("NAME=value; several times", ())
    env_secret: tuple[str, ...] = option("a Secret whose keys become variables; several times", ())
    service_account: str = option("that the pod runs as")
    pull_secret: tuple[str, ...] = option("with which the image is pulled; several times", ())
    runtime_class: str = option("where nvidia is not the nodes' default runtime: nvidia")
    priority_class: str = option("of the pod")
    tolerate: tuple[str, ...] = option(
        "KEY or KEY=VALUE of a taint; nvidia.com/gpu is tolerated anyhow; several times", ()
    )
    node_label: tuple[str, ...] = option("KEY=VALUE that a node must have; several times", ())
    label: tuple[str, ...] = option("KEY=VALUE of Job and pods; several times", ())
    resource: tuple[str, ...] = option(
        "NAME=AMOUNT more of the node, for example vpc.amazonaws.com/efa=4; several times", ()
    )
    arguments: bool = option("give the command to the image's entrypoint instead of replacing it", False)
    security: str = option(
        "restricted: pods that Pod Security of that level admits; with --apply also where the namespace "
        "enforces it"
    )
    run_as: str = option("UID or UID:GID instead of the image's user")
    allow_latest: bool = option("take an image without a tag, or with the tag latest", False)
    command: tuple[str, ...] = option("what is run", (), rest=True)
