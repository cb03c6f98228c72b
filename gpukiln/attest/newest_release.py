"""Detects that a channel's pointer was set back to an earlier release.

A release's statement has a number, which grows by one with each release and rollback of a channel in a
region, as the versions of metadata in TUF do (specification, "Check for a rollback attack"). Each computer
that reads a pointer stores the highest number that it has verified, and refuses a lower one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.attest import statements
from gpukiln.attest.statements import SignedRelease
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import RefusedError, UsageError
from gpukiln.files import write_atomic
from gpukiln.images.pointer import Pointer
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.state import state_home
from gpukiln.typed import dump, load, strict

if TYPE_CHECKING:
    from securesystemslib.signer import Key

log = logging.getLogger(__name__)


@strict
class NewestRelease:
    """The newest release of a channel that this computer has verified in a region.

    Args:
        key: The id of the key that signed it. If that key is no longer trusted, the number is ignored.
    """

    number: int
    image_id: str
    key: str


def require_newest(cloud: Cloud, pointer: Pointer, release: SignedRelease, keys: Collection[str]) -> None:
    """Refuse a release that is older than one that this computer has verified; else store its number.

    Args:
        cloud: The cloud, in the region of the pointer.
        release: The release that the pointer shows.
        keys: The ids of the keys that are trusted.

    Raises:
        RefusedError: It is older, or another release has the same number.
        UsageError: The file with the stored numbers can't be read.
        UnavailableError: The cloud does not answer which account this is.
    """
    file, path = _file(cloud), pointer.path
    # Read without the lock first: usually nothing has changed, and the folder may be read-only.
    if _is_newest(file, path, release, keys):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock")):
            if not _is_newest(file, path, release, keys):  # another process may have stored it meanwhile
                kept = {
                    **_read(file),
                    path: NewestRelease(release.claim.number, release.location.image_id, release.key),
                }
                write_atomic(file, json.dumps({name: dump(seen) for name, seen in kept.items()}, indent=1))
    # A computer whose home is read-only can still use releases; it only can't detect that a pointer is set
    # back.
    except OSError as error:
        log.warning(
            "warning: %s can't be written (%s): this computer can't detect that %s is set back",
            *(file, error.strerror, path),
        )


def _is_newest(file: Path, path: str, release: SignedRelease, keys: Collection[str]) -> bool:
    """Whether exactly this release is stored; False: none is, or an older one."""
    seen = _read(file).get(path)
    # Numbers signed with a key that was replaced do not count: whoever stole that key could have signed a
    # very high one, and no later release would ever be accepted.
    if seen is None or seen.key not in keys or seen.number < release.claim.number:
        return False
    location = release.location
    if (seen.number, seen.image_id) == (release.claim.number, location.image_id):
        return True
    raise RefusedError(
        f"{path} points at {location.image_id} in {location.region}, which is not the newest release: it "
        "has the "
        f"number {release.claim.number}, and this computer has verified number {seen.number}, "
        f"{seen.image_id}",
        details=(f"stored in: {file}",),
        hint="the pointer was set back, or two releases ran at once: CloudTrail (PutParameter) shows who "
        "wrote it; "
        f"`invoke ami.release BUILD --channel {release.claim.channel} --sign-key KEY` or `ami.rollback` on "
        "this computer creates a newer one",
    )


def release_number(
    cloud: Cloud, ssm: Any, pointer: Pointer, image_id: str, own: SignedRelease | None, keys: Sequence[Key]
) -> int:
    """The number for a release that is about to be signed; where it is signed and the newest, its own number.

    Reads every valid statement of the region, also those on images that no pointer ever named.

    Args:
        cloud: The cloud, in the region of the pointer.
        ssm: A client of that region.
        image_id: The image that is released.
        own: Its statement, where that has the same content; None: it needs a new one.
        keys: Those that are trusted.
    """
    known = {
        (release.location.image_id, release.claim.number)
        for release in statements.releases_of(ssm, pointer, keys)
    }
    seen = _read(_file(cloud)).get(pointer.path)
    if seen and seen.key in {key.keyid for key in keys}:
        # The statement with the highest number may have been deleted in SSM; this computer still knows it.
        known.add((seen.image_id, seen.number))
    highest = max((number for _, number in known), default=0)
    # Signing the same release again must not use a new number, so that a repeated command changes nothing.
    if own and {release for release in known if release[1] == highest} == {(image_id, own.claim.number)}:
        return highest
    return highest + 1


def _file(cloud: Cloud) -> Path:
    """The file of an account and region; each account has its own pointers and numbers."""
    with explain_aws_errors("ask whose account this is"):
        account = cloud.client("sts").get_caller_identity()["Account"]
    return state_home() / "trust" / f"{cloud.name}-{account}-{cloud.region}.json"


def _read(file: Path) -> dict[str, NewestRelease]:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return {}
    hint = "find out what changed the file; if it is removed, the next release is trusted whatever its number"
    try:
        return load(dict[str, NewestRelease], parse_json(text), where=str(file), hint=hint)
    except ValueError as error:
        raise UsageError(f"{file}: {error}", hint=hint) from error
