"""IAM policies hold what a rehearsal of every job calls, and nothing else: every call is recorded."""

import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from botocore.client import BaseClient

from gpukiln.attest import attestation
from gpukiln.attest.signing import signer_of
from gpukiln.attest.trust import require_verified
from gpukiln.catalog import permissions
from gpukiln.catalog.bases import base
from gpukiln.clouds.embedded import scarcity
from gpukiln.clouds.embedded.signing_calls import extend_signing
from gpukiln.clouds.iam import Scope, policy
from gpukiln.clouds.tags import BUILD_TAG
from gpukiln.docker import repository
from gpukiln.errors import UnavailableError
from gpukiln.exports import import_disk, run
from gpukiln.images import bake
from gpukiln.images.bases import resolve_base
from gpukiln.images.channels import load_channel
from gpukiln.images.module_store import S3Store
from gpukiln.images.pointer import Pointer
from gpukiln.images.stages import StageKeeper, Stages, waiting_task
from gpukiln.instances import access, orphans
from gpukiln.instances import tags as machines
from gpukiln.instances.console import require_booting
from gpukiln.instances.orphans import find_orphans, remove_orphans
from gpukiln.kubernetes import canary
from gpukiln.kubernetes.canary import LABEL, CanaryOptions, remove_orphaned_nodes
from gpukiln.kubernetes.cluster_verification import GpuTestOptions
from gpukiln.offers.availability import availability
from gpukiln.offers.image import images_of
from gpukiln.offers.refresh import refresh
from gpukiln.pipeline import steps, verdict_tags
from gpukiln.pipeline.verdict_signing import sign_verdict
from gpukiln.release import prune
from gpukiln.release.images import LaunchPermissions
from gpukiln.release.log import ReleaseLog, require_complete
from gpukiln.release.overview import read_channels
from gpukiln.release.publish import release
from gpukiln.release.rollback import rollback
from gpukiln.workspaces import lifecycle, network, provision, volumes
from gpukiln.workspaces.contract import Capabilities, ComputeProfile, Workspace
from gpukiln.workspaces.plan import plan
from gpukiln.workspaces.spec import UpOptions, spec_of
from tests.support import release_cloud
from tests.support.api_server import node
from tests.support.eks import make_cluster
from tests.support.endpoint import serve
from tests.support.exports import BIOS_TABLE, boot_disk, image_with_disk
from tests.support.plans import ec2_with_a_base
from tests.support.plans import plan as made_plan
from tests.support.release_cloud import HOME, REGIONS, fault, make_image, quiet, release_spec, tell, verdict
from tests.support.signing import kms_key, sign, signed_wish, trusting

# IAM's name, where it is none of service:Call (Service Authorization Reference)
IAM_NAME = {
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "service-quotas:GetServiceQuota": "servicequotas:GetServiceQuota",
}
EVERYTHING = Scope(
    kms_keys=["arn:aws:kms:us-west-2:111122223333:key/1"],
    module_cache="s3://modules/x",
    sign_key="arn:aws:kms:us-west-2:111122223333:key/2",
    node_role="arn:aws:iam::111122223333:role/nodes",
)
RUN = "ec2:RunInstances"
TAG_KEY = "${TagKey}"
TAGGED_BY_CALL = (
    *(RUN, "ec2:CreateKeyPair", "ec2:ImportKeyPair", "ec2:CreateSecurityGroup", "ec2:CreateVolume"),
    *("ec2:CreateSnapshot", "ebs:StartSnapshot", "ec2:RegisterImage"),
)
ID = re.compile(r"(ami|snap|i|vol|sg|key)-[0-9a-f]{8,}")


class Calls:
    """What was called for each job, by whom, and with which conditions of IAM met."""

    def __init__(self):
        self.job, self.made = "", defaultdict(list)

    def note(self, action, by, given, had):
        """`given` are tags of the request, `had` those of each thing that it names."""
        self.made[self.job].append((action, by, frozenset(given), [frozenset(tags) for tags in had]))

    def by(self, job, *callers):
        return {action for action, by, *_ in self.made[job] if by in callers}


