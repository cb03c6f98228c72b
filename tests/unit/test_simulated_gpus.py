"""The double of NVML lives: processes, MIG, events, energy, settings and a reset, while handles are held."""

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpukiln.clouds.embedded.gpus import library, settings
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import PAGE, REGION, SLOT, State, append_region
from gpukiln.errors import UnavailableError, UsageError
from tests.support import nvml_double

Machine = Callable[[str], State]
ONE_G, THREE_G = 19, 9  # ids of 1g.5gb and 3g.20gb on an A100 (NVIDIA, MIG User Guide)


@pytest.fixture
def machine(loaded_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The simulated GPUs of an instance type, with NVML started."""
    del loaded_nvml
    path = tmp_path / "state"
    monkeypatch.setenv(library.STATE, str(path))
    started = False

    def make(instance_type: str) -> State:
        nonlocal started
        append_region(path)
        state = State(path)
        state.write(initial_rows(make_profile(instance_type, seed="i-1", driver="580.65.06", cuda="13.0")))
        pynvml.nvmlInit()
        started = True
        return state

    yield make
    if started:
        pynvml.nvmlShutdown()


def use(
    state: Path | State, gpu: str, pid: int, memory: int, percent: int = 0
) -> subprocess.CompletedProcess[str]:
    """Give a process a part of a GPU, as `invoke cloud.gpus --load` does."""
    path = state.path if isinstance(state, State) else state
    built = path.parent.parent / "built"
    program, double = library.build_load(built), library.build(built, branch=580)
    words = [str(program), gpu, str(pid), str(memory), str(percent)]
    env = library.environment(double, path)
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def sleeping() -> Iterator[int]:
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


ASK = """
import pynvml
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    print(pynvml.nvmlDeviceGetIndex(gpu), pynvml.nvmlDeviceGetMinorNumber(gpu), pynvml.nvmlDeviceGetUUID(gpu))
"""


@pytest.mark.parametrize(
    ("nodes", "minors"),
    [(("nvidiactl", "nvidia1", "nvidia3"), [1, 3]), (("nvidiactl",), []), ((), [0, 1, 2, 3])],
    ids=["two of four", "none", "a machine without nodes"],
)
def test_a_container_has_the_gpus_whose_nodes_it_was_given(tmp_path, loaded_nvml, nodes, minors):
    """As the driver's: the others can't be opened, and indices are counted anew."""
    own = tmp_path / "libnvidia-ml.so.1"
    shutil.copy(loaded_nvml, own)
    profile = make_profile("g5.12xlarge", seed="i-1", driver="580.65.06", cuda="13.0")
    State(own).write(initial_rows(profile))
    (tmp_path / "dev").mkdir()
    for name in ("null", *nodes):
        (tmp_path / "dev" / name).write_text("")
    script = f"mount --bind {tmp_path / 'dev'} /dev && exec {sys.executable} -c '{ASK}'"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [(int(index), int(minor)) for index, minor, _ in rows] == list(enumerate(minors))
    assert [uuid for *_, uuid in rows] == [profile["gpus"][minor]["uuid"] for minor in minors]


def test_a_process_has_its_part_until_it_ends(machine: Machine) -> None:
    state = machine("g5.12xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(2)
    before = pynvml.nvmlDeviceGetMemoryInfo(gpu).used
    idle = pynvml.nvmlDeviceGetPowerUsage(gpu)
    with sleeping() as pid:
        done = use(state, "2", pid, 900, 40)
        assert done.returncode == 0, done.stderr
        [running] = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        assert (running.pid, running.usedGpuMemory) == (pid, 900 << 20)
        assert pynvml.nvmlSystemGetProcessName(pid) == "sleep"
        assert pynvml.nvmlDeviceGetMemoryInfo(gpu).used == before + (900 << 20)
        assert pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu == 40
        assert pynvml.nvmlDeviceGetPowerUsage(gpu) > idle
        [sample] = pynvml.nvmlDeviceGetProcessUtilization(gpu, 0)
        assert (sample.pid, sample.smUtil) == (pid, 40)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu).used == before
    assert pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu == 0


def test_a_number_that_is_given_again_is_another_process(machine: Machine) -> None:
    state = machine("g5.xlarge")
    assert use(state, "0", os.getpid(), 100).returncode == 0
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)) == 1
    state.change(lambda rows: rows.update({"gpus.0.processes.0.start": "1"}))
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []


def test_in_another_namespace_processes_have_numbers_and_no_names(machine: Machine) -> None:
    state = machine("g5.xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = pynvml.nvmlDeviceGetMemoryInfo(gpu).used
    assert use(state, "0", os.getpid(), 100).returncode == 0
    state.change(lambda rows: rows.update(pid_namespace="pid:[1]"))
    [running] = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    assert running.pid == os.getpid()
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlSystemGetProcessName(running.pid)
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu).used == before + (100 << 20)


@pytest.mark.parametrize(
    ("gpu", "memory", "percent", "told"),
    [
        ("9", 1, 0, "Invalid Argument"),
        ("0", 10**6, 0, "Insufficient Memory"),
        ("0", 1, 101, "Invalid Argument"),
        ("GPU-none", 1, 0, "Not Found"),
    ],
)
def test_a_part_that_can_not_be_given(
    machine: Machine, gpu: str, memory: int, percent: int, told: str
) -> None:
    state = machine("g5.xlarge")
    done = use(state, gpu, os.getpid(), memory, percent)
    assert done.returncode == 1
    assert told in done.stderr


def make_instance(gpu: Any, profile: int, compute: int) -> Any:
    """A GPU instance with one compute instance in all of it."""
    made = pynvml.nvmlDeviceCreateGpuInstance(gpu, profile)
    pynvml.nvmlGpuInstanceCreateComputeInstance(made, compute)
    return made


def instances(gpu: Any, profile: int) -> list[Any]:
    room = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    found, count = (pynvml.c_nvmlGpuInstance_t * room)(), ctypes.c_uint(room)
    pynvml.nvmlDeviceGetGpuInstances(gpu, profile, found, ctypes.byref(count))
    return list(found[: count.value])


def test_mig_is_switched_and_cut_by_nvml(machine: Machine) -> None:
    machine("p4d.24xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(3)
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == 16  # RESET_REQUIRED: Ampere, passed through
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
    reset(gpu)
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetUtilizationRates(gpu)
    half = make_instance(gpu, THREE_G, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE)
    for _ in range(3):
        make_instance(gpu, ONE_G, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE)
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ONE_G) == 1
    numbers = [info.id for info in map(pynvml.nvmlGpuInstanceGetInfo, instances(gpu, ONE_G))]
    assert (sorted(numbers), pynvml.nvmlGpuInstanceGetInfo(half).id) == ([7, 8, 9], 2)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, THREE_G)
    devices = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, n) for n in range(4)]
    names = sorted(pynvml.nvmlDeviceGetName(device).split(" MIG ")[1] for device in devices)
    assert names == ["1g.5gb"] * 3 + ["3g.20gb"]
    uuids = [pynvml.nvmlDeviceGetUUID(device) for device in devices]
    assert len(set(uuids)) == 4
    assert all(uuid.startswith("MIG-") for uuid in uuids)
    again = pynvml.nvmlDeviceGetHandleByUUID(uuids[1])
    assert pynvml.nvmlDeviceGetUUID(again) == uuids[1]
    assert pynvml.nvmlDeviceGetUUID(
        pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(again)
    ) == pynvml.nvmlDeviceGetUUID(gpu)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetTemperature(again, 0)  # what only a whole GPU tells
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlGpuInstanceDestroy(half)
    part = pynvml.nvmlGpuInstanceGetComputeInstanceById(half, 0)
    pynvml.nvmlComputeInstanceDestroy(part)
    pynvml.nvmlGpuInstanceDestroy(half)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlGpuInstanceGetInfo(half)
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, THREE_G) == 1


def test_hopper_switches_mig_at_once_unless_somebody_works(machine: Machine) -> None:
    state = machine("p5.48xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    with sleeping() as pid:
        assert use(state, "0", pid, 10).returncode == 0
        assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == 19  # IN_USE
        assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == 0
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


@pytest.mark.parametrize(
    "call", ["SetMigMode", "GetGpuInstanceRemainingCapacity", "GetMigDeviceHandleByIndex"]
)
def test_a_gpu_that_can_not_be_cut_says_so(machine: Machine, call: str) -> None:
    machine("g4dn.xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    with pytest.raises(pynvml.NVMLError_NotSupported):
        getattr(pynvml, f"nvmlDevice{call}")(gpu, 0)


def reset(gpu: Any) -> int:
    """What the stand-in nvidia-smi calls for --gpu-reset."""
    return int(ctypes.CDLL("libnvidia-ml.so.1").gpukilnReset(gpu))


def test_a_reset_does_what_waited_for_it(machine: Machine) -> None:
    state = machine("p5.48xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def breaks(rows: dict[str, str]) -> None:
        for text in ("0.ecc_uncorrected=3", "0.remap_pending=true", "0.recovery_action=1"):
            settings.apply_setting(rows, text)

    state.change(breaks)
    with sleeping() as pid:
        assert use(state, "0", pid, 10).returncode == 0
        assert reset(gpu) == 19
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 0) == 3
    assert pynvml.nvmlDeviceGetRemappedRows(gpu)[2] == 1
    pynvml.nvmlDeviceSetEccMode(gpu, 0)
    assert pynvml.nvmlDeviceGetEccMode(gpu) == [1, 0]
    assert reset(gpu) == 0
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 0) == 0
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 1) >= 3, "the board remembers"
    assert pynvml.nvmlDeviceGetRemappedRows(gpu)[2] == 0
    assert pynvml.nvmlDeviceGetEccMode(gpu) == [0, 0]


def test_events_reach_who_waits_and_who_registered(machine: Machine) -> None:
    state = machine("g5.12xlarge")
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(2)]
    waiting = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(gpus[1], pynvml.nvmlEventTypeXidCriticalError, waiting)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(waiting, 1)
    later = threading.Timer(0.1, lambda: state.change(lambda rows: settings.apply_setting(rows, "*.xid=79")))
    later.start()
    event = pynvml.nvmlEventSetWait_v2(waiting, 60_000)
    later.join()
    assert pynvml.nvmlDeviceGetIndex(event.device) == 1
    assert (event.eventType, event.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 79)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(waiting, 1)
    pynvml.nvmlEventSetFree(waiting)


def test_energy_advances_and_never_falls(machine: Machine) -> None:
    state = machine("g4dn.xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    last = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    for watts in (70, 5, 60, 0, 9):
        state.change(lambda rows, watts=watts: settings.apply_setting(rows, f"0.power={watts}"))  # type: ignore[misc]
        time.sleep(0.02)
        now = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        assert now >= last
        last = now
    assert last > 0


def test_settings_of_the_driver_hold_for_everybody(machine: Machine) -> None:
    state = machine("g4dn.xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)
    pynvml.nvmlDeviceSetPowerManagementLimit(gpu, least)
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) == least
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceSetPowerManagementLimit(gpu, most + 1000)
    pynvml.nvmlDeviceSetPersistenceMode(gpu, 1)
    pynvml.nvmlDeviceSetComputeMode(gpu, 3)
    rows = state.rows()
    assert (rows["gpus.0.persistence"], rows["gpus.0.compute_mode"]) == ("1", "3")


def test_who_is_not_root_or_may_not_write_changes_nothing(machine: Machine, loaded_nvml: Path) -> None:
    state = machine("g4dn.xlarge")
    before = state.rows()
    code = (
        "import os, pynvml; os.setgid(65534), os.setuid(65534); pynvml.nvmlInit();"
        "pynvml.nvmlDeviceSetPersistenceMode(pynvml.nvmlDeviceGetHandleByIndex(0), 0)"
    )
    # what nobody can read is loaded before
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(loaded_nvml)!r}); {code}"]
    for folder in [state.path, *state.path.parents]:
        with contextlib.suppress(OSError):
            folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run(
        command, env=library.environment(loaded_nvml, state.path), capture_output=True, text=True, check=False
    )
    assert "NVMLError_NoPermission" in done.stderr
    assert state.rows() == before


@pytest.mark.parametrize("name", sorted(settings.SCENARIOS))
def test_every_scenario_is_seen_by_who_holds_a_handle(machine: Machine, name: str) -> None:
    state = machine("p4d.24xlarge")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(7)
    waiting = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, waiting)
    state.change(lambda rows: settings.play_scenario(rows, name))

    def xid() -> int:
        return int(pynvml.nvmlEventSetWait_v2(waiting, 1000).eventData)

    def fails(*call: Any) -> int:
        with pytest.raises(pynvml.NVMLError) as failed:
            call[0](*call[1:])
        return int(failed.value.value)

    if name == "lost":
        assert fails(pynvml.nvmlDeviceGetTemperature, gpu, 0) == 15
        assert xid() == 79
    elif name == "fallen-off-bus":
        assert fails(pynvml.nvmlDeviceGetHandleByIndex, 7) == 999
        assert xid() == 79
    elif name == "hot":
        assert pynvml.nvmlDeviceGetTemperature(gpu, 0) > pynvml.nvmlDeviceGetTemperatureThreshold(gpu, 1)
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & 0x68 == 0x68
    elif name == "ecc":
        assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 0) == 2
        assert xid() == 48
    elif name == "remap-pending":
        assert pynvml.nvmlDeviceGetRemappedRows(gpu)[2] == 1
        assert xid() == 63
    elif name in ("mismatch", "no-driver"):
        assert pynvml.nvmlDeviceGetName(gpu), "who has started it goes on"
        assert fails(pynvml.nvmlInit) == {"mismatch": 18, "no-driver": 9}[name]
    elif name == "slow-start":
        assert pynvml.nvmlDeviceGetName(gpu), "who has started it goes on"
        assert state.rows()["start_ms"] == "15000"
    elif name == "mig-mixed":
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert [pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) for handle in (first, gpu)] == [7, 0]
        parts = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(first, n) for n in range(7)]
        assert len({pynvml.nvmlDeviceGetUUID(part) for part in parts}) == 7
    else:
        assert name == "hung"
        asked = threading.Thread(target=pynvml.nvmlDeviceGetTemperature, args=(gpu, 0))
        asked.start()
        asked.join(0.3)
        assert asked.is_alive()
        state.change(lambda rows: settings.apply_setting(rows, "7.hung=false"))
        asked.join(30)
        assert not asked.is_alive()
    pynvml.nvmlEventSetFree(waiting)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1.temprature=91", "temperature"),
        ("9.temperature=91", "the machine has 4"),
        ("temperature=91", "not GPU.NAME=VALUE"),
        ("1.temperature", "not GPU.NAME=VALUE"),
        ("1.temperature=hot", "wanted degrees Celsius"),
        ("1.utilization=101", "wanted percent"),
        ("1.lost=perhaps", "wanted whether"),
        ("1.nvlink_down=0", "has no NVLink 0"),
        ("1.pages_pending=true", "does not have retired_pages_pending"),
    ],
)
def test_a_setting_that_is_none_changes_nothing(machine: Machine, text: str, told: str) -> None:
    state = machine("g5.12xlarge")
    before = state.rows()
    with pytest.raises(UsageError) as refused:
        state.change(lambda rows: settings.apply_setting(rows, text))
    assert told in f"{refused.value} {refused.value.details} {refused.value.hint}"
    assert state.rows() == before


def test_mig_can_not_be_played_where_nothing_can_be_cut(machine: Machine) -> None:
    state = machine("g5.12xlarge")
    with pytest.raises(UsageError, match="has MIG"):
        state.change(lambda rows: settings.play_scenario(rows, "mig-mixed"))


def test_a_scenario_of_a_file_is_its_settings(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("set: [1.temperature=91, 0.lost=true]\n")
    bad.write_text("- 1\n")
    assert settings.read_scenario(good) == ["1.temperature=91", "0.lost=true"]
    for path in (bad, tmp_path / "none.yaml"):
        with pytest.raises(UsageError, match=r"(bad|none)\.yaml"):
            settings.read_scenario(path)


def test_a_state_is_whole_or_not_while_many_write_and_read(machine: Machine) -> None:
    """Every write sets both keys to the same; no reader may see them differ. A writer is killed meanwhile."""
    state = machine("g5.xlarge")
    state.change(lambda rows: rows.update({f"pad.{n}": "x" * 100 for n in range(2000)}))
    writer = (
        "import sys; from pathlib import Path; from gpukiln.clouds.embedded.gpus.state import State\n"
        "state, n = State(Path(sys.argv[1])), 0\n"
        "while True:\n"
        "    n += 1\n"
        "    same = {'gpus.0.temperature.gpu': str(n % 90), 'same': str(n % 90)}\n"
        "    state.change(lambda rows: rows.update(same))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", writer, str(state.path)], env=env) as process:
            deadline = time.monotonic() + 60
            while "same" not in state.rows() and time.monotonic() < deadline:
                time.sleep(0.01)
            for _ in range(200):
                rows = state.rows()
                assert rows["same"] == rows["gpus.0.temperature.gpu"]
                assert 0 <= pynvml.nvmlDeviceGetTemperature(pynvml.nvmlDeviceGetHandleByIndex(0), 0) < 90
            process.kill()
        rows = state.rows()
        assert rows["same"] == rows["gpus.0.temperature.gpu"]
        assert rows["pad.1999"]


def test_more_than_fits_is_refused_and_nothing_lost(tmp_path: Path) -> None:
    path = tmp_path / "state"
    append_region(path)
    state = State(path)
    state.write({"a": "1"})
    with pytest.raises(UnavailableError, match="and the limit is"):
        state.write({"b": "x" * SLOT})
    assert state.rows() == {"a": "1"}
    assert path.stat().st_size == REGION


def test_what_is_no_double_has_no_state(tmp_path: Path) -> None:
    path = tmp_path / "libnvidia-ml.so.1"
    path.write_bytes(b"\x7fELF" + bytes(2 * REGION))
    with pytest.raises(UnavailableError, match="no state of simulated GPUs"):
        State(path).rows()
    with pytest.raises(UnavailableError, match="No such file") as error:
        State(tmp_path / "gone").rows()
    assert "--off, then --on" in error.value.hint


def test_a_damaged_state_is_told_and_no_driver_is_there(machine: Machine, loaded_nvml: Path) -> None:
    state = machine("g5.xlarge")
    with state.path.open("r+b") as file:
        file.seek(PAGE + SLOT)  # the second slot, which the first change was written to
        file.write(b"\xff" * 100)
    with pytest.raises(UnavailableError, match="can't be read"):
        state.rows()
    with state.path.open("r+b") as file:
        file.truncate(PAGE)
    command = [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"]
    env = library.environment(loaded_nvml, state.path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "NVMLError_DriverNotLoaded" in done.stderr


def snapshot(handles: list[Any]) -> list[dict[str, Any]]:
    """What programs ask most of each GPU."""
    return [
        {
            "name": pynvml.nvmlDeviceGetName(gpu),
            "uuid": pynvml.nvmlDeviceGetUUID(gpu),
            "memory": pynvml.nvmlDeviceGetMemoryInfo(gpu).total,
            "free": pynvml.nvmlDeviceGetMemoryInfo(gpu).free,
            "used": pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "bus": pynvml.nvmlDeviceGetPciInfo(gpu).busId,
        }
        for gpu in handles
    ]


@pytest.mark.parametrize("seed", range(12))
def test_a_machine_drawn_by_chance_adds_up(machine: Machine, seed: int) -> None:
    """Totals fit, counters never fall, errors stay what they are, whatever is set."""
    draw = random.Random(seed)  # noqa: S311 - machines, no secrets
    state = machine(draw.choice(["g4dn.metal", "g5.48xlarge", "p4d.24xlarge", "p5.48xlarge", "g6f.xlarge"]))
    count = pynvml.nvmlDeviceGetCount()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(count)]
    energy = [0] * count
    lost = draw.randrange(count)
    for turn in range(20):
        gpu = draw.randrange(count)
        texts = [
            f"{gpu}.temperature={draw.randrange(20, 110)}",
            f"{gpu}.power={draw.randrange(0, 700)}",
            f"{gpu}.utilization={draw.randrange(0, 101)}",
            f"{gpu}.memory_used={draw.randrange(0, 1 << 21)}",
            f"{gpu}.xid={draw.randrange(1, 150)}",
        ]
        with contextlib.suppress(UsageError):  # what a vGPU does not tell
            state.change(lambda rows, texts=texts: settings.apply_setting(rows, draw.choice(texts)))  # type: ignore[misc]
        for index, handle in enumerate(handles):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            assert memory.total == memory.used + memory.free + memory.reserved
            with contextlib.suppress(pynvml.NVMLError_NotSupported):
                assert 0 <= pynvml.nvmlDeviceGetUtilizationRates(handle).gpu <= 100
            with contextlib.suppress(pynvml.NVMLError_NotSupported):
                now = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                assert now >= energy[index]
                energy[index] = now
        if turn == 10:
            state.change(lambda rows: settings.apply_setting(rows, f"{lost}.lost=true"))
            for _ in range(3):
                with pytest.raises(pynvml.NVMLError_GpuIsLost):
                    pynvml.nvmlDeviceGetName(handles[lost])
            state.change(lambda rows: settings.apply_setting(rows, f"{lost}.lost=false"))
    assert len({row["uuid"] for row in snapshot(handles)}) == count


def test_many_threads_may_ask_while_it_changes(machine: Machine) -> None:
    state = machine("p5.48xlarge")
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(8)]
    wanted, wrong = snapshot(handles), []

    def ask() -> None:
        for _ in range(10):
            if snapshot(handles) != wanted:
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=ask) for _ in range(32)]
    for thread in threads:
        thread.start()
    for degrees in range(30, 60):
        state.change(lambda rows, degrees=degrees: settings.apply_setting(rows, f"*.temperature={degrees}"))  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert wrong == []


def test_functions_of_later_drivers_are_not_there(tmp_path: Path) -> None:
    def exported(branch: int) -> set[str]:
        path = nvml_double.build(tmp_path, branch=branch)
        done = subprocess.run(
            ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
        )
        return {line.split()[-1] for line in done.stdout.splitlines()}

    old, new = exported(535), exported(580)
    assert old < new
    assert "nvmlDeviceGetTemperatureV" in new - old
