"""NVIDIA's device plugin with GPU feature discovery: GPUs as a resource, and labels with their model.

A pod gets its GPUs through CDI, in a field of the runtime's interface that no pod can write (`cdi-cri`). On
nodes that have the settings of `ISOLATION` there is no other way: the runtime ignores NVIDIA_VISIBLE_DEVICES
of a pod or its image. The plugin itself still needs that variable; the runtime honours it for CAP_SYS_ADMIN.
"""

from __future__ import annotations

from typing import Any

from gpukiln.catalog.components import load_add_ons
from gpukiln.kubernetes.addons import helm, sharing
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.machines import GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest, dump

VALUES, ISOLATION_CHECK = "device-plugin/values.yaml", "device-plugin/isolation-check.yaml"
RELEASE = "nvidia-device-plugin"

# Commands for the node's user data that change /etc/nvidia-container-runtime/config.toml; they must run
# before the first pod. Without these settings a pod without a GPU sees all GPUs of the node if it, or its
# image, sets NVIDIA_VISIBLE_DEVICES=all.
# NVIDIA/nvidia-container-toolkit: api/config/v1/config.go; NVIDIA/k8s-device-plugin v0.20.0: README.md.
ISOLATION = (
    "nvidia-ctk config --in-place --set accept-nvidia-visible-devices-envvar-when-unprivileged=false",
    "nvidia-ctk config --in-place --set accept-nvidia-visible-devices-as-volume-mounts=false",
)


def files(settings: Settings) -> dict[str, str]:
    return {
        VALUES: helm.values(
            "nvidia_device_plugin",
            _values(settings),
            "The nodes need these commands in their user data; without them a pod can use GPUs of others:",
            *(f"  {line}" for line in ISOLATION),
        ),
        ISOLATION_CHECK: dump(
            _isolation_check(settings),
            head=(
                "Shows on one node that a pod without a GPU can't use one: the Job completes, or it fails "
                "and",
                "its log names the devices that it saw.",
            ),
        ),
    }


def install(settings: Settings) -> tuple[str, ...]:
    return (helm.upgrade_command("nvidia_device_plugin", RELEASE, settings.namespace, VALUES),)


def _values(settings: Settings) -> dict[str, Any]:
    configurations = sharing.configurations(settings)
    strategies = {configuration["flags"]["migStrategy"] for configuration in configurations.values()}
    return {
        # CRI has a field for CDI devices that only the kubelet fills in; an annotation (cdi-annotations) or a
        # variable (envvar) could be written by the pod.
        "deviceListStrategy": "cdi-cri",
        # The driver is installed on the node itself, not by a driver container of the GPU Operator.
        "nvidiaDriverRoot": "/",
        "cdi": {"nvidiaHookPath": "/usr/bin/nvidia-cdi-hook"},  # of the package nvidia-container-toolkit-base
        # Only if all configurations agree: a value here takes precedence over theirs.
        **({"migStrategy": strategies.pop()} if len(strategies) == 1 else {}),
        "config": {
            "default": sharing.DEFAULT,
            "map": {
                name: dump(configuration).removeprefix("---\n")
                for name, configuration in configurations.items()
            },
        },
        # The plugin still gets its GPUs by NVIDIA_VISIBLE_DEVICES; see the docstring.
        "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}},
        # Replaces the chart's affinity on labels of NFD: `GPU_PRESENT` is set by the node pools, before NFD
        # has run.
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": GPU_PRESENT, "operator": "In", "values": ["true"]}]}
                    ]
                }
            }
        },
        "tolerations": [{"operator": "Exists"}],
        "gfd": {"enabled": True},
        # NFD's worker only has to run on GPU nodes, whose taint it does not tolerate by default.
        "nfd": {
            "worker": {
                "nodeSelector": {GPU_PRESENT: "true"},
                "tolerations": [{"operator": "Exists"}],
            }
        },
    }


def _isolation_check(settings: Settings) -> Manifest:
    program = (
        "import glob, sys\n"
        # The device files that the container runtime mounts for a GPU; control devices such as nvidiactl have
        # no digit.
        "seen = glob.glob('/dev/nvidia[0-9]*')\n"
        "sys.exit(f'not isolated: {seen}' if seen else 0)\n"
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "gpu-isolation-check",
            "namespace": settings.namespace,
            "annotations": {
                "gpukiln.io/skip.nvidia-visible-devices": "the job shows that this variable has no effect"
            },
        },
        "spec": {
            # A retry would only repeat the result.
            "backoffLimit": 0,
            "activeDeadlineSeconds": 600,
            "ttlSecondsAfterFinished": 3600,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "nodeSelector": {GPU_PRESENT: "true"},
                    "tolerations": [settings.taint.toleration()],
                    "containers": [
                        {
                            "name": "ask-for-all",
                            "image": load_add_ons()["python"].image,
                            "command": ["python3", "-c", program],
                            "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
                            "resources": {
                                "requests": {"cpu": "50m", "memory": "64Mi"},
                                "limits": {"memory": "64Mi"},
                            },
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": ["ALL"]},
                                "runAsNonRoot": True,
                                "runAsUser": 65534,
                                "seccompProfile": {"type": "RuntimeDefault"},
                            },
                        }
                    ],
                }
            },
        },
    }
