"""Plans and records of builds, of an EC2 in this process and a network that answers as told."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from moto import mock_aws

from gpukiln.catalog.bases import default_base
from gpukiln.images.builds import Bake
from gpukiln.images.plan import ImagePlan, make_plan
from gpukiln.sources.decisions import Probes
from gpukiln.verify.verdict import CheckResult, Verdict

NOW = datetime(2026, 11, 21, 6, 0, tzinfo=UTC)
MIRROR = {
    "nvidia-kernel-dkms": "535.309.01-0+deb12u1",
    "nvidia-persistenced": "535.171.04-1~deb12u1",
    "nvtop": "3.0.1-1",
    "docker.io": "20.10.24+dfsg1-1+deb12u1+b6",
    "containerd": "1.6.20~ds1-1+deb12u3",
}
OFFLINE = Probes(
    lambda _: "no route",
    lambda names: {name: MIRROR[name] for name in names if name in MIRROR},
    lambda _: None,
)
BAKE = Bake("ami-0123456789abcdef0", "name", "us-west-2", "6.1.0-1-cloud-amd64", {}, {"libc6": "2.36-9"})
CHECK = CheckResult(
    id="boot.kernel", title="boots", layer="boot", outcome="passed", reason="", duration_s=0.1
)
VERDICT = Verdict(
    target="here",
    profile="image",
    started_at="2026-11-21T06:00:00+00:00",
    duration_s=1.0,
    checks=(CHECK,),
    instance_type="g4dn.xlarge",
)


class MotoCloud:
    subnet_id = None

    def __init__(self, name: str = "embedded", region: str = "us-west-2") -> None:
        self.name, self.region = name, region
        self.default_base = default_base(name)
        self.strict_sources = name == "aws"

    def client(self, service: str) -> Any:
        return boto3.client(service, region_name=self.region)  # type: ignore[call-overload]  # the stubs want a literal


@contextmanager
def ec2_with_a_base() -> Iterator[str]:
    """An EC2 with one image, which its owner's name pattern finds; without moto's thousand images."""
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        patch.setattr("gpukiln.catalog.bases.Base.owners_in", lambda *_: ("self",))
        yield MotoCloud().client("ec2").register_image(Name="debian-12-amd64-20261101-1")["ImageId"]


def plan(cloud: MotoCloud | None = None, *, probes: Probes = OFFLINE, **more: Any) -> ImagePlan:
    return make_plan("eks-gpu", cloud or MotoCloud(), probes=probes, now=NOW, **more)
