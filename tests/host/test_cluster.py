"""A cluster assigns its GPUs to pods: what its API server reports, and what the pods see.

The facts are gathered from outside, see gpukiln/kubernetes/cluster_verification.py.
"""

import pytest

from gpukiln.probe.base import NotReachedError
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts

POD = ("pod",)
CANARY = "only on a machine that nothing else uses: `invoke ami.verify IMAGE --cluster CONTEXT`"
AGENTS = {"plugin": "device plugin", "exporter": "DCGM exporter"}
PLUGIN = "`kubectl -n kube-system logs -l app.kubernetes.io/name=nvidia-device-plugin` shows what it found"


def require_agent(facts: Facts, name: str) -> None:
    """Each node has a ready pod of a DaemonSet; not run in a cluster that has no such pod."""
    nodes = facts["cluster"]["nodes"]
    if not nodes:
        raise NotReachedError(facts["cluster"]["reason"] or f"no node has {facts['cluster']['selector']}")
    if not any(node[name] for node in nodes):
        pytest.skip(f"no pod of this cluster is NVIDIA's {AGENTS[name]}")
    agents = {node["name"]: node[name] for node in nodes}
    wrong = [
        f"{on}: {agent['name'] or 'no pod'}: {agent['problem']}"
        for on, agent in agents.items()
        if agent["problem"]
    ]
    assert not wrong, "; ".join(wrong)
    facts.note(", ".join(node[name]["name"] for node in nodes))


def ran(facts: Facts, name: str) -> dict:
    """A pod that ran; one that did not start is the finding of cluster.pod-starts alone."""
    pod = facts["cluster"]["pods"][name]
    # Not reached instead of failed: one cause must not make every check of the layer fail.
    if pod is None or not pod["ran"]:
        raise NotReachedError(pod["why"] if pod else facts["cluster"]["reason"] or "no pod was started")
    return pod


@check(
    id="cluster.allocatable",
    title="Every GPU node that was selected is ready and offers all of its GPUs",
    layer="cluster",
    profiles=POD,
    causes=(
        "the node offers 0: the device plugin does not run there, or started before the driver",
        "the node offers fewer than it has: the plugin marked a GPU unhealthy after an Xid, until it "
        "restarts",
        "no node matches: nothing sets the label nvidia.com/gpu.present, or the pool is scaled to zero",
    ),
    fix=f"{PLUGIN}; `invoke k8s.doctor` walks through the causes.",
)
def test_allocatable(facts):
    """nvidia.com/gpu.count of feature discovery counts the node's GPUs, capacity those of the plugin."""
    cluster = facts["cluster"]
    assert cluster["nodes"], cluster["reason"] or f"no node has {cluster['selector']}"
    wrong = []
    for node in cluster["nodes"]:
        # The plugin's capacity shrinks when it marks a GPU unhealthy; the label still counts it.
        has = max(node["capacity"], node["labelled"] or 0)
        if node["problems"]:
            wrong.append(f"{node['name']}: {'; '.join(node['problems'])}")
        elif not node["allocatable"] or node["allocatable"] < has:
            wrong.append(f"{node['name']} offers {node['allocatable']} of {has} {cluster['resource']}")
    # Of a canary that did not become usable: what k8s.doctor established.
    assert not wrong, "; ".join([*wrong, *filter(None, [cluster["reason"]])])
    total = sum(node["allocatable"] for node in cluster["nodes"])
    facts.note(f"{total} {cluster['resource']} on {len(cluster['nodes'])} nodes, {cluster['free']} free")


@check(
    id="cluster.device-plugin",
    title="A ready pod of the device plugin runs on every GPU node that was selected",
    layer="cluster",
    profiles=POD,
    causes=(
        "the DaemonSet does not tolerate a taint of the node, or its node selector needs another label",
        "the plugin does not find the driver: the container runtime did not inject it",
    ),
    fix=f"{PLUGIN}; `invoke k8s.doctor` names the cause.",
)
def test_device_plugin(facts):
    """EKS Auto Mode runs the plugin outside of pods, and DRA drivers need none: not run there."""
    require_agent(facts, "plugin")


@check(
    id="cluster.dcgm",
    title="A ready pod of the DCGM exporter runs on every GPU node that was selected",
    layer="cluster",
    profiles=POD,
    causes=(
        "the DaemonSet does not tolerate a taint of the node, or its node selector needs another label",
        "DCGM in the container does not know the node's driver",
    ),
    fix="`kubectl logs` of the exporter's pod shows the cause; `invoke k8s.addons` renders the exporter.",
)
def test_dcgm(facts):
    require_agent(facts, "exporter")


