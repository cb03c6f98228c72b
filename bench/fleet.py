"""Many light machines that are copies of one converged node: nspawn on overlays over its disk."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.container import ContainerMachine
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machine import MachineSpec
from gpukiln.clouds.embedded.network import MachineNetwork, free_ssh_port
from gpukiln.disks.mount import mounted_root
from gpukiln.disks.sparse import copy_disk
from gpukiln.programs import tool

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = "127.78.0."
USER, USER_ID = "admin", 1000
BOOT_S = 900  # seconds until a machine must have booted
BOOTING = 4  # machines that boot at a time
SSH_OPTIONS = (
    *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"),
    *("-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"),
)
# The kernel's default of 128 inotify instances is enough for about ten systemds.
INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_PER_MACHINE = 64
# A node that is measured does nothing of its own, and asks no cloud who it is.
MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "man-db.timer")
CLOUD_INIT_OFF = "etc/cloud/cloud-init.disabled"


class Clone(ContainerMachine):
    """A container on an overlay over a root file system that it does not write.

    Args:
        spec: What to boot; its disk is not used.
        lower: The root file system below.
        public_key: The line that lets its user in.
    """

    def __init__(self, spec: MachineSpec, network: MachineNetwork, *, lower: Path, public_key: str) -> None:
        super().__init__(spec, network)
        self._lower, self._public_key = lower, public_key

    def _mount(self) -> None:
        for name in ("root", "upper", "work", "docker", "containerd"):
            (self.spec.folder / name).mkdir(parents=True)
        options = f"lowerdir={self._lower},upperdir={self.spec.folder}/upper,workdir={self.spec.folder}/work"
        tool("mount", "-t", "overlay", "-o", options, "overlay", str(self._root))
        keys = self._root / f"home/{USER}/.ssh/authorized_keys"
        keys.write_text(self._public_key)
        os.chown(keys, USER_ID, USER_ID)
        (self._root / CLOUD_INIT_OFF).touch()
        for unit in MASKED:
            (self._root / "etc/systemd/system" / unit).symlink_to("/dev/null")

    def _command(self) -> list[str]:
        # Docker's own overlays can't lie on this one
        engines = (f"--bind={self.spec.folder}/{name}:/var/lib/{name}" for name in ("docker", "containerd"))
        return [*super()._command(), *engines]


@dataclass(frozen=True)
class Fleet:
    """Running clones.

    Args:
        inventory: Ansible's inventory of them.
        addresses: Where they are.
        key: The private key that opens them.
        port: SSH's port on them.
    """

    inventory: Path
    addresses: tuple[str, ...]
    key: Path
    port: int

    def ssh(self, address: str, *options: str) -> list[str]:
        """The command line up to the remote command.

        Args:
            address: Which machine.
            options: More options of ssh.
        """
        return ["ssh", "-i", str(self.key), "-p", str(self.port), *SSH_OPTIONS, *options, f"{USER}@{address}"]


@contextlib.contextmanager
def fleet(disk: Path, count: int, folder: Path) -> Iterator[Fleet]:
    """Boot copies of a node.

    Args:
        disk: Disk of a converged node.
        count: How many, up to 250.
        folder: An empty folder for their files.

    Yields:
        The machines; they are gone at the end.
    """
    key = folder / "key"
    tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    addresses = tuple(f"{ADDRESSES}{number}" for number in range(1, count + 1))
    port = free_ssh_port(addresses[0])
    variables = {
        "ansible_user": USER,
        "ansible_port": port,
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": " ".join(SSH_OPTIONS),
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    inventory = folder / "inventory.json"
    inventory.write_text(
        json.dumps({"all": {"hosts": {address: {} for address in addresses}, "vars": variables}})
    )
    machines = Fleet(inventory, addresses, key, port)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_watches_for(count))
        lower = undo.enter_context(mounted_root(disk))
        public_key = key.with_suffix(".pub").read_text()
        # All at once would be so slow that units of theirs run into their timeouts.
        for first in range(0, count, BOOTING):
            some = addresses[first : first + BOOTING]
            for address in some:
                undo.enter_context(
                    _clone(disk, address, port, folder / address, lower=lower, public_key=public_key)
                )
            for address in some:
                _wait_until_up(machines.ssh(address))
        yield machines


@contextlib.contextmanager
def _clone(disk: Path, address: str, port: int, folder: Path, lower: Path, public_key: str) -> Iterator[None]:
    name = f"bench-{address.rpartition('.')[2]}"
    folder.mkdir()
    network = MachineNetwork(f"gk-{name}", folder, address=address, ssh_port=port)
    console = folder / "console.log"
    root = AttachedDisk("vol-none", "/dev/xvda", disk)
    spec = MachineSpec(name, "privileged", folder, root, console, address=address, ssh_port=port)
    machine = Clone(spec, network, lower=lower, public_key=public_key)
    try:
        network.start()
        machine.start()
        yield
    finally:
        machine.kill()
        network.stop()
        shutil.rmtree(folder)


def _wait_until_up(ssh: list[str]) -> None:
    """Until systemd says that the boot is over, with no failed unit."""
    deadline = time.monotonic() + BOOT_S
    while True:
        done = subprocess.run(
            [*ssh, "systemctl is-system-running --wait"], capture_output=True, text=True, check=False
        )
        if (state := done.stdout.strip()) == "running":
            return
        if state or time.monotonic() > deadline:
            failed = subprocess.run(
                [*ssh, "systemctl --failed --no-legend --plain"], capture_output=True, text=True, check=False
            )
            raise SystemExit(f"{ssh[-1]} did not boot well: {state or done.stderr.strip()}\n{failed.stdout}")
        time.sleep(1)


@contextlib.contextmanager
def _watches_for(count: int) -> Iterator[None]:
    before = INOTIFY_INSTANCES.read_text()
    try:
        if int(before) < count * INOTIFY_PER_MACHINE:
            INOTIFY_INSTANCES.write_text(str(count * INOTIFY_PER_MACHINE))
        yield
    finally:
        INOTIFY_INSTANCES.write_text(before)


def make_disk(disk: Path) -> None:
    """Converge a machine with Molecule's scenario `default`, twice, and keep its disk.

    Args:
        disk: Where the disk goes.
    """
    home = disk.with_name(f"{disk.name}.home")
    environment = {
        **os.environ,
        "GPUKILN_HOME": str(home),
        "MOLECULE_EPHEMERAL_DIRECTORY": str(home / "molecule"),
        "MOLECULE_COMMAND_BORDERS": "false",
    }

    def call(*command: str) -> None:
        with (disk.with_suffix(".log")).open("ab") as log:
            subprocess.run(
                [Path(sys.executable).parent / command[0], *command[1:]],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                check=True,
            )

    (home / "molecule").mkdir(parents=True)
    home.chmod(0o755)
    try:
        for step in ("create", "converge", "idempotence"):
            call("molecule", step)
        layout = Layout(home)
        ec2 = EmbeddedCloud("us-west-2", layout=layout).client("ec2")
        [reservation] = ec2.describe_instances()["Reservations"]
        [described] = reservation["Instances"]
        instance, [root] = described["InstanceId"], described["BlockDeviceMappings"]
        ec2.stop_instances(InstanceIds=[instance])
        ec2.get_waiter("instance_stopped").wait(InstanceIds=[instance], WaiterConfig={"Delay": 1})
        copy_disk(layout.volume(root["Ebs"]["VolumeId"]), disk)
    finally:
        call("invoke", "cloud.clean", "--images", "--base", "--released", "--force", "--yes")
        shutil.rmtree(home)
