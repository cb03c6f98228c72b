"""Machine images: verify one again, on named machines or on those that a channel still requires."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import SIGNERS, ExistingImageOptions, MachineOptions, say, words
from gpukiln.errors import UsageError
from gpukiln.options import option


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
    for_: str = option("a channel: verify what it still requires; nothing when nothing is missing")
    spot: bool = option("take a spot instance: cheaper, and EC2 may take it away", False)
    simulated: bool = option(
        "give the machine simulated GPUs (embedded cloud): a rehearsal, whose verdict does not count", False
    )
    sign_key: str = option(f"signs the verdict: {SIGNERS}")

    def run(self) -> None:
        from gpukiln.attest.signing import signer_of
        from gpukiln.images.builds import Builds
        from gpukiln.images.channels import load_channel
        from gpukiln.pipeline.steps import require_passed
        from gpukiln.release.find import find
        from gpukiln.release.needs import require_verified
        from gpukiln.release.verify import verifications, verify

        # Before anything is looked up or started, as its verdict would never satisfy the channel.
        if self.simulated and self.for_:
            raise UsageError(
                f"--simulated is a rehearsal, and channel {self.for_} requires a verdict that counts",
                hint="leave one of the two out",
            )
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
