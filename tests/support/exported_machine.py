"""An exported disk on a machine that is not EC2's: QEMU with a NoCloud seed, as a hypervisor gives it."""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

from gpukiln.clouds.embedded import accelerator
from gpukiln.clouds.embedded.cluster.control_plane import free_ports
from gpukiln.clouds.embedded.hardware import firmware_arguments
from gpukiln.clouds.embedded.qmp import Qmp
from tests.support.harness import BOOT_S, one_connection, ssh, wait_for

Bus = Literal["virtio", "scsi", "sata", "nvme"]
SAID = "gpukiln-test-state:"
# Says on the console how a boot went; a simple service holds up no boot, which it waits for. The console is
# opened at the end: a login prompt that starts hangs up who had it open.
STATE = "$$(systemctl is-system-running --wait) $$(systemctl --failed --plain --no-legend)"
REPORT = f"""\
[Service]
ExecStart=sh -c 'state="{STATE}"; echo {SAID} $$state >/dev/ttyS0'
[Install]
WantedBy=multi-user.target
"""


def disk_arguments(node: str, bus: Bus, *, serial: str) -> tuple[str, ...]:
    """Of the disk that is booted from.

    Args:
        node: Name of its block node.
        serial: What the guest sees as the disk's serial number, 20 characters at most.
    """
    common = {"drive": node, "serial": serial, "bootindex": 0}
    devices: dict[Bus, tuple[dict[str, Any], ...]] = {
        "virtio": ({"driver": "virtio-blk-pci", **common},),
        "scsi": (
            {"driver": "virtio-scsi-pci", "id": "scsi"},
            {"driver": "scsi-hd", "bus": "scsi.0", **common},
        ),
        "sata": (
            {"driver": "ich9-ahci", "id": "ahci"},
            {"driver": "ide-hd", "bus": "ahci.0", **common},
        ),
        "nvme": ({"driver": "nvme", **common},),
    }
    return tuple(word for device in devices[bus] for word in ("-device", json.dumps(device)))


def overlay(disk: Path, target: Path) -> Path:
    """A disk of its own for one machine, of which only the changes are written.

    Args:
        disk: What it begins with: raw or qcow2, as its name ends.
    """
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", disk.suffix[1:], "-b", disk, target]
    subprocess.run(command, check=True)
    return target


def seed(folder: Path, name: str, public_key: str) -> Path:
    """A CD with a host's name and a key, and with what tells the console how the boot went."""
    user_data = {
        "ssh_authorized_keys": [public_key],
        "write_files": [{"path": "/etc/systemd/system/report.service", "content": REPORT}],
        "runcmd": [["systemctl", "enable", "--now", "--no-block", "report"]],
    }
    with tempfile.TemporaryDirectory() as content:
        Path(content, "meta-data").write_text(json.dumps({"instance-id": name, "local-hostname": name}))
        Path(content, "user-data").write_text("#cloud-config\n" + json.dumps(user_data) + "\n")
        made = folder / f"{name}-seed.iso"
        command = ["xorriso", "-as", "mkisofs", "-quiet", "-V", "CIDATA", "-J", "-R", "-o", made, content]
        subprocess.run(command, check=True, capture_output=True)
    return made


def _cd(file: Path) -> tuple[str, ...]:
    drive = f"if=none,id=seed,media=cdrom,readonly=on,format=raw,file={file}"
    return ("-drive", drive, "-device", "ide-cd,drive=seed,bus=ide.0")


class ExportedMachine:
    """A virtual machine with q35's chipset, and a second network card without a cable; `with` pulls its plug.

    Args:
        disk: qcow2; written to.
        seed_file: A CD; None: there is no drive.
        folder: Its own.
        firmware: bios or uefi.
        bus: What the disk is attached to.
        network_card: QEMU's name of it.
    """

    def __init__(self, disk, seed_file, folder, *, firmware, bus, network_card="virtio-net-pci"):
        self.console, control = folder / "console.log", folder / "qmp.sock"
        self._connection = one_connection(folder / "ssh")
        [self.port] = free_ports(1)
        node = {"driver": "qcow2", "node-name": "root", "discard": "unmap"}
        node["file"] = {"driver": "file", "filename": str(disk), "cache": {"direct": False, "no-flush": True}}
        command = [
            *("qemu-system-x86_64", "-machine", "q35", "-m", "2048"),
            *accelerator.arguments(accelerator.processors()),
            *("-nodefaults", "-no-user-config", "-display", "none", "-vga", "std"),
            *firmware_arguments(firmware, folder),
            *("-blockdev", json.dumps(node), *disk_arguments("root", bus, serial="exported")),
            *(_cd(seed_file) if seed_file else ()),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.port}-:22"),
            *("-device", f"{network_card},netdev=net"),
            *("-netdev", "user,id=spare,restrict=on", "-device", f"{network_card},netdev=spare"),
            *("-device", "virtio-rng-pci", "-serial", f"file:{self.console}"),
            *("-qmp", f"unix:{control},server=on,wait=off"),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            wait_for(lambda: control.exists() or self.process.poll() is not None)
            with Qmp(control) as qemu:  # while the firmware still looks around
                qemu.execute("set_link", name="spare", up=False)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def wait_for_console(self, pattern: str, timeout_s: float = BOOT_S) -> str:
        """Everything that the console shows, once a line of it matches."""
        wait_for(lambda: self._ended() or re.search(pattern, self.said()), timeout_s)
        said = self.said()
        assert re.search(pattern, said), self._ended() + said[-3000:]
        return said

    def state(self, timeout_s: float = BOOT_S) -> str:
        """How systemd says that the boot went, and which units failed; there is a login prompt by then."""
        [state] = re.findall(rf"{SAID} (.*?)\r?\n", self.wait_for_console(rf"{SAID}.*\n", timeout_s))
        wait_for(lambda: self._ended() or " login:" in self.said())
        return state

    def _ended(self) -> str:
        return "" if self.process.poll() is None else f"QEMU ended: {self.process.stderr.read().decode()}\n"

    def ssh(self, key_file: Path, command: str) -> subprocess.CompletedProcess[str]:
        return ssh("127.0.0.1", str(self.port), key_file, command, options=self._connection)

    def read(self, key_file: Path, command: str) -> str:
        done = self.ssh(key_file, command)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout
