"""What an EC2NodeClass leaves for pods on a node of an instance type, as Karpenter counts before it has one.

Facts: aws/karpenter-provider-aws:pkg/providers/instancetype/types.go at v1.14. A value that is an expression
(CEL) is not evaluated: there the default counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from gpukiln.catalog.instance_types import instance_type
from gpukiln.kubernetes import machines
from gpukiln.kubernetes.quantity import quantity
from gpukiln.units import is_whole

GIB = 2**30
DEFAULT_VOLUME = Decimal(20 * GIB)  # of every AMI family
RESERVED_STORAGE = Decimal(GIB)  # kubeReserved, where it says nothing
DATA_DEVICES = {"Bottlerocket": "/dev/xvdb"}  # what pods write to; of the others the root device
ROOT_DEVICE = "/dev/xvda"


def allocatable(name: str, spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Cores, bytes and pieces for pods.

    Args:
        name: Of an instance type.
        spec: Of the EC2NodeClass.
    """
    machine, room = instance_type(name), dict(machines.allocatable(name))
    kubelet = _part(spec, "kubelet")
    kube, system, evict = (_part(kubelet, key) for key in ("kubeReserved", "systemReserved", "evictionHard"))
    if is_whole(str(kubelet.get("maxPods"))):
        room["pods"] = Decimal(str(kubelet["maxPods"]))
    bottlerocket = _family(spec) == "Bottlerocket"
    per_core = str(kubelet.get("podsPerCore"))
    if is_whole(per_core) and int(per_core) > 0 and not bottlerocket:
        room["pods"] = min(room["pods"], Decimal(int(per_core) * machine.vcpu))

    cpu, memory = machines.capacity(name)
    kept_cpu = quantity(kube.get("cpu"))
    room["cpu"] = (room["cpu"] if kept_cpu is None else cpu - kept_cpu) - _amount(system.get("cpu"))
    kept_memory = quantity(kube.get("memory"))
    if kept_memory is None:
        kept_memory = machines.reserved_memory(int(room["pods"]) if bottlerocket else machine.max_pods)
    evicted = _threshold(evict.get("memory.available"), memory, machines.EVICTION_THRESHOLD)
    room["memory"] = memory - kept_memory - evicted - _amount(system.get("memory"))

    storage = _storage(name, spec)
    kept_storage = quantity(kube.get("ephemeral-storage"))
    room["ephemeral-storage"] = (
        storage
        - (RESERVED_STORAGE if kept_storage is None else kept_storage)
        - _threshold(evict.get("nodefs.available"), storage, storage / 10)
        - _amount(system.get("ephemeral-storage"))
    )
    return room


def _storage(name: str, spec: Mapping[str, Any]) -> Decimal:
    local = instance_type(name).local_nvme_gb
    if spec.get("instanceStorePolicy") == "RAID0" and local:
        return Decimal(local * 10**9)
    listed = spec.get("blockDeviceMappings")
    disks = [disk for disk in listed if isinstance(disk, Mapping)] if isinstance(listed, list) else []
    family = _family(spec)
    device = DATA_DEVICES.get(family, ROOT_DEVICE)
    chosen = [disk for disk in disks if disk.get("rootVolume") is True]
    chosen += (
        disks[-1:] if family == "Custom" else [disk for disk in disks if disk.get("deviceName") == device]
    )
    sizes = (quantity(_part(disk, "ebs").get("volumeSize")) for disk in chosen)
    return next((size for size in sizes if size is not None), DEFAULT_VOLUME)


def _family(spec: Mapping[str, Any]) -> str:
    if spec.get("amiFamily"):
        return str(spec["amiFamily"])
    terms = spec.get("amiSelectorTerms")
    aliases = [str(term.get("alias", "")) for term in terms or () if isinstance(term, Mapping)]
    return "Bottlerocket" if any(alias.startswith("bottlerocket@") for alias in aliases) else ""


def _threshold(value: Any, whole: Decimal, default: Decimal) -> Decimal:
    """An eviction threshold; 100 % means that there is none."""
    text = str(value)
    if text.endswith("%") and (share := quantity(text[:-1])) is not None:
        return Decimal(0) if share == 100 else whole * share / 100
    amount = quantity(value)
    return default if amount is None else amount


def _amount(value: Any) -> Decimal:
    return quantity(value) or Decimal(0)


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = whole.get(key)
    return part if isinstance(part, Mapping) else {}
