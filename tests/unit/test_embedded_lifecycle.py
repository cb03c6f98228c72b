"""A machine that can't be started, stopped or asked keeps its disks; QEMU may end amid an answer."""

import contextlib
import json
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpukiln.clouds.embedded import lifecycle, virtual_machine
from gpukiln.clouds.embedded.block_devices import AttachedDisk
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machine import MachineSpec
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.clouds.embedded.qmp import Qmp
from gpukiln.clouds.embedded.virtual_machine import VirtualMachine
from gpukiln.errors import UnavailableError

GREETING = json.dumps({"QMP": {"version": {}, "capabilities": []}}) + "\n"
READY = '{"return": {}}\n'


@pytest.fixture
def peer(tmp_path):
    """A control socket that says what it is told to say, line by line, and then ends."""

    @contextlib.contextmanager
    def serve(*lines: str):
        path = tmp_path / "qmp.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()

            def talk():
                connection, _ = listener.accept()
                with connection, connection.makefile("rw") as stream:
                    for number, line in enumerate(lines):
                        if number and not stream.readline():
                            return
                        stream.write(line)
                        stream.flush()

            thread = threading.Thread(target=talk)
            thread.start()
            yield path
            thread.join(5)
        path.unlink(missing_ok=True)

    return serve


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("",), "ended before it answered its greeting"),
        ((GREETING,), "qmp_capabilities"),
        ((GREETING, READY), "stop"),
        ((GREETING, READY, '{"retu'), "ended before it answered stop"),
        ((GREETING, READY, "what?\n"), "answered stop with 'what?"),
        ((GREETING, READY, "[]\n"), "answered stop with"),
        ((GREETING, READY, '{"event": "STOP"}\n'), "ended before it answered stop"),
        ((GREETING, READY, '{"error": {"class": "GenericError", "desc": "no"}}\n'), "refused stop: no"),
    ],
)
def test_a_qemu_that_ends_or_raves_is_an_error_that_says_so(peer, lines, told):
    with peer(*lines) as path, pytest.raises(UnavailableError, match=told), Qmp(path) as qemu:
        qemu.execute("stop")


def test_an_event_before_the_answer_is_no_answer(peer):
    answer = '{"event": "STOP"}\n{"return": {"status": "paused"}}\n'
    with peer(GREETING, READY, answer) as path, Qmp(path) as qemu:
        assert qemu.execute("query-status") == {"status": "paused"}


def test_a_qemu_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UnavailableError, match="can't be reached"):
        Qmp(tmp_path / "qmp.sock")


class Sleeping(VirtualMachine):
    """A virtual machine whose process is there and whose control socket is whatever the test serves."""

    def _command(self):
        return ["sleep", "600"]


class Instance:
    """As much of moto's instance as a life needs."""

    id = "i-0123456789abcdef0"
    instance_initiated_shutdown_behavior = "stop"
    get_block_device_mapping = ()

    def __init__(self, state):
        self._state = SimpleNamespace(name=state, code=0)
        self._reason, self.state_reason, self.nics = "", None, {}

    @property
    def state(self):
        return self._state.name


@pytest.fixture
def vm(tmp_path):
    """A stopped virtual machine with a disk, and the machines that it is one of."""
    layout = Layout(tmp_path)
    layout.create()
    machines, disk = Machines(layout), layout.volume("vol-0123456789abcdef0")
    disk.write_bytes(b"what somebody wrote")
    spec = MachineSpec(
        instance_id=Instance.id,
        kind="vm",
        folder=layout.machines / Instance.id,
        root=AttachedDisk(disk.stem, "/dev/xvda", disk),
        console=tmp_path / "console.log",
        address="127.64.0.9",
        ssh_port=22,
    )
    spec.folder.mkdir()
    network = SimpleNamespace(
        start=lambda: None, stop=lambda: None, path=Path("/dev/null"), listen=no_network
    )
    machine = Sleeping(spec, network)
    machines._by_id[Instance.id] = machine
    yield SimpleNamespace(machines=machines, machine=machine, disk=disk, life=lives(machines))
    machine.kill()


