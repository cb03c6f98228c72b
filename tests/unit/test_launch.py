"""A machine to verify on: which types and zones are tried, what a refusal of EC2's means, and that it ends.

The refusals come from the HTTP endpoint, so boto3's own parsing and retries are part of every test.
"""

import base64
import re
import threading
from dataclasses import replace
from datetime import UTC, datetime
from socketserver import BaseRequestHandler, TCPServer

import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason

from gpukiln.clouds import select
from gpukiln.commands import ami_verify
from gpukiln.errors import RefusedError
from gpukiln.images.builds import Builds, Record
from gpukiln.instances.access import machine_from_image
from gpukiln.instances.launch import LaunchCandidate, launch_in_order
from gpukiln.instances.orphans import builds_with_orphans
from tests.support.endpoint import serve
from tests.support.exit_codes import code_of
from tests.support.plans import BAKE

TYPES = ("g4dn.xlarge", "g5.xlarge")


class Greeting(BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"SSH-2.0-test\r\n")


@pytest.fixture(scope="module")
def endpoint():
    """moto without its thousand images, with an SSH server behind every address."""
    with pytest.MonkeyPatch.context() as patch, TCPServer(("127.0.0.1", 0), Greeting) as sshd:
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        threading.Thread(target=sshd.serve_forever, args=(0.05,), daemon=True).start()
        with serve() as endpoint:
            endpoint.ssh_port = sshd.server_address[1]
            yield endpoint
        sshd.shutdown()  # a thread left in accept() takes the next listener's connections


