"""Defaults of a user and of a project: which one wins, where they count, what is wrong with a file."""

import json
from dataclasses import replace

import pytest

from gpukiln import __version__, recipes
from gpukiln.catalog.images import image_names, load_image
from gpukiln.catalog.load import ROOT
from gpukiln.cli import settings
from gpukiln.cli.main import command, main
from gpukiln.images import digest
from gpukiln.images.channels import load_channels
from gpukiln.images.commit import git_commit
from gpukiln.options import options_of, read
from gpukiln.project import SETTINGS, roles

PROJECT = """\
cloud = "aws"
region = "eu-central-1"
profile = "team"
image = "mine"
channel = "candidate"
subnet_id = "subnet-1"

[components.nvidia_driver]
branch = 580
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder below one with gpukiln.toml; no variable is set."""
    for name in (
        *(f"GPUKILN_{one.upper()}" for one in SETTINGS),
        "AWS_REGION",
        "AWS_PROFILE",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "gpukiln.toml").write_text(PROJECT)
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    return tmp_path / "gpukiln.toml"


def typed(name, *words):
    return read(f"gpukiln {name}", options_of(command(name)), words, settings.complete)


@pytest.mark.usefixtures("project")
def test_an_option_wins_over_a_variable_and_that_over_the_project(monkeypatch):
    assert typed("ami.plan")["region"] == "eu-central-1"
    monkeypatch.setenv("GPUKILN_REGION", "us-east-1")
    assert typed("ami.plan")["region"] == "us-east-1"
    assert typed("ami.plan", "--region", "us-west-2")["region"] == "us-west-2"


@pytest.mark.usefixtures("project")
def test_a_command_gets_the_settings_of_its_options():
    assert typed("ami.build", "--force") == {
        "force": True,
        "cloud": "aws",
        "region": "eu-central-1",
        "profile": "team",
        "image": "mine",
        "subnet_id": "subnet-1",
        "set": "nvidia_driver.branch=580",
    }
    assert typed("ami.release", "last") == {"build": "last", "channel": "candidate"}
    assert typed("offer.list") == {"regions": "eu-central-1"}
    assert typed("gpu.list") == typed("workspace.show") == {}


@pytest.mark.usefixtures("project")
def test_what_is_for_aws_is_left_out_elsewhere():
    assert typed("ami.plan", "--cloud", "embedded") == {
        "cloud": "embedded",
        "region": "eu-central-1",
        "image": "mine",
        "set": "nvidia_driver.branch=580",
    }


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ("cuda.version=12.4", "nvidia_driver.branch=580,cuda.version=12.4"),
        ("nvidia_driver.branch=535", "nvidia_driver.branch=535"),
    ],
)
def test_a_component_that_is_typed_wins_over_the_projects(given, changed):
    assert typed("ami.plan", "--set", given)["set"] == changed


def test_aws_names_the_region_where_nobody_else_does(project, monkeypatch, tmp_path):
    project.write_text('cloud = "aws"\n')
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert typed("ami.plan")["region"] == ""
    (tmp_path / "config").write_text("[profile team]\nregion = sa-east-1\n")
    assert typed("ami.plan", "--profile", "team")["region"] == "sa-east-1"
    monkeypatch.setenv("AWS_REGION", "us-east-2")
    assert typed("ami.plan", "--profile", "team")["region"] == "us-east-2"
    assert "region" not in typed("ami.plan", "--cloud", "embedded")


@pytest.mark.usefixtures("project")
def test_offers_are_of_the_region_of_awss_own_settings(project, monkeypatch, tmp_path, capsys):
    project.write_text("")
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("offer.list", "k8s.nodes"):
        assert not {"region", "regions"} & set(typed(name))
    config.write_text("[default]\nregion = ap-south-1\n[profile team]\nregion = sa-east-1\n")
    assert typed("offer.list")["regions"] == "ap-south-1"
    for variable, value, source, region in (
        ("AWS_PROFILE", "team", "AWS profile team", "sa-east-1"),
        ("AWS_DEFAULT_REGION", "eu-west-3", "$AWS_DEFAULT_REGION", "eu-west-3"),
        ("AWS_REGION", "us-east-2", "$AWS_REGION", "us-east-2"),
    ):
        monkeypatch.setenv(variable, value)
        assert typed("offer.list")["regions"] == typed("k8s.nodes")["region"] == region
        assert "region" not in typed("cloud.sweep")  # of the embedded cloud
        assert typed("cloud.sweep", "--cloud", "aws")["region"] == region
        capsys.readouterr()
        assert main(["config", "--json"]) == 0
        settings_shown = json.loads(capsys.readouterr().out)["settings"]
        [row] = [row for row in settings_shown if row["name"] == "region"]
        assert (row["value"], row["source"]) == (region, f"{source}, on aws")
    monkeypatch.setenv("GPUKILN_REGION", "us-west-1")
    assert typed("offer.list")["regions"] == "us-west-1"
    assert typed("offer.list", "--region", "us-west-2")["regions"] == "us-west-2"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("regoin = 'x'", "unknown setting of {file}: 'regoin'"),
        ("region = [1]", "region in gpukiln.toml is [1]"),
        ("region = ", "{file}: Invalid value"),
        ("[components]\nbranch = 1", "unknown setting of {file}: 'components.branch'"),
    ],
)
def test_a_mistake_in_the_file_is_named(project, capsys, text, told):
    project.write_text(text)
    assert main(["ami", "plan"]) == 2
    assert told.format(file=project) in capsys.readouterr().err


