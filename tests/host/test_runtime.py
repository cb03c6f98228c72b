"""Docker and containerd run with their configuration, and know the GPUs."""

import pytest

from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check

ALL = ("image", "node", "eks-node", "workspace")
TOOLKIT = "component:nvidia_container_toolkit"
NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")  # CUDA opens both in addition to the GPU's own node
JOURNAL = "`journalctl -b -u {0}` on the machine shows what the daemon refuses."


@check(
    id="runtime.docker",
    title="Docker is active and answers",
    layer="runtime",
    profiles=ALL,
    needs=("systemd", "component:docker"),
    causes=(
        "daemon.json has a key that this version does not know, or that the unit sets as a flag too",
        "containerd does not run",
    ),
    fix=JOURNAL.format("docker"),
)
def test_docker(facts):
    state = facts["boot"]["units"]["docker.service"]["ActiveState"]
    assert state == "active", f"docker.service is {state}, wanted active"
    info = (
        facts["docker"]["info"]
        if facts["docker"]["installed"]
        else {"rc": 127, "error": "dockerd: not found"}
    )
    assert info["rc"] == 0, f"`docker info` exits {info['rc']}: {info['error']}"
    assert info["version"], "`docker info` names no server version, wanted the daemon's answer"
    assert not info["errors"], f"`docker info` reports {'; '.join(info['errors'])}"
    facts.note(f"Docker {info['version']}")


@check(
    id="runtime.daemon-json",
    title="Docker accepts its daemon.json, and was started after it was written",
    layer="runtime",
    profiles=ALL,
    needs=("systemd", "component:docker"),
    causes=(
        "it was edited manually, or by a tool that overwrites instead of merging",
        "it was written after Docker had started",
    ),
    fix="Merge into /etc/docker/daemon.json instead of overwriting it; `dockerd --validate` names a wrong "
    "key. Restart Docker after a change.",
)
def test_daemon_json(facts):
    assert facts["docker"]["installed"], "dockerd is missing, wanted Docker"
    daemon_json = facts["docker"]["daemon_json"]
    if not daemon_json["present"]:
        facts.note("no daemon.json: Docker runs with its defaults")
        return
    assert not daemon_json["problem"], (
        f"/etc/docker/daemon.json is {daemon_json['problem']}, wanted a JSON object"
    )
    state = facts["boot"]["units"]["docker.service"]["ActiveState"]
    assert state == "active", f"docker.service is {state}: it does not run with its daemon.json"
    # None where this Docker is too old for --validate.
    check = facts["docker"]["validate"]
    assert check is None or check["rc"] == 0, f"`dockerd --validate` says: {check['error']}"
    # Docker reads daemon.json only when it starts or gets SIGHUP.
    entered = facts["boot"]["units"]["docker.service"]["ActiveEnterTimestampMonotonic"]
    # The timestamp is in microseconds since boot (systemd's monotonic clock).
    running_s = facts["boot"]["uptime_s"] - int(entered or 0) / 1e6
    assert daemon_json["age_s"] >= running_s - 5, (
        f"daemon.json was written {daemon_json['age_s']:.0f} s ago, Docker started {running_s:.0f} s ago: it "
        "runs with another configuration"
    )


@check(
    id="runtime.containerd",
    title="containerd is active and its configuration can be loaded",
    layer="runtime",
    profiles=ALL,
    needs=("systemd", "component:containerd"),
    causes=("a file in conf.d has another schema version than this containerd",),
    fix=JOURNAL.format("containerd"),
)
def test_containerd(facts):
    state = facts["boot"]["units"]["containerd.service"]["ActiveState"]
    containerd = facts["containerd"]
    assert state == "active", f"containerd.service is {state}, wanted active"
    assert containerd["rc"] == 0, f"`containerd config dump` exits {containerd['rc']}: {containerd['error']}"


@check(
    id="runtime.docker-nvidia",
    title="Docker knows the nvidia runtime, and it is the default",
    layer="runtime",
    profiles=ALL,
    needs=("component:docker", TOOLKIT),
    causes=(
        "`nvidia-ctk runtime configure` did not run, or Docker was not restarted after it",
        "daemon.json was replaced by another one",
    ),
    after=("runtime.docker",),
    fix="`nvidia-ctk runtime configure --runtime=docker --nvidia-set-as-default`, then restart Docker.",
)
def test_docker_nvidia(facts):
    info = (
        facts["docker"]["info"] if facts["docker"]["installed"] else {"runtimes": [], "default_runtime": None}
    )
    listed = ", ".join(info["runtimes"]) or "none"
    assert "nvidia" in info["runtimes"], f"Docker's runtimes are {listed}; wanted nvidia among them"
    # Containers that do not choose a runtime get the GPUs only with the default runtime.
    assert info["default_runtime"] == "nvidia", (
        f"the default runtime is {info['default_runtime']}, wanted nvidia"
    )


