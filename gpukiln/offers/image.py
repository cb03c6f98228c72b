"""Chooses the image that a machine would be started from, and gives the reason.

First the newest channel release of gpukiln that fits, then the gpukiln image that was verified last, then
AWS's Deep Learning AMI by its parameter, then a plain distribution image, on which the roles install the
driver.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from gpukiln.attest import trust
from gpukiln.catalog.bases import base, default_base
from gpukiln.catalog.compat import choose_modules
from gpukiln.catalog.components import load_components
from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_type
from gpukiln.catalog.workloads import WorkloadRequirements
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.ec2 import images
from gpukiln.clouds.tags import PASSED, VERDICT_TAG, VERIFIED_TAG
from gpukiln.errors import GpukilnError, RefusedError, UsageError
from gpukiln.files import write_atomic
from gpukiln.images import pointer as pointers
from gpukiln.images.subject import Subject, subject_from_tags
from gpukiln.instances.tags import tags_of
from gpukiln.offers.fit import describe_ami, fit
from gpukiln.offers.model import ImageChoice
from gpukiln.parsing import parse_json
from gpukiln.state import state_home
from gpukiln.typed import dump, load, strict

MAX_AGE = timedelta(days=1)
"""How long a region's images count as looked up: a release or a new DLAMI is no matter of hours."""
# AWS Deep Learning AMIs developer guide: the newest system first. All have the open kernel modules
# ("OSS Nvidia Driver").
DLAMIS = tuple(
    f"/aws/service/deeplearning/ami/{{arch}}/base-oss-nvidia-driver-gpu-ubuntu-{release}/latest/ami-id"
    for release in ("24.04", "22.04")
)
OPEN_MODULES = "AWS Deep Learning AMIs developer guide: OSS Nvidia Driver"


@strict
class ChannelImage:
    """The image that a channel points at.

    Args:
        parameter: Name of the channel's SSM parameter.
        since: When it was pointed there, ISO 8601; empty where it is not known.
        facts: None where the image's tags don't say what is in it, or nothing shows that it was released;
            `why` says so then.
        trust: By what it is trusted, in words.
    """

    parameter: str
    image_id: str
    since: str
    facts: Subject | None
    why: str = ""
    trust: str = ""


@strict
class VerifiedImage:
    """A gpukiln image that passed its verification, whether or not a channel points at it.

    Args:
        since: When it was verified last, ISO 8601.
        facts: What its tags say is in it.
        trust: By what it is trusted, in words.
    """

    image_id: str
    since: str
    facts: Subject
    trust: str = ""


@strict
class DeepLearningAmi:
    """One of AWS's Deep Learning AMIs.

    Args:
        families: Of instance types that its description names; empty where it names none.
    """

    parameter: str
    image_id: str
    arch: str
    families: tuple[str, ...]


@strict
class Images:
    """What a region has.

    Args:
        at: When it was asked, ISO 8601.
        notes: What could not be asked, and why; which images have no trusted signature.
        trust: The keys that counted, as ami/channels.yaml names them.
    """

    at: str
    released: tuple[ChannelImage, ...]
    verified: tuple[VerifiedImage, ...]
    dlamis: tuple[DeepLearningAmi, ...]
    notes: tuple[str, ...]
    trust: tuple[str, ...] = ()

    @property
    def age(self) -> timedelta:
        """How old the answer is."""
        return datetime.now(UTC) - datetime.fromisoformat(self.at)


