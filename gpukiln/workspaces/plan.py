"""What a workspace gets before anything is made: machines in order, the image, and whether they fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any

from gpukiln.attest import trust
from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import DIGEST_TAG, VERDICT_TAG, VERIFIED_TAG
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.images.subject import Subject, subject_from_tags
from gpukiln.instances.tags import tags_of
from gpukiln.offers import image as images
from gpukiln.offers.cost import MachineUsage, month, within
from gpukiln.offers.fit import fit
from gpukiln.offers.model import ImageChoice, Offer, Request
from gpukiln.offers.request import parse
from gpukiln.offers.select import nothing, select
from gpukiln.units import Memory
from gpukiln.workspaces.contract import Workspace

Looked = Callable[[str], tuple[Subject | None, dict[str, Any]]]
MACHINE_ALONE = MachineUsage()


@dataclass(frozen=True)
class Limits:
    """What a machine may cost, in USD; None: anything.

    Args:
        hour: Of the machine.
        month: Of machine, home and public address.
    """

    hour: Decimal | None = None
    month: Decimal | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Plan:
    """What is going to be started in a region.

    Args:
        offers: The best first; all of them can be started from the image.
        choice: The image, and why that one.
        subject: What is in the image; None: it is none of ours.
        image: As DescribeImages gives it.
        gpus: How many the machine has to show; 0: none.
        use: What counts in a month's price.
    """

    wanted: Workspace
    offers: tuple[Offer, ...]
    choice: ImageChoice
    subject: Subject | None
    image: dict[str, Any]
    gpus: int
    use: MachineUsage = MACHINE_ALONE

    @property
    def digest(self) -> str:
        """Of the image's build; empty where it is none of ours."""
        return tags_of(self.image).get(DIGEST_TAG, "") if self.subject else ""

    @property
    def verdict(self) -> str:
        """Of the image, in words; empty where nobody judged it."""
        tags = tags_of(self.image)
        if not self.subject or VERDICT_TAG not in tags:
            return ""
        return f"{tags[VERDICT_TAG]} {tags.get(VERIFIED_TAG, '')}".strip()


def plan(
    cloud: Cloud,
    wanted: Workspace,
    today: date,
    *,
    limits: Limits = NO_LIMITS,
    use: MachineUsage = MACHINE_ALONE,
) -> Plan:
    """What a workspace gets in a region. Nothing is made.

    Args:
        use: What counts in a month's price.

    Raises:
        OverBudgetError: All that fits costs more a month.
        RefusedError: Nothing vouches for the image that was named.
        UsageError: The image is not there, or a type is unknown.
        IncompatibleError: No machine satisfies it, or none of them fits the image.
        UnavailableError: The cloud can't be asked.
    """
    offers = _offers(cloud, wanted, today, limits.hour)
    looked = cache(lambda image_id: _subject(cloud, image_id))  # asked once, for however many machines
    choices = _choices(cloud, wanted, offers, today, looked)
    fitting = [offer for offer, choice in choices if not _wrong(choice)]
    if not fitting:
        rows = tuple(f"{offer.instance_type}: {_wrong(choice)}" for offer, choice in choices[:6])
        raise IncompatibleError(
            f"{len(choices)} machines satisfy the request, and none of them can run its image",
            details=rows,
            hint="another --image, or another --gpu; `invoke offer.list --image auto` says more",
        )
    if limits.month is not None:
        costs = [(one, month(one, use, today, cloud=cloud.name)) for one in fitting]
        fitting = [one for one, _ in within(limits.month, costs)]
    best = next(choice for offer, choice in choices if offer in fitting)
    if best.kind == "base":
        raise IncompatibleError(
            f"{cloud.region} has no image that a workspace can be started from",
            details=best.why,
            hint=f"`invoke ami.build --region {cloud.region} --cloud {cloud.name}` bakes and proves one",
        )
    same = {offer.instance_type for offer, choice in choices if choice.image_id == best.image_id}
    subject, image = looked(best.image_id)
    return Plan(
        replace(wanted, image_id=best.image_id),
        tuple(offer for offer in fitting if offer.instance_type in same),
        best,
        subject,
        image,
        fitting[0].gpus if wants_gpus(wanted) else 0,
        use,
    )


