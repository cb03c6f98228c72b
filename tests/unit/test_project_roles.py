"""A project's own roles and channels: where they run, what they change in a plan, what is wrong with them."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gpukiln import project
from gpukiln.catalog.load import ROOT
from gpukiln.cli import settings
from gpukiln.cli.command import words
from gpukiln.cli.main import main
from gpukiln.commands.node import NodeApply
from gpukiln.errors import UsageError
from gpukiln.images.bake import ansible_variables
from gpukiln.images.builds import Build
from gpukiln.images.channels import load_channels
from gpukiln.images.digest import explain_change
from gpukiln.images.plan import ImagePlan
from gpukiln.project import OwnRoles
from gpukiln.typed import dump, load
from tests.support.plans import OFFLINE, plan

ROLES = """\
[roles]
before = ["site_proxy"]
after = ["site_agent", "site_users"]

[roles.lean]
after = []
"""
TASK = "- name: Write a file\n  ansible.builtin.copy: {{content: {0}, dest: /etc/{0}, mode: '0644'}}\n"
ONLINE = replace(OFFLINE, unreachable=lambda _: None)
HERE = ("-i", "localhost,", "-e", "ansible_python_interpreter={{ ansible_playbook_python }}")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with three roles, where the user stands."""
    for name in project.SETTINGS:
        monkeypatch.delenv(f"GPUKILN_{name.upper()}", raising=False)
    (tmp_path / "gpukiln.toml").write_text(ROLES)
    definition = (ROOT / "ami/eks-gpu/image.yaml").read_text()
    write(tmp_path, "ami/lean/image.yaml", definition.replace("name: eks-gpu", "name: lean"))
    for name in ("site_proxy", "site_agent", "site_users"):
        write(tmp_path, f"roles/{name}/tasks/main.yml", TASK.format(name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.usefixtures("shop")
def test_an_image_gets_its_own_lists_instead_of_those_of_all() -> None:
    assert project.roles() == OwnRoles(("site_proxy",), ("site_agent", "site_users"))
    assert project.roles("lean") == OwnRoles(("site_proxy",), ())


def test_without_a_project_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not project.roles("eks-gpu")
    assert project.roles_path(project.roles()) == project.role_variables(project.roles()) == {}


@pytest.mark.usefixtures("debian")
def test_a_plan_has_the_roles_and_survives_json(shop: Path) -> None:
    planned = plan()
    assert planned.own_roles == OwnRoles(("site_proxy",), ("site_agent", "site_users"))
    assert load(ImagePlan, json.loads(json.dumps(dump(planned))), where="plan") == planned
    write(shop, "roles/site_agent/tasks/install.yml", TASK.format("agent"))
    variables = ansible_variables(planned, Build(shop / "build"))
    assert variables["gpukiln_roles_before"] == [{"name": "site_proxy", "install": "main", "runtime": ""}]
    assert [(role["name"], role["install"]) for role in variables["gpukiln_roles_after"]] == [
        ("site_agent", "install"),
        ("site_users", "main"),
    ]


@pytest.mark.usefixtures("debian")
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("roles/site_agent/tasks/main.yml", "- name: Other\n", "changed role site_agent: tasks/main.yml"),
        ("roles/site_agent/files/.profile", "x", "added role site_agent: files/.profile"),
        ("roles/site_library/tasks/main.yml", "[]", "added role site_library: tasks/main.yml"),
        (
            "gpukiln.toml",
            ROLES.replace('"site_agent", "site_users"', '"site_users", "site_agent"'),
            "roles after: site_agent, site_users -> site_users, site_agent",
        ),
        ("gpukiln.toml", ROLES.replace('before = ["site_proxy"]', ""), "roles before: site_proxy -> absent"),
    ],
)
def test_what_changes_a_role_changes_the_digest_and_is_said(
    shop: Path, name: str, text: str, line: str
) -> None:
    before = plan()
    write(shop, name, text)
    after = plan()
    assert after.digest != before.digest
    assert explain_change(before.inputs, after.inputs) == [line]


@pytest.mark.usefixtures("debian")
def test_a_version_of_the_project_changes_the_digest_and_is_said(shop: Path) -> None:
    before = plan(probes=ONLINE)
    write(shop, "gpukiln.toml", f'{ROLES}\n[components.nvidia_container_toolkit]\nversion = "1.19.2"\n')
    after = plan(probes=ONLINE, overrides=words(settings.components()))
    assert after.component("nvidia_container_toolkit").version == "1.19.2"
    assert after.digest != before.digest
    assert explain_change(before.inputs, after.inputs) == [
        "available version of nvidia_container_toolkit: 1.19.1 -> 1.19.2",
        "changed: how nvidia_container_toolkit is installed (components.yaml, gpukiln.toml or --set)",
    ]


