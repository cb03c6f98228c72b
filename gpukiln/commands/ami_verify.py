"""Machine images: judge one again, on the machines that somebody names or that a channel still asks for."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.commands.cli import (
    SIGNERS,
    MachineOptions,
    MadeImageOptions,
    print_document,
    results,
    say,
    words,
)
from gpukiln.options import option
from gpukiln.typed import dump


@dataclass(frozen=True)
class AmiVerify(MadeImageOptions, MachineOptions):
    """Boot a new machine from an image, judge it, and add the verdict to its record and its tags."""

    build: str = option(
        "build id, `last`, or AMI id (with --region and --cloud when another machine built it)",
        first=True,
        required=True,
    )
    instance_types: str = option(
        "GPU machines to try, separated by commas, the best first; default: the first that the image was "
        "built for"
    )
    for_: str = option("a channel: judge it on what this one still asks for; nothing when nothing is missing")
    spot: bool = option("take a spot instance: cheaper, and EC2 may take it away", False)
    simulated: bool = option(
        "give the machine simulated GPUs (embedded cloud): a rehearsal, which proves nothing", False
    )
    sign_key: str = option(f"signs the verdict: {SIGNERS}")

    def run(self) -> int:
        from gpukiln.attest.signing import signer_of
        from gpukiln.attest.trust import require_signer
        from gpukiln.errors import UsageError
        from gpukiln.images.builds import Builds
        from gpukiln.images.channels import load_channel
        from gpukiln.images.orphans import remove_orphans
        from gpukiln.images.subject import check_machines
        from gpukiln.instances.access import access_line
        from gpukiln.pipeline import steps
        from gpukiln.pipeline.verify import verify_again
        from gpukiln.release.find import find
        from gpukiln.release.needs import machines_to_try, require_verified
        from gpukiln.state import state_home
        from gpukiln.verify import report

        if self.simulated and self.for_:
            raise UsageError(
                f"--simulated proves nothing, and channel {self.for_} asks for proof",
                hint="leave one of the two out",
            )
        rules, builds = load_channel(self.for_) if self.for_ else None, Builds(state_home())
        where = self.pick("cloud", "region", "profile", "subnet_id", "ssh_cidr")
        found = find(self.build, builds, **where)
        signer = signer_of(self.sign_key, found.cloud)
        subject, has_gpus = found.subject(), found.cloud.has_gpus
        if self.simulated and found.cloud.name != "embedded":
            raise UsageError(
                f"--simulated: the cloud {found.cloud.name} has no simulated GPUs, only the embedded one has",
                hint="leave it out: a machine with real GPUs judges the image",
            )
        given = check_machines(subject, words(self.instance_types))
        tries = [given]
        if rules:
            tries = machines_to_try(
                self.for_, rules, found.verification(rules), list(given), has_gpus=has_gpus
            )
            tries = list(dict.fromkeys(check_machines(subject, types) for types in tries))
            if not tries:
                say(f"channel {self.for_} asks for no other verdict on {subject.image_id}: nothing to verify")
        if rules and tries:
            require_signer(self.for_, rules, signer, found.cloud)
        if tries:
            remove_orphans(found.cloud, builds, say)
            say(access_line(found.cloud))
        verdicts, shown = [], results(json=self.json)
        for types in tries:
            verdict, machine, folder = verify_again(
                subject,
                found.cloud,
                found.build,
                state_home(),
                instance_types=types,
                spot=self.spot,
                simulated=self.simulated,
                signer=signer,
            )
            verdicts.append(verdict)
            shown.print(report.ending(verdict))
            shown.print_text(
                f"judged on {machine.instance_type} in {machine.zone}{', spot' if machine.spot else ''}"
            )
            shown.print_text(f"report: {folder / 'report.html'}")
        if self.json:
            print_document("ami.verify/1", verdicts=[dump(verdict) for verdict in verdicts])
        for verdict in verdicts:
            steps.require_passed(verdict, self.build)
        if rules:  # also what no verification provides is reported
            require_verified(self.for_, rules, found.verification(rules), has_gpus=has_gpus)
        return 0
