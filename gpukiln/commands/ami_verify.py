"""Machine images: judge one again, on the machines that somebody names or that a channel still asks for."""

from __future__ import annotations

from typing import Any

from gpukiln.commands.ami import COMMON
from gpukiln.commands.cli import SIGNERS, command, print_document, results, say, words
from gpukiln.typed import dump


@command(
    help={
        **{name: COMMON[name] for name in ("profile", "subnet_id", "ssh_cidr", "json")},
        "build": "build id, `last`, or AMI id (with --region and --cloud when another machine built it)",
        "instance_types": "GPU machines to try, separated by commas, the best first; default: the first that "
        "the image was built for",
        "for": "a channel: judge it on what this one still asks for; nothing when nothing is missing",
        "spot": "take a spot instance: cheaper, and EC2 may take it away",
        "simulated": "give the machine simulated GPUs (embedded cloud): a rehearsal, which proves nothing",
        "sign_key": f"signs the verdict: {SIGNERS}",
        "region": "where the image is, when this machine has no record of it",
        "cloud": "where the image is; default: as its record says",
    }
)
def verify(
    _: Any,
    build: str,
    instance_types: str = "",
    for_: str = "",
    spot: bool = False,
    simulated: bool = False,
    sign_key: str = "",
    region: str = "",
    cloud: str = "",
    profile: str = "",
    subnet_id: str = "",
    ssh_cidr: str = "",
    json: bool = False,
) -> int:
    """Boot a new machine from an image, judge it, and add the verdict to its record and its tags."""
    from gpukiln.attest.signing import signer_of
    from gpukiln.attest.trust import require_signer
    from gpukiln.errors import UsageError
    from gpukiln.images.builds import Builds
    from gpukiln.images.channels import load_channel
    from gpukiln.images.killed import clean_up_after_killed
    from gpukiln.images.subject import check_machines
    from gpukiln.instances.access import access_line
    from gpukiln.proof import pipeline
    from gpukiln.proof.verify import verify_again
    from gpukiln.release.find import find
    from gpukiln.release.needs import machines_to_try, require_proven
    from gpukiln.state import state_home
    from gpukiln.verify import report

    if simulated and for_:
        raise UsageError(
            f"--simulated proves nothing, and channel {for_} asks for proof", hint="leave one of the two out"
        )
    rules, builds = load_channel(for_) if for_ else None, Builds(state_home())
    account = {"profile": profile, "subnet_id": subnet_id, "ssh_cidr": ssh_cidr}
    found = find(build, builds, cloud=cloud, region=region, **account)
    signer = signer_of(sign_key, found.cloud)
    subject, has_gpus = found.subject(), found.cloud.has_gpus
    if simulated and found.cloud.name != "embedded":
        raise UsageError(
            f"--simulated: the cloud {found.cloud.name} has no simulated GPUs, only the embedded one has",
            hint="leave it out: a machine with real GPUs judges the image",
        )
    given = check_machines(subject, words(instance_types))
    tries = [given]
    if rules:
        tries = machines_to_try(for_, rules, found.proof(rules), list(given), has_gpus=has_gpus)
        tries = list(dict.fromkeys(check_machines(subject, types) for types in tries))
        if not tries:
            say(f"channel {for_} asks for no other verdict on {subject.image_id}: nothing to verify")
    if rules and tries:
        require_signer(for_, rules, signer, found.cloud)
    if tries:
        clean_up_after_killed(found.cloud, builds, say)
        say(access_line(found.cloud))
    verdicts, shown = [], results(json=json)
    for types in tries:
        verdict, machine, folder = verify_again(
            subject,
            found.cloud,
            found.build,
            state_home(),
            instance_types=types,
            spot=spot,
            simulated=simulated,
            signer=signer,
        )
        verdicts.append(verdict)
        shown.print(report.ending(verdict))
        shown.tell(f"judged on {machine.instance_type} in {machine.zone}{', spot' if machine.spot else ''}")
        shown.tell(f"report: {folder / 'report.html'}")
    if json:
        print_document("ami.verify/1", verdicts=[dump(verdict) for verdict in verdicts])
    for verdict in verdicts:
        pipeline.require_passed(verdict, build)
    if rules:  # what no verification provides is told, too
        require_proven(for_, rules, found.proof(rules), has_gpus=has_gpus)
    return 0
