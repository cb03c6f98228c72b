"""A release points a channel at a proven image in every region, does nothing twice, and can be taken back."""

import json
import signal
import threading
from dataclasses import replace

import pytest

from gpukiln.clouds.tags import SOURCE_TAG
from gpukiln.errors import BusyError, CheckFailedError, PartialError, RefusedError, UnavailableError
from gpukiln.images import pointer as pointers
from gpukiln.images.channels import load_channel
from gpukiln.images.pointer import Pointer, history
from gpukiln.instances.tags import tags_of
from gpukiln.release.images import LaunchPermissions
from gpukiln.release.log import require_complete
from gpukiln.release.overview import read_channels, require_consistent
from gpukiln.release.publish import release
from gpukiln.release.rollback import rollback
from tests.support.release_cloud import (
    HOME,
    POINTER,
    REGIONS,
    Cloud,
    changes,
    fault,
    images,
    make_image,
    pointed,
    quiet,
    release_spec,
    server,
    tell,
    verdict,
)

CANDIDATE = Pointer("eks-gpu", "1.34", "candidate")


pytestmark = pytest.mark.usefixtures("empty_cloud")


def publish(records, image_id, build, **more):
    done = release(release_spec(image_id, build, **more), Cloud(), records, quiet())
    require_complete(done)
    return {result.region: result.image_id for result in done.regions}


def attempt(records, image_id, build):
    return release(release_spec(image_id, build), Cloud(), records, quiet())


def go_back(records, **more):
    done = rollback(CANDIDATE, load_channel("candidate"), Cloud(), [HOME], records, quiet(), **more)
    require_complete(done)
    return done


def test_a_release_copies_shares_protects_and_points(records):
    image_id = make_image("b1")
    sharing = LaunchPermissions(
        ("111122223333",), ("arn:aws:organizations::111122223333:organization/o-abcde12345",)
    )
    there = publish(records, image_id, "b1", sharing=sharing)
    assert there[HOME] == image_id
    assert pointed() == there
    assert len(set(there.values())) == len(REGIONS)
    for region, copy_id in there.items():
        image = images(region)[copy_id]
        assert image["DeregistrationProtection"] == "enabled-without-cooldown"
        assert image["ImdsSupport"] == "v2.0"
        assert tags_of(image)["gpukiln:verdict"] == "passed"
        assert tags_of(image)["gpukiln:not-run"] == "none"
        permissions = (
            Cloud(region)
            .client("ec2")
            .describe_image_attribute(ImageId=copy_id, Attribute="launchPermission")["LaunchPermissions"]
        )
        assert permissions == sharing.permissions
        [snapshot] = [device["Ebs"]["SnapshotId"] for device in image["BlockDeviceMappings"]]
        assert server()[1].snapshot(snapshot).read_bytes().startswith(image_id.encode())  # the very disk
        parameter = Cloud(region).client("ssm").get_parameter(Name=CANDIDATE.path)["Parameter"]
        assert parameter["DataType"] == "aws:ec2:image"
        [version] = history(Cloud(region).client("ssm"), CANDIDATE)
        assert (version.build, version.action, set(version.regions)) == ("b1", "release", set(REGIONS))
    [file] = records.folder.glob("*.json")
    assert json.loads(file.read_text())["state"] == "done"
    assert set(records.regions("embedded")) == set(REGIONS)

    changes()
    assert publish(records, image_id, "b1", sharing=sharing) == there
    assert changes() == []  # a second run changes nothing


def test_what_is_replaced_is_deprecated_and_what_another_channel_needs_is_not(records):
    old = publish(records, make_image("b1"), "b1")
    publish(records, old[HOME], "b1", channel="stable")
    middle = publish(records, make_image("b2"), "b2")
    assert all("DeprecationTime" not in images(region)[old[region]] for region in REGIONS)
    publish(records, make_image("b3"), "b3")
    for region in REGIONS:
        there = images(region)
        assert there[middle[region]]["DeprecationTime"]
        assert there[middle[region]]["DeregistrationProtection"] == "disabled"
        assert there[old[region]]["DeregistrationProtection"] == "enabled-without-cooldown"
    publish(records, middle[HOME], "b2")  # released again: it is alive again
    assert all("DeprecationTime" not in images(region)[middle[region]] for region in REGIONS)


def test_a_dry_run_changes_nothing(records):
    image_id = make_image("b1")
    changes()
    done = release(release_spec(image_id, "b1"), Cloud(), records, quiet(), dry_run=True)
    assert {result.state for result in done.regions} == {"planned"}
    assert changes() == []
    assert not list(records.folder.glob("*.json"))


