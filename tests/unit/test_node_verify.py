"""node.verify: the real suite on this computer, and on a host that can't be reached."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpukiln.nodes.verify import exit_code
from gpukiln.verify.target import inventory_target
from gpukiln.verify.verdict import CheckResult, Verdict
from tests.support import documents

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = """\
all:
  vars: {nobody: 127.0.0.1, ansible_python_interpreter: /usr/bin/python3}
  hosts:
    here: {ansible_connection: local}
    gone: {ansible_host: "{{ nobody }}", ansible_port: 1, ansible_ssh_retries: 0}
"""


def verdict(outcome: str) -> Verdict:
    return Verdict("a", "node", "2026-01-01T00:00:00Z", 1.0, (CheckResult("x.y", "t", "boot", outcome),))


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([verdict("passed")], 0),
        ([verdict("passed"), verdict("failed")], 1),
        ([verdict("failed"), None], 1),
        ([verdict("passed"), None], 5),
        ([None], 4),
        ([verdict("not_reached")], 5),
        ([verdict("passed"), verdict("not_reached")], 5),
        ([verdict("failed"), verdict("not_reached")], 1),
    ],
)
def test_exit_codes(verdicts, code):
    assert exit_code(verdicts) == code


NO_PYTHON = """\
all:
  hosts:
    bare: {ansible_connection: local, ansible_python_interpreter: /nonexistent/python3}
    bare-too: {ansible_connection: local, ansible_python_interpreter: /nonexistent/python3}
"""


def verify(folder, *options, inventory=INVENTORY):
    (folder / "hosts.yml").write_text(inventory)
    done = subprocess.run(
        [
            *(Path(sys.executable).parent / "invoke", "node.verify"),
            *("--inventory", folder / "hosts.yml", *options, "--json"),
        ],
        cwd=ROOT,
        env={**os.environ, "GPUKILN_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, documents.read(done.stdout)["hosts"] if done.stdout else None


def test_each_host_is_judged_or_says_why_not(tmp_path):
    done, found = verify(tmp_path)
    gone, here = sorted(found, key=lambda one: one["host"])
    assert gone["verdict"] is None
    assert gone["reason"].startswith("gone can't be verified: Task failed: ")
    # Ansible may still write to ssh when ssh has ended.
    assert gone["reason"].endswith(("Connection refused", "Broken pipe"))
    assert here["verdict"]["profile"] == "node"
    assert sum(here["verdict"]["counts"].values()) > 30
    assert "here (node): " in done.stderr
    # this computer may be anything, even a GPU node
    assert done.returncode == (5 if here["verdict"]["passed"] else 1)
    [report] = (tmp_path / "home/nodes").glob("*-verify-*/here/results.json")
    assert json.loads(report.read_text()) == here["verdict"]
    [page] = (tmp_path / "home/nodes").glob("*-verify-*/report.html")
    assert f"report: {page}" in done.stderr
    text = page.read_text()
    assert "Connection refused" in text
    assert 'id="m1-versions.driver-agrees"' in text
    # one line a host: the checks of several at once would be a jumble
    assert "    FAILED  " not in done.stderr


def test_a_host_alone_shows_its_checks_as_they_come(tmp_path):
    done, [here] = verify(tmp_path, "--limit", "here")
    shown = [
        line
        for line in done.stderr.splitlines()
        if re.match(r"    (passed|FAILED|not run|not reached) ", line)
    ]
    assert [line.split(" s  ")[1].split()[0] for line in shown] == [
        c["id"] for c in here["verdict"]["checks"]
    ]


def test_a_profile_that_is_none(tmp_path):
    done, _ = verify(tmp_path, "--limit", "here", "--profile", "nodes")
    assert done.returncode == 2
    assert "wanted one of image, node, eks-node" in done.stderr


def test_a_host_without_python_is_one_clear_finding_that_nobody_else_may_read(tmp_path):
    before = os.umask(0)
    try:
        done, found = verify(tmp_path, inventory=NO_PYTHON)
    finally:
        os.umask(before)
    assert done.returncode == 4, done.stderr
    assert [(one["host"], one["verdict"]) for one in found] == [("bare", None), ("bare-too", None)]
    assert found[0]["reason"].startswith("bare can't be verified: found no python3 (")
    assert found[0]["reason"].endswith("install it")
    assert done.stderr.count("found no python3") == 2
    assert "Traceback" not in done.stderr
    assert "JSONDecodeError" not in done.stderr
    nodes = tmp_path / "home/nodes"
    paths = [nodes, *nodes.rglob("*")]
    assert len(paths) > 5
    assert not {str(p): oct(p.stat().st_mode) for p in paths if p.stat().st_mode & 0o077}


def test_too_little_time_is_no_pass_and_is_kept_to(tmp_path):
    started = time.monotonic()
    done, found = verify(tmp_path, "--limit", "here", "--max-seconds", "10")
    assert time.monotonic() - started < 20  # the command itself has to start too
    assert done.returncode in (1, 4, 5), done.stderr
    assert not (found[0]["verdict"] and found[0]["verdict"]["passed"])
    done, _ = verify(tmp_path, "--limit", "here", "--max-seconds", "9")
    assert done.returncode == 2
    assert "--max-seconds is 9, wanted 10 or more" in done.stderr


def test_hosts_are_reached_as_ansible_reaches_them():
    target = inventory_target("gpu-1", Path("/a b/hosts.yml"))
    assert target.hostspec == "ansible://gpu-1?ansible_inventory=/a%20b/hosts.yml&force_ansible=true"
    assert target.address == "gpu-1 of /a b/hosts.yml"
