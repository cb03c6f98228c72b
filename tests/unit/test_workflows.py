"""The shell of the rebuild workflow runs in its order on the embedded cloud, without machines.

`scripts/run` is a stand-in: it starts this checkout's commands without installing anything, and plan, build
and verify only leave the record there that a real build would leave. Its image is in the cloud already.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gpukiln.images.builds import Builds
from gpukiln.instances import access
from gpukiln.nodes.scenarios import load_scenarios
from gpukiln.release.log import ReleaseLog, require_complete
from gpukiln.release.publish import release
from gpukiln.typed import dump
from tests.support.plans import BAKE
from tests.support.release_cloud import (
    HOME,
    REGIONS,
    Cloud,
    images,
    make_image,
    pointed,
    quiet,
    release_spec,
    server,
    tags,
    tell,
    verdict,
)

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples/project/.github/workflows"  # which `gpukiln init` writes
WORKFLOWS = sorted([*(ROOT / ".github" / "workflows").glob("*.yml"), *PROJECT.glob("*.yml")])
REBUILD = yaml.safe_load((ROOT / ".github/workflows/rebuild.yml").read_text())
OWN_REBUILD, OWN_PLAN = (
    yaml.safe_load((PROJECT / f"{name}.yml").read_text()) for name in ("rebuild", "plan")
)
MOLECULE = yaml.safe_load((ROOT / ".github/workflows/molecule.yml").read_text())
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
RUN = """\
#!{python}
import os, sys
sys.path.insert(0, {root!r})
from tests.support import workflow_commands
sys.exit(workflow_commands.main(sys.argv[2:]))
"""
GPUKILN = """\
#!{python}
import os, sys
sys.path.insert(0, {root!r})
from tests.support import workflow_commands
if sys.argv[1] == "config":
    from gpukiln.cli.main import main
    sys.exit(main(sys.argv[1:]))
sys.exit(workflow_commands.main([".".join(sys.argv[1:3]), *sys.argv[3:]]))
"""
GH = """\
#!{python}
import json, os, pathlib, shutil, sys
asked = sys.argv[1:]
body = pathlib.Path(asked[asked.index("--body-file") + 1]).read_text() if "--body-file" in asked else ""
with open({log!r}, "a") as log:
    log.write(json.dumps([*asked, body]) + "\\n")
if asked[:2] == ["run", "download"]:
    kept = pathlib.Path({kept!r}, asked[2] if asked[2].isdigit() else "last")
    if not kept.exists():
        sys.exit("no valid artifacts found to download")
    shutil.copytree(kept, asked[asked.index("--dir") + 1], dirs_exist_ok=True)
if asked[:2] == ["issue", "list"]:
    print(os.environ.get("OPEN_ISSUE", ""))