@check(
    id="runtime.containerd-nvidia",
    title="containerd knows the nvidia runtime, also after the machine joined a cluster",
    layer="runtime",
    profiles=ALL,
    needs=("component:containerd", TOOLKIT),
    causes=(
        "the main configuration does not import the drop-in",
        "nodeadm, or bootstrap.sh of Ubuntu's EKS images, rewrote the configuration when the node joined",
    ),
    after=("runtime.containerd",),
    fix="`nvidia-ctk runtime configure --runtime=containerd`, then restart containerd.",
)
def test_containerd_nvidia(facts):
    node = facts["nodeadm"]
    # nodeadm writes containerd's configuration from the NodeConfig and replaces what is there now.
    if node["installed"] and not node["configured"] and node["config"] != "given":
        had = "no" if node["config"] == "none" else "a rehearsed"
        pytest.skip(f"nodeadm writes containerd's configuration, and had {had} NodeConfig: {node['error']}")
    runtimes = facts["containerd"]["runtimes"]
    assert "nvidia" in runtimes, (
        f"containerd's runtimes are {', '.join(runtimes) or 'none'}; wanted nvidia among them"
    )
    for template, left in facts["containerd"]["joined"].items():
        joined = f"with {template}, which /etc/eks/bootstrap.sh installs as its configuration"
        assert left["rc"] == 0, f"{joined}, containerd does not start: {left['error']}"
        assert "nvidia" in left["runtimes"], (
            f"{joined}, containerd's runtimes are {', '.join(left['runtimes']) or 'none'}; wanted nvidia "
            "among them"
        )


@check(
    id="runtime.cdi",
    title="The CDI specification exists, names the loaded driver, and has the device nodes that CUDA opens",
    layer="runtime",
    profiles=ALL,
    needs=("gpu", "real-gpu", TOOLKIT),
    causes=(
        "the driver was changed after the specification was generated",
        "nvidia-cdi-refresh did not run at boot",
        "nvidia-uvm was not loaded when the specification was generated: nvidia-ctk lists the nodes that "
        "exist",
    ),
    after=("versions.driver-installed",),
    fix="Run `nvidia-modprobe -u -c 0`, then `systemctl restart nvidia-cdi-refresh`, or "
    "`nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml`.",
)
def test_cdi(facts):
    """nvidia-smi never opens nvidia-uvm: without that node a container lists its GPUs, but CUDA fails.

    NVIDIA/nvidia-container-toolkit, issue 50 and pull request 1979.
    """
    specs, loaded = facts["gpus"]["cdi"], facts["gpus"]["module"]
    assert specs, "found no specification of nvidia.com/gpu in /etc/cdi or /var/run/cdi"
    drivers = {path: spec["drivers"] for path, spec in specs.items()}
    # A specification of another driver version names library files that do not exist any more.
    stale = [f"{path} names driver {', '.join(v) or 'none'}" for path, v in drivers.items() if v != [loaded]]
    assert not stale, f"{'; '.join(stale)}; wanted {loaded}"
    for path, spec in specs.items():
        lacking = [node for node in NODES if node not in spec["nodes"]]
        assert not lacking, (
            f"{path} has no {' and no '.join(lacking)}, wanted it: without it CUDA fails in every container"
        )


@check(
    id="runtime.gpu-tools",
    title="gpukiln-gpu runs, is the recorded one, and only root and its service can write the leases",
    layer="runtime",
    profiles=ALL,
    needs=("gpu-tools",),
    causes=(
        "The file was replaced or damaged.",
        "python3 is missing, or older than 3.9.",
        "The folder's owner or mode was changed.",
    ),
    fix="Apply the role gpu_tools again: `invoke node.apply --inventory FILE`.",
)
def test_gpu_tools(facts):
    tool = facts["gpu_tools"]
    assert tool["sha256"], "/usr/local/bin/gpukiln-gpu is missing, and the image's record names it"
    code = require_reached(tool["rc"])
    assert code == 0, f"gpukiln-gpu --version exits {code}: {tool['out'].strip()}"
    # node.apply may have installed a newer gpukiln-gpu on a live node; the record is that of the image.
    live = facts.profile in ("node", "eks-node")
    recorded = None if live else facts.record.get("gpu_tools", {}).get("sha256")
    assert recorded in (None, tool["sha256"]), (
        f"gpukiln-gpu is {tool['sha256'][:16]}, the image's record has {recorded[:16]}"
    )
    # Members of the group lease through the service's socket; only root may read and write the folder.
    state, expected = tool["state"], {"user": "root", "group": "root", "mode": "0700"}
    assert state == expected, f"/var/lib/gpukiln/gpus is {state or 'missing'}, wanted {expected}"
    socket, expected = tool["socket"], {"user": "root", "group": "gpu", "mode": "0660"}
    assert socket == expected, f"/run/gpukiln/gpus.sock is {socket or 'missing'}, wanted {expected}"
    facts.note(tool["out"].strip())
