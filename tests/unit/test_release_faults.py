"""Every call of a release fails once: what is left is consistent, and a second run completes it.

The release replaces another one in two regions. Each call that changes something is refused in the one, and
done with its answer lost in the other. Of the calls that only read each kind fails once.
"""

import json
import shutil
from collections import Counter
from dataclasses import asdict

import pytest

from gpukiln.clouds.tags import SOURCE_TAG
from gpukiln.errors import GpukilnError
from gpukiln.images.channels import load_channel
from gpukiln.images.pointer import Pointer, history
from gpukiln.instances.tags import tags_of
from gpukiln.release.log import ReleaseLog, require_complete
from gpukiln.release.publish import release
from gpukiln.release.rollback import rollback
from tests.support.kill_points import mask_varying, run_killed_at, select_steps, steps_of
from tests.support.release_cloud import (
    HOME,
    POINTER,
    REGIONS,
    Cloud,
    fault,
    images,
    is_change,
    make_image,
    quiet,
    release_spec,
    tell,
)

COPY = "eu-west-1"
CANDIDATE = Pointer("eks-gpu", "1.34", "candidate")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return ReleaseLog(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def before(records):
    """A cloud with one release, and the image of the next."""
    tell("reset")
    first = make_image("b1")
    old = run(records, first, "b1")
    new = make_image("b2")
    tell("keep")
    return old, new


def run(records, image_id, build):
    done = release(release_spec(image_id, build), Cloud(), records, quiet())
    require_complete(done)
    return {result.region: result.image_id for result in done.regions}


def calls_of_a_release(records, image_id):
    """Every call as region, action and how many such calls came before it."""
    tell("restore")
    run(records, image_id, "b2")
    seen = Counter()
    for region, action, _ in tell("calls"):
        yield region, action, seen[region, action]
        seen[region, action] += 1


def cases(calls):
    for region, action, earlier in calls:
        if is_change(action):
            yield region, action, earlier, "denied" if region == HOME else "lost"
        if not earlier and (
            action in ("CopyImage", "DescribeImages") or (region == COPY and not is_change(action))
        ):
            yield region, action, earlier, "denied"


def require_consistent(old, new, case):
    """Every pointer names the old or the new image, which is available and can't be deregistered.

    Returns:
        Per region the images and the id of the one that is pointed at.
    """
    state = {}
    for region in REGIONS:
        found, name = images(region), POINTER.format("candidate")
        value = Cloud(region).client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
        image = found[value]
        assert tags_of(image).get(SOURCE_TAG, value) in (old[HOME], new), case
        assert image["State"] == "available", case
        assert image["DeregistrationProtection"] == "enabled-without-cooldown", case
        assert "DeprecationTime" not in image, case
        state[region] = found, value
    return state


def test_every_call_may_fail_once(records, before):
    old, new = before
    calls = list(calls_of_a_release(records, new))
    assert {"CopyImage", "PutParameter", "EnableImageDeprecation"} <= {action for _, action, _ in calls}
    outcomes = Counter()
    for region, action, earlier, kind in cases(calls):
        tell("restore")
        tell("faults", [fault(action, kind, region, skip=earlier)])
        case = f"{action} {earlier} in {region}: {kind}"
        with pytest.raises(GpukilnError) as caught:
            run(records, new, "b2")
        outcomes[caught.value.exit_code] += 1
        assert action in f"{caught.value.message} {caught.value.details}", case
        require_consistent(old, new, case)
        there = run(records, new, "b2")
        assert there[HOME] == new, case
        for place, (found, value) in require_consistent(old, new, case).items():
            assert value == there[place], case
            assert len(found) == 2, case  # one image a release
            assert found[old[place]]["DeprecationTime"], case
            assert found[old[place]]["DeregistrationProtection"] == "disabled", case
            assert len(history(Cloud(place).client("ssm"), CANDIDATE)) == 2, case  # pointed once, not twice
    print(
        f"\n{len(calls)} calls, {sum(outcomes.values())} faults: "
        f"{outcomes[4]} before anything was done (exit 4), {outcomes[5]} in part (exit 5), "
        "all consistent and completed by a second run"
    )
    assert outcomes[5] > 15
    assert set(outcomes) == {4, 5}


def everything():
    """Images with their snapshots, who may launch them, and pointers with their history, in each region."""
    found = {}
    for region in REGIONS:
        ec2, ssm = Cloud(region).client("ec2"), Cloud(region).client("ssm")
        there = images(region)
        ids = [device["Ebs"]["SnapshotId"] for one in there.values() for device in one["BlockDeviceMappings"]]
        found[region] = {
            "images": sorted(mask_varying(one) for one in there.values()),
            "snapshots": sorted(
                mask_varying(one) for one in ec2.describe_snapshots(SnapshotIds=ids)["Snapshots"]
            ),
            "permissions": sorted(
                mask_varying(
                    ec2.describe_image_attribute(ImageId=one, Attribute="launchPermission")[
                        "LaunchPermissions"
                    ]
                )
                for one in there
            ),
            "pointer": ssm.get_parameter(Name=POINTER.format("candidate"))["Parameter"]["Version"],
            "history": mask_varying([asdict(one) for one in history(ssm, CANDIDATE)]),
            "tags": ssm.list_tags_for_resource(
                ResourceType="Parameter", ResourceId=POINTER.format("candidate")
            )["TagList"],
        }
    return found


@pytest.mark.parametrize("command", ["release", "rollback"])
def test_killed_anywhere_and_typed_again_it_is_as_if_never_killed(before, tmp_path, command):
    _, new = before

    def work(folder=tmp_path):
        log = ReleaseLog(folder)
        if command == "release":
            run(log, new, "b2")
        else:
            require_complete(
                rollback(CANDIDATE, load_channel("candidate"), Cloud(), [*REGIONS], log, quiet())
            )

    def empty():
        tell("restore")
        shutil.rmtree(tmp_path / "releases", ignore_errors=True)
        if command == "rollback":
            run(ReleaseLog(tmp_path), new, "b2")

    def state():
        files = sorted((tmp_path / "releases").iterdir())
        kept = {one.name: {**json.loads(one.read_text() or "{}"), "durations_s": 0} for one in files}
        return everything(), mask_varying(kept)

    empty()
    work()
    undisturbed = state()
    empty()
    steps = steps_of(work, tmp_path)
    assert {"PutParameter", "EnableImageDeprecation"} <= set(steps)
    for number in select_steps(steps):
        empty()
        assert run_killed_at(number, work, tmp_path)
        work()
        assert state() == undisturbed, f"killed at step {number}"
