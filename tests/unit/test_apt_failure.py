"""Which package source apt could not read: its own words, and the file that names the source."""

import json
from pathlib import Path

import yaml

from gpukiln.catalog.load import ROOT
from tests.support.roles import play

# Of apt 2.6.1: a dead address, and one whose password in the file apt does not show
SAID = """\
Hit:1 http://deb.example/debian bookworm InRelease
Err:2 http://127.0.0.1:9/dead stable InRelease
  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111: Connection refused)
Err:3 http://127.0.0.1:9/other jammy InRelease
  Unable to connect to 127.0.0.1:9:
Reading package lists...
"""
ERRORS = "W: Failed to fetch http://127.0.0.1:9/dead/dists/stable/InRelease  Could not connect\n"
FILES = {
    "debian.sources": "URIs: http://deb.example/debian/\n",
    "neighbour.sources": "Types: deb\nURIs: http://127.0.0.1:9/dead\nSuites: stable\n",
    "other.list": "deb http://bob:secret@127.0.0.1:9/other/ jammy main\n",
}


def _machine(folder: Path, said: str, errors: str, code: int) -> None:
    (folder / "bin").mkdir()
    for name, text in {"said": said, "errors": errors, **FILES}.items():
        (folder / name).write_text(text)
    apt = folder / "bin/apt-get"
    apt.write_text(f"#!/bin/sh\ncat {folder}/said\ncat {folder}/errors >&2\nexit {code}\n")
    apt.chmod(0o755)


def _rescued(folder: Path) -> str:
    """What the role says where the module `apt` failed without a reason."""
    [whole] = yaml.safe_load((ROOT / "roles/apt_sources/tasks/install.yml").read_text())
    [fetch] = [task for task in whole["block"] if task["name"] == "Refresh the package lists"]
    # As modules/apt.py of ansible-core says it
    failing = {"ansible.builtin.fail": {"msg": "Failed to update apt cache after 5 retries: "}}
    look, say = fetch["rescue"]
    patterns = [f"{folder}/*.sources", f"{folder}/*.list"]
    tasks = [{"block": [failing], "rescue": [{**look, "apt_failure": {"sources": patterns}}, say]}]
    plays = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}]
    events = {
        "ANSIBLE_CALLBACKS_ENABLED": "gpukiln_events",
        "GPUKILN_EVENTS": str(folder / "events"),
    }
    done = play(folder, yaml.safe_dump(plays), {}, events)
    assert done.returncode == 2, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    message: str = [row["msg"] for row in rows if row.get("status") == "failed"][-1]
    return message


def test_the_source_that_does_not_answer_is_named_with_its_file(tmp_path: Path) -> None:
    _machine(tmp_path, SAID, ERRORS, 0)
    assert _rescued(tmp_path).splitlines() == [
        "Failed to update apt cache after 5 retries.",
        "apt says of its sources:",
        "http://127.0.0.1:9/dead stable InRelease: Could not connect to 127.0.0.1:9 (127.0.0.1). - connect "
        f"(111: Connection refused) (named in {tmp_path}/neighbour.sources)",
        "http://127.0.0.1:9/other jammy InRelease: Unable to connect to 127.0.0.1:9: "
        f"(named in {tmp_path}/other.list)",
        "Repair or remove the source that fails, then run this again.",
    ]


def test_errors_of_apt_are_shown_as_they_are(tmp_path: Path) -> None:
    said = "E: The repository 'http://deb.example/debian sid Release' does not have a Release file."
    _machine(tmp_path, "", f"{said}\n", 100)
    assert said in _rescued(tmp_path)


def test_a_source_that_answers_again_is_not_blamed(tmp_path: Path) -> None:
    _machine(tmp_path, "Hit:1 http://deb.example/debian bookworm InRelease\n", "", 0)
    assert "succeeded a moment later" in _rescued(tmp_path)
