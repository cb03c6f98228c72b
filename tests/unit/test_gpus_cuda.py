"""`gpukiln-gpu cuda`: what of CUDA there is, and whether the driver runs it, by the catalogue's own rules."""

import json
import os
import sys
from pathlib import Path

import pytest

from gpukiln.catalog import cuda as catalogue
from gpukiln.catalog import drivers, shipped
from gpukiln.catalog.gpus import gpus as gpus_of_catalogue
from gpukiln.errors import UsageError
from gpukiln.gpus import cuda
from gpukiln.gpus.cuda import ANSWERS, NATIVE, UNKNOWN, check_driver
from gpukiln.gpus.facts import facts

ROOT = Path(__file__).parents[2]


def test_what_machines_know_is_what_the_catalogue_says() -> None:
    assert json.loads(json.dumps(shipped.shipped())) == facts()


def test_the_rule_is_the_catalogues_for_every_toolkit_and_driver() -> None:
    """One function decides for both; what differs is who refuses a name that the catalogue does not have."""
    versions = {row.latest for row in drivers.branches().values() if row.latest} | {"535.54.03", "525.60.13"}
    compared = 0
    for full in catalogue.toolkits():
        for driver in sorted(versions):
            for others, gpus in (((), ()), (("Workstation",), ("rtx-pro-6000-workstation",))):
                wanted = catalogue.support(full, driver, gpus)
                found = check_driver(full, driver, others)
                assert found.word == ANSWERS[wanted.way], (full, driver, found, wanted)
                assert found.package == wanted.package, (full, driver)
                compared += 1
    assert compared > 200


def test_a_release_newer_than_the_catalogue_counts_as_its_minor_version() -> None:
    """NVIDIA, CUDA Compatibility: what a driver must have goes by major and minor version.

    The catalogue knows 12.1.0 and 12.1.1. Machines decided 12.1.9 by them, and the catalogue refused it.
    """
    assert "12.1.9" not in catalogue.toolkits()
    assert catalogue.support("12.1.9", "535.309.01").way == "native"
    assert check_driver("12.1.9", "535.309.01").word == NATIVE
    with pytest.raises(UsageError, match=r"12\.99"):
        catalogue.support("12.99.1", "535.309.01")


@pytest.mark.parametrize(
    ("cuda_version", "architecture", "wanted"),
    [
        ("12.1", "Blackwell", "CUDA 12.8 or later"),
        ("13.0", "Volta", "CUDA 12.x or earlier"),
        ("12.8", "Blackwell", None),
        ("12.1", "not in the catalogue", None),
    ],
)
def test_which_cuda_compiles_is_the_catalogues_answer(
    cuda_version: str, architecture: str, wanted: str | None
) -> None:
    """CUDA Toolkit, Driver, and Architecture Matrix."""
    assert cuda.compilers(cuda_version, architecture) == wanted
    for key, row in gpus_of_catalogue().items():
        if row.arch == architecture:
            assert catalogue.compile_problem(cuda_version, key) == wanted


@pytest.mark.parametrize(
    ("version", "driver", "told"),
    [
        (None, "535.309.01", "does not name"),
        ("12.1", None, "there is no driver"),
        ("99.9", "535.309.01", "has no CUDA 99.9"),
        ("nonsense", "535.309.01", "has no CUDA"),
    ],
)
def test_what_is_not_known_is_said(version: str | None, driver: str | None, told: str) -> None:
    found = check_driver(version, driver)
    assert found.word == UNKNOWN
    assert told in found.why


def test_forward_compatibility_is_not_for_consumer_boards() -> None:
    assert not cuda.not_data_center(["NVIDIA A100-SXM4-40GB", "NVIDIA L4", None])
    for name in (
        "NVIDIA GeForce RTX 4090",
        "NVIDIA TITAN RTX",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    ):
        assert cuda.not_data_center(["NVIDIA A100-SXM4-40GB", name]) == (name,)


def test_toolkits_are_found_by_their_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/cuda-12.1/bin")
    new, old = tmp_path / "cuda-12.1", tmp_path / "cuda-10.2"
    (new / "bin").mkdir(parents=True)
    old.mkdir()
    (new / "version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "12.1.1"}}')
    (old / "version.txt").write_text("CUDA Version 10.2.89\n")
    (tmp_path / "cuda").symlink_to(new)
    (tmp_path / "cuda-broken").mkdir()
    (tmp_path / "cuda-broken/version.json").write_text("{")
    nvcc = new / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.1, V12.1.105'\n")
    nvcc.chmod(0o755)
    found = cuda.toolkits(f"{tmp_path}/cuda*")
    assert sorted((name, version) for name, _, version in found) == [
        ("cuda-10.2", "10.2.89"),
        ("cuda-12.1", "12.1.1"),
    ]


def test_wheels_say_what_they_are_built_with(tmp_path: Path) -> None:
    wheels = {
        "nvidia_cuda_runtime_cu12": "12.1.105",
        "nvidia_cudnn_cu12": "9.1.0.70",
        "torch": "2.4.0+cu121",
        "jax": "0.4.30",
    }
    for name, version in wheels.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert cuda.wheels(str(python)) == [
        ("nvidia-cuda-runtime-cu12 12.1.105", "12.1", "cuDNN 9.1.0.70"),
        ("torch 2.4.0+cu121", "12.1", "cuDNN 9.1.0.70"),
    ]
    with pytest.raises(UsageError, match="is not a working Python interpreter"):
        cuda.wheels("/bin/true")


DOCKER = """#!/bin/sh
case "$1 $2" in
  "images --quiet") echo sha256:aa; echo sha256:aa ;;
  "image inspect") shift 2; [ "$*" != nothing ] || { echo "No such image: nothing" >&2; exit 1; }; cat "%s" ;;
esac
"""


def test_images_say_what_they_are_built_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        {"RepoTags": ["runner-gpu:1"], "Config": {"Env": ["CUDA_VERSION=12.1.1", "A=b=c"]}},
        {"RepoTags": ["old:1"], "Config": {"Env": ["NVIDIA_REQUIRE_CUDA=cuda>=11.8 brand=tesla"]}},
        {"Id": "sha256:0123456789abcdef0", "RepoTags": [], "Config": {"Env": None}},
    ]
    (tmp_path / "said").write_text(json.dumps(said))
    docker = tmp_path / "docker"
    docker.write_text(DOCKER % (tmp_path / "said"))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cuda.images("docker") == [("runner-gpu:1", "12.1.1"), ("old:1", "11.8")]
    found, missing = cuda.find_installations("535.309.01", image=["runner-gpu:1"])
    assert [(one.name, one.verdict.word) for one in found] == [
        ("runner-gpu:1", NATIVE),
        ("old:1", NATIVE),
        ("sha256:0123456789ab", UNKNOWN),
    ]
    del missing
    with pytest.raises(
        UsageError, match="--image nothing: no container engine of this machine has it"
    ) as error:
        cuda.find_installations("535.309.01", image=["nothing"])
    assert any("No such image" in line for line in error.value.details)
    assert os.environ["PATH"].startswith(str(tmp_path))
