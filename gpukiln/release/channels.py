"""ami/channels.yaml, and what is known of an image that a channel may take; `needs` judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gpukiln.attest.tags import ATTESTED_TAGS
from gpukiln.catalog.gpus import architectures, gpus
from gpukiln.catalog.images import load_image
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.catalog.regions import check_region
from gpukiln.errors import RefusedError, UsageError
from gpukiln.images.builds import Record
from gpukiln.images.subject import subject_from_tags
from gpukiln.proof.tags import Judged, judged_by, judged_from_tags
from gpukiln.typed import load, strict, unknown
from gpukiln.verify.checks import LAYERS

DECLARED = "declared"


@strict
class Channel:
    """A channel; the fields are explained in ami/channels.yaml."""

    title: str
    gpus: tuple[str, ...]
    image_layers: bool
    layers: tuple[str, ...]
    suite: Literal["current", "any"]
    attestation: Literal["none", "written", "signed"]
    excused_without_gpus: tuple[str, ...]
    keep: int
    deprecate_after_days: int
    regions: tuple[str, ...]


def load_channels(root: Path = ROOT) -> dict[str, Channel]:
    """Read every channel.

    Returns:
        The channels by name.

    Raises:
        UsageError: The file does not fit.
    """
    where = "ami/channels.yaml"
    channels = load(
        dict[str, Channel], read_yaml(root / "ami" / "channels.yaml").get("channels"), where=where
    )
    for name, channel in channels.items():
        for layer in channel.layers:
            if layer not in LAYERS:
                raise unknown(f"layer of channel {name}", layer, LAYERS)
        for word in channel.gpus:
            if word not in (DECLARED, *gpus(), *architectures()):
                raise unknown(f"GPU of channel {name}", word, [DECLARED, *gpus(), *architectures()])
        for region in channel.regions:
            check_region(region)
        if channel.keep < 1 or channel.deprecate_after_days < 0:
            raise UsageError(f"{where}: {name}: keep is at least 1, deprecate_after_days at least 0")
    return channels


def load_channel(name: str, root: Path = ROOT) -> Channel:
    """Read one channel.

    Args:
        name: For example stable.

    Raises:
        UsageError: There is no such channel.
    """
    channels = load_channels(root)
    if name not in channels:
        raise unknown("channel", name, channels)
    return channels[name]


@dataclass(frozen=True)
class Proof:
    """What is known of how an image was judged.

    Args:
        image_id: The AMI.
        image: Name of the image, a folder of ami/.
        kubernetes: The Kubernetes version it is for.
        instance_types: The machines that it was built for.
        profile: The profile that it has to be judged by.
        required_layers: The image's own required layers.
        judged: The newest verdict of each instance type.
        attested: Digests of SBOM and provenance, and the key that signed it, by the image's tags.
        findings: What is wrong with SBOM and provenance; None: they are not on this machine.
        simulated: The instance types on whose simulated GPUs it was judged, which proves nothing; its tags
            don't tell them.
        named: How a command names it; empty: by its id and region.
    """

    image_id: str
    region: str
    image: str
    kubernetes: str
    build: str
    instance_types: tuple[str, ...]
    profile: str
    required_layers: tuple[str, ...]
    judged: Mapping[str, Judged]
    attested: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] | None = None
    simulated: tuple[str, ...] = ()
    named: str = ""

    @property
    def not_run(self) -> str:
        """How many checks of each layer no machine ran, for example `runtime=1 gpu=4`, or `none`.

        Of a layer that some machines ran the smallest number counts: what one ran is proven.
        """
        every = [one.not_run for one in self.judged.values() if one.passed]
        least = {layer: min(one.get(layer, 0) for one in every) for layer in LAYERS} if every else {}
        return " ".join(f"{layer}={count}" for layer, count in least.items() if count) or "none"


def proof_from_record(found: Record) -> Proof:
    """What the record of a build of this machine says.

    Raises:
        UsageError: The build has no image.
    """
    if found.bake is None:
        raise UsageError(
            f"build {found.build_id} has no image: it is {found.state}",
            hint="`invoke ami.list` shows others",
        )
    plan = found.plan
    return Proof(
        image_id=found.bake.image_id,
        region=found.bake.region,
        image=plan.image,
        kubernetes=plan.kubernetes,
        build=found.build_id,
        instance_types=plan.instance_types,
        profile=plan.profile,
        required_layers=plan.required_layers,
        judged={name: judged_by(verdict) for name, verdict in found.judged.items()},
        simulated=found.simulated,
        named=found.build_id,
    )


def proof_from_tags(image_id: str, region: str, tags: Mapping[str, str]) -> Proof:
    """What an image that another machine built says of itself.

    Args:
        image_id: The AMI.

    Raises:
        UsageError: It is none of gpukiln's, or too old to say what it is for.
    """
    if not (kubernetes := tags.get("gpukiln:kubernetes")):
        raise UsageError(
            f"{image_id} in {region} has no tag gpukiln:kubernetes: it can't be released by its id alone",
            hint="release it on the machine that built it",
        )
    subject = subject_from_tags(image_id, tags)
    return Proof(
        image_id=image_id,
        region=region,
        image=subject.recipe,
        kubernetes=kubernetes,
        build=subject.build_id,
        instance_types=subject.instance_types,
        profile=subject.profile,
        required_layers=load_image(subject.recipe).required_layers,
        judged=judged_from_tags(image_id, tags),
        attested={name: tags[name] for name in ATTESTED_TAGS if tags.get(name)},
    )


def joined(proof: Proof, tags: Mapping[str, str]) -> Proof:
    """What a record says, with the verdicts of other machines that the image's tags tell of.

    Args:
        proof: What the record says.
        tags: The image's tags.

    Raises:
        RefusedError: Of a type that both know they tell of different verdicts.
    """
    require_same_verdict(proof, tags)
    return replace(
        proof,
        judged={**judged_from_tags(proof.image_id, tags), **proof.judged},
        attested={name: tags[name] for name in ATTESTED_TAGS if tags.get(name)},
    )


def require_same_verdict(proof: Proof, tags: Mapping[str, str]) -> None:
    """Refuse an image whose tags tell of another verdict than is known of it.

    Args:
        proof: What is known.
        tags: The image's tags.

    Raises:
        RefusedError: They differ.
    """
    for one in proof.judged.values():
        name, value = one.tag
        if tags.get(name) != value:
            raise RefusedError(
                f"the tags of {proof.image_id} tell of another verdict than the record of {proof.build}",
                details=(f"record: {value}", f"tag {name}: {tags.get(name, 'none')}"),
                hint=f"`invoke ami.verify {proof.build} --instance-types {one.instance_type}` judges it "
                "again and writes both",
            )
