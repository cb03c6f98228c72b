"""The toolkit's role against a local stand-in repository: key, list, packages, Docker and containerd.

NVIDIA's repository can't be reached from every machine that runs the tests. What stands in is the repository
and nvidia-ctk; the role, apt, gpg, Docker's and containerd's configuration are real.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, SSH_OPTIONS, wait_for
from standin import repository

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
  vars_files: [{root}/components.yaml]
  tasks:
    - name: Docker and containerd
      ansible.builtin.include_role: {{name: container_runtime, tasks_from: install}}
    - name: The toolkit
      ansible.builtin.include_role: {{name: nvidia_container_toolkit, tasks_from: install}}
"""


class Node:
    """A fresh machine with the stand-in repository on it."""

    def __init__(self, here, key_file, folder):
        self.here, self.key_file, self.folder = here, key_file, folder
        self.instance = here.launch(here.base_id(), key_file)
        wait_for(lambda: self.ssh("cloud-init status --wait").returncode == 0)

    def ssh(self, command, stdin=b""):
        return self.here.ssh(self.instance, self.key_file, command, stdin)

    def read(self, command):
        done = self.ssh(command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def play(self, fingerprint):
        playbook = self.folder / "site.yml"
        playbook.write_text(PLAYBOOK.format(root=ROOT))
        values = {
            "nvidia_container_toolkit_version": VERSION,
            "nvidia_container_toolkit_repository": {
                "apt": {
                    "url": "http://127.0.0.1:8080",
                    "suite": "/",
                    "key_url": "http://127.0.0.1:8080/gpgkey",
                    "key_fingerprint": fingerprint,
                }
            },
            "ansible_user": "admin",
            "ansible_port": self.here.status()["server"]["ssh_port"],
            "ansible_ssh_private_key_file": str(self.key_file),
            "ansible_ssh_common_args": " ".join(SSH_OPTIONS),
        }
        return subprocess.run(
            [
                Path(sys.executable).parent / "ansible-playbook",
                "-i",
                f"{self.instance['PrivateIpAddress']},",
                playbook,
                "-e",
                json.dumps(values),
            ],
            env={**self.here.environment, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def node(here, key, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toolkit")
    fingerprint = repository.build(folder / "stand-in", version=VERSION)
    made = Node(here, key, folder)
    tar = subprocess.run(["tar", "-C", folder, "-c", "stand-in"], capture_output=True, check=True).stdout
    made.ssh("sudo tar -C /srv -x", stdin=tar)
    made.read(SERVE)
    # what a node that had nvidia-docker2 once looks like
    made.read("echo deb http://127.0.0.1:8080 / | sudo tee /etc/apt/sources.list.d/nvidia-docker.list")
    made.read("sudo mkdir -p /etc/docker")
    made.read("""echo '{"log-level": "warn"}' | sudo tee /etc/docker/daemon.json""")
    yield made, fingerprint
    here.terminate(made.instance)


def test_a_key_with_another_fingerprint_is_refused(node):
    made, fingerprint = node
    done = made.play("0" * 40)
    assert done.returncode != 0
    assert fingerprint in done.stdout
    assert not made.read("dpkg-query -W 'nvidia-container-toolkit*' 2>&1 || true").startswith("nvidia")


def test_the_toolkit_is_installed_and_registered(node):
    made, fingerprint = node
    done = made.play(fingerprint)
    assert done.returncode == 0, done.stdout[-4000:]

    listed = made.read("cat /etc/apt/sources.list.d/nvidia-container-toolkit.*")
    assert "signed-by=" in listed.lower().replace("signed-by: ", "signed-by=")
    assert made.ssh("ls /etc/apt/sources.list.d/nvidia-docker.list").returncode != 0
    versions = made.read(
        f"dpkg-query -W -f '${{db:Status-Want}} ${{Version}}\\n' {' '.join(repository.PACKAGES)}"
    )
    assert versions.splitlines() == [f"hold {VERSION}-1"] * 4

    daemon = json.loads(made.read("cat /etc/docker/daemon.json"))
    assert daemon["log-level"] == "warn", "somebody else's key was lost"
    assert daemon["default-runtime"] == "nvidia"
    assert daemon["runtimes"]["nvidia"]["path"] == "nvidia-container-runtime"
    dump = made.read("sudo containerd config dump")
    assert re.search(r'default_runtime_name = "nvidia"', dump)
    assert "containerd.runtimes.nvidia]" in dump


def test_a_second_run_changes_nothing(node):
    made, fingerprint = node
    done = made.play(fingerprint)
    assert re.search(r"changed=0 ", done.stdout), done.stdout[-3000:]
