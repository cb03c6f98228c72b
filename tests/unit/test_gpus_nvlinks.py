"""Which NVLinks should be active: all of a baseboard's, and of cards what their bridges join."""

import pytest

from gpukiln.gpus.gpu_facts import Gpu, are_linked, nvlinks_between
from gpukiln.gpus.nvlinks import GpuLinks, comparable_groups, is_wired, link_mismatch


def cards(name: str, *active: int, pairs: tuple[tuple[int, int], ...] = (), links: int = 4) -> list[GpuLinks]:
    """GPUs of a model with so many active links."""
    joined: dict[int, set[int]] = {n: set() for n in range(len(active))}
    for one, other in pairs:
        joined[one].add(other)
        joined[other].add(one)
    return [
        GpuLinks(n, f"GPU {n}", name, range(up), range(up, links), frozenset(joined[n]))
        for n, up in enumerate(active)
    ]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Tesla V100-SXM2-32GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H200",
            "NVIDIA H20",
        ),
        *("NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA GB200", "NVIDIA GH200 480GB"),
    ],
)
def test_a_baseboard_s_links_are_wired(name: str) -> None:
    assert is_wired(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
            "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL",
            "NVIDIA H200 NVL",
        ),
        *(
            "NVIDIA RTX A6000",
            "NVIDIA GeForce RTX 3090",
            "Quadro RTX 6000",
            "NVIDIA A40",
            "NVIDIA A30",
            "Tesla T4",
        ),
        *("NVIDIA L40S", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "Tesla P100-PCIE-16GB"),
    ],
)
def test_a_card_s_links_end_at_a_bridge_that_need_not_be_there(name: str) -> None:
    assert not is_wired(name)


def test_cards_that_are_bridged_in_part_are_well() -> None:
    """Three RTX A6000, of which two have a bridge."""
    groups = comparable_groups(cards("NVIDIA RTX A6000", 4, 4, 0, pairs=((0, 1),)))
    assert [[card.key for card in group] for group in groups] == [[0, 1], [2]]
    assert [link_mismatch(group) for group in groups] == [None, None]


def test_cards_without_a_bridge_are_well_though_all_their_links_are_inactive() -> None:
    assert [link_mismatch(group) for group in comparable_groups(cards("NVIDIA GeForce RTX 3090", 0, 0))] == [
        None,
        None,
    ]
    assert [link_mismatch(group) for group in comparable_groups(cards("Tesla T4", 0, 0, links=18))] == [
        None,
        None,
    ]


def test_a_card_with_fewer_links_than_the_one_it_is_bridged_with_is_not() -> None:
    [group] = comparable_groups(cards("NVIDIA RTX A6000", 4, 3, pairs=((0, 1),)))
    shown = "GPU 0 4 of 4; GPU 1 3 of 4, not 3"
    assert (
        link_mismatch(group) == f"active NVLinks of NVIDIA RTX A6000: {shown}; wanted as many on each of them"
    )


def test_a_baseboard_s_gpus_have_as_many_each_and_some() -> None:
    name = "NVIDIA H100 80GB HBM3"
    [group] = comparable_groups(cards(name, 18, 18, 17, links=18))
    assert "GPU 2 17 of 18, not 17" in (link_mismatch(group) or "")
    [group] = comparable_groups(cards(name, 0, 0, links=18))
    assert link_mismatch(group) == f"all NVLinks of all {name} are inactive, wanted some active"
    [group] = comparable_groups(
        cards(name, 12, 12, links=18)
    )  # a virtual machine with some of an NVSwitch's GPUs
    assert link_mismatch(group) is None


def test_a_gpu_without_active_links_is_joined_to_none_by_a_fabric() -> None:
    """HGX B200, where a link's end has no PCI address. A snapshot counted one GPU's links alone."""

    def gpu(index: int, *, up: bool) -> Gpu:
        links = [{"link": n, "state": up, "remote_bus_id": None} for n in range(18)]
        fabric = {"state": 3, "status": 0, "cluster": "ab", "clique": 1, "health": None}
        return {
            "index": index,
            "error": None,
            "bus_id": f"00000000:0{index}:00.0",
            "nvlinks": links,
            "fabric": fabric,
        }

    gpus = [gpu(1, up=True), gpu(2, up=True), gpu(3, up=False)]
    assert nvlinks_between(gpus[0], gpus[1], gpus) == 18
    assert nvlinks_between(gpus[0], gpus[2], gpus) == nvlinks_between(gpus[2], gpus[0], gpus) == 0
    assert [are_linked(gpus[0], other, gpus) for other in gpus[1:]] == [True, False]
