"""Rules that compare volumes of GPU pods with nodes and with other pods."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gpukiln.kubernetes.check.fit import is_schedulable
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.rules_running import node_selections
from gpukiln.kubernetes.check.workload import Path, Resource, Violation, Workload, at, mapping, sequence
from gpukiln.kubernetes.pools import ZONE, Pool
from gpukiln.units import is_whole

ZONES = (
    ZONE,
    "failure-domain.beta.kubernetes.io/zone",
    "topology.ebs.csi.aws.com/zone",  # kubernetes-sigs/aws-ebs-csi-driver
    "topology.ebs.csi.eks.amazonaws.com/zone",  # of EKS Auto Mode
)


def update_surge(workload: Workload) -> tuple[int, int, int]:
    """Replicas of a Deployment, its surge in an update, and how many may be unavailable."""
    spec = mapping(workload.object.get("spec"))
    replicas = spec.get("replicas")
    many = replicas if isinstance(replicas, int) and not isinstance(replicas, bool) else 1
    # All old pods end before the first new one starts.
    if at(spec, ("strategy", "type")) == "Recreate":
        return many, 0, many
    rolling = mapping(at(spec, ("strategy", "rollingUpdate")))
    more = _share(rolling.get("maxSurge"), many, up=True)
    fewer = _share(rolling.get("maxUnavailable"), many, up=False)
    return many, more, fewer


def _share(value: Any, of: int, *, up: bool) -> int:
    """A number or a percentage of pods; default 25 % (pkg/apis/apps/v1/defaults.go).

    >>> _share("50%", 3, up=True), _share(1, 3, up=True)
    (2, 1)
    """
    text = "25%" if value is None else str(value)
    if is_whole(text):
        return int(text)
    share = text.removesuffix("%")
    if not is_whole(share):
        return of  # unreadable: other rules report it
    # Kubernetes rounds maxSurge up and maxUnavailable down.
    return (math.ceil if up else math.floor)(of * int(share) / 100)


def _claims(workload: Workload, context: Context) -> Iterator[tuple[Path, Resource]]:
    """Path of each volume whose claim is among the files, and the claim."""
    claims = context.of_kind("PersistentVolumeClaim", same_namespace_as=workload.resource)
    for index, volume in enumerate(sequence(workload.pod.get("volumes"))):
        name = at(volume, ("persistentVolumeClaim", "claimName"))
        claim = next((candidate for candidate in claims if name and candidate.name == name), None)
        if claim:
            yield workload.at("volumes", index), claim


def _zones(claim: Resource, context: Context) -> set[str]:
    """Zones of a claim's volume; empty if unknown."""
    for volume in context.of_kind("PersistentVolume"):
        of = mapping(at(volume.object, ("spec", "claimRef")))
        # Either side may name the other: claimRef of the volume, or volumeName of the claim.
        bound = of.get("name") == claim.name and of.get("namespace", "") in (
            "",
            claim.namespace or of.get("namespace"),
        )
        if bound or (volume.name and volume.name == at(claim.object, ("spec", "volumeName"))):
            terms = sequence(at(volume.object, ("spec", "nodeAffinity", "required", "nodeSelectorTerms")))
            return _zones_of_terms(terms, "matchExpressions", require_in=True)
    name = at(claim.object, ("spec", "storageClassName"))
    for storage_class in context.of_kind("StorageClass"):
        if name and storage_class.name == name:
            return _zones_of_terms(
                sequence(storage_class.object.get("allowedTopologies")),
                "matchLabelExpressions",
                require_in=False,
            )
    return set()


def _zones_of_terms(terms: list[Any], key: str, *, require_in: bool) -> set[str]:
    """Zones that any of the terms allows; empty (all zones) if a term names none."""
    zones_of_terms: set[str] = set()
    for term in terms:
        zones = {
            str(value)
            for requirement in map(mapping, sequence(mapping(term).get(key)))
            if requirement.get("key") in ZONES and (not require_in or requirement.get("operator") == "In")
            for value in sequence(requirement.get("values"))
        }
        if not zones:
            return set()
        zones_of_terms |= zones
    return zones_of_terms


