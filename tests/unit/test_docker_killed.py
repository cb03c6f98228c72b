"""A container build that was killed: told, and ended by the next build, of whichever image."""

from types import SimpleNamespace

import pytest

from gpukiln.commands import docker
from gpukiln.docker import build as building
from gpukiln.docker.builds import ContainerBuilds
from gpukiln.errors import UnavailableError
from gpukiln.progress import Progress
from tests.support.docker_records import a_build, a_plan


@pytest.fixture
def builds(tmp_path):
    return ContainerBuilds(tmp_path)


def die(builds, name, image="runner-gpu"):
    build = a_build(builds.folder / name)
    document = build.read()
    plan = building.replace(document.plan, image=image)
    build.write(building.replace(document, state="running", plan=plan))
    return build


def test_a_killed_build_is_not_called_running(builds, monkeypatch, capsys):
    die(builds, "20260101-000000-runner-gpu-0000")
    monkeypatch.setenv("GPUKILN_HOME", str(builds.home.parent))
    docker.DockerList().run()
    assert "killed" in capsys.readouterr().out
    with building._build_alone(builds.home):
        docker.DockerList().run()
    assert "running" in capsys.readouterr().out


def test_the_next_build_of_any_image_ends_it(builds, monkeypatch):
    killed = [die(builds, "20260101-000000-a-0000"), die(builds, "20260101-000001-b-0000", "other")]
    asked = []

    def breaks(*_):
        raise UnavailableError("no base")

    monkeypatch.setattr(building, "_base", breaks)
    engine = SimpleNamespace(name="buildah", title="Buildah", remove_unfinished=asked.append)
    with pytest.raises(UnavailableError, match="no base"):
        building.build_container(a_plan(), engine, builds, Progress())
    assert [build.read().state for build in killed] == ["aborted", "aborted"]
    assert {"other", "runner-gpu"} == set(asked)