@pytest.mark.parametrize("encrypted", [False, True])
def test_copies_are_encrypted_with_a_key_for_each_region(records, encrypted):
    image_id = make_image("b1", encrypted=encrypted)
    keys = {region: f"alias/{region}" for region in REGIONS}
    there = publish(records, image_id, "b1", keys=keys, sharing=LaunchPermissions(("111122223333",)))
    assert there[HOME] != image_id  # at home too: the image itself has another key or none
    for region, copy_id in there.items():
        snapshot = images(region)[copy_id]["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
        found = Cloud(region).client("ec2").describe_snapshots(SnapshotIds=[snapshot])["Snapshots"]
        assert [(one["Encrypted"], one["KmsKeyId"]) for one in found] == [(True, f"alias/{region}")]
    assert publish(records, image_id, "b1", keys=keys) == there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharing": LaunchPermissions(public=True)}, "block public access for AMIs is on"),
        ({"sharing": LaunchPermissions(public=True), "keys": dict.fromkeys(REGIONS, "k")}, "can't be public"),
        (
            {"sharing": LaunchPermissions(("111122223333",)), "keys": dict.fromkeys(REGIONS, "default")},
            "default key",
        ),
    ],
)
def test_unsafe_sharing_is_refused_before_anything_changes(records, options, message):
    image_id = make_image("b1")
    changes()
    with pytest.raises(RefusedError, match=message):
        publish(records, image_id, "b1", **options)
    assert changes() == []


def test_an_image_that_a_build_encrypted_is_not_shared_without_a_key(records):
    """The template encrypts with the account's default key, which is good for this account alone."""
    image_id = make_image("b1", encrypted=True)
    changes()
    with pytest.raises(RefusedError, match="default key") as caught:
        publish(records, image_id, "b1", sharing=LaunchPermissions(("111122223333",)))
    assert "--kms-keys us-west-2=KEY" in caught.value.hint
    assert changes() == []
    there = publish(records, image_id, "b1")
    assert there[HOME] == image_id
    assert all(
        device["Ebs"]["Encrypted"]
        for region in REGIONS
        for device in images(region)[there[region]]["BlockDeviceMappings"]
    )


def test_an_image_is_public_only_where_the_account_allows_it(records):
    for region in REGIONS:
        Cloud(region).client("ec2").disable_image_block_public_access()
    there = publish(records, make_image("b1"), "b1", sharing=LaunchPermissions(public=True))
    assert all(images(region)[there[region]]["Public"] for region in REGIONS)


def test_a_verdict_that_the_image_does_not_carry_is_refused(records):
    image_id = make_image("b1", judged=verdict(not_run=[("gpu.xid", "no GPU")]))
    with pytest.raises(RefusedError, match="another verdict"):
        publish(records, image_id, "b1")
    with pytest.raises(UnavailableError, match="is gone"):
        publish(records, "ami-0123456789abcdef0", "b1")


def test_a_release_that_would_leave_a_region_behind_is_refused(records):
    publish(records, make_image("b1"), "b1")
    newer = make_image("b2")
    changes()
    with pytest.raises(RefusedError, match="also points at an image in eu-west-1") as caught:
        publish(records, newer, "b2", regions=REGIONS[:1])
    assert ",".join(REGIONS) in caught.value.hint
    assert changes() == []
    Cloud("eu-west-1").client("ssm").delete_parameter(Name=CANDIDATE.path)  # as the hint says
    publish(records, newer, "b2", regions=REGIONS[:1])


def test_a_region_that_is_added_is_told_to_those_before(records):
    """Another machine that knows one region finds all, and a rollback from there leaves none behind."""
    image_id, three = make_image("b1"), (*REGIONS, "us-east-1")
    publish(records, image_id, "b1")
    publish(records, image_id, "b1", regions=three)
    for region in three:
        assert {row.region for row in read_channels(Cloud(), [region]).rows} == set(three)
    changes()
    publish(records, image_id, "b1", regions=three[::-1])
    assert changes() == []


def test_a_pointer_that_was_written_by_hand_is_made_good_by_a_release(records):
    image_id = make_image("b1")
    Cloud(HOME).client("ssm").put_parameter(Name=CANDIDATE.path, Value=image_id, Type="String")
    assert "written by hand: no build is known" in read_channels(Cloud(), [HOME]).rows[0].problems
    publish(records, image_id, "b1")
    assert [row.problems for row in read_channels(Cloud(), [HOME]).rows] == [(), ()]


