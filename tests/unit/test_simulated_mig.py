"""MIG in the double of NVML: where instances are placed, their ids, and which combinations a GPU can have."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region
from gpukiln.errors import IncompatibleError
from gpukiln.gpus.mig_change import arrange, profiles

Gpu = Callable[[str], Any]
A100, A100_80GB, H100, H200 = "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge"
B200, B300, RTX_PRO_6000, A30 = "p6-b200.48xlarge", "p6-b300.48xlarge", "g7e.12xlarge", "A30"

# No instance type has an A30: NVIDIA, MIG User Guide, "A30 MIG Profiles", and a capture of `mig -lgip`.
A30_PROFILES: list[dict[str, Any]] = [
    {
        "number": number,
        "id": id,
        "name": name,
        "slices": slices,
        "memory_slices": slices,
        "size": slices,
        "multiprocessors": 14 * slices,
        "memory": memory,
        "instances": most,
        "copy_engines": slices,
        "decoders": decoders,
        "encoders": 0,
        "jpegs": int("4g" in name or "+me" in name),
        "ofas": int("4g" in name or "+me" in name),
        "placements": placements,
    }
    for number, id, name, slices, memory, most, decoders, placements in (
        (0, 14, "1g.6gb", 1, 5952, 4, 0, [0, 1, 2, 3]),
        (7, 21, "1g.6gb+me", 1, 5952, 1, 1, [0, 1, 2, 3]),
        (1, 5, "2g.12gb", 2, 11968, 2, 2, [0, 2]),
        (8, 6, "2g.12gb+me", 2, 11968, 1, 2, [0, 2]),
        (3, 0, "4g.24gb", 4, 24000, 1, 4, [0]),
    )
]


@pytest.fixture
def gpu(loaded_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The first GPU of an instance type, with MIG on."""
    del loaded_nvml
    path = tmp_path / "state"
    monkeypatch.setenv(library.STATE, str(path))
    started = False

    def make(instance_type: str) -> Any:
        nonlocal started
        document = make_profile(
            A100 if instance_type == A30 else instance_type, seed="i-1", driver="580.95.05", cuda="13.0"
        )
        if instance_type == A30:
            document["gpus"][0]["mig"].update(slices=4, memory_slices=4, profiles=A30_PROFILES)
        append_region(path)
        rows = initial_rows(document) | {"gpus.0.mig.current": "1", "gpus.0.mig.pending": "1"}
        State(path).write(rows)
        if not started:
            pynvml.nvmlInit()
        started = True
        return pynvml.nvmlDeviceGetHandleByIndex(0)

    yield make
    if started:
        pynvml.nvmlShutdown()


def created(gpu: Any, *names: str) -> list[tuple[int, str]]:
    """Create instances without placements: their ids and places, as nvidia-smi shows them."""
    ids = {one.name: one.id for one in profiles(pynvml, gpu)}
    found = []
    for name in names:
        info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceCreateGpuInstance(gpu, ids[name]))
        found.append((info.id, f"{info.placement.start}:{info.placement.size}"))
    return found


ONE, TWO, THREE, FOUR = "1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb"


