"""The toolkit's role against a local stand-in repository: key, list, packages, Docker and containerd.

NVIDIA's repository can't be reached from every machine that runs the tests. What stands in is the repository
and nvidia-ctk; the role, apt, gpg, Docker's and containerd's configuration are real.
"""

import json
import re

import pytest

from tests.support.harness import Node
from tests.support.standin.platforms import publish
from tests.support.standin.toolkit import NAMES, toolkit

pytestmark = pytest.mark.e2e

VERSION = "1.19.1"
SERVE = (
    "sudo systemd-run --unit stand-in --working-directory /srv/stand-in "
    "python3 -m http.server -b 127.0.0.1 8080"
)
PLAYBOOK = """\
- name: Container runtime and toolkit
  hosts: all
  become: true
  gather_subset: [min]
  vars_files: ["{root}/components.yaml"]
  tasks:
    - name: Docker and containerd
      ansible.builtin.include_role: {name: container_runtime, tasks_from: install}
    - name: The toolkit
      ansible.builtin.include_role: {name: nvidia_container_toolkit, tasks_from: install}
"""


def play(node, fingerprint):
    repository = {
        "url": "http://127.0.0.1:8080",
        "suite": "/",
        "key_url": "http://127.0.0.1:8080/gpgkey",
        "key_fingerprint": fingerprint,
    }
    return node.play(
        PLAYBOOK,
        nvidia_container_toolkit_version=VERSION,
        nvidia_container_toolkit_repository={"apt": repository},
    )


@pytest.fixture(scope="module")
def node(here, key, tmp_path_factory):
    with Node(here, key, tmp_path_factory.mktemp("toolkit")) as made:
        made.read("sudo apt-get -q update && sudo apt-get -qy --no-install-recommends install gpg gpg-agent")
        # not the newest is wanted
        made.fingerprint = publish(made, "/srv/stand-in", [*toolkit(VERSION), *toolkit("1.19.2")])
        made.read(SERVE)
        # what a node that had nvidia-docker2 once looks like
        made.write("/etc/apt/sources.list.d/nvidia-docker.list", "deb http://127.0.0.1:8080 /\n")
        made.write("/etc/docker/daemon.json", '{"log-level": "warn"}\n')
        yield made


def test_a_key_with_another_fingerprint_is_refused(node):
    done = play(node, "0" * 40)
    assert done.returncode != 0
    assert node.fingerprint in done.stdout
    # 1: dpkg knows no such package
    assert node.ssh("dpkg-query -W 'nvidia-container-toolkit*'").returncode == 1


def test_the_toolkit_is_installed_and_registered(node):
    done = play(node, node.fingerprint)
    assert done.returncode == 0, done.stdout[-4000:]

    listed = node.read("cat /etc/apt/sources.list.d/nvidia-container-toolkit.*")
    assert "signed-by=" in listed.lower().replace("signed-by: ", "signed-by=")
    assert node.ssh("ls /etc/apt/sources.list.d/nvidia-docker.list").returncode != 0
    versions = node.read(f"dpkg-query -W -f '${{db:Status-Want}} ${{Version}}\\n' {' '.join(NAMES)}")
    assert versions.splitlines() == [f"hold {VERSION}-1"] * 4

    daemon = json.loads(node.read("cat /etc/docker/daemon.json"))
    assert daemon["log-level"] == "warn", "somebody else's key was lost"
    assert daemon["default-runtime"] == "nvidia"
    assert daemon["runtimes"]["nvidia"]["path"] == "nvidia-container-runtime"
    dump = node.read("sudo containerd config dump")
    assert re.search(r'default_runtime_name = "nvidia"', dump)
    assert "containerd.runtimes.nvidia]" in dump


def test_a_second_run_changes_nothing(node):
    done = play(node, node.fingerprint)
    assert re.search(r"changed=0 .*failed=0", done.stdout), done.stdout[-3000:]
