"""What fails around a bake that has made its image: nothing of it loses the image or calls it failed.

Packer and the suite stand in; the cloud is moto's EC2 behind HTTP, which refuses one call after the other.
"""

import json
from contextlib import contextmanager

import pytest
from rich.console import Console

from gpukiln.attest.signing import load_public_key, load_signer
from gpukiln.attest.statements import trusted_statements
from gpukiln.errors import UnavailableError
from gpukiln.images import bake as baking
from gpukiln.images.bake import BakeResources
from gpukiln.images.builds import Builds
from gpukiln.instances import access
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.instances.orphans import builds_with_orphans, sweep
from gpukiln.instances.tags import tags_of
from gpukiln.pipeline import steps
from gpukiln.pipeline.verdict_tags import summarize_verdict, verdict_tags
from gpukiln.progress import Progress
from gpukiln.verify.target import Target
from tests.support.plans import VERDICT
from tests.support.signing import key_pair


class Cache:
    """Kernel modules that can't be kept."""

    folder = "modules"

    def offer(self, _say):
        pass

    def collect(self, *_):
        raise OSError("No space left on device")


@pytest.fixture
def build(endpoint, planned, tmp_path, monkeypatch):
    """Build an image, with what fails set before; returns what was raised, the record and what was said."""
    endpoint.forget()
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(access, "PAUSES_S", ())
    monkeypatch.setattr(access, "_speaks_ssh", lambda *_: True)
    monkeypatch.setattr(type(endpoint), "prepare", lambda *_: None, raising=False)
    builds, faults = Builds(tmp_path), {"packer": None}

    class Packer:
        def __init__(self, folder, _variables, **_):
            self.folder = folder.parent

        def build(self):
            if faults["packer"]:
                raise faults["packer"]
            installed = {"kernel": "6.1", "components": {}, "packages": {}}
            (self.folder / "image.json").write_text(json.dumps(installed))

    @contextmanager
    def machine(*_args, **_options):
        yield (
            Target("i-1", "ssh://admin@192.0.2.1"),
            LaunchedMachine("i-1", "g4dn.xlarge", "us-west-2a", False),
        )

    monkeypatch.setattr(baking, "Packer", Packer)
    monkeypatch.setattr(baking, "prepare_template", lambda _, folder: folder.mkdir())
    monkeypatch.setattr(baking, "module_cache", lambda *_: faults.get("cache"))
    monkeypatch.setattr(steps, "machine_from_image", machine)
    monkeypatch.setattr(steps, "run_suite", lambda *_, **__: VERDICT)
    monkeypatch.setattr(steps, "attest", lambda *_: None)

    def run(**more):
        faults.update(more)
        raised, console = (
            None,
            Console(width=200, record=True, quiet=False, file=(tmp_path / "said").open("w")),
        )
        try:
            steps.build_image(
                planned, endpoint, builds, Progress(console=console), BakeResources(), faults.get("signer")
            )
        except BaseException as error:
            raised = error
        [made] = builds.all()
        return raised, made.read(), console.export_text()

    yield run
    endpoint.forget()
    for build_id in builds_with_orphans(endpoint):
        sweep(endpoint, build_id)
    for image in endpoint.client("ec2").describe_images(Owners=["self"])["Images"]:
        endpoint.client("ec2").deregister_image(ImageId=image["ImageId"])


def images(endpoint):
    return [image["ImageId"] for image in endpoint.client("ec2").describe_images(Owners=["self"])["Images"]]


def snapshots(endpoint):
    return len(endpoint.client("ec2").describe_snapshots(OwnerIds=["self"])["Snapshots"])


