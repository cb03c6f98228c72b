"""The tutorials of docs/tutorials, typed from top to bottom as a reader types them."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.api_server import ApiServer, Outcome, node
from tests.support.harness import ROOT
from tests.support.tutorial import steps, type_page

PAGES = ROOT / "docs/tutorials"
# OpenSSH takes the home of the password database, so that a test could only write root's own configuration.
SSH = """\
#!/bin/sh
case $1 in -*) exec /usr/bin/ssh "$@" ;; esac
exec /usr/bin/ssh -F "{home}/ssh_config.d/$1.conf" "$@"
"""
GPUKILN = """\
#!{python}
import sys
sys.path.insert(0, {root!r})
sys.argv[0] = "gpukiln"
from gpukiln.cli.main import main
sys.exit(main())
"""


def environment_of(folder: Path, home: Path) -> dict[str, str]:
    """A shell in which `gpukiln` is installed."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {
        "gpukiln": GPUKILN.format(python=sys.executable, root=str(ROOT)),
        "ssh": SSH.format(home=home),
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "GPUKILN_HOME": str(home), "COLUMNS": "200"}


@pytest.fixture(scope="module")
def typed(image_cloud, tmp_path_factory):
    """Types a page in a cloud that has the run's image: `ami build` of a page has nothing left to do."""
    folder = tmp_path_factory.mktemp("tutorials")
    environment = environment_of(folder, image_cloud.home)
    return lambda name: type_page((PAGES / name).read_text(), folder, environment)


@pytest.mark.e2e
def test_an_image_is_built_verified_and_released(typed):
    typed("image.md")


@pytest.mark.e2e
def test_three_nodes_and_the_sick_one(typed, image_cloud):
    typed("nodes.md")
    assert not any(image_cloud.leftovers().values())


@pytest.mark.e2e
def test_a_workspace_and_away(typed, image_cloud):
    typed("workspace.md")
    assert not any(image_cloud.leftovers().values())


def test_a_job_on_a_cluster(tmp_path):
    """On the double of a cluster: a node with a T4."""
    cluster = ApiServer()
    cluster.add(node("gpu-1"))
    cluster.behave = lambda _pod, _gpus: Outcome(log="epoch 1\n")
    try:
        environment = environment_of(tmp_path, tmp_path / "home")
        environment["KUBECONFIG"] = str(cluster.kubeconfig(tmp_path))
        type_page((PAGES / "job.md").read_text(), tmp_path, environment)
    finally:
        cluster.close()


def test_a_page_that_shows_something_else_is_a_failure(tmp_path):
    page = "```console\n$ echo one\ntwo\n```\n"
    with pytest.raises(AssertionError, match="the page has:\ntwo"):
        type_page(page, tmp_path, os.environ)
    with pytest.raises(AssertionError, match="exit 3"):
        type_page("```console\n$ exit 3\n```\n", tmp_path, os.environ)


def test_every_page_is_typed():
    text = Path(__file__).read_text(encoding="utf-8")
    pages = [page for page in sorted(PAGES.glob("*.md")) if list(steps(page.read_text()))]
    assert len(pages) == 4
    assert all(page.name in text for page in pages)
