"""Every engine that this machine has builds, tells what it built, and gives a container to judge."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import testinfra

from gpukiln.docker.engine import BuildRequest, Engine, native_platform
from gpukiln.docker.engines import find_engine
from gpukiln.verify import plugin  # noqa: F401 - it makes buildah:// known
from tests.support import nvml_double
from tests.support.engines import GPU_HOOK, offer, small_root
from tests.support.gpus import double

DOCKERFILE = """\
ARG BASE
FROM ${BASE} AS base
COPY greeting /greeting
RUN cat /greeting >/copy
FROM base AS last
COPY --from=base /copy /last
ENV WHO=job
USER 1001
ENTRYPOINT ["/bin/env"]
"""
SLOW = """\
ARG BASE
FROM ${BASE}
LABEL gpukiln.image=slow
RUN sleep 100
"""


@pytest.fixture(scope="module")
def root_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def docker_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        offer("docker", patch)
        folder = tmp_path_factory.mktemp("docker")
        hook = folder / "bin/nvidia-container-runtime-hook"
        hook.parent.mkdir()
        hook.write_text(GPU_HOOK)
        hook.chmod(0o755)
        patch.setenv("PATH", f"{os.environ['PATH']}:{hook.parent}")
        address = f"unix://{folder}/docker.sock"
        log = (folder / "dockerd.log").open("w")
        daemon = subprocess.Popen(
            [
                *("dockerd", "--host", address, "--iptables=false", "--bridge=none", "--storage-driver=vfs"),
                *(f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            patch.setenv("DOCKER_HOST", address)
            for _ in range(120):
                if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0:
                    break
                assert daemon.poll() is None, (folder / "dockerd.log").read_text()[-2000:]
                time.sleep(0.5)
            yield
        finally:
            daemon.terminate()
            daemon.wait(60)
            if (namespace := folder / "exec/netns/default").exists():  # the engine leaves it mounted
                subprocess.run(["umount", str(namespace)], check=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    name, buildkit = request.param
    if name == "docker":
        request.getfixturevalue("docker_socket")
        if buildkit and not _buildx() and Path("/usr/bin/docker").exists():
            monkeypatch.setenv("PATH", f"/usr/bin:{os.environ['PATH']}")  # Debian's has BuildKit built in
        monkeypatch.setenv("DOCKER_BUILDKIT", "1" if buildkit else "0")
    else:
        if name == "podman":
            offer(name, monkeypatch)
            (settings := tmp_path / "containers.conf").write_text('[engine]\nruntime = "runc"\n')
            if not shutil.which("crun"):
                monkeypatch.setenv("CONTAINERS_CONF", str(settings))
        elif not shutil.which(name):
            pytest.skip(f"{name} is not installed")
        conf = tmp_path / "storage.conf"
        conf.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/g"\nrunroot = "{tmp_path}/r"\n')
        monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(conf))
    found = find_engine(name)
    if name == "docker" and getattr(found, "buildkit", None) != buildkit:
        pytest.skip("this docker has no BuildKit: neither buildx nor a release before 23")
    return found


def _buildx() -> bool:
    return subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "engine",
    [("docker", False), ("docker", True), ("podman", None), ("buildah", None)],
    indirect=True,
    ids=["docker", "docker-buildkit", "podman", "buildah"],
)
def test_an_engine_builds_tells_and_runs(engine: Engine, root_tar: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "greeting").write_text("hello\n" * 1000)
    (dockerfile := tmp_path / "Dockerfile").write_text(DOCKERFILE)
    base_name, image_name = (f"localhost/{tmp_path.name}/{name}:1".lower() for name in ("base", "image"))
    assert engine.inspect(image_name) is None
    engine.load_base(root_tar, base_name)
    request = BuildRequest(
        context,
        dockerfile,
        (image_name,),
        {"BASE": base_name},
        {"gpukiln.build": "test"},
        native_platform(),
    )
    done = subprocess.run(
        engine.build_command(request),
        env={**os.environ, **engine.build_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    image = engine.inspect(image_name)
    assert image is not None
    assert image.id.startswith("sha256:")
    assert image.user == "1001"
    assert image.entrypoint == ("/bin/env",)
    assert image.size >= sum(layer.size for layer in image.layers) * 0.99
    copied = [layer for layer in image.layers if layer.created_by.startswith("COPY")]
    assert copied
    assert all(layer.size >= 6000 for layer in copied)
    with engine.container(image_name, name="gpukiln-e2e", gpus=False) as hostspec:
        host = testinfra.get_host(hostspec)
        assert host.run("id -u; echo $WHO; cat /last").stdout.split()[:3] == ["1001", "job", "hello"]
        assert host.run("exit 3").rc == 3
    engine.remove(image_name)
    assert engine.inspect(image_name) is None


@pytest.mark.parametrize("engine", [("buildah", None)], indirect=True, ids=["buildah"])
def test_what_a_build_leaves_that_was_cut_off_is_removed(
    engine: Engine, root_tar: Path, tmp_path: Path
) -> None:
    (context := tmp_path / "context").mkdir()
    (dockerfile := tmp_path / "Dockerfile").write_text(SLOW)
    engine.load_base(root_tar, "localhost/slow-base:1")
    request = BuildRequest(
        context, dockerfile, ("localhost/slow:1",), {"BASE": "localhost/slow-base:1"}, {}, native_platform()
    )
    environment = {**os.environ, **engine.build_environment()}
    process = subprocess.Popen(
        engine.build_command(request),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert any("RUN sleep" in line for line in process.stdout or ())
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(30)

    def left() -> list[str]:
        listed = subprocess.run(
            ["buildah", "containers", "--quiet"], capture_output=True, text=True, check=True
        )
        return listed.stdout.split()

    assert len(left()) == 1, "buildah removes it by itself now: remove_unfinished can go"
    engine.remove_unfinished("another")
    assert len(left()) == 1
    engine.remove_unfinished("slow")
    assert left() == []


def test_a_container_has_the_gpus_of_its_lease_as_long_as_it_runs(
    docker_socket: None, root_tar: Path, tmp_path: Path
) -> None:
    del docker_socket
    subprocess.run(["docker", "import", str(root_tar), "tools:1"], check=True, capture_output=True)
    node = double(nvml_double.build(tmp_path, branch=535), tmp_path, "p4d.24xlarge")
    environment = {**os.environ, **node.environment, "PATH": os.environ["PATH"]}

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpukiln.gpus", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = typed("run", "-n", "2", "--docker", "tools:1", "--", "/bin/env")
    given = re.search(r"NVIDIA_VISIBLE_DEVICES=(\S+)", done.stdout)
    assert given, done.stdout + done.stderr
    assert len(given[1].split(",")) == 2
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in done.stdout
    assert "CUDA_VISIBLE_DEVICES" not in done.stdout  # GPUs are numbered anew in there
    assert typed("run", "--docker", "tools:1", "--", "/bin/sh", "-c", "exit 7").returncode == 7

    def held() -> list[dict[str, object]]:
        return list(json.loads(typed("leases", "--json").stdout)["nodes"][0]["leases"])

    def boxes() -> str:
        asked = ["docker", "ps", "--quiet"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    def sleeping() -> tuple[subprocess.Popen[bytes], str]:
        command = [sys.executable, "-m", "gpukiln.gpus", "run", "--docker", "tools:1", "--"]
        wrapper = subprocess.Popen(
            [*command, "/bin/sleep", "100"],
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        for _ in range(100):
            time.sleep(0.1)
            if box := boxes():
                return wrapper, box
        raise AssertionError("no container runs")

    assert held() == []
    # Docker's own command is killed, with who waits for it or alone: its container lives, so does its lease.
    for whole in (True, False):
        wrapper, box = sleeping()
        [lease] = held()
        if whole:
            os.killpg(wrapper.pid, signal.SIGKILL)
        else:
            os.kill(int(str(lease["job_pid"])), signal.SIGKILL)
        wrapper.wait(30)
        time.sleep(0.5)
        assert [(one["id"], one["kind"]) for one in held()] == [(lease["id"], "container")]
        subprocess.run(["docker", "kill", box], check=True, capture_output=True)
        assert held() == []
    # One whose time is up ends, though the first process of a container ignores SIGTERM.
    words = ["run", "--docker", "tools:1", "--for", "2s", "--", "/bin/sleep", "100"]
    program = f"from gpukiln.gpus import cli, run; run.GRACE_S = 1.0; raise SystemExit(cli.main({words}))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert done.returncode == 124, done.stderr
    assert (boxes(), held()) == ("", [])
