"""The Ansible collection: built, installed in an empty folder, used by a playbook outside of the checkout."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gpukiln import __version__
from gpukiln.catalog.load import ROOT
from gpukiln.nodes import collection
from tests.support.roles import PROGRAMS, asked, install_collection, outside

FULL = "gpukiln.node."
PLAY = """\
- hosts: localhost
  connection: local
  gather_subset: [min]
  roles: [{roles}]
"""
# Those of ansible-test's that need no packages: for the others it fetches pip from Ansible's own server.
QUICK = (
    *("action-plugin-docs", "changelog", "compile", "empty-init", "ignores", "line-endings", "no-assert"),
    *("no-get-exception", "no-illegal-filenames", "no-smart-quotes", "replace-urlopen", "shebang"),
    *("symlinks", "use-argspec-type-path", "use-compat-six"),
)
# It knows of units what was written, enabled and started.
SYSTEMCTL = """\
#!/bin/sh
verb=$1
shift
case $verb in
  show)
    while [ "$1" != -- ]; do shift; done
    shift
    for name; do
      load=not-found file=disabled active=inactive
      [ ! -e "/etc/systemd/system/$name" ] || load=loaded
      [ ! -e "{folder}/enable-$name" ] || file=enabled
      [ ! -e "{folder}/start-$name" ] || active=active
      printf 'LoadState=%s\\nUnitFileState=%s\\nActiveState=%s\\n\\n' $load $file $active
    done
    ;;
  enable | start) touch "{folder}/$verb-$1" ;;
esac
"""
# What is written lands in memory: nothing of this machine is changed.
WITHIN = """\
set -e
mount -t tmpfs none {folder}/over
for path in etc usr var/lib; do
  mkdir -p {folder}/over/$path/up {folder}/over/$path/work
  own=lowerdir=/$path,upperdir={folder}/over/$path/up,workdir={folder}/over/$path/work
  mount -t overlay none -o $own /$path
done
ansible-playbook --check --diff site.yml
for run in first second; do
  echo "=== $run"
  ansible-playbook site.yml
done
echo "=== written"
cat /etc/gpukiln/gpus.toml /etc/gpukiln/bootstrap.env
/usr/local/bin/gpukiln-gpu --help
ls /usr/local/sbin/eks-gpu-bootstrap /usr/local/share/man/man1/gpukiln-gpu.1
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed collection, far from the checkout."""
    folder = tmp_path_factory.mktemp("collection")
    own = install_collection(folder)
    assert (folder / f"built/gpukiln-node-{__version__}.tar.gz").exists()
    return own


def names(installed: Path) -> list[str]:
    return sorted(path.parents[1].name for path in installed.glob("roles/*/meta/main.yml"))


def test_it_has_every_role_that_means_something_without_an_image(installed: Path) -> None:
    here = {path.parents[1].name for path in ROOT.glob("roles/*/meta/main.yml")}
    assert here - set(names(installed)) == {"image_record"}
    rows = re.findall(r"(?m)^\| \[(\w+)\]\((\S+)\)", (installed / "README.md").read_text())
    assert [name for name, _ in rows] == names(installed)
    assert all((installed / link).exists() for _, link in rows)


def test_nothing_in_it_names_a_place_outside(installed: Path) -> None:
    for file in (path for path in installed.rglob("*") if path.suffix in (".py", ".yml", ".md", ".j2")):
        text = file.read_text()
        assert str(ROOT) not in text, file
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text) if file.name == "README.md" else ():
            assert (file.parent / link).exists(), f"{file}: {link}"
        for one in ast.walk(ast.parse(text)) if file.suffix == ".py" else ():
            # Below functions: what a checkout does, where nothing was packed.
            if isinstance(one, ast.ImportFrom) and not one.level and one.col_offset == 0:
                assert not str(one.module).startswith(("gpukiln", "roles")), file


def test_defaults_mean_the_same_as_in_the_checkout(installed: Path) -> None:
    """Without components.yaml: each role's defaults have what it takes of it."""
    checked = 0
    for name in names(installed):
        values = yaml.safe_load((installed / "roles" / name / "defaults/main.yml").read_text())
        texts = [text for text in values.values() if isinstance(text, str)]
        assert not [text for text in texts if re.search(r"(?<!gpukiln_)components\.", text)]
        known = values.get(collection.COMPONENTS, {})
        for reference in re.findall(rf"{collection.COMPONENTS}\.(\w+)", " ".join(texts)):
            checked += 1
            assert (
                known[reference]
                == yaml.safe_load((ROOT / "components.yaml").read_text())["components"][reference]
            )
    assert checked > 5
    own = yaml.safe_load((installed / "roles/nvidia_driver/defaults/main.yml").read_text())
    version = own[collection.COMPONENTS]["nvidia_driver"]["version"]
    assert version == asked("nvidia_driver")["version"]


