"""Whether a trusted key signed the release or the verification of the nodes' image."""

from __future__ import annotations

from gpukiln.attest import trust
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.ec2 import require_image
from gpukiln.clouds.tags import RECIPE_TAG
from gpukiln.errors import RefusedError, UsageError
from gpukiln.images import pointer as pointers
from gpukiln.images.channels import load_channels
from gpukiln.images.keys import describe_trust
from gpukiln.instances.tags import tags_of

REGION_HINT = "--region names the region of the image"


def require_trusted(image: str, cloud: Cloud | None) -> str:
    """Refuse an image without a signature of a trusted key, if trusted keys are configured.

    Args:
        image: SSM parameter of a channel, or the id of an AMI.
        cloud: The cloud and region to look it up in; None is accepted only if no trusted key is configured.

    Returns:
        Why the image is trusted, in words.

    Raises:
        RefusedError: No trusted key signed the image, or `cloud` is missing.
        UsageError: The channel or the image does not exist there.
    """
    pointer = pointers.parse_path(image)
    if cloud is None:
        rules = load_channels()
        named = rules[pointer.channel].trust if pointer and pointer.channel in rules else trust.all_trusted()
        if not named:
            return trust.UNSIGNED
        raise RefusedError(
            f"{image} must be signed by {describe_trust(named)}, and no cloud is given to look it up in",
            hint="--cloud aws --region REGION verifies the current image",
        )
    if pointer is None:
        described = require_image(cloud, image, hint=REGION_HINT)
        # An image of others has no signature that could be verified.
        is_built_here = RECIPE_TAG in tags_of(described)
        return (
            trust.require_verified(cloud, described)
            if is_built_here
            else "not built by gpukiln; used because it was named"
        )
    return released_image(pointer, cloud)[1]


def released_image(pointer: pointers.Pointer, cloud: Cloud) -> tuple[str, str]:
    """The image that a channel points at now, verified.

    The pointer is read once: what is verified is what is returned, also when a release moves it meanwhile.

    Returns:
        The id of the image, and why it is trusted, in words.

    Raises:
        RefusedError: No trusted key signed its release.
        UsageError: The channel does not exist in the region of `cloud`.
    """
    with explain_aws_errors(f"read {pointer.path}"):
        image_id = pointers.read_all(cloud.client("ssm")).get(pointer)
    if image_id is None:
        raise UsageError(
            f"{pointer.path} does not exist in {cloud.region}",
            hint="`invoke ami.channels` lists the channels, `invoke ami.release BUILD --channel "
            f"{pointer.channel} --regions {cloud.region}` releases to this one",
        )
    return image_id, trust.require_released(cloud, require_image(cloud, image_id, hint=REGION_HINT), pointer)
