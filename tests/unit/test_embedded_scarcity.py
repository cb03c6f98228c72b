"""Scripted scarcity: EC2's refusals by zone, type and market, and the walk of a launch over them."""

import json

import pytest
from botocore.exceptions import ClientError

from gpukiln.clouds.embedded import clean, scarcity
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import BusyError, UnavailableError, UsageError
from gpukiln.instances.launch import launch
from tests.support.release_cloud import Cloud, running, tell

TYPE = "g5.xlarge"
ZONES = ["us-west-2a", "us-west-2b", "us-west-2c"]  # that have it, as moto's offerings say
WORKS = "Our system will be working on provisioning additional capacity."
SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


@pytest.fixture
def home(tmp_path):
    return Layout(tmp_path)


def left():
    """What a launch could leave behind."""
    ec2 = Cloud().client("ec2")
    return (
        ec2.describe_volumes()["Volumes"],
        ec2.describe_network_interfaces()["NetworkInterfaces"],
        ec2.describe_instances()["Reservations"],
    )


def subnet(zone):
    only = [{"Name": "availability-zone", "Values": [zone]}]
    return Cloud().client("ec2").describe_subnets(Filters=only)["Subnets"][0]["SubnetId"]


def start(image_id, *, count=1, **asked):
    asked = {"InstanceType": TYPE, "MinCount": count, "MaxCount": count, **asked}
    made = Cloud().client("ec2").run_instances(ImageId=image_id, **asked)["Instances"]
    return {one["Placement"]["AvailabilityZone"] for one in made}


def refusal(image_id, **asked):
    before = left()
    with pytest.raises(ClientError) as refused:
        start(image_id, **asked)
    assert left() == before
    answer = refused.value.response
    assert answer["Error"]["Code"] == "InsufficientInstanceCapacity"
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 500
    return answer["Error"]["Message"]


def test_a_zone_without_capacity_names_those_that_have_some(layout, image_id):
    scarcity.add(layout, f"us-west-2a:{TYPE}")
    named = (
        f"We currently do not have sufficient {TYPE} capacity in the Availability Zone you requested "
        f"(us-west-2a). {WORKS} You can currently get {TYPE} capacity by not specifying an Availability Zone "
        "in your request or choosing us-west-2b, us-west-2c."
    )
    assert refusal(image_id, SubnetId=subnet("us-west-2a")) == named
    assert refusal(image_id, Placement={"AvailabilityZone": "us-west-2a"}) == named
    nic = {"DeviceIndex": 0, "SubnetId": subnet("us-west-2a")}
    assert refusal(image_id, NetworkInterfaces=[nic]) == named
    assert refusal(image_id, SubnetId=subnet("us-west-2a"), **SPOT) == named
    assert start(image_id, SubnetId=subnet("us-west-2b")) == {"us-west-2b"}
    assert start(image_id) == {"us-west-2b"}, "a launch that names no zone takes one that has some"
    assert start(image_id, InstanceType="g4dn.xlarge", SubnetId=subnet("us-west-2a")) == {"us-west-2a"}


def test_no_capacity_anywhere(layout, image_id):
    scarcity.add(layout, "*:g5.*")
    lack = f"We currently do not have sufficient {TYPE} capacity in"
    assert refusal(image_id) == f"{lack} zones with support for 'gp3' volumes. {WORKS}"
    named = refusal(image_id, SubnetId=subnet("us-west-2a"))
    assert named == f"{lack} the Availability Zone you requested (us-west-2a). {WORKS}"
    assert refusal(image_id, **SPOT) == "There is no Spot capacity available that matches your request."


def test_the_markets_are_apart_and_a_template_may_name_one(layout, image_id):
    scarcity.add(layout, f"*:{TYPE}:spot")
    assert start(image_id)
    assert "Spot" in refusal(image_id, **SPOT)
    data = {"ImageId": image_id, "InstanceType": TYPE, **SPOT}
    Cloud().client("ec2").create_launch_template(LaunchTemplateName="spot", LaunchTemplateData=data)
    with pytest.raises(ClientError, match="There is no Spot capacity"):
        Cloud().client("ec2").run_instances(
            LaunchTemplate={"LaunchTemplateName": "spot"}, MinCount=1, MaxCount=1
        )
    scarcity.clear(layout)
    scarcity.add(layout, f"*:{TYPE}:on-demand")
    assert start(image_id, **SPOT)
    refusal(image_id)