def test_a_region_that_fails_loses_no_other_and_moves_no_pointer(records):
    old = publish(records, make_image("b1"), "b1")
    image_id = make_image("b2")
    tell("faults", [fault("CopyImage", "denied", "eu-west-1")])
    with pytest.raises(PartialError, match="1 of 2 regions failed; the channel was not moved") as caught:
        publish(records, image_id, "b2")
    assert "CopyImage" in caught.value.hint
    assert pointed() == old
    changes()
    publish(records, image_id, "b2")
    assert [region for region, action, _ in changes() if action == "CopyImage"] == ["eu-west-1"]


def test_a_copy_that_never_becomes_available_ends_the_wait(records):
    image_id = make_image("b1")
    tell("faults", [fault("DescribeImages", "pending", "eu-west-1", times=999)])
    with pytest.raises(PartialError, match="the channel was not moved") as caught:
        publish(records, image_id, "b1", timeout_s=0.3)
    assert "eu-west-1: ami-" in caught.value.details[0]
    assert "is still pending after" in caught.value.details[0]
    assert set(pointed().values()) == {None}
    tell("faults", [])
    publish(records, image_id, "b1")
    assert len(images("eu-west-1")) == 1  # the copy that was late was taken


def test_a_copy_that_failed_is_made_anew(records):
    old = publish(records, make_image("b1"), "b1")["eu-west-1"]
    image_id = make_image("b2")
    tell("faults", [fault("PutParameter", "denied", times=2)])
    failed = {result.region: result.image_id for result in attempt(records, image_id, "b2").regions}[
        "eu-west-1"
    ]
    tell("state", {"region": "eu-west-1", "image_id": failed, "state": "failed"})
    there = publish(records, image_id, "b2")["eu-west-1"]
    assert there not in (failed, old)
    assert images("eu-west-1")[there]["Name"] != images("eu-west-1")[failed]["Name"]


def test_a_copy_can_be_released_itself(records):
    copy_id = publish(records, make_image("b1"), "b1")["eu-west-1"]
    asked = release_spec(copy_id, "b1", channel="stable")
    asked = replace(asked, verification=replace(asked.verification, region="eu-west-1"))
    for _ in range(2):
        done = release(asked, Cloud("eu-west-1"), records, quiet())
        require_complete(done)
        there = {result.region: result.image_id for result in done.regions}
        assert there["eu-west-1"] == copy_id
        assert tags_of(images(HOME)[there[HOME]])[SOURCE_TAG] == copy_id
    assert len(images(HOME)) == 2


def test_a_pointer_that_ssm_does_not_accept_is_a_failure(records, monkeypatch):
    monkeypatch.setattr(pointers, "SETTLE_S", 0)
    tell("faults", [fault("PutParameter", "ignored", "eu-west-1")])
    with pytest.raises(
        PartialError, match="1 of 2 regions failed; the channel points at b1 in us-west-2"
    ) as caught:
        publish(records, make_image("b1"), "b1")
    assert "still says nothing instead of" in caught.value.details[0]


def test_a_pointer_that_ssm_accepts_after_minutes_is_no_failure(monkeypatch):
    """The parameter comes into being when SSM has looked the image up, long after its answer."""
    clock, image_id = [0.0], make_image("b1")
    ssm = Cloud().client("ssm")
    put, late = ssm.put_parameter, {}
    monkeypatch.setattr(pointers.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ssm, "put_parameter", late.update)

    def pause(seconds):
        clock[0] += seconds
        if late and clock[0] > 300:
            put(**late)
            late.clear()

    pointers.write(ssm, CANDIDATE, pointers.PointerVersion(image_id, "b1"), pause=pause)
    assert 300 < clock[0] < 320
    assert pointers.history(ssm, CANDIDATE)[-1].image_id == image_id


def test_one_release_runs_at_a_time(records):
    image_id = make_image("b1")
    with records.locked(), pytest.raises(BusyError):
        publish(records, image_id, "b1")


def test_throttling_is_waited_out_and_expired_credentials_are_explained(records):
    image_id = make_image("b1")
    tell("faults", [fault("CopyImage", "throttled", times=2), fault("PutParameter", "throttled", times=2)])
    done = release(release_spec(image_id, "b1"), Cloud(attempts=4), records, quiet())
    assert done.state == "done"
    tell("faults", [fault("DescribeImages", "expired", times=999)])
    with pytest.raises(UnavailableError, match="RequestExpired") as caught:
        publish(records, image_id, "b1")
    assert "log in again" in caught.value.hint


