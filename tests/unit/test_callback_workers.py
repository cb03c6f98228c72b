"""The callback gpukiln_workers: what Ansible loaded is frozen in each worker that a play forks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.nodes.playbook import PlaybookRequest, run_playbook

ROOT = Path(__file__).parents[2]
LOOKUP = """\
import gc
from ansible.plugins.lookup import LookupBase

class LookupModule(LookupBase):
    def run(self, terms, variables=None, **options):
        return [gc.get_freeze_count()]
"""
PLAY = """\
- name: Look
  hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - name: Ask a worker
      ansible.builtin.debug:
        msg: "frozen objects: {{ lookup('frozen') }}"
"""


@pytest.fixture
def playbook(tmp_path: Path) -> Path:
    (tmp_path / "lookup_plugins").mkdir()
    (tmp_path / "lookup_plugins/frozen.py").write_text(LOOKUP)
    (tmp_path / "play.yml").write_text(PLAY)
    return tmp_path / "play.yml"


def frozen(text: str) -> int:
    [line] = [line for line in text.splitlines() if "frozen objects:" in line]
    return int("".join(filter(str.isdigit, line)))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_workers_of_a_play_do_not_collect_what_was_loaded(playbook: Path, enabled: bool) -> None:
    other = {} if enabled else {"ANSIBLE_CALLBACKS_ENABLED": "gpukiln_events"}
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", playbook],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **other},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (frozen(done.stdout) > 10_000) == enabled
    assert not done.stderr


def test_those_of_nodes_do_not_either(playbook: Path, tmp_path: Path) -> None:
    """ansible-runner has callbacks of its own, and sets where Ansible looks for them."""
    inventory = tmp_path / "inventory"
    inventory.write_text("localhost ansible_connection=local\n")
    run_playbook(
        PlaybookRequest(str(playbook), inventory), ["localhost"], tmp_path, lambda _host, _said: None
    )
    log = (tmp_path / "ansible.log").read_text()
    assert frozen(log) > 10_000
    assert "WARNING" not in log
