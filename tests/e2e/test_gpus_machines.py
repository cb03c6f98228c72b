"""gpukiln-gpu on a simulated machine: on the node itself, and from a checkout over SSH.

One with eight GPUs and MIG; tests/unit/test_gpus_views.py has the views of the other types.
"""

import json
import re

import pytest

from tests.support.engines import GPU_HOOK, small_root
from tests.support.harness import SIMULATED, Node, wait_for

pytestmark = pytest.mark.e2e
PROGRAM = "/usr/local/bin/gpukiln-gpu"


ROLE = """
- hosts: all
  become: true
  gather_facts: false
  roles: [gpu_tools]
"""
DOCKER = """
- hosts: all
  become: true
  gather_subset: [min]
  vars: {container_runtime_engines: [docker]}
  roles: [container_runtime]
"""
MIG = {
    "version": "v1",
    "mig-configs": {
        "off": [{"devices": "all", "mig-enabled": False}],
        "one": [
            {"devices": "all", "mig-enabled": False},
            {"devices": [7], "mig-enabled": True, "mig-devices": {"3g.20gb": 1, "1g.5gb": 2}},
        ],
    },
}


@pytest.fixture(scope="module")
def machine(here, key, tmp_path_factory):
    """A machine to which the role gpu_tools was applied, twice."""
    folder = tmp_path_factory.mktemp("gpus")
    kind = "{Key=gpukiln:machine,Value=privileged}"  # it runs a container engine
    tags = f"ResourceType=instance,Tags=[{SIMULATED},{kind}]"
    options = ["--instance-type", "p4d.24xlarge", "--tag-specifications", tags]
    with Node(here, key, folder, options=options) as node:
        node.converge(ROLE, gpu_tools_users=["admin"], gpu_tools_health=True, gpu_tools_limits={"hours": 48})
        yield node


@pytest.fixture
def ask(here, key, machine, tmp_path):
    """Types `invoke gpu.VERB` in the checkout, for the machine."""
    config = tmp_path / "ssh_config"
    config.write_text(
        f"Host *\n  User admin\n  IdentityFile {key}\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    host = (
        f"ssh://{machine.instance['PrivateIpAddress']}:{here.ssh_port(machine.instance)}?ssh_config={config}"
    )

    def invoke(verb, *words, command=(), ok=True):
        rest = ["--", *command] if command else []
        return here.invoke(f"gpu.{verb}", *words, "--hosts", host, *rest, ok=ok)

    return invoke


def there(machine, *words):
    """What gpukiln-gpu says on the machine itself, with --json."""
    done = machine.ssh(f"{PROGRAM} {' '.join(words)} --json")
    [node] = json.loads(done.stdout)["nodes"]
    return node


def test_the_same_is_seen_on_the_node_and_from_a_checkout(machine, ask):
    here_and_there = json.loads(ask("list", "--json").stdout)["nodes"][0], there(machine, "list")
    models = [[(one["uuid"], one["name"]) for one in node["devices"]] for node in here_and_there]
    assert models[0] == models[1]
    assert len(models[0]) == 8
    assert all(node["simulated"] and node["state"] == "ok" for node in here_and_there)
    assert "SIMULATED" in ask("list").stdout


def test_gpus_are_leased_by_a_user_who_is_not_root(machine, ask):
    granted = json.loads(ask("lease", "-n", "2", "--for", "1h", "--json").stdout)["nodes"][0]
    [lease] = there(machine, "leases")["leases"]
    assert (lease["user"], lease["devices"]) == ("admin", granted["devices"])
    rows = {one["uuid"]: one for one in there(machine, "list")["devices"]}
    assert [rows[uuid]["leases"][0]["id"] for uuid in granted["devices"]] == [lease["id"]] * 2
    assert machine.ssh(f"sudo -u nobody {PROGRAM} lease").returncode == 6
    assert ask("release", lease["id"]).stdout == f"released: {lease['id']}\n"
    assert there(machine, "leases")["leases"] == []


def test_a_command_runs_on_gpus_of_its_own_and_is_seen(here, machine, ask):
    """What it uses of a GPU is its lease's, what another one uses is nobody's."""
    pid = machine.read(
        f"nohup {PROGRAM} run --memory 1GiB -- sh -c 'echo $$ >/tmp/job; exec sleep 300' >/dev/null 2>&1 & "
        "while ! test -s /tmp/job; do sleep 0.1; done; cat /tmp/job"
    ).strip()
    [lease] = there(machine, "leases")["leases"]
    assert lease["job_pid"] == int(pid)
    other = machine.read("nohup sleep 300 >/dev/null 2>&1 & echo $!").strip()
    index = next(
        one["index"] for one in there(machine, "list")["devices"] if one["uuid"] == lease["devices"][0]
    )
    instance = machine.instance["InstanceId"]
    here.invoke("cloud.gpus", instance, "--load", f"{index}:{pid}:900:40")
    here.invoke("cloud.gpus", instance, "--load", f"{index + 1}:{other}:500:10")
    found = {
        one["pid"]: one for one in json.loads(ask("processes", "--json").stdout)["nodes"][0]["processes"]
    }
    mine, nobodys = found[int(pid)], found[int(other)]
    assert (mine["lease"], mine["user"], mine["memory_mib"]) == (lease["id"], "admin", 900)
    assert (nobodys["lease"], nobodys["memory_mib"]) == (None, 500)
    said = machine.ssh(f"{PROGRAM} lease --gpu {index + 1}")
    assert (said.returncode, "busy without a lease" in said.stderr) == (75, True), said.stderr
    machine.read(f"kill {pid} {other}")
    wait_for(lambda: there(machine, "leases")["leases"] == [])


