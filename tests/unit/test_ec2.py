"""Images, instances and waiting: one implementation, which everything above the clouds uses."""

import ast
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from gpukiln.catalog.load import ROOT
from gpukiln.clouds import ec2 as calls
from gpukiln.errors import UnavailableError, UsageError

PACKAGE = ROOT / "gpukiln"
BASE, GONE = "ami-0123456789abcdef0", "ami-00000000000000000"  # the first is moto's
HERE = "--region says where to look"


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # a thousand images, loaded for every test
    with mock_aws():
        yield SimpleNamespace(
            name="aws", region="us-west-2", client=lambda name: boto3.client(name, region_name="us-west-2")
        )


def made(cloud: Any, count: int) -> list[str]:
    ec2 = cloud.client("ec2")
    image = ec2.register_image(Name="base", RootDeviceName="/dev/xvda")["ImageId"]
    [machine] = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"]
    asked = [{"InstanceId": machine["InstanceId"], "Name": f"image{number}"} for number in range(count)]
    return sorted(ec2.create_image(**one)["ImageId"] for one in asked)


def test_an_image_by_its_id_and_one_that_is_gone(cloud: Any) -> None:
    [image_id] = made(cloud, 1)
    found = calls.image(cloud, image_id)
    assert found is not None
    assert (found["ImageId"], found["Name"]) == (image_id, "image0")
    assert calls.image(cloud, GONE) is None
    assert calls.require_image(cloud, image_id, hint=HERE) == found
    with pytest.raises(UsageError, match=f"aws has no AMI {GONE} in us-west-2") as refused:
        calls.require_image(cloud, GONE, hint=HERE)
    assert refused.value.hint == HERE


def test_images_come_at_once_or_in_pages(cloud: Any) -> None:
    ids, ec2 = made(cloud, 3), cloud.client("ec2")
    asked: list[Any] = []
    ec2.meta.events.register(
        "before-call.ec2.DescribeImages", lambda params, **_: asked.append(params["body"])
    )
    for size in (0, 2):
        found = calls.images(ec2, {"name": ["image*"]}, page_size=size, Owners=["self"])
        assert sorted(image["ImageId"] for image in found) == ids
    assert "MaxResults" not in asked[0]  # the filter alone: no page
    assert asked[1]["MaxResults"] == 2


def test_the_answer_of_aws_and_what_was_tried_are_in_the_error() -> None:
    def refuse(**_: Any) -> Any:
        raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "DescribeImages")

    refusing = SimpleNamespace(client=lambda _: SimpleNamespace(describe_images=refuse))
    with pytest.raises(UnavailableError, match=f"can't look up {BASE}: DescribeImages answered Unauth"):
        calls.image(refusing, BASE)  # type: ignore[arg-type]


def test_an_instance_that_ec2_does_not_show_yet_is_pending(cloud: Any) -> None:
    made(cloud, 1)
    [there] = calls.instances(cloud.client("ec2"), {})
    assert calls.instance(cloud, there["InstanceId"])["State"]["Name"] == "running"
    assert calls.instance(cloud, "i-0123456789abcdef0") == {"State": {"Name": "pending"}}


class Time:
    """Stands still but for pauses, and for what a question takes."""

    def __init__(self, asking_s: float = 0.0, answer_after: int = 999) -> None:
        self.now, self.pauses, self.looks = 100.0, [], 0
        self._asking_s, self._answer_after = asking_s, answer_after

    def ask(self) -> str | None:
        self.looks += 1
        self.now += self._asking_s
        return "there" if self.looks > self._answer_after else None

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def wait(self, **options: Any) -> str:
        late = UnavailableError("late")
        return calls.wait_until(self.ask, lambda: late, clock=lambda: self.now, sleep=self.sleep, **options)


def test_the_answer_ends_a_wait() -> None:
    time = Time(answer_after=2)
    assert time.wait(timeout_s=60, pause_s=5) == "there"
    assert time.pauses == [5, 5]


def test_a_wait_in_vain_asks_a_last_time_when_it_is_over() -> None:
    time = Time()
    with pytest.raises(UnavailableError, match="late"):
        time.wait(timeout_s=12, pause_s=5)
    assert (time.pauses, time.looks) == ([5, 5, 2], 4)


def test_the_time_that_questions_take_counts() -> None:
    time = Time(asking_s=10)
    with pytest.raises(UnavailableError, match="late"):
        time.wait(timeout_s=25, pause_s=5)
    assert (time.pauses, time.looks) == ([5], 2)


def test_pauses_double_up_to_the_longest() -> None:
    time = Time(answer_after=5)
    assert time.wait(timeout_s=600, pause_s=0.5, longest_pause_s=3) == "there"
    assert time.pauses == [0.5, 1, 2, 3, 3]


def test_without_a_clock_what_was_slept_counts() -> None:
    pauses: list[float] = []
    with pytest.raises(UnavailableError, match="late"):
        calls.wait_until(
            lambda: None, lambda: UnavailableError("late"), timeout_s=3600, pause_s=600, sleep=pauses.append
        )
    assert pauses == [600] * 6


def test_nothing_else_asks_for_images() -> None:
    """Each of these lists shrinks only: what is new uses gpukiln/clouds/ec2.py."""
    asking = set()
    for path in PACKAGE.rglob("*.py"):
        where = str(path.relative_to(PACKAGE))
        if where.startswith("clouds/embedded/"):  # they answer that call
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if named == "describe_images":
                asking.add(where)
    assert asking == {"clouds/ec2.py"}
