"""Runs on nodes: real Ansible on hosts of this process, one that fails, one that can't be reached."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from gpukiln.errors import UnavailableError, UsageError
from gpukiln.nodes.converge import exit_code
from gpukiln.nodes.playbook import (
    PlaybookRequest,
    list_hosts,
    read_inventory,
    require_known_variables,
    run_playbook,
    ungrouped_warning,
)
from gpukiln.nodes.results import Collector, HostResult, RunResult
from gpukiln.nodes.runs import NodeRun, RunStore
from gpukiln.nodes.view import render, summary
from gpukiln.typed import dump

INVENTORY = """\
all:
  vars: {ansible_python_interpreter: /usr/bin/python3}
  hosts:
    good: {ansible_connection: local}
    bad: {ansible_connection: local, breaks: true}
    gone: {ansible_host: 127.0.0.1, ansible_port: 1, ansible_ssh_retries: 0}
    later: {ansible_connection: local}
"""
PLAYBOOK = """\
- hosts: all
  gather_facts: false
  serial: [3, 1]
  tasks:
    - name: Write
      ansible.builtin.copy: {content: "new\\n", dest: "%s/{{ inventory_hostname }}"}
    - name: Break
      ansible.builtin.command: ls /does-not-exist
      changed_when: false
      when: breaks | default(false)
    - name: After
      ansible.builtin.debug: {msg: here}
    - name: Begin no further batch when a host has failed
      ansible.builtin.meta: end_play
      when: ansible_play_hosts_all | difference(ansible_play_hosts) | length > 0
"""


SECRETS_PLAYBOOK = r"""
- hosts: all
  gather_facts: false
  tasks:
    - name: Say
      ansible.builtin.debug:
        msg: {"password": "hunter2", "url": "https://bob:hunter2@example.com/", "key": "KEY"}
    - name: Say again
      ansible.builtin.command:
        argv: [echo, "--token", hunter2, '{"password": "hunter2"}', "Authorization: Bearer hunter2.x"]
      changed_when: false
    - name: Write
      ansible.builtin.copy: {content: "password: hunter2\n", dest: "%s"}
    - name: Break
      ansible.builtin.command:
        argv: [sh, -c, "echo API_TOKEN=hunter2 >&2; echo the end of it >&2; exit 3"]
