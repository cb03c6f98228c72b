"""What people type after `invoke workspace.`, against a cloud without machines: answer, error, exit code."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from gpukiln.clouds.embedded import scarcity
from gpukiln.commands import workspace as commands
from gpukiln.commands import workspace_look, workspace_place, workspace_schema
from gpukiln.commands.program import Program
from gpukiln.errors import UnavailableError
from gpukiln.instances.tags import tag_list
from gpukiln.verify.verdict import CheckResult, Verdict
from gpukiln.workspaces import health, raise_up, reach, up
from gpukiln.workspaces.lifecycle import find
from tasks import namespace
from tests.support.release_cloud import Cloud, make_image, running, server, tell, verdict

ROOT = Path(__file__).parents[2]
VISION = ("--name", "vision", "--owner", "ann")
T4 = ("--gpu", "T4:1", "--cpu", "8", "--memory", "32GiB", "--storage", "5Gi", "--region", "us-west-2")


class Said(NamedTuple):
    stdout: str
    stderr: str


Typed = Callable[..., Said]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    tell("reset")
    yield make_image("b1")
    tell("reset")


@pytest.fixture
def typed(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Typed]:
    """Run a command line of the noun, which must end with a code; the agent is done at once."""
    assert image
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    for module in (commands, workspace_look, workspace_place):
        monkeypatch.setattr(module, "cloud_of", lambda _, region, __: Cloud(region))
    monkeypatch.setattr(up, "POLL_S", 0.01)
    monkeypatch.setattr(reach, "busy", lambda *_: None)

    def run(*words: str, code: int = 0) -> Said:
        with pytest.raises(SystemExit) as ended:
            Program(namespace).run(["invoke", f"workspace.{words[0]}", *words[1:]])
        shown = Said(*capsys.readouterr())
        assert (ended.value.code or 0) == code, shown
        return shown

    yield run
    for one in ("us-west-2", "eu-west-1"):
        for found in find(Cloud(one)):
            monkeypatch.setattr(commands, "_ask_for_name", lambda _: None)
            run("down", found.name, "--force", "--owner", found.owner, "--region", one)


def tag(stage: str, name: str = "gpukiln:stage") -> None:
    ids = list(running())
    Cloud().client("ec2").create_tags(Resources=ids, Tags=tag_list({name: stage}))


def raised(typed: Typed, *more: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(typed("up", *VISION, *T4, "--no-wait", "--json", *more).stdout)
    tag("done")
    return document


def test_the_schema_is_published() -> None:
    assert json.loads((ROOT / "docs/workspace.schema.json").read_text()) == workspace_schema.schema()


def test_every_document_has_its_published_form(typed: Typed) -> None:
    schema = workspace_schema.schema()
    for document in (
        raised(typed),
        json.loads(typed("show", "vision", "--json").stdout),
        json.loads(typed("list", "--json").stdout),
        json.loads(typed("status", "vision", "--json").stdout),
        json.loads(typed("usage", "--json").stdout),
    ):
        jsonschema.Draft202012Validator(schema).validate(document)


def test_a_workspace_is_listed_shown_and_put_away(typed: Typed) -> None:
    done = raised(typed)
    machine = done["workspace"]["machines"][0]["instance_id"]
    assert machine in typed("list").stdout
    shown = typed("show", "vision").stdout
    assert "0.752 USD/hour" in shown
    assert "export GPUKILN_WORKSPACE=vision" in typed("env", "vision").stdout
    assert f"HostKeyAlias={machine}" in typed("ssh", "vision", "--print").stdout
    stopped = json.loads(typed("stop", "vision", "--json").stdout)
    assert stopped["workspace"]["machines"][0]["state"] == "stopped"
    assert "wanted running" in typed("ssh", "vision", code=4).stderr
    assert "stopped" in typed("start", "vision", "--no-wait").stderr or running()
    kept = typed("down", "vision", "--keep-home")
    assert "is kept" in kept.stderr
    assert "home " in typed("list").stdout
    assert typed("show", "vision").stdout.splitlines()[-1].endswith("kept")
    assert "has no machine now" in typed("status", "vision", code=4).stderr
    typed("down", "vision", "--owner", "ann")
    assert "this computer knows no workspace" in typed("show", "vision", code=2).stderr
    used = json.loads(typed("usage", "--json").stdout)
    assert [(one["owner"], one["running"]) for one in used["owners"]] == [("ann", False)]
    assert "ann" in typed("usage").stdout


def test_what_is_typed_wrong_is_told_before_anything_is_done(typed: Typed) -> None:
    assert "--name is missing" in typed("up", "--owner", "ann", code=2).stderr
    assert "--owner is missing" in typed("up", "--name", "vision", code=2).stderr
    assert "no workspace is named" in typed("show", code=2).stderr
    assert "small letters" in typed("up", "--name", "V", "--owner", "ann", code=2).stderr
    assert "unknown service 'olama'" in typed("up", *VISION, *T4, "--service", "olama", code=2).stderr
    assert "no machine in us-west-2 has" in typed("up", *VISION, "--gpu", "A100:1", code=3).stderr
    assert "desktop" in typed("up", *VISION, *T4, "--set", "capabilities.gui_vnc=true", code=3).stderr
    assert "everybody" in typed("up", *VISION, *T4, "--ssh-from", "0.0.0.0/0", code=2).stderr
    assert "for Windows" in typed("up", *VISION, *T4, "--set", "capabilities.gui_rdp=true", code=2).stderr
    assert running() == {}


def test_a_file_is_the_contract(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "vision.yaml"
    file.write_text(
        "workspace_name: vision\nowner: ann\nregion: us-west-2\ncompute_profile: {storage: 5Gi}\n"
    )
    done = json.loads(typed("up", "--from", str(file), "--gpu", "T4:1", "--no-wait", "--json").stdout)
    assert done["workspace"]["homes"][0]["size_gib"] == 5
    file.write_text("workspace_name: vision\nowner: ann\nsubnet_id: subnet-1\n")
    assert "subnet_ids: [" in typed("up", "--from", str(file), code=2).stderr


def test_nobody_has_capacity(typed: Typed) -> None:
    layout = server()[1]
    for zone in "abcd":
        scarcity.add(layout, f"us-west-2{zone}:*")
    try:
        done = typed("up", *VISION, *T4, code=75)
    finally:
        scarcity.clear(layout)
    assert "InsufficientInstanceCapacity" in done.stderr
    assert "no capacity now" in done.stderr


def test_somebody_elses_is_not_put_away_by_mistake(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    tag("ann is there", "gpukiln:busy")
    assert "somebody works on vision" in typed("down", "vision", code=6).stderr
    monkeypatch.setattr("gpukiln.workspaces.keys.state_home", lambda: Path("/nowhere"))
    assert "this computer did not start it" in typed("down", "vision", code=6).stderr
    assert "not on this computer" in typed("ssh", "vision", code=6).stderr


def test_a_home_is_removed_when_its_name_is_typed(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("visions\n"))
    assert "another name was typed" in typed("down", "vision", code=6).stderr
    assert running()
    monkeypatch.setattr("sys.stdin", Terminal("vision\n"))
    assert "is removed" in typed("down", "vision").stderr


def test_what_is_left_over_is_listed(typed: Typed) -> None:
    done = raised(typed)
    ec2 = Cloud().client("ec2")
    machine, home = done["workspace"]["machines"][0], done["workspace"]["homes"][0]
    ec2.terminate_instances(InstanceIds=[machine["instance_id"]])
    ec2.delete_volume(VolumeId=home["volume_id"])
    assert "left over in us-west-2: vision" in typed("list", "--refresh").stdout
    typed("down", "vision")
    assert "vision" not in typed("list", "--refresh").stdout


def test_a_home_is_moved(typed: Typed) -> None:
    zone = raised(typed)["workspace"]["homes"][0]["zone"]
    other = "us-west-2b" if zone != "us-west-2b" else "us-west-2a"
    assert "stop the workspace first" in typed("move", "vision", "--zone", other, code=75).stderr
    typed("down", "vision", "--keep-home")
    assert f"in {other}" in typed("move", "vision", "--zone", other).stdout
    again = raised(typed)
    assert again["workspace"]["machines"][0]["zone"] == other
    assert "--zone is missing" in typed("move", "vision", code=2).stderr


@dataclass
class Suite:
    """The verification suite's place: what it says of each machine in turn."""

    says: list[Verdict | Exception]

    def __call__(self, *_: object, **__: object) -> Verdict:
        answer = self.says.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_deep_look_is_kept_with_the_workspace(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    bad = verdict(failed=[("gpu.xid", "Xid 79")])
    monkeypatch.setattr(health, "run_suite", Suite([bad, UnavailableError("can't be reached"), verdict()]))
    done = typed("status", "vision", "--deep", code=1)
    assert "unhealthy: gpu.xid" in done.stdout
    assert "unhealthy: gpu.xid" in typed("status", "vision", code=1).stdout
    assert "unhealthy: can't be reached" in typed("status", "vision", "--deep", code=1).stdout
    answer = json.loads(typed("status", "vision", "--deep", "--json").stdout)
    assert answer["health"].startswith("healthy: 1 checks passed")
    assert answer["verdict"]["passed"] is True
    assert "healthy" in typed("list", "--refresh").stdout


def test_a_deep_look_shows_each_check_once(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is looked at; what is printed at the end is what failed, and the counts."""
    raised(typed)
    well = verdict()

    def judged(*_: object, on_check: Callable[[CheckResult], None], **__: object) -> Verdict:
        for result in well.checks:
            on_check(result)
        return well

    monkeypatch.setattr(health, "run_suite", judged)
    done = typed("status", "vision", "--deep")
    lines = (done.stdout + done.stderr).splitlines()
    assert [sum(one.id in line for line in lines) for one in well.checks] == [1] * len(well.checks)
    assert "1 passed" in done.stdout


def test_a_start_looks_whether_it_is_well(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    bad = verdict(failed=[("gpu.xid", "Xid 79")])
    monkeypatch.setattr(health, "run_suite", Suite([bad, verdict()]))
    monkeypatch.setattr(up, "wait_until_done", lambda *_, **__: tag("done"))
    typed("stop", "vision")
    done = typed("start", "vision", code=1)
    assert "vision is unhealthy: gpu.xid" in done.stderr
    typed("stop", "vision")
    assert "healthy: 1 checks passed" in typed("start", "vision").stdout


def test_an_unhealthy_machine_is_replaced_by_the_next(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = verdict(failed=[("gpu.xid", "Xid 79")])
    monkeypatch.setattr(health, "run_suite", Suite([bad, verdict()]))
    monkeypatch.setattr(raise_up, "wait_until_done", lambda *_, **__: tag("done"))
    done = typed("up", *VISION, *T4, "--replace-unhealthy", "--json")
    assert "g4dn.2xlarge) is put away: vision is unhealthy: gpu.xid" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["workspace"]["machines"][0]["instance_type"] != "g4dn.2xlarge"
    assert answer["outputs"]["health"].startswith("healthy")
    assert len(running()) == 1
    assert len(answer["workspace"]["homes"]) == 1
