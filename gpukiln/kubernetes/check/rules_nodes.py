"""Rules on scheduling: some node has matching labels, tolerated taints and enough resources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from gpukiln.catalog import cuda
from gpukiln.compatibility import GUIDE
from gpukiln.errors import UsageError
from gpukiln.kubernetes import machines
from gpukiln.kubernetes.check.fit import NodeFit, is_schedulable
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import Path, Violation, Workload
from gpukiln.kubernetes.images import cuda_of_image
from gpukiln.kubernetes.scheduling import distance
from gpukiln.typed import unknown

MIG = "nvidia.com/mig-"
SCHEDULER = "kubernetes.io/docs/concepts/scheduling-eviction"


def _misfits(workload: Workload, context: Context, *kinds: str) -> tuple[list[NodeFit], list[NodeFit]]:
    """Candidates without problems of an earlier kind: all, and those with problems of these kinds."""
    # As in `distance`: a problem counts only for candidates without a problem of an earlier kind.
    order = ("selector", "taint", "resources")
    before = order[: order.index(kinds[0])]
    left = [
        place
        for place in context.node_fits(workload)
        if not any(problem.kind in before for problem in place.problems)
    ]
    return left, [place for place in left if any(problem.kind in kinds for problem in place.problems)]


def _nearest_text(places: list[NodeFit], kind: str) -> str:
    place = min(places, key=lambda fit: (distance(fit.problems), fit.absent_resources))
    why = "; ".join(problem.text for problem in place.problems if problem.kind == kind)
    pool = "" if place.pool.anything else f" of {place.pool.name}"
    return f"{place.name}{pool} is nearest: {why}"


def _nearest_misfit(workload: Workload, context: Context, kind: str) -> str:
    """The nearest candidate in words, if a kind of problem excludes all candidates; otherwise empty."""
    if not is_schedulable(workload):
        return ""
    every, lacking = _misfits(workload, context, kind)
    return _nearest_text(lacking, kind) if every and len(lacking) == len(every) else ""


@rule(
    "no-node-has-labels",
    "error",
    Workload,
    title="Some node has the labels that a GPU pod selects",
    reason="the pod stays Pending: node(s) didn't match Pod's node affinity/selector",
    source=f"{SCHEDULER}/assign-pod-node",
    fix="select by labels that the pool or feature discovery sets, such as nvidia.com/gpu.product",
    fragments=False,
)
def no_node_has_labels(workload: Workload, context: Context) -> Iterator[Violation]:
    if said := _nearest_misfit(workload, context, "selector"):
        key = "nodeSelector" if "nodeSelector" in workload.pod else "affinity"
        yield Violation(f"of {context.where}, {said}", workload.at(key))


@rule(
    "taint-not-tolerated",
    "error",
    Workload,
    title="A GPU pod tolerates the taints of the nodes that it selects",
    reason="the pod stays Pending: node(s) had untolerated taint",
    source=f"{SCHEDULER}/taint-and-toleration",
    fix="tolerations: [{key: TAINT, operator: Exists}]; for the resource's own taint EKS adds one",
    fragments=False,
)
def taint_not_tolerated(workload: Workload, context: Context) -> Iterator[Violation]:
    if said := _nearest_misfit(workload, context, "taint"):
        yield Violation(f"of {context.where}, {said}", workload.at("tolerations"))


@rule(
    "fits-no-machine",
    "error",
    Workload,
    title="Some machine has the resources that a GPU pod requests",
    reason="the pod stays Pending for ever: kubelet, system and DaemonSets use a part of each machine",
    source="awslabs/amazon-eks-ami:nodeadm/internal/kubelet/config.go",
    fix="request what a node has left, such as 3500m and 13Gi of a g4dn.xlarge, or use a larger type",
)
def fits_no_machine(workload: Workload, context: Context) -> Iterator[Violation]:
    if said := _nearest_misfit(workload, context, "resources"):
        lacks_mig = re.search(r"Insufficient nvidia\.com/mig-(\S+):", said)
        profile = lacks_mig[1] if lacks_mig else ""
        # A mistyped profile is one that no machine has, and more helpful to name than the nearest machine.
        if profile and profile not in _profiles():
            said = f"no GPU has a MIG profile {profile}"
        yield Violation(f"of {context.where}, {said}", _resources(workload), fix=_mig_fix(profile))


@cache
def _profiles() -> Mapping[str, tuple[str, ...]]:
    """MIG profile, as in the name of the plugin's resource -> products of the GPUs that have it."""
    products: dict[str, tuple[str, ...]] = {}
    for name in machines.launchable_types():
        product = machines.labels(name).get(machines.PRODUCT, "")
        for key in machines.allocatable(name):
            if key.startswith(MIG) and product:
                profile = key.removeprefix(MIG)
                products[profile] = tuple(dict.fromkeys((*products.get(profile, ()), product)))
    return products


def _mig_fix(profile: str) -> str:
    """The fix for a MIG profile of which no machine has enough instances."""
    if not profile:
        return ""
    if profile not in _profiles():
        return unknown("MIG profile", profile, _profiles()).hint or f"one of {', '.join(sorted(_profiles()))}"
    having = ", ".join(_profiles()[profile])
    return f"fewer instances, or nodes whose GPUs have the MIG profile {profile}: {having}"


@rule(
    "cuda-newer-than-driver",
    "error",
    Workload,
    title="The driver of the nodes supports the CUDA version of the image",
    reason="the container fails: CUDA driver version is insufficient for CUDA runtime version",
    source=GUIDE,
    fix="an image with an older CUDA, or nodes with a newer driver: `invoke docker.check` compares them",
)
def cuda_newer_than_driver(workload: Workload, context: Context) -> Iterator[Violation]:
    drivers = sorted({pool.driver for pool in context.candidates if pool.driver})
    for container in workload.main_containers:
        cuda_version = cuda_of_image(container.image)
        # Without a GPU the container uses no driver.
        for driver in drivers if cuda_version and container.gpu_keys else ():
            try:
                support = cuda.support(cuda_version, driver, [])
            except UsageError:  # the catalogue does not know the version
                continue
            if not support.runs:
                least = cuda.needs(cuda_version).first
                text = (
                    f"{container.image} is CUDA {cuda_version}, the nodes have driver {driver}; "
                    f"wanted {least} or later"
                )
                yield Violation(text, workload.at(*container.where, "image"))


def _resources(workload: Workload) -> Path:
    for container in workload.main_containers:
        if container.gpu_keys:
            return workload.at(*container.where, "resources")
    return workload.at("containers")
