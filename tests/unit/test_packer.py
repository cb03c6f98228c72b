"""Packer's machine-readable lines, and its failures as errors."""

import contextlib
import io
import json
import os
import re
import shutil
import stat
import subprocess

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.errors import CheckFailedError, UnavailableError
from gpukiln.images import packer
from gpukiln.images.bake import packer_variables
from gpukiln.images.packer import Packer, _parse
from gpukiln.verify.target import new_machine_target


def test_lines_are_unescaped():
    line = "1700000000,,ui,say,==> null.node: one%!(PACKER_COMMA) two\\nthree\n"
    assert _parse(line) == ("say", "==> null.node: one, two\nthree")
    assert _parse("1700000000,null.node,error,it broke\n") == ("error", "it broke")
    assert _parse("not machine readable\n") == ("text", "not machine readable")


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A build with a stand-in for Packer: a script that prints lines, writes events and ends."""

    def make(lines, events, code, script=""):
        tool = tmp_path / "bin" / "packer"
        tool.parent.mkdir()
        prints = "\n".join(f"printf '%s\\n' '{line}'" for line in lines)
        writes = "\n".join(
            f"printf '%s\\n' '{json.dumps(event)}' >> '{tmp_path}/events.jsonl'" for event in events
        )
        tool.write_text(f"#!/bin/sh\n{prints}\n{writes}\n{script}\nexit {code}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(packer, "_path", lambda: f"{tool.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        said = []
        folder = tmp_path / "template"
        folder.mkdir()
        made = Packer(
            folder,
            {"ssh_host": "192.0.2.1"},
            environment={},
            log=tmp_path / "packer.log",
            events=tmp_path / "events.jsonl",
            say=said.append,
            doing=lambda task: said.append(f"starts: {task}"),
        )
        return made, said

    return make


def test_a_failed_task_is_the_error_not_a_page_of_packer(build, tmp_path):
    task = {"event": "task_end", "task": "nvidia_driver : Install", "host": "default", "status": "failed"}
    made, _ = build(["1,,ui,say,==> x: Provisioning"], [{**task, "msg": "no such package\nE: 404"}], 1)
    with pytest.raises(CheckFailedError) as caught:
        made.build()
    assert caught.value.message == "the task `nvidia_driver : Install` failed"
    assert caught.value.details == ("no such package", "E: 404")
    assert str(tmp_path / "packer.log") in caught.value.hint


def test_another_failure_shows_packers_own_error(build):
    made, _ = build(["1,x,error,Timeout waiting for SSH."], [], 1)
    with pytest.raises(UnavailableError) as caught:
        made.build()
    assert caught.value.details == ("Timeout waiting for SSH.",)


def test_steps_and_tasks_are_told_and_everything_is_logged(build, tmp_path):
    made, said = build(
        [
            "1,,ui,say,==> null.node: Waiting for SSH to become available...",
            "1,,ui,say,--> null.node: Did not export anything. This is the null builder",
        ],
        [
            {"event": "task_start", "task": "nvtop : Install"},
            {"event": "task_end", "task": "nvtop : Install", "status": "changed"},
        ],
        0,
    )
    made.build()
    assert sorted(said) == [
        "Waiting for SSH to become available...",
        "nvtop : Install",
        "starts: nvtop : Install",
    ]
    assert "Waiting for SSH to become available..." in (tmp_path / "packer.log").read_text()


@pytest.mark.parametrize("code", [0, 1])
def test_a_log_without_room_is_the_error_of_a_build_that_failed_only(build, monkeypatch, code):
    full = io.TextIOWrapper(io.BufferedWriter(io.FileIO("/dev/full", "w")))
    monkeypatch.setattr(packer, "open_private", lambda *_: full)
    made, said = build(["1,,ui,say,==> null.node: a step"], [], code)
    with pytest.raises(OSError, match="No space left") if code else contextlib.nullcontext():
        made.build()
    assert said == ["a step"]


def test_a_task_that_is_skipped_is_not_told_as_one_that_ran(build):
    rows = [("dcgm : Install", "skipped"), ("nvtop : Install", "ok"), ("dcgm : Start", "ignored")]
    events = [
        event
        for task, status in rows
        for event in (
            {"event": "task_start", "task": task},
            {"event": "task_end", "task": task, "status": status},
        )
    ]
    made, said = build([], events, 0)
    made.build()
    assert [line for line in said if not line.startswith("starts: ")] == ["nvtop : Install", "dcgm : Start"]


def test_an_event_that_is_half_written_when_it_is_read_is_told_when_it_is_whole(build, tmp_path):
    script = (
        f"""printf '{{"event": "task_start", "ta' >> '{tmp_path}/events.jsonl'; sleep 1\n"""
        f"""echo 'sk": "in two halves"}}' >> '{tmp_path}/events.jsonl'"""
    )
    made, said = build([], [], 0, script)
    made.build()
    assert said == ["starts: in two halves"]


@pytest.fixture
def packer_init(tmp_path, monkeypatch):
    """A stand-in for a Packer with plugins: `init` fails as often as asked and says what was asked."""

    def make(says, fails):
        tool = tmp_path / "bin" / "packer"
        tool.parent.mkdir()
        tool.write_text(
            "#!/bin/sh\n"
            "[ $1 = version ] && echo 'Packer v1.15.3' && exit\n"
            f"echo again >>'{tmp_path}/calls'\n"
            f"[ $(wc -l <'{tmp_path}/calls') -gt {fails} ] && exit\n"
            f"echo '{says}' >&2; exit 1\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        monkeypatch.setattr(packer, "INIT_RETRY_PAUSES_S", (0, 0))
        packer.prepare_template(ROOT / "ami/eks-gpu", tmp_path / "template")

    return make


def test_plugins_that_a_network_lost_once_are_asked_for_again(packer_init, tmp_path):
    packer_init("connection reset by peer", fails=2)
    assert (tmp_path / "calls").read_text() == "again\n" * 3


def test_plugins_that_can_not_be_had_are_an_error_after_three_times(packer_init, tmp_path):
    with pytest.raises(UnavailableError, match="plugins can't be installed") as caught:
        packer_init("no such host", fails=9)
    assert caught.value.details == ("no such host",)
    assert (tmp_path / "calls").read_text() == "again\n" * 3


def test_the_limit_of_github_names_the_token_and_is_not_tried_again(packer_init, tmp_path, monkeypatch):
    monkeypatch.delenv("PACKER_GITHUB_API_TOKEN", raising=False)
    with pytest.raises(UnavailableError) as caught:
        packer_init("* Plugin host rate limited the plugin getter. Try again in 3m52s.", fails=9)
    assert "PACKER_GITHUB_API_TOKEN" in caught.value.hint
    assert (tmp_path / "calls").read_text() == "again\n"


@pytest.fixture
def variables(tmp_path):
    """Every variable of eks-gpu's template, as a build fills them."""
    key = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "vars.json").write_text("{}")
    target = new_machine_target("i-1", "192.0.2.1", port=2222, user="admin", private_key=key)
    return packer_variables(target, tmp_path / "vars.json")


