"""What Karpenter does to running nodes when a NodePool or an EC2NodeClass changes: drift.

Which fields drift: Karpenter's documentation, "Disruption", Drift
(aws/karpenter-provider-aws:website/content/en/docs/concepts/disruption.md), and the fields that are left out
of the hash of an EC2NodeClass (pkg/apis/v1/ec2nodeclass.go, `hash:"ignore"`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.manifest import Manifest, load
from gpukiln.kubernetes.nodes.changes import Effect, PoolChange, PoolUpdate, as_text, nothing, worst
from gpukiln.kubernetes.nodes.group import NodeGroup

NODE_CLASS = "karpenter.k8s.aws/v1/EC2NodeClass"
NODE_POOL = "karpenter.sh/v1/NodePool"
NODE_CLAIM = "karpenter.sh/v1/NodeClaim"
POOL_LABEL = "karpenter.sh/nodepool"
IMAGES = "spec.amiSelectorTerms"
REQUIREMENTS = "spec.template.spec.requirements"
# Karpenter compares what these select with what a node has.
SELECTORS = (
    "spec.subnetSelectorTerms",
    "spec.securityGroupSelectorTerms",
    "spec.capacityReservationSelectorTerms",
)
# Fields that a rendering has or has not. The API server adds defaults to an object that it stores, so any
# other field that a rendering lacks says nothing.
OPTIONAL = ("weight", "instanceStorePolicy", "capacityReservationSelectorTerms")


DRIFT = (
    "Karpenter replaces nodes that drift within the disruption budgets of the NodePools: one at a time, "
    "and none {}"
)


def compare_files(group: NodeGroup, before: str, after: str, folder: str) -> PoolUpdate:
    """Compare with an earlier rendering.

    Raises:
        BrokenError: `before` is no YAML.
    """
    manifests = [manifest for manifest in load(before) if isinstance(manifest, dict)]
    changes = tuple(_changes(group, manifests, load(after), images=None))
    return PoolUpdate(
        folder, changes, None, None, tuple(_consequences(group, changes, manifests, rendered_before=True))
    )


def compare_cluster(group: NodeGroup, after: str, cluster: Cluster) -> PoolUpdate:
    """Compare with what a cluster has; only reads.

    Raises:
        UnavailableError: The cluster does not answer, or refuses to show its objects.
    """
    rendered = load(after)
    node_class = cluster.get(NODE_CLASS, group.name)
    # Not the placeholder pods: they run on nodes and replace none, and k8s.rbac would have to allow CronJobs.
    kept = [manifest for manifest in rendered if manifest["kind"] in ("EC2NodeClass", "NodePool")]
    expected = {_key(manifest): manifest for manifest in kept}
    pools = [
        pool for pool in cluster.list(NODE_POOL) if _class_of(pool) == group.name or _key(pool) in expected
    ]
    images = [str(image.get("id")) for image in (node_class or {}).get("status", {}).get("amis") or ()]
    live = [*([node_class] if node_class else []), *pools]
    comparable = [_as_rendered(manifest, expected.get(_key(manifest), manifest)) for manifest in live]
    changes = tuple(_changes(group, comparable, kept, images=images))
    names = {str(pool["metadata"]["name"]) for pool in pools}
    claims = [
        claim
        for claim in (cluster.list(NODE_CLAIM) if names else [])
        if claim["metadata"].get("labels", {}).get(POOL_LABEL) in names
    ]
    # Nodes of a parameter have the image that Karpenter looked up last.
    expected_images = images if group.follows_channel else [group.image]
    replaced = sum(_is_replaced(claim, group, changes, expected_images) for claim in claims)
    lines = list(_consequences(group, changes, live, rendered_before=False))
    if replaced and worst(changes) == "no-node":
        lines = [line for line in lines if line != nothing(group)] + [DRIFT.format(group.hours.text)]
    counted = f"{replaced} of {len(claims)} nodes drift"
    return PoolUpdate(f"context {cluster.context}", changes, len(claims), replaced, (counted, *lines))


def _changes(
    group: NodeGroup,
    before: Sequence[Manifest],
    after: Sequence[Manifest],
    images: Sequence[str] | None,
) -> Iterator[PoolChange]:
    """Differences of two sets of manifests.

    Args:
        images: The images that the EC2NodeClass selects now; None: unknown.
    """
    old = {_key(manifest): manifest for manifest in before}
    new = {_key(manifest): manifest for manifest in after}
    for key in [*new, *(key for key in old if key not in new)]:
        if key not in old or key not in new:
            kind = as_text(key.partition(" ")[0])
            yield PoolChange(key, "", kind if key in old else "", kind if key in new else "", "no-node")
            continue
        for path, left, right in _differences(old[key], new[key]):
            effect = _effect(group, key, path, left, right, images)
            yield PoolChange(key, path, as_text(left), as_text(right), effect)


def _differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path and both values of each difference; a list is one value."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*after, *before)):
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif before != after:
        yield path, before, after


def _effect(
    group: NodeGroup, key: str, path: str, before: Any, after: Any, images: Sequence[str] | None
) -> Effect:
    if not key.startswith(("EC2NodeClass ", "NodePool ")):
        return "no-node"
    # Karpenter compares images and not terms: a term that selects the same image drifts no node.
    if path == IMAGES:
        return "no-node" if _selects_same_image(group, before, images) else "every-node"
    if path == REQUIREMENTS:
        return "no-node" if _is_wider(before, after) else "some-nodes"
    if path in SELECTORS:
        return "some-nodes"
    if key.startswith("EC2NodeClass "):
        return "every-node" if path.startswith("spec.") else "no-node"
    return "every-node" if path.startswith("spec.template.") else "no-node"


def _selects_same_image(group: NodeGroup, before: Any, images: Sequence[str] | None) -> bool:
    """Whether the earlier selector terms select the image of the group now."""
    if images is not None and not group.follows_channel:
        return list(images) == [group.image]
    terms = {as_text(term) for term in before or ()}
    # Karpenter looks a parameter up again and again, so nodes of one have the image that it points at now.
    path = group.image if group.follows_channel else group.pointer
    return bool(path) and terms == {as_text({"ssmParameter": path})}


def _is_wider(before: Any, after: Any) -> bool:
    """Whether every node that satisfies the earlier requirements satisfies the later ones."""
    old = {rule.get("key"): set(rule.get("values") or ()) for rule in before or () if _is_in(rule)}
    return all(
        _is_in(rule) and rule["key"] in old and old[rule["key"]] <= set(rule["values"])
        for rule in after or ()
    )


def _is_in(rule: Any) -> bool:
    return isinstance(rule, Mapping) and rule.get("operator") == "In"


def _consequences(
    group: NodeGroup, changes: Sequence[PoolChange], before: Sequence[Manifest], *, rendered_before: bool
) -> Iterator[str]:
    if not any(_key(manifest).startswith(("EC2NodeClass ", "NodePool ")) for manifest in before):
        yield f"there is no pool {group.name} yet: Karpenter starts its nodes when pods need them"
        return
    for change in changes:
        kind, _, name = change.object.partition(" ")
        if not change.field and not change.after:
            # A pool of the cluster may be one that a user wrote, with the same EC2NodeClass.
            yield (
                f"{change.object} is not rendered any more and stays in the cluster: "
                f"`kubectl delete {kind.lower()} {name}` removes it"
                if rendered_before
                else f"{change.object} is not rendered here and has the same EC2NodeClass: its nodes get the "
                "same image"
            )
    effect = worst(tuple(changes))
    if effect == "no-node":
        yield nothing(group)
    else:
        yield (
            f"after `kubectl apply --server-side -f {group.name}.yaml` these nodes drift; before it, "
            f"`kubectl get nodeclaims -l {POOL_LABEL}` lists the nodes"
        )
        yield DRIFT.format(group.hours.text)
    terms = [change for change in changes if change.field == IMAGES]
    if effect == "no-node" and terms and group.pointer:
        yield f"the pool followed {group.pointer}, which points at {group.image}; it now keeps that image"


def _is_replaced(
    claim: Manifest, group: NodeGroup, changes: Sequence[PoolChange], images: Sequence[str]
) -> bool:
    pool = claim["metadata"].get("labels", {}).get(POOL_LABEL)
    others = [change for change in changes if change.effect == "every-node" and change.field != IMAGES]
    if any(change.object in (f"NodePool {pool}", f"EC2NodeClass {group.name}") for change in others):
        return True
    image = str(claim.get("status", {}).get("imageID") or "")  # empty: EC2 has not started it yet
    return bool(image and images) and image not in images


def _as_rendered(live: Any, rendered: Any) -> Any:
    """A live object with the fields that a rendering can have: no status, no defaults of the API server."""
    if isinstance(live, Mapping) and isinstance(rendered, Mapping):
        return {
            key: _as_rendered(value, rendered.get(key))
            for key, value in live.items()
            if key in rendered or key in OPTIONAL
        }
    if isinstance(live, list) and isinstance(rendered, list) and len(live) == len(rendered):
        return [_as_rendered(*pair) for pair in zip(live, rendered, strict=True)]
    return live


def _key(manifest: Mapping[str, Any]) -> str:
    metadata = manifest.get("metadata")
    return f"{manifest.get('kind')} {metadata.get('name') if isinstance(metadata, Mapping) else ''}"


def _class_of(pool: Mapping[str, Any]) -> str:
    spec = pool.get("spec", {}).get("template", {}).get("spec", {})
    return str((spec.get("nodeClassRef") or {}).get("name"))
