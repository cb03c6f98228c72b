"""A workspace is started whole or not at all: every call of up and down fails once, and nothing is left."""

import functools
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import date

import pytest

from gpukiln.clouds import select
from gpukiln.clouds.embedded import scarcity
from gpukiln.commands import workspace as commands
from gpukiln.errors import (
    BusyError,
    CheckFailedError,
    GpukilnError,
    RefusedError,
    UnavailableError,
    UsageError,
)
from gpukiln.instances.tags import tag_list
from gpukiln.workspaces import lifecycle, local_state, provision, reach, volumes
from gpukiln.workspaces.contract import Capabilities, ComputeProfile, Workspace
from gpukiln.workspaces.lifecycle import outputs
from gpukiln.workspaces.network import key_file
from gpukiln.workspaces.plan import plan
from gpukiln.workspaces.provision import find_existing, workspace_lock
from gpukiln.workspaces.spec import UpOptions, spec_of
from tests.support.exit_codes import code_of
from tests.support.kill_points import (
    files_in,
    kill_at_each_step,
    mask_varying,
    run_killed_at,
    select_steps,
    steps_of,
)
from tests.support.release_cloud import Cloud, fault, is_change, make_image, running, server, tell

TODAY = date(2026, 11, 23)
NAMES = itertools.count(1)


@pytest.fixture(scope="module")
def image():
    """A cloud with one image that was proven."""
    tell("reset")
    yield make_image("b1")
    tell("reset")


