"""The agent's boot on this computer's own files below an overlay: users, a disk, tags and secrets are real.

What is told apart from a machine: systemd, Docker and a GPU, whose programs are stand-ins.
"""

import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from gpukiln.workspaces import userdata
from gpukiln.workspaces.contract import Capabilities, Toolchain, Workspace
from tests.support.workspace_machine import metadata_of, write_files

TOOLS = ("unshare", "losetup", "blkid", "mkfs.ext4", "resize2fs", "e2fsck", "setpriv", "useradd", "chroot")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting and making users needs root"),
    pytest.mark.skipif(
        bool(missing := [name for name in TOOLS if not shutil.which(name)]),
        reason=f"missing: {' '.join(missing)}",
    ),
]
VOLUME = "vol-0123456789abcdef0"
PYTHONS = Path.home() / ".pyenv" / "versions"  # the oldest that the agent is for, where this computer has it
PYTHON = next(PYTHONS.glob("3.9.*/bin/python3.9"), Path("/usr/bin/python3"))
# A root like this computer's, whose changes are in a folder; a /dev with the home's disk alone.
MACHINE = """
set -eu
mount -t overlay overlay -o lowerdir=/,upperdir="$UPPER",workdir="$WORK" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs tmpfs "$ROOT/run"
mount -t tmpfs tmpfs "$ROOT/dev"
for node in null:3 zero:5 random:8 urandom:9; do mknod -m 666 "$ROOT/dev/${node%:*}" c 1 "${node#*:}"; done
mknod -m 660 "$ROOT/dev/sdf" b 7 "${LOOP#/dev/loop}"
mkdir -p "$ROOT/dev/disk/by-id"
ln -s ../../sdf "$ROOT/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_${VOLUME%%-*}${VOLUME#*-}"
for run in $RUNS; do
  chroot "$ROOT" "$PYTHON" -I -S "$AGENT" boot || echo "run $run ended with $?"
done
chroot "$ROOT" sh -c "$AFTER"
"""
AFTER = """
id ada
stat -c '%a %U %n' /run/gpukiln/workspace/env /run/gpukiln/workspace/secrets/* /home/ada /home/ada/.ssh/*
df --output=size -k /home/ada | tail -1
"""
PROGRAMS = {
    "nvidia-smi": "echo 580.95.05",
    "docker": 'echo "$@" >> /var/docker-was-asked',
}


@dataclass
class Machine:
    folder: Path
    environment: dict[str, str]
    instance: str
    ec2: Any

    @property
    def files(self) -> Path:
        """What the machine's files have that this computer's have not."""
        return self.folder / "upper"

    def begin(self, wanted: Workspace) -> None:
        data = userdata.render(wanted, gpus=1, compose="services: {}\n")
        write_files(data, self.files)

    def boot(self, runs: str = "1") -> str:
        """What its agent, run so often, and a look at it print."""
        ran = subprocess.run(
            ["unshare", "--mount", "--uts", "sh", "-c", MACHINE],
            env={**self.environment, "AGENT": userdata.AGENT, "AFTER": AFTER, "RUNS": runs},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return ran.stderr + ran.stdout

    def status(self) -> dict[str, Any]:
        file = self.files / "var/lib/gpukiln/workspace/status.json"
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def tags(self) -> dict[str, str]:
        [one] = self.ec2.describe_instances(InstanceIds=[self.instance])["Reservations"][0]["Instances"]
        return {tag["Key"]: tag["Value"] for tag in one.get("Tags", ())}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    for name in ("upper", "work", "root"):
        (tmp_path / name).mkdir()
    for name, script in PROGRAMS.items():
        file = tmp_path / "upper/usr/local/bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    (tmp_path / "upper/etc/sudoers.d").mkdir(parents=True)
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(64 << 20)
    loop = subprocess.run(
        ["losetup", "--find", "--show", disk], check=True, capture_output=True, text=True
    ).stdout.strip()
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        url = f"http://{host}:{port}"

        def client(service: str) -> Any:
            key = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
            return boto3.client(service, "us-west-2", endpoint_url=url, **key)  # type: ignore[call-overload]

        ec2 = client("ec2")
        started = ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1)
        instance = started["Instances"][0]["InstanceId"]
        client("ssm").put_parameter(
            Name="/vision/hf", Value="hf_very_secret", Type="SecureString", Overwrite=True
        )
        secret = client("secretsmanager").create_secret(Name=tmp_path.name, SecretString="db very secret")
        (tmp_path / "arn").write_text(secret["ARN"])
        keys = json.dumps({"AccessKeyId": "AKIAX", "SecretAccessKey": "s", "Token": "t"})
        tree = {
            "instance-id": instance,
            "iam": {"security-credentials": {"role": keys}},
            "public-keys": {"0": {"openssh-key": "ssh-ed25519 AAAA k"}},
            "tags": {"instance": {"gpukiln:home": VOLUME}},
        }
        with metadata_of(tree) as address:
            environment = {
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "AWS_ENDPOINT_URL": url,
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": address,
                "PYTHON": str(PYTHON),
                "VOLUME": VOLUME,
                "LOOP": loop,
                **{name.upper(): str(tmp_path / name) for name in ("upper", "work", "root")},
            }
            yield Machine(tmp_path, environment, instance, ec2)
    finally:
        server.stop()
        subprocess.run(["losetup", "--detach", loop], check=True)