def _pool_zones(pool: Pool) -> set[str]:
    if pool.nodes:
        # An empty text: a node whose zone is unknown
        return {str(node["metadata"].get("labels", {}).get(ZONE, "")) for node in pool.nodes}
    return set(pool.choices.get(ZONE, ())) or ({pool.labels[ZONE]} if ZONE in pool.labels else set())


@rule(
    "volume-zone",
    "error",
    Workload,
    title="Volumes of a GPU pod are in a zone of its nodes",
    reason="an EBS volume can only be attached in its own zone: the pod stays Pending, node(s) had volume "
    "node affinity conflict",
    source="kubernetes.io/docs/concepts/storage/persistent-volumes/#node-affinity",
    fix="a pool in the volume's zone, or a StorageClass with volumeBindingMode: WaitForFirstConsumer",
    fragments=False,
)
def volume_zone(workload: Workload, context: Context) -> Iterator[Violation]:
    if not is_schedulable(workload):
        return
    known = [
        (path, claim, zones)
        for path, claim in _claims(workload, context)
        if (zones := _zones(claim, context))
    ]
    if not known:
        return
    path, claim, both = known[0]
    for where, other, zones in known[1:]:
        if not both & zones:
            text = f"{claim.name} is in {_listed(both)}, {other.name} in {_listed(zones)}"
            yield Violation(text, where)
            return
        # A pod runs in one zone, which must have all of its volumes.
        both &= zones
    for key, values in ((key, {*values}) for _, key, values in node_selections(workload, required=True)):
        if key in ZONES and not values & both:
            yield Violation(
                f"{claim.name} is in {_listed(both)}, the pod selects {key}: {_listed(values)}", path
            )
            return
    pools = {fit.pool.name: _pool_zones(fit.pool) for fit in context.node_fits(workload) if not fit.problems}
    if pools and all(zones and "" not in zones and not zones & both for zones in pools.values()):
        where_pools = ", ".join(f"{name} in {_listed(zones)}" for name, zones in pools.items())
        yield Violation(f"{claim.name} is in {_listed(both)}, pool {where_pools}", path)


def _listed(zones: set[str]) -> str:
    return " or ".join(sorted(zones))


@rule(
    "claim-for-one",
    "warning",
    Workload,
    title="A claim for one node is not used by GPU pods on several nodes",
    reason="ReadWriteOnce allows one node: a pod on another node, also of an update, waits with Multi-Attach "
    "error",
    source="kubernetes.io/docs/concepts/storage/persistent-volumes/#access-modes; "
    "kubernetes.io/docs/concepts/workloads/controllers/deployment/#strategy",
    fix="ReadWriteMany (EFS, FSx), a claim for each pod, or strategy: {type: Recreate} for one replica",
    fragments=False,
)
def claim_for_one(workload: Workload, context: Context) -> Iterator[Violation]:
    if not workload.wants_gpus:
        return
    for path, claim in _claims(workload, context):
        modes = [str(mode) for mode in sequence(at(claim.object, ("spec", "accessModes")))]
        if not modes or not {*modes} <= {"ReadWriteOnce", "ReadWriteOncePod"}:
            continue
        why = _why_concurrent(workload)
        if why:
            yield Violation(f"{claim.name} is {', '.join(modes)}, and {why}", path)


def _why_concurrent(workload: Workload) -> str:
    """Why several pods of a workload exist at once; empty if not, or unknown."""
    job = mapping(workload.job)
    parallel = job.get("parallelism")
    if isinstance(parallel, int) and parallel > 1 and job.get("completions", parallel) != 1:
        return f"parallelism is {parallel}"
    if workload.kind != "Deployment":
        return ""
    many, more, fewer = update_surge(workload)
    if many > 1:
        return f"there are {many} replicas"
    return "an update starts the new pod before the old one ends" if many and more and not fewer else ""