@pytest.fixture
def ec2(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    endpoint.forget()
    return endpoint


def boot(ec2, *, spot=False, simulated=False, types=TYPES):
    """Boot a machine as a verification does; returns what it is, and what EC2 says of it meanwhile."""
    with machine_from_image(
        ec2,
        "ami-0123456789abcdef0",
        build_id="20261121-100000-eks-gpu-ab12",
        instance_types=types,
        user="admin",
        say=lambda _: None,
        spot=spot,
        simulated=simulated,
    ) as (_, launched):
        [reservation] = ec2.client("ec2").describe_instances(InstanceIds=[launched.instance_id])[
            "Reservations"
        ]
    return launched, reservation["Instances"][0]


def tried(ec2):
    subnets = {s["SubnetId"]: s["AvailabilityZone"] for s in ec2.client("ec2").describe_subnets()["Subnets"]}
    return [(call["InstanceType"], subnets[call["SubnetId"]]) for call in ec2.asked("RunInstances")]


def refuse_runs(ec2, code, *, types=TYPES):
    ec2.refuse = lambda call: (
        (code, "no") if call.get("Action") == "RunInstances" and call["InstanceType"] in types else None
    )


def test_the_first_type_is_taken_where_it_is_offered(ec2):
    launched, seen = boot(ec2)
    assert (launched.instance_type, launched.spot) == ("g4dn.xlarge", False)
    assert seen["ImageId"] == "ami-0123456789abcdef0"
    assert seen["Placement"]["AvailabilityZone"] == launched.zone
    assert len(ec2.asked("RunInstances")) == 1
    assert builds_with_orphans(ec2) == set()


@pytest.mark.parametrize("simulated", [False, True])
def test_simulated_gpus_are_asked_for_by_a_tag_of_the_instance(ec2, simulated):
    _, seen = boot(ec2, simulated=simulated)
    tags = {tag["Key"]: tag["Value"] for tag in seen["Tags"]}
    assert tags.get("gpukiln:gpus") == ("simulated" if simulated else None)


def test_the_machine_ends_itself_at_its_deadline(ec2):
    _, seen = boot(ec2)
    tags = {tag["Key"]: tag["Value"] for tag in seen["Tags"]}
    assert tags["gpukiln:owner"]
    [call] = ec2.asked("RunInstances")
    assert call["InstanceInitiatedShutdownBehavior"] == "terminate"
    script = base64.b64decode(call["UserData"]).decode()
    epoch = int(re.search(r"left=\$\(\( (\d+) ", script)[1])
    assert datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") == tags["gpukiln:deadline"]
    assert "text/cloud-boothook" in script


def test_without_capacity_every_zone_is_tried_and_then_the_next_type(ec2):
    refuse_runs(ec2, "InsufficientInstanceCapacity", types=TYPES[:1])
    ec2.status = (
        "500 Internal Server Error"  # so EC2 answers it, and boto3 tries again what it takes for a fault
    )
    launched, _ = boot(ec2)
    assert launched.instance_type == "g5.xlarge"
    zones = [zone for name, zone in tried(ec2) if name == "g4dn.xlarge"]
    assert zones == sorted(zones)
    assert len(set(zones)) >= 3
    assert len(zones) == 2 * len(set(zones))


def test_a_spot_instance_is_asked_for_once_and_ends_when_interrupted(ec2):
    launched, _ = boot(ec2, spot=True)
    assert launched.spot
    [call] = ec2.asked("RunInstances")
    assert call["InstanceMarketOptions.MarketType"] == "spot"
    assert call["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"


def test_a_quota_counts_in_every_zone(ec2):
    refuse_runs(ec2, "VcpuLimitExceeded", types=TYPES[:1])
    launched, _ = boot(ec2)
    assert launched.instance_type == "g5.xlarge"
    assert [name for name, _ in tried(ec2)] == ["g4dn.xlarge", "g5.xlarge"]


def walked(ec2, spots):
    """Walk over one zone for each market in turn; each try has a token of its own."""
    subnet = ec2.client("ec2").describe_subnets()["Subnets"][0]
    tries = [
        LaunchCandidate(TYPES[0], subnet["AvailabilityZone"], subnet["SubnetId"], spot) for spot in spots
    ]
    request = {"ImageId": "ami-0123456789abcdef0"}
    return launch_in_order(ec2, request, tries, say=lambda _: None, token=lambda one: f"token-{one.spot}")


def test_a_quota_counts_in_its_market_alone_and_each_try_has_its_token(ec2):
    refuse_runs(ec2, "MaxSpotInstanceCountExceeded", types=TYPES[:1])
    launched, refusals = walked(ec2, [True, True, False])
    assert launched is None
    assert [one.spot for one in refusals] == [True, False]
    assert [call["ClientToken"] for call in ec2.asked("RunInstances")] == ["token-True", "token-False"]


def test_a_token_that_was_used_for_another_machine_stops_the_walk(ec2):
    refuse_runs(ec2, "IdempotentParameterMismatch", types=TYPES[:1])
    with pytest.raises(RefusedError, match="was used before with other arguments"):
        walked(ec2, [True, False])
    assert len(ec2.asked("RunInstances")) == 1


@pytest.fixture
def verify(planned, ec2, tmp_path, monkeypatch, capsys):
    """Run ami.verify against the endpoint; returns exit code and standard error."""
    builds = Builds(tmp_path)
    build = builds.create("eks-gpu")
    image_id = ec2.client("ec2").register_image(Name=build.id, RootDeviceName="/dev/xvda")["ImageId"]
    build.write(Record(build.id, "failed", planned, replace(BAKE, image_id=image_id)))
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setattr(select, "make_cloud", lambda *_, **__: ec2)

    def run(**options):
        code = code_of(ami_verify.AmiVerify, build="last", **options)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("refusal", "spot", "exit_code", "words"),
    [
        (
            "InsufficientInstanceCapacity",
            True,
            75,
            ["no spot capacity now", "us-west-2a", "leave out --spot"],
        ),
        ("InsufficientInstanceCapacity", False, 75, ["no capacity now for g4dn.xlarge or g5.xlarge"]),
        ("Unsupported", False, 75, ["no capacity now"]),
        ("VcpuLimitExceeded", False, 3, ["quota is too low for g4dn.xlarge and g5.xlarge", "L-DB2E81BA"]),
        ("MaxSpotInstanceCountExceeded", True, 3, ["spot quota is too low", "L-3819A6DF"]),
        ("UnauthorizedOperation", False, 4, ["not allowed to start g4dn.xlarge", "ec2:RunInstances"]),
        (
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
            True,
            4,
            ["not allowed to start", "create-service-linked-role --aws-service-name spot.amazonaws.com"],
        ),
        ("InvalidParameterValue", False, 4, ["RunInstances answered InvalidParameterValue: no"]),
    ],
)
def test_capacity_quota_and_permission_are_told_apart(ec2, verify, refusal, spot, exit_code, words):
    refuse_runs(ec2, refusal)
    code, shown = verify(instance_types=",".join(TYPES), spot=spot)
    assert code == exit_code, shown
    for word in words:
        assert word in shown
    if exit_code == 4:  # another zone would refuse alike
        assert len(tried(ec2)) == 1
    assert builds_with_orphans(ec2) == set()


def test_capacity_of_one_type_and_quota_of_another_is_worth_another_try(ec2, verify):
    ec2.refuse = lambda call: (
        ({"g4dn.xlarge": "VcpuLimitExceeded"}.get(call["InstanceType"], "InsufficientInstanceCapacity"), "no")
        if call.get("Action") == "RunInstances"
        else None
    )
    code, shown = verify(instance_types="g4dn.xlarge,g5.xlarge")
    assert code == 75
    assert "VcpuLimitExceeded" in shown
    assert "InsufficientInstanceCapacity" in shown


def test_a_machine_that_ec2_takes_away_is_not_the_images_fault(ec2, verify):
    """EC2 may accept the call and end the machine before it runs."""

    def lose(call):
        if call.get("Action") == "RunInstances":
            backend = ec2_backends[DEFAULT_ACCOUNT_ID][ec2.region]
            *_, instance = [
                one for reservation in backend.reservations.values() for one in reservation.instances
            ]
            text = "Server.SpotInstanceTermination"
            instance._state.name, instance._state.code = "terminated", 48
            instance.state_reason = StateReason(f"{text}: Spot instance termination", text)

    ec2.after = lose
    code, shown = verify(spot=True)
    assert code == 75, shown
    assert "Spot instance termination" in shown
    assert builds_with_orphans(ec2) == set()


def test_a_type_that_the_region_or_the_driver_does_not_know(ec2, verify):
    code, shown = verify(instance_types="g7.2xlarge")
    assert code == 3
    assert "does not know" in shown
    assert ec2.asked("RunInstances") == []
    code, shown = verify(instance_types="p5.4xlarge,nonsense")
    assert code == 2


def test_a_failed_start_leaves_nothing(ec2, tmp_path):
    refuse_runs(ec2, "InternalError")
    with pytest.raises(Exception, match="InternalError"):
        boot(ec2)
    assert builds_with_orphans(ec2) == set()
    assert list((tmp_path / "keys").iterdir()) == []
