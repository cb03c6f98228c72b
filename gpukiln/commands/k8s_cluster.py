"""What asks a cluster whether its GPUs are handed out, and with which rights."""

from __future__ import annotations

from typing import Any

from gpukiln.commands.cli import command, print_document, results, say, words
from gpukiln.typed import dump

MINUTE_S = 60.0
CLUSTER = {
    "context": "of the kubeconfig; without it the current one",
    "kubeconfig": "file; without it $KUBECONFIG, then ~/.kube/config",
    "namespace": "without it the context's",
}


@command(
    name="test",
    help={
        **CLUSTER,
        "image": "with bash and python3, by digest; without it the runner image that was pushed last",
        "node_selector": "label=value of the nodes, several with commas",
        "resource": "what a GPU is called there, for example nvidia.com/mig-1g.5gb",
        "runtime_class": "of the pods, where nvidia is not the default runtime",
        "pull_secret": "with which the image is pulled",
        "wait_minutes": "for nodes, room and images",
        "dry_run": "only print the pods",
        "json": "print one JSON document to standard output",
    },
)
def prove_gpus(
    _: Any,
    context: str = "",
    kubeconfig: str = "",
    namespace: str = "",
    image: str = "",
    node_selector: str = "nvidia.com/gpu.present=true",
    resource: str = "nvidia.com/gpu",
    runtime_class: str = "",
    pull_secret: str = "",
    wait_minutes: int = 15,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Show that pods of a cluster get the GPUs they ask for, and compute. Exit 1: a check failed."""
    from pathlib import Path
    from urllib.parse import quote

    from gpukiln.kubernetes import prove
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.kubernetes.manifest import dump as as_yaml
    from gpukiln.nodes.runs import NodeRuns
    from gpukiln.progress import Progress
    from gpukiln.state import state_home
    from gpukiln.verify import report
    from gpukiln.verify.suite import run_suite
    from gpukiln.verify.target import Target

    options = prove.GpuTestOptions(
        image or _pushed(state_home()),
        namespace,
        node_selector,
        resource,
        runtime_class,
        pull_secret,
        MINUTE_S * wait_minutes,
    )
    if dry_run:
        results().tell(as_yaml(*prove.pods_of(options, namespace or "default")).rstrip())
        return 0
    cluster = Cluster(context, kubeconfig)
    run, progress = NodeRuns(state_home()).create("cluster"), Progress()
    with progress.step(f"ask {cluster.context}"):
        facts = prove.prove(cluster, options, run.folder, say=progress.say)
    live = report.Live(progress)
    with progress.step("judge"):
        verdict = run_suite(
            Target(cluster.context, f"facts://{quote(str(facts), safe='')}"),
            profile="pod",
            out_dir=Path(run.folder),
            on_start=live.start,
            on_check=live.check,
        )
        if not verdict.passed:
            progress.fail()
    shown = results(json=json)
    shown.print(report.ending(verdict))  # `live` has shown each check
    shown.tell(f"report: {run.folder / 'report.html'}")
    if json:
        print_document("k8s.test/1", verdict=dump(verdict))
    return int(not verdict.passed)


def _pushed(home: Any) -> str:
    from gpukiln.docker.builds import ContainerBuilds
    from gpukiln.errors import UsageError

    pushed = [one for build in ContainerBuilds(home).of("runner-gpu") for one in build.read().pushed]
    if not pushed:
        raise UsageError(
            "no image to test with: --image is missing, and no runner image was pushed from here",
            hint="`invoke docker.push --image runner-gpu --repository REPOSITORY` pushes ours; any with bash "
            "and python3 will do",
        )
    newest = max(pushed, key=lambda one: one.at)
    say(f"the pods run {newest.reference}")
    return newest.reference


@command(
    help={
        "for": "commands, separated by commas: their names behind k8s.",
        "namespace": "that is worked in",
        "to": "who gets them: User:NAME, Group:NAME or ServiceAccount:NAME",
        "json": "print one JSON document to standard output",
    }
)
def rbac(
    _: Any,
    for_: str = "",
    namespace: str = "default",
    to: str = "Group:gpu-users",
    json: bool = False,
) -> None:
    """Print the least rights that commands need on a cluster, to be applied."""
    from gpukiln.kubernetes.manifest import dump as as_yaml
    from gpukiln.kubernetes.rbac import RIGHTS, roles

    found = roles(words(for_) or list(RIGHTS), namespace, to)
    if json:
        print_document("k8s.rbac/1", manifests=found)
        return
    results().tell(as_yaml(*found).rstrip())


@command(
    help={
        **CLUSTER,
        "pod": "NAME, NAMESPACE/NAME, or KIND/NAME of a Job, JobSet, Deployment and others; without it the "
        "cluster and all pods that wait for a GPU",
        "json": "print one JSON document to standard output",
    }
)
def doctor(
    _: Any,
    pod: str = "",
    context: str = "",
    kubeconfig: str = "",
    namespace: str = "",
    json: bool = False,
) -> int:
    """Say why a cluster's GPUs, or a pod that wants one, do not work. Changes nothing. Exit 1: an error."""
    from gpukiln.findings import worst
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.kubernetes.doctor import diagnose

    found = diagnose(Cluster(context, kubeconfig), pod, namespace)
    if json:
        print_document(found.schema, dump(found))
    else:
        shown = results()
        for one in found.findings:
            shown.tell(f"{one.severity}: {one.object}: {one.id}")
            shown.tell(f"  seen   {one.message}")
            shown.tell(f"  cause  {one.evidence['cause']}")
            shown.tell(f"  fix    {one.remedy}\n")
        shown.tell(f"looked at {', '.join(found.looked_at)}")
        errors = sum(one.severity == "error" for one in found.findings)
        shown.tell(
            f"{errors} errors, {len(found.findings) - errors} warnings"
            if found.findings
            else "nothing is wrong with what was looked at"
        )
    return int(worst(found.findings) == "error")


doctor.first = "pod"
