"""The signed statement of a release or a rollback: made before a pointer moves, read back afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpukiln.attest import newest, statements, trust
from gpukiln.attest.statements import ReleaseClaim, Vouched
from gpukiln.images.channels import Channel
from gpukiln.images.pointer import Pointer
from gpukiln.release.images import find_images
from gpukiln.release.regions import Site

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer


def sign_release(
    site: Site, pointer: Pointer, claim: ReleaseClaim, there: Vouched, keys: Sequence[Key], signer: Signer
) -> None:
    """Sign that an image is released to a channel, unless its statement says the same and is the newest.

    Args:
        claim: What is to be said; its number is not looked at.
        there: What trusted keys signed of the image so far.
        keys: Those that are trusted.
    """
    before = there.releases.get(pointer.channel)
    if before and replace(before.claim, released_at=claim.released_at, number=claim.number) != claim:
        before = None
    image_id = there.place.image_id
    number = newest.number_for(site.cloud, site.ssm, pointer, image_id, before, keys)
    if before is None or before.claim.number != number:
        site.check_interrupted()
        envelope = statements.signed(there.place, replace(claim, number=number), signer)
        statements.keep(site.ssm, image_id, statements.RELEASE, pointer.channel, envelope)


def require_newest_release(site: Site, pointer: Pointer, channel: Channel, image_id: str) -> None:
    """Read back what a pointer shows after it was moved, and remember that it is the newest release.

    Raises:
        RefusedError: Another release is; a channel that trusts no key has none.
    """
    if channel.trust:
        trust.require_released(site.cloud, find_images(site, [image_id])[image_id], pointer, site.ssm)
