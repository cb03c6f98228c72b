"""What docs/release.md promises, typed as a user does: two images released, compared, rolled back, pruned.

The first image is test_build.py's: tests/conftest.py has the same process run both, so only one is baked from
nothing, and the second goes on from its stage with the driver.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from gpukiln.clouds.tags import BAKED_STAGE_TAG
from tests.support.harness import copy_checkout
from tests.support.installed import Installed
from tests.support.interrupted_build import interrupt_boot
from tests.support.recorder import ACCOUNT, Recorder, denied

pytestmark = pytest.mark.e2e

HOME, EAST, EUROPE = REGIONS = ("us-west-2", "us-east-1", "eu-west-1")
EVERYWHERE = ",".join(REGIONS)
CHANGES = {  # nodes get another tool, and no Docker
    "roles/nvtop/defaults/main.yml": ("nvtop_packages: [nvtop]", "nvtop_packages: [nvtop, tree]"),
    "ami/eks-gpu/image.yaml": ("  - docker\n", ""),
}
# Step -> the job of cloud.policy that it belongs to.
JOBS = {"build": "build", "verify": "verify", "prune": "prune"}
JOBS |= dict.fromkeys(("release", "rollback", "channels"), "release")
PROTECTED, FREE = "enabled-without-cooldown", "disabled"


@dataclass(frozen=True)
class Typed:
    """What a command said, and the calls that it made on the cloud."""

    out: str
    err: str
    calls: list

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def changes(self):
        return [f"{call.action} in {call.region}" for call in self.calls if call.changes]


@pytest.fixture(scope="module")
def recorder(here, built):  # noqa: ARG001 - its cloud is started
    with Recorder(here.home).listening() as one:
        yield one


@pytest.fixture(scope="module")
def typed(here, recorder):
    """Types a command, whose name is the step; another exit code than the wanted one is a failure."""

    def run(command, *arguments, code=0):
        with recorder.during(command.partition(".")[2]) as calls:
            done = here.invoke(command, *arguments, ok=False)
        said = f"{command} {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == code, said
        return Typed(done.stdout, done.stderr, calls)

    return run


@pytest.fixture(scope="module")
def first(built):
    return built[0]


@pytest.fixture(scope="module")
def second(here, recorder, first, tmp_path_factory):
    """The changed image. Its build is interrupted while it boots, and an installed wheel does the rest."""
    checkout = copy_checkout(tmp_path_factory.mktemp("second") / "checkout", CHANGES)
    with recorder.during("build"):
        said = interrupt_boot(here, here.start("ami.build", "--region", HOME, cwd=checkout))
    assert "changed role nvtop: defaults/main.yml" in said  # why it was built
    assert json.loads(here.invoke("ami.show", "last", "--json").stdout)["state"] == "aborted"
    installed = Installed(tmp_path_factory.mktemp("installed"), environment=here.environment)
    with recorder.during("verify"):
        [verdict] = installed.document("ami", "verify", "last")["verdicts"]
    assert [verdict["suite_version"]] == [one["suite_version"] for one in first["verdicts"]]
    record = json.loads(here.invoke("ami.show", "last", "--json").stdout)
    assert (record["state"], record["verdicts"]) == ("verified", [verdict])
    return record


@pytest.fixture(scope="module")
def pointer(first):
    return f"/gpukiln/eks-gpu/{first['plan']['kubernetes']}/candidate/image_id"


@pytest.fixture(scope="module")
def described(recorder):
    """An image as EC2 describes it now, with its tags as a dict."""

    def look(region, image_id):
        [image] = owned(recorder, region, "image-id", image_id)
        return {**image, "Tags": {tag["Key"]: tag["Value"] for tag in image["Tags"]}}

    return look


@pytest.fixture(scope="module")
def pointed(recorder, described, pointer):
    """The image that the channel points at in each region."""

    def look():
        clients = {region: recorder.client("ssm", region) for region in REGIONS}
        values = {r: one.get_parameter(Name=pointer)["Parameter"]["Value"] for r, one in clients.items()}
        return {region: described(region, value) for region, value in values.items()}

    return look


def owned(recorder, region, name, value):
    ask = {"Owners": ["self"], "IncludeDeprecated": True, "Filters": [{"Name": name, "Values": [value]}]}
    return recorder.client("ec2", region).describe_images(**ask)["Images"]


def images_of(document):
    return {result["region"]: result["image_id"] for result in document["regions"]}


def disk(here, image):
    return here.home / f"cloud/snapshots/{image['BlockDeviceMappings'][0]['Ebs']['SnapshotId']}.raw"


def require_released(here, record, there):
    """Every region has the very image that was proven, and nobody can remove it by mistake."""
    source = there[HOME]
    assert source["ImageId"] == record["bake"]["image_id"]
    for region, image in there.items():
        assert image["State"] == "available"
        assert image["DeregistrationProtection"] == PROTECTED
        assert "DeprecationTime" not in image
        assert image["ImdsSupport"] == "v2.0"
        assert image["Public"] is False
        assert image["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True
        assert image["Tags"]["gpukiln:build-id"] == record["build_id"]
        assert image["Tags"]["gpukiln:digest"] == record["plan"]["digest"]
        assert image["Tags"]["gpukiln:verdict"] == "passed"
        assert image["Tags"]["gpukiln:image"] == "eks-gpu"
        assert "gpu=" in image["Tags"]["gpukiln:not-run"]
        assert image["Tags"].get("gpukiln:source-image", source["ImageId"]) == source["ImageId"]
        assert ("gpukiln:source-image" in image["Tags"]) is (region != HOME)
        assert disk(here, image).samefile(disk(here, source))  # snapshots never change: one file, many names
    assert len({image["ImageId"] for image in there.values()}) == len(REGIONS)


def test_stable_refuses_what_was_not_proven(typed, first):
    refused = typed("ami.release", first["build_id"], "--channel", "stable", "--regions", EVERYWHERE, code=6)
    assert "versions.toolkit: nvidia_container_toolkit left out" in refused.err
    assert not refused.changes


def test_the_first_release(here, typed, first, pointed):
    command = ("ami.release", first["build_id"], "--channel", "candidate", "--regions", EVERYWHERE)
    planned = typed(*command, "--dry-run")
    assert "dry run: nothing was changed" in planned.out
    assert not planned.changes
    document = typed(*command, "--json").json
    there = pointed()
    require_released(here, first, there)
    assert images_of(document) == {region: image["ImageId"] for region, image in there.items()}
    assert {result["state"] for result in document["regions"]} == {"done"}
    [record] = (here.home / "releases").glob(f"*-candidate-{first['build_id']}-release.json")
    assert json.loads(record.read_text()) == document | {"schema": 1}
    again = typed(*command, "--json")
    assert images_of(again.json) == images_of(document)
    assert not again.changes


def test_the_second_image_goes_on_from_the_first_ones_driver(first, second):
    stage = second["bake"]["stage"]
    assert (stage["stage"], stage["build_id"]) == ("driver", first["build_id"])
    assert [one["passed"] for one in second["verdicts"]] == [True]
    assert second["plan"]["git_commit"] is None or second["plan"]["git_commit"].endswith("-dirty")


def test_the_difference_is_told(typed, first, second, tmp_path):
    flaws = tmp_path / "osv.json"
    flaws.write_text(json.dumps([flaw("TEST-1", "tree"), flaw("TEST-2", "docker.io")]))
    options = (first["build_id"], second["build_id"], "--vulnerabilities", str(flaws))
    diff = typed("ami.diff", *options, "--json").json
    packages = {change["name"]: change["direction"] for change in diff["packages"]}
    assert packages["tree"] == "added"
    assert packages["docker.io"] == "removed"
    assert "changed role nvtop: defaults/main.yml" in diff["inputs"]
    assert [line for line in diff["inputs"] if line.startswith("available version of docker: ")]
    facts = {change["name"]: change for change in diff["facts"]}
    assert (facts["docker"]["new"], facts["docker"]["direction"]) == (None, "removed")
    assert facts["nvidia_driver"]["direction"] is None
    for measure in ("size of the packages", "first boot", "checks"):
        assert facts[measure]["old"]
        assert facts[measure]["new"]
    checks = {check["id"]: (check["old"], check["new"]) for check in diff["checks"]}
    assert checks["runtime.docker"] == ("passed", "not_run")
    assert [one["id"] for one in diff["introduced"]] == ["TEST-1"]
    assert [one["id"] for one in diff["fixed"]] == ["TEST-2"]
    text = typed("ami.diff", *options).out
    markdown = typed("ami.diff", *options, "--format", "markdown").out
    for words in ("tree", "docker.io", "runtime.docker", "TEST-1", "role nvtop: 1 file"):
        assert words in text
        assert words in markdown
    notes = typed("ami.notes", second["build_id"], "--vulnerabilities", str(flaws)).out
    assert notes.startswith(f"# {second['bake']['name']}\n")
    assert f"Changes since {first['bake']['name']}" in notes
    assert "new: TEST-1 in tree" in notes


def flaw(name, package):
    versions = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}
    affected = {"package": {"ecosystem": "Debian:12", "name": package}, "ranges": [versions]}
    return {"id": name, "modified": "2026-11-01T00:00:00Z", "affected": [affected]}


def test_the_second_release_replaces_the_first(here, typed, first, second, pointed, described):
    before = pointed()
    command = ("ami.release", "last", "--channel", "candidate", "--regions")
    refused = typed(*command, f"{HOME},{EAST}", code=6)
    assert f"also points at an image in {EUROPE}" in refused.err
    assert not refused.changes
    document = typed(*command, EVERYWHERE, "--json").json
    assert document["build"] == second["build_id"]
    require_released(here, second, pointed())
    assert {result["region"]: result["replaces"] for result in document["regions"]} == {
        region: image["ImageId"] for region, image in before.items()
    }
    for region, image in before.items():
        replaced = described(region, image["ImageId"])
        assert replaced["DeregistrationProtection"] == FREE
        assert replaced["DeprecationTime"] > document["started_at"]
        assert replaced["Tags"]["gpukiln:build-id"] == first["build_id"]
    assert not typed(*command, EVERYWHERE).changes


def test_what_is_wrong_with_a_channel_is_told_and_made_good(recorder, typed, second, pointer, pointed):
    image_id = pointed()[EUROPE]["ImageId"]
    recorder.client("ec2", EUROPE).disable_image_deregistration_protection(ImageId=image_id)
    wrong = typed("ami.channels", "--regions", EAST, code=1)  # one region names the others
    assert f"{pointer} in {EUROPE}: the image can be deregistered" in wrong.err
    again = typed("ami.release", second["build_id"], "--channel", "candidate", "--regions", EVERYWHERE)
    assert again.changes == [f"ec2:EnableImageDeregistrationProtection in {EUROPE}"]
    rows = typed("ami.channels", "--json").json["channels"]
    assert {row["region"] for row in rows} == set(REGIONS)
    assert {(row["build"], tuple(row["problems"])) for row in rows} == {(second["build_id"], ())}


def test_a_rollback_moves_every_region_back(here, typed, first, second, pointed, described):
    before = pointed()
    planned = typed("ami.rollback", "--channel", "candidate", "--dry-run")
    assert f"rollback to {first['build_id']}" in planned.out
    assert not planned.changes
    document = typed("ami.rollback", "--channel", "candidate", "--json").json
    assert (document["build"], document["state"]) == (first["build_id"], "done")
    require_released(here, first, pointed())
    for region, image in before.items():
        bad = described(region, image["ImageId"])
        assert bad["Tags"]["gpukiln:build-id"] == second["build_id"]
        assert bad["DeregistrationProtection"] == FREE
        left = datetime.fromisoformat(bad["DeprecationTime"]) - datetime.now(UTC)
        assert left < timedelta(minutes=6)  # at once, as far as EC2 lets it
    rows = typed("ami.channels", "--json").json["channels"]
    assert {(row["build"], tuple(row["problems"])) for row in rows} == {(first["build_id"], ())}
    assert typed("ami.rollback", "--channel", "candidate", code=6).changes == []  # there is none before it


def fates(document):
    """Per region and image what is to be done with it, and why."""
    return {
        (one["region"], item["image_id"]): (item["action"], item["reason"])
        for one in document["regions"]
        for item in one["images"]
    }


def test_prune_removes_what_nobody_needs_and_nothing_else(here, recorder, typed, first, second, pointed):
    live = {(region, image["ImageId"]) for region, image in pointed().items()}
    mine = ("tag:gpukiln:build-id", second["build_id"])
    old = {
        region: (image["ImageId"], disk(here, image))
        for region in REGIONS
        for image in owned(recorder, region, *mine)
    }
    doomed = {(region, image_id) for region, (image_id, _) in old.items()}
    assert len(doomed) == len(REGIONS)

    young = typed("ami.prune", "--json")
    assert {fates(young.json)[one] for one in doomed} == {("keep", "created 0 days ago, less than 30")}
    nodes, europe = {"LaunchTemplateName": "nodes"}, recorder.client("ec2", EUROPE)
    europe.create_launch_template(**nodes, LaunchTemplateData={"ImageId": old[EUROPE][0]})
    command = ("ami.prune", "--older-than", "0")
    planned = typed(*command)
    assert "nothing was removed: --yes removes what says `remove`" in planned.err
    assert not young.changes + planned.changes

    stages = {(HOME, image["ImageId"]) for image in owned(recorder, HOME, "tag-key", BAKED_STAGE_TAG)}
    assert stages
    assert not {("gpukiln:image", "eks-gpu")} & {
        (tag["Key"], tag["Value"])
        for image in owned(recorder, HOME, "tag-key", BAKED_STAGE_TAG)
        for tag in image["Tags"]
    }  # nobody selects what was baked by half
    done = fates(typed(*command, "--yes", "--json").json)
    kubernetes = first["plan"]["kubernetes"]
    points = ("keep", f"candidate of eks-gpu {kubernetes} points at it")
    assert {done[one] for one in live} == {points}
    assert {one for one, (action, _) in done.items() if action == "removed"} == stages | {
        (region, old[region][0]) for region in (HOME, EAST)
    }
    assert done[EUROPE, old[EUROPE][0]] == ("keep", "used by launch template nodes version 1")
    europe.delete_launch_template(**nodes)
    typed(*command, "--yes")
    for region, (_, file) in old.items():
        assert not owned(recorder, region, *mine)
        assert not file.exists()
    assert not typed(*command, "--yes").changes
    require_released(here, first, pointed())
    typed("ami.channels")


def test_every_call_is_allowed_by_the_policy_of_its_job(here, recorder, record_property):
    """Narrowed to an account, the regions and the channel, as docs/release.md has it."""

    def policy(job, regions=EVERYWHERE, channels="candidate"):
        options = ("--account", ACCOUNT, "--regions", regions, "--channels", channels)
        return json.loads(here.invoke("cloud.policy", "--for", job, *options).stdout)

    record_property("calls", recorder.table())
    print(f"\n{recorder.table()}")
    calls = {step: [call for call in recorder.calls if call.step == step] for step in JOBS}
    assert {call.step for call in recorder.calls} == set(JOBS), "ami.diff and ami.notes ask no cloud"
    assert {call.by for call in calls["build"]} == {"gpukiln"}, "Packer asks no cloud"
    policies = {job: policy(job, HOME) for job in ("build", "verify")}
    policies |= {job: policy(job) for job in ("release", "prune")}
    for step, job in JOBS.items():
        assert denied(calls[step], policies[job]) == []
    # and they are narrow
    assert {text.split()[1] for text in denied(calls["release"], policy("release", channels="stable"))} == {
        "ssm:PutParameter",
        "ssm:AddTagsToResource",
    }
    elsewhere = denied(calls["release"], policy("release", f"{HOME},{EAST}"))
    assert elsewhere
    assert all(f" in {EUROPE} " in text for text in elsewhere)
    assert denied(calls["prune"], policies["release"])


def test_nothing_is_left(here):
    left = here.leftovers()
    assert not any(left.values()), left