@pytest.fixture
def wanted(image, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    plan_of(image)  # its calls are none of a test's
    yield Workspace(
        f"up-{next(NAMES)}",
        "ann",
        "us-west-2",
        compute_profile=ComputeProfile(8, "32Gi", "5Gi", gpu_type="T4"),
        image_id=image,
    )
    tell("faults", [])


def at_once(_):
    """Nobody waits here."""


@functools.cache
def plan_of(image):
    profile = ComputeProfile(8, "32Gi", gpu_type="T4")
    contract = Workspace("x", "ann", "us-west-2", compute_profile=profile, image_id=image)
    return plan(Cloud(), spec_of(contract, UpOptions(simulated=True)), TODAY)


def planned(wanted):
    return replace(plan_of(wanted.image_id), contract=wanted, simulated=False)


def start(wanted, say=at_once):
    with workspace_lock(Cloud(), wanted.workspace_name):
        found = find_existing(Cloud(), wanted)
        if found and found.machines:
            provision.resume(Cloud(), wanted, found, say=say, sleep=at_once)
        else:
            provision.start(Cloud(), planned(wanted), say=say, sleep=at_once)
    return find_existing(Cloud(), wanted)


def down(wanted, *, keep_home=False):
    for found in lifecycle.find_workspaces(Cloud(), wanted.workspace_name):
        lifecycle.remove_workspace(Cloud(), wanted, found, keep_home=keep_home, sleep=at_once)
    tell("forget")


def left(wanted):
    """What is there of a workspace, by its names and by its tags."""
    ec2, iam = Cloud().client("ec2"), Cloud().client("iam")
    ours = [{"Name": "tag:gpukiln:workspace", "Values": [wanted.workspace_name]}]
    roles = [one["RoleName"] for one in iam.list_roles()["Roles"]]
    profiles = [one["InstanceProfileName"] for one in iam.list_instance_profiles()["InstanceProfiles"]]
    return [
        *running(),
        *(one["VolumeId"] for one in ec2.describe_volumes(Filters=ours)["Volumes"]),
        *(one["GroupId"] for one in ec2.describe_security_groups(Filters=ours)["SecurityGroups"]),
        *(one["KeyName"] for one in ec2.describe_key_pairs(Filters=ours)["KeyPairs"]),
        *(name for name in (*roles, *profiles) if name.endswith(f"-{wanted.workspace_name}")),
        *(
            [str(key_file(Cloud(), wanted.workspace_name))]
            * key_file(Cloud(), wanted.workspace_name).exists()
        ),
    ]


def test_a_workspace_has_a_machine_with_its_home_rights_and_key(wanted, image):
    found = start(wanted)
    [machine], [home] = found.machines, found.homes
    assert (machine.instance_type, machine.state, machine.image_id) == ("g4dn.2xlarge", "running", image)
    assert home.instance_id == machine.instance_id
    assert machine.home_id == home.volume_id
    assert machine.usd_hour == "0.752"
    assert machine.plan.startswith("g4dn.2xlarge on-demand in us-west-2")
    assert not machine.by_session_manager  # this cloud has none
    told = Cloud().client("ec2").describe_instances(InstanceIds=[machine.instance_id])
    [instance] = told["Reservations"][0]["Instances"]
    assert instance["MetadataOptions"]["HttpTokens"] == "required"
    assert instance["MetadataOptions"]["HttpPutResponseHopLimit"] == 2
    assert instance["IamInstanceProfile"]["Arn"].endswith(f"/gpukiln-workspace-us-west-2-{found.name}")
    assert key_file(Cloud(), found.name).stat().st_mode & 0o777 == 0o600
    out = outputs(Cloud(), found)
    assert out.metadata.image_digest == ""
    assert out.metadata.verdict.startswith("passed")
    assert (out.volume_mounts[0].volume_id, out.volume_mounts[0].mount_path) == (home.volume_id, "/home/ann")
    assert (out.gpu_count, out.health) == (0, "unknown: not checked")
    assert start(wanted).machines == found.machines  # again: it is there
    down(wanted)
    assert left(wanted) == []


def test_the_home_is_kept_found_again_and_grown(wanted):
    first = start(wanted)
    down(wanted, keep_home=True)
    assert left(wanted) == [first.homes[0].volume_id]
    more = replace(wanted, compute_profile=replace(wanted.compute_profile, storage="7Gi"))
    [home] = start(more).homes
    assert (home.volume_id, home.size_gib) == (first.homes[0].volume_id, 7)
    # nothing asked: as it is; on a machine that runs it grows too, and never shrinks
    [home] = start(replace(wanted, compute_profile=replace(wanted.compute_profile, storage=None))).homes
    assert home.size_gib == 7
    said = []
    larger = replace(wanted, compute_profile=replace(wanted.compute_profile, storage="8Gi"))
    [home] = start(larger, say=said.append).homes
    assert home.size_gib == 8
    assert "when the machine starts next" in said[-1]
    with pytest.raises(UsageError, match="a volume never shrinks"):
        start(wanted)
    down(wanted)


def test_another_computer_may_attach_the_home_first(wanted, monkeypatch):
    found = start(wanted)
    homes, looks = volumes.homes, iter([()])  # the first look is before the other computer's attachment
    monkeypatch.setattr(volumes, "homes", lambda *asked: next(looks, homes(*asked)))
    provision._attach_home(
        Cloud(), wanted, found.machines[0].instance_id, found.machines[0].zone, sleep=at_once
    )
    assert find_existing(Cloud(), wanted) == found
    down(wanted)


@pytest.mark.parametrize("tag", ["gpukiln:last-machine", "gpukiln:machine"])
def test_the_machine_before_is_read_from_the_security_group(wanted, monkeypatch, tag):
    found = start(wanted)
    ec2, [before] = Cloud().client("ec2"), found.machines
    [group] = ec2.describe_security_groups(GroupIds=list(found.group_ids))["SecurityGroups"]
    assert {"Key": "gpukiln:last-machine", "Value": before.instance_id} in group["Tags"]
    ec2.delete_tags(Resources=list(found.group_ids), Tags=[{"Key": "gpukiln:last-machine"}])
    ec2.create_tags(Resources=list(found.group_ids), Tags=tag_list({tag: before.instance_id}))
    ec2.terminate_instances(InstanceIds=[before.instance_id])
    lasts, launch = [], provision.launch
    monkeypatch.setattr(
        provision, "launch", lambda *a, last, **more: lasts.append(last) or launch(*a, last=last, **more)
    )
    [machine] = start(wanted).machines
    assert lasts == [before.instance_id]
    assert machine.instance_id != before.instance_id
    down(wanted)


def test_without_a_home_there_is_none(wanted):
    found = start(replace(wanted, capabilities=Capabilities(persistent_home=False)))
    assert (found.homes, found.machines[0].home_id) == ((), "")
    down(wanted)


def test_another_owner_is_refused(wanted):
    start(wanted)
    with pytest.raises(RefusedError, match="is ann's, wanted bob's"):
        start(replace(wanted, owner="bob"))
    down(wanted)


def test_a_stopped_one_is_started_and_not_made_again(wanted):
    found = start(wanted)
    lifecycle.stop(Cloud(), found, sleep=at_once)
    with pytest.raises(RefusedError, match="is stopped"):
        start(wanted)
    [machine] = find_existing(Cloud(), wanted).machines
    assert machine.state == "stopped"
    down(wanted)


def test_two_at_once_are_one_workspace(wanted):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, [wanted, wanted])
    assert first.machines == second.machines
    assert len(running()) == 1
    down(wanted)