def offline(wanted: Workspace, today: date) -> Plan:
    """What the catalogue says a workspace gets, without a cloud: nobody is asked for zones or the image.

    Raises:
        UsageError: There is no such GPU.
        IncompatibleError: No machine satisfies it.
    """
    offers = _satisfying(wanted, wanted.region, "aws", today, None)
    image_id = wanted.image_id or ""
    choice = ImageChoice(image_id, "given", image_id, ("it was named",), "", ())
    gpus = offers[0].gpus if wants_gpus(wanted) else 0
    return Plan(wanted, offers, choice, None, {"ImageId": image_id, "RootDeviceName": ""}, gpus)


def wants_gpus(wanted: Workspace) -> bool:
    """Whether the machine of a workspace has to have GPUs."""
    return wanted.capabilities.gpu_support and wanted.compute_profile.gpu_count > 0


def plan_words(offer: Offer, zone: str) -> str:
    """The offer that was taken, in words."""
    price = "no price known"
    if figure := offer.price or offer.estimate:
        price = f"{figure.value} USD/hour" if offer.price else f"about {figure.value} USD/hour (estimated)"
    return f"{offer.instance_type} {offer.market} in {zone}, {price}"


def request_of(wanted: Workspace) -> Request:
    """The machine that a workspace asks for, as offers know it.

    Raises:
        UsageError: There is no such GPU.
    """
    asked = wanted.compute_profile
    gpu = f"{asked.gpu_type}:{asked.gpu_count}" if asked.gpu_type else str(asked.gpu_count)
    request = parse(gpu, cpu=asked.cpu, memory=asked.memory or "", spot="only" if wanted.spot else "no")
    named = [instance_types()[name] for name in wanted.instance_types if name in instance_types()]
    return replace(request, arch="any") if named else request


def _offers(cloud: Cloud, wanted: Workspace, today: date, most: Decimal | None) -> tuple[Offer, ...]:
    if wants_gpus(wanted):
        return _satisfying(wanted, cloud.region, cloud.name, today, most)
    offers = _without_gpus(cloud, wanted)
    if most is not None:
        raise IncompatibleError(
            f"the price of {offers[0].instance_type} is not known, wanted at most {most} USD/hour",
            hint="the catalogue has prices of machines with GPUs; leave out --max-price",
        )
    return offers


def _satisfying(
    wanted: Workspace, region: str, source: str, today: date, most: Decimal | None
) -> tuple[Offer, ...]:
    """Machines of the catalogue that satisfy it, with the prices of a source; `most` USD an hour."""
    request = replace(request_of(wanted), max_price=most)
    found = select(request, [region], today, cloud=source)
    if not found.offers:
        raise nothing(request, found, [region])
    if not wanted.instance_types:
        return found.offers
    named = tuple(one for one in found.offers if one.instance_type in wanted.instance_types)
    if not named:
        near = {one.instance_type: "; ".join(lack.message for lack in one.lacks) for one in found.near}
        rows = [f"{name}: {near.get(name, 'not in the catalogue')}" for name in wanted.instance_types]
        raise IncompatibleError(
            f"{' and '.join(wanted.instance_types)} does not satisfy the request",
            details=tuple(rows),
            hint=f"{found.offers[0].instance_type} does; or ask for less",
        )
    return named


