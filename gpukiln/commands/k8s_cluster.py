"""Commands that ask a cluster whether it gives out its GPUs, and the permissions that commands need."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import JsonOptions, KubernetesOptions, results, say, words
from gpukiln.options import option

MINUTE_S = 60.0


@dataclass(frozen=True)
class K8sTest(KubernetesOptions):
    """Verify that pods of a cluster get the GPUs that they request, and compute. Exit 1: a check failed."""

    image: str = option("with bash and python3, by digest; without it the runner image that was pushed last")
    node_selector: str = option(
        "label=value of the nodes, several with commas", "nvidia.com/gpu.present=true"
    )
    resource: str = option("what a GPU is called there, for example nvidia.com/mig-1g.5gb", "nvidia.com/gpu")
    runtime_class: str = option("of the pods, where nvidia is not the default runtime")
    pull_secret: str = option("with which the image is pulled")
    wait_minutes: int = option("for nodes, capacity and images", 15)
    cordoned: bool = option("let the pods run on cordoned nodes, too", False)
    dry_run: bool = option("only print the pods", False)

    def run(self) -> int:
        from gpukiln.kubernetes import cluster_verification, verify
        from gpukiln.kubernetes.manifest import dump
        from gpukiln.verify import report

        options = cluster_verification.GpuTestOptions(
            self.image or verify.pushed_image(say),
            **self.pick("namespace", "resource", "runtime_class", "pull_secret", "cordoned"),
            selector=self.node_selector,
            wait_s=MINUTE_S * self.wait_minutes,
        )
        if self.dry_run:
            # Without a cluster: the namespace of the context is not known.
            pods = cluster_verification.pod_manifests(options, self.namespace or "default")
            results().show(dump(*pods).rstrip())
            return 0
        verdict, folder = verify.verify_cluster(self.api(), options)
        # Each check was shown while the suite ran.
        self.show(report.ending(verdict), f"report: {folder / 'report.html'}")
        self.report(None, schema="k8s.test/1", verdict=verdict)
        return int(not verdict.passed)


@dataclass(frozen=True)
class K8sRbac(JsonOptions):
    """Print the RBAC roles that commands need on a cluster, with least privilege, to be applied."""

    for_: str = option(
        "commands, separated by commas: their names behind k8s., and canary of ami.verify --cluster"
    )
    namespace: str = option("the namespace that the commands work in", "default")
    to: str = option("who gets them: User:NAME, Group:NAME or ServiceAccount:NAME", "Group:gpu-users")

    def run(self) -> None:
        from gpukiln.kubernetes.manifest import dump
        from gpukiln.kubernetes.rbac import COMMAND_RULES, roles

        manifests = roles(words(self.for_) or list(COMMAND_RULES), self.namespace, self.to)
        self.report(None, [dump(*manifests).rstrip()], schema="k8s.rbac/1", manifests=manifests)


@dataclass(frozen=True)
class K8sDoctor(KubernetesOptions):
    """Report why GPUs of a cluster, or a pod that requests one, do not work. Exit 1: there is an error."""

    pod: str = option(
        "NAME, NAMESPACE/NAME, or KIND/NAME of a Job, JobSet, Deployment and others; without it the "
        "cluster and all pods that wait for a GPU",
        first=True,
    )

    def run(self) -> int:
        from gpukiln.findings import worst_severity
        from gpukiln.kubernetes.doctor import diagnose, diagnosis_lines

        diagnosis = diagnose(self.api(), self.pod, self.namespace)
        self.report(diagnosis, diagnosis_lines(diagnosis))
        # Warnings alone exit with 0, as those of k8s.check do.
        return int(worst_severity(diagnosis.findings) == "error")
