"""A GPU on a machine's PCI bus, which no driver finds: its folder stands in the place of the kernel's."""

from tests.support.harness import Node


def put_gpu(node: Node) -> None:
    """From now on the machine has a Tesla T4 (10de:1eb8)."""
    node.read(
        "sudo mkdir -p /srv/pci/0000:00:1e.0 && cd /srv/pci/0000:00:1e.0 && echo 0x10de | sudo tee vendor"
        " && echo 0x030200 | sudo tee class && echo 0x1eb8 | sudo tee device"
        " && sudo mount --bind /srv/pci /sys/bus/pci/devices && sudo systemctl restart nvidia-gpu-present"
    )
    node.read("test -e /run/nvidia-gpu-present")


def take_gpu(node: Node) -> None:
    """It was taken out; what is mounted there is not looked at by anybody else."""
    node.read("sudo umount /sys/bus/pci/devices && sudo systemctl restart nvidia-gpu-present")