@pytest.mark.parametrize(
    ("board", "names", "instances"),
    [
        # NVIDIA, MIG User Guide, "Creating GPU Instances", examples 1 to 3 of nvidia-smi mig -cgi.
        (A100, [THREE, THREE], [(2, "4:4"), (1, "0:4")]),
        (A100, [THREE, ONE, TWO, ONE], [(2, "4:4"), (7, "0:1"), (4, "2:2"), (8, "1:1")]),
        (
            A100,
            [TWO, ONE, ONE, ONE, ONE, ONE],
            [(5, "4:2"), (13, "6:1"), (7, "0:1"), (8, "1:1"), (9, "2:1"), (10, "3:1")],
        ),
        (A100, [ONE, TWO, FOUR], [(13, "6:1"), (5, "4:2"), (1, "0:4")]),
        # Alibaba Cloud, "Use MIG on A100": -cgi 9,14,19,19; NVIDIA/DCGM#138 has the places.
        (A100, [THREE, TWO, ONE, ONE], [(2, "4:4"), (3, "0:2"), (9, "2:1"), (10, "3:1")]),
        # Captures: 19,19,... on an H100 80GB is 13, 11, 12, 7, 8; 15,15,15 on an H100 96GB is 5, 3, 4.
        (
            H100,
            ["1g.10gb"] * 7,
            [(13, "6:1"), (11, "4:1"), (12, "5:1"), (7, "0:1"), (8, "1:1"), (9, "2:1"), (10, "3:1")],
        ),
        (H100, ["1g.20gb"] * 4, [(5, "4:2"), (3, "0:2"), (4, "2:2"), (6, "6:2")]),
        # Captures on an A30 and on an RTX PRO 6000 Blackwell Server Edition.
        (A30, ["1g.6gb", "1g.6gb"], [(3, "0:1"), (4, "1:1")]),
        (RTX_PRO_6000, ["1g.24gb"] * 4, [(3, "0:3"), (4, "3:3"), (5, "6:3"), (6, "9:3")]),
        (RTX_PRO_6000, ["2g.48gb", "1g.24gb", "1g.24gb"], [(1, "0:6"), (5, "6:3"), (6, "9:3")]),
    ],
)
def test_instances_get_the_places_and_ids_that_the_driver_gives(
    gpu: Gpu, board: str, names: list[str], instances: list[tuple[int, str]]
) -> None:
    assert created(gpu(board), *names) == instances


# NVIDIA/mig-parted, deployments/systemd/config-default.yaml, all-balanced.
BALANCED = {
    A100: {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1},
    A100_80GB: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
    H100: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
    H200: {"1g.18gb": 2, "2g.35gb": 1, "3g.71gb": 1},
    B200: {"1g.23gb": 2, "2g.45gb": 1, "3g.90gb": 1},
    B300: {"1g.34gb": 2, "2g.67gb": 1, "3g.135gb": 1},
    RTX_PRO_6000: {"1g.24gb": 2, "2g.48gb": 1},
    A30: {"1g.6gb": 2, "2g.12gb": 1},
}


@pytest.mark.parametrize("board", BALANCED)
def test_a_balanced_gpu_can_be_made_in_every_order_that_hardware_takes(gpu: Gpu, board: str) -> None:
    names = sorted(itertools.chain.from_iterable([name] * many for name, many in BALANCED[board].items()))
    halves = [name for name in names if name.startswith("3g")]  # first, says the Guide (example 2)
    others = [name for name in names if name not in halves]
    for order in sorted(set(itertools.permutations(others))):
        handle = gpu(board)
        made = created(handle, *halves, *order)
        assert len(set(made)) == len(names), order
        for one in {name.partition("g")[0] for name in others}:
            left = [row for row in profiles(pynvml, handle) if row.name.startswith(f"{one}g")]
            assert [pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, row.id) for row in left] == [
                0
            ] * len(left)


# The Guide's column "Number of Instances Available" for A100, A30, H100, H200 and B200, which is mig-parted's
# all-1g.5gb and so on.
MOST = {
    A100: {ONE: 7, "1g.5gb+me": 1, "1g.10gb": 4, TWO: 3, THREE: 2, FOUR: 1, "7g.40gb": 1},
    A100_80GB: {
        "1g.10gb": 7,
        "1g.10gb+me": 1,
        "1g.20gb": 4,
        "2g.20gb": 3,
        "3g.40gb": 2,
        "4g.40gb": 1,
        "7g.80gb": 1,
    },
    A30: {"1g.6gb": 4, "1g.6gb+me": 1, "2g.12gb": 2, "2g.12gb+me": 1, "4g.24gb": 1},
    H100: {
        "1g.10gb": 7,
        "1g.10gb+me": 1,
        "1g.20gb": 4,
        "2g.20gb": 3,
        "3g.40gb": 2,
        "4g.40gb": 1,
        "7g.80gb": 1,
    },
    H200: {
        "1g.18gb": 7,
        "1g.18gb+me": 1,
        "1g.35gb": 4,
        "2g.35gb": 3,
        "3g.71gb": 2,
        "4g.71gb": 1,
        "7g.141gb": 1,
    },
    B200: {
        "1g.23gb": 7,
        "1g.23gb+me": 1,
        "1g.45gb": 4,
        "2g.45gb": 3,
        "3g.90gb": 2,
        "4g.90gb": 1,
        "7g.180gb": 1,
    },
}