def texts(value):
    """Every text in the parameters of a call."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


def given_tags(parameters):
    groups = [one["Tags"] for one in parameters.get("TagSpecifications", ())] or [parameters.get("Tags", ())]
    keys = [{tag["Key"] for tag in group} for group in groups]
    return set.intersection(*keys) if keys else set()


def setting_up(calls):
    """Calls of the test itself."""
    calls.job = "the test"


def make_images(calls, endpoint):
    """A base image as EC2 has it, and an image of ours."""
    setting_up(calls)
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto reads its settings first

    ec2, made = endpoint.client("ec2"), []
    for name in ("base", "ours", "gone"):
        image_id = ec2.register_image(
            Name=name,
            RootDeviceName="/dev/xvda",
            Architecture="x86_64",
            VirtualizationType="hvm",
            BlockDeviceMappings=[{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 8}}],
        )["ImageId"]
        backend = ec2_backends["123456789012"]["us-west-2"]
        backend.amis[image_id].root_device_type = "ebs"
        made.append(image_id)
    snapshots = [
        device["Ebs"]["SnapshotId"]
        for image in ec2.describe_images(ImageIds=made[1:])["Images"]
        for device in image["BlockDeviceMappings"]
    ]
    ec2.create_tags(Resources=[*made[1:], *snapshots], Tags=[{"Key": "gpukiln:recipe", "Value": "eks-gpu"}])
    return made


def plan_only(calls, endpoint):
    calls.job = "plan"
    for name in ("eks-ubuntu-22.04", "debian-12"):  # neither is there: what else is published is asked for
        with pytest.raises(UnavailableError, match="has no base"):
            resolve_base(name, base(name), endpoint, kubernetes="1.34", architecture="x86_64")
    assert verdict_tags.find_verified(SimpleNamespace(digest="x"), endpoint, "suite") is None


def build(calls, endpoint, images, planned, folder):
    setting_up(calls)
    endpoint.client("s3").create_bucket(
        Bucket="modules", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    calls.job = "build"
    for name in (
        "eks-ubuntu-22.04",
        "debian-12",
    ):  # neither is there: what else is published is asked for too
        with pytest.raises(UnavailableError, match="has no base"):
            resolve_base(name, base(name), endpoint, kubernetes="1.34", architecture="x86_64")
    assert verdict_tags.find_verified(SimpleNamespace(digest="x"), endpoint, "suite") is None
    orphans.builds_with_orphans(endpoint)
    with access.ssh_access(endpoint, "b1", purpose="bake", say=print) as entry:
        bake_and_capture(endpoint, images[0], entry, planned, folder)
    machines.remove_image(endpoint, images[2])
    assert orphans.remove_unrecorded(endpoint, "b1")  # no record knows it here
    store = S3Store(endpoint.client("s3"), "modules", "x")
    (folder / "module").write_text("a")
    store.put(folder / "module", "535/module")
    assert store.names("535") == ["535/module"]
    store.get("535/module", folder / "again")


def bake_and_capture(endpoint, source, entry, planned, folder):
    """As a bake does it, but nothing is done on the machine: that asks no cloud."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "_speaks_ssh", lambda *_: True)
        target = access.machine_to_bake(
            endpoint,
            entry,
            source,
            build_id="b1",
            instance_type=planned.builder_instance_type,
            user="admin",
            root_volume=bake.root_volume(planned),
            say=print,
        )
    one = SimpleNamespace(id="b1", folder=folder)
    keeper = StageKeeper(Stages("eks-gpu", {"driver": "k"}, endpoint), one, {BUILD_TAG: "b1"}, quiet())
    keeper.on_task(f"{waiting_task()}driver")
    assert bake.capture(endpoint, planned, one, target.name, "6.1", print)


