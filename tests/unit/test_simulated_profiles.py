"""The GPUs of every instance type as the embedded cloud simulates them."""

import uuid
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from gpukiln.catalog.boards import board, boards, divisions, layout
from gpukiln.catalog.gpus import gpu, gpus
from gpukiln.catalog.instance_types import instance_type, instance_types
from gpukiln.clouds.embedded.gpus.profile import ARCHITECTURES, make_machine, make_profile
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.probe.nvml import address
from gpukiln.verify.catalog import load_checks
from tests.doubles.nvml_machine import made_up_machine, nvlinks_later
from tests.support.host_evaluate import evaluate_check
from tests.support.host_gpu_faults import Fault
from tests.support.host_gpu_faults import gpu as fault
from tests.support.host_machine import machine

TYPES = sorted(
    name
    for name, one in instance_types().items()
    if one.status != "retired" and gpu(one.gpu).manufacturer == "NVIDIA"
)
DRIVER = {"v100": "580.178.04"}
MARGIN = 0.08  # of the API's memory: it counts T4 without what ECC takes, and a fraction in GB


def profile(name: str, seed: str = "i-1") -> dict[str, Any]:
    return make_profile(name, seed=seed, driver=DRIVER.get(instance_type(name).gpu, "595.91.07"), cuda="13.2")


def keys(value: Any, above: str = "") -> set[str]:
    """The ways to every key; of a list its first item's."""
    if isinstance(value, list):
        return keys(value[0], above) if value else set()
    if not isinstance(value, dict):
        return set()
    return {f"{above}{k}" for k in value} | {w for k, v in value.items() for w in keys(v, f"{above}{k}/")}


@pytest.mark.parametrize("name", TYPES)
def test_type_has_its_gpus(name: str) -> None:
    one = instance_type(name)
    found = profile(name)["gpus"]
    assert len(found) == one.gpus == len(layout(name).buses)
    assert len({g["bus_id"] for g in found}) == one.gpus
    for row in found:
        told = row["memory"]["total"]
        assert abs(told - one.gpu_memory_mib) <= MARGIN * one.gpu_memory_mib, told
        assert row["compute_capability"] == gpu(one.gpu).cc
        assert f"{row['pci_device_id'] >> 16:04X}" in gpu(one.gpu).pci_ids
        assert row["pci_device_id"] & 0xFFFF == 0x10DE
        assert None not in (row["brand"], row["architecture"], row["cores"])


@pytest.mark.parametrize("name", TYPES)
def test_document_has_all_that_the_probe_reads(name: str) -> None:
    wanted = keys(made_up_machine()) - {w for w in keys(made_up_machine()) if w.startswith("gpus/")}
    found = profile(name)
    assert wanted <= keys(found)
    first = found["gpus"][0]
    untold = {w for w in keys(made_up_machine()["gpus"][0]) if w.startswith(("nvlinks/", "peers/"))}
    linked = {w for w in untold if first[w.partition("/")[0]]}
    computed = {"memory/free"}  # the double computes it of total, used and reserved
    assert (keys(made_up_machine()["gpus"][0]) - untold - computed) | linked <= keys(first)


def test_every_type_has_a_board_and_every_division_one_that_has_it() -> None:
    assert {instance_type(name).gpu for name in TYPES} <= set(boards())
    assert {one.mig for one in boards().values() if one.mig} == set(divisions())


def test_gpu_without_a_board_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown GPU board 'm60'"):
        board("m60")


def drivers(key: str) -> str:
    """A driver that knows a board."""
    return {"Kepler": "470.256.02", "Pascal": "535.309.01", "Volta": "580.178.04"}.get(
        gpu(key).arch or "" if key in gpus() else boards()[key].architecture or "", "595.91.07"
    )


@pytest.mark.parametrize("key", sorted(boards()))
def test_every_board_makes_a_machine(key: str) -> None:
    kind = boards()[key]
    found = make_machine(key, 2, seed="m", driver=drivers(key), cuda="12.2")["gpus"]
    assert len({one["uuid"] for one in found}) == len({one["bus_id"] for one in found}) == 2
    for one in found:
        assert (one["name"], one["memory"]["total"]) == (kind.name, kind.memory_mib)
        assert one["virtualization"] == 0
        assert (one["gsp_firmware"] is not None) == (one["architecture"] >= ARCHITECTURES["Turing"])
        assert (one["numa_node"] is not None) == (kind.grace > 0)
    assert make_machine(key, 1, seed="m", driver=drivers(key), cuda="12.2")["gpus"][0]["peers"] == []


