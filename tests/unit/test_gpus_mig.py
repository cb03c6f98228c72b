"""`reset` and `mig`: everything that is in the way is told at once, nothing is left half done."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.state import Rows, State
from gpukiln.errors import BusyError, CheckFailedError, IncompatibleError, PartialError, UsageError
from gpukiln.gpus import kernel_log, mig, mig_change, reset
from gpukiln.gpus.lease_overlay import snapshot
from gpukiln.gpus.leases import Leases, whoami
from gpukiln.gpus.mig import MigLayout
from gpukiln.gpus.mig_change import MigProfile, arrange
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.probe import base
from tests.support import gpus

Typed = Callable[..., tuple[int, str]]
Machine = Callable[..., State]


@pytest.fixture
def machine(simulated: Machine, loaded_nvml: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """As `simulated`, with the stand-in nvidia-smi."""
    smi = library.build_smi(loaded_nvml.parents[1])
    monkeypatch.setattr(base, "PATH", f"{smi.parent}:{base.PATH}")
    return simulated


@pytest.fixture
def typed(typed_gpu: Callable[..., tuple[int, str, str]]) -> Typed:
    def run(*words: str) -> tuple[int, str]:
        code, out, err = typed_gpu(*words)
        return code, out + err

    return run


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """The words for a configuration."""

    def write(*rows: dict[str, object]) -> tuple[str, ...]:
        file = tmp_path / "mig.yaml"
        file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": {"it": list(rows)}}))
        return ("--config", str(file), "--select", "it")

    return write


def on(devices: object, **profiles: int) -> dict[str, object]:
    return {"devices": devices, "mig-enabled": True, "mig-devices": profiles}


OFF: dict[str, object] = {"devices": "all", "mig-enabled": False}


def cuts() -> list[MigLayout]:
    found = snapshot()
    return [mig.current_layout(found, one) for one in found.devices if one.kind == "gpu"]


# ---- reset


def test_a_reset_mends_what_waits_for_one_and_leaves_no_lease(machine: Machine, typed: Typed) -> None:
    machine("g5.12xlarge", scenario="remap-pending")
    code, said = typed("reset", "3")
    assert code == 0, said
    assert "the driver requests gpu reset" in said
    assert "nothing blocks the reset; --yes carries it out" in said
    assert snapshot().devices[3].remap_pending is True
    code, said = typed("reset", "3", "--yes")
    assert code == 0, said
    assert "was successfully reset" in said
    after = snapshot()
    assert after.devices[3].remap_pending is False
    assert after.devices[3].recovery_action == "none"
    assert Leases().current() == []


def test_a_reset_is_noted_in_the_kernel_s_log_for_gpus_that_the_kernel_has(
    machine: Machine, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers before branch 570 log nothing: by the note what the log has of the GPU before is over."""
    machine("g5.12xlarge")
    log, pci = tmp_path / "kmsg", tmp_path / "pci"
    log.touch()
    (pci / "0000:00:1c.0").mkdir(parents=True)
    monkeypatch.setattr(reset, "KERNEL_LOG", str(log))
    monkeypatch.setattr(reset, "PCI", str(pci))
    before = "NVRM: Xid (PCI:0000:00:1c): 119, Timeout after 6s of waiting for RPC response"
    assert typed("reset", "1", "--yes")[0] == 0
    noted = log.read_text()
    assert noted == "<5>gpukiln: GPU 0000:00:1c was reset\n"
    table = {
        119: {
            "kind": "reset",
            "blames_hardware": True,
            "severity": "error",
            "reset": True,
            "text": "",
            "remedy": "",
        }
    }
    lines = [before, noted]
    assert kernel_log.events(lines[:1], table)
    assert kernel_log.events(lines, table) == []


