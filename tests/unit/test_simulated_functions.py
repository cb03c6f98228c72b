"""Functions of NVML beyond those that the probe reads, as C programs and newer tools call them."""

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.profile import make_machine, make_profile
from gpukiln.clouds.embedded.gpus.settings import play_scenario
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region

Machine = Callable[..., State]
OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, TOO_SMALL = 0, 1, 2, 3, 4, 6, 7
VERSION_MISMATCH = 25


@pytest.fixture
def machine(loaded_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The simulated GPUs of an instance type or of a board (key, count), with NVML started."""
    del loaded_nvml
    path = tmp_path / "state"
    monkeypatch.setenv(library.STATE, str(path))
    started = False

    def make(name: str, count: int = 0) -> State:
        nonlocal started
        driver, cuda = "580.65.06", "13.0"
        if count:
            document = make_machine(name, count, seed="i-1", driver=driver, cuda=cuda)
        else:
            document = make_profile(name, seed="i-1", driver=driver, cuda=cuda)
        append_region(path)
        state = State(path)
        state.write(initial_rows(document))
        pynvml.nvmlInit()
        started = True
        return state

    yield make
    if started:
        pynvml.nvmlShutdown()


def call(name: str, *args: Any) -> int:
    """A function's own status, whatever pynvml makes of it."""
    status: int = pynvml._nvmlGetFunctionPointer(name)(*args)
    return status


def words(name: str, gpu: Any, size: int, version: int = 1) -> tuple[int, list[int]]:
    """A function that fills a structure of so many bytes, with its version in front."""
    buffer = (ctypes.c_uint * (size // 4))()
    buffer[0] = size | version << 24 if version else 0
    return call(name, gpu, buffer), list(buffer)


def first() -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def absent(kind: str, built: Path) -> list[str]:
    """Functions of which nothing is simulated, by what they check: DEVICE, ROOT_DEVICE, SYSTEM, ..."""
    source = Path(library.__file__).with_name("nvml") / "absent.c"
    names = re.findall(rf"^{kind}\((\w+)\)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    there = ctypes.CDLL(os.fspath(built))
    return [name for name in names if hasattr(there, name)]


def test_nothing_is_refused_before_what_the_real_library_checks(machine: Machine, loaded_nvml: Path) -> None:
    machine("g5.xlarge")
    gpu, nowhere = first(), ctypes.c_void_p(8)
    devices, roots = absent("DEVICE", loaded_nvml), absent("ROOT_DEVICE", loaded_nvml)
    systems = absent("SYSTEM", loaded_nvml) + absent("ROOT_SYSTEM", loaded_nvml)
    assert min(map(len, (devices, roots, systems))) > 10
    for name in devices + roots:
        assert call(name, nowhere) == call(name, None) == INVALID, name
    assert {call(name, gpu) for name in devices} == {NOT_SUPPORTED}
    assert {call(name, gpu) for name in roots} == {NO_PERMISSION if os.geteuid() else NOT_SUPPORTED}
    assert {call(name) for name in systems} <= {NO_PERMISSION, NOT_SUPPORTED}
    pynvml.nvmlShutdown()
    try:
        assert {call(name, gpu) for name in devices + roots + systems} == {UNINITIALIZED}
    finally:
        pynvml.nvmlInit()


def test_what_is_no_part_of_the_machines_has_no_valid_number(machine: Machine) -> None:
    machine("g5.xlarge")
    assert call("nvmlUnitGetHandleByIndex", 0, ctypes.byref(ctypes.c_void_p())) == INVALID
    assert call("nvmlVgpuTypeGetName", 11, None, None) == INVALID
    assert call("nvmlVgpuInstanceGetVmID", 7, None, 0, None) == NOT_FOUND
    assert call("nvmlVgpuInstanceGetVmID", 0, None, 0, None) == INVALID
    assert call("nvmlGetExcludedDeviceInfoByIndex", 0, None) == INVALID
    support = (ctypes.c_uint * 2)(1, 7)
    assert (call("nvmlGpmQueryDeviceSupport", first(), support), support[1]) == (OK, 0)
    support[0] = 9
    assert call("nvmlGpmQueryDeviceSupport", first(), support) == VERSION_MISMATCH


@pytest.mark.parametrize(
    ("name", "count", "own", "nodes"),
    [("p5.48xlarge", 0, None, [0, 0, 0, 0, 1, 1, 1, 1]), ("gb200", 4, [2, 10, 18, 26], [0, 0, 1, 1])],
)
def test_memory_is_near_the_node_that_the_gpu_is_at(
    machine: Machine, name: str, count: int, own: list[int] | None, nodes: list[int]
) -> None:
    """A GPU is a NUMA node itself on Grace alone: "GPU NUMA ID" is N/A in every capture of x86 machines."""
    machine(name, count)
    for index, node in enumerate(nodes):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        assert list(pynvml.nvmlDeviceGetMemoryAffinity(gpu, 1, 0)) == [1 << node]
        if own is None:
            with pytest.raises(pynvml.NVMLError_NotSupported):
                pynvml.nvmlDeviceGetNumaNodeId(gpu)
        else:
            assert pynvml.nvmlDeviceGetNumaNodeId(gpu) == own[index]


def test_a_process_that_computes_and_draws_is_in_both_lists(machine: Machine) -> None:
    state = machine("rtx-4090", 1)
    rows = {"pid": "77", "memory": "300", "kind": "compute+graphics", "name": "blender"}
    state.change(
        lambda now: now.update(
            {"gpus.0.processes.count": "1", **{f"gpus.0.processes.0.{key}": v for key, v in rows.items()}}
        )
    )
    lists = (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses)
    for listed in lists:
        [row] = listed(first())
        assert (row.pid, row.usedGpuMemory) == (77, 300 << 20)
    assert pynvml.nvmlDeviceGetMPSComputeRunningProcesses(first()) == []


def test_newer_forms_of_processes(machine: Machine) -> None:
    """nvmlDeviceGetRunningProcessDetailList and nvmlDeviceGetProcessesUtilizationInfo, laid out by nvml.h."""
    state = machine("g5.xlarge")
    start = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    row = {"pid": str(os.getpid()), "memory": "64", "kind": "compute", "utilization": "30", "start": start}
    state.change(
        lambda now: now.update(
            {"gpus.0.processes.count": "1", **{f"gpus.0.processes.0.{key}": v for key, v in row.items()}}
        )
    )

    class Detail(ctypes.Structure):
        _fields_ = (
            ("pid", ctypes.c_uint),
            ("memory", ctypes.c_ulonglong),
            ("instances", ctypes.c_uint * 2),
            ("protected", ctypes.c_ulonglong),
        )

    class Use(ctypes.Structure):
        _fields_ = (("at", ctypes.c_ulonglong), ("pid", ctypes.c_uint), ("percent", ctypes.c_uint * 6))

    def asked(name: str, kind: Any, buffer: int, first_words: tuple[int, ...]) -> tuple[int, int, Any]:
        rows = (kind * max(buffer, 1))()
        array = ctypes.cast(rows, ctypes.c_void_p).value if buffer else 0
        head = (ctypes.c_uint * 6)(24 | 1 << 24, *first_words, 0, 0, 0)
        ctypes.memmove(ctypes.addressof(head) + 16, ctypes.byref(ctypes.c_void_p(array)), 8)
        status = call(name, first(), head)
        return status, head[1 if name.endswith("Info") else 2], rows[0]

    status, answer, _ = asked("nvmlDeviceGetRunningProcessDetailList", Detail, 0, (0, 0))
    assert (status, answer) == (TOO_SMALL, 1)
    status, answer, row = asked("nvmlDeviceGetRunningProcessDetailList", Detail, 1, (0, 1))
    assert (status, answer, row.pid, row.memory) == (OK, 1, os.getpid(), 64 << 20)
    status, answer, use = asked("nvmlDeviceGetProcessesUtilizationInfo", Use, 1, (1, 0))
    assert (status, answer, use.pid, use.percent[0]) == (OK, 1, os.getpid(), 30)


def test_samples_are_newer_than_those_seen(machine: Machine) -> None:
    state = machine("g5.xlarge")
    state.change(lambda rows: rows.update({"gpus.0.utilization.gpu": "40"}))
    kind, answer = pynvml.nvmlDeviceGetSamples(first(), pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    assert kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    assert {row.sampleValue.uiVal for row in answer} == {40}
    times = [row.timeStamp for row in answer]
    assert times == sorted(set(times))
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetSamples(first(), pynvml.NVML_GPU_UTILIZATION_SAMPLES, times[-1] + 10**9)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetSamples(first(), pynvml.NVML_MODULE_POWER_SAMPLES, 0)


def test_a_gpu_is_found_by_the_bytes_of_its_uuid(machine: Machine) -> None:
    machine("g5.12xlarge")
    wanted = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(2))
    for kind, text in ((1, wanted.encode()), (2, bytes.fromhex(wanted[4:].replace("-", "")))):
        asked = (ctypes.c_char * 52)()
        value = (52 | 1 << 24).to_bytes(4, "little") + kind.to_bytes(4, "little") + text
        ctypes.memmove(asked, value, len(value))
        handle = ctypes.c_void_p()
        assert call("nvmlDeviceGetHandleByUUIDV", asked, ctypes.byref(handle)) == OK
        assert pynvml.nvmlDeviceGetIndex(handle) == 2


def test_older_forms_of_the_address_write_no_more_than_they_are(machine: Machine) -> None:
    """nvmlDeviceGetPciInfo has 32 bytes, _v2 36 (and 16 reserved), as pynvml's older structures."""
    machine("g5.xlarge")
    for name, size in (("nvmlDeviceGetPciInfo", 32), ("nvmlDeviceGetPciInfo_v2", 36)):
        buffer = (ctypes.c_ubyte * 96)(*([0xAA] * 96))
        assert call(name, first(), buffer) == OK
        assert bytes(buffer[:13]) == b"0000:00:1E.0\0"
        assert set(buffer[size:]) == {0xAA}


@pytest.mark.parametrize(
    ("name", "size", "at", "value"),
    [
        ("nvmlDeviceGetPciInfoExt", 64, 7, 2),
        ("nvmlDeviceGetCapabilities", 8, 1, 0),
        ("nvmlDeviceGetAddressingMode", 8, 1, 2),
        ("nvmlDeviceGetRepairStatus", 12, 1, 0),
        ("nvmlDeviceGetSramEccErrorStatus", 104, 24, 0),
    ],
)
def test_versioned_structures(machine: Machine, name: str, size: int, at: int, value: int) -> None:
    machine("gb200", 4)
    status, answer = words(name, first(), size)
    assert (status, answer[at]) == (OK, value)
    assert words(name, first(), size, version=7)[0] == VERSION_MISMATCH


def test_a_board_of_a_rack_says_where_it_is(machine: Machine) -> None:
    """Slot 14, tray 4, host 1, module 2 in qx-gb200.xml; an H100 has nothing but its module."""
    machine("gb200", 4)
    status, answer = words("nvmlDeviceGetPlatformInfo", first(), 44, version=2)
    place = b"".join(word.to_bytes(4, "little") for word in answer)[36:41]
    assert (status, tuple(place)) == (OK, (14, 4, 1, 1, 1))


def test_mig_devices_share_the_window_of_the_bus(machine: Machine) -> None:
    """6184 and 24739 MiB of an H100, 14809 and 59237 of an H200 in captures of driver 590.48.01."""
    state = machine("p5.48xlarge")
    state.change(lambda rows: play_scenario(rows, "mig-mixed"))
    sizes = []
    for index in (0, 1):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
        sizes.append(pynvml.nvmlDeviceGetBAR1MemoryInfo(part).bar1Total >> 20)
    assert sizes == pytest.approx([6184, 24739], abs=1)  # the reserve is given in whole MiB
    whole = pynvml.nvmlDeviceGetBAR1MemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert whole.bar1Used >> 20 == 81559 - 480


def test_power_is_measured_by_what_it_is_of(machine: Machine) -> None:
    """nvml.h: no average on GA100 and before Ampere; the module's on Grace alone."""

    def watts(scope: int) -> list[int | None]:
        rows = pynvml.nvmlDeviceGetFieldValues(first(), [(n, scope) for n in (185, 186, 190)])
        return [row.value.uiVal // 1000 if row.nvmlReturn == OK else None for row in rows]

    machine("gb200", 4)
    assert [watts(0), watts(1), watts(2)] == [[166, 166, 1200], [467, 467, 2500], [30, None, None]]


@pytest.mark.parametrize(
    ("board", "masks"), [("b200", [0x3F, 0x3F]), ("gb200", [None, 0x3F]), ("h100", [None, None])]
)
def test_atomics_of_the_bus_are_those_of_the_capture(
    machine: Machine, board: str, masks: list[int | None]
) -> None:
    """atomic_caps_outbound and -inbound of qx-b200.xml, qx-gb200.xml and qx-h100.xml."""
    machine(board, 4)
    rows = pynvml.nvmlDeviceGetFieldValues(first(), [228, 229])
    assert [row.value.uiVal if row.nvmlReturn == OK else None for row in rows] == masks


def test_fields_that_the_branch_does_not_know_are_no_valid_argument(machine: Machine) -> None:
    """NVML_FI_MAX is 274 in the nvml.h of CUDA 13.0; 60 is a counter of traffic that is not simulated."""
    machine("g5.xlarge")
    answer = pynvml.nvmlDeviceGetFieldValues(first(), [60, 0, 274, 1000])
    assert [row.nvmlReturn for row in answer] == [NOT_SUPPORTED, INVALID, INVALID, INVALID]


@pytest.mark.parametrize(
    ("board", "there"),
    [("p100", [1, 2, 3, 4, 5]), ("v100", [0, 1, 2, 3]), ("t4", [2, 7]), ("h100", [2, 7]), ("rtx-4090", [])],
)
def test_errors_are_counted_where_the_architecture_does(
    machine: Machine, board: str, there: list[int]
) -> None:
    """P100: NVIDIA/dcgm-exporter#16; T4 and H100: QX of gpu_boards.yaml."""
    machine(board, 1)
    count = ctypes.c_ulonglong()
    status = [
        call("nvmlDeviceGetMemoryErrorCounter", first(), 0, 0, location, ctypes.byref(count))
        for location in range(9)
    ]
    assert [location for location, row in enumerate(status) if row == OK] == there
    assert status[8] == INVALID


def test_clocks_that_can_be_chosen_are_those_of_the_capture(machine: Machine) -> None:
    """qx-gb200.xml and qx-t4.xml: 260 of 3996 MHz, each 7.5 MHz from the next; 24 of 405 MHz."""
    machine("gb200", 4)
    assert pynvml.nvmlDeviceGetSupportedMemoryClocks(first()) == [3996]
    clocks = pynvml.nvmlDeviceGetSupportedGraphicsClocks(first(), 3996)
    assert (len(clocks), clocks[:4], clocks[-2:]) == (260, [2062, 2055, 2047, 2040], [127, 120])
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetSupportedGraphicsClocks(first(), 1)


def test_a_locked_clock_stays_between_its_ends(machine: Machine) -> None:
    machine("p4d.24xlarge")
    clock = pynvml.NVML_CLOCK_SM
    idle = pynvml.nvmlDeviceGetClockInfo(first(), clock)
    pynvml.nvmlDeviceSetGpuLockedClocks(first(), 900, 9999)
    assert pynvml.nvmlDeviceGetClockInfo(first(), clock) == 900
    assert pynvml.nvmlDeviceGetMaxClockInfo(first(), clock) == 1410
    pynvml.nvmlDeviceResetGpuLockedClocks(first())
    assert pynvml.nvmlDeviceGetClockInfo(first(), clock) == idle
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceSetGpuLockedClocks(first(), 900, 800)


def test_a_board_before_volta_locks_no_clock(machine: Machine) -> None:
    machine("p100", 1)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceSetGpuLockedClocks(first(), 900, 1000)


def test_accounting_is_switched_and_remembers_none(machine: Machine) -> None:
    machine("g5.xlarge")
    stats = (ctypes.c_ubyte * 128)()
    assert call("nvmlDeviceGetAccountingStats", first(), 1, stats) == NOT_SUPPORTED
    pynvml.nvmlDeviceSetAccountingMode(first(), 1)
    assert pynvml.nvmlDeviceGetAccountingMode(first()) == 1
    assert list(pynvml.nvmlDeviceGetAccountingPids(first())) == []
    assert call("nvmlDeviceGetAccountingStats", first(), 1, stats) == NOT_FOUND


def test_the_driver_s_branch_and_the_processors_near_a_gpu(machine: Machine) -> None:
    machine("g5.12xlarge")
    buffer = (ctypes.c_char * 84)()
    ctypes.memmove(buffer, (84 | 1 << 24).to_bytes(4, "little"), 4)
    assert call("nvmlSystemGetDriverBranch", buffer, 80) == OK
    assert bytes(buffer)[4:].rstrip(b"\0") == b"r580_00"
    assert len(pynvml.nvmlSystemGetTopologyGpuSet(0)) == 4
    before = os.sched_getaffinity(0)
    try:
        pynvml.nvmlDeviceSetCpuAffinity(first())
        assert os.sched_getaffinity(0) == set(range(os.cpu_count() or 1))
        pynvml.nvmlDeviceClearCpuAffinity(first())
    finally:
        os.sched_setaffinity(0, before)