"""


@pytest.fixture
def request_of(tmp_path):
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    (tmp_path / "files").mkdir()
    playbook = tmp_path / "site.yml"
    playbook.write_text(PLAYBOOK % (tmp_path / "files"))

    def make(**more):
        return PlaybookRequest(playbook=str(playbook), inventory=tmp_path / "inventory.yml", **more)

    return make


def run(request: PlaybookRequest, folder: Path) -> RunResult:
    folder.mkdir(exist_ok=True)
    hosts = [request.limit] if request.limit else ["good", "bad", "gone", "later"]
    return run_playbook(request, hosts, folder, lambda *_: None)


def test_every_host_has_its_own_outcome_and_a_failed_batch_is_the_last(request_of, tmp_path):
    """And it is found again with what it did not finish."""
    request = request_of()
    result = run(request, tmp_path / "run")
    states = {host.name: host.state for host in result.hosts.values()}
    assert states == {"good": "changed", "bad": "failed", "gone": "unreachable", "later": "not_reached"}
    assert result.unfinished == ["bad", "gone", "later"]
    assert "Break: " in result.hosts["bad"].failure
    assert "/does-not-exist" in result.hosts["bad"].failure
    assert result.hosts["good"].tasks == 2
    assert result.task_seconds["Write"] > 0
    assert "Connection refused" in result.hosts["gone"].failure
    assert "/does-not-exist" in (tmp_path / "run/hosts/bad.log").read_text()
    assert summary(result) == "4 hosts: 1 changed, 1 failed, 1 unreachable, 1 not reached"

    runs = RunStore(tmp_path)
    kept = runs.create("apply")
    kept.write(request, result)
    assert runs.find("last").read()["unfinished"] == ["bad", "gone", "later"]
    assert json.loads(kept.file.read_text())["hosts"]["good"]["state"] == "changed"
    with pytest.raises(UsageError, match="no run 'nonsense'"):
        runs.find("nonsense")


def test_no_secret_is_in_a_log_or_a_record_and_nobody_else_may_read_them(tmp_path, monkeypatch):
    monkeypatch.setenv("APP_TOKEN", "hunter2-of-the-environment")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    key = f"{'-' * 5}BEGIN RSA PRIVATE KEY{'-' * 5}\\nMIIhunter2\\n"
    playbook = tmp_path / "site.yml"
    playbook.write_text(SECRETS_PLAYBOOK.replace("KEY", key) % (tmp_path / "secret"))
    folder = RunStore(tmp_path / "home").create("apply").folder
    before = os.umask(0)
    try:
        request = PlaybookRequest(playbook=str(playbook), inventory=tmp_path / "inventory.yml", limit="good")
        result = run(request, folder)
        NodeRun(folder).write(request, result)
    finally:
        os.umask(before)
    said = json.dumps(dump(result))
    assert "hunter2" not in said
    assert "+password: (left out)" in result.hosts["good"].changes[-1].diff
    assert "the end of it" in result.hosts["good"].failure
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"ansible.log", "good.log", "lock", "run.json"}
    for path in files:
        assert "hunter2" not in path.read_text(), path
        assert path.name == "lock" or "the end of it" in path.read_text(), path
    modes = {path.stat().st_mode & 0o777 for path in (*files, folder, folder / "hosts", folder.parent)}
    assert modes == {0o600, 0o700}
    assert not list((tmp_path / "tmp").iterdir()), "what Runner keeps has the whole environment"


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["ok", "changed"], 0),
        (["unreachable", "unreachable"], 4),
        (["unreachable", "not_reached"], 4),
        (["ok", "unreachable"], 5),
        (["ok", "failed"], 5),
        (["failed", "unreachable"], 1),
    ],
)
def test_exit_codes(states, code):
    result = RunResult({str(n): HostResult(str(n), state) for n, state in enumerate(states)})
    assert exit_code(result) == code


def test_check_mode_shows_the_difference_and_changes_nothing(request_of, tmp_path):
    (tmp_path / "files/good").write_text("old\n")
    result = run(request_of(limit="good", check=True), tmp_path / "run")
    [change] = result.hosts["good"].changes
    assert change.task == "Write"
    assert "-old\n+new\n" in change.diff
    assert (tmp_path / "files/good").read_text() == "old\n"
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(render(result, check=True))
    assert "+new" in console.export_text()


def test_a_second_run_changes_nothing_and_ctrl_c_works_after_it(request_of, tmp_path):
    run(request_of(limit="good"), tmp_path / "one")
    assert run(request_of(limit="good"), tmp_path / "two").hosts["good"].state == "ok"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_hosts_of_the_inventory(request_of):
    assert list_hosts(request_of(limit="good,later")) == ["good", "later"]
    assert list_hosts(request_of()) == ["good", "bad", "gone", "later"]
    with pytest.raises(UsageError) as caught:
        list_hosts(request_of(limit="goood"))
    assert "leaves no host" in caught.value.message
    assert "good, bad, gone, later" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [("all: {}\n", "has no host"), ("- not\n- an inventory\n", "can't read the inventory"), (None, "no inv")],
)
def test_an_inventory_that_is_none(tmp_path, text, message):
    file = tmp_path / "hosts.yml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        list_hosts(PlaybookRequest(playbook="node.yml", inventory=file))


def test_a_playbook_that_ansible_refuses(request_of, tmp_path):
    (tmp_path / "site.yml").write_text("- hosts: all\n  tasks: [{no.such.module: {}}]\n")
    with pytest.raises(UnavailableError, match="before it came to a host") as caught:
        run(request_of(limit="good"), tmp_path / "run")
    assert "no.such.module" in "\n".join(caught.value.details)


def test_the_diffs_of_a_loop_are_one_change():
    collector = Collector(["a"])
    base = {"host": "a", "task": "Loop", "role": "r"}
    item = {"diff": {"before": "x\n", "after": "y\n"}, "changed": True}
    collector.take({"event": "runner_item_on_ok", "event_data": {**base, "res": item}})
    collector.take({"event": "runner_item_on_ok", "event_data": {**base, "res": item}})
    collector.take({"event": "runner_on_ok", "event_data": {**base, "res": {"changed": True, "results": []}}})
    [change] = collector.result.hosts["a"].changes
    assert change.task == "r : Loop"
    assert change.diff.count("-x\n+y\n") == 2


# ansible-core 2.18, plugins/action/__init__.py, _make_tmp_path; the first is mkdir's own stderr.
FULL = "mkdir: cannot create directory \u2018/root/.ansible/tmp/x\u2019: No space left on device\n"
NO_FOLDER = (
    "Failed to create temporary directory. In some cases, you may have been able to authenticate and did not"
    " have permissions on the target directory. Consider changing the remote tmp path in ansible.cfg to a"
    ' path rooted in "/tmp", for more error information use -vvv. Failed command was: ( umask 77 && mkdir -p'
    ' "` echo'
    ' /root/.ansible/tmp `"&& mkdir ), exited with result 1'
)


@pytest.mark.parametrize(
    ("message", "state", "words"),
    [
        (
            FULL,
            "failed",
            "the host answers, and a file system is full, in bytes (`df -h`)",
        ),
        (FULL.replace("No space left on device", "Read-only file system"), "failed", "is read-only"),
        (NO_FOLDER, "failed", "the host answers, and Ansible can't make its temporary folder there"),
        (NO_FOLDER.replace("result 1", "result 255"), "unreachable", "Failed to create"),
        ("Failed to connect to the host via ssh: Connection refused", "unreachable", "Connection refused"),
    ],
)
def test_a_host_that_answers_is_not_called_unreachable(message, state, words):
    collector = Collector(["a"])
    data = {"host": "a", "task": "Look", "res": {"msg": message, "unreachable": True}}
    collector.take({"event": "runner_on_unreachable", "event_data": data})
    collector.take({"event": "playbook_on_stats", "event_data": {"dark": {"a": 1}, "processed": {"a": 1}}})
    host = collector.result.hosts["a"]
    assert host.state == state
    assert words in host.failure


def test_a_home_that_can_not_be_written_to_is_named_by_ansible_itself(request_of, tmp_path, monkeypatch):
    """Over a connection that is not `local`: Ansible makes its temporary folder on the host then."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "elsewhere.py").write_text(
        "from ansible.plugins.connection.local import Connection as Local, DOCUMENTATION\n"
        "class Connection(Local):\n"
        "    transport = 'elsewhere'\n"
        "    _remote_is_local = False\n"
    )
    request = request_of(
        limit="good",
        variables={"ansible_connection": "elsewhere", "ansible_remote_tmp": "/proc/no/tmp"},
    )
    monkeypatch.setenv("ANSIBLE_CONNECTION_PLUGINS", str(folder))
    host = run(request, tmp_path / "run").hosts["good"]
    assert (host.state, "the host answers" in host.failure) == ("failed", True), host.failure


def test_a_slip_in_a_yaml_inventory_is_shown_with_its_position(tmp_path):
    """Not the complaint of the INI parser, which Ansible tries last."""
    file = tmp_path / "hosts.yml"
    file.write_text("all:\n  hosts:\n    gpu-1: {ansible_host: 192.0.2.1\n    gpu-2: {}\n")
    with pytest.raises(UsageError, match=r"is no YAML: line 4, column 10: ") as caught:
        list_hosts(PlaybookRequest(playbook="node.yml", inventory=file))
    assert "INI" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nvidia_drver_sign", "nvidia_driver_sign"),
        ("nvidia_driver_singing_key", "nvidia_driver_signing_key"),
        ("nvidia_driver_sign", ""),
        ("site_of_this_machine", ""),
    ],
)
def test_a_misspelt_variable_of_a_role_is_refused_with_the_nearest_name(tmp_path, name, near):
    file = tmp_path / "hosts.yml"
    file.write_text(f"all:\n  vars: {{{name}: true}}\n  hosts:\n    gpu-1: {{}}\n")
    request = PlaybookRequest(playbook="node.yml", inventory=file)
    if not near:
        require_known_variables(request, read_inventory(request))
        return
    with pytest.raises(UsageError, match=f"gpu-1 has the variable {name}, which no role has") as caught:
        require_known_variables(request, read_inventory(request))
    assert f"is {near} meant?" in caught.value.hint


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """An inventory with a host that is in no group, and what Ansible reads in it."""
    file = tmp_path_factory.mktemp("mixed") / "hosts.yml"
    file.write_text(
        "all:\n  hosts: {bastion: {}}\n  children:\n    h100: {hosts: {gpu-1: {}}}\n"
        "    site: {children: {t4: {hosts: {gpu-2: {}}}}}\n"
    )
    return file, read_inventory(PlaybookRequest(playbook="node.yml", inventory=file))


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            "",
            "in no group of hosts.yml, and targeted too: bastion; node.yml is for every host of an inventory "
            "(--limit 'all:!ungrouped' leaves them out)",
        ),
        (
            "all:!gpu-2",
            "in no group of hosts.yml, and targeted too: bastion; --limit all:!gpu-2 matches them "
            "(--limit 'all:!gpu-2:!ungrouped' leaves them out)",
        ),
        ("h100", ""),
        ("all:!ungrouped", ""),
    ],
)
def test_hosts_of_a_mixed_inventory_that_are_in_no_group_are_named(mixed, limit, words):
    file, inventory = mixed
    request = PlaybookRequest(playbook="node.yml", inventory=file, limit=limit)
    assert ungrouped_warning(request, inventory, list_hosts(request)) == words