def test_everything_in_the_way_of_a_reset_is_told_at_once(
    machine: Machine, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = machine("g5.12xlarge", "0.recovery_action=2")
    uuid = snapshot().devices[0].uuid or ""
    state.change(lambda rows: rows.update(process_rows(0, os.getpid())))
    leases = Leases()
    leases.acquire(
        DeviceRequest(devices=(uuid,), repair=True, ignore_unleased=True), whoami(), kind="detached"
    )
    monkeypatch.setattr(reset, "is_root", lambda: False)
    code, said = typed("reset", "0", "--yes", "--json")
    assert code == 6
    node = json.loads(said)["nodes"][0]
    assert {row["id"] for row in node["blockers"]} == {"not-root", "lease", "process", "recovery-action"}
    assert not node["done"]
    assert "drain the node and reboot it" in said


def process_rows(gpu: int, pid: int, **more: str) -> Rows:
    """A process that runs on a GPU."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    key = f"gpus.{gpu}.processes"
    values = {
        "pid": pid,
        "start": fields[19],
        "memory": 100,
        "utilization": 1,
        "kind": "compute",
        "name": "x",
    }
    return {
        f"{key}.count": "1",
        **{f"{key}.0.{name}": str(value) for name, value in {**values, **more}.items()},
    }


@pytest.mark.parametrize(
    ("instance_type", "managed", "more"),
    [
        ("p4d.24xlarge", False, 7),
        ("p4d.24xlarge", True, 0),
        ("p5.48xlarge", False, 0),
        ("p3dn.24xlarge", True, 7),
    ],
)
def test_gpus_that_nvlink_joins_go_together_where_the_driver_wants_it(
    machine: Machine, tmp_path: Path, instance_type: str, managed: bool, more: int
) -> None:
    machine(instance_type)
    if managed:
        (tmp_path / "proc/77").mkdir(parents=True)
        (tmp_path / "proc/77/comm").write_text("nv-fabricmanage\n")
    found = snapshot()
    others = reset.reset_peers(found, found.devices[:1], proc=str(tmp_path / "proc"))
    assert len(others) == more
    rows = reset.reset_blockers(found, found.devices[:1], proc=str(tmp_path / "proc"))
    assert [row.id for row in rows] == ["peers"] * bool(more)
    assert reset.reset_blockers(found, found.devices, proc=str(tmp_path / "proc")) == []


def test_who_has_device_nodes_open_is_named_with_how_it_ends(tmp_path: Path) -> None:
    held = {
        5: ("nvidia-persiste", "nvidia0"),
        6: ("nv-hostengine", "nvidia1"),
        7: ("x", "null"),
        8: ("top", "nvidia0"),
    }
    for pid, (name, node) in held.items():
        (tmp_path / f"{pid}/fd").mkdir(parents=True)
        (tmp_path / f"{pid}/comm").write_text(f"{name}\n")
        (tmp_path / f"{pid}/fd/3").symlink_to(f"/dev/{node}")
    found = gpus.snapshot(gpus.device(0, minor=0), gpus.device(1, minor=1))
    rows, notes = reset.blockers(found, found.devices, proc=str(tmp_path))
    assert [(row.id, row.device) for row in rows] == [("holder", gpus.uuid(1)), ("holder", gpus.uuid(0))]
    assert "systemctl stop nvidia-dcgm" in rows[0].text
    assert "top (pid 8) has /dev/nvidia0 open: end pid 8" in rows[1].text
    assert notes == ["nvidia-persistenced has /dev/nvidia0 open: stop it if nvidia-smi refuses the reset"]


def test_what_can_not_be_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "5/fd").mkdir(parents=True)

    def refused(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    _, notes = reset.blockers(gpus.snapshot(), (), proc=str(tmp_path))
    assert notes == ["1 processes of other users may have it open: only root can read their open files"]


def test_a_container_resets_nothing() -> None:
    rows, _ = reset.blockers(gpus.snapshot(scope="container"), (), held_open=False)
    assert [row.id for row in rows] == ["container"]


def test_a_gpu_that_a_virtual_machine_has_is_told_as_that(
    machine: Machine, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("g4dn.xlarge")
    gpu = tmp_path / "pci/0000:81:00.0"
    gpu.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x20b0")):
        (gpu / name).write_text(text)
    (tmp_path / "vfio-pci").mkdir()
    (gpu / "driver").symlink_to(tmp_path / "vfio-pci")
    monkeypatch.setattr(base, "PCI", str(tmp_path / "pci"))
    monkeypatch.setattr("gpukiln.probe.gpus.PCI", str(tmp_path / "pci"))
    code, said = typed("reset", "0000:81:00.0")
    assert code == 3
    assert "bound to vfio-pci" in said


def test_nobody_gets_a_gpu_while_it_is_reset(machine: Machine) -> None:
    machine("p4d.24xlarge", scenario="mig-mixed")
    found = snapshot()
    whole = [one for one in found.devices if one.kind == "gpu"]
    with reset.exclusive_lease(whole, "test"):
        for request in (DeviceRequest(), DeviceRequest(mig="any")):
            with pytest.raises((BusyError, IncompatibleError), match="0 of"):
                Leases().acquire(request, whoami())
    granted = Leases().acquire(DeviceRequest(mig="any"), whoami())
    assert granted.uuids[0].startswith("MIG-")


# ---- mig: the format


ENTRY = "version: v1\nmig-configs:\n  it:\n  - "
WRONG = {
    "no version": "mig-configs: {it: [{devices: all, mig-enabled: false}]}",
    "another version": "{version: v2, mig-configs: {it: [{devices: all, mig-enabled: false}]}}",
    "strange key": "{version: v1, other: 1, mig-configs: {it: [{devices: all, mig-enabled: false}]}}",
    "no list": "{version: v1, mig-configs: {it: {devices: all, mig-enabled: false}}}",
    "another name": "{version: v1, mig-configs: {other: [{devices: all, mig-enabled: false}]}}",
    "no YAML": "version: [v1",
    "no devices": f"{ENTRY}{{mig-enabled: false}}",
    "no mode": f"{ENTRY}{{devices: all}}",
    "devices of a word": f"{ENTRY}{{devices: some, mig-enabled: false}}",
    "on, and no devices": f"{ENTRY}{{devices: all, mig-enabled: true}}",
    "off, and devices": f"{ENTRY}{{devices: all, mig-enabled: false, mig-devices: {{1g.5gb: 1}}}}",
    "no profile": f"{ENTRY}{{devices: all, mig-enabled: true, mig-devices: {{big: 1}}}}",
    "too many slices": f"{ENTRY}{{devices: all, mig-enabled: true, mig-devices: {{4c.3g.20gb: 1}}}}",
    "half a device": f"{ENTRY}{{devices: all, mig-enabled: true, mig-devices: {{1g.5gb: 0.5}}}}",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_in_a_file_is_told(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "mig.yaml"
    file.write_text(WRONG[wrong])
    with pytest.raises(UsageError):
        mig.read_config(file, "it")


def test_the_last_entry_about_a_gpu_holds(tmp_path: Path) -> None:
    file = tmp_path / "mig.yaml"
    file.write_text(
        """
version: v1
mig-configs:
  custom:
  - devices: all
    mig-enabled: false
  - devices: [1, 2]
    device-filter: [0x20B010DE]
    mig-enabled: true
    mig-devices: {}
  - devices: [2]
    device-filter: ["0x20B210DE"]
    mig-enabled: true
    mig-devices: {"1g.5gb": 7}
"""
    )
    entries = mig.read_config(file, "")
    pci_ids = ("0x20B010DE", "0x20B010DE", "0x20B210DE", "0x20B010DE")
    said = [mig.desired_layout(entries, gpus.device(n, pci_id=id)) for n, id in enumerate(pci_ids)]
    assert said == [
        MigLayout(False, {}),
        MigLayout(True, {}),
        MigLayout(True, {"1g.5gb": 7}),
        MigLayout(False, {}),
    ]


def test_json_needs_no_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = tmp_path / "mig.json"
    file.write_text(json.dumps({"version": "v1", "mig-configs": {"a": [on([0], **{"1g.5gb": 1})]}}))
    assert mig.read_config(file, "a")[0].layout == MigLayout(True, {"1g.5gb": 1})


# ---- mig: places


A100 = (
    MigProfile("1g.5gb", 19, 1, 7, tuple((n, 1) for n in range(7))),
    MigProfile("1g.10gb", 15, 1, 4, ((0, 2), (2, 2), (4, 2), (6, 2))),
    MigProfile("2g.10gb", 14, 2, 3, ((0, 2), (2, 2), (4, 2))),
    MigProfile("3g.20gb", 9, 3, 2, ((0, 4), (4, 4))),
    MigProfile("4g.20gb", 5, 4, 1, ((0, 4),)),
    MigProfile("7g.40gb", 0, 7, 1, ((0, 8),)),
)


def test_the_largest_is_placed_first_and_the_others_where_room_is() -> None:
    placed = arrange(A100, {"1g.5gb": 1, "2g.10gb": 1, "4g.20gb": 1})
    assert [(one.name, start, parts) for one, start, _, parts in placed] == [
        ("4g.20gb", 0, (4,)),
        ("2g.10gb", 4, (2,)),
        ("1g.5gb", 6, (1,)),
    ]
    # The half of three slices must leave the front to the one of four, which fits nowhere else.
    assert [(one.name, start) for one, start, _, _ in arrange(A100, {"3g.20gb": 1, "4g.20gb": 1})] == [
        ("4g.20gb", 0),
        ("3g.20gb", 4),
    ]


def test_parts_fill_as_few_instances_as_they_can() -> None:
    placed = arrange(A100, {"1c.3g.20gb": 2, "2c.3g.20gb": 1})
    assert [(one.name, parts) for one, _, _, parts in placed] == [("3g.20gb", (2, 1)), ("3g.20gb", (1,))]


@pytest.mark.parametrize(
    "devices", [{"1g.5gb": 8}, {"4g.20gb": 2}, {"7g.40gb": 1, "1g.5gb": 1}, {"5g.1gb": 1}]
)
def test_what_has_no_room_is_refused(devices: dict[str, int]) -> None:
    with pytest.raises(IncompatibleError):
        arrange(A100, devices)


# ---- mig: assert, export, apply


@pytest.mark.parametrize("instance_type", ["p4d.24xlarge", "p5.48xlarge"])
def test_what_was_exported_makes_the_same_of_another_machine(
    machine: Machine, typed: Typed, config: Callable[..., tuple[str, ...]], tmp_path: Path, instance_type: str
) -> None:
    state = machine(instance_type)
    chance = random.Random(instance_type)  # noqa: S311 - the same in every run
    offered = board(state.rows())
    three, four = (next(one.name for one in offered if one.slices == slices) for slices in (3, 4))
    rows = [on([0], **{f"1c.{three}": 3, f"2c.{four}": 1})]
    rows += [on([n], **some(offered, chance)) for n in range(1, 5)] + [{**OFF, "devices": [5, 6, 7]}]
    words = config(*rows)
    code, said = typed("mig", "assert", *words)
    assert code == 1
    assert said.count("differs: ") == 5
    code, said = typed("mig", "apply", *words, "--yes")
    assert code == 0, said
    wanted = [row.get("mig-devices", {}) for row in rows[:5]]
    assert [dict(cut.devices) for cut in cuts()] == [*wanted, {}, {}, {}]
    assert typed("mig", "assert", *words) == (0, "every GPU has its desired layout\n")
    code, said = typed("mig", "export", "--select", "it")
    assert code == 0
    exported = tmp_path / "exported.yaml"
    exported.write_text(said)
    before = state.rows()
    code, said = typed("mig", "apply", "--config", str(exported), "--select", "it", "--yes")
    assert (code, state.rows()) == (0, before), "a second one changes nothing"
    assert "every GPU has its desired layout" in said
    same = cuts()
    machine(instance_type)
    code, said = typed("mig", "apply", "--config", str(exported), "--select", "it", "--yes")
    assert code == 0, said
    assert cuts() == same
    code, said = typed("mig", "apply", *config(OFF), "--yes")
    assert code == 0, said
    assert cuts() == [MigLayout(False, {})] * 8


def board(rows: Rows) -> list[MigProfile]:
    """What the first GPU can be cut into."""
    found = []
    for n in range(int(rows["gpus.0.mig.profiles.count"])):
        key = f"gpus.0.mig.profiles.{n}"
        size = int(rows[f"{key}.size"])
        starts = [int(rows[f"{key}.placements.{i}"]) for i in range(int(rows[f"{key}.placements.count"]))]
        numbers = (int(rows[f"{key}.{name}"]) for name in ("id", "slices", "instances"))
        found.append(MigProfile(rows[f"{key}.name"], *numbers, tuple((start, size) for start in starts)))
    return found


def some(offered: list[MigProfile], chance: random.Random) -> dict[str, int]:
    """Parts at random that one GPU has room for."""
    made: dict[str, int] = {}
    for _ in range(12):
        one = chance.choice(offered)
        part = chance.randint(1, one.slices)
        name = one.name if part == one.slices else f"{part}c.{one.name}"
        more = {**made, name: made.get(name, 0) + 1}
        try:
            arrange(offered, more)
        except IncompatibleError:
            continue
        made = more
    return made


def test_apply_waits_for_nobody_and_names_all_who_have_a_gpu(
    machine: Machine, typed: Typed, config: Callable[..., tuple[str, ...]]
) -> None:
    state = machine("p5.48xlarge")
    found = snapshot()
    Leases().acquire(DeviceRequest(devices=(found.devices[0].uuid or "",)), whoami(), kind="detached")
    state.change(lambda rows: rows.update(process_rows(1, os.getpid())))
    words = config(on([0, 1, 2], **{"1g.10gb": 1}))
    code, said = typed("mig", "apply", *words, "--yes")
    assert code == 75, said
    assert said.count("blocked by: ") == 2
    assert "nothing was changed" in said
    assert cuts() == [MigLayout(False, {})] * 8


def test_a_gpu_that_is_not_touched_may_be_in_use(
    machine: Machine, typed: Typed, config: Callable[..., tuple[str, ...]]
) -> None:
    state = machine("g7e.12xlarge")
    state.change(lambda rows: rows.update(process_rows(1, os.getpid())))
    code, said = typed("mig", "apply", *config(on([0], **{"1g.24gb": 4})), "--yes")
    assert code == 0, said
    assert "nvidia-ctk is missing" in said


@pytest.mark.parametrize(
    ("function", "code"),
    [("nvmlDeviceCreateGpuInstanceWithPlacement", 999), ("nvmlDeviceSetMigMode", 4)],
)
def test_what_was_there_is_put_back_when_a_step_fails(
    machine: Machine, typed: Typed, config: Callable[..., tuple[str, ...]], function: str, code: int
) -> None:
    state = machine("g7e.24xlarge")
    words = config(on([0, 1], **{"2g.48gb": 2}), on([2], **{"1g.24gb": 4}))
    assert typed("mig", "apply", *words, "--yes")[0] == 0
    before = cuts()
    state.change(lambda rows: rows.update({f"gpus.3.fail.{function}": str(code)}))
    words = config(on([0], **{"1g.24gb": 4}), {**OFF, "devices": [1]}, on([3], **{"4g.96gb": 1}))
    done, said = typed("mig", "apply", *words, "--yes")
    assert done == 1, said
    assert "the old layout is restored" in said
    assert cuts() == before
    assert Leases().current() == []


def test_what_can_not_be_put_back_is_told(
    machine: Machine, typed: Typed, config: Callable[..., tuple[str, ...]]
) -> None:
    state = machine("p5.4xlarge")
    assert typed("mig", "apply", *config(on([0], **{"3g.40gb": 2})), "--yes")[0] == 0
    fails = {"gpus.0.fail.nvmlDeviceCreateGpuInstanceWithPlacement": "999"}
    state.change(lambda rows: rows.update(fails))
    code, said = typed("mig", "apply", *config(on([0], **{"1g.10gb": 7})), "--yes")
    assert code == PartialError.exit_code
    assert "could not be restored" in said


def test_what_the_board_can_not_be_is_refused_and_nothing_stays_changed(
    machine: Machine, typed: Typed, config: Callable[..., tuple[str, ...]]
) -> None:
    machine("p4d.24xlarge")
    code, said = typed("mig", "apply", *config(on("all", **{"1g.10gb": 5})), "--yes")
    assert code == 3, said
    assert "no space for 5 x 1g.10gb" in said
    assert cuts() == [MigLayout(False, {})] * 8
    machine("g5.12xlarge")
    code, said = typed("mig", "apply", *config(on("all", **{"1g.10gb": 1})), "--yes")
    assert code == 3
    assert "do not support MIG" in said


def test_a_client_that_holds_the_driver_is_named_by_the_error(machine: Machine) -> None:
    state = machine("p5.4xlarge")
    uuid = snapshot().devices[0].uuid or ""
    state.change(lambda rows: rows.update({"gpus.0.fail.nvmlDeviceSetMigMode": str(mig_change.IN_USE)}))
    with pytest.raises(BusyError, match="is restored"):
        mig_change.apply({uuid: MigLayout(True, {})}, {uuid: MigLayout(False, {})})


def test_a_driver_that_ends_the_child_is_a_failed_step(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("p5.4xlarge")
    uuid = snapshot().devices[0].uuid or ""
    monkeypatch.setattr(mig_change, "create", lambda *_: os._exit(9))
    with pytest.raises(CheckFailedError, match="is restored"):
        mig_change.apply({uuid: MigLayout(True, {"1g.10gb": 1})}, {uuid: MigLayout(False, {})})
    assert cuts()[0] == MigLayout(False, {})


@pytest.mark.parametrize(("rc", "code", "said"), [(0, 0, "is updated"), (3, 1, "is not updated")])
def test_containers_are_told_of_the_new_devices(
    machine: Machine,
    typed: Typed,
    config: Callable[..., tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rc: int,
    code: int,
    said: str,
) -> None:
    machine("p5.4xlarge")
    tool = tmp_path / "nvidia-ctk"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit {rc}\n')
    tool.chmod(0o755)
    monkeypatch.setattr(base, "PATH", f"{tmp_path}:{base.PATH}")
    done, text = typed("mig", "apply", *config(on([0], **{"1g.10gb": 7})), "--yes")
    assert done == code, text
    assert said in text
    assert (tmp_path / "asked").read_text() == "cdi generate --output=/var/run/cdi/nvidia.yaml\n"


def test_what_can_not_be_read_is_not_cut(machine: Machine, typed: Typed) -> None:
    machine("p5.48xlarge", scenario="lost")
    code, said = typed("mig", "export")
    assert code == 5
    assert "1 of 8 GPUs can't be read" in said
    code, said = typed("reset", "7")
    assert code == 6
    assert "a reset does not reach it" in said


def test_without_a_driver_nothing_is_reset_or_cut(machine: Machine, typed: Typed) -> None:
    machine("p5.48xlarge", scenario="no-driver")
    assert typed("reset", "all")[0] == 4
    assert typed("mig", "export")[0] == 4


def test_gpukiln_gpu_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpukiln.gpus", "mig", "apply"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--config" in done.stderr
