"""The cluster of this computer (`cloud.cluster`): its device plugin, and how a canary joins it.

The device plugin is NVIDIA's program, unmodified, in the image that every machine of this cluster has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.client import ask_server, ensure_server, server_status
from gpukiln.clouds.embedded.cluster.control_plane import NAME, START, STOP
from gpukiln.clouds.embedded.cluster.image import NAME as POD_IMAGE
from gpukiln.clouds.embedded.cluster.image import PLUGIN_NAME as PLUGIN_IMAGE
from gpukiln.clouds.embedded.cluster.programs import PLUGIN, STAND_IN, find_programs
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import UnavailableError
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.machines import GPU, GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest

ARGUMENTS = ["--device-list-strategy=volume-mounts", "--fail-on-init-error=false"]
PLUGINS = "/var/lib/kubelet/device-plugins"  # kubernetes.io, "Device Plugins"


@dataclass(frozen=True)
class RehearsalCluster:
    """The cluster while it runs.

    Args:
        kubeconfig: Its administrator's.
        user_data: Joins a machine.
    """

    kubeconfig: Path
    user_data: Path
    pod_image: str = POD_IMAGE


def start(layout: Layout, assets: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Start the cluster, or leave the one that runs; its status.

    Args:
        assets: Folder of the programs; empty: $KUBEBUILDER_ASSETS, else they are downloaded.

    Raises:
        UsageError: The folder does not exist.
        UnavailableError: A program is missing or does not start.
    """
    status: dict[str, Any] | None = ensure_server(layout).get("cluster")
    # Its programs may be looked for in vain, or downloaded, only where they are started.
    if not status or not all(status["programs"].values()):
        programs = find_programs(assets, layout.kubernetes, say)
        paths = {name: str(path) for name, path in programs.paths.items()}
        status = ask_server(layout, START, {"programs": paths})
    cluster = Cluster(NAME, status["kubeconfig"])
    plugin = device_plugin(PLUGIN if status["device_plugin"] else STAND_IN)
    if cluster.get("DaemonSet", PLUGIN, "kube-system") is None:
        cluster.create(plugin)
    return status


def stop(layout: Layout) -> bool:
    """End the cluster; whether it ran. Its machines go on, as those of a cloud whose cluster is deleted."""
    return server_status(layout) is not None and bool(ask_server(layout, STOP, {})["ran"])


def running(layout: Layout) -> RehearsalCluster:
    """The cluster that runs.

    Raises:
        UnavailableError: None does.
    """
    status = (server_status(layout) or {}).get("cluster")
    if not status:
        raise UnavailableError(
            f"the cluster {NAME} does not run", hint="`invoke cloud.cluster up` starts it on this computer"
        )
    return RehearsalCluster(Path(status["kubeconfig"]), Path(status["user_data"]))


def device_plugin(program: str) -> Manifest:
    """The DaemonSet of the device plugin.

    As NVIDIA/k8s-device-plugin, deployments/static/nvidia-device-plugin.yml, with the image of this cluster
    and volume mounts in place of an environment variable: see `cluster.node.RUNTIME_CONFIG`.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": PLUGIN, "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": PLUGIN}},
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": PLUGIN}},
                "spec": {
                    "priorityClassName": "system-node-critical",
                    "automountServiceAccountToken": False,
                    "nodeSelector": {GPU_PRESENT: "true"},
                    "tolerations": [{"key": GPU, "operator": "Exists"}],
                    "containers": [
                        {
                            "name": f"{PLUGIN}-ctr",
                            "image": PLUGIN_IMAGE,
                            "command": [f"/usr/bin/{program}"],
                            **({"args": ARGUMENTS} if program == PLUGIN else {}),
                            "env": [
                                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
                                {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
                            ],
                            # The runtime honours NVIDIA_VISIBLE_DEVICES of privileged containers alone.
                            "securityContext": {"privileged": True},
                            "volumeMounts": [{"name": "plugins", "mountPath": PLUGINS}],
                        }
                    ],
                    "volumes": [{"name": "plugins", "hostPath": {"path": PLUGINS}}],
                },
            },
        },
    }
