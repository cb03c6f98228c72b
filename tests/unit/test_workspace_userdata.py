"""A workspace's user data: a rendering, which cloud-init, the shell, systemd and EC2 have to take."""

import ast
import base64
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpukiln.errors import UsageError
from gpukiln.workspaces import agent, userdata
from gpukiln.workspaces.contract import Capabilities, ComputeProfile, Toolchain, Workspace
from gpukiln.workspaces.spec import UpOptions
from tests.support.workspace_machine import config_of, files_of, parts_of

NASTY = "'; touch /tmp/x; $(id) `id` \"\n--gpukiln-workspace-part--\n#cloud-config\n\t\x7f☃ \U0001f600"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FULL = Workspace(
    "vision",
    "ada",
    "us-west-2",
    compute_profile=ComputeProfile(gpu_count=2),
    capabilities=Capabilities(
        artifact_cache="fs-0123456789abcdef0",
        secrets={"HF_TOKEN": "/vision/hf"},
        gui_vnc=True,
    ),
    toolchain_template=Toolchain("datasci", "1.1.0"),
    agent_init_script="echo $HOME",
    spot=True,
    idle_minutes=30,
)
GOLDEN = {
    "name": "vision",
    "user": "ada",
    "region": "us-west-2",
    "home": True,
    "secrets": {"HF_TOKEN": "/vision/hf"},
    "tags": True,
    "gpus": 2,
    "desktop": True,
    "efs": "fs-0123456789abcdef0",
    "env": {
        "GPUKILN_WORKSPACE": "vision",
        "GPUKILN_WORKSPACE_OWNER": "ada",
        "GPUKILN_WORKSPACE_REGION": "us-west-2",
        "GPUKILN_WORKSPACE_USER": "ada",
        "GPUKILN_WORKSPACE_HOME": "/home/ada",
        "GPUKILN_ARTIFACT_CACHE": "/mnt/gpukiln-cache/gpukiln",
    },
    "toolchain": {"name": "datasci", "version": "1.1.0"},
    "roles": None,
    "compose": "services: {}\n",
    "script": "echo $HOME",
    "idle_minutes": 30,
}


def _wanted(script: str = "") -> Workspace:
    return Workspace("vision", "ada", "us-west-2", agent_init_script=script)


def _render(wanted: Workspace = FULL, compose: str = "services: {}\n") -> bytes:
    return userdata.render(wanted, gpus=2, compose=compose)


def test_what_the_agent_is_told() -> None:
    assert config_of(_render()) == GOLDEN


@pytest.mark.parametrize(("owner", "user"), [("ada", "ada"), ("root", "ws-root"), ("ubuntu", "ws-ubuntu")])
def test_the_images_accounts_stay_what_they_are(owner: str, user: str) -> None:
    config = config_of(_render(Workspace("vision", owner, "us-west-2")))
    assert (config["user"], config["env"]["GPUKILN_WORKSPACE_HOME"]) == (user, f"/home/{user}")


def test_a_foreign_image_runs_our_roles_at_one_commit() -> None:
    data = userdata.render(FULL, gpus=2, roles=f"https://git.example/k.git@{COMMIT}")
    roles = config_of(data)["roles"]
    assert (roles["commit"], roles["url"]) == (COMMIT, "https://git.example/k.git")
    locked = (Path(__file__).parents[2] / "requirements.lock").read_text().splitlines()
    assert [name.partition("==")[0] for name in roles["packages"]] == list(userdata.ROLES_NEED)
    assert all(f"{name} \\" in locked for name in roles["packages"])


def test_what_was_typed_is_data_alone() -> None:
    parts = parts_of(_render(_wanted(NASTY), compose=NASTY))
    assert parts["text/x-shellscript"] == (
        "#!/bin/sh\nset -eu\nsystemctl daemon-reload\nsystemctl enable --now --no-block "
        "gpukiln-workspace.service gpukiln-workspace-idle.timer\n"
    )
    config = config_of(_render(_wanted(NASTY), compose=NASTY))
    assert (config["script"], config["compose"]) == (NASTY, NASTY)
    assert files_of(_render())["/etc/gpukiln/workspace.json"][1] == 0o600


def test_the_machine_has_the_workspaces_name() -> None:
    cloud = yaml.safe_load(parts_of(_render())["text/cloud-config"])
    assert (cloud["hostname"], cloud["manage_etc_hosts"]) == ("vision", "localhost")