def test_an_inventory_without_groups_needs_no_word(request_of):
    request = request_of()
    assert ungrouped_warning(request, read_inventory(request), list_hosts(request)) == ""


def test_the_task_that_runs_is_named_with_its_host(request_of, tmp_path):
    began = []
    request = request_of(limit="good")
    (tmp_path / "run").mkdir()
    run_playbook(request, ["good"], tmp_path / "run", lambda *_: None, lambda *told: began.append(told))
    assert began[:2] == [("good", "Write"), ("good", "Break")]


# apt_pkg's and dpkg's words; the cache's: ansible-core, modules/apt.py
@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "E: dpkg was interrupted, you must manually run 'sudo dpkg --configure -a'",
            "`dpkg --configure -a`",
        ),
        ("Failed to update apt cache after 5 retries: ", "`apt-get update` on the host names the source"),
        ("Failed to update apt cache after 5 retries: no route", ""),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (apt)", "`fuser -v"),
    ],
)
def test_what_apt_says_is_followed_by_what_to_do(message, words):
    failure = failed({"msg": message})
    assert failure.startswith(f"Install: {message.strip()}")
    assert (words in failure) if words else (failure == f"Install: {message}")


def test_the_first_errors_of_a_compiler_are_shown():
    """What follows comes of them, and ends in the line with the caret."""
    log = ["nv.c:12:5: error: implicit declaration of function 'x'", *["note"] * 40, "      |    ^~~"]
    failure = failed({"msg": "non-zero return code", "stderr": "\n".join(log)})
    assert log[0] in failure
    assert "... 30 lines left out" in failure  # of 43, without the first error and the last 12


def test_a_message_that_is_cut_keeps_its_end_and_says_so():
    failure = failed({"msg": "\n".join(f"line {number}" for number in range(30))})
    assert failure.splitlines()[0] == "Install: ... 18 lines left out"
    assert failure.splitlines()[-1] == "line 29"
    assert "left out" not in failed({"msg": "\n".join("x" * 12)})


def failed(answer):
    collector = Collector(["a"])
    collector.take(
        {"event": "runner_on_failed", "event_data": {"host": "a", "task": "Install", "res": answer}}
    )
    return collector.result.hosts["a"].failure
