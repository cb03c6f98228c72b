"""Which release of a channel is the newest: a pointer that was put back to an earlier one is noticed.

A release's statement has a number, which grows by one with each release and rollback of a channel in a
region, as the versions of metadata in TUF do (specification, "Check for a rollback attack"). Each computer
that reads a pointer remembers the highest number that it has verified, and takes no lower one.
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
        key: The id of the key that signed it. Where that is not trusted any more, its numbers say nothing.
    """

    number: int
    image_id: str
    key: str


def require_newest(cloud: Cloud, pointer: Pointer, release: SignedRelease, keys: Collection[str]) -> None:
    """Refuse a release that is older than another that this computer has verified, and remember it otherwise.

    Args:
        cloud: The cloud, in the region of the pointer.
        release: The release that the pointer shows.
        keys: The ids of the keys that are trusted.

    Raises:
        RefusedError: It is older, or another release has the same number.
        UsageError: What this computer remembers can't be read.
        UnavailableError: The cloud can't be asked whose account it is.
    """
    file, path = _file(cloud), pointer.path
    if _is_newest(file, path, release, keys):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock")):
            if not _is_newest(file, path, release, keys):  # as another process may have left it
                kept = {
                    **_read(file),
                    path: NewestRelease(release.claim.number, release.location.image_id, release.key),
                }
                write_atomic(file, json.dumps({name: dump(seen) for name, seen in kept.items()}, indent=1))
    except OSError as error:
        log.warning(
            "warning: %s can't be written (%s): here nobody notices when %s is put back",
            *(file, error.strerror, path),
        )


def _is_newest(file: Path, path: str, release: SignedRelease, keys: Collection[str]) -> bool:
    """Whether this very release is remembered; False: none, or an older one."""
    seen = _read(file).get(path)
    if seen is None or seen.key not in keys or seen.number < release.claim.number:
        return False
    here = release.location
    if (seen.number, seen.image_id) == (release.claim.number, here.image_id):
        return True
    raise RefusedError(
        f"{path} points at {here.image_id} in {here.region}, and that is not the newest release: it has the "
        f"number {release.claim.number}, and this computer has verified number {seen.number}, "
        f"{seen.image_id}",
        details=(f"what is remembered: {file}",),
        hint="somebody put it back, or two released at once: look who wrote it (CloudTrail, PutParameter); "
        f"`invoke ami.release BUILD --channel {release.claim.channel} --sign-key KEY` or `ami.rollback` on "
        "this computer makes a newer one",
    )


def release_number(
    cloud: Cloud, ssm: Any, pointer: Pointer, image_id: str, own: SignedRelease | None, keys: Sequence[Key]
) -> int:
    """The number of a release that is about to be signed: the one that it has, where that is the newest.

    Looks at every statement of the region that counts, also of images that no pointer ever named.

    Args:
        cloud: The cloud, in the region of the pointer.
        ssm: A client of that region.
        image_id: The image that is released.
        own: Its statement, where it has one that says the same; None: it needs a new one.
        keys: Those that are trusted.
    """
    known = {
        (release.location.image_id, release.claim.number)
        for release in statements.releases_of(ssm, pointer, keys)
    }
    seen = _read(_file(cloud)).get(pointer.path)
    if seen and seen.key in {key.keyid for key in keys}:
        known.add((seen.image_id, seen.number))
    highest = max((number for _, number in known), default=0)
    if own and {release for release in known if release[1] == highest} == {(image_id, own.claim.number)}:
        return highest
    return highest + 1


def _file(cloud: Cloud) -> Path:
    """Numbers of two accounts are not compared: each has its own pointers."""
    with explain_aws_errors("ask whose account this is"):
        account = cloud.client("sts").get_caller_identity()["Account"]
    return state_home() / "trust" / f"{cloud.name}-{account}-{cloud.region}.json"


def _read(file: Path) -> dict[str, NewestRelease]:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return {}
    hint = (
        "look what happened to it; without it the next release that is found is trusted, whatever its number"
    )
    try:
        return load(dict[str, NewestRelease], parse_json(text), where=str(file), hint=hint)
    except ValueError as error:
        raise UsageError(f"{file}: {error}", hint=hint) from error
