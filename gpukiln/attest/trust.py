"""Decides whether an AMI may be used: by statements of trusted keys, else by this computer's records.

Everybody who may tag images can write tags, so that tags are no evidence. Where ami/channels.yaml names keys,
a signed statement decides. Where it names none, the tags are compared with the records of this computer's
builds and releases, and every command prints that it trusts the tags otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.attest import newest_release, statements
from gpukiln.attest.statements import ReleaseClaim, TrustedStatements, VerdictClaim
from gpukiln.catalog.bases import NO_KUBERNETES
from gpukiln.catalog.load import ROOT
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import BUILD_ID_TAG, SOURCE_TAG
from gpukiln.errors import RefusedError
from gpukiln.images.builds import Build, Builds
from gpukiln.images.channels import Channel, load_channels
from gpukiln.images.keys import OidcIdentity, describe_trust
from gpukiln.images.pointer import Pointer
from gpukiln.instances.tags import tags_of
from gpukiln.state import state_home

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

UNSIGNED = "unsigned: trusts the tags of this account"


def keys_of(trust: Iterable[str | OidcIdentity], cloud: Cloud, root: Path = ROOT) -> tuple[Key, ...]:
    """The keys of a channel, each once.

    Args:
        trust: As ami/channels.yaml names them.
        cloud: Whose KMS has public keys.

    Raises:
        UsageError: An entry is no public key.
        UnavailableError: KMS refused, or can't be reached.
    """
    from gpukiln.attest.keyless import IdentityKey  # noqa: PLC0415 - slow to import
    from gpukiln.attest.signing import public_key_of  # noqa: PLC0415 - slow to import

    def key_of(entry: str | OidcIdentity) -> Key:
        if isinstance(entry, str):
            return public_key_of(entry, cloud, root)
        config = root / entry.trust_config if entry.trust_config else None
        return IdentityKey(entry.identity, entry.issuer, config)

    # Channels may name the same key as a file and in KMS.
    by_id = {key.keyid: key for key in map(key_of, trust)}
    return tuple(by_id.values())


def all_trusted() -> tuple[str | OidcIdentity, ...]:
    """The keys of all channels, which are trusted for an image that no channel points at."""
    return tuple(dict.fromkeys(entry for channel in load_channels().values() for entry in channel.trust))


def require_signer(name: str, channel: Channel, signer: Signer | None, cloud: Cloud) -> None:
    """Refuse a signer that the channel does not trust, before the work begins.

    Args:
        name: The channel's name.
        signer: The key that would sign.
        cloud: Whose KMS has keys.

    Raises:
        RefusedError: The channel trusts keys, and the signer's is none of them.
    """
    if not channel.trust:
        return
    where = f"channel {name} trusts only {describe_trust(channel.trust)}"
    if signer is None:
        raise RefusedError(
            f"{where}, and --sign-key is missing", hint="give --sign-key KEY, the private key of one of them"
        )
    from gpukiln.attest.signing import key_name  # noqa: PLC0415 - slow to import

    # Checked before a machine is started: a build takes long, and its signature would be useless.
    keys = keys_of(channel.trust, cloud)
    if signer.public_key.keyid not in [key.keyid for key in keys]:
        raise RefusedError(
            f"{where}, and --sign-key is another key",
            details=(f"found: {key_name(signer.public_key)}", f"wanted: {' or '.join(map(key_name, keys))}"),
            hint="give the private key of one of them, or add the public key to trust in ami/channels.yaml",
        )


def channel_statements(
    cloud: Cloud, image: Mapping[str, Any], trust: Iterable[str | OidcIdentity], ssm: Any = None
) -> tuple[TrustedStatements, Sequence[Key]]:
    """The statements on an AMI that a channel's keys signed, and the keys.

    Args:
        cloud: The cloud, in the image's region.
        image: As DescribeImages gives it.
        trust: As ami/channels.yaml names them.
        ssm: A client of that region, where there is one already.
    """
    keys = keys_of(trust, cloud)
    return statements.trusted_statements(ssm or cloud.client("ssm"), image, cloud.region, keys), keys


def require_released(
    cloud: Cloud, image: Mapping[str, Any], pointer: Pointer, ssm: Any = None, *, pointed: bool = True
) -> str:
    """Refuse an AMI that a channel points at, unless a signed statement says that it was released there last.

    Args:
        cloud: The cloud, in the image's region.
        image: As DescribeImages gives it.
        pointer: The channel.
        ssm: A client of that region, where there is one already.
        pointed: Whether the pointer names it; False: it will, and may be an earlier release.

    Returns:
        Why it is trusted, as text.

    Raises:
        RefusedError: No trusted key signed its release and verdicts; this computer has verified a newer
            release;
            or a record of this computer names another image of its build.
        UsageError: A key or a record can't be read.
    """
    # Also where keys decide: a record of this computer that contradicts the tags shows a mistake or an
    # attack.
    require_own_record(cloud, image)
    rules = load_channels().get(pointer.channel)
    # Channels without keys rely on the account's tags; the caller prints that, so that it is no surprise.
    if rules is None or not rules.trust:
        return UNSIGNED
    with explain_aws_errors("read the signed statements"):
        signed, keys = channel_statements(cloud, image, rules.trust, ssm)
    # All reasons are listed: usually a missing verdict causes several.
    if wrong := list(_missing_for_release(signed, pointer, rules)):
        raise RefusedError(
            f"{pointer.path} points at {signed.location}, and no trusted key signed that release: {wrong[0]}",
            details=(*wrong[1:], *signed.refused, *_channel_signers(rules)),
            hint=f"`invoke ami.release BUILD --channel {pointer.channel} --sign-key KEY` points it at "
            f"a verified image, `invoke ami.rollback --channel {pointer.channel} --to BUILD --sign-key KEY` "
            "at an earlier one",
        )
    if pointed:
        release = signed.releases[pointer.channel]
        newest_release.require_newest(cloud, pointer, release, [key.keyid for key in keys])
    return _trust_text(keys)


def require_verified(cloud: Cloud, image: Mapping[str, Any]) -> str:
    """Refuse an AMI with gpukiln's tags, unless a signed verdict says that it passed.

    Args:
        cloud: The cloud, in the image's region.
        image: As DescribeImages gives it.

    Returns:
        Why it is trusted, as text.

    Raises:
        RefusedError: No key that a channel trusts signed a verdict, or a signed one failed; or a record of
            this
            computer names another image of its build.
        UsageError: A key or a record can't be read.
    """
    require_own_record(cloud, image)
    if not (trust := all_trusted()):
        return UNSIGNED
    with explain_aws_errors("read the signed statements"):
        signed, keys = channel_statements(cloud, image, trust)
    failed = [name for name, claim in signed.verdicts.items() if not _is_acceptable(claim)]
    if failed or not signed.verdicts:
        why = f"it failed on {', '.join(failed)}" if failed else "there is no signed verdict on it"
        raise RefusedError(
            f"no trusted key signed a passed verdict on {signed.location}: {why}",
            details=(*signed.refused, *_expected_signers(trust)),
            hint=f"`invoke ami.verify {signed.location.image_id} --region {cloud.region} "
            f"--cloud {cloud.name} --sign-key KEY` boots it, verifies it and signs the verdict",
        )
    return _trust_text(keys)


def _is_acceptable(claim: VerdictClaim) -> bool:
    # A verdict with another profile than the image's, for example of a node, says nothing about the image.
    return claim.outcome == "passed" or claim.profile != claim.image.profile


def _missing_for_release(signed: TrustedStatements, pointer: Pointer, rules: Channel) -> Iterator[str]:
    """What is missing for a valid release to a channel, one line each."""
    release = signed.releases.get(pointer.channel)
    if release is None:
        yield f"there is no signed release of it to {pointer.channel}"
        return
    claim, image = release.claim, release.claim.image
    if (image.name, image.kubernetes) != (pointer.image, pointer.kubernetes):
        version = (
            "without Kubernetes"
            if image.kubernetes == NO_KUBERNETES
            else f"for Kubernetes {image.kubernetes}"
        )
        yield f"it was released as {image.name} {version}"
    if not claim.instance_types:
        yield "its release names no machine that verified it"
    nodes = {name: statement.claim for name, statement in signed.cluster_verdicts.items()}
    counted = [(name, signed.verdicts.get(name)) for name in claim.instance_types]
    for name, verdict in [*counted, *((name, nodes.get(name)) for name in claim.nodes)]:
        if verdict is None:
            yield f"there is no signed verdict of {name}"
        elif verdict.image != image:
            yield f"the verdict of {name} is about {verdict.image}, the release about {image}"
        elif rules.suite == "current" and not _of_suite(verdict, claim):
            yield f"{name}: verified by the suite {verdict.suite}, released by {claim.suite}"
    for name, verdict in signed.verdicts.items():
        if not _is_acceptable(verdict):
            yield f"it failed on {name}"
    # Only where the channel requires them: a failure as a node says nothing about the image on a workspace.
    for name in claim.nodes:
        if name in nodes and nodes[name].outcome != "passed":
            yield f"it failed as a node on {name}"


def _of_suite(verdict: VerdictClaim, release: ReleaseClaim) -> bool:
    """Whether a verdict is by the suite of the release, or newer than the release."""
    # A nightly verification with a newer suite must not invalidate a released image.
    return verdict.suite == release.suite or verdict.verified_at > release.released_at


def _channel_signers(rules: Channel) -> tuple[str, ...]:
    return _expected_signers(rules.trust)


def _expected_signers(trust: Iterable[str | OidcIdentity]) -> tuple[str, ...]:
    return (f"wanted: statements signed by {describe_trust(trust)} (trust, ami/channels.yaml)",)


def _trust_text(keys: Sequence[Key]) -> str:
    from gpukiln.attest.keyless import IdentityKey  # noqa: PLC0415 - slow to import

    names = (str(key) if isinstance(key, IdentityKey) else f"the key {key.keyid[:16]}" for key in keys)
    return f"signed: trusts {' and '.join(names)}"


def require_own_record(cloud: Cloud, image: Mapping[str, Any]) -> None:
    """Refuse an AMI whose tags name a build of this computer that created another image.

    Builds of other computers can't be compared.

    Args:
        cloud: The cloud, in the image's region.
        image: As DescribeImages gives it.

    Raises:
        RefusedError: The record names another AMI, and this one is no copy of it.
        UsageError: The record is damaged.
    """
    tags, image_id = tags_of(image), str(image["ImageId"])
    build = _build(tags.get(BUILD_ID_TAG, ""))
    if build is None:
        return
    record = build.read()
    where = f"{record.plan.cloud} in {record.plan.region}"
    recorded_id = record.bake.image_id if record.bake else "no image"
    if (recorded_id, record.plan.cloud, record.plan.region) == (image_id, cloud.name, cloud.region):
        return
    # Copies of the image in other regions have the same build id in their tags.
    if record.plan.cloud == cloud.name and record.bake:
        if is_copy(image, recorded_id, record.plan.region):
            return
        if image_id in _released_images(build.id, cloud):
            return
    raise RefusedError(
        f"the tags of {image_id} in {cloud.region} name build {build.id}, whose record names {recorded_id} "
        f"({where})",
        details=(
            f"found: {BUILD_ID_TAG}={build.id}, source of {image_id} by EC2: {_ec2_source(image)}",
            f"wanted: the image of that build, or a copy of it that EC2 or a release of this computer names; "
            f"the record is {build.record_file}",
        ),
        hint=f"find out who created the AMI, and remove it; the verified image is {recorded_id}: `invoke "
        "ami.show "
        f"{build.id}`",
    )


def is_copy(image: Mapping[str, Any], source_id: str, source_region: str) -> bool:
    """Whether EC2 itself reports that an AMI is a copy of another; unlike a tag no user can write that.

    CreateImage sets a source too, the image of the captured machine, but together with SourceInstanceId.

    Args:
        image: As DescribeImages gives it.
    """
    source = image.get("SourceImageId"), image.get("SourceImageRegion")
    # A captured machine is not the image: anything may have been changed on it.
    return source == (source_id, source_region) and not image.get("SourceInstanceId")


def _ec2_source(image: Mapping[str, Any]) -> str:
    values = [image.get(name) for name in ("SourceImageId", "SourceImageRegion", "SourceInstanceId")]
    return " ".join(str(value) for value in values if value) or "none"


def require_copy(
    cloud: Cloud,
    image: Mapping[str, Any],
    source: statements.AmiLocation,
    build: str,
    signed: TrustedStatements | None,
    verified: Iterable[statements.AmiLocation] = (),
) -> None:
    """Refuse an image of which only the tags say that it is a copy.

    Args:
        cloud: The cloud, in the image's region.
        image: As DescribeImages gives it.
        source: What it must be a copy of.
        build: The build that is released.
        signed: The statements on it that trusted keys signed; None: the channel trusts no key.
        verified: The images that were booted, where the source itself is a copy.

    Raises:
        RefusedError: Neither EC2 nor an earlier release names the source.
    """
    if is_copy(image, source.image_id, source.region):
        return
    image_id = str(image["ImageId"])
    if signed and any(release.claim.source in (source, *verified) for release in signed.releases.values()):
        return
    if signed is None and image_id in _released_images(build, cloud):
        return
    raise RefusedError(
        f"{image_id} in {cloud.region} is a copy of {source.image_id} only by its tag {SOURCE_TAG}",
        details=(
            f"found: {statements.location_of(image, cloud.region)}, source by EC2: {_ec2_source(image)}",
            f"wanted: {source.image_id} {source.region}, or a release that names it",
            *(signed.refused if signed else ()),
        ),
        hint=f"find out who created it, and deregister it or remove its tag {SOURCE_TAG}: then the same "
        "command makes a copy",
    )


def _build(build_id: str) -> Build | None:
    """The build of this computer with an id. The id comes from a tag, so that it must not become a path."""
    # Compared with existing folders, so that `../` in a tag reads no other path.
    return next((build for build in Builds(state_home()).folders() if build.id == build_id), None)


def _released_images(build_id: str, cloud: Cloud) -> set[str]:
    """The AMIs of a build that releases of this computer published in a region."""
    image_ids: set[str] = set()
    for file in (state_home() / "releases").glob("*.json"):
        try:
            document = json.loads(file.read_text())
            if (document["build"], document["cloud"]) != (build_id, cloud.name):
                continue
            rows = document["regions"]
            image_ids |= {
                row["image_id"] for row in rows if row["region"] == cloud.region and row["published"]
            }
        # A damaged file of one release must not block all others; ReleaseLog.regions reports it.
        except (OSError, ValueError, KeyError, TypeError):  # ReleaseLog.regions warns of it
            continue
    return image_ids - {""}
