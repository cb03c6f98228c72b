"""Runs gpukiln and the AWS CLI as a user would, against an embedded cloud of the tests' own."""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import boto3
import pytest
from awscli.clidriver import create_clidriver

from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.layout import Layout
from tests.support import documents

ROOT = Path(__file__).resolve().parents[2]
BASE = "/aws/service/debian/release/12/latest/amd64"
KEY_PAIR = "tests"
BOOT_S = 600  # a virtual machine takes minutes, on a slow host several
PRIVILEGED = (
    "--tag-specifications",
    "ResourceType=instance,Tags=[{Key=gpukiln:machine,Value=privileged}]",
)
SIMULATED = "{Key=gpukiln:gpus,Value=simulated}"
SSH_OPTIONS = (
    *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"),
    *("-o", "ConnectTimeout=10", "-o", "BatchMode=yes"),
)
# `cloud-init status --wait` starts Python, for 3 s of an emulated processor. Where cloud-init is switched off
# there is the second file.
WAIT_FOR_CLOUD_INIT = "cd /run/cloud-init && until [ -e result.json ] || [ -e disabled ]; do sleep 0.25; done"


def one_connection(socket: Path) -> tuple[str, ...]:
    """Options of ssh with which all commands share one login, by this socket; a login takes a while."""
    return "-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o", f"ControlPath={socket}"