def verify(calls, endpoint, images, folder):
    calls.job = "verify"
    subject = SimpleNamespace(
        build_id="b2",
        image_id=images[1],
        instance_types=("g4dn.xlarge",),
        ssh_user="admin",
        profile="image",
        recipe="eks-gpu",
        base="eks-al2023",
    )
    orphans.builds_with_orphans(endpoint)
    attestation._describe(endpoint, images[1])
    bake.finish(endpoint, images[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "run_suite", lambda *_, **__: verdict())
        patch.setattr(access, "_speaks_ssh", lambda *_: True)
        steps.verify_image(subject, endpoint, folder, quiet(), spot=True)
        verdict_tags.write_verdict_tags(endpoint, subject, verdict())
        setting_up(calls)
        extend_signing()
        key = kms_key(client=endpoint.client("kms"))
        calls.job = "verify"
        sign_verdict(endpoint, subject, verdict(), folder, signer_of(key, endpoint))
        trusting(patch, key)
        require_verified(endpoint, attestation._describe(endpoint, images[1]))
        patch.setattr(access, "_speaks_ssh", lambda *_: False)
        about = {"build_id": "b3", "instance_types": ["g4dn.xlarge"], "user": "admin"}
        with pytest.raises(UnavailableError, match="SSH does not answer"):  # its console is asked for
            access.machine_from_image(
                endpoint, images[1], **about, say=lambda _: None, timeout_s=-1
            ).__enter__()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(endpoint), "subnet_id", some_subnet(calls, endpoint))
        with access.ssh_access(endpoint, "b4", purpose="verify", say=print):
            pass


def join_cluster(calls, endpoint, images):
    setting_up(calls)
    make_cluster(endpoint)
    subject = SimpleNamespace(
        build_id="b5", image_id=images[1], instance_types=("g4dn.xlarge",), base="eks-al2023"
    )
    gone = SimpleNamespace(context="prod", list=lambda *_, **__: [])  # the machine never registers
    options = CanaryOptions(
        GpuTestOptions("x"), ("g4dn.xlarge",), eks_cluster="prod", node_profile="nodes", ready_s=-1
    )
    calls.job = "cluster"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canary, "RESTART_S", -1)
        remove_orphaned_nodes(
            SimpleNamespace(list=lambda *_, **__: [node("n-1", **{LABEL.replace("/", "__"): "x"})]),
            endpoint,
            print,
        )
        plan = canary._join_plan(subject, endpoint, gone, options, "mark")
        types = subject.instance_types
        with canary._canary_machine(subject, endpoint, gone, plan, types, "mark", options, print) as machine:
            joining = canary._Canary(gone, endpoint, machine, "mark", options, print)
            assert "did not register" in joining.wait_until_usable()[1]
            assert joining.restart(node("n-1"))["problem"]


def some_subnet(calls, endpoint):
    setting_up(calls)
    found = endpoint.client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
    calls.job = "verify"
    return found


def release_twice(calls, records, folder):
    setting_up(calls)
    tell("reset")
    first, second = make_image("b1"), make_image("b2")
    for region in REGIONS:
        release_cloud.Cloud(region).client("ec2").disable_image_block_public_access()
    calls.job = "release"
    for image_id, build, more in (
        (first, "b1", {"keys": dict.fromkeys(REGIONS, "alias/x")}),
        (second, "b2", {"sharing": LaunchPermissions(public=True)}),
    ):
        require_complete(
            release(release_spec(image_id, build, **more), release_cloud.Cloud(), records, quiet())
        )
    candidate = Pointer("eks-gpu", "1.34", "candidate")
    rules = load_channel("candidate")
    require_complete(rollback(candidate, rules, release_cloud.Cloud(), [HOME], records, quiet()))
    assert read_channels(release_cloud.Cloud(), list(REGIONS)).rows
    release_signed(calls, records, folder)


def release_signed(calls, records, folder):
    setting_up(calls)
    key = kms_key()
    sign(image := make_image("b3"), key, folder)
    calls.job = "release"
    with pytest.MonkeyPatch.context() as patch:
        trusting(patch, key)
        wanted = signed_wish(image, "b3", key=key)
        require_complete(release(wanted, release_cloud.Cloud(), records, quiet()))


