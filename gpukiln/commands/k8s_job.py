"""GPU jobs on Kubernetes: rendered right, submitted, followed to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, say

if TYPE_CHECKING:
    from pathlib import Path

    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.kubernetes.jobs.document import JobDocument
    from gpukiln.kubernetes.jobs.request import GpuJob
    from gpukiln.kubernetes.jobs.state import End

MANY = (
    "cache",
    "scratch",
    "env",
    "env_secret",
    "prefer",
    "tolerate",
    "node_label",
    "label",
    "resource",
    "pull_secret",
)


@command(
    help={
        "image": "with its tag or digest",
        "name": "of the Job; default: the last part of the image's name",
        "namespace": "default: the context's",
        "gpus": "GPUs of a pod, or instances of a MIG profile",
        "gpu_model": "GPUs that will do, separated by commas: T4, L4, A100-80GB; default: any",
        "product": "the value of the nodes' label nvidia.com/gpu.product, where the catalogue has it not",
        "prefer": "MODEL=WEIGHT (1 to 100): rather this one; may be given several times",
        "select_by": "product (feature discovery), instance-type, karpenter or auto-mode (nodes that are not "
        "there yet)",
        "instance_type": "these types alone, separated by commas",
        "mig": "a profile such as 1g.10gb instead of whole GPUs (strategy mixed)",
        "shared": "GPUs that several pods share will do, too",
        "arch": "x86_64 or arm64; default: what the GPUs' machines are",
        "cpu": "of a pod, for example 3500m; default: 3 a GPU",
        "memory": "of a pod, /dev/shm included, for example 14Gi; default: 12Gi a GPU",
        "shm": "size of /dev/shm, a part of --memory; 0: the 64 MiB that containers have",
        "timeout": "of the Job, retries and waiting for a node included: 90m, 2h, 1d",
        "ttl": "how long Job and logs stay after its end",
        "grace": "between SIGTERM and SIGKILL; default: 30s, on spot 110s",
        "retries": "for failures of its own; interruptions by the cluster are not counted",
        "give_up": "exit codes, separated by commas, after which it is not tried again",
        "nodes": "pods that run at once, each on a node, with torchrun's variables",
        "queue": "a LocalQueue of Kueue",
        "spot": "on spot nodes; wants --provider",
        "provider": "of the nodes: karpenter, auto-mode, managed, asg, aks or gke; on demand without --spot",
        "cache": "CLAIM:/PATH (a PersistentVolumeClaim) or /FOLDER-OF-THE-NODE:/PATH; several times",
        "scratch": "SIZE:/PATH on the node's disk, empty and gone with the pod; several times",
        "env": "NAME=value; several times",
        "env_secret": "a Secret whose keys become variables; several times",
        "service_account": "that the pod runs as",
        "pull_secret": "with which the image is pulled; several times",
        "runtime_class": "where nvidia is not the nodes' default runtime: nvidia",
        "priority_class": "of the pod",
        "tolerate": "KEY or KEY=VALUE of a taint; nvidia.com/gpu is tolerated anyhow; several times",
        "node_label": "KEY=VALUE that a node must have; several times",
        "label": "KEY=VALUE of Job and pods; several times",
        "resource": "NAME=AMOUNT more of the node, for example vpc.amazonaws.com/efa=4; several times",
        "arguments": "give the command to the image's entrypoint instead of replacing it",
        "security": "restricted: pods that Pod Security of that level admits; with --apply also where the "
        "namespace enforces it",
        "run_as": "UID or UID:GID instead of the image's user",
        "allow_latest": "take an image without a tag, or with the tag latest",
        "output": "a folder that NAME.yaml is written to",
        "apply": "submit it, follow it, print its log, exit as it does",
        "detach": "with --apply: do not follow",
        "attach": "follow a Job that is there (--name); nothing is submitted",
        "replace": "with --apply: remove a Job of that name that has ended",
        "dry_run": "with --apply: the server validates and admits it, and keeps nothing",
        "start_within": "with --apply: remove it again and exit 75 where it has not started by then",
        "delete_on_interrupt": "Ctrl-C removes the Job; without it the Job goes on",
        "context": "of the kubeconfig; default: its current one",
        "kubeconfig": "default: $KUBECONFIG, then ~/.kube/config",
        "json": "print one JSON document to standard output; logs go to standard error",
    },
    iterable=[*MANY, "command"],
)
def job(
    _: Any,
    image: str = "",
    name: str = "",
    namespace: str = "",
    gpus: int = 1,
    gpu_model: str = "",
    product: str = "",
    prefer: Any = None,
    select_by: str = "",
    instance_type: str = "",
    mig: str = "",
    shared: bool = False,
    arch: str = "",
    cpu: str = "",
    memory: str = "",
    shm: str = "2Gi",
    timeout: str = "24h",
    ttl: str = "24h",
    grace: str = "",
    retries: int = 0,
    give_up: str = "",
    nodes: int = 1,
    queue: str = "",
    spot: bool = False,
    provider: str = "",
    cache: Any = None,
    scratch: Any = None,
    env: Any = None,
    env_secret: Any = None,
    service_account: str = "",
    pull_secret: Any = None,
    runtime_class: str = "",
    priority_class: str = "",
    tolerate: Any = None,
    node_label: Any = None,
    label: Any = None,
    resource: Any = None,
    arguments: bool = False,
    security: str = "",
    run_as: str = "",
    allow_latest: bool = False,
    output: str = "",
    apply: bool = False,
    detach: bool = False,
    attach: bool = False,
    replace: bool = False,
    dry_run: bool = False,
    start_within: str = "",
    delete_on_interrupt: bool = False,
    context: str = "",
    kubeconfig: str = "",
    json: bool = False,
    command: Any = None,
) -> int:
    """Render a GPU Job that is right, checked by the catalogue; with --apply run it and exit as it does."""
    from gpukiln.kubernetes.jobs.admission import admitted
    from gpukiln.kubernetes.jobs.document import JOB, document
    from gpukiln.kubernetes.jobs.request import gpu_job
    from gpukiln.typed import dump

    _check_together(
        apply=apply,
        attach=attach,
        needs_apply={"detach": detach, "replace": replace, "dry_run": dry_run},
        follows={"start_within": start_within, "delete_on_interrupt": delete_on_interrupt},
        detach=detach,
    )
    if attach:
        return _attach(name, namespace, context, kubeconfig, start_within, delete_on_interrupt, json=json)
    made = gpu_job(
        image,
        command=command or (),
        name=name,
        namespace=namespace,
        gpus=gpus,
        gpu_model=gpu_model,
        product=product,
        prefer=prefer or (),
        select_by=select_by,
        instance_type=instance_type,
        mig=mig,
        shared=shared,
        arch=arch,
        cpu=cpu,
        memory=memory,
        shm=shm,
        timeout=timeout,
        ttl=ttl,
        grace=grace,
        retries=retries,
        give_up=_codes(give_up),
        nodes=nodes,
        queue=queue,
        spot=spot,
        provider=provider,
        cache=cache or (),
        scratch=scratch or (),
        env=env or (),
        env_secret=env_secret or (),
        service_account=service_account,
        pull_secret=pull_secret or (),
        runtime_class=runtime_class,
        priority_class=priority_class,
        tolerate=tolerate or (),
        node_label=node_label or (),
        label=label or (),
        resource=resource or (),
        arguments=arguments,
        security=security,
        run_as=run_as,
        allow_latest=allow_latest,
    )
    cluster = _cluster(context, kubeconfig) if apply else None
    if cluster:
        made = admitted(cluster, made, say)
    for note in made.notes():
        say(f"note: {note}")
    if output:
        _write(made, output)
    if not cluster:
        if json:
            print_document(JOB, dump(document(made)))
        elif not output:
            _print(made)
        return 0
    from gpukiln.kubernetes import follow

    if dry_run:
        follow.rehearse(cluster, made)
        say(f"job {made.name}: the server would take it")
        if json:
            print_document(JOB, dump(document(made, cluster=cluster)))
        return 0
    submission = follow.submit(cluster, made, say, replace_ended=replace)
    if detach:
        for line in follow.again(made.name, made.namespace or cluster.namespace, cluster.context):
            say(line)
        if json:
            print_document(JOB, dump(document(made, cluster=cluster)))
        submission.end()
        return 0
    end = _follow(cluster, made.name, made.namespace, start_within, delete_on_interrupt, ours=True, json=json)
    code = _ended(end, document(made, cluster=cluster, end=end), json=json)
    submission.end()
    return code


def _attach(
    name: str,
    namespace: str,
    context: str,
    kubeconfig: str,
    start_within: str,
    delete_on_interrupt: bool,
    *,
    json: bool,
) -> int:
    from gpukiln.errors import UsageError
    from gpukiln.kubernetes.jobs.document import attached

    if not name:
        raise UsageError("--attach needs --name: which Job is to be followed")
    cluster = _cluster(context, kubeconfig)
    end = _follow(cluster, name, namespace, start_within, delete_on_interrupt, ours=False, json=json)
    return _ended(end, attached(cluster, name, namespace, end), json=json)


def _follow(
    cluster: Cluster,
    name: str,
    namespace: str,
    start_within: str,
    delete_on_interrupt: bool,
    *,
    ours: bool,
    json: bool,
) -> End:
    from gpukiln.kubernetes import follow
    from gpukiln.units import Duration

    patience = follow.Patience(Duration.parse(start_within, "--start-within") if start_within else None)
    where = namespace or cluster.namespace

    def write(line: str) -> None:
        print(line, flush=True)

    try:
        return follow.follow(
            cluster, name, where, write=say if json else write, say=say, patience=patience, ours=ours
        )
    except (KeyboardInterrupt, BrokenPipeError) as ended:
        if delete_on_interrupt and isinstance(ended, KeyboardInterrupt):
            cluster.delete("Job", name, where)
            say(f"job {name}: removed")
        else:
            for line in follow.again(name, where, cluster.context):
                say(line)
        raise


def _ended(end: End, made: JobDocument, *, json: bool) -> int:
    from gpukiln.typed import dump

    if json:
        print_document(made.schema, dump(made))
    say(f"job {made.name}: {end.state}" + (f": {end.reason}: {end.why}" if end.why else ""))
    return end.exit_code


def _check_together(
    *, apply: bool, attach: bool, needs_apply: dict[str, bool], follows: dict[str, Any], detach: bool
) -> None:
    from gpukiln.errors import UsageError

    if apply and attach:
        raise UsageError("--apply submits a Job, --attach follows one that is there", hint="one of them")
    for option in [name for name, given in needs_apply.items() if given and not apply]:
        raise UsageError(f"--{option.replace('_', '-')} is for --apply", hint="add --apply, or leave it out")
    for option in [name for name, given in follows.items() if given and (detach or not (apply or attach))]:
        raise UsageError(
            f"--{option.replace('_', '-')} is for a Job that is followed", hint="with --apply or --attach"
        )


def _codes(text: str) -> list[int]:
    from gpukiln.commands.cli import words
    from gpukiln.errors import UsageError
    from gpukiln.units import is_whole

    for word in words(text):
        if not is_whole(word):
            raise UsageError(f"--give-up {word!r} is no exit code", hint="wanted 1 to 255, with commas")
    return [int(word) for word in words(text)]


def _cluster(context: str, kubeconfig: str) -> Cluster:
    from gpukiln.kubernetes.cluster import Cluster

    return Cluster(context, kubeconfig)


def _print(made: GpuJob) -> None:
    from gpukiln.kubernetes.manifest import dump

    print(dump(*made.manifests()), end="")


def _write(made: GpuJob, output: str) -> Path:
    from pathlib import Path

    from gpukiln.kubernetes import folder
    from gpukiln.kubernetes.manifest import dump

    name = f"{made.name}.yaml"
    [file] = folder.write(Path(output), {name: dump(*made.manifests())}).files
    say(f"{file.change:8} {Path(output) / name}")
    return Path(output) / name