@check(
    id="cluster.pod-starts",
    title="A pod that asks for a GPU is scheduled and starts",
    layer="cluster",
    profiles=POD,
    causes=(
        "the reason quotes the scheduler: no GPU is free, a taint, a selector",
        "ImagePullBackOff: the node's role may not pull the image, or the node can't reach the registry",
        "the container runtime has no nvidia runtime, or no CDI specification of the GPU",
    ),
    fix="`kubectl describe pod` shows the events; `invoke k8s.doctor POD` names the cause.",
)
def test_pod_starts(facts):
    if facts["cluster"]["reason"]:
        raise NotReachedError(facts["cluster"]["reason"])
    pod = facts["cluster"]["pods"]["granted"]
    assert pod["ran"], pod["why"]
    facts.note(f"on {pod['node']}")


@check(
    id="cluster.nvidia-smi",
    title="nvidia-smi in such a pod lists its GPU",
    layer="cluster",
    profiles=POD,
    causes=(
        "the runtime did not inject the driver: nvidia is not the default runtime, and no runtimeClassName",
        "NVIDIA_DRIVER_CAPABILITIES without `utility`: nvidia-smi is not injected",
        "NVML: Unknown Error: a reload of systemd took the device away (use CDI)",
    ),
    after=("cluster.pod-starts",),
    fix="Install the NVIDIA container toolkit and make its runtime containerd's default, or use CDI.",
)
def test_nvidia_smi(facts):
    pod = ran(facts, "granted")
    assert pod["smi_exit"] == 0, f"nvidia-smi exits {pod['smi_exit']}: {pod['said']}"
    assert pod["gpus"], f"nvidia-smi lists no GPU: {pod['said']}"
    facts.note(", ".join(pod["gpus"]))


@check(
    id="cluster.labels",
    title="The node's label names the GPU that nvidia-smi lists in the pod",
    layer="cluster",
    profiles=POD,
    causes=(
        "feature discovery has not run since the GPU was replaced",
        "the node group sets nvidia.com/gpu.product for another instance type",
    ),
    after=("cluster.nvidia-smi",),
    fix="Restart the pod of gpu-feature-discovery on the node; correct the label of the node group.",
)
def test_labels(facts):
    """Feature discovery writes dashes for blanks, and a suffix such as -SHARED or -MIG-1g.5gb."""
    pod = ran(facts, "granted")
    labels = {node["name"]: node["product"] for node in facts["cluster"]["nodes"]}
    label = labels.get(pod["node"])
    if not label:
        pytest.skip(f"{pod['node']} has no label nvidia.com/gpu.product: no feature discovery")
    products = [product.replace(" ", "-") for product in pod["products"]]
    contradiction = f"the label says {label}, nvidia-smi {', '.join(products) or 'nothing'}"
    assert products, contradiction
    assert all(label.startswith(product) for product in products), contradiction
    facts.note(label)


@check(
    id="cluster.view-is-grant",
    title="A pod sees all GPUs that it was granted, and no other",
    layer="cluster",
    profiles=POD,
    causes=(
        "NVIDIA_VISIBLE_DEVICES of the pod or its image takes precedence over the device plugin's",
        "the pod is privileged, or mounts /dev",
    ),
    after=("cluster.nvidia-smi",),
    fix="Let the device plugin alone name the devices (deviceListStrategy cdi-cri or volume-mounts), and set "
    "no NVIDIA_VISIBLE_DEVICES in pods.",
)
def test_view_is_grant(facts):
    """The plugin lists the granted UUIDs in NVIDIA_VISIBLE_DEVICES; with CDI the variable has none."""
    for name in ("granted", "other"):
        if facts["cluster"]["pods"][name] is None:
            continue
        pod = ran(facts, name)
        # Compared by UUID: an index is counted anew in each container.
        asked, seen = pod["asked"], pod["gpus"]
        assert len(seen) == asked, (
            f"a pod with {asked} GPUs in its limits sees {len(seen)}: {', '.join(seen)}"
        )
        # `void` and `all` are no names of GPUs.
        named = [uuid for uuid in pod["named"] if uuid.startswith(("GPU-", "MIG-"))]
        assert not named or sorted(named) == sorted(seen), (
            f"granted {', '.join(named)}, seen {', '.join(seen)}"
        )
    facts.note(f"{len(ran(facts, 'granted')['gpus'])} requested and visible")