@pytest.mark.usefixtures("debian")
@pytest.mark.parametrize(
    "name",
    [
        "roles/site_agent/README.md",
        "roles/site_agent/tests/test.yml",
        "roles/site_agent/tasks/__pycache__/a.pyc",
        "README.md",
    ],
)
def test_what_changes_no_image_changes_no_digest(shop: Path, name: str) -> None:
    before = plan()
    write(shop, name, "x")
    assert plan().digest == before.digest


@pytest.mark.usefixtures("debian")
def test_a_role_of_the_project_replaces_a_shipped_one_where_the_project_says_so(shop: Path) -> None:
    before = plan()
    write(shop, "gpukiln.toml", '[roles]\nreplace = ["nvtop"]\n')
    for name in ("main", "install"):
        write(shop, f"roles/nvtop/tasks/{name}.yml", "[]")
    replaced = plan()
    assert replaced.own_roles == OwnRoles(replace=("nvtop",))
    files = [name for name in replaced.inputs if name.startswith("file roles/nvtop/")]
    assert files == ["file roles/nvtop/tasks/install.yml", "file roles/nvtop/tasks/main.yml"]
    assert "removed role nvtop: decide.py" in explain_change(before.inputs, replaced.inputs)
    path = project.roles_path(replaced.own_roles)["ANSIBLE_ROLES_PATH"].split(":")
    assert path == [str(shop / "roles"), str(ROOT / "roles")]


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        (
            {"gpukiln.toml": '[roles]\nafter = ["site_agnet"]\n'},
            "names the role 'site_agnet'; {shop}/roles has site_agent, site_proxy, site_users",
            "make {shop}/roles/site_agnet/tasks/main.yml",
        ),
        (
            {"roles/empty/README.md": "", "gpukiln.toml": '[roles]\nafter = ["empty"]\n'},
            "{shop}/roles/empty has no tasks/main.yml; wanted: a role of Ansible",
            "docs.ansible.com",
        ),
        (
            {"roles/nvtop/tasks/main.yml": ""},
            "{shop}/roles/nvtop has the name of a shipped role",
            'replace = ["nvtop"] below [roles] of gpukiln.toml',
        ),
        (
            {"roles/nvtop/tasks/main.yml": "", "gpukiln.toml": '[roles]\nreplace = ["nvtop"]\n'},
            "{shop}/roles/nvtop replaces a shipped role and has no tasks/install.yml",
            str(ROOT / "roles/nvtop/tasks/install.yml"),
        ),
        (
            {"gpukiln.toml": '[roles]\nreplace = ["site_agent"]\n'},
            "replace names 'site_agent', and no shipped role has this name",
            "name it in before or after",
        ),
        (
            {"gpukiln.toml": '[roles]\nafter = "site_agent"\n'},
            "roles.after in {shop}/gpukiln.toml is 'site_agent'",
            'wanted: a list of names, after = ["site_agent"]',
        ),
        (
            {"gpukiln.toml": '[roles]\nafterwards = ["site_agent"]\n'},
            "unknown setting of {shop}/gpukiln.toml: 'roles.afterwards'",
            "after",
        ),
        (
            {"gpukiln.toml": '[roles.lean]\nreplace = ["nvtop"]\n'},
            "unknown setting of {shop}/gpukiln.toml: 'roles.lean.replace'",
            "before",
        ),
        (
            {"gpukiln.toml": "[roles.eks-gup]\nafter = []\n"},
            "unknown image of [roles.eks-gup] in {shop}/gpukiln.toml: 'eks-gup'",
            "eks-gpu",
        ),
        ({"gpukiln.toml": "roles = 1\n"}, "{shop}/gpukiln.toml: roles is 1", "wanted: a table, [roles]"),
    ],
)
def test_a_role_that_does_not_fit_is_refused(
    shop: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], message: str, hint: str
) -> None:
    for name, text in files.items():
        write(shop, name, text)
    assert main(["config"]) == 2
    printed = capsys.readouterr().err
    assert message.format(shop=shop) in printed
    assert hint.format(shop=shop) in printed
    with pytest.raises(UsageError):
        plan()


