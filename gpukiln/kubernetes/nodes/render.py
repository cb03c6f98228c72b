"""Renders a node group for its provider, with notes for the user and what changes for a running pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gpukiln.catalog.instance_types import instance_type
from gpukiln.errors import UsageError
from gpukiln.kubernetes.check.yaml_tree import BrokenError
from gpukiln.kubernetes.folder import RenderedFile, Rendering
from gpukiln.kubernetes.machines import GPU, allocatable
from gpukiln.kubernetes.nodes import karpenter, karpenter_changes, terraform, terraform_changes
from gpukiln.kubernetes.nodes.changes import PoolUpdate
from gpukiln.kubernetes.nodes.group import NodeGroup
from gpukiln.typed import strict

SCHEMA = "k8s.nodes/1"
PROVIDERS: Mapping[str, Callable[[NodeGroup], dict[str, str]]] = {
    "karpenter": karpenter.files,
    "managed": terraform.files,
    "asg": terraform.files,
}


@strict
class NodeCapacity:
    """Allocatable resources of a node: cores, bytes, GPUs."""

    instance_type: str
    cpu: str
    memory: int
    gpus: int
    labels: Mapping[str, str]


@strict
class Nodes:
    """What `k8s.nodes --json` prints.

    Args:
        notes: Consequences that the user should know.
        others: Other files in the output folder.
        update: What the rendering changes for the running pool; null: there is nothing to compare with.
    """

    schema: str
    group: NodeGroup
    nodes: tuple[NodeCapacity, ...]
    files: tuple[RenderedFile, ...]
    notes: tuple[str, ...]
    others: tuple[str, ...]
    update: PoolUpdate | None


def files(group: NodeGroup) -> dict[str, str]:
    """Text by path."""
    return PROVIDERS[group.provider](group)


def earlier_update(group: NodeGroup, rendered: Mapping[str, str], folder: Path) -> PoolUpdate | None:
    """What changes compared with the earlier rendering in a folder; None: it has none.

    Raises:
        UsageError: The earlier rendering can't be read.
    """
    earlier = {
        name: (folder / name).read_text(errors="replace") for name in rendered if (folder / name).is_file()
    }
    if not earlier:
        return None
    if group.provider != "karpenter":
        return terraform_changes.compare_files(group, earlier, rendered, str(folder))
    [(name, text)] = earlier.items()
    try:
        return karpenter_changes.compare_files(group, text, rendered[name], str(folder))
    except BrokenError as error:
        raise UsageError(
            f"{folder / name}: {error}; wanted: an earlier rendering, to compare with",
            hint="remove or repair the file, or choose another --output",
        ) from error


def document(group: NodeGroup, rendering: Rendering, trust: str, update: PoolUpdate | None = None) -> Nodes:
    """The document of a rendered group.

    Args:
        trust: Why the image is trusted, in words.
        update: What the rendering changes for the running pool.
    """
    return Nodes(
        SCHEMA,
        group,
        tuple(_node(group, name) for name in group.types),
        rendering.files,
        (f"{group.image}: {trust}", *notes(group)),
        rendering.others,
        update,
    )


def _node(group: NodeGroup, name: str) -> NodeCapacity:
    resources = allocatable(name)
    # Karpenter has a pool for each GPU model; a node group has one set of labels for all types.
    same = next(types for types in group.by_gpu().values() if name in types)
    labels = group.node_labels(same) if group.provider == "karpenter" else terraform.node_labels(group)
    return NodeCapacity(name, f"{resources['cpu']:f}", int(resources["memory"]), int(resources[GPU]), labels)


def notes(group: NodeGroup) -> list[str]:
    lines = []
    if group.pointer:
        lines.append(
            f"{group.pointer} points at {group.image}; after the next release run the same command again"
        )
    if group.provider == "karpenter":
        pools = group.by_gpu()
        if len(pools) > 1:
            lines.append(f"{len(pools)} pools, for {', '.join(pools)}: each may have {group.maximum} GPUs")
        if not group.follows_channel and not group.pointer:
            lines.append("--ami is fixed: these nodes get no new releases; --channel follows releases")
    elif len(group.by_gpu()) > 1:
        lines.append(
            "different GPUs in one group: cluster-autoscaler assumes the first type for all nodes, and "
            "starts "
            "none for a pod with a selector on the product; render a group for each GPU"
        )
    if group.definition:
        verified = {instance_type(name).gpu for name in group.definition.instance_types}
        others = [name for name in group.types if instance_type(name).gpu not in verified]
        if others:
            lines.append(
                f"{group.definition.name} is not verified on the GPUs of {', '.join(others)}: "
                f"`invoke ami.verify last --instance-types {others[0]}` verifies it"
            )
    if group.local_storage and not group.has_local_storage:
        lines.append(f"{', '.join(group.types)}: no local NVMe for a RAID 0")
    elif group.has_local_storage:
        without = [name for name in group.types if not instance_type(name).local_nvme_gb]
        if without:
            lines.append(f"{', '.join(without)}: no local NVMe; pods write to the root volume there")
    if group.is_spot:
        lines.append(
            "spot: pods get two minutes before an interruption; `k8s.job --spot` renders Jobs for that"
        )
    return lines