@pytest.mark.parametrize("board", MOST)
def test_as_many_of_a_profile_are_made_as_the_guide_lists_and_no_more(gpu: Gpu, board: str) -> None:
    for name, most in MOST[board].items():
        handle = gpu(board)
        assert len(set(created(handle, *[name] * most))) == most, name
        with pytest.raises(pynvml.NVMLError_InsufficientResources):
            created(handle, name)


@pytest.mark.parametrize(
    ("board", "names", "refused"),
    [
        (A100, [THREE, THREE], ONE),  # a slice of compute is left, and none of memory
        (A100, [FOUR, THREE], ONE),
        (A100, [ONE, ONE, TWO], THREE),  # the Guide, example 2: the 3g must come first
        (A100, ["7g.40gb"], ONE),
        # The Guide, "Supported MIG Profiles": +me.all has all 4 decoders, -me none, one +me has the OFA.
        (RTX_PRO_6000, ["1g.24gb+me.all", "1g.24gb-me", "1g.24gb-me"], "1g.24gb"),
        (RTX_PRO_6000, ["1g.24gb"], "1g.24gb+me.all"),
        (A30, ["2g.12gb+me"], "1g.6gb+me"),
    ],
)
def test_what_has_no_room_is_refused_as_hardware_refuses_it(
    gpu: Gpu, board: str, names: list[str], refused: str
) -> None:
    handle = gpu(board)
    created(handle, *names)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        created(handle, refused)


def test_what_is_left_is_counted_as_nvidia_smi_shows_it(gpu: Gpu) -> None:
    """The column Free of `nvidia-smi mig -lgip` after each of 4g, 2g and 1g (a public capture, A100 40GB)."""
    handle = gpu(A100)
    order = (ONE, "1g.5gb+me", "1g.10gb", TWO, THREE, FOUR, "7g.40gb")
    ids = {one.name: one.id for one in profiles(pynvml, handle)}
    left = []
    for name in (FOUR, TWO, ONE):
        created(handle, name)
        left.append([pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, ids[one]) for one in order])
    assert left == [[3, 1, 2, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [0] * 7]


def test_a_part_of_an_instance_has_the_multiprocessors_that_an_h200_shows(gpu: Gpu) -> None:
    """A capture of nvidia-smi on an H200: 16 for 1c.3g.71gb, 32 for 2c.3g.71gb (nvidia_gpu_exporter)."""
    handle = gpu(H200)
    instance = pynvml.nvmlDeviceCreateGpuInstance(handle, 9)
    offered = [
        pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, kind, 0).multiprocessorCount
        for kind in range(3)
    ]
    for kind in (0, 1):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, kind)
    parts = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n) for n in range(2)]
    shown = [pynvml.nvmlDeviceGetAttributes(part).multiprocessorCount for part in parts]
    assert (offered, shown) == ([16, 32, 60], [16, 32])


# ---- the planner of `gpukiln-gpu mig`


@pytest.mark.parametrize("board", BALANCED)
def test_the_planner_places_what_each_board_can_have(gpu: Gpu, board: str) -> None:
    offered = profiles(pynvml, gpu(board))
    for wanted in (BALANCED[board], *({name: most} for name, most in MOST.get(board, {}).items())):
        taken: set[int] = set()
        for _, start, size, _ in arrange(offered, wanted):
            slots = set(range(start, start + size))
            assert not taken & slots, wanted
            taken |= slots


def test_the_planner_refuses_what_an_a100_has_no_memory_for(gpu: Gpu) -> None:
    offered = profiles(pynvml, gpu(A100))
    for wanted in ({THREE: 2, ONE: 1}, {FOUR: 1, THREE: 1, ONE: 1}, {"1g.10gb": 4, ONE: 1}):
        with pytest.raises(IncompatibleError, match="no space"):
            arrange(offered, wanted)