def remove_old(calls, records):
    setting_up(calls)
    old = make_image("b0", days_old=100)
    ec2, autoscaling = (release_cloud.Cloud().client(name) for name in ("ec2", "autoscaling"))
    ec2.create_launch_template(
        LaunchTemplateName="pointed",
        LaunchTemplateData={"ImageId": f"resolve:ssm:{release_cloud.POINTER.format('candidate')}"},
    )
    autoscaling.create_launch_configuration(
        LaunchConfigurationName="old", ImageId="ami-1", InstanceType="m5.large"
    )
    calls.job = "prune"
    rules = prune.PruneRules(older_than_days=30, keep=None, limit=20, in_use={}, without_channels=False)
    done = prune.prune(release_cloud.Cloud(), list(REGIONS), rules, records, remove=True)
    prune.require_complete(done)
    assert [item.image_id for one in done for item in one.items if item.action == "removed"] == [old]


def sweep(calls, endpoint):
    setting_up(calls)
    ec2 = endpoint.client("ec2")
    tags = machines.build_tags("dead", "bake", datetime.now(UTC) - timedelta(hours=1))
    tagged = {
        kind: machines.tag_specifications(tags, kind)
        for kind in ("instance", "volume", "key-pair", "security-group")
    }
    ec2.create_key_pair(KeyName="dead", TagSpecifications=tagged["key-pair"])
    ec2.create_security_group(GroupName="dead", Description="x", TagSpecifications=tagged["security-group"])
    zone = ec2.describe_availability_zones()["AvailabilityZones"][0]["ZoneName"]
    volume = ec2.create_volume(AvailabilityZone=zone, Size=1, TagSpecifications=tagged["volume"])
    ours = [{"Key": key, "Value": "x"} for key in ("gpukiln:digest", "gpukiln:recipe")]
    ec2.create_snapshot(
        VolumeId=volume["VolumeId"], TagSpecifications=[{"ResourceType": "snapshot", "Tags": ours}]
    )
    ec2.run_instances(ImageId="ami-00000001", MinCount=1, MaxCount=1, TagSpecifications=tagged["instance"])
    killed = ec2.register_image(Name="gpukiln-eks-gpu-b9", RootDeviceName="/dev/xvda")["ImageId"]
    mine = machines.tag_list({"gpukiln:recipe": "eks-gpu", "gpukiln:build-id": "b9"})
    ec2.create_tags(Resources=[killed], Tags=mine)
    calls.job = "sweep"
    assert orphans.remove_unrecorded(endpoint, "b9") == [killed]
    found = find_orphans(endpoint, now=datetime.now(UTC) + timedelta(days=2))
    removed = remove_orphans(endpoint, found, lambda _: None)
    assert {one.kind for one in removed} == {"instance", "volume", "key pair", "security group", "snapshot"}


def push(calls, endpoint):
    calls.job = "push"
    repository.find(
        repository.parse("gpukiln/runner-gpu"), endpoint, create=True, dry_run=False, say=lambda _: None
    )


def export_and_import(calls, folder):
    """A disk by the EBS direct APIs, and it comes back; what nobody may finish is deleted."""
    setting_up(calls)
    tell("reset")
    image_id, disk = image_with_disk(mib=64)
    boot_disk(disk, BIOS_TABLE)
    calls.job = "export"
    output = folder / "disk.raw"
    run.export(run.ExportOptions(output, direct=False), release_cloud.Cloud(), image_id, None, quiet())
    calls.job = "import"
    found = import_disk.read_disk_file(output, import_disk.ImportOptions(), quiet())
    tell("faults", [fault("RegisterImage", "denied")])
    with pytest.raises(UnavailableError, match="RegisterImage"):
        import_disk.import_image(found, release_cloud.Cloud(), quiet())
    import_disk.import_image(found, release_cloud.Cloud(), quiet())


def offer(calls):
    """With what makes each call needed: a reservation, and an instance that the catalogue does not know."""
    setting_up(calls)
    tell("reset")
    layout = release_cloud.server()[1]
    scarcity.add(layout, "reservation:us-west-2a:g5.xlarge:1")
    asked = {"ImageId": make_image("b1"), "InstanceType": "vt1.3xlarge", "MinCount": 1, "MaxCount": 1}
    release_cloud.Cloud().client("ec2").run_instances(**asked)
    pointer = Pointer("eks-gpu", "1.34", "stable")
    release_cloud.Cloud().client("ssm").put_parameter(Name=pointer.path, Value="ami-1", Type="String")
    key = kms_key()
    calls.job = "offer"
    assert images_of(release_cloud.Cloud()).notes == ()
    with pytest.MonkeyPatch.context() as patch:
        trusting(patch, key)
        assert images_of(release_cloud.Cloud(), fresh=True).verified == ()
    for spot in (True, False):
        assert availability(release_cloud.Cloud(), ["g5.xlarge", "g6.xlarge", "p5.48xlarge"], spot=spot)
    scarcity.clear(layout)