def test_an_interrupted_release_is_taken_up_again(records):
    old = publish(records, make_image("b1"), "b1")
    image_id = make_image("b2")
    tell("faults", [fault("DescribeImages", "pending", "eu-west-1", times=999)])
    progress, main = quiet(), threading.main_thread().ident
    progress.show_activity = lambda _: signal.pthread_kill(
        main, signal.SIGINT
    )  # as soon as a copy is waited for
    with pytest.raises(KeyboardInterrupt):
        release(release_spec(image_id, "b2", timeout_s=60), Cloud(), records, progress)
    states = {json.loads(file.read_text())["state"] for file in records.folder.glob("*b2*.json")}
    assert states == {"interrupted"}
    assert pointed() == old
    tell("faults", [])
    there = publish(records, image_id, "b2")
    assert pointed() == there
    assert len(images("eu-west-1")) == 2


def test_a_rollback_goes_one_release_back_each_time(records):
    first, second, third = (publish(records, make_image(f"b{n}"), f"b{n}") for n in (1, 2, 3))
    assert go_back(records, dry_run=True).build == "b2"
    assert pointed() == third
    assert go_back(records).build == "b2"
    assert pointed() == second
    for region in REGIONS:
        there = images(region)
        assert "DeprecationTime" not in there[second[region]]
        assert there[second[region]]["DeregistrationProtection"] == "enabled-without-cooldown"
        assert there[third[region]]["DeprecationTime"] < there[first[region]]["DeprecationTime"]
    assert go_back(records).build == "b1"
    assert pointed() == first
    with pytest.raises(RefusedError, match="no release before this one"):
        go_back(records)
    assert go_back(records, to="b1").state == "done"
    fourth = publish(records, make_image("b4"), "b4")
    assert pointed() == fourth
    assert go_back(records).build == "b1"


@pytest.mark.parametrize("half_done", ["release", "rollback"])
def test_a_rollback_makes_regions_agree_again(records, half_done):
    first = publish(records, make_image("b1"), "b1")
    second = publish(records, make_image("b2"), "b2")
    newer = make_image("b3")
    tell("faults", [fault("PutParameter", "denied", "eu-west-1")])
    again = (lambda: publish(records, newer, "b3")) if half_done == "release" else lambda: go_back(records)
    with pytest.raises(PartialError, match="1 of 2 regions failed; the channel points at"):
        again()
    assert (
        len({first[r] == i for r, i in pointed().items()} | {second[r] == i for r, i in pointed().items()})
        == 2
    )
    overview = read_channels(Cloud(), [HOME])
    assert any("another region points at" in p for row in overview.rows for p in row.problems)
    go_back(records)
    assert pointed() == (second if half_done == "release" else first)


def test_a_rollback_to_an_image_that_is_gone_moves_nothing(records):
    first = publish(records, make_image("b1"), "b1")
    second = publish(records, make_image("b2"), "b2")
    Cloud("eu-west-1").client("ec2").deregister_image(ImageId=first["eu-west-1"])
    with pytest.raises(UnavailableError, match="is gone in eu-west-1"):
        go_back(records)
    assert pointed() == second


def test_channels_shows_what_is_wrong(records):
    there = publish(records, make_image("b1"), "b1")
    overview = read_channels(Cloud(), [HOME])  # one region names the others
    assert {row.region: row.image_id for row in overview.rows} == there
    require_consistent(overview)
    ec2 = Cloud("eu-west-1").client("ec2")
    ec2.disable_image_deregistration_protection(ImageId=there["eu-west-1"])
    assert [row.problems for row in read_channels(Cloud(), [HOME]).rows] == [
        (),
        ("the image can be deregistered",),
    ]
    ec2.deregister_image(ImageId=there["eu-west-1"])
    assert [row.problems for row in read_channels(Cloud(), [HOME]).rows] == [(), ("the image is gone",)]
    Cloud("eu-west-1").client("ssm").delete_parameter(Name=POINTER.format("candidate"))
    assert [row.problems for row in read_channels(Cloud(), [HOME]).rows] == [
        (),
        ("the channel is missing here",),
    ]
    with pytest.raises(CheckFailedError, match="1 problem with the channels"):
        require_consistent(read_channels(Cloud(), [HOME]))
    tell("faults", [fault("GetParametersByPath", "denied", "eu-west-1")])
    with pytest.raises(PartialError, match="eu-west-1 did not answer"):
        require_consistent(read_channels(Cloud(), REGIONS))
    tell("faults", [fault("GetParametersByPath", "denied")])
    with pytest.raises(UnavailableError, match="can't read the channels in us-west-2"):
        require_consistent(read_channels(Cloud(), [HOME]))
