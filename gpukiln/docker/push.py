"""Push an image that was built, under tags that never move."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpukiln.docker.repository import Repository
from gpukiln.docker.skopeo import Manifest, Skopeo
from gpukiln.errors import RefusedError, UnavailableError, UsageError

SHORT = 12  # hexadecimal digits of a digest in a tag
TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)  # distribution-spec, Pulling manifests


@dataclass(frozen=True)
class Built:
    """An image that was built.

    Args:
        reference: As its engine knows it, for example localhost/gpukiln/runner-gpu:1.
        engine: Whose storage has it: docker, podman or buildah.
        version: Its version, which becomes a tag.
        digest: Digest of everything it was built from, in hexadecimal digits, with or without `sha256:`.
    """

    reference: str
    engine: str
    version: str
    digest: str


@dataclass(frozen=True)
class PushedImage:
    """An image in a registry.

    Args:
        repository: host[:port]/path.
        tags: Every tag of ours that names it.
        manifest_digest: What `repository@digest` names.
        at: When it was pushed or found there, ISO 8601 in UTC.
    """

    repository: str
    tags: tuple[str, ...]
    manifest_digest: str
    at: str

    @property
    def reference(self) -> str:
        """What to write into a pod or a Dockerfile: it can't change."""
        return f"{self.repository}@{self.manifest_digest}"


def tags_of(built: Built, config: str) -> tuple[str, ...]:
    """The tags of an image: its version, what it was built from, what it is.

    Args:
        built: The image.
        config: Digest of its configuration, which `docker images` calls its id.

    Raises:
        UsageError: The version is no tag.
    """
    if not TAG.fullmatch(built.version):
        raise UsageError(f"the version {built.version!r} can't be a tag; wanted: letters, digits, . _ -")
    inputs, own = (text.removeprefix("sha256:")[:SHORT] for text in (built.digest, config))
    return tuple(dict.fromkeys((built.version, f"inputs-{inputs}", f"image-{own}")))


def push(
    built: Built, repository: Repository, *, log: Path, say: Callable[[str], None], dry_run: bool = False
) -> PushedImage | None:
    """Push an image under all of its tags; what is there already is not pushed again.

    A call that was interrupted is completed by the next one.

    Args:
        built: The image.
        log: Gets what skopeo says.
        dry_run: Only say what would be pushed.

    Returns:
        The image in the registry; None in a dry run that would push.

    Raises:
        RefusedError: A tag is there with another image.
        UnavailableError: The image, the engine or the registry can't be reached.
    """
    with repository.login() as authfile:
        skopeo = Skopeo(repository.name, authfile=authfile, plain_http=repository.plain_http, log=log)
        source, config = skopeo.local(built.reference, built.engine)
        tags = tags_of(built, config)
        there = {} if repository.missing else _existing_tags(skopeo, tags, config)
        missing = [tag for tag in tags if tag not in there]
        if dry_run and missing:
            say(f"would push {built.reference} to {repository.name}: {', '.join(missing)}")
            return None
        digest = next((manifest.digest for manifest in there.values()), "")
        if not missing:
            say(f"nothing to push: {repository.name} has {', '.join(tags)} as {digest}")
        for tag in missing:
            pushed = skopeo.copy(digest or source, tag)
            if pushed.config != config or pushed.digest != (digest or pushed.digest):
                raise UnavailableError(
                    f"{repository.name}:{tag} is not what was pushed; it is {pushed.digest}"
                )
            digest = pushed.digest
            say(f"pushed {repository.name}:{tag}")
    return PushedImage(repository.name, tags, digest, datetime.now(UTC).isoformat(timespec="seconds"))


def _existing_tags(skopeo: Skopeo, tags: tuple[str, ...], config: str) -> dict[str, Manifest]:
    """The tags that are there, all with the one image; a tag never moves."""
    there = {tag: manifest for tag in tags if (manifest := skopeo.remote(tag))}
    others = [f"{tag}: {manifest.digest}" for tag, manifest in there.items() if manifest.config != config]
    if not others and len({manifest.digest for manifest in there.values()}) > 1:
        others = [f"{tag}: {manifest.digest}" for tag, manifest in there.items()]
    if others:
        raise RefusedError(
            f"{skopeo.repository} has another image under {len(others)} of the tags; tags never move",
            hint="give the image another version and build it again, or push to another repository",
            details=tuple(others),
        )
    return there