@pytest.mark.usefixtures("shop")
def test_config_shows_roles_with_their_source(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert rows["roles.after"] == {
        "name": "roles.after",
        "value": "site_agent, site_users",
        "source": str(shop / "gpukiln.toml"),
    }
    assert rows["roles.lean.after"]["value"] == ""


def test_live_nodes_get_them_too(shop: Path) -> None:
    write(shop, "roles/site_agent/tasks/runtime.yml", TASK.format("started"))
    request = NodeApply(inventory="hosts.yml").request("node.yml", check=False)
    assert [role["runtime"] for role in request.variables["gpukiln_roles_after"]] == ["runtime", ""]
    assert request.environment["ANSIBLE_ROLES_PATH"] == f"{shop}/roles:{ROOT}/roles"
    hypervisor = NodeApply(inventory="hosts.yml").request("pve.yml", check=False)
    assert "ANSIBLE_ROLES_PATH" not in hypervisor.environment
    assert "gpukiln_roles_after" not in hypervisor.variables


def test_ansible_runs_them_in_their_order(shop: Path) -> None:
    """The loops of ansible/node.yml, with the shipped roles left out, on this machine and for no package."""
    order = shop / "order"
    for name in ("site_proxy", "site_agent"):
        for file in ("main", "runtime"):
            line = f"- {{name: Note it, ansible.builtin.shell: 'echo {name} {file} >>{order}'}}\n"
            write(shop, f"roles/{name}/tasks/{file}.yml", line)
    [play] = yaml.safe_load((ROOT / "ansible/node.yml").read_text())
    play |= {
        "become": False,
        "connection": "local",
        "tasks": [task for task in play["tasks"] if "gpukiln_own_role" in json.dumps(task)],
    }
    (shop / "play.yml").write_text(yaml.safe_dump([play]))
    request = NodeApply(inventory="hosts.yml").request("node.yml", check=False)
    roles = {name: value for name, value in request.variables.items() if name.startswith("gpukiln_roles")}
    subprocess.run(
        ["ansible-playbook", *HERE, "-e", json.dumps(roles), str(shop / "play.yml")],
        env={**request.environment, "HOME": str(shop)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    assert order.read_text().splitlines() == [
        "site_proxy main",
        "site_agent main",
        "site_proxy runtime",
        "site_agent runtime",
    ]


def test_a_role_of_a_project_may_decide_as_the_shipped_ones_do(shop: Path) -> None:
    code = (
        "from ..plan import Looks, Node, Plan, Role\n\n"
        "def look(role: Role) -> Looks:\n    return {}\n\n"
        "def decide(role: Role, node: Node) -> Plan:\n"
        "    plan = Plan()\n    plan.do = {'greeting': role['greeting']}\n    return plan\n"
    )
    write(shop, "roles/site_agent/decide.py", code)
    write(shop, "roles/site_agent/defaults/main.yml", "site_agent_greeting: from the project\n")
    tasks = "- {name: Decide, decide: , register: made}\n- debug: {msg: '{{ made.do.greeting }}'}\n"
    write(shop, "roles/site_agent/tasks/main.yml", tasks)
    play = "- {hosts: all, connection: local, gather_subset: [min], roles: [site_agent]}\n"
    write(shop, "play.yml", play)
    request = NodeApply(inventory="hosts.yml").request("node.yml", check=False)
    done = subprocess.run(
        ["ansible-playbook", *HERE, str(shop / "play.yml")],
        env={**request.environment, "HOME": str(shop)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the project" in done.stdout


def test_a_channel_of_the_project_takes_precedence_and_trusts_keys_of_the_project(shop: Path) -> None:
    shipped = load_channels()
    channel = yaml.safe_load((ROOT / "ami/channels.yaml").read_text())["channels"]["stable"]
    own = {"stable": {**channel, "keep": 9, "trust": ["keys/a.pub"]}, "nightly": {**channel, "keep": 1}}
    write(shop, "ami/channels.yaml", yaml.safe_dump({"channels": own}))
    with pytest.raises(UsageError, match=f"'keys/a.pub' is no file of {shop}"):
        load_channels()
    write(shop, "keys/a.pub", "a key")
    channels = load_channels()
    assert {name: channels[name].keep for name in ("stable", "nightly")} == {"stable": 9, "nightly": 1}
    assert channels["stable"].trust == (str(shop / "keys/a.pub"),)
    assert channels["candidate"] == shipped["candidate"]


def test_config_shows_and_checks_images_and_channels(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(shop, "ami/channels.yaml", (ROOT / "ami/channels.yaml").read_text())
    assert main(["config", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert (rows["images"]["value"], rows["images"]["source"]) == ("lean", str(shop / "ami"))
    assert rows["channels"]["value"] == "candidate, stable"
    write(shop, "ami/channels.yaml", "channels: {nightly: {}}\n")
    assert main(["config"]) == 2
    assert f"{shop}/ami/channels.yaml" in capsys.readouterr().err
    write(shop, "ami/channels.yaml", (ROOT / "ami/channels.yaml").read_text())
    write(shop, "ami/lean/image.yaml", (ROOT / "ami/eks-gpu/image.yaml").read_text())
    assert main(["config"]) == 2
    assert "ami/lean/image.yaml names the image 'eks-gpu'; wanted: 'lean'" in capsys.readouterr().err
