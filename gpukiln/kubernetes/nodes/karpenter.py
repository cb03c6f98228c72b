"""EC2NodeClass and NodePools of Karpenter's v1 API (aws/karpenter-provider-aws:pkg/apis/crds)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpukiln.kubernetes.machines import GPU, INSTANCE_TYPE
from gpukiln.kubernetes.manifest import Manifest, dump
from gpukiln.kubernetes.nodes import placeholders, userdata
from gpukiln.kubernetes.nodes.group import TAINT, NodeGroup

CAPACITY = "karpenter.sh/capacity-type"
RESERVATION_KIND = "karpenter.k8s.aws/capacity-reservation-type"
UNREGISTERED = (
    "karpenter.sh/unregistered:NoExecute"  # Karpenter does not add it to the user data of AMI family Custom
)
MOST_WEIGHT = 100


def files(group: NodeGroup) -> dict[str, str]:
    """One file: the node class, a pool for each GPU, and the placeholder pods."""
    objects = [_node_class(group)]
    pools = group.by_gpu()
    for place, (gpu, types) in enumerate(pools.items()):
        name = group.name if len(pools) == 1 else f"{group.name}-{gpu}"
        # Karpenter tries the pool with the highest weight first; steps of 10 leave space for pools of the
        # user.
        objects.append(_pool(group, name, types, weight=(len(pools) - place) * 10 if len(pools) > 1 else 0))
    if group.keep:
        objects += placeholders.objects(group)
    return {f"{group.name}.yaml": dump(*objects, head=_head(group))}


def _head(group: NodeGroup) -> list[str]:
    if group.nodeadm:
        lines = [
            "Nodes of an image on Amazon Linux 2023. Karpenter adds the cluster, the labels and the taints "
            "to",
            "the user data for nodeadm.",
        ]
    else:
        lines = [
            "Nodes of an image on Ubuntu. Karpenter adds nothing to the user data of a Custom image, so it "
            "is",
            "complete here. Its taint marks a node that Karpenter has not registered yet; Karpenter then",
            "replaces it by the taints of the NodePool.",
        ]
    if group.follows_channel:
        lines += [
            "The role of Karpenter's controller needs ssm:GetParameter on the parameter. A release changes "
            "the",
            "parameter and every node drifts: the budgets replace one at a time, and none",
            f"{group.hours.text}.",
        ]
    if group.hours.zone != "UTC":
        lines += ["Budgets have no time zone: in UTC they cover those hours in summer and in winter."]
    if len(group.by_gpu()) > 1:
        lines += [
            "There is a pool for each GPU, because Karpenter must know the product label before it starts a",
            "node. `limits` apply to each pool.",
        ]
    return lines


def _node_class(group: NodeGroup) -> Manifest:
    term = {"ssmParameter": group.image} if group.follows_channel else {"id": group.image}
    discovery = [{"tags": {"karpenter.sh/discovery": group.cluster}}]
    spec: dict[str, Any] = {
        "amiFamily": "AL2023" if group.nodeadm else "Custom",
        "amiSelectorTerms": [term],
        "role": group.role,
        "userData": _user_data(group),
        "subnetSelectorTerms": discovery,
        "securityGroupSelectorTerms": discovery,
    }
    if group.reservation:
        spec["capacityReservationSelectorTerms"] = [{"id": group.reservation}]
    if group.nodeadm and group.has_local_storage:
        spec["instanceStorePolicy"] = "RAID0"
    # Hop limit 1: a pod that is not on the host network can't reach the metadata service and its role.
    spec["metadataOptions"] = {"httpTokens": "required", "httpPutResponseHopLimit": 1}
    disk = {
        "volumeSize": f"{group.volume_gib}Gi",
        "volumeType": "gp3",
        "encrypted": True,
        "deleteOnTermination": True,
    }
    spec["blockDeviceMappings"] = [{"deviceName": group.base_image.root_device, "ebs": disk}]
    return {
        "apiVersion": "karpenter.k8s.aws/v1",
        "kind": "EC2NodeClass",
        "metadata": {"name": group.name},
        "spec": spec,
    }


def _user_data(group: NodeGroup) -> str:
    if group.nodeadm:
        return userdata.multipart(("text/x-shellscript", userdata.isolation()))
    return userdata.ubuntu(
        group.cluster, group.dns_ip, {}, UNREGISTERED, local_storage=group.has_local_storage
    )


def _pool(group: NodeGroup, name: str, types: Sequence[str], *, weight: int) -> Manifest:
    key, value, effect = TAINT
    requirements = [
        _in(INSTANCE_TYPE, types),
        # The capacity type of a capacity block is reserved; RESERVATION_KIND distinguishes both.
        _in(CAPACITY, ["reserved" if choice == "capacity-block" else choice for choice in group.capacity]),
        _in("kubernetes.io/arch", [group.arch]),
    ]
    if "capacity-block" in group.capacity:
        requirements.append(_in(RESERVATION_KIND, ["capacity-block"]))
    if group.zones:
        requirements.append(_in("topology.kubernetes.io/zone", group.zones))
    node_class = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": group.name}
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            **({"weight": min(weight, MOST_WEIGHT)} if weight else {}),
            "limits": {GPU: str(group.maximum)},
            "disruption": {
                # Moving a GPU job to another node means to start it again, so underutilised nodes stay.
                "consolidationPolicy": "WhenEmpty",
                # Keep an empty node for a while: the next pod may use it, and a new node takes minutes to
                # start.
                "consolidateAfter": "5m",
                "budgets": _budgets(group),
            },
            "template": {
                "metadata": {"labels": group.node_labels(types)},
                "spec": {
                    # Karpenter's default: nodes are replaced after 30 days.
                    "expireAfter": "720h",
                    # The longest time that a draining node waits for its pods.
                    "terminationGracePeriod": "4h",
                    "nodeClassRef": node_class,
                    "taints": [{"key": key, "value": value, "effect": effect}],
                    "requirements": requirements,
                },
            },
        },
    }


def _budgets(group: NodeGroup) -> list[Manifest]:
    """Disruption budgets: empty nodes go at any time, others one by one outside the working hours."""
    cron, minutes = group.hours.in_utc
    hours, rest = divmod(minutes, 60)
    return [
        {"nodes": "100%", "reasons": ["Empty"]},
        {
            "nodes": "0",
            "reasons": ["Drifted", "Underutilized"],
            "schedule": cron,
            "duration": f"{hours}h{rest}m" if rest else f"{hours}h",
        },
        {"nodes": "1", "reasons": ["Drifted"]},
    ]


def _in(key: str, values: Sequence[str]) -> Manifest:
    return {"key": key, "operator": "In", "values": list(values)}
