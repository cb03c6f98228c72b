"""From an offer to a machine on which somebody works, and away again: typed in order, on a baked image."""

import json
import os
import re
import subprocess

import pytest

from tests.support.harness import ROOT

pytestmark = pytest.mark.e2e

REGION = "us-west-2"
UP = ("workspace.up", "--yes", "--name", "vision", "--owner", os.environ.get("USER", "root"), "--gpu", "T4:1")
UP = (*UP, "--simulated", "--cpu", "8", "--memory", "32GiB", "--region", REGION)


# Of an image that is made on the machine: none can be pulled here.
SERVICE = """\
x-gpukiln: {"web": {"port": 11434, "answers": "/", "computes": "", "model": "", "start_s": 5}}
services:
  web:
    image: local/system:1
    command: [python3, -m, http.server, "11434", --directory, /usr]
    ports:
    - 127.0.0.1:11434:11434
    restart: unless-stopped
"""
SYSTEM = "/usr/bin /usr/lib /usr/lib64 /usr/sbin /bin /lib /lib64 /sbin"


def ours(here, kind, key):
    """What the cloud has of the workspace."""
    named = "Name=tag:gpukiln:workspace,Values=vision"
    return here.aws("ec2", f"describe-{kind}", "--filters", named)[key]


def ssh(here, command):
    return here.invoke("workspace.ssh", "vision", "--command", command).stdout


def serve(here):
    """A container in the machine's own engine, started by Compose as the agent starts it."""
    without = "--exclude=/usr/lib/modules --exclude=/usr/lib/firmware"
    ssh(here, f"sudo tar c {without} {SYSTEM} 2>/dev/null | docker import - local/system:1")
    ssh(here, f"sudo tee /etc/gpukiln/compose.yaml >/dev/null <<'END'\n{SERVICE}END\n")
    compose = "docker-compose --project-name gpukiln --file /etc/gpukiln/compose.yaml"
    ssh(here, f"{compose} up --detach 2>&1")


@pytest.fixture(scope="module")
def workspace(here, built):
    """The first of the seven: a workspace that is up, and what `up` printed."""
    found = json.loads(here.invoke(*UP, "--json").stdout)
    assert found["workspace"]["machines"][0]["image_id"] == built[0]["bake"]["image_id"]
    yield found
    here.invoke("workspace.down", "vision", "--force", "--yes", ok=False)


def test_the_commands_in_order(here, workspace):
    out, [machine] = workspace["outputs"], workspace["workspace"]["machines"]
    user, [home] = machine["user"], workspace["workspace"]["homes"]
    assert machine["stage"] == "done"
    assert out["instance_type"] == "g4dn.2xlarge"
    assert out["metadata"]["verdict"].startswith("passed")
    assert out["metadata"]["image_digest"]
    assert out["gpu_count"] == 1
    assert re.fullmatch(r"[0-9.]+", out["driver_version"])
    assert out["volume_mounts"] == [
        {
            "volume_id": home["volume_id"],
            "mount_path": f"/home/{user}",
            "size_gib": 50,
            "persistent": True,
        }
    ]
    listed = here.invoke("workspace.list").stdout
    assert "vision" in listed
    assert machine["instance_id"] in listed
    assert home["volume_id"] in here.invoke("workspace.show", "vision").stdout
    assert ssh(here, "id -un; pwd; hostname").split() == [user, f"/home/{user}", "vision"]
    assert ssh(here, f"findmnt -no SOURCE,FSTYPE /home/{user}").split()[1] == "ext4"
    ssh(here, "echo kept >file")
    deep = json.loads(here.invoke("workspace.status", "vision", "--deep", "--json").stdout)
    assert deep["health"].startswith("healthy")
    assert deep["verdict"]["profile"] == "workspace"
    assert (here.home / f"workspaces/reports/embedded-{REGION}-vision/report.html").exists()
    serve(here)
    deep = json.loads(here.invoke("workspace.status", "vision", "--deep", "--json").stdout)
    judged = {check["id"]: check["outcome"] for check in deep["verdict"]["checks"]}
    assert (judged["services.running"], judged["services.answers"]) == ("passed", "passed")
    variables = here.invoke("workspace.env", "vision").stdout
    asked = subprocess.run(
        ["sh", "-c", f'{variables}\necho "$GPUKILN_WORKSPACE_INSTANCE"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == machine["instance_id"]

    here.invoke("workspace.stop", "vision")
    assert here.invoke("workspace.ssh", "vision", ok=False).returncode == 4
    started = json.loads(here.invoke("workspace.start", "vision", "--json").stdout)
    assert started["workspace"]["machines"][0]["instance_id"] == machine["instance_id"]
    assert ssh(here, "cat file") == "kept\n"

    here.invoke("workspace.down", "vision", "--keep-home")
    assert [one["VolumeId"] for one in ours(here, "volumes", "Volumes")] == [home["volume_id"]]
    assert ours(here, "security-groups", "SecurityGroups") == []
    again = json.loads(here.invoke(*UP, "--json").stdout)
    assert again["workspace"]["machines"][0]["instance_id"] != machine["instance_id"]
    assert again["workspace"]["homes"][0]["volume_id"] == home["volume_id"]
    assert ssh(here, "cat file") == "kept\n"
    [used] = json.loads(here.invoke("workspace.usage", "--json").stdout)["owners"]
    assert used["owner"] == UP[5]
    refused = here.invoke("workspace.down", "vision", ok=False)
    assert (refused.returncode, "there is no terminal" in refused.stderr) == (6, True)
    here.invoke("workspace.down", "vision", "--yes")
    assert ours(here, "volumes", "Volumes") == []
    assert not any(here.leftovers().values())


def test_what_is_rendered_without_a_cloud(tmp_path):
    asked = ("workspace.render", "--name", "vision", "--owner", "ann", "--gpu", "T4:1", "--image", "ami-1")
    subprocess.run(
        ["invoke", *asked, "--to", "terraform", "--out", tmp_path],
        cwd=ROOT,
        env={**os.environ, "GPUKILN_HOME": str(tmp_path / "none")},
        check=True,
        capture_output=True,
    )
    assert json.loads((tmp_path / "rendered.json").read_text())["wanted"]["workspace_name"] == "vision"
    assert (tmp_path / "workspace/main.tf").exists()
    assert not (tmp_path / "none").exists()
