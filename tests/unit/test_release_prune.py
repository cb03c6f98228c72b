"""Prune removes what nobody needs, says why for each image, and finishes what an earlier run began."""

import pytest

from gpukiln.errors import PartialError, RefusedError, UnavailableError, UsageError
from gpukiln.release import prune as pruning
from gpukiln.release.in_use import images_in_files
from gpukiln.release.prune import PruneRules, prune, require_complete
from gpukiln.release.publish import release
from tests.support.release_cloud import (
    HOME,
    Cloud,
    changes,
    fault,
    images,
    make_image,
    quiet,
    release_spec,
    server,
    tell,
)

pytestmark = pytest.mark.usefixtures("empty_cloud")


def clean(records, *, remove=True, regions=(HOME,), **more):
    options = {"older_than_days": 30, "keep": None, "limit": 20, "in_use": {}, "without_channels": False}
    done = prune(Cloud(), list(regions), PruneRules(**{**options, **more}), records, remove=remove)
    require_complete(done)
    return {item.image_id: (item.action, item.reason) for one in done for item in one.items}


def publish(records, build, **more):
    image_id = make_image(build, days_old=90, **more)
    release(release_spec(image_id, build, regions=(HOME,)), Cloud(), records, quiet())
    return image_id


def snapshots(region=HOME):
    answer = Cloud(region).client("ec2").describe_snapshots(Filters=[{"Name": "tag-key", "Values": ["Name"]}])
    return {snapshot["SnapshotId"] for snapshot in answer["Snapshots"]}


def test_every_image_has_a_reason_and_only_the_needless_go(records):
    published = [publish(records, f"b{n}") for n in range(1, 5)]
    client = Cloud().client
    ec2, autoscaling = client("ec2"), client("autoscaling")
    old = {
        name: make_image(name, days_old=90)
        for name in ("instance", "template", "pinned", "config", "karpenter", "shared", "guarded", "nobody")
    }
    young, broken = make_image("young", days_old=3), make_image("broken", days_old=3)
    tell("state", {"region": HOME, "image_id": broken, "state": "failed"})
    ec2.run_instances(ImageId=old["instance"], MinCount=1, MaxCount=1)
    template = ec2.create_launch_template(
        LaunchTemplateName="nodes", LaunchTemplateData={"ImageId": old["template"]}
    )["LaunchTemplate"]
    ec2.create_launch_template_version(  # the newest version names another one
        LaunchTemplateId=template["LaunchTemplateId"], LaunchTemplateData={"ImageId": published[-1]}
    )
    client("ssm").put_parameter(Name="/team/gpu", Type="String", Value=old["pinned"])
    ec2.create_launch_template(
        LaunchTemplateName="team", LaunchTemplateData={"ImageId": "resolve:ssm:/team/gpu:1"}
    )
    autoscaling.create_launch_configuration(
        LaunchConfigurationName="legacy", ImageId=old["config"], InstanceType="g5.xlarge"
    )
    autoscaling.create_auto_scaling_group(
        AutoScalingGroupName="workers",
        LaunchConfigurationName="legacy",
        MinSize=0,
        MaxSize=0,
        AvailabilityZones=[f"{HOME}a"],
    )
    user = {"LaunchPermission": {"Add": [{"UserId": "111122223333"}]}}
    ec2.modify_image_attribute(ImageId=old["shared"], **user)
    ec2.enable_image_deregistration_protection(ImageId=old["guarded"])
    everything = {"keep": 1, "in_use": {old["karpenter"]: ["the list classes.yaml"]}}

    changes()
    planned = clean(records, remove=False, **everything)
    assert changes() == []
    reasons = {
        published[3]: "candidate of eks-gpu 1.34 points at it",
        published[2]: "a release that candidate of eks-gpu 1.34 can be rolled back to",
        old["template"]: "used by launch template nodes version 1",
        old["pinned"]: "used by launch template team version 1",
        old["config"]: "used by launch configuration legacy of Auto Scaling group workers",
        old["karpenter"]: "used by the list classes.yaml",
        old["shared"]: "shared with 111122223333",
        old["guarded"]: "it is available and protected from deregistration",
        young: "created 3 days ago, less than 30",
    }
    assert {image: reason for image, (action, reason) in planned.items() if action == "keep"} == {
        **reasons,
        old["instance"]: planned[old["instance"]][1],
    }
    assert planned[old["instance"]][1].startswith("used by instance i-")
    doomed = {published[0], published[1], old["nobody"], broken}
    assert {image for image, (action, _) in planned.items() if action == "remove"} == doomed
    assert planned[old["nobody"]] == ("remove", "90 days old; no channel needs it and no resource uses it")
    assert planned[broken] == ("remove", "it is failed")

    done = clean(records, **everything)
    assert {image for image, (action, _) in done.items() if action == "removed"} == doomed
    assert set(images(HOME)) == set(planned) - doomed
    gone = {image.replace("ami-", "snap-") for image in doomed}
    assert not gone & snapshots()
    assert not any(server()[1].snapshot(snapshot).exists() for snapshot in gone)  # their disks too
    assert not {image for image, (action, _) in clean(records, **everything).items() if action == "removed"}


