"""Whether an image runs on a node: each answer, and where the node's driver is known from."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from moto import mock_aws

from gpukiln.commands import docker_check
from gpukiln.docker import check
from gpukiln.docker.check import Node, check_container
from gpukiln.errors import CheckFailedError, IncompatibleError, UsageError
from gpukiln.images.builds import Bake, Record
from tests.support.exit_codes import code_of


@pytest.mark.parametrize(
    ("cuda", "driver", "gpus"),
    [("12.1", "535.309.01", ("t4", "h100")), ("12.1", "525.60.13", ("t4",)), ("13.0", "580.65.06", ())],
)
def test_what_runs_is_no_error(cuda: str, driver: str, gpus: tuple[str, ...]) -> None:
    check_container("i", cuda, Node("n", driver, gpus)).require_works()


@pytest.mark.parametrize(
    ("cuda", "driver", "gpus", "message", "hint"),
    [
        ("12.1", "580.178.04", ("b200",), "can't compile for the B200 .* 10.0", "CUDA 12.8 or later"),
        ("13.0", "580.178.04", ("v100",), "can't compile for the V100", r"CUDA 12\.x or earlier"),
        ("12.1", "535.309.01", ("h200",), "does not know the H200", "branch=580"),
        ("11.8", "535.309.01", ("k80",), "has dropped the Tesla K80", "branch=470"),
        ("12.1", "535.309.01", ("radeon-pro-v520",), "is AMD's", "NVIDIA GPU"),
        ("13.0", "575.57.08", ("rtx-pro-6000-workstation",), "needs driver 580.65.06", "data-centre boards"),
    ],
)
def test_what_can_never_run(cuda: str, driver: str, gpus: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(IncompatibleError, match=message) as caught:
        check_container("i", cuda, Node("n", driver, gpus)).require_works()
    assert re.search(hint, caught.value.hint)


def test_every_problem_is_named() -> None:
    with pytest.raises(IncompatibleError) as caught:
        check_container("i", "12.1", Node("n", "535.309.01", ("t4", "b200"))).require_works()
    assert "does not know the B200" in caught.value.message
    assert "can't compile for the B200" in caught.value.details[0]


def test_what_needs_a_package_does_not_run_as_it_is() -> None:
    judged = check_container("i", "12.1", Node("n", "520.61.05", ("t4",)))
    with pytest.raises(CheckFailedError, match=r"needs driver 525\.60\.13") as caught:
        judged.require_works()
    assert "cuda-compat-12-1" in caught.value.hint


def test_the_command_says_the_rule_as_json_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    docker_check.DockerCheck(driver="535.309.01", instance_types="g4dn.xlarge,g5.xlarge", json=True).run()
    document = json.loads(capsys.readouterr().out)
    assert document["cuda"] == "12.1"
    assert document["node"]["gpus"] == ["t4", "a10g"]
    assert document["support"]["way"] == "native"
    assert (
        code_of(docker_check.DockerCheck, driver="535.309.01", gpu="b200", json=True)
        == IncompatibleError.exit_code
    )
    assert [row["id"] for row in json.loads(capsys.readouterr().out)["findings"]] == [
        "gpu-too-new",
        "cuda-gpu",
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"driver": "535.309.01", "ami": "ami-1"}, {"driver": "1", "gpu": "t4", "instance_types": "x"}],
)
def test_one_node_must_be_named(options: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(docker_check.DockerCheck, **options) == UsageError.exit_code
    assert "next: " in capsys.readouterr().err


@mock_aws
def test_the_driver_of_an_ami_is_read_from_its_tags() -> None:
    ec2 = boto3.client("ec2", "us-west-2")
    image = ec2.register_image(Name="name", RootDeviceName="/dev/xvda")["ImageId"]
    cloud: Any = SimpleNamespace(name="aws", region="us-west-2", client=lambda _: ec2)
    with pytest.raises(UsageError, match="no tag gpukiln:driver"):
        check.node_of_ami(cloud, image)
    ec2.create_tags(Resources=[image], Tags=[{"Key": "gpukiln:driver", "Value": "580.178.04"}])
    assert check.node_of_ami(cloud, image).driver == "580.178.04"
    with pytest.raises(UsageError, match="has no AMI ami-00000000"):
        check.node_of_ami(cloud, "ami-00000000")


def test_a_record_names_what_was_really_installed_and_for_which_gpus() -> None:
    bake = Bake("ami-1", "n", "us-west-2", "6.1", {"nvidia_driver": {"version": "535.309.01"}}, {})
    plan: Any = SimpleNamespace(instance_types=("g4dn.xlarge", "g4dn.2xlarge", "g5.xlarge"))
    node = check.node_of_record(Record("b", "verified", plan, bake))
    assert (node.driver, node.gpus) == ("535.309.01", ("t4", "a10g"))
    with pytest.raises(UsageError, match="has no image: failed"):
        check.node_of_record(Record("b", "failed", plan))
    with pytest.raises(UsageError, match="has no NVIDIA driver"):
        check.node_of_record(Record("b", "baked", plan, replace(bake, components={})))
