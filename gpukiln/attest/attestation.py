"""Writes SBOM and provenance next to a build's record, with digests in the AMI's tags, and verifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from gpukiln.attest.image_contents import read_image_contents
from gpukiln.attest.provenance import (
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    image_subject,
    make_statement,
    snapshot_subject,
)
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import SBOM_TAG, SIGNING_KEY_TAG, STATEMENT_TAG
from gpukiln.errors import CheckFailedError, UnavailableError, UsageError
from gpukiln.files import write_atomic
from gpukiln.findings import CheckedItem, Outcome
from gpukiln.images.builds import Bake, Build, Record
from gpukiln.instances.tags import tag_list, tags_of
from gpukiln.parsing import parse_json

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

# EC2 keeps the tags of a signature that was removed; a value instead of a missing tag makes that visible.
UNSIGNED = "none"  # the value of the signing key's tag
SBOM, STATEMENT, ENVELOPE = "sbom.cdx.json", "provenance.intoto.json", "provenance.dsse.json"
STYLES = {"passed": "green", "failed": "bold red", "not_run": "yellow"}
IN_IMAGE = "/etc/gpukiln/image.json"


@dataclass(frozen=True)
class Attestation:
    """The files of an attestation, and the AMI's tags.

    Args:
        image_id: The AMI.
        sbom: The SBOM's file.
        provenance: The statement's file.
        envelope: The signed envelope's file, or None.
        tags: The tags of the AMI.
    """

    image_id: str
    sbom: Path
    provenance: Path
    envelope: Path | None
    tags: dict[str, str]


def baked_image(record: Record) -> Bake:
    """The image of a build.

    Args:
        record: The build's record.

    Raises:
        UsageError: The build has no image.
    """
    if record.bake is None:
        raise UsageError(
            f"build {record.build_id} has no image: it is {record.state}",
            hint="`invoke ami.list` shows others",
        )
    return record.bake


def write_attestation(
    build: Build, record: Record, cloud: Cloud, signer: Signer | None = None
) -> Attestation:
    """Write SBOM and provenance of an image next to its record, and their digests into the AMI's tags.

    A second call writes the same files. An earlier signature is kept while it is of the same statement.

    Args:
        build: The build's folder.
        cloud: Where the image is.
        signer: The key to sign the provenance with, or None.

    Returns:
        The files and tags.

    Raises:
        UsageError: The build has no image.
        UnavailableError: The image is gone, or the cloud refused.
    """
    # cryptography and securesystemslib are slow to import.
    from gpukiln.attest import signing  # noqa: PLC0415 - slow to import

    baked = baked_image(record)
    image = _describe(cloud, baked.image_id)
    sbom, statement = _documents(build, record, baked, image)
    write_atomic(build.folder / SBOM, sbom)
    write_atomic(build.folder / STATEMENT, statement)
    envelope = build.folder / ENVELOPE
    if signer:
        write_atomic(envelope, signing.sign(statement.encode(), signer))
    # An envelope of an older statement would make verification fail, or vouch for text that was not signed.
    elif envelope.exists() and not _has_payload(envelope, statement):
        envelope.unlink()
    tags = {SBOM_TAG: _sha256(sbom), STATEMENT_TAG: _sha256(statement), SIGNING_KEY_TAG: _key_of(envelope)}
    # The files are on this computer only. With their digests on the AMI, another computer can verify that
    # a copy of them belongs to it.
    with explain_aws_errors("write the digests of SBOM and provenance on the image"):
        cloud.client("ec2").create_tags(Resources=[baked.image_id], Tags=tag_list(tags))
    return Attestation(
        baked.image_id,
        build.folder / SBOM,
        build.folder / STATEMENT,
        envelope if envelope.exists() else None,
        tags,
    )


def attestation_lines(written: Attestation) -> tuple[str, ...]:
    """What was written, for people."""
    signed = f"signed: {written.envelope}" if written.envelope else "not signed: --sign-key FILE signs it"
    return (
        f"SBOM: {written.sbom}\nprovenance: {written.provenance}",
        signed,
        f"{written.image_id} is tagged with the digests of both",
    )


def findings_lines(findings: Iterable[CheckedItem]) -> Iterator[Text]:
    """One line for each step of a verification."""
    for finding in findings:
        outcome = finding.outcome.replace("_", " ")
        yield Text.assemble((f"{outcome:8}", STYLES[finding.outcome]), f" {finding.id:24} {finding.message}")


def require_verified(image_id: str, findings: Sequence[CheckedItem]) -> None:
    """Raises CheckFailedError where a step of a verification failed."""
    if failed := [finding for finding in findings if finding.outcome == "failed"]:
        raise CheckFailedError(
            f"{len(failed)} of {len(findings)} steps failed for {image_id}",
            hint="don't roll this image out before it is known who changed what",
            details=tuple(f"{finding.id}: {finding.message}" for finding in failed),
        )


def is_written(build: Build) -> bool:
    """Whether SBOM and provenance of a build are on this machine."""
    return (build.folder / SBOM).exists() and (build.folder / STATEMENT).exists()


def verify_attestation(
    build: Build, record: Record, cloud: Cloud, key: Key | None = None
) -> list[CheckedItem]:
    """Check SBOM and provenance against each other, against the AMI and against a key.

    Args:
        build: The build's folder.
        cloud: Where the image is.
        key: The public key that must have signed the provenance; None: the signature is not checked.

    Returns:
        The result of each step; a failed one is an error.

    Raises:
        UsageError: There is no image, or it has no SBOM or provenance.
        UnavailableError: The image is gone, or the cloud can't be asked.
    """
    from gpukiln.attest.sbom import sbom_difference  # noqa: PLC0415 - slow to import

    baked = baked_image(record)
    for name in (SBOM, STATEMENT):
        if not (build.folder / name).exists():
            raise UsageError(
                f"build {build.id} has no {name}", hint=f"`invoke ami.attest {build.id}` writes it"
            )
    image = _describe(cloud, baked.image_id)
    tags = tags_of(image)
    sbom = (build.folder / SBOM).read_bytes()
    statement = (build.folder / STATEMENT).read_bytes()
    steps = [
        _compare("sbom.tag", f"{SBOM}, by the AMI's tag", _sha256(sbom), tags.get(SBOM_TAG)),
        _compare(
            "provenance.tag", f"{STATEMENT}, by the AMI's tag", _sha256(statement), tags.get(STATEMENT_TAG)
        ),
    ]
    differs = sbom_difference(sbom, baked)
    of_packages = f"all {len(baked.packages)} packages of the record, and its components"
    steps.append(_step("sbom.content", "failed" if differs else "passed", differs or of_packages))
    try:
        document = parse_json(statement)
        steps += _compare_statement(document, build, baked, image, _sha256(sbom))
    # The statement may come from anywhere: whatever its form is, the other steps are still reported.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        steps.append(_step("provenance.form", "failed", f"the file is not SLSA provenance: {error!r}"))
    return [*steps, _signature(build, statement, key)]


def _documents(build: Build, record: Record, baked: Bake, image: dict[str, Any]) -> tuple[str, str]:
    from gpukiln.attest.sbom import make_sbom  # noqa: PLC0415 - slow to import

    installed = read_image_contents(build.folder)
    sbom = make_sbom(record, baked, installed)
    subjects = list(_identities(baked, image))
    if installed.content is not None:
        subjects.append({"name": IN_IMAGE, "digest": {"sha256": _sha256(installed.content)}})
    byproduct = {
        "name": SBOM,
        "digest": {"sha256": _sha256(sbom)},
        "mediaType": "application/vnd.cyclonedx+json",
    }
    statement = make_statement(
        record,
        baked,
        installed,
        created_at=image["CreationDate"],
        subjects=subjects,
        byproducts=[byproduct],
    )
    return sbom, json.dumps(statement, indent=2) + "\n"


def _identities(baked: Bake, image: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield image_subject(baked.region, image["ImageId"])
    for device in image["BlockDeviceMappings"]:
        if snapshot := device.get("Ebs", {}).get("SnapshotId"):
            yield snapshot_subject(baked.region, snapshot)


def _compare_statement(
    document: dict[str, Any], build: Build, baked: Bake, image: dict[str, Any], sbom_digest: str
) -> Iterator[CheckedItem]:
    kind = f"{document['_type']} {document['predicateType']}"
    yield _compare("provenance.form", "statement type", kind, f"{STATEMENT_TYPE} {PREDICATE_TYPE}")
    named = {subject["name"]: subject["digest"] for subject in document["subject"]}
    # The image's own record is compared separately, because images of earlier versions have none.
    about = {name: digest for name, digest in named.items() if name != IN_IMAGE}
    real = {subject["name"]: subject["digest"] for subject in _identities(baked, image)}
    yield _compare("provenance.subject", "subject", _names(about), _names(real))
    by_name = {row["name"]: row["digest"] for row in document["predicate"]["runDetails"]["byproducts"]}
    yield _compare("provenance.sbom", SBOM, sbom_digest, by_name[SBOM]["sha256"])
    content = read_image_contents(build.folder).content
    if content is not None or IN_IMAGE in named:
        # An absent file and a missing subject are equal; only one of them without the other is an error.
        digest = _sha256(content) if content is not None else "absent"
        recorded = named.get(IN_IMAGE, {}).get("sha256", "absent")
        yield _compare("provenance.image-record", "image.json", digest, recorded)


def _signature(build: Build, statement: bytes, key: Key | None) -> CheckedItem:
    step, path = "provenance.signature", build.folder / ENVELOPE
    if key is None:
        return _step(
            step, "not_run", f"no --key was given; the provenance is {'' if path.exists() else 'not '}signed"
        )
    from gpukiln.attest import signing  # noqa: PLC0415 - slow to import

    if not path.exists():
        return _step(step, "failed", f"found no {ENVELOPE}: the provenance is not signed")
    try:
        envelope = path.read_text()
        signing.check_signature(envelope, key)
        if signing.payload_of(envelope) != statement:
            return _step(step, "failed", f"the signed statement is not {STATEMENT}")
    except (CheckFailedError, UnicodeDecodeError) as error:
        return _step(step, "failed", str(error))
    return _step(step, "passed", f"signed by {signing.key_name(key)}")


def _step(name: str, outcome: Outcome, message: str) -> CheckedItem:
    return CheckedItem(name, "error" if outcome == "failed" else "info", message, outcome=outcome)


def _compare(step: str, what: str, actual: str, expected: str | None) -> CheckedItem:
    if actual == expected:
        return _step(step, "passed", f"{what}: {actual}")
    return _step(
        step, "failed", f"{what}: found {actual}, wanted {expected or 'a digest, and the AMI has none'}"
    )


def _names(identities: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(digest)}" for name, digest in sorted(identities.items()))


def _describe(cloud: Cloud, image_id: str) -> dict[str, Any]:
    if (image := calls.image(cloud, image_id)) is None:
        raise UnavailableError(f"{cloud.region} no longer has the image {image_id}")
    return image


def _has_payload(envelope: Path, statement: str) -> bool:
    from gpukiln.attest import signing  # noqa: PLC0415 - slow to import

    try:
        return signing.payload_of(envelope.read_text()) == statement.encode()
    except (CheckFailedError, UnicodeDecodeError):
        return False


def _key_of(envelope: Path) -> str:
    if not envelope.exists():
        return UNSIGNED
    return str(parse_json(envelope.read_text())["signatures"][0]["keyid"])


def _sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
