"""GPU jobs on Kubernetes: rendered right, submitted, followed to their end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.commands.cli import Kubernetes, print_document, say, words
from gpukiln.errors import UsageError
from gpukiln.options import flag, option
from gpukiln.typed import dump
from gpukiln.units import is_whole

if TYPE_CHECKING:
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.kubernetes.jobs.document import Document
    from gpukiln.kubernetes.jobs.request import GpuJob
    from gpukiln.kubernetes.jobs.state import End


@dataclass(frozen=True)
class K8sJob(Kubernetes):
    """Render a GPU Job that is right, checked by the catalogue; with --apply run it and exit as it does."""

    image: str = option("with its tag or digest")
    name: str = option("of the Job; default: the last part of the image's name")
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
    output: str = option("a folder that NAME.yaml is written to")
    apply: bool = option("submit it, follow it, print its log, exit as it does", False)
    detach: bool = option("with --apply: do not follow", False)
    attach: bool = option("follow a Job that is there (--name); nothing is submitted", False)
    replace: bool = option("with --apply: remove a Job of that name that has ended", False)
    dry_run: bool = option("with --apply: the server validates and admits it, and keeps nothing", False)
    start_within: str = option("with --apply: remove it again and exit 75 where it has not started by then")
    delete_on_interrupt: bool = option("Ctrl-C removes the Job; without it the Job goes on", False)
    command: tuple[str, ...] = option("what is run", (), rest=True)

    def run(self) -> int:
        from inspect import signature

        from gpukiln.kubernetes.jobs.admission import admitted
        from gpukiln.kubernetes.jobs.document import attached
        from gpukiln.kubernetes.jobs.request import gpu_job

        self._check_together()
        cluster = self.api() if self.apply or self.attach else None
        if cluster and self.attach:
            end = self._follow(cluster, self.name, self.namespace, ours=False)
            return self._ended(end, attached(cluster, self.name, self.namespace, end))
        options = self.pick(*signature(gpu_job).parameters)
        made = gpu_job(**options | {"give_up": _codes(self.give_up)})
        if cluster:
            made = admitted(cluster, made, say)
        for note in made.notes():
            say(f"note: {note}")
        if self.output:
            _write(made, Path(self.output))
        if cluster:
            return self._submit(cluster, made)
        if not self.output and not self.json:
            print(as_yaml(made), end="")
        self._document(made)
        return 0

    def _submit(self, cluster: Cluster, made: GpuJob) -> int:
        from gpukiln.kubernetes import follow
        from gpukiln.kubernetes.jobs.document import document

        if self.dry_run:
            follow.rehearse(cluster, made)
            say(f"job {made.name}: the server would take it")
            self._document(made, cluster)
            return 0
        submission = follow.submit(cluster, made, say, replace_ended=self.replace)
        if self.detach:
            for line in follow.again(made.name, made.namespace or cluster.namespace, cluster.context):
                say(line)
            self._document(made, cluster)
            submission.end()
            return 0
        end = self._follow(cluster, made.name, made.namespace, ours=True)
        code = self._ended(end, document(made, cluster=cluster, end=end))
        submission.end()
        return code

    def _follow(self, cluster: Cluster, name: str, namespace: str, *, ours: bool) -> End:
        from gpukiln.kubernetes import follow
        from gpukiln.units import Duration

        within = Duration.parse(self.start_within, "--start-within") if self.start_within else None
        where = namespace or cluster.namespace

        def write(line: str) -> None:
            print(line, flush=True)

        try:
            return follow.follow(
                cluster,
                name,
                where,
                write=say if self.json else write,
                say=say,
                patience=follow.Patience(within),
                ours=ours,
            )
        except (KeyboardInterrupt, BrokenPipeError) as ended:
            if self.delete_on_interrupt and isinstance(ended, KeyboardInterrupt):
                cluster.delete("Job", name, where)
                say(f"job {name}: removed")
            else:
                for line in follow.again(name, where, cluster.context):
                    say(line)
            raise

    def _document(self, made: GpuJob, cluster: Cluster | None = None) -> None:
        from gpukiln.kubernetes.jobs.document import JOB, document

        if self.json:
            print_document(JOB, dump(document(made, cluster=cluster) if cluster else document(made)))

    def _ended(self, end: End, made: Document) -> int:
        if self.json:
            print_document(made.schema, dump(made))
        say(f"job {made.name}: {end.state}" + (f": {end.reason}: {end.why}" if end.why else ""))
        return end.exit_code

    def _check_together(self) -> None:
        if self.apply and self.attach:
            raise UsageError("--apply submits a Job, --attach follows one that is there", hint="one of them")
        for name, given in self.pick("detach", "replace", "dry_run").items():
            if given and not self.apply:
                raise UsageError(f"{flag(name)} is for --apply", hint="add --apply, or leave it out")
        followed = (self.apply or self.attach) and not self.detach
        for name, given in self.pick("start_within", "delete_on_interrupt").items():
            if given and not followed:
                raise UsageError(
                    f"{flag(name)} is for a Job that is followed", hint="with --apply or --attach"
                )
        if self.attach and not self.name:
            raise UsageError("--attach needs --name: which Job is to be followed")


def _codes(text: str) -> list[int]:
    for word in words(text):
        if not is_whole(word):
            raise UsageError(f"--give-up {word!r} is no exit code", hint="wanted 1 to 255, with commas")
    return [int(word) for word in words(text)]


def as_yaml(made: GpuJob) -> str:
    from gpukiln.kubernetes.manifest import dump as manifest

    return manifest(*made.manifests())


def _write(made: GpuJob, output: Path) -> None:
    from gpukiln.kubernetes import folder

    name = f"{made.name}.yaml"
    for one in folder.write(output, {name: as_yaml(made)}):
        if one.path == name:
            say(f"{one.change:8} {output / name}")
