"""What the tags of an image say of it: all that is known of one that another machine built."""

from dataclasses import replace
from typing import Any

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.images.builds import Build
from gpukiln.instances.tags import tags_of
from gpukiln.release.channels import Proof, joined, proof_from_record, proof_from_tags
from gpukiln.release.images import find_images
from gpukiln.release.regions import each, make_sites


def find_image(cloud: Cloud, image_id: str) -> dict[str, Any]:
    """An image as DescribeImages gives it.

    Args:
        cloud: The cloud, in the image's region.
        image_id: The AMI.

    Raises:
        UsageError: It is not there.
        UnavailableError: The cloud could not be asked.
    """
    sites = make_sites(cloud, [cloud.region])
    [outcome] = each(sites, "look up the image", lambda site: find_images(site, [image_id])).values()
    image = outcome.require().get(image_id)
    if image is None:
        raise UsageError(
            f"this account has no image {image_id} in {cloud.region} ({cloud.name})",
            hint="check --region, --cloud and --profile",
        )
    return image


def find_proof(cloud: Cloud, image_id: str) -> Proof:
    """What an image says of itself.

    Args:
        cloud: The cloud, in the image's region.
        image_id: The AMI.

    Returns:
        How it was judged.

    Raises:
        UsageError: It is not there, or its tags don't say what it is.
        UnavailableError: The cloud could not be asked.
    """
    named = f"{image_id} --region {cloud.region} --cloud {cloud.name}"
    return replace(proof_from_tags(image_id, cloud.region, tags_of(find_image(cloud, image_id))), named=named)


def proof_of_build(cloud: Cloud, build: Build) -> Proof:
    """What is known of an image that was built here: by its record, its tags, its SBOM and its provenance.

    Args:
        cloud: The cloud, in the image's region.

    Returns:
        How it was judged, by other machines too.

    Raises:
        UsageError: The build has no image, or the image is gone.
        RefusedError: Record and tags tell of different verdicts.
        UnavailableError: The cloud could not be asked.
    """
    from gpukiln.attest import attestation  # noqa: PLC0415 - slow to import

    record = build.read()
    proof = proof_from_record(record)
    proof = joined(proof, tags_of(find_image(cloud, proof.image_id)))
    if not attestation.is_written(build):
        return proof
    found = attestation.verify_attestation(build, record, cloud)
    return replace(proof, findings=tuple(f"{one.id}: {one.says}" for one in found if one.outcome == "failed"))
