"""What of the driver is on a machine, and where the roles are told to get it."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.harness import Node

OLD, NEW = "535.309.01", "580.178.04"


def drivers(node: "Node", command: str) -> set[str]:
    """Driver versions of the installed packages."""
    return set(re.findall(r"\b[3-9]\d\d\.\d+\.\d+", node.read(command)))


def module_field(node: "Node", field: str) -> str:
    """What the module of the one kernel says of itself."""
    kernel = node.read("ls /lib/modules").strip()
    return node.read(f"sudo modinfo -k {kernel} -F {field} nvidia").strip()


def module_version(node: "Node") -> str:
    """What the one kernel would load."""
    return module_field(node, "version")


def cuda_repository(fingerprint: str) -> dict[str, dict[str, str]]:
    """NVIDIA's repository, which stands in /srv/cuda."""
    repository = {
        "url": "file:///srv/cuda",
        "key_url": "file:///srv/cuda/gpgkey",
        "key_fingerprint": fingerprint,
    }
    return {"apt": {**repository, "suite": "/"}, "rpm": repository}