def _without_gpus(cloud: Cloud, wanted: Workspace) -> tuple[Offer, ...]:
    """Machines that EC2 describes; the catalogue has those with GPUs alone, so that no price is known."""
    if not wanted.instance_types:
        raise IncompatibleError(
            "machines without a GPU are not in the catalogue, so that none can be chosen",
            hint="name one: --instance-types m7i.2xlarge",
        )
    with explain_aws_errors("look up the instance types"):
        rows = cloud.client("ec2").describe_instance_types(InstanceTypes=list(wanted.instance_types))
    offers = []
    for row in rows["InstanceTypes"]:
        vcpu, memory = _require_large(row, wanted)
        offers.append(
            Offer(
                instance_type=row["InstanceType"],
                region=cloud.region,
                gpu="",
                gpus=0,
                gpu_fraction=0,
                gpu_memory_mib=0,
                vcpu=vcpu,
                memory_mib=memory,
                local_gb=row.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
                arch=row["ProcessorInfo"]["SupportedArchitectures"][-1],
                efa=0,
                market="spot" if wanted.spot else "on-demand",
                price=None,
                on_demand=None,
                spot=(),
                zones=None,
            )
        )
    return tuple(sorted(offers, key=lambda one: wanted.instance_types.index(one.instance_type)))


def require_size(cloud: Cloud, wanted: Workspace, name: str) -> None:
    """Refuse a machine without a GPU that has fewer vCPUs or less memory than is wanted.

    Raises:
        IncompatibleError: It has.
        UnavailableError: The cloud can't be asked.
    """
    with explain_aws_errors("look up the instance types"):
        rows = cloud.client("ec2").describe_instance_types(InstanceTypes=[name])
    _require_large(rows["InstanceTypes"][0], wanted)


def _require_large(row: dict[str, Any], wanted: Workspace) -> tuple[int, int]:
    """The vCPUs and the memory of a type, which are as large as is wanted."""
    profile = wanted.compute_profile
    least = Memory.parse(profile.memory, "memory").mib if profile.memory else 0
    vcpu, memory = row["VCpuInfo"]["DefaultVCpus"], row["MemoryInfo"]["SizeInMiB"]
    if vcpu < profile.cpu or memory < least:
        raise IncompatibleError(
            f"{row['InstanceType']} has {vcpu} vCPU and {memory} MiB, wanted {profile.cpu} and {least}",
            hint="name a larger one",
        )
    return vcpu, memory


def _choices(
    cloud: Cloud, wanted: Workspace, offers: Sequence[Offer], today: date, looked: Looked
) -> list[tuple[Offer, ImageChoice]]:
    if wanted.image_id:
        return _given(cloud, wanted.image_id, offers, today, looked)
    found = images.images_of(cloud, fresh=True)
    return [(offer, _chosen(found, cloud, offer, today)) for offer in offers]


def _chosen(found: images.Images, cloud: Cloud, offer: Offer, today: date) -> ImageChoice:
    if offer.gpus:
        return images.choose(found, cloud, offer.instance_type, None, today)
    raise UsageError(
        f"an image is chosen by the GPU, and {offer.instance_type} has none", hint="name one: --image"
    )


def _given(
    cloud: Cloud, image_id: str, offers: Sequence[Offer], today: date, looked: Looked
) -> list[tuple[Offer, ImageChoice]]:
    subject, image = looked(image_id)
    words = trust.require_verified(cloud, image) if subject else ""
    choices = []
    for offer in offers:
        findings = fit(offer.instance_type, image=subject, workload=None, today=today) if offer.gpus else ()
        choice = ImageChoice(image_id, "given", image_id, ("it was named",), "", findings, words)
        choices.append((offer, choice))
    return choices


def _subject(cloud: Cloud, image_id: str) -> tuple[Subject | None, dict[str, Any]]:
    image = calls.require_image(cloud, image_id, hint="--region says where to look")
    try:
        return subject_from_tags(image_id, tags_of(image)), image
    except UsageError:  # it has no tags of ours
        return None, image


def _wrong(choice: ImageChoice) -> str:
    return next((row.message for row in choice.findings if row.severity == "error"), "")
