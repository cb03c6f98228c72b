"""What goes into a container image is fetched once, checked, and laid out as its Dockerfile expects it."""

import hashlib
import io
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gpukiln.catalog.components import load_components
from gpukiln.docker import context
from gpukiln.docker.context import image_record, key_fingerprints, make_context, unpack_redistributable
from gpukiln.docker.plan import ContainerPart, ContainerPlan
from gpukiln.errors import UnavailableError
from tests.support.docker_records import CUT_OFF, a_plan

LOCK = """\
numpy==2.2.6 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
tomli==2.0 ; python_full_version < '3.11' \\
    --hash=sha256:cc
colorama==0.4 ; sys_platform == 'win32' \\
    --hash=sha256:dd
"""


def test_markers_are_judged_for_the_python_of_the_base_and_not_for_this_one() -> None:
    assert context.requirements_for(LOCK, "3.10", "x86_64") == [
        "numpy==2.2.6 --hash=sha256:aa --hash=sha256:bb",
        "tomli==2.0 --hash=sha256:cc",
    ]
    assert len(context.requirements_for(LOCK, "3.11", "x86_64")) == 1


def test_a_redistributable_becomes_the_toolkits_layout(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia_cuda_nvrtc_cu12-12.1.105-py3-none-manylinux1_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "nvidia/__init__.py",
            "nvidia/cuda_nvrtc/include/nvrtc.h",
            "nvidia/cuda_nvrtc/include/__init__.py",
            "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "nvidia/cuda_nvcc/bin/ptxas",
            "nvidia/cuda_nvcc/nvvm/libdevice/libdevice.10.bc",
            "nvidia_cuda_nvrtc_cu12-12.1.105.dist-info/License.txt",
            "nvidia_cuda_nvrtc_cu12-12.1.105.dist-info/METADATA",
        ):
            archive.writestr(name, name)
    unpack_redistributable(wheel, tmp_path / "cuda")
    found = {str(path.relative_to(tmp_path / "cuda")) for path in (tmp_path / "cuda").rglob("*.*")}
    assert found == {
        "include/nvrtc.h",
        "lib64/libnvrtc.so.12",
        "lib64/libnvrtc.so",
        "nvvm/libdevice/libdevice.10.bc",
        "licences/nvidia_cuda_nvrtc_cu12-License.txt",
    }
    assert (tmp_path / "cuda/bin/ptxas").stat().st_mode & 0o111
    assert (tmp_path / "cuda/lib64/libnvrtc.so").read_text() == "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"


@pytest.fixture
def runner_archive(tmp_path: Path) -> ContainerPart:
    with tarfile.open(tmp_path / "runner.tar.gz", "w:gz") as archive:
        content = b"#!/bin/sh\n"
        (member := tarfile.TarInfo("run.sh")).size = len(content)
        member.mode = 0o755
        archive.addfile(member, io.BytesIO(content))
    packed = (tmp_path / "runner.tar.gz").read_bytes()
    url = (tmp_path / "runner.tar.gz").as_uri()
    return ContainerPart(
        "actions_runner", "install", "2", "archive", {url: hashlib.sha256(packed).hexdigest()}, url, ""
    )


def lay_out(plan: ContainerPlan, folder: Path) -> None:
    components = load_components()
    (folder / "context").mkdir()
    make_context(
        plan,
        folder / "context",
        cache=folder / "cache",
        component_of=lambda part: components[part.name],
        log=folder / "log",
        say=lambda _: None,
    )


def only(plan: ContainerPlan, *parts: ContainerPart) -> ContainerPlan:
    return replace(plan, components=parts)


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_fetch_wheels", lambda *_: [])  # the end-to-end test fetches them


@pytest.mark.usefixtures("no_wheels")
def test_the_same_plan_gives_the_same_context_down_to_the_times(
    tmp_path: Path, runner_archive: ContainerPart
) -> None:
    lay_out(only(a_plan(), runner_archive), tmp_path)
    laid = tmp_path / "context"
    assert (laid / "actions-runner/run.sh").stat().st_mode & 0o111
    assert (laid / "hooks/gpu-job-started.sh").stat().st_mode & 0o111
    assert (laid / "bin/nvidia-gpu-processes").is_file()
    assert {path.stat().st_mtime for path in laid.rglob("*")} == {context.EPOCH}
    assert "libicu72" in (laid / "apt-packages").read_text().split()
    assert (laid / "cuda-packages").read_text() == ""


@pytest.mark.usefixtures("no_wheels")
def test_an_archive_with_another_checksum_is_refused_and_not_kept(
    tmp_path: Path, runner_archive: ContainerPart
) -> None:
    wrong = replace(runner_archive, packages=dict.fromkeys(runner_archive.packages, "0" * 64))
    with pytest.raises(UnavailableError, match=f"has the checksum .*, wanted {'0' * 64}"):
        lay_out(only(a_plan(), wrong), tmp_path)
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert not (tmp_path / "cache/archives").exists()


@pytest.fixture
def signing_key(tmp_path: Path) -> tuple[str, Path]:
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet"]
    subprocess.run([*gpg, "--passphrase", "", "--quick-gen-key", "test", "ed25519"], check=True)
    key = subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True).stdout
    (path := tmp_path / "key.asc").write_bytes(key)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
    (fingerprint,) = key_fingerprints(key)
    return fingerprint, path


@pytest.mark.usefixtures("no_wheels")
def test_nvidias_repository_is_written_only_with_the_key_that_is_wanted(
    tmp_path: Path, signing_key: tuple[str, Path]
) -> None:
    fingerprint, path = signing_key
    plan = a_plan("ubuntu-22.04")
    cuda = plan.part("cuda")
    assert cuda is not None
    component = load_components()["cuda"]
    assert component.repository is not None
    assert component.repository.apt is not None
    known = replace(component.repository.apt, key_url=path.as_uri(), key_fingerprint=fingerprint)

    def write(repository: object, folder: Path) -> None:
        (folder / "context").mkdir(parents=True)
        changed = replace(component, repository=replace(component.repository, apt=repository))
        make_context(
            only(plan, cuda),
            folder / "context",
            cache=folder,
            component_of=lambda _: changed,
            log=folder / "log",
            say=lambda _: None,
        )

    write(known, tmp_path / "right")
    sources = (tmp_path / "right/context/cuda-apt/sources.list.d/gpukiln-cuda.sources").read_text()
    assert "Signed-By: /etc/apt/keyrings/gpukiln-cuda.asc" in sources
    assert "cuda-nvml-dev-12-1=12.1.105-1" in (tmp_path / "right/context/cuda-packages").read_text()
    with pytest.raises(UnavailableError, match=f"has the fingerprint {fingerprint}"):
        write(replace(known, key_fingerprint="0" * 40), tmp_path / "wrong")
    assert key_fingerprints(b"no key") == []


def test_the_image_says_what_was_left_out_and_why() -> None:
    said = image_record(a_plan(probes=CUT_OFF))
    assert said["components"]["cuda"]["status"] == "installed"
    assert said["components"]["cuda_nvcc"]["status"] == "left_out"
    assert "can't be reached" in said["components"]["actions_runner"]["reason"]
