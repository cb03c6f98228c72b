"""Several pods on one GPU: time slicing, MPS or MIG, and which of them exclude each other.

Facts: NVIDIA/k8s-device-plugin v0.20.0, README.md (shared access, MPS) and api/config/v1.
"""

from __future__ import annotations

import re
from typing import Any

from gpukiln.catalog.gpu_names import keys_of
from gpukiln.catalog.gpus import Gpu, gpu
from gpukiln.catalog.instance_types import instance_types
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.kubernetes.addons.settings import Flavor, Settings, SharingSettings
from gpukiln.kubernetes.machines import GPU
from gpukiln.typed import unknown
from gpukiln.units import is_whole

DEFAULT = "default"  # the configuration of nodes without `LABEL`
LABEL = "nvidia.com/device-plugin.config"
INSTANCE_TYPE, GPU_NAME = "node.kubernetes.io/instance-type", "karpenter.k8s.aws/instance-gpu-name"
MIG = re.compile(r"nvidia\.com/mig-\d+g\.\d+gb(\.me)?")
MPS_CLIENTS = 48  # of one GPU from Volta on (NVIDIA's MPS guide, Volta MPS client limits)
MIG_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3", "12.0")  # NVIDIA's MIG guide, supported GPUs
MPS_CAPABILITY = 7.0  # the guide above: isolated address spaces from Volta on


def configurations(settings: Settings) -> dict[str, dict[str, Any]]:
    """The device plugin's configuration files by name; a node's label `LABEL` names its own.

    Raises:
        UsageError: Replicas are missing, or are given for a strategy without replicas.
        IncompatibleError: A flavor's GPU or resource does not support the strategy.
    """
    if DEFAULT in settings.named_sharing:
        raise UsageError(
            f"named_sharing has {DEFAULT!r}, which is the configuration of all other nodes",
            hint="write it as `sharing`",
        )
    named = {DEFAULT: settings.sharing, **settings.named_sharing}
    for name, sharing in named.items():
        _check_replicas(name, sharing)
    _check_flavors(settings, list(named.values()))
    return {name: _configuration(sharing) for name, sharing in named.items()}


def parse(text: str) -> SharingSettings:
    """Read --sharing: none, time-slicing:4, mps:4, mig-single or mig-mixed.

    Raises:
        UsageError: The text has another form.
    """
    strategy, colon, count = text.partition(":")
    if "+" in text or "," in text:
        raise UsageError(
            f"--sharing {text}: a node shares its GPUs in one way",
            hint=f"other nodes can have another: --sharing NAME=mps:4, and the label {LABEL}=NAME on them",
        )
    choices = ("none", "time-slicing", "mps", "mig-single", "mig-mixed")
    if strategy not in choices:
        raise unknown("--sharing", strategy, choices)
    if colon and not is_whole(count):
        raise UsageError(
            f"--sharing {text}: {count!r} is no number of pods", hint=f"{strategy}:4, for example"
        )
    sharing = SharingSettings(strategy, int(count or 0))  # type: ignore[arg-type]  # checked above
    _check_replicas(DEFAULT, sharing)
    return sharing


def replicas(sharing: SharingSettings) -> int:
    """Pods for each GPU."""
    return max(1, sharing.replicas)


def gpu_of(flavor: Flavor) -> Gpu | None:
    """The GPU of a flavor; None if its labels name neither an instance type nor a GPU."""
    if machine := instance_types().get(flavor.labels.get(INSTANCE_TYPE, "")):
        return gpu(machine.gpu)
    keys = keys_of(flavor.labels.get(GPU_NAME, ""))
    return gpu(keys[0]) if keys else None  # GPUs of the same name differ only in memory


def _check_replicas(name: str, sharing: SharingSettings) -> None:
    of = "" if name == DEFAULT else f" of {name}"
    if sharing.strategy in ("time-slicing", "mps"):
        if sharing.replicas < 2:
            raise UsageError(
                f"sharing{of} by {sharing.strategy} has {sharing.replicas} pods for each GPU, wanted 2 or "
                "more",
                hint=f"--sharing {sharing.strategy}:4, for example; `none` gives each pod a whole GPU",
            )
        if sharing.strategy == "mps" and sharing.replicas > MPS_CLIENTS:
            raise IncompatibleError(
                f"sharing{of} by MPS has {sharing.replicas} pods for each GPU; MPS serves at most "
                f"{MPS_CLIENTS}",
                hint="fewer, or time-slicing",
            )
    elif sharing.replicas:
        why = (
            "the size of a MIG device is its profile"
            if sharing.strategy.startswith("mig")
            else "each pod has whole GPUs"
        )
        raise UsageError(
            f"sharing{of}: {sharing.strategy} has no replicas: {why}", hint="leave the number out"
        )


def _check_flavors(settings: Settings, named: list[SharingSettings]) -> None:
    strategies = {sharing.strategy for sharing in named}
    for flavor in settings.flavors:
        if flavor.resource != GPU:
            if not MIG.fullmatch(flavor.resource):
                raise UsageError(
                    f"flavor {flavor.name}: resource {flavor.resource!r}, wanted {GPU} or a MIG device",
                    hint="nvidia.com/mig-1g.10gb, for example",
                )
            if "mig-mixed" not in strategies:
                raise IncompatibleError(
                    f"flavor {flavor.name} counts {flavor.resource}, which nodes have only with mig-mixed: "
                    f"with mig-single each MIG device is one {GPU}",
                    hint=f"--sharing mig-mixed, or leave out the resource of {flavor.name}",
                )
    if len(strategies) > 1:
        return  # the labels of the nodes are not known here
    for flavor in settings.flavors:
        board = gpu_of(flavor)
        if board is None or board.cc is None:
            continue
        if settings.sharing.strategy.startswith("mig") and board.cc not in MIG_CAPABILITIES:
            raise IncompatibleError(
                f"flavor {flavor.name}: {board.name} has no MIG, and its nodes would use "
                f"{settings.sharing.strategy}",
                hint="time-slicing:4 or mps:4; A100, A30 and data-centre GPUs from Hopper on have MIG",
            )
        if settings.sharing.strategy == "mps" and float(board.cc) < MPS_CAPABILITY:
            raise IncompatibleError(
                f"flavor {flavor.name}: {board.name} is older than Volta, whose MPS does not isolate memory",
                hint="time-slicing:4",
            )


def _configuration(sharing: SharingSettings) -> dict[str, Any]:
    mig = sharing.strategy.removeprefix("mig-") if sharing.strategy.startswith("mig-") else "none"
    configuration: dict[str, Any] = {"version": "v1", "flags": {"migStrategy": mig}}
    shared = {"resources": [{"name": GPU, "replicas": sharing.replicas}]}
    if sharing.strategy == "time-slicing":
        # Two slices are not twice the time: without this a pod that requests two would get a wrong idea of
        # its share (NVIDIA/k8s-device-plugin: README.md, With CUDA Time-Slicing).
        configuration["sharing"] = {"timeSlicing": {"failRequestsGreaterThanOne": True, **shared}}
    elif sharing.strategy == "mps":
        configuration["sharing"] = {"mps": shared}
    return configuration
