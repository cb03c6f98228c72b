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
        tags: Every tag of gpukiln that names it.
        manifest_digest: The manifest's digest, which `repository@digest` names.
        at: When it was pushed, or found in the registry; ISO 8601 in UTC.
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
    # Two more tags: by the inputs, which a rebuild shares, and by the image itself.
    inputs, own = (text.removeprefix("sha256:")[:SHORT] for text in (built.digest, config))
    return tuple(dict.fromkeys((built.version, f"inputs-{inputs}", f"image-{own}")))


def push(
    built: Built, repository: Repository, *, log: Path, say: Callable[[str], None], dry_run: bool = False
) -> PushedImage | None:
    """Push an image under all of its tags; a tag that exists is not pushed again.

    An interrupted call is completed by the next one.

    Args:
        built: The image.
        log: Gets skopeo's output.
        dry_run: Only show what would be pushed.

    Returns:
        The image in the registry; None in a dry run that would push.

    Raises:
        RefusedError: A tag has another image.
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
        # A tag that exists decides the manifest: all tags must name the same one.
        digest = next((manifest.digest for manifest in there.values()), "")
        if not missing:
            say(f"nothing to push: {repository.name} has {', '.join(tags)} as {digest}")
        for tag in missing:
            pushed = skopeo.copy(digest or source, tag)
            # A push at the same time by another machine may have taken the tag.
            if pushed.config != config or pushed.digest != (digest or pushed.digest):
                raise UnavailableError(
                    f"{repository.name}:{tag} is not what was pushed; it is {pushed.digest}"
                )
            digest = pushed.digest
            say(f"pushed {repository.name}:{tag}")
    return PushedImage(repository.name, tags, digest, datetime.now(UTC).isoformat(timespec="seconds"))


def _existing_tags(skopeo: Skopeo, tags: tuple[str, ...], config: str) -> dict[str, Manifest]:
    """The tags that exist in the registry, all with this image; a tag never moves."""
    # Configurations are compared: a registry's manifest differs where another tool compressed the layers.
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
