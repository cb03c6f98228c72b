"""What `terraform apply` of a new rendering does to the nodes of a managed or an Auto Scaling group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpukiln.kubernetes.nodes.changes import Effect, PoolChange, PoolUpdate, nothing, worst
from gpukiln.kubernetes.nodes.group import NodeGroup
from gpukiln.kubernetes.nodes.terraform import USER_DATA

# A block at the start of a line, as terraform.formatted writes it.
BLOCK = re.compile(r"(?ms)^(?P<head>\w[^\n{=]*?) \{\n(?P<body>.*?)^\}$")
ARGUMENT = re.compile(r'  (?P<name>"?[\w-]+"?)')
# What makes a new version of the launch template.
TEMPLATE_INPUTS = {
    "var.image_id.default",
    "var.pointer.default",
    "var.volume_size_gib.default",
    "local.image_id",
    "local.user_data",
    USER_DATA,
}
# EKS can't change these of a group, so Terraform creates another one (CloudFormation's schema of
# AWS::EKS::Nodegroup, createOnlyProperties); of an Auto Scaling group only the name.
CREATE_ONLY = {
    "aws_eks_node_group.gpu.cluster_name",
    "aws_eks_node_group.gpu.node_group_name_prefix",
    "aws_eks_node_group.gpu.node_role_arn",
    "aws_eks_node_group.gpu.subnet_ids",
    "aws_eks_node_group.gpu.instance_types",
    "aws_eks_node_group.gpu.capacity_type",
    "aws_autoscaling_group.gpu.name_prefix",
    "var.cluster_name.default",
}
SIZES = {
    "aws_autoscaling_group.gpu.max_size": r"(\d+)",
    "aws_eks_node_group.gpu.scaling_config": r"max_size = (\d+)",
}
SUBNETS = {"local.zones", "local.subnet_ids"}
# Their running instances change only by an instance refresh.
REFRESHED = {"aws_autoscaling_group.gpu.mixed_instances_policy", "aws_autoscaling_group.gpu.launch_template"}


def compare_files(
    group: NodeGroup, before: Mapping[str, str], after: Mapping[str, str], folder: str
) -> PoolUpdate:
    """Compare with an earlier rendering."""
    old, new = _arguments(before), _arguments(after)
    changes = tuple(
        PoolChange(
            *_place(key),
            old.get(key, ""),
            new.get(key, ""),
            _effect(group, key, old.get(key, ""), new.get(key, "")),
        )
        for key in dict.fromkeys((*new, *old))
        if old.get(key) != new.get(key)
    )
    return PoolUpdate(folder, changes, None, None, tuple(_consequences(group, changes, old)))


def _arguments(files: Mapping[str, str]) -> dict[str, str]:
    """The arguments of all blocks by their address, without comments, descriptions and alignment."""
    arguments: dict[str, str] = {}
    for path, text in files.items():
        if not path.endswith(".tf"):
            arguments[path] = text
            continue
        for block in BLOCK.finditer(text):
            address, name = _address(block["head"]), ""
            # Nested blocks and values of several lines belong to the argument that they stand below.
            for line in block["body"].splitlines():
                if line.lstrip().startswith("#"):
                    continue
                if match := ARGUMENT.match(line):
                    name = match["name"]
                if name and name not in ("description", "type"):
                    # terraform fmt aligns `=` by the longest name near it: other spaces are no change.
                    words = " ".join(line.split())
                    key = f"{address}.{name}"
                    value = re.sub(rf"^{re.escape(name)} (= )?", "", words) if match else words
                    arguments[key] = " ".join(filter(None, (arguments.get(key), value)))
    return arguments


def _address(head: str) -> str:
    """The address of a block by which expressions refer to it.

    >>> _address('resource "aws_launch_template" "gpu"')
    'aws_launch_template.gpu'
    >>> _address("locals")
    'local'
    """
    kind, *labels = head.replace('"', "").split()
    prefix = {"resource": "", "variable": "var", "locals": "local"}.get(kind, kind)
    return ".".join(filter(None, (prefix, *labels)))


def _place(key: str) -> tuple[str, str]:
    """Address of the block, and argument; a whole file has no argument."""
    address, dot, argument = key.rpartition(".")
    return (key, "") if key == USER_DATA or not dot else (address, argument)


def _effect(group: NodeGroup, key: str, before: str, after: str) -> Effect:
    if key in CREATE_ONLY or (key in SUBNETS and group.provider == "managed"):
        return "new-group"
    if key in TEMPLATE_INPUTS or key.startswith("aws_launch_template.gpu.") or key in REFRESHED:
        return "every-node" if group.provider == "managed" else "after-refresh"
    # An Auto Scaling group replaces instances in zones that it no longer has, and ends those above its size.
    return "some-nodes" if key in SUBNETS or _shrinks(key, before, after) else "no-node"


def _shrinks(key: str, before: str, after: str) -> bool:
    """Whether the largest size of the group becomes less.

    UpdateAutoScalingGroup then lowers the desired capacity, too (its API reference, MaxSize).
    """
    sizes = [int(match[1]) for text in (before, after) if (match := re.search(SIZES.get(key, r"(?!)"), text))]
    return len(sizes) == 2 and sizes[1] < sizes[0]


def _consequences(
    group: NodeGroup, changes: tuple[PoolChange, ...], before: Mapping[str, str]
) -> Iterator[str]:
    effect = worst(changes)
    if effect == "no-node":
        yield nothing(group)
        return
    if effect == "new-group":
        yield "`terraform apply` creates a new group and then removes the old one with its nodes"
        return
    if effect == "some-nodes":
        yield (
            "`terraform apply` changes the group in place, and Auto Scaling removes or replaces nodes that "
            "do not fit it any more"
        )
        return
    if group.provider == "managed":
        yield (
            "`terraform apply` makes a new version of the launch template and updates the node group: EKS "
            "drains and replaces its nodes one at a time (max_unavailable)"
        )
    else:
        yield (
            "`terraform apply` makes a new version of the launch template, which new machines use; machines "
            "that run stay until an instance refresh, which drains no node:"
        )
        yield (
            "`aws autoscaling start-instance-refresh --auto-scaling-group-name "
            '"$(terraform output -raw group_name)"`'
        )
    if group.pointer and before.get("var.pointer.default") == f'"{group.pointer}"':
        yield (
            f"the earlier rendering follows {group.pointer}, which points at {group.image}: `terraform plan` "
            "shows whether the nodes have that image already"
        )
