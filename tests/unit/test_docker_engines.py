"""Engines are found, not asked for; each is told what it can do and refuses what it can't."""

import os
from pathlib import Path

import pytest

from gpukiln.docker.engine import BuildRequest, instruction, native_platform
from gpukiln.docker.engines import find_engine
from gpukiln.errors import UnavailableError, UsageError

DOCKER = """case "$1 $2" in
  "version --format") echo "{server} {client}";;
  "buildx version") exit {buildx};;
  *) exit 99;;
esac"""
PODMAN = 'echo "4.3.1"'
BUILDAH = 'echo \'{"version": "1.28.2"}\''
DEAD = 'echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock." >&2; exit 1'


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DOCKER_BUILDKIT", raising=False)
    return tmp_path


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def docker(server: str, client: str, *, buildx: bool) -> str:
    return (
        DOCKER.replace("{server}", server)
        .replace("{client}", client)
        .replace("{buildx}", str(int(not buildx)))
    )


def request(**options: object) -> BuildRequest:
    values: dict[str, object] = {
        "context": Path("/c"),
        "dockerfile": Path("/d"),
        "tags": ("t:1",),
        "arguments": {"BASE": "b"},
        "labels": {},
        "platform": native_platform(),
    }
    return BuildRequest(**{**values, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("server", "client", "buildx", "title", "tool"),
    [
        ("20.10.24", "20.10.24", False, "docker 20.10.24 with BuildKit", ["docker", "build"]),
        ("20.10.24", "28.2.2", False, "docker 20.10.24 without BuildKit", ["docker", "build"]),
        ("28.2.2", "28.2.2", True, "docker 28.2.2 with BuildKit", ["docker", "buildx", "build"]),
    ],
)
def test_docker_builds_with_buildkit_where_its_command_line_has_it(
    programs: Path, server: str, client: str, buildx: bool, title: str, tool: list[str]
) -> None:
    put(programs, "docker", docker(server, client, buildx=buildx))
    put(programs, "buildah", BUILDAH)
    engine = find_engine()
    assert engine.title == title
    command = engine.build_command(request())
    assert command[: len(tool)] == tool
    assert command[-1] == "/c"
    assert engine.build_environment()["DOCKER_BUILDKIT"] == str(int("with BuildKit" in title))


def test_who_turns_buildkit_off_gets_the_old_builder(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(programs, "docker", docker("28.2.2", "28.2.2", buildx=True))
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    assert find_engine().title == "docker 28.2.2 without BuildKit"


def test_the_next_engine_is_taken_where_one_does_not_work(programs: Path) -> None:
    put(programs, "docker", DEAD)
    put(programs, "buildah", BUILDAH)
    assert find_engine().title == "buildah 1.28.2"
    put(programs, "podman", PODMAN)
    assert find_engine().title == "podman 4.3.1"
    assert find_engine("buildah").name == "buildah"


def test_without_an_engine_every_reason_is_given(programs: Path) -> None:
    put(programs, "docker", DEAD)
    with pytest.raises(UnavailableError, match="no container engine works on this machine") as caught:
        find_engine()
    assert [line.partition(":")[0] for line in caught.value.details] == [
        "docker does not answer",
        "podman is not on PATH",
        "buildah is not on PATH",
    ]
    with pytest.raises(UnavailableError, match="podman does not work here"):
        find_engine("podman")
    with pytest.raises(UsageError, match="unknown engine 'lxc'"):
        find_engine("lxc")


def test_what_an_engine_cannot_do_is_said_before_it_runs(programs: Path) -> None:
    put(programs, "docker", docker("20.10.24", "28.2.2", buildx=False))
    engine = find_engine()
    with pytest.raises(UsageError, match="--cache-to"):
        engine.build_command(request(cache_to=("type=registry,ref=a",)))
    with pytest.raises(UsageError, match="builds for linux/"):
        engine.build_command(request(platform="linux/s390x"))
    put(programs, "docker", docker("20.10.24", "20.10.24", buildx=False))
    with pytest.raises(UsageError, match="buildx, which --cache-to needs"):
        find_engine().build_command(request(cache_to=("type=registry,ref=a",)))
    put(programs, "docker", docker("28.2.2", "28.2.2", buildx=True))
    assert "--cache-to=type=registry,ref=a" in find_engine().build_command(
        request(cache_to=("type=registry,ref=a",))
    )


def test_an_instruction_is_shown_without_what_the_engines_put_around_it() -> None:
    assert instruction("/bin/sh -c #(nop) COPY dir:1 in /a ") == "COPY dir:1 in /a"
    assert instruction("|1 CUDA=12.1 /bin/bash -o pipefail -c apt-get update") == "RUN apt-get update"
    assert instruction("COPY a /b # buildkit") == "COPY a /b"
    assert os.fspath(request().options()[-2]) == "/d"