def no_network(_port):
    raise OSError("no network namespace")


def lives(machines):
    ended = []
    life = lifecycle.Lifecycle(machines, terminate=ended.append)
    return SimpleNamespace(
        ended=ended, **{name: getattr(life, name) for name in ("start", "stop", "reboot", "terminate")}
    )


def settle():
    for thread in threading.enumerate():
        if thread.name == Instance.id:
            thread.join(20)


def test_a_machine_that_does_not_start_again_is_stopped_and_has_its_disk(vm):
    instance = Instance("stopped")
    vm.life.start(instance)
    settle()
    assert instance.state == "stopped"
    assert "no network namespace" in instance._reason
    assert vm.disk.read_bytes() == b"what somebody wrote"
    assert vm.machines.get(Instance.id) is vm.machine
    assert vm.life.ended == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            UnavailableError("no network", details=("slirp4netns ended",), hint="install it"),
            "no network; slirp4netns ended; install it",
        ),
        (UnavailableError("no network"), "no network"),
        (OSError("no network"), "no network"),
    ],
)
def test_a_failure_is_the_reason_with_its_details_and_the_next_step(vm, error, reason):
    def fail():
        raise error

    vm.machine.network.start = fail
    instance = Instance("stopped")
    vm.life.start(instance)
    settle()
    assert instance._reason == instance.state_reason.message == reason


@pytest.mark.parametrize(
    ("action", "lines"),
    [("stop", ("",)), ("stop", (GREETING, READY)), ("stop", (GREETING, READY, '{"ret')), ("reboot", ("",))],
)
def test_a_qemu_that_ends_while_it_is_asked_to_shut_down_costs_no_disk(vm, peer, action, lines, monkeypatch):
    with peer(*lines) as path:
        monkeypatch.setattr(Sleeping, "_control", path)
        vm.machine.start()
        stopping = threading.Timer(0.5, vm.machine.process.terminate)  # it was ending anyway
        stopping.start()
        instance = Instance("running")
        getattr(vm.life, action)(instance)
        settle()
    assert instance.state == "stopped"
    assert not vm.machine.running
    assert vm.disk.read_bytes() == b"what somebody wrote"
    assert vm.machines.get(Instance.id) is vm.machine
    assert vm.life.ended == []


@pytest.mark.usefixtures("require_root_machine")
def test_a_guest_that_does_not_answer_loses_a_disk_by_force_alone(tmp_path, monkeypatch):
    """QEMU as it is; its processor is halted, so nobody inside gives the disk back."""
    monkeypatch.setattr(virtual_machine, "UNPLUG_S", 1)
    control, file = tmp_path / "qmp.sock", tmp_path / "volume.raw"
    file.write_bytes(b"\0" * 4096)
    disk = AttachedDisk("vol-0123456789abcdef1", "/dev/sdf", file)
    machine = SimpleNamespace(_control=control)
    options = (
        "-S",
        "-nodefaults",
        "-display",
        "none",
        "-m",
        "64",
        "-qmp",
        f"unix:{control},server=on,wait=off",
    )
    with subprocess.Popen(["qemu-system-x86_64", *options]) as qemu:
        try:
            while not control.exists():
                assert qemu.poll() is None
                time.sleep(0.1)
            VirtualMachine._plug(machine, disk)
            assert not VirtualMachine._unplug(machine, disk, force=False)
            assert not VirtualMachine._unplug(machine, disk, force=False)  # asked again
            assert VirtualMachine._unplug(machine, disk, force=True)
            VirtualMachine._plug(
                machine, AttachedDisk("vol-0123456789abcdef2", "/dev/sdg", file)
            )  # it is free
        finally:
            qemu.kill()
