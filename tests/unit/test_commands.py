"""What is typed wrong or was left half done: commands as they are typed, without a cloud or an engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpukiln.commands import docker
from gpukiln.docker import build, engines, verify
from gpukiln.docker.builds import ContainerBuild
from gpukiln.errors import BusyError
from gpukiln.release.log import ReleaseLog
from tests.support.docker_records import a_build, a_plan, a_verdict
from tests.support.exit_codes import invoke

BUILD = "20261121-200000-runner-gpu-0000"


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line; returns its exit code, output and errors."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))

    def run(*words: str) -> tuple[Any, str, str]:
        code: Any = 0
        try:
            invoke([*words])
        except SystemExit as error:
            code = error.code
        shown = capsys.readouterr()
        return code or 0, shown.out, shown.err

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ami.timings --last x", "--last 'x' is not a whole number"),
        ("ami.prune --older-than=-5", "--older-than '-5' is not a whole number"),
        ("ami.release last --channel candidate --timeout 1.5", "--timeout '1.5' is not a whole number"),
        ("ami.release last --channel candidate --yes-public x", "--yes-public is for --public"),
        ("node.verify --forks many", "--forks 'many' is not a whole number"),
        ("docker.check --driver 535.309.01 --image runner-gpuu", "did you mean runner-gpu?"),
        ("docker.check --driver 535", "'535' is no version"),
        (
            "docker.push --repository 111122223333.dkr.ecr.us-west-2.amazonaws.com/a --region eu-west-1",
            "is in us-west-2, not in eu-west-1",
        ),
        ("docker.plan runner-gpu --engine dockre", "unknown engine 'dockre'"),
        ("cloud.gpus i-1 --on --off", "--on and --off"),
        ("cloud.gpus i-1 --load 0:x:900", "wanted GPU:PID:MIB[:PERCENT]"),
        ("cloud.gpus i-1 --scenario hott", "did you mean hot?"),
        ("cloud.gpus i-1 --recording none.json", "none.json is no recording of a GPU host"),
        ("cloud.gpus i-1 --interrupt", "unknown machine 'i-1'"),
        ("cloud.gpus all --set 1.lost=true", "one machine at a time"),
        ("cloud.gpus all --scarce us-west-2x:g5.xlarge", "us-west-2x"),
        ("cloud.gpus all --plenty us-west-2a:g5.xlarge", "unknown scarcity rule"),
    ],
)
def test_what_is_typed_wrong_is_named_before_anything_is_done(typed: Any, words: str, message: str) -> None:
    code, out, err = typed(*words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_scarcity_is_scripted_without_a_machine(typed: Any) -> None:
    code, out, err = typed(
        "cloud.gpus", "all", "--scarce", "us-west-2a:p4d.24xlarge", "--scarce", "*:g5.*:spot"
    )
    assert (code, out.splitlines()) == (0, ["scarce  us-west-2a:p4d.24xlarge", "scarce  *:g5.*:spot"])
    assert "no machine has simulated GPUs" in err
    code, out, _ = typed("cloud.gpus", "all", "--plenty", "us-west-2a:p4d.24xlarge", "--json")
    assert (code, json.loads(out)) == (
        0,
        {"schema": "cloud.gpus/1", "machines": [], "scarce": ["*:g5.*:spot"], "interruption": None},
    )
    scripted = ["quota:L-DB2E81BA:8", "reservation:us-west-2a:p5.48xlarge:2"]
    code, out, _ = typed("cloud.gpus", "all", "--scarce", scripted[0], "--scarce", scripted[1], "--json")
    assert (code, json.loads(out)["scarce"]) == (0, ["*:g5.*:spot", *scripted])
    assert typed("cloud.gpus", "all", "--plenty", "all")[1] == ""


def test_settings_and_scenarios_are_listed(typed: Any) -> None:
    code, out, _ = typed("cloud.gpus", "all", "--list")
    assert code == 0
    assert "temperature" in out
    assert "fallen-off-bus" in out
    assert json.loads(typed("cloud.gpus", "all", "--list", "--json")[1])["settings"]["power"] == "watts drawn"


def test_a_number_is_read(typed: Any) -> None:
    code, out, _ = typed("ami.timings", "--last", "3", "--json")
    assert (code, json.loads(out)) == (0, {"schema": "ami.timings/1", "builds": []})


def test_a_damaged_record_of_a_release_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / "a.json").write_text("{")
    (tmp_path / "releases" / "b.json").write_text('{"cloud": "aws", "regions": [{"region": "us-west-2"}]}')
    assert ReleaseLog(tmp_path).regions("aws") == ["us-west-2"]
    assert "a.json can't be read, so its regions are skipped" in caplog.text


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerBuild:
    """An image of the digest that is planned, whose verification has failed or did not come about."""
    made = a_build(tmp_path / "docker" / "builds" / BUILD, verdict=None)
    made.write(replace(made.read(), state="built"))
    monkeypatch.setattr(engines, "find_engine", lambda _wanted: None)
    monkeypatch.setattr(docker.ContainerOptions, "plan", lambda _: a_plan())
    monkeypatch.setattr(build, "find_existing_build", lambda *_: made)
    return made


def test_a_second_build_judges_what_the_first_has_not(
    typed: Any, there: ContainerBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = [a_verdict(passed=False), a_verdict()]
    judged = []

    def judge(build: ContainerBuild, _progress: object) -> tuple[Any, Any]:
        judged.append(build.id)
        return there.read(), verdicts[len(judged) - 1]

    monkeypatch.setattr(verify, "verify_container", judge)
    code, out, err = typed("docker.build", "runner-gpu", "--dry-run", "--json")
    assert (code, json.loads(out)["built"], judged) == (0, False, [])
    assert "nothing to build" in err
    assert typed("docker.build", "runner-gpu", "--no-verify")[0] == 0
    assert judged == []
    assert typed("docker.build", "runner-gpu")[0] == 1
    code, out, _ = typed("docker.build", "runner-gpu", "--json")
    assert (code, json.loads(out)["built"], judged) == (0, False, [BUILD, BUILD])


def test_one_process_judges_or_pushes_a_build(typed: Any, there: ContainerBuild) -> None:
    with there.locked():
        for words in (["docker.verify", BUILD], ["docker.push", "--repository", "localhost:1/a"]):
            code, _, err = typed(*words)
            assert code == BusyError.exit_code
            assert "another process works on build" in err
        code, _, err = typed("docker.push", "--repository", "localhost:1/a", "--dry-run")
        assert "another process works on" not in err  # who only looks waits for nobody
        assert code not in (0, BusyError.exit_code)


def test_a_damaged_newest_build_is_not_passed_over(typed: Any, there: ContainerBuild) -> None:
    newer = there.folder.with_name("20991231-235959-runner-gpu-0000")
    newer.mkdir()
    (newer / "record.json").write_text("{")
    for name in ("runner-gpu", newer.name):
        code, _, err = typed("docker.show", name)
        assert code == 2
        assert f"next: remove {newer} if you don't need it" in err
    assert typed("docker.show", BUILD)[0] == 0
