"""What a workspace's machine needs of the embedded cloud: API from inside, tags, its home, stop and start."""

import json

import pytest
from botocore.exceptions import ClientError

from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.tags import WORKSPACE_TAG
from gpukiln.workspaces import iam
from gpukiln.workspaces.contract import Capabilities, Workspace
from tests.support.harness import BOOT_S, ROOT, Node, wait_for

pytestmark = pytest.mark.e2e
REGION, ZONE, OTHER_ZONE = "us-west-2", "us-west-2a", "us-west-2b"
NAMED, OTHER = "/parts/key", "/parts/others"
USER_DATA = "#!/bin/sh\necho once >>/var/lib/user-data\n"
# The agent's own code makes the calls; its errors are words on standard output.
ASK = """
import json, os, sys
os.environ["AWS_ENDPOINT_URL"] = "{endpoint}"
import agent
metadata = agent.Metadata()
aws = agent.Aws(metadata, "{region}")
for call, *words in json.loads(sys.argv[1]):
    try:
        found = getattr(metadata if call == "get" else aws, call)(*words)
    except agent.StageError as error:
        found = "failed: " + str(error)
    print(json.dumps(found))
"""
PREPARE = """
import pathlib, sys
import agent
agent.prepare_disk(agent.find_device(sys.argv[1], pathlib.Path("/")))
"""
POST = """
import sys, urllib.error, urllib.request
endpoint, signed, *paths = sys.argv[1:]
for path in paths:
    try:
        asked = urllib.request.Request(endpoint + path, b"", {"Authorization": signed})
        print(urllib.request.urlopen(asked).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
BOOTS = """
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'echo boot >>/var/lib/boots'
[Install]
WantedBy=multi-user.target
"""
HOME, THERE = "/home/ann", "/usr/local/lib/parts"


class Parts(Node):
    """A machine with a role of a workspace, and the agent's code on it."""

    data = ""

    def __init__(self, here, key, folder, cloud):
        self.cloud, self.ec2 = cloud, cloud.client("ec2")
        ssm, secrets = cloud.client("ssm"), cloud.client("secretsmanager")
        for name in (NAMED, OTHER):
            ssm.put_parameter(Name=name, Value="in SSM", Type="SecureString")
        self.secret = secrets.create_secret(Name="parts", SecretString="in Secrets Manager")["ARN"]
        named = Capabilities(secrets={"A": NAMED, "B": self.secret})
        profile = iam.instance_profile(cloud, Workspace("parts", "ann", REGION, capabilities=named))
        (folder / "user-data").write_text(USER_DATA)
        kind = "{Key=gpukiln:machine,Value=privileged}"  # it mounts volumes
        tags = f"ResourceType=instance,Tags=[{{Key={WORKSPACE_TAG},Value=parts}},{kind}]"
        options = ["--iam-instance-profile", f"Name={profile}", "--tag-specifications", tags]
        options += ["--metadata-options", "InstanceMetadataTags=enabled"]
        options += ["--placement", f"AvailabilityZone={ZONE}", "--user-data", f"file://{folder}/user-data"]
        super().__init__(here, key, folder, options=options)
        self.id = self.instance["InstanceId"]
        self.write(f"{THERE}/agent.py", (ROOT / "gpukiln/workspaces/agent.py").read_text())
        self.write(f"{THERE}/ask.py", ASK.format(endpoint=cloud.machine_endpoint, region=REGION))
        self.write(f"{THERE}/prepare.py", PREPARE)
        self.write(f"{THERE}/post.py", POST)

    def ask(self, *calls):
        said = self.read(f"python3 {THERE}/ask.py '{json.dumps(calls)}'")
        return [json.loads(line) for line in said.splitlines()]

    def root(self, command):
        return self.read(f"sudo sh -ec '{command}'")

    def described(self):
        return self.ec2.describe_instances(InstanceIds=[self.id])["Reservations"][0]["Instances"][0]

    def tags(self):
        return {tag["Key"]: tag["Value"] for tag in self.described()["Tags"]}

    def volume(self, volume_id):
        return self.ec2.describe_volumes(VolumeIds=[volume_id])["Volumes"][0]

    def attach(self, volume_id, device="/dev/sdh"):
        self.ec2.attach_volume(VolumeId=volume_id, InstanceId=self.id, Device=device)
        wait_for(lambda: self.ssh(f"test -b {link(volume_id)}").returncode == 0)


@pytest.fixture(scope="module")
def machine(here, key, tmp_path_factory):
    cloud = EmbeddedCloud(REGION, layout=Layout(here.home))
    with Parts(here, key, tmp_path_factory.mktemp("parts"), cloud) as made:
        yield made


def link(volume_id):
    return f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{volume_id.replace('-', '')}"


def refused(call, **arguments):
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return caught.value.response["Error"]["Code"]


def test_the_agents_calls_reach_the_api_with_the_machines_role(machine):
    key, secret, other, tagged, not_its_own = machine.ask(
        ["secret", NAMED],
        ["secret", machine.secret],
        ["secret", OTHER],
        ["tag", {"gpukiln:stage": "home done"}],
        ["tag", {"gpukiln:owner": "somebody"}],
    )
    assert (key, secret, tagged) == ("in SSM", "in Secrets Manager", None)
    assert "AccessDeniedException" in other
    assert "UnauthorizedOperation" in not_its_own
    given = {WORKSPACE_TAG: "parts", "gpukiln:machine": "privileged"}
    assert machine.tags() == {**given, "gpukiln:stage": "home done"}


