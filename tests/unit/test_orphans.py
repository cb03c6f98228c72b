"""What killed builds left is found by tag and deadline, whoever made it, and nothing else (on moto)."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from gpukiln.commands import cloud as commands
from gpukiln.instances.orphans import find_orphans
from gpukiln.instances.tags import build_tags, tag_list, tag_specifications
from tests.support.exit_codes import code_of

NOW = datetime.now(UTC)
OLD = (NOW - timedelta(days=2)).strftime("%Y%m%d-%H%M%S")


@pytest.fixture
def ec2(endpoint):
    endpoint.forget()
    yield endpoint
    endpoint.forget()
    everything = [{"Name": "tag-key", "Values": ["gpukiln:build"]}]
    client = endpoint.client("ec2")
    for reservation in client.describe_instances(Filters=everything)["Reservations"]:
        client.terminate_instances(InstanceIds=[one["InstanceId"] for one in reservation["Instances"]])
    for key in client.describe_key_pairs()["KeyPairs"]:
        client.delete_key_pair(KeyName=key["KeyName"])
    for group in client.describe_security_groups(Filters=everything)["SecurityGroups"]:
        client.delete_security_group(GroupId=group["GroupId"])
    for volume in client.describe_volumes(Filters=everything)["Volumes"]:
        client.delete_volume(VolumeId=volume["VolumeId"])


def make(ec2, build_id, tags):
    """One of everything that a build starts; returns the ids in the order in which they can go."""
    client = ec2.client("ec2")
    key = client.create_key_pair(KeyName=build_id, TagSpecifications=tag_specifications(tags, "key-pair"))
    group = client.create_security_group(
        GroupName=build_id, Description="x", TagSpecifications=tag_specifications(tags, "security-group")
    )
    volume = client.create_volume(
        AvailabilityZone="us-west-2a", Size=1, TagSpecifications=tag_specifications(tags, "volume")
    )
    [instance] = client.run_instances(
        ImageId="ami-0123456789abcdef0",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=tag_specifications(tags, "instance"),
    )["Instances"]
    return [instance["InstanceId"], volume["VolumeId"], key["KeyName"], group["GroupId"]]


@pytest.fixture
def sweep(ec2, monkeypatch, capsys):
    """Run cloud.sweep; returns exit code, the JSON document and standard error."""
    monkeypatch.setattr("gpukiln.clouds.select.make_cloud", lambda *_args, **_options: ec2)

    def run(**options):
        code = code_of(commands.CloudSweep, json=True, **options)
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


def test_only_what_is_past_its_deadline_is_listed_and_removed_when_told(ec2, sweep):
    dead = make(ec2, "dead", build_tags("dead", "bake", NOW - timedelta(minutes=1)))
    living = make(ec2, "living", build_tags("living", "verify", NOW + timedelta(days=1)))
    foreign = make(ec2, "foreign", {"Name": "somebody else's"})
    code, document, shown = sweep()
    assert (code, document["removed"]) == (0, [])
    assert [one["id"] for one in document["found"]] == dead
    assert "--yes removes these 4" in shown
    assert "its deadline was" in shown
    assert [one.id for one in find_orphans(ec2)] == dead
    code, document, _ = sweep(yes=True, dry_run=True)
    assert document["removed"] == []
    code, document, _ = sweep(yes=True)
    assert (code, document["removed"]) == (0, dead)
    code, document, shown = sweep(yes=True)
    assert (code, document["found"]) == (0, [])
    assert "nothing is left" in shown
    states = {
        one["InstanceId"]: one["State"]["Name"]
        for reservation in ec2.client("ec2").describe_instances()["Reservations"]
        for one in reservation["Instances"]
    }
    assert (states[dead[0]], states[living[0]], states[foreign[0]]) == ("terminated", "running", "running")
    assert {key["KeyName"] for key in ec2.client("ec2").describe_key_pairs()["KeyPairs"]} == {
        "living",
        "foreign",
    }


def test_without_a_deadline_the_builds_id_says_how_old_it_is(ec2):
    old, unknown = f"{OLD}-eks-gpu-ab12", "no-time-in-it"
    new = f"{NOW:%Y%m%d-%H%M%S}-eks-gpu-ab12"
    made = {build: make(ec2, build, {"gpukiln:build": build}) for build in (old, new, unknown)}
    assert [one.id for one in find_orphans(ec2)] == made[old]


def test_snapshots_of_failed_builds_go_and_those_of_images_stay(ec2):
    client = ec2.client("ec2")
    volume = client.create_volume(AvailabilityZone="us-west-2a", Size=1)["VolumeId"]
    orphan, foreign = (client.create_snapshot(VolumeId=volume)["SnapshotId"] for _ in range(2))
    [instance] = client.run_instances(ImageId="ami-0123456789abcdef0", MinCount=1, MaxCount=1)["Instances"]
    image = client.create_image(InstanceId=instance["InstanceId"], Name="kept")["ImageId"]
    [device] = client.describe_images(ImageIds=[image])["Images"][0]["BlockDeviceMappings"]
    used = device["Ebs"]["SnapshotId"]
    client.create_tags(Resources=[orphan, used], Tags=tag_list({"gpukiln:digest": "sha256:0"}))
    assert find_orphans(ec2) == []  # an image may still be made of it
    later = NOW + timedelta(days=2)
    assert [(one.kind, one.id) for one in find_orphans(ec2, now=later)] == [("snapshot", orphan)]
    assert foreign != orphan


def test_one_that_cannot_go_stops_no_other_and_a_second_run_completes(ec2, sweep):
    _, volume, _, _ = make(ec2, "dead", build_tags("dead", "bake", NOW - timedelta(minutes=1)))
    ec2.refuse = lambda call: (
        ("VolumeInUse", "it is being detached") if call.get("Action") == "DeleteVolume" else None
    )
    code, document, shown = sweep(yes=True)
    assert (code, document) == (5, None)
    assert "3 of 4 orphans were removed" in shown
    assert "VolumeInUse" in shown
    ec2.forget()
    code, document, _ = sweep(yes=True)
    assert (code, document["removed"]) == (0, [volume])


def test_what_somebody_else_removed_meanwhile_is_no_error(ec2, sweep):
    make(ec2, "dead", build_tags("dead", "bake", NOW - timedelta(minutes=1)))
    ec2.refuse = lambda call: (
        ("InvalidGroup.NotFound", "gone") if call.get("Action") == "DeleteSecurityGroup" else None
    )
    code, document, _ = sweep(yes=True)
    assert (code, len(document["removed"])) == (0, 4)