def packer_validate(folder, variables):
    if not shutil.which("packer"):
        pytest.skip("packer is not on PATH (scripts/run installs it as root)")
    packer.prepare_template(ROOT / "ami/eks-gpu", folder / "template")
    values = folder / "values.pkrvars.json"
    values.write_text(json.dumps(variables))
    return subprocess.run(
        ["packer", "validate", f"-var-file={values}", str(folder / "template")],
        env={**os.environ, "CHECKPOINT_DISABLE": "1", "PATH": packer._path()},
        capture_output=True,
        text=True,
        check=False,
    )


def test_packer_finds_the_template_valid(tmp_path, variables):
    done = packer_validate(tmp_path, variables)
    assert done.returncode == 0, done.stdout + done.stderr


def test_packer_validate_can_fail(tmp_path, variables):
    done = packer_validate(tmp_path, {**variables, "ssh_host": ""})
    assert done.returncode != 0
    assert "a Host must be specified" in done.stdout + done.stderr


def test_the_template_is_given_exactly_the_variables_it_declares(variables):
    """A variable that bake fills and the template does not have would end a build after minutes."""
    template = (ROOT / "ami/eks-gpu/eks-gpu.pkr.hcl").read_text()
    declared = re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', template, re.MULTILINE | re.DOTALL)
    assert {name for name, body in declared if "default" not in body} <= set(variables)
    assert set(variables) <= {name for name, _ in declared}


def test_packer_is_given_no_way_to_a_cloud():
    """gpukiln starts, stops and captures the machine, so that an image has its tags when it is made."""
    texts = [file.read_text() for file in (ROOT / "ami").rglob("*.pkr.hcl")]
    sources = re.findall(r'^source "([\w-]+)"', "\n".join(texts), re.MULTILINE)
    assert sources == ["null"]
    assert not [text for text in texts if re.search(r"amazon|aws_|access_key", text)]
