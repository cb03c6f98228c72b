"""Whether the image of nodes was released or verified, by what the cloud shows while they are rendered."""

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

WHERE = "--region says where to look"


def require_trusted(image: str, cloud: Cloud | None) -> str:
    """Refuse an image that nothing vouches for, where keys are trusted.

    Args:
        image: A pointer's parameter, or an AMI's id.
        cloud: Where it is looked up, in its region; None: nowhere, which does where no key is trusted.

    Returns:
        By what it is trusted, in words.

    Raises:
        RefusedError: No trusted key vouches for it, or nobody said where it is to be looked up.
        UsageError: The channel points at nothing there, or there is no such image.
    """
    pointer = pointers.parse_path(image)
    if cloud is None:
        rules = load_channels()
        named = rules[pointer.channel].trust if pointer and pointer.channel in rules else trust.every_trust()
        if not named:
            return trust.UNSIGNED
        raise RefusedError(
            f"{image} has to be signed by {describe_trust(named)}, and nobody said where to look it up",
            hint="--cloud aws --region REGION verifies what is there now",
        )
    if pointer is None:
        described = require_image(cloud, image, hint=WHERE)
        ours = RECIPE_TAG in tags_of(described)
        return trust.require_verified(cloud, described) if ours else "not an image of gpukiln: it was named"
    with explain_aws_errors(f"read {image}"):
        found = pointers.read_all(cloud.client("ssm")).get(pointer)
    if found is None:
        raise UsageError(
            f"{image} does not exist in {cloud.region}", hint="`invoke ami.channels` shows every channel"
        )
    return trust.require_released(cloud, require_image(cloud, found, hint=WHERE), pointer)
