"""The AWS CLI talks to the embedded cloud as to EC2, and what it says is what runs."""

import json
import os
import re
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from gpukiln.instances.deadline import shutdown_user_data
from tests.support.harness import ROOT, WAIT_FOR_CLOUD_INIT, command_lines, processes_of, wait_for

pytestmark = pytest.mark.e2e

USER_DATA = "#!/bin/sh\necho from-user-data > /etc/motd\n"


@pytest.fixture(scope="module")
def base_id(here):
    return here.base_id()


@pytest.fixture(scope="module")
def instance(here, key, base_id, tmp_path_factory):
    user_data = tmp_path_factory.mktemp("data") / "user-data.sh"
    user_data.write_text(USER_DATA)
    started = here.launch(
        *(base_id, key, "--instance-type", "m5.xlarge", "--user-data", f"file://{user_data}"),
        *("--block-device-mappings", "DeviceName=/dev/xvda,Ebs={VolumeSize=10,Encrypted=true}"),
    )
    wait_for(lambda: here.ssh(started, key, WAIT_FOR_CLOUD_INIT).returncode == 0)
    return started


def test_the_base_image_is_published_under_its_public_parameter(here, base_id):
    [image] = here.aws("ec2", "describe-images", "--image-ids", base_id)["Images"]
    assert image["RootDeviceType"] == "ebs"
    assert image["OwnerId"] == "136693071363"
    assert image["Name"].startswith("debian-12-amd64-")


def test_a_shell_gets_its_settings_from_one_command(here, base_id):
    script = f'eval "$(invoke cloud.env)" && aws ec2 describe-images --image-ids {base_id} --output json'
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=here.environment, capture_output=True, text=True, check=False
    )
    assert [image["ImageId"] for image in json.loads(done.stdout)["Images"]] == [base_id], done.stderr


def test_user_data_ran_on_a_machine_that_came_up_whole(here, instance, key):
    assert here.ssh(instance, key, "cat /etc/motd").stdout == "from-user-data\n"
    assert here.ssh(instance, key, "systemctl is-system-running").stdout == "running\n"


def test_the_root_volume_has_the_size_that_was_asked_for(here, instance, key):
    size_kib = int(here.ssh(instance, key, "df --output=size / | tail -1").stdout)
    assert 9.5 * 2**20 < size_kib < 10 * 2**20


def test_the_metadata_service_speaks_imdsv2(here, instance, key):
    script = (
        "import urllib.request as u\n"
        "b='http://169.254.169.254/latest/'\n"
        "h={'X-aws-ec2-metadata-token-ttl-seconds':'60'}\n"
        "t=u.urlopen(u.Request(b+'api/token',method='PUT',headers=h)).read().decode()\n"
        "g=lambda p:u.urlopen(u.Request(b+p,headers={'X-aws-ec2-metadata-token':t})).read().decode()\n"
        "print(g('meta-data/instance-id'),g('meta-data/local-ipv4'),g('meta-data/placement/region'))\n"
    )
    answer = here.ssh(instance, key, f'python3 -c "{script}"').stdout.split()
    assert answer == [instance["InstanceId"], instance["PrivateIpAddress"], "us-west-2"]


def test_the_console_is_the_machines_own(here, instance):
    output = here.aws("ec2", "get-console-output", "--instance-id", instance["InstanceId"])["Output"]
    assert "Debian GNU/Linux 12" in output
    assert "Debian GNU/Linux 12" in here.invoke("cloud.console", instance["InstanceId"]).stdout
    assert here.invoke("cloud.console", "i-1", ok=False).returncode == 2