def test_some_launches_still_start_and_all_of_one_or_none(layout, image_id):
    scarcity.add(layout, f"us-west-2a:{TYPE}:+2")
    here = {"SubnetId": subnet("us-west-2a")}
    refusal(image_id, count=3, **here)
    with pytest.raises(ClientError, match="InvalidGroup"):  # what fails for another reason takes none
        start(image_id, SecurityGroupIds=["sg-0123456789abcdef0"], **here)
    assert [str(rule) for rule in scarcity.script(layout).lines] == [f"us-west-2a:{TYPE}:+2"]
    start(image_id, count=2, **here)
    assert [str(rule) for rule in scarcity.script(layout).lines] == [f"us-west-2a:{TYPE}"]
    refusal(image_id, **here)


def test_capacity_comes_back_for_another_launch_and_not_for_the_same_sent_again(layout, image_id):
    scarcity.add(layout, f"us-west-2a:{TYPE}:1")
    here = {"SubnetId": subnet("us-west-2a")}
    refusal(image_id, ClientToken="one", **here)
    refusal(image_id, ClientToken="one", **here)
    [rule] = scarcity.script(layout).lines
    assert (str(rule), rule.spent) == (f"us-west-2a:{TYPE}:0", True)
    assert start(image_id, ClientToken="two", **here) == {"us-west-2a"}
    scarcity.add(layout, "us-west-2b:p4d.*")
    assert [str(rule) for rule in scarcity.script(layout).lines] == ["us-west-2b:p4d.*"]


def test_a_walk_goes_on_where_there_is_capacity(layout, image_id):
    scarcity.add(layout, f"us-west-2a:{TYPE}")
    scarcity.add(layout, f"us-west-2b:{TYPE}:1")
    said = []
    done = launch(Cloud(), {"ImageId": image_id}, instance_types=[TYPE], spot=False, say=said.append)
    assert (done.instance_type, done.zone) == (TYPE, "us-west-2c")
    assert [line.partition(": ")[0] for line in said] == [f"{TYPE} in {zone}" for zone in ZONES[:2]]
    asked = [call for call in tell("calls") if call[1] == "RunInstances"]
    assert len(asked) == 2 * 2 + 1, "boto3 sends once more what EC2 calls its own fault"
    done = launch(Cloud(), {"ImageId": image_id}, instance_types=[TYPE], spot=True, say=said.append)
    assert (done.zone, done.spot) == ("us-west-2b", True)


def test_a_walk_that_finds_none_says_where_it_looked_and_a_later_one_finds_some(layout, image_id):
    scarcity.add(layout, f"*:{TYPE}:{len(ZONES)}")
    with pytest.raises(BusyError, match=f"no capacity now for {TYPE}") as nowhere:
        launch(Cloud(), {"ImageId": image_id}, instance_types=[TYPE], spot=False, say=lambda _: None)
    assert nowhere.value.exit_code == 75
    assert [detail.partition(":")[0] for detail in nowhere.value.details] == [
        f"{TYPE} in {zone}" for zone in ZONES
    ]
    assert not running()
    done = launch(Cloud(), {"ImageId": image_id}, instance_types=[TYPE], spot=False, say=lambda _: None)
    assert running() == {done.instance_id: done.zone}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("us-west-2a", "not a scarcity rule, wanted ZONE:TYPE"),
        (":p4d.24xlarge", "not a scarcity rule"),
        ("us-west-2z:p4d.24xlarge", "unknown availability zone 'us-west-2z'.*us-west-2d"),
        ("mars-1a:p4d.24xlarge", "unknown availability zone 'mars-1a'"),
        ("us-west-2a:p4d.24xlrge", "unknown instance type 'p4d.24xlrge'"),
        ("us-west-2a:p4x.*", r"unknown instance type 'p4x.\*'"),
        ("us-west-2a:p4d.24xlarge:sport", "unknown market 'sport'; valid: on-demand, spot"),
        ("us-west-2a:p4d.24xlarge:-1", "'-1' is neither a market nor a number"),
        ("us-west-2a:p4d.24xlarge:0", "refuses no launch"),
        ("us-west-2a:p4d.24xlarge:1:2", "'1' and '2'"),
    ],
)
def test_a_rule_that_is_none(home, text, told):
    with pytest.raises(UsageError, match=told):
        scarcity.add(home, text)
    assert not home.scarcity.exists()


