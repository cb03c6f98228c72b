"""Signed statements on an AMI: the verdict on a machine booted from it, and its release to a channel.

Both are in-toto statements in DSSE envelopes. Their subject is the AMI in its region with its snapshots, so
that one can't be used for another image. They are kept as SSM parameters of that region, whose names contain
the AMI's id; who may write parameters there can remove a statement, and can't make one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpukiln import __version__
from gpukiln.attest.provenance import STATEMENT_TYPE, image_subject, snapshot_subject
from gpukiln.clouds import ec2 as calls
from gpukiln.errors import CheckFailedError, UsageError
from gpukiln.findings import FinalOutcome
from gpukiln.images.pointer import Pointer
from gpukiln.instances.tags import snapshots_of
from gpukiln.typed import dump, load, strict

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

VERDICT_TYPE, RELEASE_TYPE = "urn:gpukiln:verdict:v1", "urn:gpukiln:release:v1"
ROOT = "/gpukiln-attestations"
"""Outside of /gpukiln, which is listed whole to find the channels."""
VERDICT, RELEASE = "verdict", "release"
MAX_PARAMETER_CHARS = 8192
"""Characters of a parameter of the advanced tier (Systems Manager, PutParameter, Tier). An envelope with the
certificate and the proof of an identity is longer, and kept in parts."""


@strict
class AmiLocation:
    """An AMI in a region, with its snapshots in the order of its disks."""

    image_id: str
    region: str
    snapshots: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.image_id} in {self.region} of {', '.join(self.snapshots) or 'no snapshot'}"


@strict
class ImagePurpose:
    """What an image is for: what a channel's rules are applied to.

    Args:
        name: Its folder of ami/.
        profile: The profile that it has to be verified by.
        instance_types: The machines that it was built for.
    """

    name: str
    kubernetes: str
    build: str
    profile: str
    instance_types: tuple[str, ...]


@strict
class VerdictClaim:
    """What came of a machine that was booted from an image.

    Args:
        profile: The one that the machine was verified by.
        counts: How many checks passed, failed, were not run and were not reached.
        not_run: By layer, how many checks were not run.
        saw_gpu: Whether a check of a GPU passed.
        suite: SHA-256 of the suite; verdict: of the verdict's document; sbom, provenance: of these files, or
            empty where the signer does not have them.
        verified_at: When the suite began, ISO 8601 in UTC.
        gpukiln: The version that verified.
    """

    image: ImagePurpose
    instance_type: str
    profile: str
    outcome: FinalOutcome
    counts: Mapping[str, int]
    not_run: Mapping[str, int]
    saw_gpu: bool
    simulated: bool
    suite: str
    verdict: str
    verified_at: str
    gpukiln: str = __version__
    sbom: str = ""
    provenance: str = ""


@strict
class ReleaseClaim:
    """That an image met a channel's rules, and which image it is a copy of.

    Args:
        number: Higher by one than that of the release or rollback before it, in the same region, beginning
            at 1.
        source: The image that was verified; the subject itself where that is no copy.
        suite: SHA-256 of the suite that verdicts had to be of, or empty where the channel takes any.
        instance_types: Those whose verdicts counted.
        released_at: ISO 8601 in UTC; a rollback keeps it.
        gpukiln: The version that released.
    """

    image: ImagePurpose
    channel: str
    number: int
    source: AmiLocation
    suite: str
    instance_types: tuple[str, ...]
    released_at: str
    gpukiln: str = __version__


Claim = TypeVar("Claim", VerdictClaim, ReleaseClaim)


@dataclass(frozen=True)
class SignedStatement(Generic[Claim]):
    """A statement that a trusted key signed.

    Args:
        location: The image that it is about.
        key: The id of that key.
    """

    claim: Claim
    location: AmiLocation
    key: str


SignedRelease = SignedStatement[ReleaseClaim]


@dataclass(frozen=True)
class TrustedStatements:
    """What trusted keys signed of an AMI.

    Args:
        location: The AMI as EC2 shows it now.
        verdicts: By instance type; of the AMI, or of the one that a release statement says it is a copy of.
        releases: By channel.
        envelopes: The envelopes of the verdicts, by instance type.
        verified: The image that was booted, by instance type: the AMI, or the one that it is a copy of.
        refused: A line for each statement that does not count, with what is wrong with it.
    """

    location: AmiLocation
    verdicts: Mapping[str, VerdictClaim]
    releases: Mapping[str, SignedRelease]
    envelopes: Mapping[str, str]
    verified: Mapping[str, AmiLocation]
    refused: tuple[str, ...]


def location_of(image: Mapping[str, Any], region: str) -> AmiLocation:
    """Where an image is, and what it is made of.

    Args:
        image: As DescribeImages gives it.
    """
    return AmiLocation(str(image["ImageId"]), region, tuple(snapshots_of(image)))


def sign_statement(location: AmiLocation, claim: VerdictClaim | ReleaseClaim, signer: Signer) -> str:
    """A statement in its envelope, on one line: SSM takes 4096 characters without charge.

    Args:
        location: The AMI that it is about.
    """
    from gpukiln.attest import signing  # noqa: PLC0415 - slow to import

    kind = VERDICT_TYPE if isinstance(claim, VerdictClaim) else RELEASE_TYPE
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(location),
        "predicateType": kind,
        "predicate": dump(claim),
    }
    text = json.dumps(statement, separators=(",", ":"))
    return json.dumps(json.loads(signing.sign(text.encode(), signer)), separators=(",", ":"))


def store_statement(ssm: Any, image_id: str, kind: str, name: str, envelope: str) -> None:
    """Keep a statement where the image is.

    Args:
        ssm: A client of the image's region.
        kind: VERDICT or RELEASE.
        name: The instance type, or the channel: a newer one takes the place of the one before.
    """
    path = f"{ROOT}/{image_id}/{kind}/{name}"
    texts = [
        envelope[start : start + MAX_PARAMETER_CHARS - 8]
        for start in range(0, len(envelope), MAX_PARAMETER_CHARS - 8)
    ]
    if len(texts) > 1:
        texts[0] = f"{len(texts)}:{texts[0]}"
    # the first one last: until it is there, it belongs to no whole envelope
    for number, text in reversed(list(enumerate(texts, 1))):
        ssm.put_parameter(
            Name=path if number == 1 else f"{path}/{number}",
            Value=text,
            Type="String",
            Tier="Intelligent-Tiering",
            Overwrite=True,
        )


def stored_statements(ssm: Any, image_id: str) -> dict[tuple[str, str], str]:
    """Every statement on an AMI, by kind and name; nothing of them is checked."""
    return {
        (kind, name): text for (_, kind, name), text in _statements_below(ssm, f"{ROOT}/{image_id}").items()
    }


def _statements_below(ssm: Any, path: str) -> dict[tuple[str, str, str], str]:
    """The statements below a path, by AMI, kind and name, put together of their parts."""
    values: dict[str, str] = {}
    for parameter in calls.pages(ssm, "get_parameters_by_path", "Parameters", Path=path, Recursive=True):
        values[parameter["Name"].removeprefix(f"{ROOT}/")] = str(parameter["Value"])
    whole = {}
    for name, text in values.items():
        match name.split("/"):
            case [image_id, kind, what]:
                count, _, first = text.partition(":")
                numbers = range(2, int(count) + 1) if count.isdecimal() and len(count) == 1 else None
                more = [values.get(f"{name}/{number}", "") for number in numbers or ()]
                whole[image_id, kind, what] = "".join([first, *more]) if numbers else text
    return whole


def trusted_statements(
    ssm: Any, image: Mapping[str, Any], region: str, keys: Sequence[Key]
) -> TrustedStatements:
    """What trusted keys signed of an AMI; statements of others, and on other images, don't count.

    Args:
        ssm: A client of the image's region.
        image: As DescribeImages gives it.
        keys: Those that are trusted.
    """
    location, texts = location_of(image, region), stored_statements(ssm, str(image["ImageId"]))
    releases: dict[str, SignedRelease] = {}
    verdicts: dict[str, VerdictClaim] = {}
    refused: list[str] = []
    for (_, name), text in ((key, text) for key, text in texts.items() if key[0] == RELEASE):
        try:
            release = open_statement(ReleaseClaim, text, keys, [location])
            releases[release.claim.channel] = release
        except CheckFailedError as error:
            refused.append(f"{RELEASE} {name}: {error.message}")
    verified: dict[str, AmiLocation] = {}
    places = [
        location,
        *dict.fromkeys(
            release.claim.source for release in releases.values() if release.claim.source != location
        ),
    ]
    for (_, name), text in ((key, text) for key, text in texts.items() if key[0] == VERDICT):
        try:
            statement = open_statement(VerdictClaim, text, keys, places)
            verdict = statement.claim
            if verdict.simulated:
                raise CheckFailedError("verified on simulated GPUs, which proves nothing")
            verdicts[verdict.instance_type], verified[verdict.instance_type] = verdict, statement.location
        except CheckFailedError as error:
            refused.append(f"{VERDICT} {name}: {error.message}")
    envelopes = {name: texts[VERDICT, name] for name in verdicts if (VERDICT, name) in texts}
    return TrustedStatements(location, verdicts, releases, envelopes, verified, tuple(refused))


def releases_of(ssm: Any, pointer: Pointer, keys: Sequence[Key]) -> list[SignedRelease]:
    """Every release and rollback of a channel in a region that trusted keys signed, in no order.

    Args:
        ssm: A client of the region.
        keys: Those that are trusted.
    """
    releases = []
    for (_, kind, name), text in _statements_below(ssm, ROOT).items():
        if (kind, name) != (RELEASE, pointer.channel):
            continue
        try:
            release = open_statement(ReleaseClaim, text, keys)
        except CheckFailedError:
            continue
        image = release.claim.image
        if Pointer(image.name, image.kubernetes, release.claim.channel) == pointer:
            releases.append(release)
    return releases


def open_statement(
    kind: type[Claim], text: str, keys: Sequence[Key], places: Sequence[AmiLocation] | None = None
) -> SignedStatement[Claim]:
    """What a statement says, where a trusted key signed it.

    Args:
        kind: The claim that it must hold.
        text: The envelope.
        places: It must be about one of these images; None: about any.

    Raises:
        CheckFailedError: It does not count; the message says why.
    """
    from gpukiln.attest import signing  # noqa: PLC0415 - slow to import

    payload, key = signing.trusted_payload(text, keys)
    try:
        document = json.loads(payload)
        types = document["_type"], document["predicateType"]
        expected = STATEMENT_TYPE, VERDICT_TYPE if kind is VerdictClaim else RELEASE_TYPE
        if types != expected:
            raise CheckFailedError(f"it is a {' '.join(map(str, types))}, wanted {' '.join(expected)}")
        about = _location_in(document)
        if places is not None and about not in places:
            names = ", ".join(str(subject["uri"]) for subject in document["subject"])
            raise CheckFailedError(f"it is about {names}, wanted {' or '.join(map(str, places))}")
        claim: Claim = load(kind, document["predicate"], where="the statement")
    except (ValueError, LookupError, TypeError, AttributeError, UsageError) as error:
        raise CheckFailedError(f"it is no such statement: {error}") from error
    return SignedStatement(claim, about, key.keyid)


def _location_in(document: Mapping[str, Any]) -> AmiLocation:
    """The image that a statement is about.

    Raises:
        ValueError: Its subject has another form than that of ours.
    """
    image, *snapshots = document["subject"]
    names = tuple(snapshot["name"] for snapshot in snapshots)
    location = AmiLocation(image["name"], image["uri"].split(":")[3], names)
    if document["subject"] != _subjects(location):
        raise ValueError(f"its subject is no image with its snapshots: {document['subject']}")
    return location


def _subjects(location: AmiLocation) -> list[dict[str, Any]]:
    snapshots = [snapshot_subject(location.region, snapshot) for snapshot in location.snapshots]
    return [image_subject(location.region, location.image_id), *snapshots]


def utc_now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