def workspace(calls):
    """A workspace's whole life: up, its rules changed, stopped, its home grown and moved, removed."""
    setting_up(calls)
    tell("reset")
    image_id, cloud = make_image("b1"), release_cloud.Cloud()
    profile = ComputeProfile(8, "32Gi", "5Gi", gpu_type="T4")
    wanted = Workspace("vision", "ann", HOME, compute_profile=profile, ssh_from="192.0.2.1/32")
    calls.job = "workspace"
    images_of(cloud)
    availability(cloud, ["g4dn.2xlarge"], spot=False)
    made = plan(cloud, spec_of(wanted, UpOptions(simulated=True)), datetime.now(UTC).date())
    assert made.choice.image_id == image_id
    provision.start(cloud, made, say=print, sleep=lambda _: None)
    other = replace(wanted, ssh_from="", capabilities=Capabilities(network_egress="open"))
    network.security_group(cloud, other, provision.subnets_of(cloud, wanted)[0])
    found = provision.find_existing(cloud, wanted)
    require_booting(cloud, found.machines[0].instance_id)
    lifecycle.stop(cloud, found, sleep=lambda _: None)
    lifecycle.start(cloud, provision.find_existing(cloud, wanted), sleep=lambda _: None)
    lifecycle.remove_workspace(cloud, wanted, found, keep_home=True, sleep=lambda _: None)
    [home] = volumes.homes(cloud, "vision")
    volumes.grow(cloud, home, 6)
    volumes.move(cloud, home, f"{HOME}b" if home.zone != f"{HOME}b" else f"{HOME}a", say=print)
    lifecycle.remove_workspace(
        cloud, wanted, provision.find_existing(cloud, wanted), keep_home=False, sleep=lambda _: None
    )


def ask_region(calls, endpoint):
    """Each question fails alone: with all refused, all are asked, and quickly."""
    calls.job = "refresh"
    endpoint.refuse = lambda _: ("UnauthorizedOperation", "no")
    cloud = SimpleNamespace(name="aws", region=endpoint.region, client=endpoint.client)
    cloud.in_region = lambda _: cloud
    assert all(part.error for part in refresh(cloud, lambda _: None).parts)
    endpoint.forget()


