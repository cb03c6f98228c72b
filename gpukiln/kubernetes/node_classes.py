"""Allocatable resources of a node with an EC2NodeClass, as Karpenter computes them before the node exists.

Facts: aws/karpenter-provider-aws:pkg/providers/instancetype/types.go at v1.14. A value that is a CEL
expression is not evaluated; the default is used for it.
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
DEFAULT_VOLUME = Decimal(20 * GIB)  # Karpenter's default root volume, for every AMI family
RESERVED_STORAGE = Decimal(GIB)  # Karpenter's default of kubeReserved
# The volume that pods write to; other families use the root volume.
DATA_DEVICES = {"Bottlerocket": "/dev/xvdb"}
ROOT_DEVICE = "/dev/xvda"


def allocatable(name: str, spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Allocatable resources: cores, bytes, counts.

    Args:
        name: Instance type.
        spec: Spec of the EC2NodeClass.
    """
    machine, resources = instance_type(name), dict(machines.allocatable(name))
    kubelet = _part(spec, "kubelet")
    kube, system, evict = (_part(kubelet, key) for key in ("kubeReserved", "systemReserved", "evictionHard"))
    if is_whole(str(kubelet.get("maxPods"))):
        resources["pods"] = Decimal(str(kubelet["maxPods"]))
    bottlerocket = _family(spec) == "Bottlerocket"
    per_core = str(kubelet.get("podsPerCore"))
    if is_whole(per_core) and int(per_core) > 0 and not bottlerocket:
        resources["pods"] = min(resources["pods"], Decimal(int(per_core) * machine.vcpu))

    cpu, memory = machines.capacity(name)
    kept_cpu = quantity(kube.get("cpu"))
    resources["cpu"] = (resources["cpu"] if kept_cpu is None else cpu - kept_cpu) - _amount(system.get("cpu"))
    kept_memory = quantity(kube.get("memory"))
    if kept_memory is None:
        kept_memory = machines.reserved_memory(int(resources["pods"]) if bottlerocket else machine.max_pods)
    evicted = _threshold(evict.get("memory.available"), memory, machines.EVICTION_THRESHOLD)
    resources["memory"] = memory - kept_memory - evicted - _amount(system.get("memory"))

    storage = _storage(name, spec)
    kept_storage = quantity(kube.get("ephemeral-storage"))
    resources["ephemeral-storage"] = (
        storage
        - (RESERVED_STORAGE if kept_storage is None else kept_storage)
        - _threshold(evict.get("nodefs.available"), storage, storage / 10)
        - _amount(system.get("ephemeral-storage"))
    )
    return resources


def _storage(name: str, spec: Mapping[str, Any]) -> Decimal:
    local = instance_type(name).local_nvme_gb
    if spec.get("instanceStorePolicy") == "RAID0" and local:
        # With RAID0 the kubelet's folders are on the local disks.
        return Decimal(local * 10**9)
    listed = spec.get("blockDeviceMappings")
    disks = [disk for disk in listed if isinstance(disk, Mapping)] if isinstance(listed, list) else []
    family = _family(spec)
    device = DATA_DEVICES.get(family, ROOT_DEVICE)
    chosen = [disk for disk in disks if disk.get("rootVolume") is True]
    chosen += (
        # Karpenter takes the last mapping of the family Custom, whose devices it does not know.
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
    """An eviction threshold in bytes; 100 % switches it off."""
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
