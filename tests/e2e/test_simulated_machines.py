"""Simulated GPUs of a machine without a driver of its own: of a container.

Those of a virtual machine are in test_volumes.py, where one runs.
"""

import json

import pytest

from tests.support.harness import SIMULATED, Node, wait_for

pytestmark = pytest.mark.e2e
UUIDS = "nvidia-smi --query-gpu=uuid --format=csv,noheader"


def options(instance_type, *tags):
    words = ["--instance-type", instance_type]
    return (
        [*words, "--tag-specifications", f"ResourceType=instance,Tags=[{','.join(tags)}]"] if tags else words
    )


def gpus(here, node, *arguments):
    """What `invoke cloud.gpus` says of a machine after it has done what it is asked."""
    done = here.invoke("cloud.gpus", node.instance["InstanceId"], *arguments, "--json")
    [machine] = json.loads(done.stdout)["machines"]
    return machine


@pytest.fixture(scope="module")
def container(here, key, tmp_path_factory):
    with Node(here, key, tmp_path_factory.mktemp("node"), options=options("p4d.24xlarge", SIMULATED)) as node:
        yield node


def test_programs_see_the_gpus_of_the_type(here, container):
    told = gpus(here, container)["gpus"]
    assert container.read(UUIDS).split() == [gpu["uuid"] for gpu in told]
    assert container.read("nvidia-smi -L").count("NVIDIA A100-SXM4-40GB") == 8
    assert container.read("nvidia-smi topo -m").splitlines()[1].split()[1:9] == ["X", *["NV12"] * 7]
    nodes = container.read("stat -c '%t:%T %n' /dev/nvidia*").split()
    assert nodes[::2] == [f"c3:{n}" for n in range(8)] + ["c3:ff"]
    assert container.read("systemctl is-system-running").strip() == "running"


def test_a_process_has_its_part_until_it_ends(here, container):
    pid = container.read("nohup sleep 600 >/dev/null 2>&1 & echo $!").strip()
    assert gpus(here, container, "--load", f"3:{pid}:900:40")["gpus"][3]["processes"] == [int(pid)]
    query = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv,noheader"
    assert container.read(query).strip() == f"{pid}, sleep, 900 MiB"
    assert (
        container.read("nvidia-smi -i 3 --query-gpu=utilization.gpu --format=csv,noheader").strip() == "40 %"
    )
    refused = here.invoke(
        "cloud.gpus", container.instance["InstanceId"], "--load", f"3:{pid}:999999", ok=False
    )
    assert refused.returncode == 2
    assert "Insufficient Memory" in refused.stderr
    container.read(f"kill {pid}")
    wait_for(lambda: not container.read(query).strip())


def test_what_goes_wrong_is_seen_at_once(here, container):
    asked = "--query-gpu=temperature.gpu,ecc.errors.uncorrected.volatile.total"
    gpus(here, container, "--set", "1.temperature=91", "--set", "1.ecc_uncorrected=2")
    assert container.read(f"nvidia-smi -i 1 {asked} --format=csv,noheader").strip() == "91, 2"
    gpus(here, container, "--reset", "1")
    assert container.read(f"nvidia-smi -i 1 {asked} --format=csv,noheader").strip() == "91, 0"
    for scenario, code, words in (
        ("lost", 15, "GPU is lost"),
        ("mismatch", 18, "Driver/library version mismatch"),
        ("no-driver", 9, "couldn't communicate with the NVIDIA driver"),
    ):
        gpus(here, container, "--healthy", "--scenario", scenario)
        done = container.ssh("nvidia-smi")
        assert (done.returncode, words in done.stdout) == (code, True), done.stdout
    gpus(here, container, "--healthy", "--scenario", "mig-mixed")
    assert container.read("nvidia-smi -L").count("MIG 1g.5gb") == 7
    assert [gpu["error"] for gpu in gpus(here, container, "--healthy")["gpus"]] == [None] * 8


def test_they_are_taken_and_given_while_it_runs_and_stay_the_same(here, container):
    before = container.read(UUIDS)
    assert gpus(here, container, "--off")["gpus"] == []
    gone = "command -v nvidia-smi && nvidia-smi || ls /dev/nvidia* /run/gpukiln-simulated"
    assert container.ssh(gone).returncode != 0
    assert len(gpus(here, container, "--on")["gpus"]) == 8
    assert container.read(UUIDS) == before
    instance = ("--instance-ids", container.instance["InstanceId"])
    here.aws("ec2", "stop-instances", *instance)
    here.wait("instance_stopped", container.instance)
    here.aws("ec2", "start-instances", *instance)
    here.wait("instance_running", container.instance)
    wait_for(lambda: container.here.ssh(container.instance, container.key_file, "true").returncode == 0)
    again = container.here.ssh(container.instance, container.key_file, UUIDS)
    assert again.stdout == before
