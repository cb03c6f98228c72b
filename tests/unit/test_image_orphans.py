"""What a killed build left: told, listed before its deadline, removed, whatever call of the cloud fails once.

The cloud is moto's EC2 behind HTTP. A killed build is a record, a key and machines that no process holds.
"""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gpukiln.clouds.tags import BUILD_ID_TAG, RECIPE_TAG
from gpukiln.commands import ami
from gpukiln.commands import cloud as commands
from gpukiln.images import orphans
from gpukiln.images.builds import Builds, Record
from gpukiln.instances import access
from gpukiln.instances.access import key_files
from gpukiln.instances.orphans import builds_with_orphans, sweep, unrecorded_images
from gpukiln.instances.tags import build_tags, tag_specifications
from gpukiln.pipeline.verdict_tags import DIGEST_CHARS, VerifiedAmi
from gpukiln.verify.digest import suite_digest
from tests.support.exit_codes import code_of
from tests.support.plans import BAKE

LATER = datetime.now(UTC) + timedelta(hours=3)
REMOVING = ("TerminateInstances", "DeleteKeyPair", "DeleteSecurityGroup")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(access, "PAUSES_S", (0.0, 0.0))
    return tmp_path


@pytest.fixture
def ec2(endpoint):
    endpoint.forget()
    yield endpoint
    endpoint.forget()
    for build_id in builds_with_orphans(endpoint):
        sweep(endpoint, build_id)


@pytest.fixture(scope="module")
def planned(planned):
    return replace(planned, cloud="aws", region="us-west-2")


@pytest.fixture
def dead(ec2, home, planned):
    """A build that was killed while it waited for its AMI."""
    return die(ec2, home, planned)


def die(ec2, home, planned, state="running", bake=None):
    build = Builds(home).create("eks-gpu")
    build.write(Record(build.id, state, planned, bake))
    (build.folder / ".record.json.0a1b.partial").write_text("{")
    access._write_key(build.id, "bake", "PRIVATE KEY")
    (home / f"gpukiln-{build.id}").mkdir()
    tags, client = build_tags(build.id, "bake", LATER), ec2.client("ec2")
    client.create_key_pair(KeyName=build.id, TagSpecifications=tag_specifications(tags, "key-pair"))
    client.create_security_group(
        GroupName=build.id, Description="x", TagSpecifications=tag_specifications(tags, "security-group")
    )
    client.run_instances(
        ImageId="ami-0123456789abcdef0",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=tag_specifications(tags, "instance"),
    )
    machine = client.run_instances(ImageId="ami-0123456789abcdef0", MinCount=1, MaxCount=1)["Instances"][0]
    mine = {RECIPE_TAG: "eks-gpu", BUILD_ID_TAG: build.id}
    client.create_image(
        InstanceId=machine["InstanceId"],
        Name=f"gpukiln-eks-gpu-535-{build.id}",
        TagSpecifications=tag_specifications(mine, "image", "snapshot"),
    )
    client.terminate_instances(InstanceIds=[machine["InstanceId"]])
    return build


def left(ec2, home, build):
    """Everything of a build that is there."""
    files = [*key_files(build.id), *home.glob(f"gpukiln-{build.id}"), *build.folder.glob("*.partial")]
    images = [image["ImageId"] for image in unrecorded_images(ec2, build.id)]
    return [*builds_with_orphans(ec2), *images, *map(str, files)]


def snapshots(ec2):
    return len(ec2.client("ec2").describe_snapshots(OwnerIds=["self"])["Snapshots"])


def test_everything_of_a_killed_build_goes_and_its_record_says_so(ec2, home, dead):
    said = []
    before = snapshots(ec2)
    removed = orphans.clean_up_killed_builds(ec2, Builds(home), said.append)
    assert left(ec2, home, dead) == []
    assert snapshots(ec2) == before - 1
    kinds = {re.match(r"i-|ami-|sg-|/|\d", one)[0] for one in removed}
    assert kinds == {"i-", "ami-", "sg-", "/", "2"}
    assert (dead.read().state, dead.read().error) == ("aborted", "its process was killed")
    [line] = said
    assert line.startswith(f"build {dead.id} had been killed; removed i-")
    assert orphans.clean_up_killed_builds(ec2, Builds(home), said.append) == []
    assert len(said) == 1


def test_what_a_process_holds_stays(ec2, home, dead):
    with dead.locked():
        assert orphans.clean_up_killed_builds(ec2, Builds(home), pytest.fail) == []
        assert orphans.find_local_orphans(ec2, Builds(home)) == []
        assert orphans.killed_builds(Builds(home)) == []
    assert len(left(ec2, home, dead)) == 5


def test_a_record_is_read_after_the_lock_is_taken(ec2, home, dead, planned, monkeypatch):
    """A build that ends while another command cleans up keeps its record and its image."""
    locked = type(dead).locked

    def ends_first(build):
        if build.read().state == "running":
            build.write(Record(build.id, "verified", planned, BAKE))
        return locked(build)

    monkeypatch.setattr(type(dead), "locked", ends_first)
    orphans.clean_up_killed_builds(ec2, Builds(home), lambda _: None)
    assert (dead.read().state, dead.read().bake) == ("verified", BAKE)
    assert unrecorded_images(ec2, dead.id)  # its own


def test_the_image_of_a_build_that_was_killed_while_it_was_judged_stays(ec2, home, planned):
    build = die(ec2, home, planned, "baked", BAKE)
    orphans.clean_up_killed_builds(ec2, Builds(home), lambda _: None)
    assert (build.read().state, build.read().bake) == ("aborted", BAKE)
    assert len(left(ec2, home, build)) == 1  # the image