def images_of(cloud: Cloud, *, fresh: bool = False) -> Images:
    """What an account has in a region: asked once a day, and kept with its age.

    Args:
        fresh: Whether it is asked now, whatever is kept.

    Raises:
        UnavailableError: The cloud does not name the account.
    """
    with explain_aws_errors("look up the account"):
        account = cloud.client("sts").get_caller_identity()["Account"]
    # By account: a shared computer may have several, with images of their own.
    file = state_home() / "offers" / f"images-{cloud.name}-{account}-{cloud.region}.json"
    # Part of the answer: with another key other images are trusted.
    keys = tuple(map(str, trust.all_trusted()))
    if not fresh and (answer := _read_cache(file)) is not None and answer.trust == keys:
        return answer
    notes: list[str] = []
    released = _collect(_released, cloud, "what the channels point at", notes)
    refused: list[str] = []
    verified = _collect(
        lambda there: _verified(there, refused), cloud, "the gpukiln images that passed", notes
    )
    dlamis = _collect(_dlamis, cloud, "AWS's Deep Learning AMIs", notes)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    answer = Images(at, released, verified, dlamis, (*notes, *refused), keys)
    if not answer.notes:  # an answer with holes is not kept
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(dump(answer), indent=1))
        except OSError as error:  # read-only or full: the answer is as good
            answer = replace(
                answer,
                notes=(
                    *answer.notes,
                    f"the images found can't be kept in {file}: {error.strerror}",
                ),
            )
    return answer


def choose_image(
    known: Images, cloud: Cloud, machine: str, workload: WorkloadRequirements | None, today: date
) -> ImageChoice:
    """The image for a machine: the first of release, verified image, DLAMI and plain image that fits."""
    why: list[str] = []
    # ISO 8601 sorts as text; a release without a date comes last.
    for release in sorted(known.released, key=lambda row: row.since, reverse=True):
        if release.facts is None:
            why.append(f"not {release.parameter}: {release.why}")
            continue
        findings = fit(machine, image=release.facts, workload=workload, today=today)
        if wrong := next((row for row in findings if row.severity == "error"), None):
            why.append(f"not {release.parameter} ({release.image_id}): {wrong.message}")
            continue
        why.insert(0, f"the newest release of a channel that fits, since {release.since or 'an unknown day'}")
        return ImageChoice(
            release.image_id, "channel", release.parameter, tuple(why), known.at, findings, release.trust
        )
    if not known.released:
        why.append("no release: no channel points at an image there")
    for mine in sorted(known.verified, key=lambda row: row.since, reverse=True):
        findings = fit(machine, image=mine.facts, workload=workload, today=today)
        if wrong := next((row for row in findings if row.severity == "error"), None):
            why.append(f"not {mine.image_id}: {wrong.message}")
            continue
        why.insert(0, f"the gpukiln image that was verified last, on {mine.since[:10]}")
        name = mine.facts.build_id
        return ImageChoice(mine.image_id, "verified", name, tuple(why), known.at, findings, mine.trust)
    if not known.verified:
        why.append("no gpukiln image: none passed there")
    for row in known.dlamis:
        if reason := _dlami_misfit(row, machine):
            why.append(f"not {row.parameter} ({row.image_id}): {reason}")
            continue
        needs = fit(machine, image=None, workload=workload, today=today)
        why.insert(0, "AWS's Deep Learning AMI: its driver is not known before it is booted")
        return ImageChoice(row.image_id, "dlami", row.parameter, tuple(why), known.at, needs)
    if not known.dlamis:
        why.append("no Deep Learning AMI: none is published there")
    return _plain_image(cloud, machine, workload, today, why, known.at)


def _plain_image(
    cloud: Cloud, machine: str, workload: WorkloadRequirements | None, today: date, why: list[str], at: str
) -> ImageChoice:
    # Without a channel, an image or a DLAMI there is still something to build on.
    name = default_base(cloud.name)
    driver = load_components()["nvidia_driver"].version or ""
    facts = Subject(
        image_id=f"{name} with the roles",
        build_id="",
        recipe="",
        profile="",
        instance_types=(machine,),
        base=name,
        ssh_user=base(name).ssh_user,
        architecture="x86_64",
        driver=driver,
        modules=choose_modules(driver, [machine]),
        cuda="",
    )
    why.insert(0, f"a plain image, on which the roles install driver {driver}: `invoke ami.build` bakes it")
    findings = fit(machine, image=facts, workload=workload, today=today)
    return ImageChoice("", "base", name, tuple(why), at, findings)


