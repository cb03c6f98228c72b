"""The signed statement of a release or a rollback: made before a pointer moves, read back afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpukiln.attest import newest_release, statements, trust
from gpukiln.attest.statements import ReleaseClaim, TrustedStatements
from gpukiln.images.channels import Channel
from gpukiln.images.pointer import Pointer
from gpukiln.release.images import find_images
from gpukiln.release.regions import Site

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer


def sign_release(
    site: Site,
    pointer: Pointer,
    claim: ReleaseClaim,
    there: TrustedStatements,
    keys: Sequence[Key],
    signer: Signer,
) -> None:
    """Sign the release of an image to a channel, unless its statement is the same and the newest.

    Args:
        claim: The statement; its number is ignored.
        there: The statements on the image that trusted keys have signed.
        keys: The trusted keys.
    """
    # Each statement of a channel has a higher number, as metadata of TUF has: an older one can't be put back.
    before = there.releases.get(pointer.channel)
    if before and replace(before.claim, released_at=claim.released_at, number=claim.number) != claim:
        before = None
    image_id = there.location.image_id
    number = newest_release.release_number(site.cloud, site.ssm, pointer, image_id, before, keys)
    if before is None or before.claim.number != number:
        site.check_interrupted()
        envelope = statements.sign_statement(there.location, replace(claim, number=number), signer)
        statements.store_statement(site.ssm, image_id, statements.RELEASE, pointer.channel, envelope)


def require_newest_release(site: Site, pointer: Pointer, channel: Channel, image_id: str) -> None:
    """Read a pointer back after it was moved, and remember its release as the newest.

    Raises:
        RefusedError: Another release is newer. A channel that trusts no key is not checked.
    """
    if channel.trust:
        trust.require_released(site.cloud, find_images(site, [image_id])[image_id], pointer, site.ssm)
