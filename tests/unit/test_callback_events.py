"""The callback gpukiln_events: a real play, read back from its file; and what it says of a failure."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "ansible" / "plugins" / "callback" / "gpukiln_events.py"
spec = importlib.util.spec_from_file_location("gpukiln_events", PLUGIN)
assert spec
assert spec.loader
events = importlib.util.module_from_spec(spec)
spec.loader.exec_module(events)

PLAY = """\
- name: Try
  hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - name: Pass
      ansible.builtin.debug:
        msg: hello
    - name: Skip
      ansible.builtin.debug:
      when: false
    - name: Break
      ansible.builtin.command:
        argv: [sh, -c, "echo out; echo the reason >&2; exit 3"]
"""


def play(folder: Path, **environment: str) -> list[dict[str, Any]]:
    (folder / "play.yml").write_text(PLAY)
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", folder / "play.yml"],
        env={
            **{name: value for name, value in os.environ.items() if name != "GPUKILN_EVENTS"},
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CALLBACKS_ENABLED": "gpukiln_events",
            "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_standard_error_that_is_cut_keeps_its_end_and_says_so() -> None:
    said = events.failure_message({"msg": "failed", "rc": 1, "stderr": "\n".join(map(str, range(40)))})
    assert said.splitlines()[1:4] == ["exit code 1", "... 25 lines left out", "25"]
    assert said.endswith("39")


def test_a_play_becomes_events(tmp_path: Path) -> None:
    found = play(tmp_path, GPUKILN_EVENTS=str(tmp_path / "events.jsonl"))
    assert [e["event"] for e in found] == ["task_start", "task_end"] * 3 + ["stats"]
    actions = [e["action"].rpartition(".")[2] for e in found if e["event"] == "task_start"]
    assert actions == ["debug", "debug", "command"]
    ends = [e for e in found if e["event"] == "task_end"]
    assert [(e["task"], e["status"]) for e in ends] == [
        ("Pass", "ok"),
        ("Skip", "skipped"),
        ("Break", "failed"),
    ]
    assert "the reason" in ends[-1]["msg"]
    assert "exit code 3" in ends[-1]["msg"]
    assert ends[-1]["play"] == "Try"
    assert ends[-1]["duration_s"] >= 0
    assert found[-1]["hosts"]["localhost"]["failures"] == 1


def test_without_a_file_it_does_nothing(tmp_path: Path) -> None:
    assert play(tmp_path) == []


def test_a_loop_names_its_failed_items() -> None:
    result = {
        "msg": "One or more items failed",
        "results": [
            {"item": "a", "failed": False},
            {"item": "b", "failed": True, "msg": "no such thing", "stderr": "line 1\nline 2"},
        ],
    }
    assert events.failure_message(result) == "b: no such thing\nline 1\nline 2"


def test_a_censored_result_stays_hidden() -> None:
    assert events.failure_message({"censored": "hidden", "msg": "s3cret"}) == events.CENSORED


def test_secrets_are_removed() -> None:
    key_id = "AKIA" + "ABCDEFGHIJKLMNOP"
    text = f"get http://me:hunter2@mirror.example.com/x with {key_id} and password=hunter2"
    said = events.failure_message({"msg": text})
    assert "hunter2" not in said
    assert key_id not in said
    assert "http://(left out)@mirror.example.com/x" in said


def test_a_key_that_the_cut_leaves_without_its_beginning_is_removed() -> None:
    key = f"{'-' * 5}BEGIN OPENSSH PRIVATE KEY{'-' * 5}\n" + "hunter2\n" * 40
    said = events.failure_message({"msg": "m", "stderr": key})
    assert "hunter2" not in said
    item = {"item": {"password": "hunter2"}, "failed": True, "msg": "no"}
    assert "hunter2" not in events.failure_message({"results": [item]})


def test_long_output_keeps_its_end() -> None:
    said = events.failure_message({"msg": "m", "stderr": "\n".join(f"line {n}" for n in range(100))})
    assert said.endswith("line 99")
    assert "line 10\n" not in said
    assert len(events.failure_message({"msg": "x" * 10_000})) < 5000
