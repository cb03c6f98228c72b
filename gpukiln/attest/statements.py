"""Signed statements on an AMI: the verdict on a machine or a node, and its release to a channel.

All are in-toto statements in DSSE envelopes. Their subject is the AMI in its region with its snapshots, so
that a statement is not valid for another image. SSM parameters of that region hold them, with the AMI's id in
their names. Whoever may write these parameters can remove a statement, but can't create one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
CLUSTER_VERDICT_TYPE = "urn:gpukiln:cluster-verdict:v1"
ROOT = "/gpukiln-attestations"
"""Not below /gpukiln, all of whose parameters are listed to find the channels."""
VERDICT, CLUSTER_VERDICT, RELEASE = "verdict", "cluster-verdict", "release"
MAX_PARAMETER_CHARS = 8192
"""Characters of a parameter of the advanced tier (Systems Manager, PutParameter, Tier). An envelope with the
certificate and log entry of an identity is longer, and is stored in parts."""


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
    """What an image was built for; a channel's rules are applied to it.

    Args:
        name: Its folder of ami/.
        profile: The profile by which it must be verified.
        instance_types: The machines that it was built for.
    """

    name: str
    kubernetes: str
    build: str
    profile: str
    instance_types: tuple[str, ...]


@strict
class VerdictClaim:
    """The verdict on a machine that was booted from an image, for signing.

    Args:
        profile: The profile by which the machine was verified.
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

    @property
    def name(self) -> str:
        """The name under which the statement is stored: a newer one of the same name replaces it."""
        return self.instance_type


@strict
class ClusterVerdictClaim(VerdictClaim):
    """The verdict on an image as a node of a cluster, for signing.

    It has a predicate type of its own, so that a verdict on a machine can't be used as one on a node.

    Args:
        cluster_kubernetes: Minor version of the cluster, such as 1.34.
    """

    cluster_kubernetes: str = field(kw_only=True)

    @property
    def name(self) -> str:
        """See `VerdictClaim.name`; names of parameters have no colon."""
        return f"{self.instance_type}_{self.cluster_kubernetes}"


