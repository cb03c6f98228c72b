"""Which EC2 is talked to, whatever the user's environment and AWS's files say; nothing is asked here."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from gpukiln.catalog.bases import load_bases
from gpukiln.clouds.aws import AwsCloud
from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.commands import cloud as commands
from gpukiln.errors import RefusedError, UsageError

PRIVATE = "https://vpce-0a1b-ec2.example.test"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AwsCloud:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return AwsCloud("us-west-2")


@pytest.fixture
def embedded(tmp_path: Path) -> EmbeddedCloud:
    layout = Layout(tmp_path / "home")
    layout.create()
    found = EmbeddedCloud("us-west-2", layout=layout)
    found._server = {"url": "http://127.0.0.1:9", "ssh_port": 2222}
    return found


def test_aws_is_aws(aws: AwsCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert aws.client("ec2").meta.endpoint_url == "https://ec2.us-west-2.amazonaws.com"


def test_the_data_names_the_default_base(
    aws: AwsCloud, embedded: EmbeddedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (aws.default_base, embedded.default_base) == ("eks-ubuntu-24.04", base_image.NAME)
    swapped = {name: replace(one, default_on=("aws",)) for name, one in load_bases().items()}
    monkeypatch.setattr("gpukiln.catalog.bases.load_bases", lambda: swapped)
    assert aws.default_base == next(iter(swapped))
    with pytest.raises(UsageError, match="the default on 'embedded'"):
        assert embedded.default_base


@pytest.mark.parametrize(
    ("environment", "config"),
    [
        ({"AWS_ENDPOINT_URL": PRIVATE}, ""),
        ({"AWS_ENDPOINT_URL_EC2": PRIVATE, "AWS_ENDPOINT_URL": "https://other.example.test"}, ""),
        ({}, f"[default]\nendpoint_url = {PRIVATE}\n"),
        ({}, f"[default]\nservices = mine\n[services mine]\nec2 =\n  endpoint_url = {PRIVATE}\n"),
    ],
)
def test_a_private_endpoint_of_the_users_is_taken(
    aws: AwsCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], config: str
) -> None:
    (tmp_path / "config").write_text(config)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert aws.client("ec2").meta.endpoint_url == PRIVATE


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:4566", "http://localhost:1", "http://[::1]:1", "http://127.1:1"]
)
def test_an_endpoint_on_this_computer_is_refused(
    aws: AwsCloud, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(RefusedError, match="on this computer") as caught:
        aws.client("ssm")
    assert "--cloud embedded" in caught.value.hint


def test_the_embedded_cloud_looks_at_nothing_of_the_users(
    embedded: EmbeddedCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default\nnot = a config file")
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.setenv(name, "nonsense")
    for name in ("FIPS_ENDPOINT", "DUALSTACK_ENDPOINT"):
        monkeypatch.setenv(f"AWS_USE_{name}", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", PRIVATE)
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    ec2 = embedded.client("ec2")
    assert ec2.meta.endpoint_url == "http://127.0.0.1:9"
    with pytest.raises(EndpointConnectionError):  # nobody listens there: it was tried
        ec2.describe_images()


def test_tools_are_started_without_what_is_the_users(
    embedded: EmbeddedCloud, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_EC2", "AWS_ENDPOINT_URL_STS"):
        monkeypatch.setenv(name, "nonsense")
    monkeypatch.setattr("gpukiln.clouds.select.make_cloud", lambda *_: embedded)
    commands.CloudEnv().run()
    script = f"eval {capsys.readouterr().out!r}; env | grep ^AWS_"  # as a shell does
    done = subprocess.run(
        ["bash", "-c", script.replace("\\n", ";")], capture_output=True, text=True, check=True
    )
    assert "nonsense" not in done.stdout
    assert "AWS_ENDPOINT_URL=http://127.0.0.1:9" in done.stdout.splitlines()