def test_a_run_removes_the_oldest_and_not_more_than_its_limit(records):
    publish(records, "live")
    ages = {make_image(f"old{days}", days_old=days): days for days in (40, 60, 50)}
    done = clean(records, limit=2)
    assert sorted(ages[image] for image, (action, _) in done.items() if action == "removed") == [50, 60]
    assert "over the limit of 2 a run" in {reason for _, reason in done.values()}
    assert [action for action, _ in clean(records, limit=2).values()].count("removed") == 1


def test_a_listing_that_is_empty_or_cut_short_removes_nothing(records, monkeypatch):
    old = [make_image(f"b{n}", days_old=90) for n in range(3)]
    with pytest.raises(RefusedError, match="us-west-2 has no channel"):
        clean(records)
    live = publish(records, "live")
    tell("faults", [fault("DescribeImages", "empty")])
    with pytest.raises(RefusedError, match=f"point at {live}, which the list of images lacks"):
        clean(records)
    monkeypatch.setattr(pruning, "PAGE", 2)
    tell("faults", [fault("DescribeImages", "broken", skip=1)])  # the second page
    with pytest.raises(UnavailableError, match="can't prune in us-west-2: DescribeImages"):
        clean(records)
    for action in ("DescribeInstances", "DescribeLaunchTemplates", "DescribeLaunchConfigurations"):
        tell("faults", [fault(action, "denied")])
        with pytest.raises(UnavailableError, match=f"can't prune in us-west-2: {action}"):
            clean(records)
    assert {*old, live} == set(images(HOME))
    assert {image for image, (action, _) in clean(records).items() if action == "removed"} == set(old)
    orphan = make_image("never-released", days_old=90)
    assert clean(records, without_channels=True)[orphan][0] == "removed"


@pytest.mark.parametrize("kind", ["denied", "lost"])
@pytest.mark.parametrize("call", ["CreateTags", "DeregisterImage", "DeleteSnapshot"])
def test_a_run_that_was_cut_off_is_finished_by_the_next(records, call, kind):
    publish(records, "live")
    doomed = make_image("old", days_old=90)
    tell("faults", [fault(call, kind)])
    with pytest.raises(PartialError, match="1 removal failed"):
        clean(records)
    tell("faults", [])
    clean(records)
    assert doomed not in images(HOME)
    assert doomed.replace("ami-", "snap-") not in snapshots()


def test_a_failed_region_is_its_own_result(records):
    publish(records, "live")
    doomed = make_image("old", days_old=90)
    tell("faults", [fault("DescribeInstances", "denied", "eu-west-1")])
    with pytest.raises(PartialError, match="1 removal failed"):
        clean(records, regions=(HOME, "eu-west-1"))
    assert doomed not in images(HOME)


def test_a_list_of_images_in_use_must_name_some(tmp_path):
    file = tmp_path / "classes.json"
    file.write_text('{"amis": [{"id": "ami-0123456789abcdef0"}]}')
    assert images_in_files([str(file)]) == {"ami-0123456789abcdef0": [f"the list {file}"]}
    file.write_text("{}")
    with pytest.raises(UsageError, match="has no image id in it"):
        images_in_files([str(file)])
    with pytest.raises(UsageError, match="can't be read"):
        images_in_files([str(tmp_path / "none")])
