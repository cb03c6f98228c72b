"""NVML as it may answer: any type, any error, or never. A call costs its own values, and nothing else."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.clouds.embedded.gpus.state import State
from gpukiln.gpus import collect
from gpukiln.gpus.model import Device, plain
from gpukiln.probe import nvml
from gpukiln.probe.nvml import CurrentCall, Nvml, address, ask_nvml, read_gpus

Machine = Callable[..., State]
# Without these nothing is known of a GPU, or of any; what stands for a lost GPU is another test.
VITAL = ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
NOT_SUPPORTED, UNKNOWN, GPU_IS_LOST = 3, 999, 15
# What a fault of a field changes beside it: the GPU's health is judged by its fields.
JUDGED = {"health", "findings", "unavailable", "allocatable", "not_allocatable_because"}


class Odd:
    """Nothing that anybody expects."""


ODD: dict[str, Any] = {
    "damaged bytes": b"\xff\xfe",
    "a large number": 1 << 80,
    "a negative number": -1,
    "not a number": float("nan"),
    "none": None,
    "an empty list": [],
    "a list of texts": ["a", "b", "c", "d"],
    "an object": Odd(),
}


def ask_all() -> list[Device]:
    """The devices of this machine, asked in this process, through JSON as a child process tells them."""
    gpus: dict[int, dict[str, Any]] = {}

    def tell(**message: Any) -> None:
        message = json.loads(json.dumps(message))
        if "gpu" in message:
            gpus[message["index"]] = message["gpu"]

    import pynvml  # noqa: PLC0415 - loads the double that a fixture made

    read_gpus(tell, (), CurrentCall(), {}, shown=True)
    with contextlib.suppress(pynvml.NVMLError):  # a process of its own ends instead
        pynvml.nvmlShutdown()
    rows = [gpus[index] for index in sorted(gpus)]
    return [one for gpu in rows for one in collect._devices(gpu, rows, set())]


@pytest.fixture
def answering(machine: State, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], list[Device]]:
    """The devices, with one function of the bindings that raises or returns something else."""
    import pynvml  # noqa: PLC0415 - loads the double that `machine` made

    assert machine.rows()

    def look(name: str, answer: Any) -> list[Device]:
        def function(*_: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(pynvml, name, function)
            return ask_all()

    return look


@pytest.fixture
def machine(simulated: Machine) -> State:
    """Two A100, of which the second is divided by MIG in two."""
    state = simulated("p4d.24xlarge", "0.utilization=40", scenario="mig-mixed")
    whole = {"gpus.count": "2", "gpus.0.mig.current": "0", "gpus.0.mig.pending": "0"}
    state.change(lambda rows: rows.update(whole))
    return state


@pytest.fixture
def called(machine: State, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that the probe calls on such a machine."""
    import pynvml  # noqa: PLC0415 - as above

    assert machine.rows()
    names: dict[str, None] = {}
    real = Nvml.ask

    def noted(self: Nvml, name: str, *args: Any, **more: Any) -> Any:
        names[name] = None
        return real(self, name, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Nvml, "ask", noted)
        ask_all()
    assert all(hasattr(pynvml, name) for name in names)
    return [name for name in names if name not in VITAL]


def changed(before: list[Device], after: list[Device]) -> set[str]:
    """Names of fields that differ; fails where a device is gone or can't be read."""
    assert [(one.index, one.mig_index) for one in after if one.kind == "gpu"] == [
        (one.index, one.mig_index) for one in before if one.kind == "gpu"
    ]
    assert all(one.readable for one in after)
    kept = {(one.index, one.mig_index): one for one in after}
    found = {"mig devices"} if len(after) != len(before) else set()
    for one in before:
        other = kept.get((one.index, one.mig_index))
        if other is not None:
            pair = plain(one), plain(other)
            found |= {name for name in pair[0] if pair[0][name] != pair[1][name]}
    return found - JUDGED - {"energy_joules"}  # which grows meanwhile


