"""What GPUs are called elsewhere: one function finds the catalogue's entry of every name."""

import pytest

from gpukiln.catalog.boards import boards
from gpukiln.catalog.gpu_names import ec2_label, ec2_name, keys_of, product
from gpukiln.catalog.gpus import gpus
from gpukiln.offers.request import parse_request


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("a10g", ("a10g",)),  # a key
        ("A10G", ("a10g",)),  # EC2, DescribeInstanceTypes of g5
        ("Tesla T4", ("t4",)),  # NVML
        ("Tesla-T4", ("t4",)),  # NVIDIA/k8s-device-plugin, the label nvidia.com/gpu.product
        ("Tesla-T4-SHARED", ("t4",)),  # the same, of shared GPUs
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", ("a100-40gb",)),  # the same, of MIG devices
        ("NVIDIA A100-SXM4-80GB", ("a100-80gb",)),
        ("A100", ("a100-40gb", "a100-80gb")),  # EC2 calls both so (p4d, p4de)
        ("NVIDIA H100 80GB HBM3", ("h100",)),
        ("rtx-pro-server-6000", ("rtx-pro-6000",)),  # Karpenter's label of g7e
        ("V520", ("radeon-pro-v520",)),
        ("l40", ()),
        ("", ()),
    ],
)
def test_a_name_leads_to_the_catalogues_entry(name: str, keys: tuple[str, ...]) -> None:
    assert keys_of(name) == keys


def test_every_name_of_every_gpu_leads_back_to_it() -> None:
    for key, one in gpus().items():
        for name in (key, one.name, ec2_name(key), ec2_label(key)):
            assert key in keys_of(name), (key, name)
        if key in boards():
            assert keys_of(boards()[key].name) == keys_of(product(key)) == (key,)


def test_an_offer_takes_the_name_that_a_machine_shows() -> None:
    """Only the catalogue's and EC2's names were taken, so a GPU's own name was unknown."""
    assert parse_request("NVIDIA A100-SXM4-80GB").gpus == ("a100-80gb",)
