"""Live nodes: converge a booted machine, again, and tell what somebody changed on it by hand."""

import json
import subprocess

import pytest

from tests.support.harness import SSH_OPTIONS, Node
from tests.support.roles import PROGRAMS, install_collection, outside

pytestmark = pytest.mark.e2e

# the driver's module takes ten minutes to compile; the image's build proves that role
LEFT_OUT = "nvidia_driver,nvidia_persistenced,nvidia_container_toolkit"
# Of a user who has the collection and no checkout; 181 s is no default, so there is something to change.
FOREIGN = """\
- hosts: all
  become: true
  gather_subset: [min]
  vars: {gpu_bootstrap_wait_s: 181, gpu_tools_health: true}
  roles: [gpukiln.node.gpu_bootstrap, gpukiln.node.gpu_tools, gpukiln.node.container_runtime]
"""


@pytest.fixture(scope="module")
def node(here, key, tmp_path_factory):
    with Node(here, key, tmp_path_factory.mktemp("live")) as made:
        yield made.instance


@pytest.fixture(scope="module")
def inventory(here, key, node, tmp_path_factory):
    variables = {
        "ansible_user": "admin",
        "ansible_port": here.ssh_port(node),
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": " ".join(SSH_OPTIONS),
    }
    file = tmp_path_factory.mktemp("inventory") / "hosts.json"
    hosts = {node["PrivateIpAddress"]: {}, "gone": {"ansible_host": "127.0.0.1", "ansible_port": 1}}
    file.write_text(json.dumps({"all": {"hosts": hosts, "vars": variables}}))
    return file


def node_command(here, command, inventory, *options, leave_out=LEFT_OUT, ok=True):
    done = here.invoke(
        f"node.{command}", "--inventory", str(inventory), "--leave-out", leave_out, "--json", *options, ok=ok
    )
    return done, json.loads(done.stdout)


def test_a_fresh_node_tells_what_would_change(here, inventory, node, key):
    """Everything but the toolkit, whose repository this machine may not reach."""
    name = node["PrivateIpAddress"]
    before = here.ssh(node, key, "dpkg -l | wc -l; ls /etc/docker /etc/gpukiln 2>&1").stdout
    _, found = node_command(
        here, "apply", inventory, "--check", "--limit", name, leave_out="nvidia_container_toolkit"
    )
    changes = "".join(change["diff"] for change in found["hosts"][name]["changes"])
    assert "NVIDIA driver 535.309.01" in changes
    assert {"+docker.io", "+nvtop", "+nvidia-persistenced"} <= set(changes.splitlines())
    assert here.ssh(node, key, "dpkg -l | wc -l; ls /etc/docker /etc/gpukiln 2>&1").stdout == before


def test_a_node_is_converged_and_stays_so(here, inventory, node, key):
    name = node["PrivateIpAddress"]
    done, first = node_command(here, "apply", inventory, ok=False)
    assert done.returncode == 5, "one of two hosts can't be reached"
    assert first["hosts"][name]["state"] == "changed", first["hosts"][name]["failure"]
    assert first["unfinished"] == ["gone"]
    assert here.ssh(node, key, "systemctl is-active docker containerd").stdout == "active\nactive\n"
    assert here.ssh(node, key, "systemctl --failed --no-legend").stdout == ""

    _, second = node_command(here, "apply", inventory, "--limit", name)
    assert (second["hosts"][name]["state"], second["hosts"][name]["changes"]) == ("ok", [])

    resumed = here.invoke("node.apply", "--resume", first["id"], "--leave-out", LEFT_OUT, ok=False)
    assert resumed.returncode == 4
    assert "1 host: 1 unreachable" in resumed.stdout


def test_what_was_changed_by_hand_is_found_and_left(here, inventory, node, key):
    name = node["PrivateIpAddress"]
    node_command(here, "drift", inventory, "--limit", name)
    tampered = 'echo \'{"log-driver": "none"}\' | sudo tee /etc/docker/daemon.json'
    here.ssh(node, key, tampered)
    done, found = node_command(here, "drift", inventory, "--limit", name, ok=False)
    assert done.returncode == 1
    [change] = [change for change in found["hosts"][name]["changes"] if change["diff"]]
    assert "native.cgroupdriver" in change["diff"]
    assert "json-file" not in change["diff"], "how it logs is the site's own choice"
    assert here.ssh(node, key, "cat /etc/docker/daemon.json").stdout == '{"log-driver": "none"}\n'


def test_what_the_login_shell_prints_is_no_obstacle(here, inventory, node, key):
    """Ansible and the doctor ask a machine whose user is greeted also where nobody logs in."""
    name = node["PrivateIpAddress"]
    here.ssh(node, key, 'sed -i \'1i echo "welcome to {gpu-1}"; trap "echo bye" EXIT\' ~/.bashrc')
    assert here.ssh(node, key, "true").stdout.startswith("welcome")
    done = here.invoke(
        "node.doctor",
        "--inventory",
        str(inventory),
        "--limit",
        name,
        "--json",
        "--max-seconds",
        "120",
        ok=False,
    )
    [judged] = json.loads(done.stdout)["hosts"]
    assert judged["verdict"], judged["reason"]
    assert judged["diagnosis"].startswith(
        "No NVIDIA GPU is on the PCI bus, and no NVIDIA driver is installed"
    )
    assert done.returncode == 1


def test_a_node_that_cannot_be_reached_does_not_differ(here, inventory):
    done, found = node_command(here, "drift", inventory, "--limit", "gone", ok=False)
    assert done.returncode == 4
    assert found["hosts"]["gone"]["state"] == "unreachable"


def test_the_collection_converges_a_node_without_a_checkout(here, inventory, node, key, tmp_path):
    installed = install_collection(tmp_path)
    (tmp_path / "site.yml").write_text(FOREIGN)
    command = [PROGRAMS / "ansible-playbook", "-i", inventory, "--limit", node["PrivateIpAddress"]]
    # A control socket below this folder would have a longer name than sockets may.
    environment = {**outside(tmp_path, installed), "ANSIBLE_SSH_ARGS": "-o ControlMaster=no"}
    recaps = []
    for _ in range(2):
        done = subprocess.run(
            [*command, "site.yml"],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        recaps.append(done.stdout.rpartition("PLAY RECAP")[2])
    assert "changed=0" not in recaps[0]
    assert "changed=0" in recaps[1], done.stdout
    settings = here.ssh(node, key, "cat /etc/gpukiln/bootstrap.env; gpukiln-gpu --help | head -n 1").stdout
    assert "\nWAIT_S=181\n" in settings
    assert "Usage: gpukiln-gpu" in settings
    assert "\nactive\nactive\n" in here.ssh(node, key, "echo; systemctl is-active docker containerd").stdout