@check(
    id="cluster.two-pods",
    title="Two pods at once have two different GPUs",
    layer="cluster",
    profiles=POD,
    causes=("both pods see all GPUs of the node: they are not isolated", "the GPUs are shared"),
    after=("cluster.view-is-grant",),
    fix="See the fix of cluster.view-is-grant. With time slicing or MPS pods share a GPU on purpose.",
)
def test_two_pods(facts):
    cluster = facts["cluster"]
    # With time slicing or MPS several pods get the same GPU on purpose.
    if cluster["sharing"]:
        pytest.skip(f"GPUs are shared on purpose: {cluster['sharing']}")
    if cluster["pods"]["other"] is None:
        pytest.skip(f"two free GPUs are needed, found {cluster['free']}")
    first, second = ran(facts, "granted"), ran(facts, "other")
    both = set(first["gpus"]) & set(second["gpus"])
    assert not both, f"both pods have {', '.join(sorted(both))}"
    facts.note(f"{', '.join(first['gpus'])} and {', '.join(second['gpus'])}")


@check(
    id="cluster.gpu-counts",
    title="Pods that ask for two and for all GPUs of a node see exactly as many",
    layer="cluster",
    profiles=POD,
    causes=(
        "another pod took a GPU of the node meanwhile: the reason quotes the scheduler",
        "the plugin's topology policy refuses the combination",
    ),
    after=("cluster.view-is-grant",),
    fix="See the fix of cluster.view-is-grant; `invoke k8s.doctor` names who has the GPUs of a node.",
)
def test_gpu_counts(facts):
    cluster = facts["cluster"]
    if cluster["sharing"]:
        pytest.skip(f"GPUs are shared on purpose: {cluster['sharing']}")
    if not cluster["counted"]:
        ran(facts, "granted")  # without it no other pod was started
        pytest.skip("no node has two free GPUs")
    for pod in cluster["counted"]:
        assert pod["ran"], f"a pod with {pod['asked']} GPUs in its limits: {pod['why']}"
        seen = set(pod["gpus"])
        assert len(seen) == pod["asked"], (
            f"a pod with {pod['asked']} GPUs in its limits sees {len(seen)}: {', '.join(sorted(seen))}"
        )
    facts.note(" and ".join(str(pod["asked"]) for pod in cluster["counted"]) + " GPUs")


@check(
    id="cluster.isolated",
    title="A pod that asks for no GPU sees none, whatever its environment says",
    layer="cluster",
    profiles=POD,
    causes=(
        "the toolkit takes NVIDIA_VISIBLE_DEVICES of unprivileged containers, and CUDA images set it to all",
    ),
    fix="On the node: accept-nvidia-visible-devices-envvar-when-unprivileged = false in "
    "/etc/nvidia-container-runtime/config.toml; the device plugin with deviceListStrategy cdi-cri or "
    "volume-mounts (`invoke k8s.addons` renders both).",
)
def test_isolated(facts):
    pod = ran(facts, "without")
    seen = ", ".join(pod["gpus"])
    assert not pod["gpus"], f"with NVIDIA_VISIBLE_DEVICES=all and no GPU in its limits it sees {seen}"
    # A control: without it the check would pass on a cluster where no pod sees a GPU.
    with_gpu = ran(facts, "granted")
    if not with_gpu["gpus"]:  # that nvidia-smi lists none here then says nothing
        exits = with_gpu["smi_exit"]
        raise NotReachedError(f"nvidia-smi lists no GPU in a pod that has one either, and exits {exits}")
    facts.note(f"nvidia-smi exits {pod['smi_exit']} there")


@check(
    id="cluster.plugin-returns",
    title="The device plugin's pod comes back after its eviction, and the node offers all GPUs again",
    layer="cluster",
    profiles=POD,
    causes=(
        "the DaemonSet's pod does not tolerate a cordoned node, or a taint of it",
        "the plugin registers only once: the kubelet's socket changed, and it did not notice",
    ),
    after=("cluster.allocatable",),
    fix=f"{PLUGIN}.",
)
def test_plugin_returns(facts):
    eviction = facts["cluster"]["eviction"]
    if eviction is None:
        pytest.skip(CANARY)
    if not eviction["pod"]:
        pytest.skip(f"no pod of this cluster is NVIDIA's {AGENTS['plugin']}")
    assert not eviction["problem"], eviction["problem"]
    facts.note(f"{eviction['pod']}, {eviction['offered']} GPUs after {eviction['seconds']:.0f} s")


@check(
    id="cluster.rejoins",
    title="The node joins again after a reboot, and offers all GPUs",
    layer="cluster",
    profiles=POD,
    causes=(
        "the kubelet or the container runtime is not enabled, or user data configured it for one boot only",
        "the driver's modules are not loaded at boot",
    ),
    after=("cluster.allocatable",),
    fix="`journalctl -b -u kubelet -u containerd` on such a node shows the cause.",
)
def test_rejoins(facts):
    restart = facts["cluster"]["restart"]
    if restart is None:
        pytest.skip(CANARY)
    assert not restart["problem"], restart["problem"]
    facts.note(f"{restart['offered']} GPUs after {restart['seconds']:.0f} s")
