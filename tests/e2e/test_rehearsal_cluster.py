"""An image as a node of a real cluster on this computer; with Kubernetes' and NVIDIA's programs only.

KUBEBUILDER_ASSETS has kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and etcd; with
nvidia-container-runtime, nvidia-ctk and nvidia-cdi-hook pods get GPUs, with nvidia-device-plugin by NVIDIA
itself. Each test boots a machine, which takes minutes.
"""

import json
import os
import time
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.cluster.programs import PLUGIN, SERVER, TOOLKIT, VARIABLE
from gpukiln.kubernetes.cluster import Cluster
from tests.support.control_plane import has, why_none

MISSING = why_none() or ", ".join(name for name in (*SERVER, *TOOLKIT) if not has(name))
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(MISSING), reason=f"no programs of a cluster: {MISSING}"),
]
TYPE = "g5.12xlarge"  # has four GPUs


@pytest.fixture(scope="module")
def cloud(image_cloud):
    """A cloud with an image and a cluster."""
    image_cloud.environment[VARIABLE] = os.environ[VARIABLE]
    yield image_cloud
    image_cloud.invoke("cloud.cluster", "down")


def start(cloud, *options):
    """Start the cluster anew; its status."""
    cloud.invoke("cloud.cluster", "down")
    status = json.loads(cloud.invoke("cloud.cluster", "up", *options, "--json").stdout)["cluster"]
    assert all(status["programs"].values())
    return status


@pytest.fixture
def status(cloud):
    """The status of the cluster, newly started."""
    return start(cloud)


def verify(cloud, *arguments):
    command = ("ami.verify", "last", "--cluster", "rehearsal", "--simulated", "--instance-types", TYPE)
    done = cloud.invoke(*command, "--json", *arguments, ok=False)
    return json.loads(done.stdout)["verdicts"][0], done


def outcomes(verdict):
    return {check["id"]: check["outcome"] for check in verdict["checks"]}


def failures(verdict):
    return " ".join(check["reason"] for check in verdict["checks"] if check["outcome"] == "failed")


def nothing_left(cloud, status):
    cluster = Cluster("rehearsal", status["kubeconfig"])
    assert cluster.list("Node") == []
    assert not [pod for pod in cluster.list("Pod", everywhere=True) if "test" in pod["metadata"]["name"]]
    assert cloud.status()["server"]["machines"] == []


def user_data(status, folder, *commands):
    """The cluster's own, with commands before the machine joins."""
    text = Path(status["user_data"]).read_text()
    (folder / "user-data.sh").write_text(text.replace("#!/bin/sh\n", "\n".join(("#!/bin/sh", *commands, ""))))
    return str(folder / "user-data.sh")


def test_the_image_passes_as_a_node(cloud, status):
    verdict, done = verify(cloud)
    assert done.returncode == 0, done.stderr
    assert verdict["simulated"]
    assert verdict["environment"]["Kubernetes"].startswith("1.")
    found = outcomes(verdict)
    passed = ("allocatable", "device-plugin", "pod-starts", "nvidia-smi", "view-is-grant", "two-pods")
    passed += ("gpu-counts", "isolated", "plugin-returns", "rejoins")
    assert {name: found[f"cluster.{name}"] for name in passed} == dict.fromkeys(passed, "passed")
    # no feature discovery and no DCGM here
    assert found["cluster.labels"] == found["cluster.dcgm"] == "not_run"
    nothing_left(cloud, status)


def test_without_nvidias_plugin_a_stand_in_gives_out_the_gpus(cloud, tmp_path):
    for program in Path(os.environ[VARIABLE]).iterdir():
        if program.name != PLUGIN:
            (tmp_path / program.name).symlink_to(program)
    status = start(cloud, "--assets", str(tmp_path))
    assert not status["device_plugin"]
    verdict, done = verify(cloud)
    assert done.returncode == 0, done.stderr
    assert outcomes(verdict)["cluster.two-pods"] == "passed"
    nothing_left(cloud, status)


def test_without_the_nvidia_runtime_the_reason_is_what_the_plugin_logged(cloud, status, tmp_path):
    broken = user_data(
        status,
        tmp_path,
        "rm /etc/systemd/system/containerd.service.d/*.conf",
        "sed -i '/default_runtime_name/d' /etc/containerd/conf.d/10-gpukiln.toml",
        "systemctl daemon-reload",
        "systemctl restart containerd",
    )
    verdict, done = verify(cloud, "--user-data", broken, "--wait-minutes", "4")
    assert done.returncode == 1
    assert [name for name, outcome in outcomes(verdict).items() if outcome == "failed"] == [
        "cluster.allocatable"
    ]
    assert "nvidia is neither the default runtime nor" in failures(verdict)
    nothing_left(cloud, status)


def test_without_a_pod_of_the_plugin_the_reason_says_so(cloud, status):
    cluster = Cluster("rehearsal", status["kubeconfig"])
    [daemon_set] = cluster.list("DaemonSet", "kube-system")
    nowhere = {"spec": {"template": {"spec": {"nodeSelector": {"gpukiln.io/none": "true"}}}}}
    cluster.patch("DaemonSet", daemon_set["metadata"]["name"], nowhere, "kube-system")
    verdict, done = verify(cloud, "--wait-minutes", "4")
    assert done.returncode == 1
    assert "plugin" in failures(verdict)
    nothing_left(cloud, status)


def test_a_kubelet_that_can_not_start_is_named_by_the_console(cloud, status, tmp_path):
    broken = user_data(status, tmp_path, "rm /etc/kubernetes/ca.crt")
    verdict, done = verify(cloud, "--user-data", broken, "--wait-minutes", "4")
    assert done.returncode == 1
    assert "did not register as a node" in failures(verdict)
    assert "ca.crt" in failures(verdict)
    nothing_left(cloud, status)


@pytest.mark.parametrize("seconds", [5, 30, 100, 160])
def test_killed_at_any_moment_the_next_verification_removes_what_is_left(cloud, status, seconds):
    process = cloud.start("ami.verify", "last", "--cluster", "rehearsal", "--simulated")
    time.sleep(seconds)
    process.kill()
    process.wait()
    cloud.invoke("cloud.sweep", "--yes")
    verify(cloud, "--wait-minutes", "1")  # whatever its verdict: it removes the Node of the first
    nothing_left(cloud, status)
