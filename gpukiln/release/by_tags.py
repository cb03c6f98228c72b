"""An image that another machine built, known by its tags alone."""

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.images.machines import tags_of
from gpukiln.release.channels import Proof, proof_from_tags
from gpukiln.release.images import find_images
from gpukiln.release.regions import each, make_sites


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
    sites = make_sites(cloud, [cloud.region])
    [outcome] = each(sites, "look up the image", lambda site: find_images(site, [image_id])).values()
    image = outcome.require().get(image_id)
    if image is None:
        raise UsageError(
            f"this account has no image {image_id} in {cloud.region} ({cloud.name})",
            hint="check --region, --cloud and --profile",
        )
    return proof_from_tags(image_id, cloud.region, tags_of(image))
