"""What is known of an image that a channel may take; `needs` compares it with what the channel asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpukiln.attest.statements import About, Vouched
from gpukiln.catalog.images import load_image
from gpukiln.clouds.tags import ATTESTED_TAGS, KUBERNETES_TAG
from gpukiln.errors import RefusedError, UsageError
from gpukiln.images.builds import Record
from gpukiln.images.subject import subject_from_tags
from gpukiln.proof.tags import VerdictSummary, judged_by, judged_by_claim, judged_from_tags
from gpukiln.verify.checks import LAYERS


@dataclass(frozen=True)
class ImageVerification:
    """What is known of how an image was judged.

    Args:
        image_id: The AMI.
        image: Name of the image, a folder of ami/.
        kubernetes: The Kubernetes version it is for.
        instance_types: The machines that it was built for.
        profile: The profile that it has to be judged by.
        required_layers: The image's own required layers.
        verdicts: The newest verdict of each instance type.
        attested: Digests of SBOM and provenance, and the key that signed it, by the image's tags.
        findings: What is wrong with SBOM and provenance; None: they are not on this machine.
        simulated: The instance types on whose simulated GPUs it was judged, which proves nothing; its tags
            don't tell them.
        named: How a command names it; empty: by its id and region.
        vouched: What the keys of a channel signed of it; None: nobody looked, and tags are trusted.
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
    vouched: Vouched | None = None

    @property
    def about(self) -> About:
        """What it is for, as signed statements say it."""
        return About(self.image, self.kubernetes, self.build, self.profile, self.instance_types)

    @property
    def not_run(self) -> str:
        """How many checks of each layer no machine ran, for example `runtime=1 gpu=4`, or `none`.

        Of a layer that some machines ran the smallest number counts: what one ran is proven.
        """
        every = [verdict.not_run for verdict in self.verdicts.values() if verdict.passed]
        least = {layer: min(counts.get(layer, 0) for counts in every) for layer in LAYERS} if every else {}
        return " ".join(f"{layer}={count}" for layer, count in least.items() if count) or "none"


def verification_from_record(record: Record) -> ImageVerification:
    """What the record of a build of this machine says.

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
        verdicts={name: judged_by(verdict) for name, verdict in record.newest_verdicts.items()},
        simulated=record.simulated,
        named=record.build_id,
    )


def verification_from_tags(image_id: str, region: str, tags: Mapping[str, str]) -> ImageVerification:
    """What an image that another machine built says of itself.

    Args:
        image_id: The AMI.

    Raises:
        UsageError: It is none of gpukiln's, or too old to say what it is for.
    """
    if not (kubernetes := tags.get(KUBERNETES_TAG)):
        raise UsageError(
            f"{image_id} in {region} has no tag {KUBERNETES_TAG}: it can't be released by its id alone",
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
        verdicts=judged_from_tags(image_id, tags),
        attested={name: tags[name] for name in ATTESTED_TAGS if tags.get(name)},
    )


def with_tag_verdicts(verification: ImageVerification, tags: Mapping[str, str]) -> ImageVerification:
    """What a record says, with the verdicts of other machines that the image's tags tell of.

    Args:
        verification: What the record says.
        tags: The image's tags.

    Raises:
        RefusedError: Of a type that both know they tell of different verdicts.
    """
    require_same_verdict(verification, tags)
    return replace(
        verification,
        verdicts={**judged_from_tags(verification.image_id, tags), **verification.verdicts},
        attested={name: tags[name] for name in ATTESTED_TAGS if tags.get(name)},
    )


def with_signed_verdicts(
    verification: ImageVerification, vouched: Vouched, record: Record | None
) -> ImageVerification:
    """The same image with the verdicts that trusted keys signed; tags and record count against it only.

    Args:
        verification: What tags and record say.
        vouched: What was signed.
        record: The build's record, where this computer has it: it has the reasons of checks not run.

    Raises:
        RefusedError: The tags or the record say something else of the image than was signed.
    """
    for name, claim in vouched.verdicts.items():
        if claim.image != verification.about:
            raise RefusedError(
                f"{verification.image_id} is described otherwise than what was signed of it on {name}",
                details=(
                    f"found, by tags or record: {verification.about}",
                    f"wanted, as signed: {claim.image}",
                ),
                hint="look who changed the tags of the image or the record; "
                f"`invoke ami.verify {verification.named or verification.image_id} --sign-key KEY` signs what is there now",
            )
    known = {verdict.digest: judged_by(verdict) for verdict in record.verdicts} if record else {}
    trusted = {
        name: known.get(claim.verdict, judged_by_claim(claim)) for name, claim in vouched.verdicts.items()
    }
    failed = {name: verdict for name, verdict in verification.verdicts.items() if not verdict.passed}
    return replace(verification, verdicts={**failed, **trusted}, vouched=vouched)


def require_same_verdict(verification: ImageVerification, tags: Mapping[str, str]) -> None:
    """Refuse an image whose tags tell of another verdict than is known of it.

    Args:
        verification: What is known.
        tags: The image's tags.

    Raises:
        RefusedError: They differ.
    """
    for verdict in verification.verdicts.values():
        name, value = verdict.tag
        if tags.get(name) != value:
            raise RefusedError(
                f"the tags of {verification.image_id} tell of another verdict than the record of {verification.build}",
                details=(f"record: {value}", f"tag {name}: {tags.get(name, 'none')}"),
                hint=f"`invoke ami.verify {verification.build} --instance-types {verdict.instance_type}` judges it "
                "again and writes both",
            )