def test_an_embedded_cloud_is_named_to_the_units() -> None:
    data = userdata.render(FULL, gpus=2, endpoint="http://10.0.0.1:5000")
    assert files_of(data)["/etc/gpukiln/agent.env"][0] == "AWS_ENDPOINT_URL=http://10.0.0.1:5000\n"
    assert "/etc/gpukiln/agent.env" not in files_of(_render())


def test_a_large_compose_file_fits() -> None:
    one = (
        "  s{0}:\n    image: registry.example/ollama/ollama@sha256:{0:064x}\n    restart: unless-stopped\n"
        '    env_file: [/run/gpukiln/workspace/env]\n    ports: ["127.0.0.1:{0}:11434"]\n'
        "    healthcheck: {{test: [CMD, ollama, ps], interval: 30s}}\n"
    )
    compose = "services:\n" + "".join(one.format(11434 + number) for number in range(60))
    script = "".join(f"export SETTING_{number}={os.urandom(4).hex()}\n" for number in range(60))
    assert len(compose) > 14000
    data = _render(_wanted(script), compose=compose)
    assert len(data) < userdata.LIMIT_BYTES
    assert config_of(data)["compose"] == compose
    assert data == _render(_wanted(script), compose=compose)  # the same words, the same bytes


def test_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="EC2 takes less than"):
        _render(_wanted(base64.b64encode(os.urandom(30000)).decode()))


@pytest.mark.parametrize(
    "roles", ["https://git.example/k.git@main", f"http://git.example/k.git@{COMMIT}", "k.git"]
)
def test_roles_without_a_whole_commit_are_refused(roles: str) -> None:
    with pytest.raises(UsageError, match="a whole commit"):
        UpOptions(roles=roles)


def test_what_is_sent_of_the_agent_is_the_agent() -> None:
    def bare(text: str) -> str:
        tree = ast.parse(text, feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                node.body = node.body[1:] or node.body
        return ast.dump(tree)

    ours = Path(agent.__file__).read_text()
    sent, mode = files_of(_render())[userdata.AGENT]
    assert bare(sent) == bare(ours)
    assert (len(sent) < len(ours), mode) == (True, 0o755)


@pytest.mark.parametrize("program", ["shellcheck", "bash", "dash"])
def test_the_shell_takes_each_part(tmp_path: Path, program: str) -> None:
    (tmp_path / "start").write_text(userdata.start_script(FULL))
    (tmp_path / "profile.sh").write_text(userdata.login_profile(FULL))
    found = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found
    for file in sorted(tmp_path.iterdir()):
        subprocess.run([found, *([] if program == "shellcheck" else ["-n"]), file], check=True)


def test_a_login_shell_has_the_environment(tmp_path: Path) -> None:
    wanted = Workspace(
        "vision", "ada", "us-west-2", capabilities=Capabilities(artifact_cache="s3://bucket/it's $(id)")
    )
    (tmp_path / "A").write_text("two\nlines ' \" $x")
    text = userdata.login_profile(wanted).replace(f"{agent.RUN_FOLDER}/secrets", str(tmp_path))
    command = f'{text}printf \'%s|%s|%s\' "$GPUKILN_WORKSPACE" "$GPUKILN_ARTIFACT_CACHE" "$A"'
    said = subprocess.run(["sh", "-euc", command], capture_output=True, text=True, check=True, env={}).stdout
    assert said == "vision|s3://bucket/it's $(id)|two\nlines ' \" $x"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    def judge() -> subprocess.CompletedProcess[str]:
        command = ["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.glob("gpukiln-*"))]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for name, text in userdata.UNITS.items():
        (tmp_path / name).write_text(text)
    ran = judge()
    assert (ran.returncode, [line for line in ran.stderr.splitlines() if "gpukiln" in line]) == (0, [])
    (tmp_path / "gpukiln-workspace.service").write_text("[Service]\nType=wrong\nExecStart=none\n")
    assert "gpukiln-workspace.service" in judge().stderr


def test_the_units_that_begin_are_those_that_are_written() -> None:
    for wanted in (FULL, _wanted()):
        begun = userdata.start_script(wanted).splitlines()[-1].split()[4:]
        assert set(begun) <= set(userdata.UNITS)
        assert ("gpukiln-workspace-spot.service" in begun) == wanted.spot
    assert len(list(itertools.chain(userdata.UNITS))) == 4


@pytest.mark.skipif(not shutil.which("cloud-init"), reason="cloud-init is not installed here")
def test_cloud_init_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "cloud.yaml"
    file.write_text(parts_of(_render())["text/cloud-config"])
    subprocess.run(["cloud-init", "schema", "--config-file", file], check=True)
