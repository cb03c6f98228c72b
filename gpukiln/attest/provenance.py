"""The provenance of an image: an in-toto statement with the predicate SLSA provenance v1.

The terms are those of https://slsa.dev/spec/v1.0/provenance; docs/attestation.md has the values of
this build type, and the meaning of its two kinds of immutable reference.
"""

from datetime import UTC, datetime
from functools import cache
from typing import Any

from gpukiln import __version__
from gpukiln.attest.image_contents import PRESENT, ImageContents, package_url
from gpukiln.images.builds import Bake, Record, StageUse
from gpukiln.parsing import parse_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
# SLSA wants a URI that identifies how parameters are interpreted; docs/attestation.md describes this one.
BUILD_TYPE = "urn:gpukiln:build-type:ami:v1"
# in-toto allows any digest algorithm name; an AMI has no hash, but EC2 never reuses its id.
AMI, SNAPSHOT = "amiId", "ebsSnapshotId"
# The suffix of `git describe --dirty`.
DIRTY = "-dirty"

Descriptor = dict[str, Any]


def make_statement(
    record: Record,
    baked: Bake,
    installed: ImageContents,
    *,
    created_at: str,
    subjects: list[Descriptor],
    byproducts: list[Descriptor],
) -> dict[str, Any]:
    """The statement on what an image was built from, by which builder, and how.

    Args:
        record: The build's record.
        installed: The image's own record.
        created_at: When the cloud created the AMI, ISO 8601.
        subjects: The built artefacts.
        byproducts: Other files of the build.

    Returns:
        An in-toto statement.
    """
    plan = record.plan
    tools = {
        name.removeprefix("tool "): version
        for name, version in plan.inputs.items()
        if name.startswith("tool ")
    }
    return {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "image": plan.image,
                    "cloud": plan.cloud,
                    "region": plan.region,
                    "base": plan.base.name,
                    "instanceTypes": list(plan.instance_types),
                    "kubernetes": plan.kubernetes,
                    "set": list(plan.overrides),
                },
                "internalParameters": {
                    "architecture": plan.architecture,
                    "builderInstanceType": plan.builder_instance_type,
                    "volumeSizeGib": plan.volume_size_gib,
                },
                "resolvedDependencies": _dependencies(record, baked, installed),
            },
            "runDetails": {
                "builder": {
                    "id": f"urn:gpukiln:builder:{plan.cloud}",
                    "version": {"gpukiln": __version__, **tools},
                },
                "metadata": {
                    "invocationId": record.build_id,
                    "startedOn": _timestamp(plan.created_at),
                    "finishedOn": _timestamp(created_at),
                },
                "byproducts": byproducts,
            },
        },
    }


def image_subject(region: str, image_id: str) -> Descriptor:
    """An AMI as a subject or a dependency.

    Args:
        image_id: Its id, which EC2 never reuses.

    >>> image_subject("us-west-2", "ami-1")["uri"]
    'arn:aws:ec2:us-west-2::image/ami-1'
    >>> image_subject("cn-north-1", "ami-1")["uri"]
    'arn:aws-cn:ec2:cn-north-1::image/ami-1'
    """
    uri = f"arn:{_partition(region)}:ec2:{region}::image/{image_id}"
    return {"name": image_id, "uri": uri, "digest": {AMI: image_id}}


def snapshot_subject(region: str, snapshot_id: str) -> Descriptor:
    """A snapshot, whose content can't change, as a subject."""
    return {
        "name": snapshot_id,
        "uri": f"arn:{_partition(region)}:ec2:{region}::snapshot/{snapshot_id}",
        "digest": {SNAPSHOT: snapshot_id},
    }


# Loading botocore's endpoints takes noticeable time, and a statement has many subjects.
@cache
def _partition(region: str) -> str:
    from botocore.session import Session  # noqa: PLC0415 - slow to import

    return str(Session().get_partition_for_region(region))


def _dependencies(record: Record, baked: Bake, installed: ImageContents) -> list[Descriptor]:
    plan = record.plan
    base = {
        **image_subject(plan.region, plan.base.id),
        "name": plan.base.image_name or plan.base.name,
        "annotations": {"base": plan.base.name, "resolvedBy": plan.base.resolved_by},
    }
    inputs = {
        "name": "inputs of the build",
        "digest": {"sha256": plan.digest},
        "annotations": {"inputs": dict(plan.inputs)},
    }
    stage = _stage(plan.region, baked.stage)
    return [base, *stage, *checkout(plan.git_commit), inputs, *_sources(record, baked, installed)]


def _stage(region: str, use: StageUse | None) -> list[Descriptor]:
    """The stage of an earlier bake from which this one continued; it was made from the same base."""
    if use is None:
        return []
    annotations = {"stage": use.stage, "build": use.build_id}
    return [{**image_subject(region, use.image_id), "annotations": annotations}]


def checkout(commit: str | None) -> list[Descriptor]:
    """The commit of gpukiln's own sources as a dependency; empty where it is not known.

    Args:
        commit: With the suffix -dirty when files differ from it.
    """
    if not commit:
        return []
    digest = {"gitCommit": commit.removesuffix(DIRTY)}
    changed = commit.endswith(DIRTY)
    return [{"name": "checkout of gpukiln", "digest": digest, "annotations": {"modified": changed}}]


def _sources(record: Record, baked: Bake, installed: ImageContents) -> list[Descriptor]:
    descriptors = []
    for name, component in baked.components.items():
        package = component.get("package")
        if component["status"] not in PRESENT or not package:
            continue
        annotations = {"source": component["source"], "version": component["version"]}
        if component["source"].startswith("http"):
            kind = "apt" if record.plan.base.os_family == "debian" else "rpm"
            # Inputs are texts, so that their digest is simple; a component's recipe is JSON in such a text.
            recipe = parse_json(record.plan.inputs.get(f"recipe {name}", "{}"))
            if used := (recipe.get("repository") or {}).get(kind):
                annotations["keyFingerprint"] = used["key_fingerprint"]
        purl = package_url(record.plan.base, package["name"], package["version"], installed)
        descriptors.append({"name": name, "uri": purl.to_string(), "annotations": annotations})
    return descriptors


def _timestamp(text: str) -> str:
    """A time of EC2 or a plan in the form of SLSA.

    >>> _timestamp("2026-03-01T10:00:00.000Z")
    '2026-03-01T10:00:00Z'
    >>> _timestamp("2026-03-01T10:00:00+02:00")
    '2026-03-01T08:00:00Z'
    """
    # SLSA wants RFC 3339 with Z; EC2's CreationDate has milliseconds, the plan an offset.
    moment = datetime.fromisoformat(text).astimezone(UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
