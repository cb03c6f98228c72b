"""A spot instance that is interrupted: what its metadata says and when, how it ends, and who is refused."""

import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import boto3
import pytest
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import Instance
from moto.ec2.responses.instances import InstanceResponse

from gpukiln.clouds.embedded import spot
from gpukiln.clouds.embedded.client import ask_server
from gpukiln.clouds.embedded.instance_metadata import describe_instance
from gpukiln.clouds.embedded.metadata import MetadataServer
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from tests.support.release_cloud import Cloud, make_image, server, tell

META = "/latest/meta-data"
NOTICES = ("events/recommendations/rebalance", "spot/instance-action", "spot/termination-time")
MOMENT = datetime(2026, 11, 23, 8, 0, tzinfo=UTC)


def market(behavior=None, kind="spot"):
    options = {"SpotOptions": {"InstanceInterruptionBehavior": behavior}} if behavior else {}
    return {"InstanceMarketOptions": {"MarketType": kind, **options}}


@pytest.fixture
def launched(monkeypatch):
    """Launch an instance of moto's in this process, extended as the embedded cloud's are."""
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(Instance, "terminate", spot.keep_reason(Instance.terminate))
    monkeypatch.setattr(InstanceResponse, "run_instances", InstanceResponse.run_instances)
    spot.extend_launches()
    with mock_aws():
        ec2 = boto3.client("ec2", region_name="us-west-2")

        def launch(**options):
            asked = {"ImageId": "ami-0123456789abcdef0", "MinCount": 1, "MaxCount": 1, **options}
            name = ec2.run_instances(**asked)["Instances"][0]["InstanceId"]
            return ec2_backends[DEFAULT_ACCOUNT_ID]["us-west-2"].get_instance(name)

        yield launch
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread.function is spot._carry_out:
                thread.cancel()  # the instance is gone with this moto: its end would fail in a later test


@pytest.fixture
def metadata():
    """Ask the metadata service of an instance."""
    servers = []

    def serve(instance):
        listener = socket.create_server(("127.0.0.1", 0))
        servers.append(MetadataServer(listener, lambda: describe_instance(instance)))

        def ask(path):
            connection = http.client.HTTPConnection(*listener.getsockname(), timeout=10)
            connection.request("GET", f"{META}/{path}")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        return ask

    yield serve
    for one in servers:
        one.stop()


def wait(fulfilled):
    deadline = time.monotonic() + 60
    while not fulfilled():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_notices_come_one_after_the_other():
    two, four = MOMENT + timedelta(minutes=2), MOMENT + timedelta(minutes=4)
    notice = spot.InterruptionNotice("terminate", MOMENT, two, four)
    assert notice.tree(MOMENT - timedelta(seconds=1)) == {}
    events = {"recommendations": {"rebalance": '{"noticeTime": "2026-11-23T08:00:00Z"}'}}
    assert notice.tree(MOMENT) == {"events": events}
    ends = "2026-11-23T08:04:00Z"
    action = f'{{"action": "terminate", "time": "{ends}"}}'
    told = {"instance-action": action, "termination-time": ends}
    assert notice.tree(two) == {"events": events, "spot": told}


def test_metadata_and_end_of_one_that_is_terminated(launched, metadata):
    instance = launched(**market())
    ask = metadata(instance)
    assert ask("instance-life-cycle") == (200, "spot")
    assert [ask(path)[0] for path in (*NOTICES, "spot", "events")] == [404] * 5
    told = spot.interrupt({"instance_id": instance.id, "seconds": 1})
    assert told["action"] == "terminate"
    status, body = ask("spot/instance-action")
    assert (status, json.loads(body)) == (200, {"action": "terminate", "time": told["ends"]})
    assert ask("spot/termination-time") == (200, told["ends"])
    assert ask("spot/") == (200, "instance-action\ntermination-time")
    rebalance = ask("events/recommendations/rebalance")[1]
    assert json.loads(rebalance) == {"noticeTime": told["recommended"]}
    assert {"events/", "spot/"} <= set(ask("")[1].split())
    wait(lambda: instance.state == "terminated")
    reason = instance.state_reason
    assert reason.code == "Server.SpotInstanceTermination"
    assert reason.message == "Server.SpotInstanceTermination: Spot instance termination"