def test_config_says_where_each_setting_comes_from(project, monkeypatch, capsys):
    monkeypatch.setenv("GPUKILN_IMAGE", "other")
    assert main(["config", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["settings"]
    found = {one["name"]: (one["value"], one["source"]) for one in printed}
    assert found == {
        "cloud": ("aws", str(project)),
        "region": ("eu-central-1", str(project)),
        "profile": ("team", str(project)),
        "image": ("other", "$GPUKILN_IMAGE"),
        "channel": ("candidate", str(project)),
        "subnet_id": ("subnet-1", str(project)),
        "ssh_cidr": ("", "default"),
        "components.nvidia_driver.branch": ("580", str(project)),
    }
    assert main(["config"]) == 0
    assert "image                            other         $GPUKILN_IMAGE" in capsys.readouterr().out


@pytest.mark.usefixtures("project")
def test_init_makes_a_project_that_changes_nothing(tmp_path, monkeypatch, capsys):
    shipped = load_channels()
    assert main(["init", str(tmp_path / "new")]) == 0
    monkeypatch.chdir(tmp_path / "new")
    assert {one.source for one in settings.values()} == {"default"}
    assert load_channels() == shipped
    assert not roles()
    file = tmp_path / "new" / "gpukiln.toml"
    file.write_text(file.read_text().replace('# region = ""', 'region = "us-east-1"'))
    assert typed("ami.plan") == {"region": "us-east-1"}
    capsys.readouterr()
    assert main(["init", str(tmp_path / "new")]) == 6
    assert "next: `gpukiln project config` shows it" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_init_writes_the_workflows_that_are_checked_here_and_keeps_what_is_there(tmp_path, capsys):
    """tests/unit/test_lint.py and test_workflows.py check the files of examples/project."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new/README.md").write_text("ours\n")
    assert main(["init", str(tmp_path / "new")]) == 0
    written = {
        str(file.relative_to(tmp_path / "new")): file.read_text()
        for file in (tmp_path / "new").rglob("*")
        if file.is_file()
    }
    assert sorted(written) == [
        ".github/dependabot.yml",
        ".github/workflows/plan.yml",
        ".github/workflows/rebuild.yml",
        "README.md",
        "ami/channels.yaml",
        "gpukiln.toml",
        "requirements.txt",
    ]
    for name in (".github/workflows/plan.yml", ".github/workflows/rebuild.yml"):
        assert written[name] == (ROOT / "examples/project" / name).read_text()
    assert written["requirements.txt"].endswith(f"\ngpukiln[image]=={__version__}\n")
    assert written["README.md"] == "ours\n"
    assert "README.md is there and stays as it is" in capsys.readouterr().err


def test_a_field_that_is_true_or_false_is_written_as_set_has_it(project):
    project.write_text("[components.nvidia_driver]\nkeep_build_tools = false\n")
    assert typed("ami.plan")["set"] == "nvidia_driver.keep_build_tools=false"


@pytest.mark.usefixtures("project")
def test_components_of_a_project_are_no_set_of_a_hypervisor(tmp_path, capsys):
    inventory = tmp_path / "hosts.yml"
    assert main(["node", "apply", "--pve", "--inventory", str(inventory)]) == 2
    assert f"there is no inventory {inventory}" in capsys.readouterr().err
    assert main(["node", "apply", "--pve", "--set", "cuda.version=1"]) == 2
    assert "--pve has one role" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_an_image_of_a_project_is_known_there_and_counts_in_a_builds_digest(tmp_path, monkeypatch, capsys):
    assert main(["init", str(tmp_path / "new"), "--image", "team-gpu"]) == 0
    assert "`gpukiln ami plan --image team-gpu`" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "new"), "--image", "team-gpu"]) == 6
    assert main(["init", str(tmp_path / "new"), "--image", "../x"]) == 2
    assert "team-gpu" not in image_names()
    folder = tmp_path / "new" / "ami" / "team-gpu"
    monkeypatch.chdir(folder)
    assert image_names() == ["eks-gpu", "team-gpu"]
    assert load_image("team-gpu") == replace(load_image("eks-gpu"), name="team-gpu")
    names = {name for name, path in digest._files(ROOT, "team-gpu") if path.is_relative_to(folder)}
    assert names == {f"ami/team-gpu/{name}" for name in ("eks-gpu.pkr.hcl", "plugins/plugins.pkr.hcl")}


def test_what_is_installed_has_no_commit_of_the_repository_that_it_is_in(tmp_path, monkeypatch):
    assert git_commit(ROOT)
    monkeypatch.setattr(recipes, "_INSTALLED", tmp_path)
    assert git_commit(ROOT) is None