@contextmanager
def recording(calls):
    """Every call that boto3 makes is noted."""
    direct = BaseClient._make_api_call

    def made(client, operation, parameters):
        service = client.meta.service_model.service_name
        action = f"{service}:{operation}"
        ec2 = release_cloud.Cloud().client("ec2") if service == "ebs" else client
        had = tags_of_named(direct, ec2, operation, parameters) if service in ("ec2", "ebs") else []
        calls.note(IAM_NAME.get(action, action), "gpukiln", given_tags(parameters), had)
        if service == "ec2" and "TagSpecifications" in parameters:  # IAM looks at CreateTags too
            calls.note("ec2:CreateTags", operation, given_tags(parameters), [])
        return direct(client, operation, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", made)
        yield


def tags_of_named(direct, client, operation, parameters):
    """The tags that everything has which a changing call names."""
    if operation.startswith("Describe") and operation != "DescribeImageAttribute":
        return []  # listings
    had = []
    for name in (text for text in texts(parameters) if ID.fullmatch(text)):
        named = [{"Name": "resource-id", "Values": [name]}]
        had.append({tag["Key"] for tag in direct(client, "DescribeTags", {"Filters": named})["Tags"]})
    if "KeyName" in parameters and operation not in ("CreateKeyPair", "ImportKeyPair"):
        [pair] = direct(client, "DescribeKeyPairs", {"KeyNames": [parameters["KeyName"]]})["KeyPairs"]
        had.append({tag["Key"] for tag in pair["Tags"]})
    return had


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The whole rehearsal, once."""
    calls = Calls()
    with pytest.MonkeyPatch.context() as patch, recording(calls):
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        patch.setenv("GPUKILN_HOME", str(tmp_path_factory.mktemp("home")))
        with ec2_with_a_base():  # another moto than the endpoint's, which begins empty
            planned = made_plan()
        with serve() as endpoint:
            images = make_images(calls, endpoint)
            plan_only(calls, endpoint)
            build(calls, endpoint, images, planned, tmp_path_factory.mktemp("build"))
            verify(calls, endpoint, images, tmp_path_factory.mktemp("verify"))
            join_cluster(calls, endpoint, images)
            sweep(calls, endpoint)
            push(calls, endpoint)
            ask_region(calls, endpoint)
        records = ReleaseLog(tmp_path_factory.mktemp("releases"))
        release_twice(calls, records, tmp_path_factory.mktemp("keys"))
        remove_old(calls, records)
        export_and_import(calls, tmp_path_factory.mktemp("export"))
        offer(calls)
        workspace(calls)
    calls.made["workspace"] += calls.made["offer"]
    calls.made["cluster"] += calls.made["verify"]
    calls.made["build"] += calls.made["verify"]  # a build verifies, as permissions.yaml says too
    return calls


def listed(job, *callers):
    names = {job, permissions.jobs()[job].includes} - {""}
    return {
        call.action
        for statement in permissions.statements()
        for call in statement.calls
        if names & set(call.jobs) and (not callers or call.by in callers)
    }


@pytest.mark.parametrize("job", permissions.jobs())
def test_a_policy_has_every_call_and_no_other(rehearsed, job):
    allowed = {
        action for statement in policy([job], EVERYTHING)["Statement"] for action in statement["Action"]
    }
    made = rehearsed.by(job, "gpukiln")
    assert made - allowed == set(), "called, and the policy does not allow it"
    assert made >= listed(job, "gpukiln"), "nothing calls these"
    assert allowed - made == listed(job, "skopeo", "ec2"), "allowed, and nothing calls it"


@pytest.mark.parametrize("job", permissions.jobs())
def test_the_conditions_hold_for_every_call(rehearsed, job):
    statements = [one for one in permissions.statements() if any(job_makes(job, call) for call in one.calls)]
    tagged = 0
    for action, by, given, had in rehearsed.made[job]:
        if not action.startswith(("ec2:", "ebs:")):
            continue
        if by != "gpukiln":  # the tags of a call that makes something
            assert by in {name for one in statements for name in one.creating}
            continue
        of_action = [one for one in statements if action in {call.action for call in one.calls}]
        wanted = {one.gets_tag for one in of_action} - {""}
        has = {one.has_tag for one in of_action} - {""}
        if action in TAGGED_BY_CALL:
            assert wanted <= given, f"{by} does not tag with {wanted} in {action}"
            tagged += 1
        elif action == "ec2:CreateTags":
            new = [one for one in of_action if one.gets_tag in given]
            own = [one for one in of_action if had and all(one.has_tag in tags for tags in had)]
            assert [one for one in (*new, *own) if not one.tag_keys or given <= {*one.tag_keys}], (
                f"{by} tags with {given} what has {had}"
            )
            tagged += 1
        elif has:
            assert had, f"{action} names nothing"
            assert all(has <= tags for tags in had), f"{action} of what has no tag {has}"
            tagged += 1
    assert tagged or job in ("plan", "push", "offer", "refresh")


def job_makes(job, call):
    return bool({job, permissions.jobs()[job].includes} & set(call.jobs))


def test_an_import_gives_its_snapshot_the_tags_that_the_policy_allows(rehearsed):
    """StartSnapshot asks for CreateTags itself, which no recorded call shows."""
    [new] = [one for one in permissions.statements() if one.sid == "TagNewSnapshots"]
    begun = [given for action, _, given, _ in rehearsed.made["import"] if action == "ebs:StartSnapshot"]
    assert begun
    for given in begun:
        assert given <= {*new.tag_keys}
        assert {new.gets_tag, "gpukiln:recipe"} <= given
