"""The probe's container: an image that every engine can load, started and removed by each that is here."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from gpukiln.probe import base, container

pytestmark = pytest.mark.usefixtures("nothing_hangs")
GPU = "GPU 0: NVIDIA H100"


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs of the machine are; each writes down how it was called."""
    monkeypatch.setattr(base, "PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def engine(folder: Path, name: str, script: str = "") -> Path:
    calls = folder / f"{name}.calls"
    calls.touch()
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{script}\n')
    program.chmod(0o755)
    return calls


def test_the_image_has_the_form_that_docker_saves(tmp_path: Path) -> None:
    library = tmp_path / "libc.so.6"
    library.write_bytes(b"\x7fELF")
    with tarfile.open(fileobj=io.BytesIO(container._archive([str(library)]))) as image:
        members = {name: file.read() for name in image.getnames() if (file := image.extractfile(name))}
    [manifest] = json.loads(members["manifest.json"])
    assert manifest["RepoTags"] == [container.NAME]
    [layer] = manifest["Layers"]
    config = json.loads(members[manifest["Config"]])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(members[layer]).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(members[layer])) as files:
        assert files.getnames() == [str(library).lstrip("/")]


def test_each_engine_starts_it_with_the_gpus_and_removes_it(engines: Path) -> None:
    calls = {
        name: engine(engines, name, f'case "$*" in *nvidia-smi*) echo "{GPU}" ;; esac')
        for name in ("docker", "ctr", "podman")
    }
    found = container.probe([], ["nvidia-smi", "-L"])
    assert found == {name: {"rc": 0, "out": f"{GPU}\n"} for name in ("docker", "containerd", "podman")}
    docker, ctr, podman = (calls[name].read_text().splitlines() for name in ("docker", "ctr", "podman"))
    assert docker[0].startswith("load --quiet --input /")
    assert docker[1:] == [
        "run --rm --network none --gpus all gpukiln-verify:probe nvidia-smi -L",
        "image rm --force gpukiln-verify:probe",
    ]
    assert "--device nvidia.com/gpu=all" in podman[1]
    assert podman[2] == f"image rm --force {container.FULL_NAME}"
    assert "--runc-binary nvidia-container-runtime" in ctr[1]
    assert all(line.startswith("--namespace gpukiln-verify ") for line in ctr[:3])
    assert ctr[2:] == [
        f"--namespace gpukiln-verify images remove --sync {container.FULL_NAME}",
        "namespaces remove gpukiln-verify",
    ]


def test_what_can_not_be_loaded_is_not_started(engines: Path) -> None:
    for name in ("docker", "ctr", "podman"):
        engine(engines, name, "echo no space left >&2; exit 3")
    found = container.probe([], ["nvidia-smi", "-L"])
    assert found == {name: {"rc": 3, "out": "no space left"} for name in ("docker", "containerd", "podman")}
    assert len((engines / "docker.calls").read_text().splitlines()) == 1


def test_a_container_that_fails_is_removed_too(engines: Path) -> None:
    calls = engine(engines, "docker", 'case "$1" in run) echo no such device >&2; exit 125 ;; esac')
    assert container.probe([], ["nvidia-smi"])["docker"] == {"rc": 125, "out": "no such device"}
    assert calls.read_text().splitlines()[-1] == "image rm --force gpukiln-verify:probe"


def test_the_libraries_of_a_program_are_the_c_librarys(engines: Path) -> None:
    lines = (
        "linux-vdso.so.1 (0x7ffd)",
        "libm.so.6 => /lib/libm.so.6 (0x7f)",
        "libz.so.1 => /lib/libz.so.1 (0x7f)",
    )
    linked = "\n".join([*lines, "libc.so.6 => /lib/libc.so.6 (0x7f)", "/lib64/ld-linux-x86-64.so.2 (0x7f)"])
    engine(engines, "ldd", f"cat <<'END'\n{linked}\nEND")
    assert container.libraries_of("nvidia-smi") == [
        "/lib/libc.so.6",
        "/lib/libm.so.6",
        "/lib64/ld-linux-x86-64.so.2",
    ]


def test_containerd_is_asked_with_what_joining_a_cluster_puts_in_place(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy goes through what systemd runs before containerd; the template itself stays as it is."""
    template, unit = engines / "config.toml", engines / "gpukiln.conf"
    template.write_text("version = 2\n")
    add = engines / "add-nvidia"
    add.write_text(
        '#!/bin/sh\necho \'[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\' >>"$1"\n'
    )
    add.chmod(0o755)
    unit.write_text(f"[Service]\nExecStartPre={add}\n")
    engine(engines, "containerd", '[ "$1 $3 $4" = "--config config dump" ] && cat "$2"')
    for name, path in (("JOIN_SCRIPT", unit), ("JOIN_TEMPLATES", template), ("CONTAINERD_DROP_IN", unit)):
        monkeypatch.setattr(container, name, str(path))
    found = container.runtimes_after_join()
    assert found == {str(template): {"rc": 0, "error": "", "runtimes": ["nvidia"]}}
    assert template.read_text() == "version = 2\n"
    add.write_text("#!/bin/sh\necho damaged >&2\nexit 2\n")
    assert container.runtimes_after_join()[str(template)] == {"rc": 2, "error": "damaged", "runtimes": []}
