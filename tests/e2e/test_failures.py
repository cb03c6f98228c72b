"""Whatever goes wrong in the middle, nothing stays, and the error says what to do.

Each test builds from a copy of the repository whose playbook is short and does the wrong thing.
"""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.support.harness import copy_checkout, processes_of, wait_for

pytestmark = pytest.mark.e2e

PLAYBOOK = """\
- name: A playbook of the tests
  hosts: all
  gather_facts: false
  tasks:
    - name: The task that matters
      ansible.builtin.command: {command}
      changed_when: false
"""


@pytest.fixture
def checkout(tmp_path):
    """A function that copies the repository and gives the copy a playbook of one command."""

    def make(command):
        folder = copy_checkout(tmp_path / "checkout", {})
        (folder / "ansible/image.yml").write_text(PLAYBOOK.format(command=command))
        return folder

    return make


def states(here):
    return [one["state"] for one in json.loads(here.invoke("ami.list", "--json").stdout)["builds"]]


def assert_nothing_left(here):
    left = here.leftovers()
    assert not any(left.values()), left


def wait_for_the_task(here, build, known):
    """Wait until a build that is not among the known ones has come to its playbook's task."""

    def runs():
        assert build.poll() is None, build.communicate()[0]
        events = [file for file in (here.home / "builds").glob("*/events.jsonl") if file.parent not in known]
        return events and "The task that matters" in events[0].read_text()

    wait_for(runs)


def test_a_failing_task_is_named_with_its_message_and_the_log(here, checkout):
    done = here.invoke("ami.build", "--region", "us-west-2", cwd=checkout("ls /does-not-exist"), ok=False)
    assert done.returncode == 1, done.stderr
    error = done.stderr[done.stderr.index("error:") :]
    assert "The task that matters" in error
    assert "cannot access '/does-not-exist'" in error
    assert "packer.log" in error
    assert len(error.splitlines()) < 20
    assert states(here)[0] == "failed"
    assert_nothing_left(here)


def test_ctrl_c_in_the_middle_leaves_nothing(here, checkout):
    known = list((here.home / "builds").glob("*"))
    build = here.start("ami.build", "--region", "us-west-2", cwd=checkout("sleep 300"))
    wait_for_the_task(here, build, known)
    os.killpg(build.pid, signal.SIGINT)
    output, _ = build.communicate(timeout=200)
    assert build.returncode == 130, output
    assert states(here)[0] == "aborted"
    assert_nothing_left(here)


def test_a_killed_build_is_cleaned_up_by_the_next(here, checkout):
    folder = checkout("sleep 300")
    known = list((here.home / "builds").glob("*"))
    build = here.start("ami.build", "--region", "us-west-2", cwd=folder)
    wait_for_the_task(here, build, known)
    before = here.leftovers()
    assert before["instances"]
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    wait_for(
        lambda: not processes_of(f"-var-file={here.home}/builds"), timeout_s=10
    )  # else it could make an image nobody records
    [key] = (here.home / "keys").iterdir()
    found = json.loads(here.invoke("cloud.sweep", "--json").stdout)["found"]  # hours before its deadline
    kinds = ["instance", "key pair", "security group", "private key"]
    assert [one["kind"] for one in found] == kinds
    assert found[0]["id"] == before["instances"][0]
    assert "killed" in here.invoke("ami.list").stdout

    (folder / "ansible/image.yml").write_text(PLAYBOOK.format(command="ls /does-not-exist"))
    done = here.invoke("ami.build", "--region", "us-west-2", cwd=folder, ok=False)
    assert f"removed {before['instances'][0]}" in done.stderr
    assert states(here)[:2] == ["failed", "aborted"]
    assert_nothing_left(here)
    assert not key.exists()
    temporary = Path(tempfile.gettempdir())
    assert not [
        one for one in (here.home / "builds").iterdir() if (temporary / f"gpukiln-{one.name}").exists()
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--region", "us-wst-2"), "us-west-2"),
        (("--region", "us-west-2", "--base", "debian12"), "debian-12"),
        (("--region", "us-west-2", "--image", "eks-gpus"), "eks-gpu"),
        (("--region", "us-west-2", "--cloud", "azure"), "aws"),
        (("--region", "us-west-2", "--set", "nvidia_drivers.branch=580"), "nvidia_driver"),
        (("--region", "us-west-2", "--instance-types", "g4dn.xlrge"), "g4dn.xlarge"),
    ],
)
def test_a_typo_is_a_short_error_with_the_valid_choices(here, arguments, said):
    done = here.invoke("ami.plan", *arguments, ok=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_can_never_work_is_refused_before_anything_starts(here):
    done = here.invoke("ami.build", "--region", "us-west-2", "--instance-types", "p5e.48xlarge", ok=False)
    assert done.returncode == 3
    assert "H200" in done.stderr
    assert_nothing_left(here)
