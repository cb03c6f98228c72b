"""plan -> bake -> verify, with a record of all of it, whatever happens."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpukiln.catalog.instance_types import instance_type
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import BusyError, CheckFailedError, GpukilnError
from gpukiln.images.bake import bake
from gpukiln.images.builds import Bake, Build, Builds, Record
from gpukiln.images.digest import explain_change
from gpukiln.images.machines import KEY_SUFFIX, builds_with_leftovers, machine_from_image, sweep, tag_list
from gpukiln.images.plan import Plan
from gpukiln.progress import Progress
from gpukiln.verify.report import Live
from gpukiln.verify.suite import run_suite
from gpukiln.verify.verdict import Verdict


def find_proven(plan: Plan, cloud: Cloud) -> dict[str, Any] | None:
    """An image of this very plan that was verified already.

    Args:
        plan: The plan.
        cloud: Where to look.

    Returns:
        The image as DescribeImages gives it, or None.
    """
    with explain_aws_errors("look for an image with the plan's digest"):
        images = cloud.client("ec2").describe_images(
            Owners=["self"],
            Filters=[
                {"Name": "tag:gpukiln:digest", "Values": [plan.digest]},
                {"Name": "tag:gpukiln:verdict", "Values": ["passed"]},
                {"Name": "state", "Values": ["available"]},
            ],
        )["Images"]
    found: list[dict[str, Any]] = sorted(images, key=lambda image: str(image["CreationDate"]))
    return found[-1] if found else None


def why_build(plan: Plan, builds: Builds) -> list[str]:
    """What changed since the last image that was proven.

    Args:
        plan: The plan.
        builds: Every build of this machine.

    Returns:
        One line a change.
    """
    for build in builds.all():
        old = build.read()
        same = (old.plan.image, old.plan.cloud, old.plan.base.name) == (
            plan.image,
            plan.cloud,
            plan.base.name,
        )
        if same and old.verdict and old.verdict.passed:
            changes = explain_change(old.plan.inputs, plan.inputs)
            return changes or [f"{old.bake.image_id if old.bake else 'its image'} is not there any more"]
    return ["no image of it was proven on this machine yet"]


def build_image(plan: Plan, cloud: Cloud, builds: Builds, progress: Progress) -> tuple[Build, Record]:
    """Bake an image and verify it on a machine booted from it.

    Args:
        plan: What to build.
        cloud: Where.
        builds: Where the record goes.
        progress: Told what is being done.

    Returns:
        The build and its record; a failed check is in the verdict, not an exception.

    Raises:
        GpukilnError: It could not be baked or verified.
    """
    clean_up_after_killed(cloud, builds, progress)
    progress = Progress(builds.last_durations(plan), console=progress.console)
    build = builds.create(plan.image)
    with build.locked():
        record = Record(build.id, "running", plan)
        build.write(record)
        try:
            baked = bake(plan, cloud, build, progress)
            record = replace(record, state="baked", bake=baked, durations_s=progress.durations)
            build.write(record)
            verdict = verify_image(record, baked, cloud, build.folder / "verify", progress)
            record = replace(record, state="verified", verdict=verdict, durations_s=progress.durations)
        except BaseException as error:
            state = "aborted" if isinstance(error, KeyboardInterrupt) else "failed"
            message = error.message if isinstance(error, GpukilnError) else repr(error)
            build.write(replace(record, state=state, error=message, durations_s=progress.durations))
            raise
        build.write(record)
    return build, record


def verify_image(record: Record, baked: Bake, cloud: Cloud, folder: Path, progress: Progress) -> Verdict:
    """Boot a new machine from an image, judge it, and write the verdict on the image.

    Args:
        record: The build's record.
        baked: The image.
        cloud: Where it is.
        folder: For the report.
        progress: Told what is being done.

    Returns:
        The verdict.

    Raises:
        UnavailableError: No machine could be started, or it could not be reached.
    """
    plan = record.plan
    folder.mkdir(exist_ok=True)
    with ExitStack() as machine:
        with progress.step("boot from the image"):
            target = machine.enter_context(
                machine_from_image(
                    cloud,
                    baked.image_id,
                    build_id=record.build_id,
                    instance_type=plan.instance_types[0],
                    user=plan.base.ssh_user,
                    folder=folder,
                    say=progress.say,
                )
            )
        live = Live(progress)
        with progress.step("verify"):
            verdict = run_suite(
                target,
                profile=plan.profile,
                out_dir=folder,
                on_start=live.start,
                on_check=live.check,
                expect_gpus=instance_type(plan.instance_types[0]).gpus if cloud.has_gpus else None,
            )
            if not verdict.passed:
                progress.fail()
        with progress.step("remove the machine"):
            machine.close()
    tags = {**verdict_tags(verdict), "gpukiln:build-id": record.build_id}
    with explain_aws_errors("write the verdict on the image"):
        cloud.client("ec2").create_tags(Resources=[baked.image_id], Tags=tag_list(tags))
    return verdict


def verdict_tags(verdict: Verdict) -> dict[str, str]:
    """Tags by which an image says how it was judged; what is in the image is in `bake.image_tags`.

    Args:
        verdict: The verdict.

    Returns:
        Names and values; the values have only characters that every AWS service takes in a tag.
    """
    return {
        "gpukiln:verdict": "passed" if verdict.passed else "failed",
        "gpukiln:verdict-profile": verdict.profile,
        "gpukiln:verdict-suite": verdict.suite_version,
        "gpukiln:verdict-counts": " ".join(f"{outcome}={n}" for outcome, n in verdict.counts.items()),
        "gpukiln:verdict-digest": verdict.digest,
    }


def clean_up_after_killed(cloud: Cloud, builds: Builds, progress: Progress) -> None:
    """Remove what commands of this machine left on a cloud that were killed, or could not clean up.

    Args:
        cloud: The cloud and region to look at; what is elsewhere waits for the next command there.
        builds: Every build of this machine.
        progress: Told what is removed.
    """
    with_leftovers = builds_with_leftovers(cloud)
    for build in builds.all():
        record = build.read()
        here = (record.plan.cloud, record.plan.region) == (cloud.name, cloud.region)
        unfinished = record.state in ("running", "baked")
        if not here or not (unfinished or build.id in with_leftovers):
            continue
        try:
            with build.locked():
                removed = sweep(cloud, build.id)
                for key in build.folder.rglob(f"*{KEY_SUFFIX}"):
                    key.unlink()
                if unfinished:
                    build.write(replace(record, state="aborted", error="its process was killed"))
        except BusyError:
            continue
        progress.console.print(
            f"build {build.id} had been killed; removed {', '.join(removed) or 'nothing, nothing was left'}"
        )


def require_passed(record: Record) -> None:
    """Turn failed checks into the command's failure.

    Args:
        record: The build's record.

    Raises:
        CheckFailedError: A check failed.
    """
    if record.verdict and not record.verdict.passed:
        raise CheckFailedError(
            f"{len(record.verdict.failures)} of {len(record.verdict.checks)} checks failed",
            hint=f"`invoke ami.show {record.build_id}` shows the report again",
            details=tuple(check.id for check in record.verdict.failures),
        )
