"""The weekly workflow that compares the catalogue with EC2; `scripts/run` and `gh` are stand-ins."""

import json
import os
import subprocess

import pytest
import yaml

from gpukiln.catalog.load import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/catalogue.yml").read_text())
COMMAND = "invoke offer.refresh --cloud aws --region us-west-2 --diff --json"
PATCH = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
RUN = """\
#!/bin/sh
echo "$@" >>asked
cat answer.json
exit "${STATUS:-0}"
"""
GH = """\
#!/bin/sh
echo "gh $*" >>asked
[ "$1 $2" != "issue list" ] || echo "${OPEN_ISSUE:-}"
"""


@pytest.fixture
def run(tmp_path):
    """Runs the steps of the job one after the other; returns whether all went well, and what was asked."""
    for name, text in (("scripts/run", RUN), ("bin/gh", GH)):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(text)
        file.chmod(0o755)

    def run(difference, **environment):
        (tmp_path / "answer.json").write_text(json.dumps({"difference": difference} if difference else {}))
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        own = {"PATH": path, "RUNNER_TEMP": str(tmp_path), **WORKFLOW["env"], "RUN_URL": "https://run"}
        done = 0
        for step in WORKFLOW["jobs"]["compare"]["steps"]:
            if "run" in step and not done:
                command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
                done = subprocess.run(command, cwd=tmp_path, env=own | environment, check=False).returncode
        asked = (tmp_path / "asked").read_text().splitlines()
        (tmp_path / "asked").unlink()
        return done, asked

    return run


@pytest.mark.parametrize("status", ["10", "5"])
def test_a_difference_becomes_an_issue_with_its_patch(run, tmp_path, status):
    notes = ["g9.xlarge: its GPU is not in nvidia_matrix.yaml"]
    done, asked = run({"patch": PATCH, "notes": notes}, STATUS=status)
    assert done == 0
    assert asked[0] == COMMAND
    assert [line.split(" --")[0] for line in asked[1:]] == [
        *("gh label create catalogue", "gh issue list", "gh issue create")
    ]
    body = (tmp_path / "issue.md").read_text()
    assert f"```diff\n{PATCH}```\n" in body
    assert "\n- g9.xlarge: its GPU" in body


def test_an_issue_that_is_open_is_brought_up_to_date(run):
    _, asked = run({"patch": PATCH, "notes": []}, OPEN_ISSUE="12")
    assert asked[-1].startswith("gh issue edit 12 --body-file")


def test_nothing_is_said_of_no_difference(run):
    done, asked = run({"patch": "", "notes": ["neither here nor there, so maybe retired: dl1.24xlarge"]})
    assert (done, asked) == (0, [COMMAND])


@pytest.mark.parametrize("status", ["4", "0"])
def test_what_could_not_be_compared_fails(run, status):
    """A refusal, and an answer without the difference."""
    done, asked = run(None, STATUS=status)
    assert (done, asked) == (4 if status == "4" else 1, [COMMAND])


def test_githubs_token_is_not_given_to_what_is_installed():
    steps = WORKFLOW["jobs"]["compare"]["steps"]
    assert [step["name"] for step in steps if "GH_TOKEN" in step.get("env", {})] == ["Say what differs"]
    assert "invoke" not in steps[-1]["run"]
