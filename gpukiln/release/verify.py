"""Verify an image on the machines that were named, or that a channel still requires."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpukiln.attest.trust import require_signer
from gpukiln.errors import UsageError
from gpukiln.images import orphans
from gpukiln.images.builds import Builds
from gpukiln.images.channels import Channel
from gpukiln.images.subject import check_machines
from gpukiln.instances.access import access_line
from gpukiln.pipeline.verify import verify_again
from gpukiln.release.find import LocatedImage
from gpukiln.release.needs import cluster_machines_to_try, machines_to_try
from gpukiln.state import state_home
from gpukiln.verify import report
from gpukiln.verify.verdict import Verdict

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

Show = Callable[..., None]


def verifications(
    image: LocatedImage,
    rules: Channel | None,
    channel: str,
    instance_types: Sequence[str],
    signer: Signer | None,
    *,
    simulated: bool,
    say: Callable[[str], None],
    kubernetes: str = "",
) -> list[tuple[str, ...]]:
    """The instance types of each verification; none where a channel requires no other verdict.

    Orphans of this computer's earlier commands are removed before, because they may hold the quota.

    Args:
        rules: Those of the channel; None: no channel was named.
        kubernetes: Minor version of the cluster as whose node the image is verified; empty: as a machine.

    Raises:
        UsageError: The image does not run on a named type, or the cloud has no simulated GPUs.
        RefusedError: The channel requires a signature that the signer can't give.
    """
    subject = image.subject()
    if simulated and image.cloud.name != "embedded":
        raise UsageError(
            f"--simulated: the cloud {image.cloud.name} has no simulated GPUs, only the embedded one has",
            hint="leave it out: a machine with real GPUs verifies the image",
        )
    named = check_machines(subject, instance_types)
    machines = [named]
    if rules:
        verification, has_gpus = image.verification(rules), image.cloud.has_gpus
        missing = (
            cluster_machines_to_try(channel, rules, verification, list(named), kubernetes, has_gpus=has_gpus)
            if kubernetes
            else machines_to_try(channel, rules, verification, list(named), has_gpus=has_gpus)
        )
        # Several requirements of a channel may be satisfied by the same machine, which is started once.
        machines = list(dict.fromkeys(check_machines(subject, types) for types in missing))
        if not machines:
            where = f" as a node in Kubernetes {kubernetes}" if kubernetes else ""
            say(
                f"channel {channel} requires no other verdict on {subject.image_id}{where}: nothing to verify"
            )
            return []
        # Before a machine is started, whose verdict the channel would not accept without a signature.
        require_signer(channel, rules, signer, image.cloud)
    # A machine that a killed command left may hold the quota for the one that is started now.
    orphans.clean_up_killed_builds(image.cloud, Builds(), say)
    # Raises where this computer's public address can't be detected, before a machine is started. A node is
    # verified through the cluster's API, and nobody logs in to it.
    if not kubernetes:
        say(access_line(image.cloud))
    return machines


def verify(
    image: LocatedImage,
    machines: Sequence[tuple[str, ...]],
    signer: Signer | None,
    show: Show,
    *,
    spot: bool,
    simulated: bool,
) -> Iterator[Verdict]:
    """Verify an image once for each entry of `machines`; `show` gets what people read of each verdict."""
    for types in machines:
        verdict, machine, folder = verify_again(
            image.subject(),
            image.cloud,
            image.build,
            state_home(),
            instance_types=types,
            spot=spot,
            simulated=simulated,
            signer=signer,
        )
        spot_text = ", spot" if machine.spot else ""
        show(
            report.ending(verdict),
            f"verified on {machine.instance_type} in {machine.zone}{spot_text}",
            f"report: {folder / 'report.html'}",
        )
        # A generator, so that each verdict is shown when it is there and not after the last.
        yield verdict
