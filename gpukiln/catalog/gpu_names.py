"""What a GPU of the catalogue is called elsewhere, and which one a name means: every name is read here.

Two lookups are elsewhere, for machines have no catalogue: which words of a request a GPU's name has
(`gpukiln.gpus.selection`), and which names are no data-centre boards (`gpukiln.gpus.cuda`).
"""

import re
from functools import cache

from gpukiln.catalog.boards import boards
from gpukiln.catalog.gpus import gpu, gpus


def ec2_name(key: str) -> str:
    """What EC2's DescribeInstanceTypes calls a GPU; boards of one such name differ in memory."""
    return gpu(key).ec2_name or gpu(key).name


def is_ambiguous(key: str) -> bool:
    """Whether EC2 has another GPU of the same name, as with A100."""
    return sum(ec2_name(other) == ec2_name(key) for other in gpus()) > 1


def ec2_label(key: str) -> str:
    """As Karpenter's and EKS Auto Mode's labels have EC2's name: in small letters, with dashes.

    aws/karpenter-provider-aws:pkg/providers/instancetype/types.go.
    """
    return ec2_name(key).lower().replace(" ", "-")


def product(key: str) -> str:
    """What feature discovery says of it: NVML's name with `-` for spaces; empty: no source shows NVML's name.

    NVIDIA/k8s-device-plugin:internal/lm/resource.go.
    """
    return boards()[key].name.replace(" ", "-") if key in boards() else ""


def keys_of(name: str) -> tuple[str, ...]:
    """The GPUs that a name means: a key, the catalogue's name, EC2's, NVML's, or a label's; empty: none.

    A name without its size is all of that name: A100 is both boards. Of a product's label what says how the
    GPU is divided or shared is left out.

    >>> keys_of("Tesla T4")
    ('t4',)
    >>> keys_of("A100")
    ('a100-40gb', 'a100-80gb')
    >>> keys_of("NVIDIA-L4-SHARED")
    ('l4',)
    """
    return _names_to_keys().get(_plain(re.sub(r"-(SHARED|MIG-[\w.+-]+)$", "", name.strip())), ())


@cache
def _names_to_keys() -> dict[str, tuple[str, ...]]:
    keys_by_name: dict[str, list[str]] = {}
    for key, row in gpus().items():
        # Boards of other makers are known by one word of their name.
        parts = () if row.manufacturer == "NVIDIA" else key.split("-")  # V520, Gaudi
        # Without its size a key is the name of several boards: a100-40gb and a100-80gb.
        names = (key, re.sub(r"-\d+gb$", "", key), row.name, ec2_name(key), product(key) or key, *parts)
        for name in dict.fromkeys(map(_plain, names)):
            keys_by_name.setdefault(name, []).append(key)
    return {name: tuple(keys) for name, keys in keys_by_name.items()}


def _plain(name: str) -> str:
    """Letters and digits, without the makes that some names begin with."""
    # DLAMIs, labels, NVML and EC2 differ in case, spaces and dashes only.
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia)?(tesla|geforce)?", "", plain) or plain
