"""How an image was verified, by record, tags and signed statements; `needs` compares it with a channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpukiln.attest.statements import ImagePurpose, TrustedStatements
from gpukiln.catalog.images import load_image
from gpukiln.clouds.tags import ATTESTED_TAGS, KUBERNETES_TAG
from gpukiln.errors import RefusedError, UsageError
from gpukiln.images.builds import Record
from gpukiln.images.subject import subject_from_tags
from gpukiln.pipeline.verdict_tags import (
    VerdictSummary,
    cluster_key,
    cluster_summaries_from_tags,
    summaries_from_tags,
    summarize_claim,
    summarize_verdict,
)
from gpukiln.verify.checks import LAYERS


@dataclass(frozen=True)
class ImageVerification:
    """How an image was verified.

    Args:
        image_id: The AMI.
        image: Name of the image, a folder of ami/.
        kubernetes: The Kubernetes version it is for.
        instance_types: The instance types that it was built for.
        profile: The profile that it has to be verified by.
        required_layers: The image's own required layers.
        verdicts: The newest verdict of each instance type.
        cluster_verdicts: The newest verdict on it as a node, by instance type and Kubernetes version.
        attested: Digests of SBOM and provenance, and the key that signed it, by the image's tags.
        findings: Failed checks of SBOM and provenance; None: they are not on this machine.
        simulated: The instance types on whose simulated GPUs it was verified, which does not count. Its tags
            do not have them.
        named: The image's name in commands; empty: its id and region.
        vouched: The statements that the keys of a channel signed; None: not read, and tags are trusted.
    """

    image_id: str
    region: str
    image: str
    kubernetes: str
    build: str
    instance_types: tuple[str, ...]
    profile: str
    required_layers: tuple[str, ...]
    verdicts: Mapping[str, VerdictSummary]
    attested: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] | None = None
    simulated: tuple[str, ...] = ()
    named: str = ""
    vouched: TrustedStatements | None = None
    cluster_verdicts: Mapping[tuple[str, str], VerdictSummary] = field(default_factory=dict)

    @property
    def about(self) -> ImagePurpose:
        """What it is for, as signed statements say it."""
        return ImagePurpose(self.image, self.kubernetes, self.build, self.profile, self.instance_types)

    @property
    def not_run(self) -> str:
        """How many checks of each layer no machine ran, for example `runtime=1 gpu=4`, or `none`."""
        # The smallest number of each layer: a check that one machine ran is verified.
        every = [verdict.not_run for verdict in self.verdicts.values() if verdict.passed]
        least = {layer: min(counts.get(layer, 0) for counts in every) for layer in LAYERS} if every else {}
        return " ".join(f"{layer}={count}" for layer, count in least.items() if count) or "none"


def verification_from_record(record: Record) -> ImageVerification:
    """The verification by the record of a build of this machine.

    Raises:
        UsageError: The build has no image.
    """
    if record.bake is None:
        raise UsageError(
            f"build {record.build_id} has no image: it is {record.state}",
            hint="`invoke ami.list` shows others",
        )
    plan = record.plan
    return ImageVerification(
        image_id=record.bake.image_id,
        region=record.bake.region,
        image=plan.image,
        kubernetes=plan.kubernetes,
        build=record.build_id,
        instance_types=plan.instance_types,
        profile=plan.profile,
        required_layers=plan.required_layers,
        verdicts={name: summarize_verdict(verdict) for name, verdict in record.newest_verdicts.items()},
        # The newest of each, because the record has the oldest first.
        cluster_verdicts={
            cluster_key(verdict): summarize_verdict(verdict)
            for verdict in record.cluster_verdicts
            if not verdict.simulated
        },
        simulated=record.simulated,
        named=record.build_id,
    )


def verification_from_tags(image_id: str, region: str, tags: Mapping[str, str]) -> ImageVerification:
    """The verification by the tags of an image that another machine built.

    Args:
        image_id: The AMI.

    Raises:
        UsageError: gpukiln did not build it, or it is too old to have all tags.
    """
    if not (kubernetes := tags.get(KUBERNETES_TAG)):
        raise UsageError(
            f"{image_id} in {region} has no tag {KUBERNETES_TAG}, so it can't be released by its id alone",
            hint="release it on the machine that built it",
        )
    subject = subject_from_tags(image_id, tags)
    return ImageVerification(
        image_id=image_id,
        region=region,
        image=subject.recipe,
        kubernetes=kubernetes,
        build=subject.build_id,
        instance_types=subject.instance_types,
        profile=subject.profile,
        required_layers=load_image(subject.recipe).required_layers,
        verdicts=summaries_from_tags(image_id, tags),
        cluster_verdicts=cluster_summaries_from_tags(image_id, tags),
        attested={name: tags[name] for name in ATTESTED_TAGS if tags.get(name)},
    )


def with_tag_verdicts(verification: ImageVerification, tags: Mapping[str, str]) -> ImageVerification:
    """The verification by a record, with the verdicts of other machines that are in the image's tags.

    Args:
        verification: The verification by the record.
        tags: The image's tags.

    Raises:
        RefusedError: Record and tags have different verdicts of the same type.
    """
    require_same_verdict(verification, tags)
    return replace(
        verification,
        verdicts={**summaries_from_tags(verification.image_id, tags), **verification.verdicts},
        cluster_verdicts={
            **cluster_summaries_from_tags(verification.image_id, tags),
            **verification.cluster_verdicts,
        },
        attested={name: tags[name] for name in ATTESTED_TAGS if tags.get(name)},
    )


def with_signed_verdicts(
    verification: ImageVerification, vouched: TrustedStatements, record: Record | None
) -> ImageVerification:
    """The same image with the verdicts that trusted keys signed.

    Args:
        verification: The verification by tags and record.
        record: The build's record, where this computer has it: it has the reasons of checks that did not run.

    Raises:
        RefusedError: The tags or the record describe the image otherwise than the signed statements.
    """
    nodes = {name: statement.claim for name, statement in vouched.cluster_verdicts.items()}
    for name, claim in [*vouched.verdicts.items(), *nodes.items()]:
        if claim.image != verification.about:
            raise RefusedError(
                f"{verification.image_id} is described otherwise than in the signed verdict on {name}",
                details=(
                    f"found, by tags or record: {verification.about}",
                    f"wanted, as signed: {claim.image}",
                ),
                hint="find out who changed the tags of the image or the record; `invoke ami.verify "
                f"{verification.named or verification.image_id} --sign-key KEY` signs the current one",
            )
    recorded = (*record.verdicts, *record.cluster_verdicts) if record else ()
    known = {verdict.digest: summarize_verdict(verdict) for verdict in recorded}
    trusted = {
        name: known.get(claim.verdict, summarize_claim(claim)) for name, claim in vouched.verdicts.items()
    }
    trusted_nodes = {
        (claim.instance_type, claim.cluster_kubernetes): known.get(claim.verdict, summarize_claim(claim))
        for claim in nodes.values()
    }
    # Unsigned verdicts of tags and record count only where they failed: anybody could have written a pass.
    failed = {name: verdict for name, verdict in verification.verdicts.items() if not verdict.passed}
    failed_nodes = {
        key: verdict for key, verdict in verification.cluster_verdicts.items() if not verdict.passed
    }
    return replace(
        verification,
        verdicts={**failed, **trusted},
        cluster_verdicts={**failed_nodes, **trusted_nodes},
        vouched=vouched,
    )


def require_same_verdict(verification: ImageVerification, tags: Mapping[str, str]) -> None:
    """Refuse an image whose tags have another verdict than its verification.

    Args:
        verification: The verification by the record.
        tags: The image's tags.

    Raises:
        RefusedError: They differ.
    """
    on_machines = [(verdict.instance_type, verdict.tag, "") for verdict in verification.verdicts.values()]
    on_nodes = [
        (machine, verdict.cluster_tag(version), " --cluster CONTEXT")
        for (machine, version), verdict in verification.cluster_verdicts.items()
    ]
    for machine, (name, value), cluster in on_machines + on_nodes:
        if tags.get(name) != value:
            raise RefusedError(
                f"the tags of {verification.image_id} have another verdict than the record of"
                f" {verification.build}",
                details=(f"record: {value}", f"tag {name}: {tags.get(name, 'none')}"),
                hint=f"`invoke ami.verify {verification.build}{cluster} --instance-types {machine}` "
                "verifies it again and writes both",
            )
