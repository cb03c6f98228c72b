"""`gpukiln-gpu cuda`: what of CUDA there is, and whether the driver runs it, by the catalogue's own rules."""

import json
import os
import sys
from pathlib import Path

import pytest

from gpukiln.catalog import cuda as catalogue
from gpukiln.catalog import drivers, shipped
from gpukiln.errors import UsageError
from gpukiln.gpus import cuda
from gpukiln.gpus.cuda import COMPAT, LIMITS, NATIVE, NO, UNKNOWN, verdict
from gpukiln.gpus.facts import facts

WORDS = {"native": NATIVE, "minor-version": LIMITS, "forward-compat": COMPAT, "no": NO}
ROOT = Path(__file__).parents[2]


def test_what_machines_know_is_what_the_catalogue_says() -> None:
    assert json.loads(json.dumps(shipped.shipped())) == facts()


def test_the_rule_is_the_catalogues_for_every_toolkit_and_driver() -> None:
    versions = {row.latest for row in drivers.branches().values() if row.latest} | {"535.54.03", "525.60.13"}
    compared = 0
    for full in catalogue.toolkits():
        for driver in sorted(versions):
            for board, gpus in ((True, ()), (False, ("rtx-pro-6000-workstation",))):
                try:
                    wanted = catalogue.support(full, driver, gpus)
                except UsageError:
                    continue
                found = verdict(full, driver, data_center=board)
                assert found.word == WORDS[wanted.way], (full, driver, found, wanted)
                assert found.package == wanted.package, (full, driver)
                compared += 1
    assert compared > 200


@pytest.mark.parametrize(
    ("version", "driver", "told"),
    [
        (None, "535.309.01", "does not tell"),
        ("12.1", None, "there is no driver"),
        ("99.9", "535.309.01", "does not know CUDA 99.9"),
        ("nonsense", "535.309.01", "does not know CUDA"),
    ],
)
def test_what_is_not_known_is_said(version: str | None, driver: str | None, told: str) -> None:
    found = verdict(version, driver)
    assert found.word == UNKNOWN
    assert told in found.why


def test_forward_compatibility_is_not_for_consumer_boards() -> None:
    assert cuda.data_center_only(["NVIDIA A100-SXM4-40GB", "NVIDIA L4", None])
    for name in (
        "NVIDIA GeForce RTX 4090",
        "NVIDIA TITAN RTX",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    ):
        assert not cuda.data_center_only(["NVIDIA A100-SXM4-40GB", name]), name


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
    with pytest.raises(UsageError, match="is no Python that can be asked"):
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
    found, missing = cuda.search("535.309.01", data_center=True, image=["runner-gpu:1"])
    assert [(one.name, one.verdict.word) for one in found] == [
        ("runner-gpu:1", NATIVE),
        ("old:1", NATIVE),
        ("sha256:0123456789ab", UNKNOWN),
    ]
    del missing
    with pytest.raises(UsageError, match="--image nothing: no engine here has it") as error:
        cuda.search("535.309.01", data_center=True, image=["nothing"])
    assert any("No such image" in line for line in error.value.details)
    assert os.environ["PATH"].startswith(str(tmp_path))
