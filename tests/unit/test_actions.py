"""What others take from this repository in CI: two GitHub actions and a hook of pre-commit.

Their shell runs as a runner runs it; `gpukiln` is a stand-in that starts this checkout's commands.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.catalog.load import ROOT
from gpukiln.cli.main import command
from gpukiln.options import options_of

K8S, AMI = (
    yaml.safe_load((ROOT / f"actions/{name}/action.yml").read_text()) for name in ("k8s-check", "ami-build")
)
[HOOK] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
GPUKILN = """\
#!{python}
import json, os, sys
sys.path.insert(0, {root!r})
if "TEST_RESULT" in os.environ:
    with open(os.environ["TEST_ASKED"], "w") as asked:
        json.dump(sys.argv[1:], asked)
    print(os.environ["TEST_RESULT"])
    sys.exit(os.environ.get("TEST_ERROR"))
from gpukiln.cli.main import main
sys.exit(main())
"""
GOOD = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: settings
data: {a: b}
"""
BAD = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: train
spec:
  template:
    spec:
      containers:
        - name: train
          image: registry.example/train:1
"""


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """The environment of a step; `gpukiln` is installed already."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gpukiln").write_text(GPUKILN.format(python=sys.executable, root=str(ROOT)))
    (tmp_path / "bin/gpukiln").chmod(0o755)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/good.yaml").write_text(GOOD)
    return {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_PATH": str(tmp_path / "path"),
    }


def step(
    action: dict[str, Any], name: str, folder: Path, environment: dict[str, str], **inputs: str
) -> subprocess.CompletedProcess[str]:
    """Run a step of a composite action with the inputs that are given, and the defaults of the others."""
    [found] = [one for one in action["runs"]["steps"] if one["name"] == name]
    assert found["shell"] == "bash"
    values = {key: str(of.get("default", "")) for key, of in action["inputs"].items()} | inputs

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], text)

    own = {key: filled(value) for key, value in found.get("env", {}).items()}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", found["run"]],
        env={**environment, **own},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def outputs(environment: dict[str, str]) -> dict[str, str]:
    file = Path(environment["GITHUB_OUTPUT"])
    return dict(line.split("=", 1) for line in file.read_text().splitlines()) if file.exists() else {}


def test_what_is_found_fails_the_step_and_is_in_the_file_for_code_scanning(
    runner: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "deploy/job.yaml").write_text(BAD)
    done = step(K8S, "Check", tmp_path, runner, files="deploy/good.yaml\n  deploy/job.yaml\n")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 files, 2 objects" in done.stdout
    sarif = json.loads(Path(outputs(runner)["sarif"]).read_text())
    assert "job-restart-policy" in {found["ruleId"] for found in sarif["runs"][0]["results"]}
    skip = "job-restart-policy=another tool sets it,job-deadline"
    left = step(K8S, "Check", tmp_path, runner, files="deploy", skip=skip)
    assert "another tool sets it" in left.stdout


def test_good_manifests_pass_and_what_is_typed_wrong_uploads_nothing(
    runner: dict[str, str], tmp_path: Path
) -> None:
    assert step(K8S, "Check", tmp_path, runner, files="deploy").returncode == 0
    assert Path(outputs(runner)["sarif"]).exists()
    Path(runner["GITHUB_OUTPUT"]).unlink()
    wrong = step(K8S, "Check", tmp_path, runner, files="deploy", kubernetes="latest")
    assert wrong.returncode == 2, wrong.stderr
    assert outputs(runner) == {}, "the file of the step before is not uploaded again"


def test_a_build_says_which_image_it_made(runner: dict[str, str], tmp_path: Path) -> None:
    result = {"image_id": "ami-1", "build_id": "20260101-000000-eks-gpu-0000", "built": True}
    asked = tmp_path / "asked.json"
    environment = {**runner, "TEST_RESULT": json.dumps(result), "TEST_ASKED": str(asked)}
    done = step(AMI, "Build", tmp_path, environment, region="eu-west-1", set="nvidia_driver.branch=580")
    assert done.returncode == 0, done.stderr
    assert outputs(runner) == {"image-id": "ami-1", "build-id": result["build_id"], "built": "true"}
    words = json.loads(asked.read_text())
    assert words[:4] == ["ami", "build", "--image", "eks-gpu"]
    assert words[4:] == [
        *("--cloud", "aws", "--region", "eu-west-1", "--json"),
        *("--set", "nvidia_driver.branch=580"),
    ]
    failed = step(AMI, "Build", tmp_path, {**environment, "TEST_ERROR": "error: no credentials"})
    assert failed.returncode != 0


def test_options_of_the_actions_are_options_of_the_commands() -> None:
    for action, name in ((K8S, "k8s.check"), (AMI, "ami.build")):
        script = "".join(one["run"] for one in action["runs"]["steps"] if "run" in one)
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", script))
        assert options
        assert options <= {flag for one in options_of(command(name)) for flag in one.flags}, name


def test_what_an_action_returns_comes_of_a_step() -> None:
    for action in (K8S, AMI):
        for output in action["outputs"].values():
            match = re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.([\w-]+) \}\}", output["value"])
            assert match
            [script] = [one["run"] for one in action["runs"]["steps"] if one.get("id") == match[1]]
            texts = script + "".join(map(str, [one.get("env") for one in action["runs"]["steps"]]))
            assert f"{match[2]}=" in texts


def test_nothing_is_installed_where_the_tool_is_there_and_the_pins_are_those_of_the_lock(
    runner: dict[str, str], tmp_path: Path
) -> None:
    install = [ROOT / "actions/install.sh"]
    there = subprocess.run(install, env=runner, capture_output=True, text=True, check=False)
    assert (there.returncode, there.stdout) == (0, "")
    assert not Path(runner["GITHUB_PATH"]).exists()
    (tmp_path / "bin/gpukiln").unlink()
    python = tmp_path / "bin/python3"  # it makes an environment whose pip notes what it is asked
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\nmkdir -p "$3/bin"\n'
        f'printf \'#!/bin/sh\\necho "$@" >{tmp_path}/pip\\n\' >"$3/bin/pip"\nchmod +x "$3/bin/pip"\n'
    )
    python.chmod(0o755)
    environment = {**runner, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pip").read_text().split()[-1] == str(ROOT)
    assert Path(runner["GITHUB_PATH"]).read_text() == f"{tmp_path}/gpukiln/bin\n"
    pins = (tmp_path / "gpukiln-pins.txt").read_text().splitlines()
    locked = re.findall(r"(?m)^([a-z0-9._-]+)(?:\[.*\])?==(\S+)", (ROOT / "requirements.lock").read_text())
    assert pins == [f"{name}=={version}" for name, version in locked]
    python.write_text("#!/bin/sh\n[ \"$1\" = -c ] && exit 1\necho 'Python 3.9.2'\n")
    old = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    assert old.returncode == 4
    assert "error: found Python 3.9.2, wanted Python 3.11 or newer\nnext: " in old.stderr


def test_the_hook_passes_every_file_to_one_run(runner: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "deploy/job.yaml").write_text(BAD)
    (tmp_path / "deploy/values.yaml").write_text("resources: {limits: {cpu: 1}}\n")
    files = [f"deploy/{name}.yaml" for name in ("good", "job", "values")]
    command = [*HOOK["entry"].split(), *files]
    done = subprocess.run(command, env=runner, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "3 files" in done.stdout
    assert HOOK["require_serial"] is True
    assert HOOK["types"] == ["yaml"]