def test_a_machine_from_a_pointer_ends_itself_at_its_deadline(here, key, base_id, tmp_path):
    user_data = tmp_path / "user-data"
    user_data.write_text(shutdown_user_data(datetime.now(UTC) + timedelta(minutes=30)))
    pointer = "/gpukiln/eks-gpu/1.35/stable/image_id"
    here.aws("ssm", "put-parameter", "--name", pointer, "--type", "String", "--value", base_id, "--overwrite")
    mortal = here.launch(
        *(
            f"resolve:ssm:{pointer}",
            key,
            "--instance-type",
            "m5.xlarge",
            "--user-data",
            f"file://{user_data}",
        ),
        *("--instance-initiated-shutdown-behavior", "terminate"),
    )
    assert mortal["ImageId"] == base_id
    wait_for(lambda: here.ssh(mortal, key, "cloud-init status --wait").stdout.strip(".\n") == "status: done")
    timer = here.ssh(mortal, key, "systemctl show gpukiln-deadline.timer -p ActiveState -p TimersMonotonic")
    assert "ActiveState=active" in timer.stdout
    assert re.search(r"OnActiveUSec=2\dmin", timer.stdout)
    here.ssh(mortal, key, "sudo systemctl start --no-block gpukiln-deadline.service")  # what the timer does
    here.wait("instance_terminated", mortal)
    [reservation] = here.aws("ec2", "describe-instances", "--instance-ids", mortal["InstanceId"])[
        "Reservations"
    ]
    assert reservation["Instances"][0]["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


def test_an_unknown_image_is_refused_and_starts_nothing(here):
    done = subprocess.run(
        ["aws", "ec2", "run-instances", "--image-id", "ami-0123456789abcdef0"],
        env=here.cloud_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "InvalidAMIID" in done.stderr


def test_nobody_else_can_start_machines(here):
    done = subprocess.run(
        ["aws", "ec2", "describe-images"],
        env={**here.cloud_environment(), "AWS_ACCESS_KEY_ID": "embedded"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "AuthFailure" in done.stderr
    assert (here.home / "cloud").stat().st_mode & 0o077 == 0


def test_stop_image_terminate_and_a_new_server(here, instance, key):
    """One life of an image: it holds what the machine wrote, and it outlives the server's process."""
    assert here.ssh(instance, key, "echo kept | sudo tee /etc/kept").returncode == 0
    instance_id = instance["InstanceId"]
    here.aws("ec2", "stop-instances", "--instance-ids", instance_id)
    here.wait("instance_stopped", instance)
    assert "Reached target" in (here.home / f"cloud/consoles/{instance_id}.log").read_text()
    tags = "ResourceType=image,Tags=[{Key=colour,Value=blue}]"
    image_id = here.aws(
        *("ec2", "create-image", "--instance-id", instance_id, "--name", "kept"),
        *("--tag-specifications", tags),
    )["ImageId"]
    disk = here.root_disk(instance)
    [image] = here.aws("ec2", "describe-images", "--image-ids", image_id)["Images"]
    snapshot_id = image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    snapshot = here.home / f"cloud/snapshots/{snapshot_id}.raw"
    assert disk.samefile(snapshot)
    here.aws("ec2", "start-instances", "--instance-ids", instance_id)
    here.wait("instance_running", instance)
    assert not disk.samefile(snapshot), "what a machine writes later would be in its image"
    here.terminate(instance)
    assert not (here.home / f"cloud/machines/{instance_id}").exists()
    assert not disk.exists()
    here.aws("ssm", "put-parameter", "--name", "/mine", "--type", "String", "--value", "v1")

    here.invoke("cloud.stop")
    assert here.status()["server"] is None

    [image] = here.aws("ec2", "describe-images", "--image-ids", image_id)["Images"]
    assert image["Tags"] == [{"Key": "colour", "Value": "blue"}]
    [known] = here.aws("ec2", "describe-snapshots", "--snapshot-ids", snapshot_id)["Snapshots"]
    assert (known["VolumeSize"], known["Encrypted"]) == (10, True)
    assert here.aws("ssm", "get-parameter", "--name", "/mine")["Parameter"]["Value"] == "v1"

    again = here.launch(image_id, key)
    here.aws("ec2", "deregister-image", "--image-id", image_id)
    here.aws("ec2", "delete-snapshot", "--snapshot-id", snapshot_id)
    assert not snapshot.exists()
    here.terminate(again)


def test_a_killed_server_takes_its_machines_with_it(here, key, base_id):
    started = here.launch(base_id, key)
    assert processes_of(started["InstanceId"])
    [server] = [pid for pid, line in command_lines() if line.startswith("unshare") and str(here.home) in line]
    os.kill(server, 9)
    wait_for(lambda: not processes_of(started["InstanceId"]), timeout_s=20)

    assert not any(here.leftovers().values()), here.leftovers()