def test_a_command_of_a_checkout_has_its_gpus_there(machine, ask):
    del machine
    done = ask("run", "-n", "2", command=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 3"), ok=False)
    assert (done.returncode, len(done.stdout.split(","))) == (3, 2), done.stderr


def test_a_lost_gpu_is_a_row_and_exit_code_5(here, machine, ask):
    instance = machine.instance["InstanceId"]
    here.invoke("cloud.gpus", instance, "--scenario", "lost")
    done = ask("list", ok=False)
    assert (done.returncode, "LOST" in done.stdout) == (5, True)
    here.invoke("cloud.gpus", instance, "--scenario", "no-driver")
    done = ask("list", ok=False)
    assert (done.returncode, "no-driver: " in done.stdout) == (4, True)
    here.invoke("cloud.gpus", instance, "--healthy")
    assert ask("list").returncode == 0


def test_it_is_watched_and_accounted_for(here, machine, ask):
    done = ask("watch", "--interval", "1", "--duration", "3", "--json")
    [node] = json.loads(done.stdout)["nodes"]
    assert len(node["devices"]) == 8
    assert all(one["energy_joules"] > 0 for one in node["devices"])
    used = there(machine, "usage", "--by user")
    assert [one["key"] for one in used["rows"]] == ["admin"]
    del here


def test_a_container_has_the_gpus_of_its_lease(machine, ask, tmp_path):
    machine.apply(DOCKER)
    machine.write("/usr/bin/nvidia-container-runtime-hook", GPU_HOOK)
    machine.read("sudo chmod 755 /usr/bin/nvidia-container-runtime-hook && sudo systemctl restart docker")
    (root := tmp_path / "root").mkdir()
    done = machine.ssh("sudo docker import - tools:1", small_root(root).read_bytes())
    assert done.returncode == 0, done.stderr
    for said in (
        machine.read(f"sudo {PROGRAM} run -n 2 --docker tools:1 -- /bin/env"),
        ask("run", "-n", "2", "--sudo", "--docker", "tools:1", command=("/bin/env",)).stdout,
    ):
        given = re.search(r"NVIDIA_VISIBLE_DEVICES=(\S+)", said)
        assert given, said
        assert set(given[1].split(",")) <= {one["uuid"] for one in there(machine, "list")["devices"]}
        assert len(given[1].split(",")) == 2
    assert there(machine, "leases")["leases"] == []


def test_its_health_is_looked_at_by_a_timer(here, machine):
    assert machine.read("systemctl is-active gpukiln-gpu-health.timer").strip() == "active"
    machine.read("sudo systemctl start gpukiln-gpu-health.service")
    here.invoke("cloud.gpus", machine.instance["InstanceId"], "--scenario", "ecc")
    done = machine.ssh(f"sudo {PROGRAM} health --textfile /tmp/gpukiln.prom")
    assert (done.returncode, "sick: gpu.ecc" in done.stdout) == (1, True), done.stdout + done.stderr
    assert "gpukiln_" in machine.read("cat /tmp/gpukiln.prom")
    machine.read("sudo systemctl start gpukiln-gpu-health.service")  # it has done its work
    here.invoke("cloud.gpus", machine.instance["InstanceId"], "--healthy")


def test_mig_is_cut_at_boot_and_its_devices_are_leased(machine, ask):
    machine.apply(ROLE, gpu_tools_users=["admin"], gpu_tools_mig_config=MIG, gpu_tools_mig_select="one")
    assert machine.read("systemctl is-active gpukiln-gpu-mig.service").strip() == "active"
    assert (
        machine.ssh("systemctl is-enabled gpukiln-gpu-health.timer").returncode != 0
    )  # not asked for any more
    parts = [one for one in there(machine, "list")["devices"] if one["kind"] == "mig"]
    assert sorted(one["profile"] for one in parts) == ["1g.5gb", "1g.5gb", "3g.20gb"]
    done = ask("run", "--mig", "3g.20gb", command=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES"))
    assert done.stdout.strip() in {one["uuid"] for one in parts if one["profile"] == "3g.20gb"}
    assert machine.ssh(f"{PROGRAM} mig assert --config /etc/gpukiln/mig.yaml --select off").returncode == 1
    machine.read(f"sudo {PROGRAM} mig apply --config /etc/gpukiln/mig.yaml --select off --yes")
    assert [one for one in there(machine, "list")["devices"] if one["kind"] == "mig"] == []


def test_what_the_role_does_not_understand_is_refused_before_anything_changes(machine):
    said = machine.refused(ROLE, gpu_tools_limits={"gpu": 4})
    assert "gpu_tools_limits, gpu_tools_busy or gpu_tools_price: [limits] has 'gpu'" in said
    said = machine.refused(ROLE, gpu_tools_mig_config=MIG, gpu_tools_mig_select="two")
    assert "gpu_tools_mig_select two, wanted a key of mig-configs in gpu_tools_mig_config: off, one" in said
