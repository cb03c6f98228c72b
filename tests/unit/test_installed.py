"""The wheel: built without a network, installed into an empty folder, run from another; extras left out."""

import json
import os
import subprocess
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from gpukiln import __version__, recipes
from gpukiln.catalog.load import ROOT
from gpukiln.cli.command import EXTRAS
from gpukiln.cli.main import main
from gpukiln.verify.digest import suite_digest
from tests.support.installed import Installed, build_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPES = [
    "ami/eks-gpu/eks-gpu.pkr.hcl",
    "ansible.cfg",
    "ansible/plugins/action/decide.py",
    "components.yaml",
    "docker/runner-gpu/Dockerfile",
    "examples/coder/main.tf",
    "examples/project/.github/workflows/rebuild.yml",
    "roles/nvidia_driver/tasks/main.yml",
    "scripts/bootstrap/eks-gpu-bootstrap.sh",
    "scripts/hooks/gpu-job-started.sh",
    "services/jupyter.yaml",
    "tests/host/test_gpu.py",
]
# The core's own requirements bring these: kubernetes imports requests.
CORE_HAS = {"packaging", "requests"}
LEFT_OUT = sorted({one for modules in EXTRAS.values() for one in modules} - CORE_HAS)
# Python refuses modules that only extras bring, as where they are not installed.
WITHOUT_EXTRAS = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LEFT_OUT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The program as it is installed, without extras."""
    folder = tmp_path_factory.mktemp("installed")
    program = Installed(folder, wheel, {**os.environ, "GPUKILN_HOME": str(folder / "home")})
    (program.packages / "without_extras.py").write_text(WITHOUT_EXTRAS)
    (program.packages / "without_extras.pth").write_text("import without_extras\n")
    return program


def test_the_wheel_holds_every_recipe_and_nothing_that_is_not_kept(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"gpukiln/_recipes/{name}" for name in RECIPES} <= set(names)
    kept = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    checkout = set(kept.stdout.splitlines())
    found = {name.removeprefix("gpukiln/_recipes/") for name in names if ".dist-info/" not in name}
    assert found <= checkout | {"gpukiln/recipes.py", "gpukiln/_commit"}


def test_what_is_installed_answers_from_an_empty_folder(installed, tmp_path, capsys):
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)[:12]
    shown = installed.run("--version").stdout
    assert shown in {f"gpukiln {__version__}, commit {commit}{end}\n" for end in ("", "-dirty")}
    assert installed.run("--help").stdout.startswith("Usage: gpukiln NOUN VERB")
    offers = installed.run("offer", "list", "--gpu", "T4:1", "--json")
    assert json.loads(offers.stdout)["schema"] == "offer.list/1", offers.stderr
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n"
        "spec: {containers: [{name: a, image: 'a/b:1', resources: {limits: {nvidia.com/gpu: 1}}}]}\n"
    )
    checked = installed.run("k8s", "check", str(manifest), "--json")
    main(["k8s", "check", str(manifest), "--json"])
    assert checked.stdout == capsys.readouterr().out, checked.stderr
    assert json.loads(installed.run("gpu", "list", "--json").stdout)["schema"] == "gpu.list/1"
    assert json.loads(installed.run("ami", "bases", "--json").stdout)["schema"] == "ami.bases/1"


def test_what_is_installed_makes_a_project(installed, tmp_path):
    assert installed.run("init", str(tmp_path / "shop"), "--image", "shop-gpu").returncode == 0
    workflow = (tmp_path / "shop/.github/workflows/rebuild.yml").read_text()
    assert workflow == (ROOT / "examples/project/.github/workflows/rebuild.yml").read_text()
    assert (tmp_path / "shop/ami/shop-gpu/image.yaml").is_file()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("ami", "attest", "last"), "image"),
        (("k8s", "nodes", "--provider", "karpenter", "--cluster", "a", "--gpu", "T4:1"), "k8s"),
        (("gpu", "list", "--hosts", "local://"), "image"),
    ],
)
def test_a_command_whose_extra_is_not_installed_says_which(installed, words, extra):
    done = installed.run(*words)
    assert done.returncode == 4, done.stderr
    assert f"next: pip install 'gpukiln[{extra}]'\n" in done.stderr


def test_a_hint_names_commands_as_they_are_typed(installed):
    assert "`gpukiln ami build --region us-west-2` makes the first" in installed.run("ami", "list").stderr


def test_what_is_installed_has_the_suite_of_the_checkout(installed, tmp_path):
    asked = tmp_path / "asked.py"
    asked.write_text("from gpukiln.verify.digest import suite_digest\nprint(suite_digest())\n")
    assert installed.run(str(asked), program=installed.python).stdout == f"{suite_digest()}\n"


def test_a_file_is_found_in_a_checkout_and_in_what_is_installed(installed, monkeypatch):
    assert recipes.file("roles/plan.py") == ROOT / "roles/plan.py"
    package = installed.packages / "gpukiln"
    monkeypatch.setattr(recipes, "_INSTALLED", package / "_recipes")
    assert recipes.root() == package / "_recipes"
    assert recipes.file("gpukiln/errors.py").read_text() == (ROOT / "gpukiln/errors.py").read_text()


def test_each_module_of_an_extra_is_of_a_package_that_the_extra_has():
    """By what is installed here; those of packages that others bring are named with them."""
    brought = {"cryptography": "securesystemslib", "werkzeug": "moto", "flask": "moto"}
    packages = packages_distributions()
    for extra, modules in EXTRAS.items():
        wanted = " ".join(PROJECT["optional-dependencies"][extra]).lower()
        for module in modules:
            names = [brought[module]] if module in brought else packages.get(module, [module])
            assert any(name.lower().replace("_", "-") in wanted for name in names), (extra, module)


def test_settings_of_the_wheel_name_what_is_there():
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name, place in hatch["force-include"].items():
        assert (ROOT / name).exists(), name
        assert place == f"gpukiln/_recipes/{name}"
        assert not (Path(ROOT) / place).exists()
