"""The example inventory: Ansible reads it, and every variable of ours in it exists."""

import json
import subprocess
import sys
from pathlib import Path

from gpukiln.catalog.roles import load_roles

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "ansible/inventory/example.yml"
# What ansible/node.yml itself takes, and the other name of nvidia_container_toolkit_docker2.
PLAYBOOK = {"gpukiln_left_out", "gpukiln_also", "gpukiln_batch", "nvidia_docker2"}


def unknown(variables: set[str]) -> set[str]:
    known = {variable.name for role in load_roles() for variable in role.variables} | PLAYBOOK
    return {name for name in variables if not name.startswith("ansible_")} - known


def test_ansible_reads_it_and_every_variable_is_one_of_a_role():
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-inventory", "-i", EXAMPLE, "--list"],
        stdin=subprocess.DEVNULL,  # Ansible refuses one that another test's ssh made non-blocking
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hosts = json.loads(done.stdout)["_meta"]["hostvars"]
    assert len(hosts) > 5
    assert unknown({name for variables in hosts.values() for name in variables}) == set()
    text = (ROOT / "ansible/node.yml").read_text()
    assert all(name in text for name in PLAYBOOK - {"nvidia_docker2"})


def test_a_variable_that_nobody_has_is_found():
    assert unknown({"ansible_user", "nvidia_driver_branch", "nvidia_driver_brunch"}) == {
        "nvidia_driver_brunch"
    }
