"""A cluster assigns its GPUs to pods: what its API server reports, and what the pods see.

The facts are gathered from outside, see gpukiln/kubernetes/cluster_verification.py.
"""

import pytest

from gpukiln.probe.base import NotReachedError
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts

POD = ("pod",)
PLUGIN = "`kubectl -n kube-system logs -l app.kubernetes.io/name=nvidia-device-plugin` shows what it found"


def ran(facts: Facts, name: str) -> dict:
    """A pod that ran; one that did not start is the finding of cluster.pod-starts alone."""
    pod = facts["cluster"]["pods"][name]
    # Not reached instead of failed: one cause must not make every check of the layer fail.
    if pod is None or not pod["ran"]:
        raise NotReachedError(pod["why"] if pod else "no pod was started")
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
    assert cluster["nodes"], f"no node has {cluster['selector']}"
    wrong = []
    for node in cluster["nodes"]:
        # The plugin's capacity shrinks when it marks a GPU unhealthy; the label still counts it.
        has = max(node["capacity"], node["labelled"] or 0)
        if node["problems"]:
            wrong.append(f"{node['name']}: {'; '.join(node['problems'])}")
        elif not node["allocatable"] or node["allocatable"] < has:
            wrong.append(f"{node['name']} offers {node['allocatable']} of {has} {cluster['resource']}")
    assert not wrong, "; ".join(wrong)
    total = sum(node["allocatable"] for node in cluster["nodes"])
    facts.note(f"{total} {cluster['resource']} on {len(cluster['nodes'])} nodes, {cluster['free']} free")


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