def test_one_that_is_stopped_has_no_time_of_termination_and_starts_without_a_notice(launched, metadata):
    instance = launched(**market("stop"))
    ask = metadata(instance)
    spot.interrupt({"instance_id": instance.id, "seconds": 600})
    assert json.loads(ask("spot/instance-action")[1])["action"] == "stop"
    assert ask("spot/termination-time")[0] == 404
    spot._carry_out(instance, instance.interruption)
    assert instance.state == "stopped"
    instance.start()
    assert ask("spot/instance-action")[0] == 404
    again = spot.interrupt({"instance_id": instance.id, "seconds": 600})
    assert again["noticed"] >= again["recommended"]
    assert ask("spot/instance-action")[0] == 200


def test_hibernation_begins_with_its_notice(launched):
    instance = launched(**market("hibernate"))
    told = spot.interrupt({"instance_id": instance.id})
    assert (told["action"], told["ends"]) == ("hibernate", told["noticed"])
    wait(lambda: instance.state == "stopped")


def test_interrupted_twice_is_the_same_notice(launched):
    instance = launched(**market())
    first = spot.interrupt({"instance_id": instance.id, "seconds": 500, "rebalance_seconds": 100})
    assert spot.interrupt({"instance_id": instance.id, "seconds": 5}) == first


def test_what_ends_by_itself_meanwhile_was_not_interrupted(launched):
    instance = launched(**market())
    spot.interrupt({"instance_id": instance.id, "seconds": 600})
    notice = instance.interruption
    instance.terminate()
    spot._carry_out(instance, notice)
    assert instance.state_reason.code == "Client.UserInitiatedShutdown"
    with pytest.raises(IncompatibleError, match="is terminated"):
        spot.interrupt({"instance_id": instance.id})


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "instance_id is missing"),
        ({"instance_id": "i-1", "second": 5}, "unknown key 'second'.*did you mean seconds"),
        ({"instance_id": "i-1", "seconds": "soon"}, "seconds: found 'soon'"),
        ({"instance_id": "i-1", "seconds": -1}, "seconds: found -1, wanted 0 to 86400"),
        ({"instance_id": "i-1", "seconds": float("nan")}, "seconds: found nan"),
        ({"instance_id": "i-1"}, "unknown spot instance 'i-1'"),
    ],
)
def test_what_is_no_interruption(launched, document, told):
    assert launched
    with pytest.raises(UsageError) as refused:
        spot.interrupt(document)
    assert re.search(told, f"{refused.value.message} {refused.value.hint}")


@pytest.fixture
def served():
    """The embedded cloud's own server, which the client finds; with an image."""
    tell("reset")
    url, layout = server()
    layout.endpoint.write_text(json.dumps({"url": url}))
    yield layout, make_image("b1")
    layout.endpoint.unlink()
    tell("reset")


def state(name):
    ec2 = Cloud().client("ec2")
    return ec2.describe_instances(InstanceIds=[name])["Reservations"][0]["Instances"][0]


def test_the_server_interrupts_what_the_client_names(served):
    layout, image_id = served
    ec2 = Cloud().client("ec2")
    asked = {"ImageId": image_id, "MinCount": 1, "MaxCount": 1}
    name = ec2.run_instances(**asked, **market())["Instances"][0]["InstanceId"]
    assert state(name)["InstanceLifecycle"] == "spot"
    told = ask_server(layout, "/gpukiln/interrupt", {"instance_id": name, "seconds": 0.1})
    assert (told["instance_id"], told["action"]) == (name, "terminate")
    wait(lambda: state(name)["State"]["Name"] == "terminated")
    reason = {"Code": "Server.SpotInstanceTermination"}
    reason["Message"] = f"{reason['Code']}: Spot instance termination"
    assert state(name)["StateReason"] == reason
    steady = ec2.run_instances(**asked)["Instances"][0]["InstanceId"]
    with pytest.raises(IncompatibleError, match="is an on-demand instance") as refused:
        ask_server(layout, "/gpukiln/interrupt", {"instance_id": steady})
    assert "ami.verify --spot" in refused.value.hint


def test_errors_of_the_server_are_errors_of_the_client(served):
    layout, _ = served
    with pytest.raises(UsageError, match="has no POST /gpukiln/coffee"):
        ask_server(layout, "/gpukiln/coffee", {})
    with pytest.raises(UsageError, match="wanted an object"):
        ask_server(layout, "/gpukiln/interrupt", ["i-1"])
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{server()[0]}/gpukiln/interrupt",
        b"{",
        {"Authorization": f"Credential={layout.access_key}/"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)  # noqa: S310 - our own server
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["message"].startswith("the request is not JSON")
    layout.endpoint.write_text("{}")
    with pytest.raises(UnavailableError, match="is not running"):
        ask_server(layout, "/gpukiln/interrupt", {})
