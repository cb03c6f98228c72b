"""Checks across fields of Karpenter's and Kueue's objects, if their CRDs are not given.

Read from the CEL rules (x-kubernetes-validations) of the CRDs that `custom_schemas.py` names, and from the
webhook of Kueue v0.19.2 (kubernetes-sigs/kueue:pkg/webhooks/clusterqueue_webhook.go).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpukiln.kubernetes.check.relations import Mismatches
from gpukiln.kubernetes.check.workload import is_placeholder, mapping, sequence
from gpukiln.kubernetes.quantity import quantity
from gpukiln.typed import short

# Labels of Karpenter's domains that a NodePool may set or require.
_OF_KARPENTER = frozenset({"karpenter.sh/capacity-type", "karpenter.sh/nodepool"})
_OF_AWS = frozenset(
    f"karpenter.k8s.aws/{name}"
    for name in (
        *("instance-tenancy", "capacity-reservation-type", "capacity-reservation-id", "ec2nodeclass"),
        *("capacity-reservation-interruptible", "instance-encryption-in-transit-supported", "nitro-sandbox"),
        *("instance-category", "instance-hypervisor", "instance-family", "instance-generation"),
        *("instance-local-nvme", "instance-size", "instance-cpu", "instance-cpu-manufacturer"),
        *("instance-cpu-sustained-clock-speed-mhz", "instance-memory", "instance-ebs-bandwidth"),
        *("instance-network-bandwidth", "instance-gpu-name", "instance-gpu-manufacturer"),
        *("instance-gpu-count", "instance-gpu-memory", "instance-accelerator-name"),
        *("instance-accelerator-manufacturer", "instance-accelerator-count", "instance-capability-flex"),
        *("placement-group-id", "placement-group-partition"),
    )
)
_FAMILIES = {
    "al2": "AL2",
    "al2023": "AL2023",
    "bottlerocket": "Bottlerocket",
    "windows2019": "Windows2019",
    "windows2022": "Windows2022",
    "windows2025": "Windows2025",
}


def _restricted(key: str) -> str:
    domain = key.partition("/")[0]
    if key in ("karpenter.sh/nodepool", "kubernetes.io/hostname"):
        return f"label {key} is restricted"
    if domain.endswith("karpenter.sh") and key not in _OF_KARPENTER:
        return f"label {key}: the domain karpenter.sh is restricted"
    if domain.endswith("karpenter.k8s.aws") and key not in _OF_AWS:
        return f"label {key}: the domain karpenter.k8s.aws is restricted"
    return ""


def pool_labels(labels: Mapping[str, Any]) -> Mismatches:
    for key in labels:
        if text := _restricted(key):
            yield (key,), text


def requirement(term: Mapping[str, Any]) -> Mismatches:
    key, operator, values = term.get("key"), term.get("operator"), sequence(term.get("values"))
    if isinstance(key, str) and (text := _restricted(key)):
        yield ("key",), text
    if operator == "In" and not values:
        yield (), f"{key} In without values"
    if operator in ("Gt", "Lt", "Gte", "Lte") and not (len(values) == 1 and str(values[0]).isdecimal()):
        yield (), f"{key} {operator} {values}; wanted one whole number of 0 or more"
    least = term.get("minValues")
    if operator == "In" and isinstance(least, int) and len(values) < least:
        yield ("minValues",), f"minValues {least} of {len(values)} values"


def budget(entry: Mapping[str, Any]) -> Mismatches:
    if (entry.get("schedule") is None) != (entry.get("duration") is None):
        yield (), "schedule and duration go together"


def node_pool(spec: Mapping[str, Any]) -> Mismatches:
    # A pool with replicas is static: it always has that number of nodes.
    if spec.get("replicas") is None:
        return
    if spec.get("weight") is not None:
        yield ("weight",), "weight of a static NodePool (replicas)"
    if mapping(spec.get("limits")).keys() - {"nodes"}:
        yield ("limits",), "limits of a static NodePool (replicas); wanted nodes alone"


def ami_terms(spec: Mapping[str, Any]) -> Mismatches:
    terms = [mapping(term) for term in sequence(spec.get("amiSelectorTerms"))]
    aliases = [str(term["alias"]) for term in terms if isinstance(term.get("alias"), str)]
    for index, term in enumerate(terms):
        for key, others in (("alias", ("id", "tags", "name", "owner")), ("id", ("tags", "name", "owner"))):
            taken = [other for other in others if term.get(other) is not None]
            if term.get(key) is not None and taken:
                yield ("amiSelectorTerms", index), f"{key} with {taken[0]}; wanted {key} alone"
        if not any(term.get(key) is not None for key in ("alias", "id", "name", "ssmParameter", "tags")):
            yield ("amiSelectorTerms", index), "wanted alias, id, name, ssmParameter or tags"
    # An alias selects one image for each architecture.
    if aliases and len(terms) != 1:
        yield ("amiSelectorTerms",), "an alias with other terms; wanted it alone"
    family = spec.get("amiFamily")
    if terms and not aliases and family is None:
        yield ("amiFamily",), "amiFamily is missing, and no term has an alias"
    for alias in aliases:
        expected_family = _FAMILIES.get(alias.partition("@")[0])
        if family is not None and expected_family and family not in ("Custom", expected_family):
            yield (
                ("amiFamily",),
                f"amiFamily {family} with the alias {alias}; wanted {expected_family} or Custom",
            )


def selector_terms(spec: Mapping[str, Any]) -> Mismatches:
    for key, fields in (
        ("subnetSelectorTerms", ("tags", "id")),
        ("securityGroupSelectorTerms", ("tags", "id", "name")),
    ):
        terms = spec.get(key)
        if terms == []:
            yield (key,), f"{key} is empty"
        for index, term in enumerate(sequence(terms)):
            if all(mapping(term).get(field) is None for field in fields):
                yield (key, index), f"wanted {' or '.join(fields)}"
    # Karpenter creates an instance profile for a role, or uses the given one.
    if (spec.get("role") is None) == (spec.get("instanceProfile") is None):
        yield (), "wanted role or instanceProfile, one of them"


def volume(ebs: Mapping[str, Any]) -> Mismatches:
    if ebs.get("volumeSize") is None and ebs.get("snapshotID") is None:
        yield (), "wanted volumeSize or snapshotID"


def cohort_limits(cohort: str) -> Any:
    """A check of a ClusterQueue's spec; `cohort` is the name of the field with its cohort."""

    def check(spec: Mapping[str, Any]) -> Mismatches:
        for path, quota in _quotas(spec):
            for key in ("borrowingLimit", "lendingLimit"):
                if quota.get(key) is not None and not spec.get(cohort):
                    yield path, f"{key} without {cohort}: there is no queue to share with"
            lent, own = quantity(quota.get("lendingLimit")), quantity(quota.get("nominalQuota"))
            if lent is not None and own is not None and lent > own:
                yield path, f"lendingLimit {quota['lendingLimit']} above nominalQuota {quota['nominalQuota']}"

    return check


def _quotas(spec: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    for group, group_spec in enumerate(sequence(spec.get("resourceGroups"))):
        for flavor, part in enumerate(sequence(mapping(group_spec).get("flavors"))):
            for index, quota in enumerate(sequence(mapping(part).get("resources"))):
                path = ("resourceGroups", group, "flavors", flavor, "resources", index)
                yield path, mapping(quota)


def covered(group: Mapping[str, Any]) -> Mismatches:
    names = sequence(group.get("coveredResources"))
    for index, flavor in enumerate(sequence(group.get("flavors"))):
        # The webhook compares both lists item by item.
        listed = [mapping(part).get("name") for part in sequence(mapping(flavor).get("resources"))]
        if listed != names and not any(map(is_placeholder, listed)):
            text = (
                f"resources {short(', '.join(map(str, listed)))}; wanted those of coveredResources, in order"
            )
            yield ("flavors", index, "resources"), text