def test_no_capacity_where_the_home_is_names_the_move(wanted):
    zone = start(wanted).homes[0].zone
    down(wanted, keep_home=True)
    layout = server()[1]
    scarcity.add(layout, f"{zone}:*")
    try:
        with pytest.raises(BusyError, match="where its home is") as told:
            start(wanted)
    finally:
        scarcity.clear(layout)
    assert f"workspace.move {wanted.workspace_name} --zone" in told.value.hint
    assert len(left(wanted)) == 1  # the home
    down(wanted)


def calls_of(work, *arguments):
    """Every call of some work: action, and how many such calls came before it."""
    tell("calls")
    work(*arguments)
    seen = Counter()
    for _, action, _ in tell("calls"):
        yield action, seen[action]
        seen[action] += 1


def cases(calls):
    for action, earlier in calls:
        if is_change(action):
            yield action, earlier, "denied"
            if not earlier:
                yield action, earlier, "lost"
        elif not earlier:
            yield action, earlier, "denied"


def failure_of(work, *arguments):
    try:
        work(*arguments)
    except GpukilnError as error:
        return error
    return None


def test_every_call_of_up_may_fail_once(wanted):
    calls = list(calls_of(start, wanted))
    assert {"RunInstances", "AttachVolume", "ImportKeyPair", "CreateRole"} <= {action for action, _ in calls}
    down(wanted)
    count = 0
    for action, earlier, kind in cases(calls):
        case = f"{action} {earlier}: {kind}"
        tell("faults", [fault(action, kind, skip=earlier)])
        error = failure_of(start, wanted)
        tell("faults", [])
        if error is None:  # asked again with the same token; or it was looked, and was done
            assert case in ("RunInstances 0: lost", "AttachVolume 0: lost")
        else:
            assert not hasattr(error, "__notes__"), case
            assert left(wanted) == [], case
        count += 1
        if kind == "denied":  # it is as it was before
            continue
        found = start(wanted)
        assert (len(found.machines), len(found.homes), len(running())) == (1, 1, 1), case
        down(wanted)
        assert left(wanted) == [], case
    print(f"\n{len(calls)} calls, {count} faults")


def written(wanted):
    """Everything that is there of a workspace by its tags and names, without what two runs differ in."""
    ec2, iam, name = Cloud().client("ec2"), Cloud().client("iam"), wanted.workspace_name
    ours = [{"Name": "tag:gpukiln:workspace", "Values": [name]}]
    pages = ec2.describe_instances(Filters=[*ours, {"Name": "instance-state-name", "Values": ["running"]}])
    role = f"gpukiln-workspace-us-west-2-{name}"
    return mask_varying(
        {
            "found": [asdict(one) for one in lifecycle.find_workspaces(Cloud(), name)],
            "machines": [one for page in pages["Reservations"] for one in page["Instances"]],
            "volumes": ec2.describe_volumes(Filters=ours)["Volumes"],
            "groups": ec2.describe_security_groups(Filters=ours)["SecurityGroups"],
            "keys": ec2.describe_key_pairs(Filters=ours)["KeyPairs"],
            "rights": [rights_of(one) for one in iam.list_roles()["Roles"] if one["RoleName"] == role],
            "profiles": [
                [role["RoleName"] for role in one["Roles"]]
                for one in iam.list_instance_profiles()["InstanceProfiles"]
                if one["InstanceProfileName"] == role
            ],
        }
    )


def rights_of(role):
    """A role with its policies."""
    iam, name = Cloud().client("iam"), role["RoleName"]
    inline = iam.list_role_policies(RoleName=name)["PolicyNames"]
    policies = [iam.get_role_policy(RoleName=name, PolicyName=one)["PolicyDocument"] for one in inline]
    return role["Path"], role["AssumeRolePolicyDocument"], policies


def test_killed_anywhere_and_typed_again_it_is_as_if_never_killed(wanted, tmp_path):
    start(wanted)
    undisturbed = written(wanted), modes(tmp_path)
    assert "g4dn.2xlarge on-demand in us-west-2" in undisturbed[0]
    down(wanted)
    runs = 0
    for step in kill_at_each_step(lambda: start(wanted), tmp_path):
        found = start(wanted)
        assert (written(wanted), modes(tmp_path)) == undisturbed, step
        down(wanted)
        assert left(wanted) == []
        runs += 1
    assert runs > 8
    assert found.machines[0].usd_hour == "0.752"


