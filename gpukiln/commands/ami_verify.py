"""Machine images: verify one again, on named machines or on those that a channel still requires."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpukiln.cli.command import SIGNERS, ExistingImageOptions, MachineOptions, say, words
from gpukiln.errors import UsageError
from gpukiln.options import option

MINUTE_S = 60.0


@dataclass(frozen=True)
class AmiVerify(ExistingImageOptions, MachineOptions):
    """Boot a new machine from an image, verify it, and add the verdict to its record and its tags."""

    build: str = option(
        "build id, `last`, or AMI id (with --region and --cloud when another machine built it)",
        first=True,
        required=True,
    )
    instance_types: str = option(
        "GPU machines to try, separated by commas, the best first; default: the first that the image was "
        "built for"
    )
    for_: str = option(
        "a channel: verify what it still requires, with --cluster in that cluster's version of Kubernetes; "
        "nothing when nothing is missing"
    )
    spot: bool = option("take a spot instance: cheaper, and EC2 may take it away", False)
    simulated: bool = option(
        "give the machine simulated GPUs (embedded cloud): a rehearsal, whose verdict does not count", False
    )
    sign_key: str = option(f"signs the verdict: {SIGNERS}")
    cluster: str = option(
        "context of a cluster: verify the image as a node of it; `rehearsal`: that of `cloud.cluster`"
    )
    kubeconfig: str = option("of --cluster; default: $KUBECONFIG, then ~/.kube/config")
    eks_cluster: str = option("name of the cluster on EKS; default: by the context's ARN")
    node_profile: str = option("instance profile of the cluster's nodes, by its name")
    user_data: str = option("file that joins a cluster which is not on EKS")
    pod_image: str = option("image of the test pods; default: the runner image that was pushed last")
    wait_minutes: int = option("until the node is ready, and for each test pod", 15)

    def run(self) -> None:
        self._check_cluster_options()
        # Before anything is looked up or started, as its verdict would never satisfy the channel.
        if self.simulated and self.for_:
            raise UsageError(
                f"--simulated is a rehearsal, and channel {self.for_} requires a verdict that counts",
                hint="leave one of the two out",
            )
        if self.cluster:
            self._run_in_cluster()
            return
        from gpukiln.attest.signing import signer_of
        from gpukiln.images.builds import Builds
        from gpukiln.images.channels import load_channel
        from gpukiln.pipeline.steps import require_passed
        from gpukiln.release.find import find
        from gpukiln.release.needs import require_verified
        from gpukiln.release.verify import verifications, verify

        rules = load_channel(self.for_) if self.for_ else None
        account = self.pick("cloud", "region", "profile", "subnet_id", "ssh_cidr")
        image = find(self.build, Builds(), **account)
        signer = signer_of(self.sign_key, image.cloud)
        types, simulated = words(self.instance_types), self.simulated
        machines = verifications(image, rules, self.for_, types, signer, simulated=simulated, say=say)
        # All of them: a machine that fails does not keep the others from being tried.
        verdicts = list(verify(image, machines, signer, self.show, spot=self.spot, simulated=simulated))
        # Before the exit code is decided, so that the document of a failed verification is printed.
        self.report(None, schema="ami.verify/1", verdicts=verdicts)
        for verdict in verdicts:
            require_passed(verdict, self.build)
        if rules:  # reports also what no verification provides, such as a signature
            require_verified(self.for_, rules, image.verification(rules), has_gpus=image.cloud.has_gpus)

    def _check_cluster_options(self) -> None:
        """Refuse options of --cluster without it, where they would have no effect."""
        for name in ("kubeconfig", "eks_cluster", "node_profile", "user_data", "pod_image"):
            if getattr(self, name) and not self.cluster:
                option_name = "--" + name.replace("_", "-")
                raise UsageError(f"{option_name} has no effect without --cluster", hint="--cluster CONTEXT")

    def _run_in_cluster(self) -> None:
        from gpukiln.attest.signing import signer_of
        from gpukiln.clouds.embedded.cluster.control_plane import NAME as CLUSTER
        from gpukiln.clouds.embedded.layout import Layout
        from gpukiln.images.builds import Builds
        from gpukiln.images.channels import load_channel
        from gpukiln.kubernetes import rehearsal
        from gpukiln.kubernetes.canary import CanaryOptions, verify_in_cluster
        from gpukiln.kubernetes.cluster import Cluster
        from gpukiln.kubernetes.cluster_verification import GpuTestOptions
        from gpukiln.kubernetes.verify import pushed_image
        from gpukiln.pipeline.steps import require_passed
        from gpukiln.release.find import find
        from gpukiln.release.verify import verifications
        from gpukiln.state import state_home
        from gpukiln.verify import report

        rules = load_channel(self.for_) if self.for_ else None
        account = self.pick("cloud", "region", "profile", "subnet_id", "ssh_cidr")
        image, wait_s = find(self.build, Builds(), **account), MINUTE_S * self.wait_minutes
        kubeconfig, user_data, pod_image = self.kubeconfig, self.user_data, self.pod_image
        if self.cluster == CLUSTER and not kubeconfig:
            local = rehearsal.running(Layout())
            kubeconfig = str(local.kubeconfig)
            user_data, pod_image = user_data or str(local.user_data), pod_image or local.pod_image
        signer, cluster = signer_of(self.sign_key, image.cloud), Cluster(self.cluster, kubeconfig)
        kubernetes = "{}.{}".format(*cluster.version())
        machines = verifications(
            image,
            rules,
            self.for_,
            words(self.instance_types),
            signer,
            simulated=self.simulated,
            say=say,
            kubernetes=kubernetes,
        )
        pod_image = pod_image or (pushed_image(say) if machines else "")
        verdicts = []
        for types in machines:
            options = CanaryOptions(
                GpuTestOptions(pod_image, wait_s=wait_s),
                instance_types=types,
                user_data=Path(user_data).expanduser() if user_data else None,
                ready_s=wait_s,
                **self.pick("eks_cluster", "node_profile", "spot", "simulated"),
            )
            verdict, machine, folder = verify_in_cluster(
                image.subject(), image.cloud, image.build, cluster, options, state_home(), signer=signer
            )
            self.show(
                report.ending(verdict),
                f"verified as a node of {cluster.context} on {machine.instance_type} in {machine.zone}",
                f"report: {folder / 'report.html'}",
            )
            verdicts.append(verdict)
        self.report(None, schema="ami.verify/1", verdicts=verdicts)
        for verdict in verdicts:
            require_passed(verdict, self.build)