@pytest.mark.parametrize(
    "text", ["*:*", "us-west-2a:g7.2xlarge", "eu-west-1b:g6f.*:spot:3:+2", "*:g5g.xlarge:+1"]
)
def test_a_rule_is_shown_as_it_is_typed(home, text):
    assert str(scarcity.add(home, text)) == text
    assert [str(rule) for rule in scarcity.script(home).lines] == [text]


def test_rules_are_replaced_and_removed(home):
    for text in ("*:g5.xlarge:spot", "*:g5.xlarge:on-demand:2", "*:g5.xlarge:spot:1", "us-west-2a:p5.*"):
        scarcity.add(home, text)
    assert len(scarcity.script(home).lines) == 3
    with pytest.raises(UsageError, match="unknown scarcity rule"):
        scarcity.clear(home, "us-west-2a:p4d.*")
    assert [str(rule) for rule in scarcity.clear(home, "*:g5.xlarge:spot")] == ["*:g5.xlarge:spot:1"]
    assert [str(rule) for rule in scarcity.clear(home, "*:g5.xlarge")] == ["*:g5.xlarge:on-demand:2"]
    cleaning = clean.plan_cleaning(home, images=False, base=False, released=False)
    assert cleaning.lines == [f"{home.scarcity}  scarcity: us-west-2a:p5.*"]
    assert [str(rule) for rule in scarcity.clear(home)] == ["us-west-2a:p5.*"]
    assert not home.scarcity.exists()
    assert scarcity.clear(home) == ()
    with pytest.raises(UsageError, match="unknown scarcity rule"):
        scarcity.clear(home, "*:g5.xlarge")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"rules": [{"zone": "*"}]}', json.dumps({"rules": [], "more": 1}), "[" * 100_000],
)
def test_a_damaged_file_is_told_refuses_launches_and_can_be_removed(layout, image_id, text):
    layout.scarcity.write_text(text)
    for ask in (scarcity.script, lambda layout: scarcity.add(layout, "*:*")):
        with pytest.raises(UnavailableError, match="can't be read") as damaged:
            ask(layout)
        assert str(layout.scarcity) in damaged.value.message
        assert "cloud.gpus all --plenty all" in damaged.value.hint
    with pytest.raises(ClientError, match=r"InternalError.*scarcity\.json.*can't be read.*--plenty"):
        start(image_id)
    assert layout.scarcity.read_text() == text
    cleaning = clean.plan_cleaning(layout, images=False, base=False, released=False)
    assert cleaning.files[layout.scarcity] == "scarcity: damaged"
    assert scarcity.clear(layout) == ()
    assert start(image_id)


@pytest.mark.parametrize("name", ["g7.2xlarge", "g6f.large", "p5.48xlarge"])
def test_every_type_of_the_catalogue_is_known_and_offered(image_id, name):
    ec2 = Cloud().client("ec2")
    [described] = ec2.describe_instance_types(InstanceTypes=[name])["InstanceTypes"]
    assert described["InstanceType"] == name
    assert described["GpuInfo"]["Gpus"][0]["MemoryInfo"]["SizeInMiB"]
    only = [{"Name": "instance-type", "Values": [name]}]
    for kind in ("region", "availability-zone", "availability-zone-id"):
        assert ec2.describe_instance_type_offerings(LocationType=kind, Filters=only)["InstanceTypeOfferings"]
    said = []
    done = launch(Cloud(), {"ImageId": image_id}, instance_types=[name], spot=False, say=said.append)
    assert (done.instance_type, said) == (name, [])
    [reservation] = ec2.describe_instances(InstanceIds=[done.instance_id])["Reservations"]
    assert reservation["Instances"][0]["InstanceType"] == name
    ec2.terminate_instances(InstanceIds=[done.instance_id])
