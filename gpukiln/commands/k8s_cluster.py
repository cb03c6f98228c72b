"""What asks a cluster whether its GPUs are handed out, and with which rights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpukiln.commands.cli import JsonOptions, KubernetesOptions, print_document, results, say, words
from gpukiln.options import option
from gpukiln.typed import dump

MINUTE_S = 60.0


@dataclass(frozen=True)
class K8sTest(KubernetesOptions):
    """Show that pods of a cluster get the GPUs they ask for, and compute. Exit 1: a check failed."""

    image: str = option("with bash and python3, by digest; without it the runner image that was pushed last")
    node_selector: str = option(
        "label=value of the nodes, several with commas", "nvidia.com/gpu.present=true"
    )
    resource: str = option("what a GPU is called there, for example nvidia.com/mig-1g.5gb", "nvidia.com/gpu")
    runtime_class: str = option("of the pods, where nvidia is not the default runtime")
    pull_secret: str = option("with which the image is pulled")
    wait_minutes: int = option("for nodes, room and images", 15)
    dry_run: bool = option("only print the pods", False)

    def run(self) -> int:
        from pathlib import Path
        from urllib.parse import quote

        from gpukiln.kubernetes import cluster_verification
        from gpukiln.kubernetes.manifest import dump as as_yaml
        from gpukiln.nodes.runs import RunStore
        from gpukiln.progress import Progress
        from gpukiln.state import state_home
        from gpukiln.verify import report
        from gpukiln.verify.suite import run_suite
        from gpukiln.verify.target import Target

        options = cluster_verification.GpuTestOptions(
            self.image or _pushed(state_home()),
            self.namespace,
            self.node_selector,
            self.resource,
            self.runtime_class,
            self.pull_secret,
            MINUTE_S * self.wait_minutes,
        )
        if self.dry_run:
            results().print_text(
                as_yaml(*cluster_verification.pod_manifests(options, self.namespace or "default")).rstrip()
            )
            return 0
        cluster = self.api()
        run, progress = RunStore(state_home()).create("cluster"), Progress()
        with progress.step(f"ask {cluster.context}"):
            facts = cluster_verification.gather_cluster_facts(cluster, options, run.folder, say=progress.say)
        live = report.LiveReport(progress)
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
        shown = results(json=self.json)
        shown.print(report.ending(verdict))  # `live` has shown each check
        shown.print_text(f"report: {run.folder / 'report.html'}")
        if self.json:
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


@dataclass(frozen=True)
class K8sRbac(JsonOptions):
    """Print the least rights that commands need on a cluster, to be applied."""

    for_: str = option("commands, separated by commas: their names behind k8s.")
    namespace: str = option("that is worked in", "default")
    to: str = option("who gets them: User:NAME, Group:NAME or ServiceAccount:NAME", "Group:gpu-users")

    def run(self) -> None:
        from gpukiln.kubernetes.manifest import dump as as_yaml
        from gpukiln.kubernetes.rbac import COMMAND_RULES, roles

        found = roles(words(self.for_) or list(COMMAND_RULES), self.namespace, self.to)
        if self.json:
            print_document("k8s.rbac/1", manifests=found)
            return
        results().print_text(as_yaml(*found).rstrip())


@dataclass(frozen=True)
class K8sDoctor(KubernetesOptions):
    """Say why a cluster's GPUs, or a pod that wants one, do not work. Changes nothing. Exit 1: an error."""

    pod: str = option(
        "NAME, NAMESPACE/NAME, or KIND/NAME of a Job, JobSet, Deployment and others; without it the "
        "cluster and all pods that wait for a GPU",
        first=True,
    )

    def run(self) -> int:
        from gpukiln.findings import worst_severity
        from gpukiln.kubernetes.doctor import diagnose

        found = diagnose(self.api(), self.pod, self.namespace)
        if self.json:
            print_document(found.schema, dump(found))
        else:
            shown = results()
            for one in found.findings:
                shown.print_text(f"{one.severity}: {one.object}: {one.id}")
                shown.print_text(f"  seen   {one.message}")
                shown.print_text(f"  cause  {one.evidence['cause']}")
                shown.print_text(f"  fix    {one.remedy}\n")
            shown.print_text(f"looked at {', '.join(found.looked_at)}")
            errors = sum(one.severity == "error" for one in found.findings)
            shown.print_text(
                f"{errors} errors, {len(found.findings) - errors} warnings"
                if found.findings
                else "nothing is wrong with what was looked at"
            )
        return int(worst_severity(found.findings) == "error")