def test_two_boots_of_one_machine(machine: Machine) -> None:
    arn = (machine.folder / "arn").read_text()
    wanted = Workspace(
        "vision",
        "ada",
        "us-west-2",
        capabilities=Capabilities(secrets={"HF_TOKEN": "/vision/hf", "DB": arn}),
        toolchain_template=Toolchain("datasci", "1.1.0"),
        agent_init_script=(
            'id -un >> ~/boots; id -Gn > ~/groups\n[ "$HF_TOKEN,$DB" = "hf_very_secret,db very secret" ]\n'
        ),
    )
    machine.begin(wanted)
    said = machine.boot()
    status = machine.status()
    assert (status["state"], status.get("tag_error")) == ("done", None), said
    names = ["home", "roles", "identity", "secrets", "cache", "driver", "desktop", "services", "script"]
    assert [(one["stage"], one["state"]) for one in status["stages"]] == [(name, "done") for name in names]
    assert machine.tags() == {"gpukiln:stage": "done", "gpukiln:driver": "580.95.05"}
    for line in (
        "uid=6000(ada) gid=6000(ada)",
        "600 ada /run/gpukiln/workspace/env",
        "600 ada /run/gpukiln/workspace/secrets/HF_TOKEN",
        "750 ada /home/ada",
        "600 ada /home/ada/.ssh/authorized_keys",
    ):
        assert line in said
    assert "very secret" not in said
    assert "ada ALL=" in (machine.files / "etc/sudoers.d/gpukiln-workspace").read_text()
    assert json.loads((machine.files / "etc/gpukiln/toolchain.json").read_text())["name"] == "datasci"
    assert "up --detach" in (machine.files / "var/docker-was-asked").read_text()
    size = int(said.splitlines()[-1])

    disk = machine.folder / "disk"
    with disk.open("r+b") as file:
        file.truncate(128 << 20)
    subprocess.run(["losetup", "--set-capacity", machine.environment["LOOP"]], check=True)
    said = machine.boot()
    assert machine.status()["state"] == "done", said
    assert int(said.splitlines()[-1]) > 1.5 * size  # it has grown
    assert home_of(machine, "boots") == "ada\nada\n"
    assert "sudo" in home_of(machine, "groups").split()
    assert (Path("/etc/skel/.bashrc").read_text() == home_of(machine, ".bashrc")) is True
    with pytest.raises(KeyError):
        pwd.getpwnam("ada")  # this computer has no such user

    # A machine of another kind, which has the same home.
    shutil.rmtree(machine.files / "etc")
    (machine.files / "etc/sudoers.d").mkdir(parents=True)
    machine.begin(wanted)
    said = machine.boot(runs="1 2")  # and its unit is started again
    assert (machine.status()["state"], "ended with" in said) == ("done", False), said
    assert home_of(machine, "boots") == 4 * "ada\n"
    assert home_of(machine, ".ssh/authorized_keys").count("\n") == 1


def test_a_disk_that_is_no_home_is_left_and_told(machine: Machine) -> None:
    machine.begin(Workspace("vision", "ada", "us-west-2"))
    disk = machine.folder / "disk"
    subprocess.run(["mkfs.ext4", "-q", "-L", "mine", disk], check=True)
    before = disk.read_bytes()
    said = machine.boot()
    assert "run 1 ended with 1" in said
    words = "/dev/sdf has ext4 mine, wanted nothing, or ext4 with the label gpukiln-home; it is left as it is"
    assert [(one["state"], one["why"]) for one in machine.status()["stages"]] == [("failed", words)]
    assert machine.tags() == {"gpukiln:stage": f"failed home: {words}"}
    assert disk.read_bytes() == before


def home_of(machine: Machine, name: str) -> str:
    """A file in the home, when no machine has it."""
    command = ["debugfs", "-R", f"cat /{name}", machine.folder / "disk"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