def ssh(
    address: str, port: str, key_file: Path, command: str, *, stdin: bytes = b"", options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command on a machine as its first user."""
    done = subprocess.run(
        ["ssh", "-i", key_file, "-p", port, *SSH_OPTIONS, *options, f"admin@{address}", command],
        input=stdin,
        capture_output=True,
        check=False,
    )
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


class Here:
    """Runs commands as a user would, against the tests' own cloud."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "GPUKILN_HOME": str(home), "PATH": f"{_bin()}:{os.environ['PATH']}"}
        self._ports: dict[str, str] = {}

    def invoke(self, *arguments: str, cwd: Path = ROOT, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["invoke", *arguments],
            cwd=cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ok:
            assert done.returncode == 0, (
                f"invoke {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        if "--json" in arguments and done.stdout:
            documents.read(done.stdout)
        return done

    def start(self, *arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
        return start(["invoke", *arguments], cwd=cwd, environment=self.environment)

    def cloud_environment(self) -> dict[str, str]:
        """What `invoke cloud.env` prints, without a process each time; a server runs from now on."""
        settings = EmbeddedCloud("us-west-2", layout=Layout(self.home)).environment()
        return {**self.environment, **{name: value for name, value in settings.items() if value}}

    def aws(self, *arguments: str):
        """What the AWS CLI answers, run in this process: loading it takes longer than most calls.

        test_aws_cli.py runs it as a program, too.
        """
        said, failed = io.StringIO(), io.StringIO()
        # botocore reads the environment when the driver is created and when a client is.
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(failed),
        ):
            for name, value in self.cloud_environment().items():
                patch.setenv(name, value)
            code = create_clidriver().main([*arguments, "--output", "json"])
        assert code == 0, f"aws {arguments}: {failed.getvalue()}"
        return json.loads(said.getvalue()) if said.getvalue().strip() else None

    def client(self):
        """boto3's client of EC2."""
        settings = self.cloud_environment()
        names = ("AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        return _client(*(settings[name] for name in names))

    def base_id(self):
        return self.aws("ssm", "get-parameter", "--name", BASE)["Parameter"]["Value"]

    def launch(self, image_id: str, key_file: Path, *options: str):
        """Start a machine that takes the key, and wait until EC2 says it runs."""
        known = self.aws("ec2", "describe-key-pairs")["KeyPairs"]
        if KEY_PAIR not in [pair["KeyName"] for pair in known]:  # key pairs end with the server's process
            public = f"fileb://{key_file}.pub"
            self.aws("ec2", "import-key-pair", "--key-name", KEY_PAIR, "--public-key-material", public)
        [instance] = self.aws(
            "ec2", "run-instances", "--image-id", image_id, "--key-name", KEY_PAIR, *options
        )["Instances"]
        assert instance["State"]["Name"] == "pending"
        self.wait("instance_running", instance)
        return instance

    def terminate(self, instance) -> None:
        self.aws("ec2", "terminate-instances", "--instance-ids", instance["InstanceId"])
        self.wait("instance_terminated", instance)

    def root_disk(self, instance) -> Path:
        """The file that is a machine's root volume."""
        [reservation] = self.aws("ec2", "describe-instances", "--instance-ids", instance["InstanceId"])[
            "Reservations"
        ]
        [described] = reservation["Instances"]
        [volume_id] = [
            device["Ebs"]["VolumeId"]
            for device in described["BlockDeviceMappings"]
            if device["DeviceName"] == described["RootDeviceName"]
        ]
        return self.home / f"cloud/volumes/{volume_id}.raw"

    def wait(self, state: str, instance) -> None:
        """As `aws ec2 wait`, which asks every 15 s only."""
        ec2 = self.client()
        often = {"Delay": 1, "MaxAttempts": 600}
        ec2.get_waiter(state).wait(InstanceIds=[instance["InstanceId"]], WaiterConfig=often)

    def ssh(
        self, instance, key_file: Path, command: str, stdin: bytes = b"", options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine as its first user."""
        address, port = instance["PrivateIpAddress"], self.ssh_port(instance)
        return ssh(address, port, key_file, command, stdin=stdin, options=options)

    def ssh_port(self, instance) -> str:
        """As its server says it once: a machine ends with its server."""
        name = instance["InstanceId"]
        if name not in self._ports:
            self._ports[name] = str(EmbeddedCloud("us-west-2", layout=Layout(self.home)).ssh_port)
        return self._ports[name]

    def status(self):
        return json.loads(self.invoke("cloud.status", "--json").stdout)

    def _children_of_server(self) -> list[str]:
        """A machine's processes are the server's children, or become so when their parent dies."""
        marker = f"gpukiln.clouds.embedded.server {self.home}"
        servers = [pid for pid, line in command_lines() if marker in line and not line.startswith("unshare")]
        files = [file for pid in servers for file in Path(f"/proc/{pid}/task").glob("*/children")]
        children = [child for file in files for child in file.read_text().split()]
        return [f"{pid} {line}" for pid, line in command_lines() if str(pid) in children]

    def leftovers(self) -> dict[str, list[str]]:
        """What a build must not leave: anything here that is not empty is a leak."""
        known = {
            instance["InstanceId"]: instance["State"]["Name"]
            for reservation in self.aws("ec2", "describe-instances")["Reservations"]
            for instance in reservation["Instances"]
        }
        groups = self.aws("ec2", "describe-security-groups")["SecurityGroups"]
        return {
            "instances": [name for name, state in known.items() if state != "terminated"],
            "key pairs": [
                key["KeyName"]
                for key in self.aws("ec2", "describe-key-pairs")["KeyPairs"]
                if key["KeyName"] != KEY_PAIR
            ],
            "security groups": [g["GroupName"] for g in groups if g["GroupName"] != "default"],
            "machines": [machine["instance_id"] for machine in self.status()["server"]["machines"]],
            "folders": [path.name for path in (self.home / "cloud/machines").iterdir()],
            "mounts": [
                line for line in Path("/proc/mounts").read_text().splitlines() if str(self.home) in line
            ],
            "processes": self._children_of_server(),
            # other processes' tests have theirs
            "namespaces": [name for name in known if Path(f"/run/netns/gk-{name}").exists()],
        }


class Node:
    """A machine of the embedded cloud that Ansible converges; `with` terminates it at the end.

    Args:
        here: The tests' cloud.
        key_file: Private key of its first user.
        folder: For what this machine needs of this host.
        image_id: What it is booted from, by default the base image.
        options: Of `aws ec2 run-instances`; without tags among them it may mount and run a container engine.
    """

    def __init__(
        self, here: Here, key_file: Path, folder: Path, image_id: str = "", options: Sequence[str] = ()
    ) -> None:
        self.here, self.key_file, self.folder = here, key_file, folder
        if "--tag-specifications" not in options:
            options = (*options, *PRIVILEGED)
        self.instance = here.launch(image_id or here.base_id(), key_file, *options)
        try:
            # with logins of its own: a later one finds what cloud-init sets for a session
            wait_for(lambda: here.ssh(self.instance, key_file, WAIT_FOR_CLOUD_INIT).returncode == 0, BOOT_S)
        except BaseException:
            here.terminate(self.instance)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.here.terminate(self.instance)

    def ssh(self, command: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        """Run a command over the one connection to it: a login takes longer than most commands."""
        options = one_connection(self.folder / "ssh")
        return self.here.ssh(self.instance, self.key_file, command, stdin, options)

    def read(self, command: str) -> str:
        """What a command says that must succeed."""
        done = self.ssh(command)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def write(self, path: str, text: str) -> None:
        """Write a file as root; a link is replaced."""
        done = self.ssh(
            f"sudo mkdir -p $(dirname {path}) && sudo rm -f {path} && sudo tee {path} >/dev/null",
            text.encode(),
        )
        assert done.returncode == 0, done.stderr

    def capture(self, name: str) -> str:
        """Make an image of it; returns the image's id once it is available."""
        create = ("create-image", "--instance-id", self.instance["InstanceId"], "--name", name)
        image_id = self.here.aws("ec2", *create)["ImageId"]
        often = {"Delay": 1, "MaxAttempts": 300}
        self.here.client().get_waiter("image_available").wait(ImageIds=[image_id], WaiterConfig=often)
        return str(image_id)

    def facts(self) -> dict[str, object]:
        """What Ansible finds out about it, as for the roles; names without `ansible_`."""
        done = self._ansible("ansible", "all", "--become", "-m", "setup", "-a", "gather_subset=min")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout.partition("=> ")[2])["ansible_facts"]
        return {name.removeprefix("ansible_"): value for name, value in found.items()}

    def play(self, playbook: str, *options: str, **variables: object) -> subprocess.CompletedProcess[str]:
        """Run a playbook that uses the roles."""
        file = self.folder / "site.yml"
        file.write_text(playbook)
        versions = ("-e", f"@{ROOT}/components.yaml")
        return self._ansible("ansible-playbook", str(file), *versions, *options, **variables)

    def apply(self, playbook: str, *options: str, **variables: object) -> subprocess.CompletedProcess[str]:
        """Run a playbook once: where another test shows that a second run of these tasks changes nothing."""
        done = self.play(playbook, *options, **variables)
        assert done.returncode == 0, done.stdout[-6000:]
        return done

    def converge(self, playbook: str, **variables: object) -> subprocess.CompletedProcess[str]:
        """Run a playbook twice; the second run must change nothing. Returns the first."""
        done = self.apply(playbook, **variables)
        self.rests(playbook, **variables)
        return done

    def rests(self, playbook: str, **variables: object) -> None:
        """Run a playbook that finds everything done."""
        again = self.play(playbook, **variables)
        tasks = again.stdout.split("\nTASK ")
        changes = [task for task in tasks if re.search("(?m)^(changed|fatal|failed):", task)]
        assert re.search(r"changed=0 .*failed=0", again.stdout), changes

    def refused(self, playbook: str, *options: str, **variables: object) -> str:
        """What a playbook says that must not go on, in one line."""
        done = self.play(playbook, *options, **variables)
        assert done.returncode == 2, done.stdout[-6000:]
        return " ".join(done.stdout.split())

    def variables(self) -> dict[str, object]:
        """How Ansible reaches it."""
        return {
            "ansible_host": self.instance["PrivateIpAddress"],
            "ansible_user": "admin",
            "ansible_port": self.here.ssh_port(self.instance),
            "ansible_ssh_private_key_file": str(self.key_file),
            # Looking for it takes a while; in test_build.py and test_live_nodes.py Ansible does.
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_ssh_common_args": " ".join(SSH_OPTIONS),
        }

    def _ansible(
        self, command: str, *arguments: str, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        # The last -e wins: a test may replace `components`.
        values = {**variables, **self.variables()}
        inventory = ("-i", f"{self.instance['PrivateIpAddress']},")
        # Facts are gathered by the first play of a machine: a fifth of the time of one that changes nothing.
        settings = {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_GATHERING": "smart",
            "ANSIBLE_CACHE_PLUGIN": "jsonfile",
            "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(self.folder / "facts"),
        }
        return subprocess.run(
            [_bin() / command, *inventory, *arguments, "-e", json.dumps(values)],
            env={**self.here.environment, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def copy_checkout(folder: Path, changes: Mapping[str, tuple[str, str]]) -> Path:
    """A checkout of somebody who changed something.

    Args:
        folder: Where; it must not be there.
        changes: Per file a text that it has, and what takes its place.

    Returns:
        The folder.
    """
    ignored = shutil.ignore_patterns(".venv", ".cache", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
    for name, (old, new) in changes.items():
        text = (folder / name).read_text()
        assert old in text, f"{name} has no {old!r}"
        (folder / name).write_text(text.replace(old, new))
    return folder


def start(
    command: Sequence[str | Path], *, cwd: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a program in a session of its own, so that a signal to its group is as Ctrl-C is."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@functools.lru_cache(maxsize=2)  # a server that was started anew has another address
def _client(region: str, endpoint: str, key_id: str, key: str):
    return boto3.client(
        "ec2", region_name=region, endpoint_url=endpoint, aws_access_key_id=key_id, aws_secret_access_key=key
    )


def _bin() -> Path:
    return Path(sys.executable).parent


def command_lines():
    """Every process of this host: id and command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            yield int(folder.name), line


def processes_of(name):
    """Command lines in which a name occurs."""
    return [line for _, line in command_lines() if name in line]


def wait_for(question, timeout_s=120):
    """Ask until the answer is true."""
    deadline = time.monotonic() + timeout_s
    while not (answer := question()):
        assert time.monotonic() < deadline, f"still {answer!r} after {timeout_s} s"
        time.sleep(0.5)
    return answer
