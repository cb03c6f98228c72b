"""Signs a verdict on a machine or on a node, and stores the statement in the image's region."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.attest import statements
from gpukiln.attest.attestation import SBOM, STATEMENT
from gpukiln.attest.statements import (
    CLUSTER_VERDICT,
    VERDICT,
    ClusterVerdictClaim,
    ImagePurpose,
    VerdictClaim,
)
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import KUBERNETES_TAG
from gpukiln.errors import UnavailableError
from gpukiln.files import write_atomic
from gpukiln.images.builds import Build
from gpukiln.images.subject import Subject
from gpukiln.instances.tags import tags_of
from gpukiln.pipeline.verdict_tags import cluster_key, summarize_verdict
from gpukiln.verify.verdict import Verdict

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

ENVELOPE = "verdict.dsse.json"


def sign_verdict(
    cloud: Cloud,
    subject: Subject,
    verdict: Verdict,
    report: Path,
    signer: Signer | None,
    build: Build | None = None,
    *,
    in_cluster: bool = False,
) -> None:
    """Sign a verdict on an image. A verdict on simulated GPUs is kept only in its report.

    Args:
        cloud: Where the image is.
        report: The folder of the verdict's report, which gets a copy of the envelope.
        signer: The key; None: the verdict is not signed.
        build: The image's build, where this computer has it.
        in_cluster: Whether the verdict is on the image as a node of a cluster.

    Raises:
        UnavailableError: The image is gone, or the cloud refused.
    """
    # Channels without keys accept the tags, so that signing is optional.
    if signer is None:
        return
    try:
        with explain_aws_errors("store the signed verdict"):
            images = calls.images(cloud.client("ec2"), {"image-id": [subject.image_id]})
            if not images:
                raise UnavailableError(f"{cloud.region} no longer has the image {subject.image_id}")
            # An image that another computer built has the version in its tags only.
            kubernetes = build.read().plan.kubernetes if build else tags_of(images[0]).get(KUBERNETES_TAG, "")
            claim = _claim(subject, verdict, kubernetes, build)
            if in_cluster:
                _, version = cluster_key(verdict)
                claim = ClusterVerdictClaim(**vars(claim), cluster_kubernetes=version)
            envelope = statements.sign_statement(
                statements.location_of(images[0], cloud.region), claim, signer
            )
            # Before SSM: if that fails, the signed verdict is not lost.
            write_atomic(report / ENVELOPE, envelope + "\n")
            # A statement in SSM would count for a release.
            if not verdict.simulated:
                ssm, kind = cloud.client("ssm"), CLUSTER_VERDICT if in_cluster else VERDICT
                statements.store_statement(ssm, subject.image_id, kind, claim.name, envelope)
    except UnavailableError as error:
        cluster = " --cluster CONTEXT" if in_cluster else ""
        error.add_note(
            f"`invoke ami.verify {subject.build_id}{cluster} --sign-key KEY` verifies the image again "
            "and signs"
        )
        raise


def _claim(subject: Subject, verdict: Verdict, kubernetes: str, build: Build | None) -> VerdictClaim:
    about = ImagePurpose(
        subject.recipe, kubernetes, subject.build_id, subject.profile, subject.instance_types
    )
    files = {name: build.folder / name for name in (SBOM, STATEMENT)} if build else {}
    digests = {
        name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file.exists()
    }
    return VerdictClaim(
        image=about,
        instance_type=verdict.instance_type,
        profile=verdict.profile,
        outcome="passed" if verdict.passed else "failed",
        counts={str(outcome): number for outcome, number in verdict.counts.items()},
        not_run=summarize_verdict(verdict).not_run,
        saw_gpu=verdict.saw_gpu,
        simulated=verdict.simulated,
        suite=verdict.suite_version,
        verdict=verdict.digest,
        verified_at=verdict.started_at,
        sbom=digests.get(SBOM, ""),
        provenance=digests.get(STATEMENT, ""),
    )