def test_a_playbook_elsewhere_names_every_role(installed: Path, tmp_path: Path) -> None:
    roles = ", ".join(FULL + name for name in names(installed))
    (tmp_path / "site.yml").write_text(PLAY.format(roles=roles))
    for options in (["--syntax-check"], ["--list-tasks"]):
        done = subprocess.run(
            [PROGRAMS / "ansible-playbook", *options, "site.yml"],
            env=outside(tmp_path, installed),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert f"{FULL}nvidia_persistence : Decide what is missing" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces are root's")
def test_a_playbook_elsewhere_converges_a_machine(installed: Path, tmp_path: Path) -> None:
    """Two roles with files, units, a group and the packed program; and one that other roles include."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "over").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL.replace("{folder}", str(tmp_path)))
    (tmp_path / "bin/systemctl").chmod(0o755)
    play = PLAY.format(roles=f"{FULL}gpu_bootstrap, {FULL}gpu_tools")
    (tmp_path / "site.yml").write_text(play + "  vars: {gpu_tools_limits: {hours: 48}}\n")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", WITHIN.format(folder=tmp_path)],
        env=outside(tmp_path, installed),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check, first, second, written = done.stdout.split("=== ")
    assert "+++ /etc/systemd/system/gpukiln-bootstrap.service" in check
    assert "+/usr/local/bin/gpukiln-gpu" in check
    assert "changed=0" not in first
    assert "changed=0" in second, second
    assert '[limits]\n"hours" = 48\n' in written
    assert "\nWAIT_S=180\n" in written
    assert "Usage: gpukiln-gpu" in written
    assert written.endswith("/usr/local/share/man/man1/gpukiln-gpu.1\n")
    assert not Path("/etc/gpukiln/gpus.toml").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces are root's")
def test_settings_that_the_program_does_not_understand_are_refused(installed: Path, tmp_path: Path) -> None:
    play = PLAY.format(roles=f"{FULL}gpu_tools")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SYSTEMCTL.replace("{folder}", str(tmp_path)))
    (tmp_path / "bin/systemctl").chmod(0o755)
    (tmp_path / "site.yml").write_text(play + "  vars: {gpu_tools_limits: {gpu: 4}}\n")
    done = subprocess.run(
        [PROGRAMS / "ansible-playbook", "--check", "site.yml"],
        env=outside(tmp_path, installed),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "gpu_tools_limits, gpu_tools_busy or gpu_tools_price: [limits] has 'gpu'" in done.stdout


def sanity(own: Path, home: Path) -> subprocess.CompletedProcess[str]:
    tests = [word for name in QUICK for word in ("--test", name)]
    return subprocess.run(
        [PROGRAMS / "ansible-test", "sanity", "--color", "no", *tests],
        env=outside(home),
        cwd=own,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not (PROGRAMS / "ansible-test").exists(), reason="ansible-test is not installed")
def test_ansible_finds_nothing_wrong_with_its_form(tmp_path: Path) -> None:
    own = collection.stage(tmp_path)
    done = sanity(own, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (own / "plugins/modules/broken.py").write_text("def main(:\n")
    (own / "roles/nvtop/tasks/a.sh").write_text("#!/bin/zsh\n")
    broken = sanity(own, tmp_path)
    assert broken.returncode != 0
    assert "plugins/modules/broken.py:1:" in broken.stdout
    assert "roles/nvtop/tasks/a.sh:1:1: unexpected non-module shebang" in broken.stdout
