"""What the tests of a release share: a cloud whose calls can fail, and images with verdicts."""

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import boto3
from botocore.config import Config
from rich.console import Console

from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.tags import SBOM_TAG, STATEMENT_TAG
from gpukiln.images.channels import load_channel
from gpukiln.pipeline.verdict_tags import summarize_verdict, verdict_tags
from gpukiln.progress import Progress
from gpukiln.release.images import LaunchPermissions
from gpukiln.release.needs import require_verified
from gpukiln.release.publish import ReleaseSpec
from gpukiln.release.verification import verification_from_tags
from gpukiln.verify.digest import suite_digest
from gpukiln.verify.verdict import CheckResult, Verdict

ROOT = Path(__file__).resolve().parents[2]
HOME = "us-west-2"
REGIONS = (HOME, "eu-west-1")
POINTER = "/gpukiln/eks-gpu/1.34/{}/image_id"
_numbers = itertools.count(1)
_started = []


@functools.cache
def server():
    """The server of this process: its url and its files."""
    folder = Path(tempfile.mkdtemp(prefix="gpukiln-release-"))
    measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("release_server.py"), folder],
        stdin=subprocess.PIPE,  # it ends, and removes the folder, when this does
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **measured},
    )
    _started.append(process)
    port = process.stdout.readline().strip()
    assert port, "the test's server did not start"
    return f"http://127.0.0.1:{port}", Layout(folder)


def end_server():
    """End it where it was started, and wait until it has written which of its lines ran."""
    for process in _started:
        tell("end")  # a process that a test left behind may hold its standard input open
        process.stdin.close()
        process.wait(timeout=60)


def tell(what, document=None):
    """Speak to the server's own side: reset, image, faults, calls."""
    body = json.dumps({} if document is None else document).encode()
    with urllib.request.urlopen(f"{server()[0]}/test/{what}", body, timeout=60) as answer:  # noqa: S310 - our own server
        return json.load(answer)


def fault(action, kind, region="", times=1, skip=0):
    """A call that is going to fail."""
    return {"action": action, "kind": kind, "region": region, "times": times, "skip": skip}


def fault_each(action, kind):
    """A fault that the first such call of every path meets."""
    return {"action": action, "kind": kind, "region": "", "each": []}


@functools.cache
def _session():
    return boto3.Session()


@functools.cache
def _client(service, region, attempts):
    url, layout = server()
    return _session().client(
        service,
        region_name=region,
        endpoint_url=url,
        aws_access_key_id=layout.access_key,
        aws_secret_access_key="x",  # noqa: S106 - the server looks at the key's id
        config=Config(retries={"mode": "standard", "total_max_attempts": attempts}, max_pool_connections=20),
    )


@dataclass
class Cloud:
    """The embedded cloud as code above it sees it, with clients that try `attempts` times."""

    region: str = HOME
    attempts: int = 1
    name: str = "embedded"
    has_gpus: bool = False
    has_session_manager: bool = False
    ssh_cidr: str = "127.0.0.0/8"
    subnet_id: str | None = None
    ssh_port: int = 22
    machine_endpoint: str = ""

    def address(self, instance):
        return instance["PrivateIpAddress"]

    def snapshot_disk(self, snapshot_id):
        return server()[1].snapshot(snapshot_id)

    def environment(self):
        return {"AWS_ENDPOINT_URL": server()[0], "AWS_REGION": self.region}

    def client(self, service, *, attempts=0):
        return _client(service, self.region, attempts or self.attempts)

    def in_region(self, region):
        return replace(self, region=region)


def verdict(not_run=(), failed=(), *, on="g4dn.xlarge", suite="", saw_gpu=False):
    """A verdict with one check passed; `not_run` are (id, reason)."""
    passed = ("boot.up", "gpu.nvml") if saw_gpu else ("boot.up",)
    return Verdict(
        target="i-1",
        profile="image",
        started_at="2026-11-21T00:00:00+00:00",
        duration_s=1.0,
        suite_version=suite or suite_digest(),
        instance_type=on,
        checks=(
            *(CheckResult(i, i, i.split(".")[0], "passed") for i in passed),
            *(CheckResult(i, i, i.split(".")[0], "not_run", reason) for i, reason in not_run),
            *(CheckResult(i, i, i.split(".")[0], "failed", reason) for i, reason in failed),
        ),
    )


def tags(build, judged=None, kubernetes="1.34"):
    """Tags of an image as a build writes them."""
    return {
        "Name": f"gpukiln-{build}",
        "gpukiln:recipe": "eks-gpu",
        "gpukiln:kubernetes": kubernetes,
        "gpukiln:build-id": build,
        "gpukiln:instance-types": "g4dn.xlarge g5.xlarge",
        "gpukiln:driver": "535.309.01",
        "gpukiln:modules": "proprietary",
        "gpukiln:base": "debian-12 ami-1",
        SBOM_TAG: "0" * 64,
        STATEMENT_TAG: "0" * 64,
        **verdict_tags("eks-gpu", [summarize_verdict(judged or verdict())]),
    }


def make_image(build, *, judged=None, region=HOME, days_old=0, kubernetes="1.34", **more):
    """An image as if it had been built here; returns its id."""
    image_id = f"ami-{next(_numbers):017x}"
    about = {"region": region, "image_id": image_id, "name": f"gpukiln-{build}", "days_old": days_old, **more}
    tell("image", {"tags": tags(build, judged, kubernetes), **about})
    return image_id


def release_spec(image_id, build, channel="candidate", regions=REGIONS, **more):
    """What a release of an image is asked for."""
    verification = verification_from_tags(image_id, HOME, tags(build, more.pop("judged", None)))
    rules = load_channel(channel)
    excused = require_verified(channel, rules, verification, has_gpus=False)
    options = {"sharing": LaunchPermissions(), "keys": {}, "timeout_s": 5.0, **more}
    return ReleaseSpec(verification, channel, rules, tuple(regions), excused, **options)


def quiet():
    """Progress that nobody sees."""
    return Progress(console=Console(quiet=True))


def pointed(channel="candidate", regions=REGIONS):
    """What a channel points at in each region."""
    found = {}
    for region in regions:
        ssm = _client("ssm", region, 1)
        try:
            found[region] = ssm.get_parameter(Name=POINTER.format(channel))["Parameter"]["Value"]
        except ssm.exceptions.ParameterNotFound:
            found[region] = None
    return found


def images(region):
    """Every image of this account in a region, by id."""
    ec2 = _client("ec2", region, 1)
    return {image["ImageId"]: image for image in ec2.describe_images(Owners=["self"])["Images"]}


def changes():
    """The calls that changed something since the last time: region, action, fault."""
    return [call for call in tell("calls") if is_change(call[1])]


def is_change(action):
    """Whether a call changes something."""
    return not action.startswith(("Describe", "Get", "List"))


def running():
    """The zone of each instance that starts or runs."""
    pages = (
        Cloud()
        .client("ec2")
        .describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["pending", "running"]}])
    )
    return {
        one["InstanceId"]: one["Placement"]["AvailabilityZone"]
        for reservation in pages["Reservations"]
        for one in reservation["Instances"]
    }