"""


class Runner:
    """What GitHub does with a job, for the expressions that the workflow has."""

    def __init__(self, folder, home):
        self.folder, self.kept, self.log = folder, folder / "artifact", folder / "gh.log"
        self.records, self.ran, self.fails = home / "builds", [], ""
        self.vars = {"RELEASE_REGIONS": ",".join(REGIONS), "CLOUD": "embedded"}
        for name, text in (
            ("scripts/run", RUN),
            ("bin/gpukiln", GPUKILN),
            ("bin/pip", "#!/bin/sh\n"),
            ("bin/gh", GH),
        ):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            about = {"root": str(ROOT), "python": sys.executable}
            file.write_text(text.format(**about, log=str(self.log), kept=str(self.kept)))
            file.chmod(0o755)
        url, layout = server()
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "RUNNER_TEMP": str(folder / "temp"),
            "GITHUB_RUN_ID": "7",
            "TEST_SERVER": f"{url} {layout.home}",
        }
        (folder / "temp").mkdir()
        self.context = {
            "github": {"workspace": str(folder), "repository": "octo/images", "run_id": "7", "token": "t"},
            "vars": self.vars,
        }
        self.context["github"]["server_url"] = "https://github.example"

    def value(self, expression):
        """`a.b.c || 'text'`, and no more of GitHub's language."""
        for part in map(str.strip, expression.split("||")):
            if re.fullmatch(r"'[^']*'", part):
                return part.strip("'")
            found = self.context
            for name in part.split("."):
                found = found.get(name, "")
                if found == "":
                    break
            if found:
                return found
        return ""

    def filled(self, text):
        return re.sub(r"\$\{\{(.*?)\}\}", lambda match: self.value(match[1]), str(text))

    def holds(self, condition, failed):
        if condition == "cancelled()":
            return False  # nobody cancels here
        if condition in ("failure()", "always()"):
            return failed or condition == "always()"
        if failed:
            return False
        if not condition:
            return True
        left, operator, right = re.fullmatch(r"(\S+) (==|!=) '(.*)'", condition).groups()
        return (self.value(left) == right) is (operator == "==")

    def job(self, name, workflow=REBUILD, **more):
        """Run the steps of a job; returns the name of the one that failed, or an empty string."""
        job = workflow["jobs"][name]
        steps, failed, environment = self.context.setdefault("steps", {}), "", dict(self.environment)
        steps.clear()
        for level in (workflow.get("env", {}), job.get("env", {}), self.vars, more):
            environment |= {key: self.filled(value) for key, value in level.items()}
        self.ran = []
        for step in (step for step in job["steps"] if "run" in step):
            if not self.holds(step.get("if", ""), failed):
                continue
            self.ran.append(step["name"])
            files = {which: self.folder / "temp" / which for which in ("GITHUB_OUTPUT", "GITHUB_ENV")}
            for file in files.values():
                file.write_text("")
            own = {key: self.filled(value) for key, value in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                env={**environment, **own, **{which: str(file) for which, file in files.items()}},
                cwd=self.folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            said = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
            environment |= dict(line.split("=", 1) for line in files["GITHUB_ENV"].read_text().splitlines())
            steps[step.get("id", step["name"])] = {"outputs": said}
            if done.returncode:
                failed = failed or f"{step['name']}: {done.stdout}{done.stderr}"
        outputs = {key: self.filled(value) for key, value in job.get("outputs", {}).items()}
        self.context.setdefault("needs", {})[name] = {"outputs": outputs}
        return failed

    def keep(self, run, record):
        """An artifact of a run, as `Keep the record` uploads it."""
        file = self.kept / run / record["build_id"] / "record.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(record))

    def asked(self):
        """What gh was called with since the last time, bodies last."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def runner(proven, tmp_path):
    """A runner, and the record of a build that has not been made yet."""
    tell("reset")
    home = tmp_path / ".cache" / "gpukiln"
    [build] = proven.all()
    judged = verdict(not_run=[("gpu.xid", "no GPU")])
    record = replace(build.read(), verdicts=(judged,))
    runner = Runner(tmp_path, home)
    runner.environment["TEST_RECORD"] = str(tmp_path / "built.json")
    (tmp_path / "built.json").write_text(json.dumps({**dump(record), "build_id": build.id}))
    runner.build = build.id
    build.record_file.unlink()
    tell("image", {"tags": tags(build.id, judged), "region": HOME, "image_id": BAKE.image_id, "name": "gpu"})
    return runner


def test_a_rebuild_is_released_described_and_promoted(runner):
    earlier = json.loads((runner.folder / "built.json").read_text())
    earlier["bake"] |= {"image_id": "ami-0000000000000000a", "kernel": "6.1.0-0-cloud-amd64"}
    runner.keep("last", earlier)
    assert runner.job("rebuild") == ""
    assert runner.ran == ["Plan", "Build", "Verify on other GPUs", "Release to candidate", "Say what changed"]
    there = pointed("candidate")
    assert there[HOME] == BAKE.image_id
    assert set(pointed("stable").values()) == {None}
    download, label, issue = runner.asked()
    assert download[:4] == ["run", "download", "--name", "record"]
    assert label[:3] == ["label", "create", "image-rebuild"]
    assert issue[:5] == ["issue", "create", "--label", "image-rebuild", "--title"]
    assert issue[5] == "New image: name"
    assert "https://github.example/octo/images/actions/runs/7" in issue[-1]
    assert f"`{BAKE.image_id}` in {HOME}" in issue[-1]
    assert "(`ami-0000000000000000a`)" in issue[-1]
    assert "6.1.0-0-cloud-amd64" in issue[-1]

    record = runner.records / runner.build / "record.json"
    runner.keep("7", json.loads(record.read_text()))  # what `Keep the record` uploads
    record.unlink()  # the other job runs on another machine
    assert runner.holds(REBUILD["jobs"]["promote"]["if"], "")
    assert runner.job("promote") == ""
    assert pointed("stable") == there
    [download] = runner.asked()
    assert download[:5] == ["run", "download", "7", "--name", "record"]

    assert runner.job("rebuild", TEST_VERIFIED=BAKE.image_id) == ""  # the week after: nothing to build
    assert runner.ran == ["Plan", "Verify on other GPUs", "Release to candidate"]
    assert runner.asked() == []
    assert not runner.holds(REBUILD["jobs"]["promote"]["if"], "")


def test_the_rebuild_of_a_project_is_released_and_promoted(runner):
    assert runner.job("rebuild", OWN_REBUILD) == ""
    steps = ["Install gpukiln", "Build", "Verify on other GPUs", "Release to candidate"]
    assert runner.ran == steps
    there = pointed("candidate")
    assert there[HOME] == BAKE.image_id
    assert set(pointed("stable").values()) == {None}
    record = runner.records / runner.build / "record.json"
    runner.keep("7", json.loads(record.read_text()))  # what `Keep the record` uploads
    record.unlink()  # the other job runs on another machine
    assert runner.holds(OWN_REBUILD["jobs"]["promote"]["if"], "")
    assert runner.job("promote", OWN_REBUILD) == ""
    assert pointed("stable") == there


def test_a_pull_request_of_a_project_is_planned_where_the_role_may_be_taken(runner, tmp_path):
    summary = tmp_path / "summary"
    assert runner.job("plan", OWN_PLAN, GITHUB_STEP_SUMMARY=str(summary), TEST_VERIFIED=BAKE.image_id) == ""
    assert BAKE.image_id in summary.read_text()
    told = runner.job("plan", OWN_PLAN, GITHUB_STEP_SUMMARY=str(summary), TEST_FAILS="ami.plan")
    assert told.startswith("Plan: "), "a plan that is refused fails the job"
    guard = OWN_PLAN["jobs"]["plan"]["if"]
    assert guard == (
        "vars.AWS_PLAN_ROLE_ARN != '' && github.event.pull_request.head.repo.full_name == github.repository"
    )
    assert runner.job("check", OWN_PLAN) == ""
    (tmp_path / "gpukiln.toml").write_text('[roles]\nafter = ["missing"]\n')
    assert "names the role 'missing'" in runner.job("check", OWN_PLAN)
    assert "id-token" not in OWN_PLAN["jobs"]["check"]["permissions"], "forks' code runs in it"


def test_what_no_gpu_judged_is_not_released_by_a_second_run(runner):
    """The first finds no machine with the other GPU; the second has nothing to build, and no record."""
    seen = verdict(saw_gpu=True)
    record = json.loads((runner.folder / "built.json").read_text())
    (runner.folder / "built.json").write_text(json.dumps({**record, "verdicts": [dump(seen)]}))
    tell("reset")
    about = {"region": HOME, "image_id": BAKE.image_id, "name": "gpu"}
    tell("image", {"tags": tags(runner.build, seen), **about})
    on_aws = {"TEST_GPUS": "1"}
    assert "Verify on other GPUs: " in runner.job("rebuild", TEST_BUSY="1", **on_aws)
    assert runner.ran == ["Plan", "Build", "Verify on other GPUs", "Say what failed"]
    (runner.records / runner.build / "record.json").unlink()
    again = {"TEST_VERIFIED": BAKE.image_id, **on_aws}
    assert "no zone has g5.xlarge now" in runner.job("rebuild", TEST_BUSY="1", **again)
    assert runner.ran == ["Plan", "Verify on other GPUs", "Say what failed"]
    assert set(pointed("candidate").values()) == {None}

    assert runner.job("rebuild", **again) == ""
    assert runner.ran == ["Plan", "Verify on other GPUs", "Release to candidate"]
    assert pointed("candidate")[HOME] == BAKE.image_id
    there = {tag["Key"]: tag["Value"] for tag in images(HOME)[BAKE.image_id]["Tags"]}
    assert {name for name in there if name.startswith("gpukiln:verdict:")} == {
        "gpukiln:verdict:g4dn.xlarge",
        "gpukiln:verdict:g5.xlarge",
    }
    assert runner.job("rebuild", TEST_BUSY="1", **again) == ""  # nothing is missing: no machine is wanted


def test_what_candidate_does_not_point_at_any_more_is_not_promoted(runner, tmp_path):
    newer = release_spec(make_image("newer"), "newer")
    require_complete(release(newer, Cloud(), ReleaseLog(tmp_path), quiet()))
    runner.keep("7", json.loads((runner.folder / "built.json").read_text()))
    runner.context["needs"] = {"rebuild": {"outputs": {"build": runner.build}}}
    assert "candidate does not point at" in runner.job("promote")
    assert set(pointed("stable").values()) == {None}


def test_a_failure_becomes_an_issue_once_and_says_no_account(runner):
    assert runner.job("rebuild", TEST_FAILS="ami.build").startswith("Build:")
    assert runner.ran == ["Plan", "Build", "Say what failed"]
    _, listing, issue = runner.asked()
    assert listing[:2] == ["issue", "list"]
    assert issue[:6] == ["issue", "create", "--label", "image-rebuild", "--title", "Rebuild failed: Build"]
    assert "error: role arn:aws:iam::(account):role/x may not" in issue[-1]
    assert "next: let it" in issue[-1]
    assert set(pointed("candidate").values()) == {None}

    assert runner.job("rebuild", TEST_FAILS="ami.plan", OPEN_ISSUE="12").startswith("Plan:")
    assert runner.asked()[-1][:3] == ["issue", "comment", "12"]


def test_every_scenario_that_pulls_an_image_is_run_every_week(tmp_path):
    job = MOLECULE["jobs"]["scenario"]
    scenarios = job["strategy"]["matrix"]["scenario"]
    assert scenarios == [one.name for one in load_scenarios().values() if one.image]
    assert MOLECULE[True]["schedule"]  # YAML 1.1 reads `on` as true
    [script] = [step["run"] for step in job["steps"] if "run" in step]
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/run").write_text('#!/bin/sh\necho "$@" >>asked\n')
    (tmp_path / "scripts/run").chmod(0o755)
    for name in scenarios:
        environment = {"PATH": os.environ["PATH"], "SCENARIO": name}
        subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=tmp_path, env=environment, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [f"invoke node.test --scenario {name}" for name in scenarios]
    [kept] = [step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert job["env"]["GPUKILN_HOME"].endswith("/.cache/gpukiln")
    assert {f".cache/gpukiln/nodes/*/{name}.log" for name in scenarios} <= set(kept.split())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_permissions_are_named(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        granted = {name for name, access in job.get("permissions", {}).items() if access == "write"}
        # Only the release writes into the repository, and only a tag starts it.
        released = {"contents"} if path.name == "release.yml" else set()
        assert granted <= {"id-token", "issues"} | released
        for step in job["steps"]:
            assert PINNED.fullmatch(step["uses"]) if "uses" in step else "run" in step
        texts = [step.get("run", "") for step in job["steps"]]
        assert not [text for text in texts if "${{" in text], "an expression in a script is code of others"


def test_only_a_tag_starts_a_release():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}


SCHEDULED = [path for path in WORKFLOWS if "schedule" in (yaml.safe_load(path.read_text())[True] or {})]


def unguarded(workflow):
    """Jobs that take a role which no condition of theirs, or of a job that they wait for, asks for."""
    jobs, found = workflow["jobs"], []
    for name, job in jobs.items():
        before = [job["needs"]] if "needs" in job else []
        conditions = " ".join(str(jobs[one].get("if", "")) for one in [name, *before])
        takes = any("role-to-assume" in step.get("with", {}) for step in job["steps"])
        if takes and not re.search(r"vars\.\w*ROLE_ARN != ''", conditions):
            found.append(name)
    return found


@pytest.mark.parametrize("path", SCHEDULED, ids=lambda path: path.name)
def test_a_schedule_is_not_red_where_nothing_is_set(path):
    workflow = yaml.safe_load(path.read_text())
    assert unguarded(workflow) == []
    for job in workflow["jobs"].values():
        job.pop("if", None)
    takes = "role-to-assume" in path.read_text()
    assert bool(unguarded(workflow)) == takes, "the rule above can't fail"


def test_a_rebuild_runs_where_its_role_is_set(runner):
    condition = REBUILD["jobs"]["rebuild"]["if"]
    assert not runner.holds(condition, "")
    runner.vars["AWS_ROLE_ARN"] = "arn:aws:iam::111122223333:role/gpukiln-rebuild"
    assert runner.holds(condition, "")


def test_versions_of_pinned_actions_are_written_beside_them():
    files = (*WORKFLOWS, *ROOT.glob("actions/*/action.yml"))
    lines = [line for path in files for line in path.read_text().splitlines() if " uses: " in line]
    assert lines
    assert all(re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line) for line in lines)
    of_action = {(line.split("uses: ")[1].split("@")[0], line.split("@")[1]) for line in lines}
    assert len({name for name, _ in of_action}) == len(of_action), "one action in two versions"


def test_what_builds_asks_github_for_packers_plugins_with_a_token():
    """Without one CI's runners share 60 calls an hour with everybody at their address."""
    steps = [step for workflow in (REBUILD, OWN_REBUILD) for step in workflow["jobs"]["rebuild"]["steps"]]
    builds = [step for step in steps if re.search("ami.build", step.get("run", ""))]
    assert len(builds) == 2
    assert [step["name"] for step in builds if "PACKER_GITHUB_API_TOKEN" not in step.get("env", {})] == []


def uploads():
    """What every workflow uploads, with its name."""
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                if step.get("uses", "").startswith("actions/upload-artifact@"):
                    yield f"{path.name}: {step['name']}", step["with"]["path"].split()


@pytest.mark.parametrize(("step", "paths"), list(uploads()))
def test_artifacts_are_named_files_and_never_folders_or_keys(step, paths):
    for path in paths:
        assert Path(path).suffix in (".json", ".jsonl", ".html", ".xml", ".log"), (
            f"{step} takes all of {path}"
        )
        assert "*" not in Path(path).name, f"{step} takes whatever is named like {path}"
        assert "**" not in path
        assert "/keys" not in path


def test_nothing_of_a_killed_build_that_is_uploaded_holds_its_key(tmp_path, monkeypatch):
    """As a job that was cancelled leaves it: the key is there, and no pattern of an artifact matches it."""
    home = tmp_path / ".cache/gpukiln"
    monkeypatch.setenv("GPUKILN_HOME", str(home))
    build = Builds(home).create("eks-gpu")
    key = access._write_key(build.id, "bake", "PRIVATE KEY")
    (build.folder / "packer.log").write_text("a log")
    taken = {file for _, paths in uploads() for path in paths for file in tmp_path.glob(path)}
    assert build.folder / "packer.log" in taken
    assert key.exists()
    assert key not in taken
    assert not [file for file in build.folder.rglob("*") if file.is_file() and "KEY" in file.read_text()]