def test_a_bridge_joins_two_boards_and_its_links_are_there_without_it() -> None:
    found = make_machine("rtx-a6000", 3, seed="m", driver="580.65.06", cuda="13.0")["gpus"]
    ends = [{link["remote_bus_id"] for link in one["nvlinks"]} for one in found]
    assert ends == [{found[1]["bus_id"]}, {found[0]["bus_id"]}, {None}]
    assert [{link["state"] for link in one["nvlinks"]} for one in found] == [{True}, {True}, {False}]
    assert [len(one["nvlinks"]) for one in found] == [4, 4, 4]
    assert {peer["index"]: peer["p2p"]["nvlink"] for peer in found[0]["peers"]} == {1: 0, 2: 5}


def test_two_gpus_of_one_card_are_behind_one_switch() -> None:
    found = make_machine("k80", 4, seed="m", driver="470.256.02", cuda="11.4")["gpus"]
    assert [one["board_id"] for one in found] == [0x100, 0x100, 0x300, 0x300]
    assert {peer["index"]: peer["ancestor"] for peer in found[0]["peers"]} == {1: 10, 2: 30, 3: 30}


@pytest.mark.parametrize(
    ("key", "count", "own", "near"),
    [
        ("gh200", 1, [1], [0]),
        ("gb200", 4, [2, 10, 18, 26], [0, 0, 1, 1]),
        ("rtx-4090", 2, [None] * 2, [0, 0]),
    ],
)
def test_a_gpu_of_grace_is_a_numa_node(key: str, count: int, own: list[Any], near: list[int]) -> None:
    found = make_machine(key, count, seed="m", driver="580.65.06", cuda="13.0")["gpus"]
    assert [one["numa_node"] for one in found] == own
    assert [one["memory_node"] for one in found] == near


@pytest.mark.parametrize(
    ("key", "driver", "words"),
    [
        ("rtx-5090", "535.309.01", "does not know the NVIDIA GeForce RTX 5090"),
        ("p100", "595.91.07", "has dropped the Tesla P100-PCIE-16GB; the last branch is 580"),
        ("k80", "535.309.01", "has dropped the Tesla K80; the last branch is 470"),
    ],
)
def test_board_of_a_driver_that_does_not_know_it_is_refused(key: str, driver: str, words: str) -> None:
    with pytest.raises(IncompatibleError, match=words):
        make_machine(key, 1, seed="m", driver=driver, cuda="12.2")


def test_uuids_are_stable_for_an_instance_and_no_others() -> None:
    one, same, other = profile("p4d.24xlarge"), profile("p4d.24xlarge"), profile("p4d.24xlarge", "i-2")
    assert one == same
    found = [g["uuid"] for doc in (one, other) for g in doc["gpus"]]
    assert len(set(found)) == 16
    assert all(uuid.UUID(u.removeprefix("GPU-")).variant == uuid.RFC_4122 for u in found)
    assert len({g["serial"] for doc in (one, other) for g in doc["gpus"]}) == 16


@pytest.mark.parametrize("name", [n for n in TYPES if instance_type(n).gpus > 1])
def test_ways_and_links_are_symmetric(name: str) -> None:
    found = profile(name)["gpus"]
    ways = {(g["index"], p["index"]): (p["ancestor"], p["p2p"]["read"]) for g in found for p in g["peers"]}
    assert len(ways) == len(found) * (len(found) - 1)
    assert all(ways[b, a] == way for (a, b), way in ways.items())
    at = {g["bus_id"]: g for g in found}
    for one in found:
        for other in found:
            links = [lnk for lnk in one["nvlinks"] or [] if lnk["remote_bus_id"] == other["bus_id"]]
            back = [lnk for lnk in other["nvlinks"] or [] if lnk["remote_bus_id"] == one["bus_id"]]
            assert len(links) == len(back)
    kind = boards()[instance_type(name).gpu]
    if kind.nvlink and instance_type(name).interconnect != "none":
        assert all(len(g["nvlinks"]) == kind.nvlink.links for g in at.values())


def test_nvswitches_get_the_links_that_the_machines_have() -> None:
    def ends(name: str) -> set[str | None]:
        return {lnk["remote_bus_id"] for g in profile(name)["gpus"] for lnk in g["nvlinks"]}

    assert (len(ends("p4d.24xlarge")), len(ends("p5.48xlarge"))) == (6, 4)
    assert ends("p6-b200.48xlarge") == {None}
    assert [g["bus_id"][9:] for g in profile("p4d.24xlarge")["gpus"]][:3] == ["10:1C.0", "10:1D.0", "20:1C.0"]
    assert profile("g5.12xlarge")["gpus"][0]["bus_id"] == "00000000:00:1B.0"