def modes(folder):
    """The files of a folder with their modes: a key is another one each time."""
    return {name: mode for name, (mode, _) in files_in(folder).items()}


@pytest.fixture
def put_away(monkeypatch):
    """Type `workspace.down`, which must end well."""
    monkeypatch.setattr(select, "make_cloud", lambda _, region, **__: Cloud(region))
    monkeypatch.setattr(reach, "ask_busy", lambda *_: None)

    def run(wanted, **options):
        assert code_of(commands.WorkspaceDown, wanted.workspace_name, yes=True, **options) == 0

    return run


@pytest.mark.parametrize("options", [{"force": True}, {"keep_home": True}])
def test_down_killed_anywhere_and_typed_again_it_is_as_if_never_killed(wanted, tmp_path, put_away, options):
    def raise_again():
        tell("forget")
        (tmp_path / "workspaces/known/embedded-us-west-2.json").unlink(missing_ok=True)  # machines before
        found = start(wanted)
        if options.get("force"):
            busy = tag_list({"gpukiln:busy": "ann is there"})
            Cloud().client("ec2").create_tags(Resources=[found.machines[0].instance_id], Tags=busy)
        local_state.refresh(Cloud())

    def state():
        return written(wanted), files_in(tmp_path)

    raise_again()
    put_away(wanted, **options)
    undisturbed = state()
    assert ("vol-ID" in undisturbed[0]) is ("keep_home" in options)
    raise_again()
    steps = steps_of(lambda: put_away(wanted, **options), tmp_path)
    first = steps.index("DeleteKeyPair") if "keep_home" in options else 0  # before that it is the same
    for number in select_steps(steps, first=first + 1):
        raise_again()
        assert run_killed_at(number, lambda: put_away(wanted, **options), tmp_path)
        put_away(wanted, **options)
        assert state() == undisturbed, f"killed at step {number}"
    down(wanted)


def test_every_call_of_down_may_fail_once(wanted):
    start(wanted)
    calls = list(calls_of(down, wanted))
    assert {"TerminateInstances", "DeleteVolume", "DeleteKeyPair"} <= {action for action, _ in calls}
    for action, earlier, kind in cases(calls):
        case = f"{action} {earlier}: {kind}"
        start(wanted)
        tell("faults", [fault(action, kind, skip=earlier)])
        with pytest.raises(GpukilnError, match=action):
            down(wanted)
        tell("faults", [])
        down(wanted)
        assert left(wanted) == [], case


def test_what_the_agent_says_is_waited_for(wanted):
    found = start(wanted)
    said = []

    def tag(stage):
        ids = [found.machines[0].instance_id]
        Cloud().client("ec2").create_tags(Resources=ids, Tags=tag_list({"gpukiln:stage": stage}))

    stages = iter(["home done", "driver done", "done"])
    provision.wait_until_done(Cloud(), wanted, say=said.append, sleep=lambda _: tag(next(stages)))
    assert [line.partition(": ")[2] for line in said] == ["home done", "driver done", "done"]
    tag("failed driver: no GPU was found")
    with pytest.raises(CheckFailedError, match="no GPU was found") as told:
        provision.wait_until_done(Cloud(), wanted, say=at_once, sleep=at_once)
    assert "workspace.ssh" in told.value.hint
    tag("driver done")
    with pytest.raises(UnavailableError, match="is not done after 9 s: driver done"):
        provision.wait_until_done(Cloud(), wanted, say=at_once, sleep=at_once, timeout_s=9)
    down(wanted)
    with pytest.raises(UnavailableError, match="has ended"):
        provision.wait_until_done(Cloud(), wanted, say=at_once, sleep=at_once)


def test_the_next_region_is_tried(wanted):
    there_ = make_image("b2", region="eu-west-1")
    layout = server()[1]
    for zone in "abcd":
        scarcity.add(layout, f"us-west-2{zone}:*")
    said = []
    try:
        spec = spec_of(replace(wanted, image_id=None), UpOptions(simulated=True))
        cloud, found = provision.provision_workspace(
            [Cloud(), Cloud("eu-west-1")], spec, said.append, wait=False
        )
    finally:
        scarcity.clear(layout)
    assert (cloud.region, found.machines[0].image_id) == ("eu-west-1", there_)
    assert any("no capacity now" in line for line in said)
    assert not [one for one in left(wanted) if "us-west-2" in one or one.startswith(("sg-", "vol-"))]
    lifecycle.remove_workspace(
        cloud, replace(wanted, region="eu-west-1"), found, keep_home=False, sleep=at_once
    )