def test_any_answer_of_any_call_costs_its_own_fields_and_no_gpu(
    answering: Callable[[str, Any], list[Device]], called: list[str]
) -> None:
    import pynvml  # noqa: PLC0415 - as above

    whole = ask_all()
    assert len(called) > 50
    errors = [pynvml.NVMLError(code) for code in (2, 4, 25)]
    raised = [ValueError("no"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), OSError(5, "no")]
    for name in called:
        # What plain answers change is what the function is asked for.
        usual = (pynvml.NVMLError(NOT_SUPPORTED), pynvml.NVMLError(UNKNOWN), 7, "text", [1, 2])
        own = set().union(*(changed(whole, answering(name, answer)) for answer in usual))
        for answer in (*errors, *raised, *ODD.values()):
            found = changed(whole, answering(name, answer))
            assert found <= own, (name, answer, found - own)


def test_a_value_of_another_type_is_null_with_its_reason(
    answering: Callable[[str, Any], list[Device]],
) -> None:
    [first, *_] = answering("nvmlDeviceGetMinorNumber", "seven")
    assert (first.minor, first.unavailable["minor"]) == (None, "UNEXPECTED")
    [first, *_] = answering("nvmlDeviceGetUtilizationRates", [1, 2])
    assert first.unavailable["utilization_percent"] == "UNEXPECTED"
    assert first.temperature_c is not None


def test_bytes_are_text(answering: Callable[[str, Any], list[Device]]) -> None:
    """As nvidia-ml-py returns the GSP firmware's version, which every real machine since Turing has."""
    [first, *_] = answering("nvmlDeviceGetGspFirmwareVersion", b"580.65.06")
    assert (first.gsp_firmware, first.readable) == ("580.65.06", True)


def test_a_function_that_the_bindings_lack_is_not_supported(
    simulated: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml  # noqa: PLC0415 - as above

    simulated("g4dn.xlarge")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMarginTemperature")
    assert ask_all()[0].unavailable["temperature_margin_c"] == "NOT_SUPPORTED"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_joules"),
        ("nvmlDeviceGetSerial", "serial"),
    ],
)
def test_a_call_that_never_returns_costs_its_own_field(
    simulated: Machine, monkeypatch: pytest.MonkeyPatch, function: str, field: str
) -> None:
    monkeypatch.setattr("gpukiln.probe.nvml.STUCK_S", 0.2)
    state = simulated("g5.12xlarge")
    if field == "temperature_c":  # which the newer function tells as well
        state.change(lambda rows: rows.update({"error.nvmlDeviceGetTemperatureV": "3"}))
    state.change(lambda rows: rows.update({f"gpus.1.hangs.{function}": "1"}))
    found = collect.collect()
    assert (found.state, found.code) == ("ok", 0)
    assert (getattr(found.devices[1], field), found.devices[1].unavailable[field]) == (None, "HUNG")
    assert found.devices[1].power_watts is not None
    assert getattr(found.devices[0], field) is not None


