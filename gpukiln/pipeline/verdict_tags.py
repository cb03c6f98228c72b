"""The tags of an AMI that hold its verdicts: one for each instance type on which it was verified.

`gpukiln:verdict:<type>` has the newest verdict of a type, `gpukiln:verdict` the summary of all.
`gpukiln:cluster-verdict:<type>:<version>` has the newest verdict on the image as a node of a cluster.
`gpukiln:image` has the image's name only where all verdicts passed, so that nodes which select an AMI by it
never get a stage, an image that is not verified yet, or one that failed.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpukiln.attest import trust
from gpukiln.attest.statements import VerdictClaim
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import (
    BUILD_ID_TAG,
    CLUSTER_VERDICT_TAG,
    DIGEST_TAG,
    IMAGE_TAG,
    NOT_VERIFIED,
    PASSED,
    VERDICT_TAG,
    VERIFIED_TAG,
)
from gpukiln.errors import RefusedError, UnavailableError, UsageError
from gpukiln.images.plan import ImagePlan
from gpukiln.images.subject import Subject
from gpukiln.instances.tags import tag_list, tags_of
from gpukiln.verify.checks import LAYERS
from gpukiln.verify.verdict import CheckResult, Verdict

log = logging.getLogger(__name__)
DIGEST_CHARS = 16  # of a digest in a tag: EC2 allows 256 characters for a value
# EC2 allows 50 tags of a resource, without those of AWS (EC2 user guide, "Tag your Amazon EC2 resources"). A
# release adds up to three to a copy: of what it is a copy, its encryption, and the checks that did not run.
MAX_TAGS = 50 - 3


@dataclass(frozen=True)
class VerdictSummary:
    """The newest verdict of one instance type.

    Args:
        instance_type: The type of the machine that was started for it.
        passed: Whether checks passed and none failed, on a machine whose GPUs are not simulated.
        at: The time of verification, ISO 8601 in UTC.
        suite: The first digits of the suite's digest.
        digest: The first digits of the verdict's.
        saw_gpu: Whether a check of a GPU passed.
        not_run: Per layer the number of checks that were not run.
        checks: The checks that were not run, with reasons; None: only their numbers are known.
    """

    instance_type: str
    passed: bool
    profile: str
    at: str
    suite: str
    digest: str
    saw_gpu: bool
    not_run: Mapping[str, int]
    checks: tuple[CheckResult, ...] | None = None

    @property
    def tag(self) -> tuple[str, str]:
        """Name and value of the tag of a verdict on a machine."""
        return f"{VERDICT_TAG}:{self.instance_type}", self.tag_value

    def cluster_tag(self, kubernetes: str) -> tuple[str, str]:
        """Name and value of the tag of a verdict on a node.

        Args:
            kubernetes: Minor version of the cluster.
        """
        return f"{CLUSTER_VERDICT_TAG}:{self.instance_type}:{kubernetes}", self.tag_value

    @property
    def tag_value(self) -> str:
        """The summary, in characters that every AWS service allows."""
        # Only letters, digits, spaces and + - = . _ : / @ are allowed in the tags of every AWS service.
        not_run = "/".join(f"{layer}:{count}" for layer, count in self.not_run.items()) or "none"
        words = {
            "profile": self.profile,
            "at": self.at,
            "suite": self.suite,
            "digest": self.digest,
            "gpu": "yes" if self.saw_gpu else "no",
            "not_run": not_run,
        }
        outcome = "passed" if self.passed else "failed"
        return " ".join((outcome, *(f"{name}={word}" for name, word in words.items())))


def summarize_verdict(verdict: Verdict) -> VerdictSummary:
    """The summary of a verdict."""
    counts = Counter(check.layer for check in verdict.not_run)
    return VerdictSummary(
        instance_type=verdict.instance_type,
        passed=verdict.passed_without_simulation,
        profile=verdict.profile,
        at=verdict.started_at,
        suite=verdict.suite_version[:DIGEST_CHARS],
        digest=verdict.digest[:DIGEST_CHARS],
        saw_gpu=verdict.saw_gpu,
        not_run={layer: counts[layer] for layer in LAYERS if counts[layer]},
        checks=verdict.not_run,
    )


def summarize_claim(claim: VerdictClaim) -> VerdictSummary:
    """The summary of a signed verdict, which has no reasons of checks that were not run."""
    return VerdictSummary(
        instance_type=claim.instance_type,
        passed=claim.outcome == "passed",
        profile=claim.profile,
        at=claim.verified_at,
        suite=claim.suite[:DIGEST_CHARS],
        digest=claim.verdict[:DIGEST_CHARS],
        saw_gpu=claim.saw_gpu,
        not_run=claim.not_run,
    )


def summaries_from_tags(image_id: str, tags: Mapping[str, str]) -> dict[str, VerdictSummary]:
    """The verdicts in an image's tags.

    Args:
        image_id: The AMI, for messages.

    Returns:
        Summaries by instance type.

    Raises:
        UsageError: A tag has another form.
    """
    return {
        machine: _parse(image_id, f"{VERDICT_TAG}:{machine}", value, machine)
        for machine, value in _tags_below(VERDICT_TAG, tags)
    }


def cluster_summaries_from_tags(
    image_id: str, tags: Mapping[str, str]
) -> dict[tuple[str, str], VerdictSummary]:
    """The verdicts on an image as a node that are in its tags.

    Args:
        image_id: The AMI, for messages.

    Returns:
        Summaries by instance type and Kubernetes version.

    Raises:
        UsageError: A tag has another form.
    """
    summaries = {}
    for name, value in _tags_below(CLUSTER_VERDICT_TAG, tags):
        machine, _, kubernetes = name.partition(":")
        summaries[machine, kubernetes] = _parse(image_id, f"{CLUSTER_VERDICT_TAG}:{name}", value, machine)
    return summaries


def _tags_below(start: str, tags: Mapping[str, str]) -> list[tuple[str, str]]:
    """The tags whose names begin so, without that beginning.

    >>> _tags_below(VERDICT_TAG, {"gpukiln:verdict": "passed", "gpukiln:verdict:g5.xlarge": "passed ..."})
    [('g5.xlarge', 'passed ...')]
    """
    return [(name.removeprefix(f"{start}:"), tags[name]) for name in tags if name.startswith(f"{start}:")]


def _parse(image_id: str, tag: str, value: str, instance_type: str) -> VerdictSummary:
    """The summary in one tag.

    Raises:
        UsageError: The tag has another form.

    >>> value = "passed profile=image at=2026-03-01 suite=ab digest=cd gpu=yes not_run=compute:2/gpu:1"
    >>> _parse("ami-1", "gpukiln:verdict:g5.xlarge", value, "g5.xlarge").not_run
    {'compute': 2, 'gpu': 1}
    """
    try:
        return _summary_in(value, instance_type)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"the tag {tag} of {image_id} can't be read: {error!r}",
            hint="remove the tag, and verify the image on that type again: `invoke ami.verify`",
        ) from error


def _summary_in(value: str, instance_type: str) -> VerdictSummary:
    outcome, *rest = value.split()
    words = dict(word.split("=", 1) for word in rest)
    pairs = [] if words["not_run"] == "none" else [p.split(":") for p in words["not_run"].split("/")]
    return VerdictSummary(
        instance_type=instance_type,
        passed=outcome == "passed",
        profile=words["profile"],
        at=words["at"],
        suite=words["suite"],
        digest=words["digest"],
        saw_gpu=words["gpu"] == "yes",
        not_run={layer: int(count) for layer, count in pairs},
    )


def cluster_key(verdict: Verdict) -> tuple[str, str]:
    """Instance type and Kubernetes version of a verdict on an image as a node."""
    return verdict.instance_type, verdict.environment.get("Kubernetes", "")


def require_tag_space(
    cloud: Cloud, image_id: str, instance_types: Sequence[str], kubernetes: str = ""
) -> None:
    """Refuse to verify an image whose tags have no space for the verdict.

    Args:
        instance_types: Those to try.
        kubernetes: Minor version of the cluster as whose node it is verified; empty: as a machine.

    Raises:
        RefusedError: It has too many tags; the hint names the oldest verdict on a node.
        UnavailableError: The cloud could not be asked.
    """
    with explain_aws_errors("read the tags of the image"):
        images = calls.images(cloud.client("ec2"), {"image-id": [image_id]})
    tags = tags_of(images[0]) if images else {}
    start, end = (CLUSTER_VERDICT_TAG, f":{kubernetes}") if kubernetes else (VERDICT_TAG, "")
    # A verdict of the same type and version is replaced.
    is_new = any(f"{start}:{machine}{end}" not in tags for machine in instance_types)
    count = sum(not name.startswith("aws:") for name in tags) + is_new
    if not is_new or count <= MAX_TAGS:
        return
    nodes = cluster_summaries_from_tags(image_id, tags)
    oldest = min(nodes.items(), key=lambda item: item[1].at, default=None)
    name = oldest[1].cluster_tag(oldest[0][1])[0] if oldest else "NAME"
    raise RefusedError(
        f"{image_id} has {count - 1} tags, and the verdict is one more",
        details=(f"wanted: at most {MAX_TAGS} with it, as EC2 allows 50 and a copy gets 3 more",),
        hint="remove one that no channel needs, such as the oldest verdict on a node: `aws ec2 delete-tags "
        f"--region {cloud.region} --resources {image_id} --tags Key={name}`",
    )


def write_cluster_verdict_tag(cloud: Cloud, subject: Subject, verdict: Verdict) -> None:
    """Add a verdict on an image as a node to the image's tags; one on simulated GPUs changes no tag.

    Raises:
        UnavailableError: The cloud refused.
    """
    if verdict.simulated:
        return
    _, kubernetes = cluster_key(verdict)
    name, value = summarize_verdict(verdict).cluster_tag(kubernetes)
    try:
        with explain_aws_errors("write the verdict on the image"):
            # No summary of all, as `verdict_tags` has: a failure as a node does not keep the image from being
            # used as a machine. Channels read each tag.
            cloud.client("ec2").create_tags(Resources=[subject.image_id], Tags=tag_list({name: value}))
    except UnavailableError as error:
        error.add_note(
            f"`invoke ami.verify {subject.build_id} --cluster CONTEXT` verifies the image again and writes "
            "the verdict"
        )
        raise


def verdict_tags(recipe: str, summaries: Iterable[VerdictSummary]) -> dict[str, str]:
    """All tags about an image's verdicts; `bake.image_tags` has those about its content.

    Args:
        recipe: Its folder of ami/.
        summaries: The newest verdict of each type; at least one.
    """
    every = list(summaries)
    passed = all(summary.passed for summary in every)
    return {
        # ISO 8601 in UTC sorts as text.
        VERIFIED_TAG: max(summary.at for summary in every),
        VERDICT_TAG: PASSED if passed else "failed",
        IMAGE_TAG: recipe if passed else NOT_VERIFIED,
        **dict(summary.tag for summary in every),
    }


def write_verdict_tags(cloud: Cloud, subject: Subject, verdict: Verdict) -> None:
    """Add a verdict to an image's tags; those of other types stay.

    A verdict on simulated GPUs changes no tag.

    Raises:
        UnavailableError: The cloud refused.
    """
    if verdict.simulated:
        return
    try:
        with explain_aws_errors("write the verdict on the image"):
            ec2 = cloud.client("ec2")
            images = calls.images(ec2, {"image-id": [subject.image_id]})
            # The other types' tags are read again here, because another computer may have verified the image
            # meanwhile.
            current = tags_of(images[0]) if images else {}
            summaries = summaries_from_tags(
                subject.image_id, {**current, **dict([summarize_verdict(verdict).tag])}
            )
            ec2.create_tags(
                Resources=[subject.image_id], Tags=tag_list(verdict_tags(subject.recipe, summaries.values()))
            )
    except UnavailableError as error:
        error.add_note(
            f"`invoke ami.verify {subject.build_id}` verifies the image again and writes the verdict"
        )
        raise


@dataclass(frozen=True)
class VerifiedAmi:
    """An image with a plan's digest whose verdicts all passed.

    Args:
        image: As DescribeImages gives it.
        suites: The suites that it passed, the first digits of their digests.
    """

    image: Mapping[str, Any]
    suites: frozenset[str]

    @property
    def image_id(self) -> str:
        """The AMI."""
        return str(self.image["ImageId"])

    @property
    def build_id(self) -> str:
        """Its build, or an empty string."""
        return tags_of(self.image).get(BUILD_ID_TAG, "")

    @property
    def verified_at(self) -> str:
        """The time of its last verification, ISO 8601 in UTC; empty where no tag has it."""
        return tags_of(self.image).get(VERIFIED_TAG, "")

    def passed_suite(self, suite: str) -> bool:
        """Whether a machine was verified with a suite.

        Args:
            suite: The suite's digest.
        """
        return suite[:DIGEST_CHARS] in self.suites


def find_verified(plan: ImagePlan, cloud: Cloud, suite: str) -> VerifiedAmi | None:
    """A verified image with this plan's digest: by this suite, else by another one.

    Args:
        cloud: Where to look.
        suite: The digest of the suite.

    Returns:
        The newest, or None. Where a channel trusts keys, an image needs a signed verdict; an image that the
        record of its build contradicts does not count either. A warning names such an image.
    """
    with explain_aws_errors("look for an image with the plan's digest"):
        # Only images whose verdicts all passed: PASSED is the summary of all types.
        filters = {
            f"tag:{DIGEST_TAG}": [plan.digest],
            f"tag:{VERDICT_TAG}": [PASSED],
            "state": ["available"],
        }
        images = calls.images(cloud.client("ec2"), filters, Owners=["self"])
    verified = []
    # Several computers may have built the same plan; the newest has the newest base packages.
    for image in sorted(images, key=lambda image: str(image["CreationDate"]), reverse=True):
        try:
            trust.require_verified(cloud, image)
        # Without this a tag that anybody may write would keep the build from running.
        except RefusedError as error:
            log.warning("warning: %s is not used: %s", image["ImageId"], error.message)
            continue
        summaries = summaries_from_tags(image["ImageId"], tags_of(image)).values()
        verified.append(VerifiedAmi(image, frozenset(summary.suite for summary in summaries)))
    return next((ami for ami in verified if ami.passed_suite(suite)), verified[0] if verified else None)
