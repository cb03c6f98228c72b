"""A machine of Ubuntu's EKS image that joins a cluster, as far as containerd and Docker go."""

import json
import tomllib

import pytest

from gpukiln.probe.packing import facts_in, gather_command
from gpukiln.verify.catalog import load_checks
from gpukiln.verify.facts import Facts
from tests.support.standin.eks import PAUSE, ubuntu_eks


def join_script_is_outlived(site):
    """containerd's configuration is written anew; it is the real containerd, the script stands in."""
    node = site.node
    node.read("sudo rm -f /run/nvidia-gpu-present")
    ubuntu_eks(node)
    node.write("/etc/docker/daemon.json", '{"log-opts": {"max-size": "10m"}}')
    node.read("sudo rm -r /etc/containerd && sudo systemctl restart containerd docker")
    assert "172.17." in node.read("ip -4 address show docker0")
    site.converge(these=["container_runtime", "nvidia_container_toolkit"])
    assert node.ssh("test -e /etc/containerd/conf.d").returncode != 0
    assert site.daemon_json()["log-opts"] == {"max-size": "10m"}
    assert node.ssh("ip link show docker0").returncode != 0

    node.read("sudo /etc/eks/bootstrap.sh --dns-cluster-ip 172.20.0.10 a-cluster")
    found = judged(node)
    assert found["runtimes"] == ["nvidia", "runc"]
    assert set(found["joined"]) == {
        "/usr/local/share/eks/containerd-config.toml",
        "/usr/local/share/eks/nvidia-runtime-config.toml",
    }
    for _ in range(2):
        [cri] = [
            table
            for name, table in tomllib.loads(node.read("sudo containerd config dump"))["plugins"].items()
            if name == "io.containerd.grpc.v1.cri"
        ]
        assert cri["sandbox_image"] == PAUSE
        assert cri["registry"]["config_path"] == "/etc/containerd/certs.d:/etc/docker/certs.d"
        assert cri["containerd"]["default_runtime_name"] == "nvidia"
        nvidia = cri["containerd"]["runtimes"]["nvidia"]["options"]
        assert nvidia == {"BinaryName": "/usr/bin/nvidia-container-runtime", "SystemdCgroup": True}
        node.read("sudo systemctl restart containerd")

    # without what runs before containerd, the image would be refused
    node.read("sudo mv /etc/systemd/system/containerd.service.d/gpukiln.conf /srv")
    with pytest.raises(AssertionError, match=r"containerd-config\.toml.*runtimes are runc; wanted nvidia"):
        judged(node)
    node.read(
        "sudo rm -r /etc/eks /usr/local/share/eks /etc/systemd/system/containerd.service.d /etc/containerd"
    )
    node.read("sudo systemctl daemon-reload && sudo systemctl restart containerd docker")


def judged(node):
    """What is known of containerd, when the suite has judged it as of a node in a cluster."""
    facts = gathered(node, "eks-node")
    _, check = load_checks()["runtime.containerd-nvidia"]
    check(facts)
    return facts["containerd"]


def gathered(node, profile):
    """What the suite would judge the node by."""
    mark = "facts-0123456789"
    return Facts(json.loads(facts_in(node.read(gather_command(mark=mark)), mark)), profile)