def test_the_key_of_a_verification_that_was_killed_goes(ec2, home, planned):
    build = die(ec2, home, planned, "verified", BAKE)
    orphans.clean_up_killed_builds(ec2, Builds(home), lambda _: None)
    assert key_files(build.id) == []
    assert build.read().state == "verified"


def test_an_empty_folder_without_a_record_goes_unless_it_is_new(ec2, home):
    old, new = (
        home / "builds" / f"{at:%Y%m%d-%H%M%S}-eks-gpu-ab12" for at in (LATER - timedelta(days=1), LATER)
    )
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    lost = home / "builds" / f"{LATER - timedelta(days=2):%Y%m%d-%H%M%S}-eks-gpu-ab12"
    lost.mkdir()
    (lost / "manifest.json").touch()  # somebody's record is lost: that is no reason to remove the rest
    orphans.clean_up_killed_builds(ec2, Builds(home), pytest.fail)
    assert [folder.exists() for folder in (old, new, lost)] == [False, True, True]


def test_what_belongs_to_another_computer_waits_for_its_deadline(ec2, home, planned, tmp_path_factory):
    other = die(ec2, tmp_path_factory.mktemp("other"), planned)
    assert orphans.clean_up_killed_builds(ec2, Builds(home), pytest.fail) == []
    assert orphans.find_local_orphans(ec2, Builds(home)) == []
    assert other.id in builds_with_orphans(ec2)


@pytest.mark.parametrize("call", [*REMOVING, "DescribeImages", "DeregisterImage", "DeleteSnapshot"])
def test_a_call_that_fails_once_loses_nothing_and_the_next_command_completes(ec2, home, dead, call):
    ec2.refuse = lambda asked: ("UnauthorizedOperation", "no") if asked.get("Action") == call else None
    said, before = [], snapshots(ec2)
    orphans.clean_up_killed_builds(ec2, Builds(home), said.append)
    assert call in said[-1]
    assert dead.read().state == "running"  # so the next one looks again
    assert key_files(dead.id) == []
    ec2.forget()
    orphans.clean_up_killed_builds(ec2, Builds(home), said.append)
    assert left(ec2, home, dead) == []
    assert snapshots(ec2) == before - 1
    assert dead.read().state == "aborted"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("call", REMOVING)
@pytest.mark.parametrize("times", [1, 99])
def test_a_clean_up_that_is_refused_after_success_is_tried_again_and_then_told(ec2, call, times):
    refused = []

    def refuse(asked):
        if asked.get("Action") == call and len(refused) < times:
            refused.append(call)
            return "DependencyViolation", "it is being used"
        return None

    said = []
    with access.ssh_access(ec2, "b1", purpose="bake", say=said.append) as entry:
        tags = build_tags("b1", "bake", LATER)
        ec2.client("ec2").run_instances(
            ImageId="ami-0123456789abcdef0",
            MinCount=1,
            MaxCount=1,
            TagSpecifications=tag_specifications(tags, "instance"),
        )
        ec2.refuse = refuse
    assert not entry.private_key.exists()
    assert [call in line and "cloud.sweep" in line for line in said] == [True] * (times > 1)
    assert builds_with_orphans(ec2) == ({"b1"} if times > 1 else set())


@pytest.fixture
def run(ec2, monkeypatch, capsys):
    """Run a command against the endpoint; returns exit code, standard output and standard error."""
    monkeypatch.setattr("gpukiln.clouds.select.make_cloud", lambda *_args, **_options: ec2)

    def one(command, **options):
        return code_of(command, **options), *capsys.readouterr()

    return one


def test_sweep_shows_what_is_orphaned_here_before_its_deadline(ec2, home, dead, run):
    code, out, err = run(commands.CloudSweep, json=True)
    found = {one["kind"]: one for one in json.loads(out)["found"]}
    assert code == 0
    assert found.keys() == {"instance", "key pair", "security group", "image", "private key"}
    assert all(one["build"] == dead.id for one in found.values())
    assert "its build has ended, on this machine" in err
    assert "--yes removes these 5" in err
    code, out, err = run(commands.CloudSweep, json=True, yes=True)
    assert code == 0, err
    assert len(json.loads(out)["removed"]) == 5
    assert left(ec2, home, dead) == []
    assert "nothing is left" in run(commands.CloudSweep)[2]


def test_commands_that_only_read_tell_it(dead, run):
    for command, options in ((ami.AmiList, {}), (ami.AmiShow, {"build": "last"})):
        _, _, err = run(command, **options)
        assert f"build {dead.id} was killed: `invoke cloud.sweep --cloud aws" in err
        assert key_files(dead.id)
    assert re.search(rf"{dead.id} .* killed", run(ami.AmiList)[1])


def test_a_build_that_has_nothing_to_bake_cleans_up_too(ec2, home, dead, planned, run, monkeypatch):
    monkeypatch.setattr(ami.BuildOptions, "plan", lambda *_: (planned, None))
    current = VerifiedAmi({"ImageId": "ami-1", "Tags": []}, frozenset([suite_digest()[:DIGEST_CHARS]]))
    # `reuse` first: a module that is imported while another one's function is replaced keeps the replacement
    for module in ("reuse", "verdict_tags"):
        monkeypatch.setattr(f"gpukiln.pipeline.{module}.find_verified", lambda *_: current)
    code, _, err = run(ami.AmiBuild, dry_run=True, stages="off")
    assert f"build {dead.id} was killed" in err
    assert len(left(ec2, home, dead)) == 5
    code, out, _ = run(ami.AmiBuild, stages="off")
    assert code == 0
    assert "nothing to bake" in out
    assert left(ec2, home, dead) == []