def running(endpoint):
    found = endpoint.client("ec2").describe_instances(
        Filters=[{"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}]
    )["Reservations"]
    return [one["InstanceId"] for reservation in found for one in reservation["Instances"]]


def refusing(*actions):
    return lambda call: ("UnauthorizedOperation", "no") if call.get("Action") in actions else None


def test_an_image_is_recorded_and_proven(build, endpoint):
    raised, record, said = build()
    assert raised is None
    assert (record.state, [record.bake.image_id]) == ("verified", images(endpoint))
    assert "SSH of its machines is open to 127.0.0.0/8" in said


def test_a_build_with_a_key_signs_its_verdict(build, endpoint, tmp_path):
    key = key_pair(tmp_path, "sign")
    raised, record, _ = build(signer=load_signer(key))
    assert raised is None
    [image] = endpoint.client("ec2").describe_images(ImageIds=[record.bake.image_id])["Images"]
    keys = [load_public_key(key.with_suffix(".pub"))]
    found = trusted_statements(endpoint.client("ssm"), image, endpoint.region, keys)
    assert found.verdicts["g4dn.xlarge"].verdict == VERDICT.digest
    assert found.verdicts["g4dn.xlarge"].image.kubernetes == record.plan.kubernetes
    assert len(found.location.snapshots) == 1
    assert found.refused == ()


def test_modules_that_cannot_be_kept_fail_no_build(build):
    raised, record, said = build(cache=Cache())
    assert raised is None
    assert record.state == "verified"
    assert "the compiled modules were not kept: No space left on device" in said


@pytest.mark.parametrize("call", ["DeleteSecurityGroup", "DeleteKeyPair", "DescribeInstances"])
def test_what_cannot_be_removed_after_the_bake_fails_no_build(build, endpoint, call):
    refuse = refusing(call)
    endpoint.refuse = lambda asked: refuse(asked) if endpoint.asked("CreateImage") else None
    raised, record, said = build()
    assert raised is None
    assert (record.state, [record.bake.image_id]) == ("verified", images(endpoint))
    assert call in said
    assert "`invoke cloud.sweep`, removes it" in said


def test_ctrl_c_while_it_is_cleaned_up_keeps_the_image(build, endpoint, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(access, "sweep", stopped)
    raised, record, _ = build()
    assert isinstance(raised, KeyboardInterrupt)
    assert (record.state, [record.bake.image_id]) == ("aborted", images(endpoint))


def test_an_image_that_cannot_be_finished_is_recorded_for_another_try(build, endpoint):
    endpoint.refuse = refusing("ModifyImageAttribute")
    raised, record, _ = build()
    assert "ModifyImageAttribute" in raised.message
    assert (record.state, [record.bake.image_id]) == ("failed", images(endpoint))


def test_a_bake_that_fails_makes_no_image_and_leaves_no_machine(build, endpoint):
    raised, record, _ = build(packer=UnavailableError("Packer ended with exit code 137"))
    assert "137" in raised.message
    assert (record.state, record.bake, images(endpoint)) == ("failed", None, [])
    assert not endpoint.asked("CreateImage")
    assert running(endpoint) == []


@pytest.mark.parametrize("call", ["RunInstances", "StopInstances", "CreateImage"])
def test_a_machine_that_cannot_be_captured_goes(build, endpoint, call):
    endpoint.refuse = refusing(call)
    raised, record, _ = build()
    assert call in raised.message or "is not allowed to start" in raised.message
    assert (record.state, record.bake, images(endpoint)) == ("failed", None, [])
    assert running(endpoint) == []


def while_the_image_is_made(*actions):
    """Refuse to say how far an image is, which `capture` alone asks by its id; and other calls."""
    return lambda call: (
        ("UnauthorizedOperation", "no") if "ImageId.1" in call or call.get("Action") in actions else None
    )


def test_an_image_that_was_not_waited_for_goes(build, endpoint):
    before = snapshots(endpoint)
    endpoint.refuse = while_the_image_is_made()
    raised, record, _ = build()
    assert "ImageAvailable" in raised.message
    assert (record.state, record.bake, images(endpoint)) == ("failed", None, [])
    assert snapshots(endpoint) == before
    assert endpoint.asked("CreateImage")


def test_where_that_is_refused_it_is_told_beside_the_reason(build, endpoint):
    endpoint.refuse = while_the_image_is_made("DeregisterImage")
    raised, record, _ = build()
    assert "ImageAvailable" in raised.message
    assert "an AMI without a record may exist" in "".join(raised.__notes__)
    assert record.state == "failed"


def test_image_and_snapshot_have_their_tags_when_they_are_made(build, endpoint, planned):
    """In the very call: the policy of `build` allows them at no other time."""
    raised, record, _ = build()
    assert raised is None
    [call] = endpoint.asked("CreateImage")
    names = {value for name, value in call.items() if name.endswith(".Key")}
    kinds = {value for name, value in call.items() if name.endswith(".ResourceType")}
    assert kinds == {"image", "snapshot"}
    [image] = endpoint.client("ec2").describe_images(ImageIds=[record.bake.image_id])["Images"]
    assert image["Description"] == "eks-gpu with NVIDIA 535.309.01 on debian-12"
    tags = tags_of(image)
    assert (tags["Name"], tags["gpukiln:kernel"], tags["gpukiln:digest"]) == (
        record.bake.name,
        "6.1",
        planned.digest,
    )
    assert names == {
        name for name in tags if name not in verdict_tags("eks-gpu", [summarize_verdict(VERDICT)])
    }
    [machine] = endpoint.asked("RunInstances")
    disk = "BlockDeviceMapping.1.Ebs."
    assert (machine[f"{disk}Encrypted"], machine[f"{disk}VolumeSize"]) == ("true", "30")


def test_without_an_address_nothing_is_started(build, endpoint, monkeypatch, tmp_path):
    def unknown(_):
        raise UnavailableError("can't be found out", hint="--ssh-cidr")

    monkeypatch.setattr(type(endpoint), "ssh_cidr", property(unknown))
    with pytest.raises(ValueError, match="not enough values"):  # no record
        build()
    assert endpoint.calls == []
    assert not (tmp_path / "builds").exists()