@strict
class ReleaseClaim:
    """A release: the image met a channel's rules, and is a copy of the source.

    Args:
        number: One more than that of the previous release or rollback in the region, from 1 on.
        source: The verified image; where the subject is no copy, the subject.
        suite: SHA-256 of the suite that the channel requires, or empty where it accepts any.
        instance_types: The types whose verdicts counted.
        nodes: The names of the verdicts on nodes that counted; empty where the channel requires none.
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
    nodes: tuple[str, ...] = ()


Claim = TypeVar("Claim", VerdictClaim, ClusterVerdictClaim, ReleaseClaim)
PREDICATE_TYPES: Mapping[type, str] = {
    VerdictClaim: VERDICT_TYPE,
    ClusterVerdictClaim: CLUSTER_VERDICT_TYPE,
    ReleaseClaim: RELEASE_TYPE,
}


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
SignedClusterVerdict = SignedStatement[ClusterVerdictClaim]


@dataclass(frozen=True)
class TrustedStatements:
    """The statements on an AMI that trusted keys signed.

    Args:
        location: The AMI as EC2 shows it now.
        verdicts: By instance type; on the AMI, or on the source that a release statement names.
        releases: By channel.
        cluster_verdicts: Verdicts on the image as a node, by their names; as `verdicts`.
        envelopes: The envelopes of all verdicts, by kind (VERDICT, CLUSTER_VERDICT) and name.
        verified: The image that was booted, by instance type: the AMI or its source.
        refused: A line for each statement that is not valid, with the reason.
    """

    location: AmiLocation
    verdicts: Mapping[str, VerdictClaim]
    cluster_verdicts: Mapping[str, SignedClusterVerdict]
    releases: Mapping[str, SignedRelease]
    envelopes: Mapping[tuple[str, str], str]
    verified: Mapping[str, AmiLocation]
    refused: tuple[str, ...]


def location_of(image: Mapping[str, Any], region: str) -> AmiLocation:
    """An image's id, region and snapshots.

    Args:
        image: As DescribeImages gives it.
    """
    return AmiLocation(str(image["ImageId"]), region, tuple(snapshots_of(image)))


def sign_statement(location: AmiLocation, claim: VerdictClaim | ReleaseClaim, signer: Signer) -> str:
    """A signed statement in its envelope, on one line: SSM stores 4096 characters free of charge.

    Args:
        location: The AMI that it is about.
    """
    from gpukiln.attest import signing  # noqa: PLC0415 - slow to import

    predicate = dump(claim)
    # gpukiln 0.2.0 refuses keys that it does not know; only channels that require nodes need this one.
    if isinstance(claim, ReleaseClaim) and not claim.nodes:
        del predicate["nodes"]
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(location),
        "predicateType": PREDICATE_TYPES[type(claim)],
        "predicate": predicate,
    }
    # Without spaces: every character counts for the limit of a parameter.
    text = json.dumps(statement, separators=(",", ":"))
    return json.dumps(json.loads(signing.sign(text.encode(), signer)), separators=(",", ":"))


def store_statement(ssm: Any, image_id: str, kind: str, name: str, envelope: str) -> None:
    """Store a statement in the image's region.

    Args:
        ssm: A client of the image's region.
        kind: VERDICT, CLUSTER_VERDICT or RELEASE.
        name: The claim's name, or the channel; a newer statement replaces an older one.
    """
    path = f"{ROOT}/{image_id}/{kind}/{name}"
    texts = [
        # 8 characters are left for the number of parts in front of the first one.
        envelope[start : start + MAX_PARAMETER_CHARS - 8]
        for start in range(0, len(envelope), MAX_PARAMETER_CHARS - 8)
    ]
    # A single envelope begins with `{`, so that a leading digit identifies one in parts.
    if len(texts) > 1:
        texts[0] = f"{len(texts)}:{texts[0]}"
    # The first part has the number of parts. It is written last, so that an interrupted call leaves no
    # envelope that looks complete.
    for number, text in reversed(list(enumerate(texts, 1))):
        ssm.put_parameter(
            Name=path if number == 1 else f"{path}/{number}",
            Value=text,
            Type="String",
            # SSM chooses the standard tier, which is free, unless the value needs the advanced one
            # (PutParameter, Tier).
            Tier="Intelligent-Tiering",
            # A newer verdict replaces the older one; SSM keeps the history of a parameter's values.
            Overwrite=True,
        )


def stored_statements(ssm: Any, image_id: str) -> dict[tuple[str, str], str]:
    """Every stored statement on an AMI by kind and name, not verified."""
    return {
        (kind, name): text for (_, kind, name), text in _statements_below(ssm, f"{ROOT}/{image_id}").items()
    }


def _statements_below(ssm: Any, path: str) -> dict[tuple[str, str, str], str]:
    """The statements below a path, by AMI, kind and name, joined from their parts."""
    values: dict[str, str] = {}
    for parameter in calls.pages(ssm, "get_parameters_by_path", "Parameters", Path=path, Recursive=True):
        values[parameter["Name"].removeprefix(f"{ROOT}/")] = str(parameter["Value"])
    whole = {}
    for name, text in values.items():
        match name.split("/"):
            case [image_id, kind, what]:
                # A count of more than one digit would be no envelope of gpukiln, but a way to make it read
                # many parameters.
                count, _, first = text.partition(":")
                numbers = range(2, int(count) + 1) if count.isdecimal() and len(count) == 1 else None
                more = [values.get(f"{name}/{number}", "") for number in numbers or ()]
                whole[image_id, kind, what] = "".join([first, *more]) if numbers else text
    return whole


def trusted_statements(
    ssm: Any, image: Mapping[str, Any], region: str, keys: Sequence[Key]
) -> TrustedStatements:
    """The statements on an AMI that trusted keys signed, without those of other keys or on other images.

    Args:
        ssm: A client of the image's region.
        image: As DescribeImages gives it.
        keys: Those that are trusted.
    """
    location, texts = location_of(image, region), stored_statements(ssm, str(image["ImageId"]))
    releases: dict[str, SignedRelease] = {}
    verdicts: dict[str, VerdictClaim] = {}
    refused: list[str] = []
    # Releases first: they name the image of which this one is a copy, and verdicts on that one count too.
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
    cluster_verdicts: dict[str, SignedClusterVerdict] = {}
    for (kind, name), text in texts.items():
        try:
            if kind == VERDICT:
                statement = _open_verdict(VerdictClaim, text, keys, places)
                verdicts[statement.claim.name] = statement.claim
                verified[statement.claim.name] = statement.location
            elif kind == CLUSTER_VERDICT:
                on_node = _open_verdict(ClusterVerdictClaim, text, keys, places)
                cluster_verdicts[on_node.claim.name] = on_node
        except CheckFailedError as error:
            refused.append(f"{kind} {name}: {error.message}")
    names = [*((VERDICT, name) for name in verdicts), *((CLUSTER_VERDICT, name) for name in cluster_verdicts)]
    envelopes = {name: texts[name] for name in names if name in texts}
    return TrustedStatements(
        location, verdicts, cluster_verdicts, releases, envelopes, verified, tuple(refused)
    )


AnyVerdict = TypeVar("AnyVerdict", VerdictClaim, ClusterVerdictClaim)


def _open_verdict(
    kind: type[AnyVerdict], text: str, keys: Sequence[Key], places: Sequence[AmiLocation]
) -> SignedStatement[AnyVerdict]:
    """See `open_statement`; a verdict on simulated GPUs is not valid."""
    statement = open_statement(kind, text, keys, places)
    if statement.claim.simulated:
        raise CheckFailedError("verified on simulated GPUs, wanted real ones")
    return statement


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
        # Statements of other keys are normal: each channel has its own, and everybody who may write
        # parameters can add some.
        except CheckFailedError:
            continue
        image = release.claim.image
        if Pointer(image.name, image.kubernetes, release.claim.channel) == pointer:
            releases.append(release)
    return releases


def open_statement(
    kind: type[Claim], text: str, keys: Sequence[Key], places: Sequence[AmiLocation] | None = None
) -> SignedStatement[Claim]:
    """The claim of a statement, where a trusted key signed it.

    Args:
        kind: The kind of claim that it must have.
        text: The envelope.
        places: The images that it may be about; None: any.

    Raises:
        CheckFailedError: The statement is not valid; the message has the reason.
    """
    from gpukiln.attest import signing  # noqa: PLC0415 - slow to import

    payload, key = signing.trusted_payload(text, keys)
    try:
        # The payload was signed by a trusted key, so that the limits for foreign JSON are not needed.
        document = json.loads(payload)
        types = document["_type"], document["predicateType"]
        expected = STATEMENT_TYPE, PREDICATE_TYPES[kind]
        if types != expected:
            raise CheckFailedError(f"found a {' '.join(map(str, types))}, wanted {' '.join(expected)}")
        about = _location_in(document)
        if places is not None and about not in places:
            names = ", ".join(str(subject["uri"]) for subject in document["subject"])
            raise CheckFailedError(f"found a statement on {names}, wanted {' or '.join(map(str, places))}")
        claim: Claim = load(kind, document["predicate"], where="the statement")
    except (ValueError, LookupError, TypeError, AttributeError, UsageError) as error:
        raise CheckFailedError(f"the statement can't be read: {error}") from error
    return SignedStatement(claim, about, key.keyid)


def _location_in(document: Mapping[str, Any]) -> AmiLocation:
    """The image that a statement is about.

    Raises:
        ValueError: Its subject has another form than gpukiln's.
    """
    image, *snapshots = document["subject"]
    names = tuple(snapshot["name"] for snapshot in snapshots)
    location = AmiLocation(image["name"], image["uri"].split(":")[3], names)
    # Names are read from the document and rebuilt, so that it can't contain additional
    # subjects or digests.
    if document["subject"] != _subjects(location):
        raise ValueError(f"the subject is not an image with its snapshots: {document['subject']}")
    return location


def _subjects(location: AmiLocation) -> list[dict[str, Any]]:
    snapshots = [snapshot_subject(location.region, snapshot) for snapshot in location.snapshots]
    return [image_subject(location.region, location.image_id), *snapshots]


def utc_now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
