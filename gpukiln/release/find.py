"""Finds an image by the record of its build here, or by its tags where another machine built it."""

from dataclasses import dataclass, replace
from typing import Any

from gpukiln.attest import trust
from gpukiln.clouds import select
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import UsageError
from gpukiln.images.builds import Build, Builds
from gpukiln.images.channels import Channel
from gpukiln.images.subject import Subject, subject_from_tags
from gpukiln.instances.tags import tags_of
from gpukiln.pipeline.verify import subject_of_build
from gpukiln.release.images import find_images
from gpukiln.release.regions import each, make_sites
from gpukiln.release.verification import (
    ImageVerification,
    verification_from_record,
    verification_from_tags,
    with_signed_verdicts,
    with_tag_verdicts,
)


@dataclass(frozen=True)
class LocatedImage:
    """An image, its cloud, and its build where this machine has it."""

    image_id: str
    cloud: Cloud
    build: Build | None

    def subject(self) -> Subject:
        """The facts that suite and rules need.

        Raises:
            UsageError: Its build has no image, or its tags are incomplete.
        """
        if self.build:
            return subject_of_build(self.build)
        return subject_from_tags(self.image_id, tags_of(find_image(self.cloud, self.image_id)))

    def verification(self, rules: Channel | None = None) -> ImageVerification:
        """How it was verified: by statements that a channel's keys signed, else by record and tags.

        Args:
            rules: A channel's rules; None: no signature is required.

        Raises:
            RefusedError: Record, tags and signed statements contradict each other.
        """
        verification = (
            verification_of_build(self.cloud, self.build)
            if self.build
            else find_verification(self.cloud, self.image_id)
        )
        image = find_image(self.cloud, verification.image_id)
        # Even without signatures, tags that contradict the build's own record are refused.
        trust.require_own_record(self.cloud, image)
        # A channel without keys trusts the tags of the account.
        if rules is None or not rules.trust:
            return verification
        with explain_aws_errors("read the signed statements"):
            vouched, _ = trust.channel_statements(self.cloud, image, rules.trust)
        return with_signed_verdicts(verification, vouched, self.build.read() if self.build else None)


def find(
    name: str, builds: Builds, *, cloud: str = "", region: str = "", elsewhere: str = "", **account: str
) -> LocatedImage:
    """Find an image by the name that was typed.

    Args:
        name: A build's id, an AMI's id, or `last`.
        cloud: The cloud's name; empty: by its record.
        region: The region; empty: by its record.
        elsewhere: The region of an image that this machine has no record of.
        account: profile, subnet_id and ssh_cidr for `make_cloud`, as typed.

    Raises:
        UsageError: This machine has no such build, or the build is on another cloud or in another region.
    """
    options = {key: value or None for key, value in account.items()}
    try:
        # The record first: its facts are the machine's own, tags could have been changed since.
        build = builds.find(name)
    except UsageError as error:
        # Only an AMI can be found without a record; a build id means nothing elsewhere.
        if not name.startswith("ami-"):
            raise
        if not (region := region or elsewhere):
            raise UsageError(
                error.message, hint="name the --region, and --cloud aws, where another machine built it"
            ) from error
        return LocatedImage(name, select.make_cloud(cloud or "embedded", region, **options), None)
    record = build.read()
    plan = record.plan
    for option, typed, known in (("cloud", cloud, plan.cloud), ("region", region, plan.region)):
        # An option that contradicts the record is an error, for the image exists at one place only.
        if typed not in ("", known):
            raise UsageError(f"build {build.id} is in {known}, not in {typed}", hint=f"leave out --{option}")
    where = select.make_cloud(plan.cloud, plan.region, **options)
    return LocatedImage(record.bake.image_id if record.bake else "", where, build)


def find_image(cloud: Cloud, image_id: str) -> dict[str, Any]:
    """An image as DescribeImages gives it.

    Args:
        cloud: The cloud, in the image's region.
        image_id: The AMI.

    Raises:
        UsageError: There is no such image.
        UnavailableError: The cloud could not be asked.
    """
    sites = make_sites(cloud, [cloud.region])
    # `each` explains errors of AWS with the region; here it has a single one.
    [outcome] = each(sites, "look up the image", lambda site: find_images(site, [image_id])).values()
    image = outcome.require().get(image_id)
    if image is None:
        raise UsageError(
            f"this account has no image {image_id} in {cloud.region} ({cloud.name})",
            hint="check --region, --cloud and --profile",
        )
    return image


def find_verification(cloud: Cloud, image_id: str) -> ImageVerification:
    """The verification of an image by its tags.

    Args:
        cloud: The cloud, in the image's region.
        image_id: The AMI.

    Raises:
        UsageError: There is no such image, or its tags are incomplete.
        UnavailableError: The cloud could not be asked.
    """
    named = f"{image_id} --region {cloud.region} --cloud {cloud.name}"
    return replace(
        verification_from_tags(image_id, cloud.region, tags_of(find_image(cloud, image_id))), named=named
    )


def verification_of_build(cloud: Cloud, build: Build) -> ImageVerification:
    """The verification of an image that this machine built: by its record, tags, SBOM and provenance.

    Args:
        cloud: The cloud, in the image's region.

    Returns:
        The verification, with the verdicts of other machines.

    Raises:
        UsageError: The build has no image, or the image is gone.
        RefusedError: Record and tags have different verdicts.
        UnavailableError: The cloud could not be asked.
    """
    from gpukiln.attest import attestation  # noqa: PLC0415 - slow to import

    record = build.read()
    verification = verification_from_record(record)
    verification = with_tag_verdicts(verification, tags_of(find_image(cloud, verification.image_id)))
    # An image without SBOM has no findings on it; the channel decides whether it needs one.
    if not attestation.is_written(build):
        return verification
    findings = attestation.verify_attestation(build, record, cloud)
    return replace(
        verification,
        findings=tuple(
            f"{finding.id}: {finding.message}" for finding in findings if finding.outcome == "failed"
        ),
    )