@pytest.mark.usefixtures("impatient")
def test_a_call_that_kills_its_process_costs_its_own_field(
    simulated: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml  # noqa: PLC0415 - as above

    simulated("g5.12xlarge")
    real = pynvml.nvmlDeviceGetSerial
    second = ask_all()[1].serial

    def crash(handle: Any) -> Any:
        if real(handle) == second:
            import os  # noqa: PLC0415 - in the child process

            os.abort()
        return real(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetSerial", crash)
    found = collect.collect()
    assert found.code == 0
    assert [one.unavailable.get("serial") for one in found.devices] == [None, "FAILED", None, None]


# ---- lost, slow, starting, hung


def test_a_gpu_that_is_lost_is_lost_though_it_has_a_handle(
    simulated: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVML answers it for a GPU that fell off the bus meanwhile: some values are still there."""
    import pynvml  # noqa: PLC0415 - as above

    simulated("g5.12xlarge")
    last = ask_all()[3]
    real = pynvml.nvmlDeviceGetUtilizationRates
    uuid_of = pynvml.nvmlDeviceGetUUID

    def rates(handle: Any) -> Any:
        if uuid_of(handle) == last.uuid:
            raise pynvml.NVMLError(GPU_IS_LOST)
        return real(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", rates)
    found = collect.collect()
    assert (found.code, found.devices[3].health) == (5, "lost")
    assert [one.health for one in found.devices[:3]] == ["ok"] * 3


def test_a_gpu_that_wants_a_reset_is_lost_in_a_snapshot_as_in_a_watch(
    answering: Callable[[str, Any], list[Device]],
) -> None:
    """nvml.h, NVML_ERROR_RESET_REQUIRED: it can't be used before. A snapshot had it as usable."""
    import pynvml  # noqa: PLC0415 - as above

    [first, *_] = answering("nvmlDeviceGetUtilizationRates", pynvml.NVMLError(16))
    assert (first.readable, first.unavailable["name"]) == (False, "RESET_REQUIRED")


def test_a_driver_that_takes_long_to_start_is_waited_for(
    simulated: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight A100 without persistence mode take more than 25 s (Azure/AgentBaker#2829)."""
    monkeypatch.setattr("gpukiln.probe.nvml.STUCK_S", 0.3)
    monkeypatch.setattr("gpukiln.gpus.collect.SLOW_S", 1)
    simulated("g4dn.xlarge").change(lambda rows: rows.update(start_ms="2500"))
    found = collect.collect()
    assert (found.state, found.code, found.devices[0].health) == ("ok", 0, "ok")
    said = capsys.readouterr().err
    assert "waiting for the driver since 1 s: NVML's start" in said


def test_a_driver_that_still_starts_at_the_limit_is_starting_and_nobody_reboots_for_it(
    simulated: Machine, monkeypatch: pytest.MonkeyPatch, typed_gpu: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr("gpukiln.probe.nvml.START_S", 0.5)
    monkeypatch.setattr("gpukiln.probe.child.LOOK_S", 0.1)
    simulated("g4dn.xlarge").change(lambda rows: rows.update(start_ms="30000"))
    code, out, _ = typed_gpu("list")
    assert code == 75
    assert "starting: NVML is still starting" in out
    assert "reboot" not in out
    code, out, _ = typed_gpu("health")
    assert (code, "unknown" in out) == (5, True)
    code, _, err = typed_gpu("lease")
    assert (code, "NVML is still starting" in err) == (75, True)


@pytest.mark.usefixtures("impatient")
def test_who_waits_in_the_kernel_without_progress_is_hung_and_no_limit_alone_advises_a_reboot(
    simulated: Machine, typed_gpu: Callable[..., tuple[int, str, str]]
) -> None:
    simulated("g5.12xlarge", "2.hung=true")
    code, out, _ = typed_gpu("list")
    assert (code, "HUNG" in out) == (5, True)
    assert "state D (waits in the kernel)" in out
    assert "reboot" not in out


@pytest.mark.usefixtures("impatient")
def test_a_gpu_that_is_slow_but_at_work_is_not_sick(
    simulated: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml  # noqa: PLC0415 - as above

    simulated("g5.12xlarge")
    monkeypatch.setattr(nvml, "GPU_S", 0.5)

    def slow(_: Any) -> Any:
        while True:  # it computes, or sleeps from step to step
            time.sleep(0.01)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", slow)
    found = ask_nvml(shown=True)
    assert {gpu["error"]["name"] for gpu in found.gpus} == {"SLOW"}
    said = collect.collect()
    assert {one.health for one in said.devices} == {"unknown"}
    assert all(one.findings[0].id == "slow" for one in said.devices)


def test_a_library_that_can_not_be_loaded_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = {
        "_error": "NVML Shared Library Not Found",
        "code": 12,
        "library": "libnvidia-ml.so.1: file too short",
    }
    monkeypatch.setattr(collect, "bus_gpus", lambda: [{"address": "0000:00:1e.0"}])
    monkeypatch.setattr(collect, "in_container", lambda: False)
    monkeypatch.setattr(collect, "is_simulated", lambda: False)
    monkeypatch.setattr(collect, "ask_nvml", lambda **_: nvml.NvmlAnswer({"error": error}))
    found = collect.collect()
    assert (found.state, "file too short" in found.message, "reinstall" in found.fix) == (
        "no-library",
        True,
        True,
    )


def test_what_the_loader_says_of_a_damaged_library_is_kept(tmp_path: Path) -> None:
    import subprocess  # noqa: PLC0415 - one test

    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"\x7fELF")
    code = "import json; from gpukiln.probe.nvml import read_nvml; print(json.dumps(read_nvml()['error']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    error = json.loads(done.stdout)
    assert (error["code"], "file too short" in error["library"]) == (12, True)


# ---- the bus, the nodes of memory


DGX_A100 = {  # NVIDIA/nccl#1505: two EPYC 7742, four nodes a socket; `GPU NUMA ID` is N/A there
    "0000:07:00.0": ("48-63,176-191", 3),
    "0000:0f:00.0": ("48-63,176-191", 3),
    "0000:47:00.0": ("16-31,144-159", 1),
    "0000:4e:00.0": ("16-31,144-159", 1),
    "0000:87:00.0": ("112-127,240-255", 7),
    "0000:90:00.0": ("112-127,240-255", 7),
    "0000:b7:00.0": ("80-95,208-223", 5),
    "0000:bd:00.0": ("80-95,208-223", 5),
}


def bus(folder: Path, gpus: dict[str, tuple[str, int]]) -> None:
    """PCI devices as sysfs has them."""
    for place, (cpus, node) in gpus.items():
        (folder / place).mkdir()
        for name, text in (("local_cpulist", cpus), ("numa_node", str(node)), ("vendor", "0x10de")):
            (folder / place / name).write_text(f"{text}\n")
        (folder / place / "class").write_text("0x030200\n")


def test_the_node_of_memory_is_the_pci_device_s(
    simulated: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pci"
    folder.mkdir()
    bus(folder, DGX_A100)
    monkeypatch.setattr(collect, "PCI", str(folder))
    state = simulated("p4d.24xlarge")
    state.change(
        lambda rows: rows.update(
            {f"gpus.{n}.bus_id": f"0000{place.upper()}" for n, place in enumerate(DGX_A100)}
        )
    )
    found = ask_all()
    assert [(one.cpus, one.numa_node) for one in found] == list(DGX_A100.values())


@pytest.mark.parametrize(
    ("online", "words", "node"),
    [("0", [0, 0, 0, 0], 0), ("0-1", [2, 0, 0, 0], 1), ("0-1", [3, 0, 0, 0], None), ("0-1", None, None)],
)
def test_where_firmware_says_nothing_the_memory_s_affinity_does(
    simulated: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    online: str,
    words: Any,
    node: int | None,
) -> None:
    import pynvml  # noqa: PLC0415 - as above

    simulated("g4dn.xlarge")
    folder = tmp_path / "pci"
    folder.mkdir()
    bus(folder, {"0000:00:1e.0": ("0-3", -1)})
    (tmp_path / "online").write_text(f"{online}\n")
    monkeypatch.setattr(collect, "PCI", str(folder))
    monkeypatch.setattr(collect, "NUMA_NODES", str(tmp_path / "online"))

    def affinity(*_: Any) -> Any:
        if words is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return words

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryAffinity", affinity)
    [one] = ask_all()
    assert one.numa_node == node
    assert (node is None) == ("numa_node" in one.unavailable)


def test_a_gpu_of_the_bus_that_nvml_does_not_list_is_a_row(
    simulated: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated("g5.12xlarge")
    listed = [one.bus_id or "" for one in ask_all()]
    gpus = [
        {"address": place, "device": "0x2237"}
        for place in [*listed[:2], "0000:b3:00.0", "0000:b4:00.0", *listed[2:]]
    ]
    (tmp_path / "0000:b4:00.0").mkdir()
    (tmp_path / "vfio-pci").mkdir()
    (tmp_path / "0000:b4:00.0/driver").symlink_to(tmp_path / "vfio-pci")  # given to a virtual machine
    monkeypatch.setattr("gpukiln.probe.gpus.PCI", str(tmp_path))
    monkeypatch.setattr(collect, "bus_gpus", lambda: gpus)
    monkeypatch.setattr(collect, "in_container", lambda: False)
    found = collect.collect()
    assert (found.code, len(found.devices)) == (5, 5)
    last = found.devices[4]
    assert (last.bus_id, last.health) == ("0000:b3:00.0", "lost")
    assert "NVML does not list the GPU at 0000:b3:00.0" in (last.error or "")
    assert {one.health for one in found.devices[:4]} == {"ok"}


def test_what_is_no_bus_id_stays_as_it_is() -> None:
    assert address("00000000:3B:00.0") == "0000:3b:00.0"
    assert address("nonsense") == "nonsense"