def test_the_api_inside_takes_no_other_keys(machine):
    key = machine.cloud.environment()["AWS_ACCESS_KEY_ID"]
    signed = f"Credential={key}/20260101/{REGION}/ec2/aws4_request"
    said = machine.read(
        f"python3 {THERE}/post.py {machine.cloud.machine_endpoint} {signed} / /gpukiln/stop /v2/"
    )
    assert said.split() == ["401"] * 3


def test_tags_of_the_machine_are_in_its_metadata_as_they_change(machine):
    assert machine.ask(["get", "tags/instance/gpukiln:home"]) == [None]
    machine.ec2.create_tags(Resources=[machine.id], Tags=[{"Key": "gpukiln:home", "Value": "vol-1"}])
    assert machine.ask(["get", "tags/instance/gpukiln:home"]) == ["vol-1"]
    machine.ec2.delete_tags(Resources=[machine.id], Tags=[{"Key": "gpukiln:home"}])
    assert machine.ask(["get", "tags/instance/gpukiln:home"]) == [None]


def test_the_agent_finds_an_attached_volume_and_makes_a_home_of_it(machine):
    made = machine.ec2.create_volume(AvailabilityZone=ZONE, Size=1, VolumeType="gp3", Encrypted=True)
    far = machine.ec2.create_volume(AvailabilityZone=OTHER_ZONE, Size=1, VolumeType="gp3")["VolumeId"]
    machine.data = data = made["VolumeId"]
    assert refused(machine.attach, volume_id=far) == "InvalidVolume.ZoneMismatch"
    machine.ec2.delete_volume(VolumeId=far)
    machine.attach(data)
    assert refused(machine.attach, volume_id=data, device="/dev/sdi") == "VolumeInUse"
    prepare = f"python3 {THERE}/prepare.py {data} && mount {link(data)} {HOME}"
    machine.root(f"mkdir -p {HOME} && {prepare} && echo mine >{HOME}/file")
    machine.ec2.modify_volume(VolumeId=data, Size=2)
    machine.root(f"umount {HOME} && {prepare}")  # e2fsck and resize2fs
    assert int(machine.root(f"df --output=size {HOME} | tail -1")) > 1.8 * 2**20


def test_a_copy_of_the_home_has_what_is_in_it_and_is_given_back(machine):
    snapshot = machine.ec2.create_snapshot(VolumeId=machine.data)["SnapshotId"]
    copy = machine.ec2.create_volume(AvailabilityZone=ZONE, SnapshotId=snapshot, VolumeType="gp3")["VolumeId"]
    machine.attach(copy, "/dev/sdi")
    assert machine.root(f"mount {link(copy)} /mnt && cat /mnt/file && umount /mnt") == "mine\n"
    machine.ec2.detach_volume(VolumeId=copy)
    wait_for(lambda: machine.volume(copy)["State"] == "available", 60)
    assert machine.ssh(f"test -e {link(copy)}").returncode == 1
    machine.ec2.delete_volume(VolumeId=copy)
    machine.ec2.delete_snapshot(SnapshotId=snapshot)


def test_a_machine_that_was_stopped_has_what_it_had_and_a_new_public_address(here, machine):
    machine.write("/etc/systemd/system/boots.service", BOOTS)
    machine.root("systemctl enable --quiet --now boots.service")
    before = machine.described()
    machine.ec2.stop_instances(InstanceIds=[machine.id])
    here.wait("instance_stopped", machine.instance)
    assert "PublicIpAddress" not in machine.described()
    assert machine.volume(machine.data)["Attachments"][0]["State"] == "attached"
    machine.ec2.start_instances(InstanceIds=[machine.id])
    here.wait("instance_running", machine.instance)
    wait_for(lambda: machine.ssh("systemctl is-active boots.service").returncode == 0, BOOT_S)
    after = machine.described()
    assert after["PrivateIpAddress"] == before["PrivateIpAddress"]
    assert after["PublicIpAddress"] != before["PublicIpAddress"]
    assert after["LaunchTime"] > before["LaunchTime"]
    machine.read("cloud-init status --wait")
    assert machine.read("cat /var/lib/user-data /var/lib/boots").split() == ["once", "boot", "boot"]
    assert machine.root(f"mount {link(machine.data)} {HOME} && cat {HOME}/file") == "mine\n"
    assert machine.ask(["tag", {"gpukiln:stage": "again"}], ["secret", NAMED]) == [None, "in SSM"]
    assert machine.tags()["gpukiln:stage"] == "again"


def test_a_machine_that_shuts_itself_down_is_stopped_and_its_home_outlives_it(here, machine):
    machine.ssh("sudo shutdown -h now")
    here.wait("instance_stopped", machine.instance)
    assert machine.volume(machine.data)["Attachments"][0]["State"] == "attached"
    here.terminate(machine.instance)
    wait_for(lambda: machine.volume(machine.data)["State"] == "available", 60)
    machine.ec2.delete_volume(VolumeId=machine.data)
