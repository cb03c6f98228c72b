"""Whether a pod fits a live node: what kube-scheduler's plugins decide by the objects alone."""

from decimal import Decimal

import pytest

from gpukiln.kubernetes.scheduling import distance, mismatches, nearest, requests, shortages, tolerates
from tests.support.api_server import GPU, node

GIB = 2**30


def pod(gpus=1, **spec):
    return {"containers": [{"name": "a", "resources": {"limits": {GPU: str(gpus)}}}], **spec}


@pytest.mark.parametrize(
    ("effect", "key", "tolerated"),
    [
        ("NoSchedule", GPU, True),
        # ExtendedResourceToleration adds a toleration with effect NoSchedule
        # (kubernetes/kubernetes:plugin/pkg/admission/extendedresourcetoleration)
        ("NoExecute", GPU, False),
        ("NoSchedule", "dedicated", False),
    ],
)
def test_a_pod_that_asks_for_gpus_tolerates_their_taint_of_one_effect(effect, key, tolerated):
    assert tolerates(pod(), {"key": key, "effect": effect}) is tolerated


@pytest.mark.parametrize(
    ("toleration", "problems"),
    [
        ({"operator": "Exists"}, []),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}, []),
        (
            {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoExecute"},
            ["it is cordoned"],
        ),
        ({"key": "dedicated", "operator": "Exists"}, ["it is cordoned"]),
    ],
)
@pytest.mark.parametrize("tainted", [False, True])
def test_a_cordon_keeps_those_away_that_do_not_tolerate_it(toleration, problems, tainted):
    """pkg/scheduler/framework/plugins/nodeunschedulable; its controller adds the taint a moment later."""
    cordoned = node("n")
    cordoned["spec"]["unschedulable"] = True
    if tainted:
        taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
        cordoned["spec"]["taints"].append(taint)
    found = mismatches(pod(tolerations=[toleration]), cordoned)
    assert [one.text for one in found] == problems


@pytest.mark.parametrize(
    ("resources", "cpu", "memory"),
    [
        ({"requests": {"cpu": "8", "memory": "32Gi"}}, 8, 32),  # replaces the sum of the containers
        ({"requests": {"cpu": "500m"}}, Decimal("0.5"), 4),
        ({"limits": {"cpu": "8", "memory": "32Gi"}}, 1, 4),  # the API server sets the sum of the containers
        ({"requests": {GPU: "8"}}, 1, 4),  # GPUs are asked for by containers alone
    ],
)
def test_what_a_pod_asks_for_as_a_whole_counts(resources, cpu, memory):
    """KEP-2837; k8s.io/component-helpers/resource: PodRequests."""
    container = {"resources": {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {GPU: "1"}}}
    found = requests({"containers": [container], "resources": resources, "overhead": {"cpu": "250m"}})
    assert found == {"cpu": cpu + Decimal("0.25"), "memory": memory * GIB, GPU: 1}


def test_a_pod_whose_containers_ask_for_nothing_asks_for_its_limit():
    spec = {"containers": [{}], "resources": {"limits": {"memory": "2Gi"}}}
    assert requests(spec) == {"memory": 2 * GIB}


def other_pod(place, gpus):
    return {"spec": {**pod(gpus), "nodeName": place}, "status": {"phase": "Running"}}


def test_the_nearest_node_is_one_that_could_take_it():
    """Neither one that its selector leaves out, nor one with too few GPUs, however free they are."""
    nodes = [node("excluded", 8), node("small", 1, pool="a"), node("large", 4, pool="a")]
    best, problems = nearest(pod(2, nodeSelector={"pool": "a"}), nodes, [other_pod("large", 4)])
    assert best["metadata"]["name"] == "large"
    assert [one.text for one in problems] == [f"Insufficient {GPU}: 2 requested, 0 left"]


def test_of_nodes_that_are_all_too_small_the_largest_is_nearest():
    nodes = [node("cpu", 0), node("small", 1), node("large", 4)]
    best, _ = nearest(pod(8), nodes, [other_pod("large", 4)])
    assert best["metadata"]["name"] == "large"


def test_a_selector_is_farther_than_a_taint_and_both_than_room():
    tainted, elsewhere = node("tainted", 2), node("elsewhere", 2)
    tainted["spec"]["taints"].append({"key": "dedicated", "effect": "NoSchedule"})
    distances = [
        distance(
            [
                *mismatches(spec := pod(nodeSelector=selector), one),
                *shortages(requests(spec), {GPU: Decimal(0)}),
            ]
        )
        for selector, one in (({}, node("full", 2)), ({}, tainted), ({"pool": "a"}, elsewhere))
    ]
    assert distances == sorted(distances)
    assert nearest(pod(), [], []) is None