def _dlami_misfit(image: DeepLearningAmi, machine: str) -> str:
    facts = instance_type(machine)
    board = gpu(facts.gpu)
    if facts.arch != image.arch:
        return f"it is {image.arch}, and {machine} is {facts.arch}"
    if facts.driver == "grid":
        return f"NVIDIA's GRID driver alone drives the fraction of a GPU that {machine} has"
    if board.modules == "proprietary":
        return f"its open kernel modules do not drive a {board.name} ({OPEN_MODULES})"
    family = machine.partition(".")[0]
    if image.families and family not in image.families:
        return f"its description does not name {family}"
    return ""


def _collect(ask: Any, cloud: Cloud, what: str, notes: list[str]) -> tuple[Any, ...]:
    try:
        with explain_aws_errors(f"look up {what}"):
            return tuple(ask(cloud))
    except GpukilnError as error:
        notes.append(f"{what}: {error.message}")
        return ()


def _released(cloud: Cloud) -> Iterator[ChannelImage]:
    ssm = cloud.client("ssm")
    for pointer, image_id in pointers.read_all(ssm).items():
        versions = pointers.history(ssm, pointer)
        since = versions[-1].at if versions else ""
        try:
            image = describe_ami(cloud, image_id)
            facts = subject_from_tags(image_id, tags_of(image))
            words = trust.require_released(cloud, image, pointer)
            yield ChannelImage(pointer.path, image_id, since, facts, trust=words)
        except (UsageError, RefusedError) as error:  # gone, not built by gpukiln, or not signed
            yield ChannelImage(
                pointer.path, image_id, since, None, "; ".join((error.message, *error.details))
            )


def _verified(cloud: Cloud, refused: list[str]) -> Iterator[VerifiedImage]:
    """The images that count; `refused` gets a line for each image without a trusted signature."""
    passed = {f"tag:{VERDICT_TAG}": [PASSED]}
    for image in images(cloud.client("ec2"), passed, Owners=["self"]):
        tags = tags_of(image)
        if image["State"] == "available":
            try:
                facts = subject_from_tags(image["ImageId"], tags)
            except UsageError:  # of a recipe that this checkout has not
                continue
            try:
                words = trust.require_verified(cloud, image)
                yield VerifiedImage(image["ImageId"], tags.get(VERIFIED_TAG, ""), facts, words)
            except (UsageError, RefusedError) as error:
                refused.append("; ".join((error.message, *error.details)))


def _dlamis(cloud: Cloud) -> Iterator[DeepLearningAmi]:
    ssm, ec2 = cloud.client("ssm"), cloud.client("ec2")
    # All parameters in one call of GetParameters, which takes ten names.
    names = {form.format(arch=arch): arch for form in DLAMIS for arch in ("x86_64", "arm64")}
    image_ids = {row["Name"]: row["Value"] for row in ssm.get_parameters(Names=list(names))["Parameters"]}
    described = images(ec2, {"image-id": sorted(set(image_ids.values()))}) if image_ids else []
    descriptions = {image["ImageId"]: image.get("Description", "") for image in described}
    for name, arch in names.items():
        if name in image_ids:
            yield DeepLearningAmi(
                name, image_ids[name], arch, supported_families(descriptions.get(image_ids[name], ""))
            )


def supported_families(description: str) -> tuple[str, ...]:
    """The families that a DLAMI's description names, as in `Supported EC2 instances: G4dn, G5.` there.

    >>> supported_families("Supported EC2 instances: G4dn, G5, P5e.")
    ('g4dn', 'g5', 'p5e')
    >>> supported_families("Base OSS Nvidia Driver GPU AMI")
    ()
    """
    # DLAMIs name their families in the description; the parameter has only the image's id.
    listed = re.search(r"[Ss]upported EC2 [Ii]nstances?:\s*([^.]*)", description)
    return tuple(re.findall(r"[a-z]+\d+[a-z]*(?:-[a-z]+\d+)?", listed[1].lower())) if listed else ()


def _read_cache(file: Path) -> Images | None:
    """The answer that was kept and still counts; what is damaged, or of tomorrow, is asked for again."""
    try:
        answer = load(Images, parse_json(file.read_bytes()), where=str(file))
        counts = timedelta(0) <= answer.age < MAX_AGE
    except (OSError, ValueError, TypeError, UsageError):  # TypeError: a time without its zone
        return None
    return answer if counts else None