@pytest.mark.parametrize("name", sorted(divisions()))
def test_divisions_fit_their_board(name: str) -> None:
    division = divisions()[name]
    kind = next(one for one in boards().values() if one.mig == name)
    assert len({row[0] for row in division.profiles}) == len(division.profiles)
    assert len({row[1] for row in division.profiles}) == len(division.profiles)
    for row in division.profiles:
        _, _, title, slices, size, processors, memory, instances, *_, starts = row
        assert instances * slices <= division.slices, title
        assert instances <= len(starts), title
        assert all(start + size <= division.memory_slices for start in starts), title
        assert all(b - a >= size for a, b in pairwise(starts)), title
        assert instances * memory <= kind.memory_mib, title
        assert processors * 128 <= kind.cores or processors * 64 <= kind.cores, title
        assert title.startswith(f"{slices}g."), title


@pytest.mark.parametrize(
    ("name", "title", "mib"),
    [
        ("g6f.large", "NVIDIA L4-3Q", 3072),
        ("g6f.2xlarge", "NVIDIA L4-6Q", 6144),
        ("gr6f.4xlarge", "NVIDIA L4-12Q", 12288),
    ],
)
def test_fraction_is_a_virtual_gpu(name: str, title: str, mib: int) -> None:
    (row,) = profile(name)["gpus"]
    assert (row["name"], row["memory"]["total"], row["serial"]) == (title, mib, None)
    assert (row["mig"]["current"], row["mig"]["profiles"]) == (None, [])
    assert row["power"] == dict.fromkeys(row["power"])


def test_driver_that_does_not_know_the_gpu_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"does not know the B200 .* is 570\.133\.20"):
        make_profile("p6-b200.48xlarge", seed="i-1", driver="535.309.01", cuda="12.2")
    with pytest.raises(IncompatibleError, match="has dropped"):
        make_profile("p3dn.24xlarge", seed="i-1", driver="595.91.07", cuda="13.2")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("p4d.24xlarg", "unknown GPU instance type"),
        ("g4ad.xlarge", "has AMD's"),
        ("p2.xlarge", "EC2 has retired p2.xlarge"),
    ],
)
def test_type_without_such_gpus_is_refused(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_profile(name, seed="i-1", driver="535.309.01", cuda="12.2")


def facts(name: str) -> dict[str, Any]:
    """A healthy machine's facts with a profile as what NVML says."""
    data = machine(gpus=1)
    data["nvml"] = {"at": data["nvml"]["at"], **profile(name)}
    data["nvlinks"] = nvlinks_later(data["nvml"])
    data["gpus"]["pci"] = [
        {"address": address(g["bus_id"]), "device": hex(g["pci_device_id"] >> 16)}
        for g in data["nvml"]["gpus"]
    ]
    data["boot"]["virtualization"] = "amazon"
    return data


NVML_CHECKS = sorted(
    name
    for name in load_checks()
    if name
    in {
        "gpu.persistence",
        "gpu.ecc",
        "gpu.memory-repair",
        "gpu.throttle",
        "gpu.clocks",
        "gpu.pcie-link",
        "gpu.mig",
        "gpu.idle",
        "gpu.confidential",
        "multi-gpu.topology",
        "multi-gpu.p2p",
        "multi-gpu.nvlink",
        "multi-gpu.fabric",
    }
)


def healthy() -> Iterator[Any]:
    """Each check of what NVML says on each type."""
    for name in TYPES:
        for check in NVML_CHECKS:
            yield pytest.param(check, name, id=f"{check} {name}")


@pytest.mark.parametrize(("check", "name"), list(healthy()))
def test_nothing_is_found_on_a_healthy_machine(check: str, name: str) -> None:
    outcome, reason = evaluate_check(check, facts(name), expect_gpus=instance_type(name).gpus)
    assert outcome in ("passed", "not_run"), reason


@pytest.mark.parametrize(
    ("check", "break_it"),
    [
        ("multi-gpu.nvlink", fault("nvlinks/3/state", False, 5)),
        ("multi-gpu.p2p", fault("peers/6/p2p/read", 5, 4)),
        ("gpu.persistence", fault("persistence", False, 2)),
    ],
)
def test_a_fault_of_a_simulated_machine_is_found(check: str, break_it: Fault) -> None:
    data = facts("p4d.24xlarge")
    break_it(data)
    assert evaluate_check(check, data, expect_gpus=8)[0] == "failed"
