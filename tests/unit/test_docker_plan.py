"""What a container image is built from is decided, and refused, before anything runs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gpukiln.catalog.components import load_components
from gpukiln.catalog.containers import load_container
from gpukiln.catalog.load import ROOT
from gpukiln.docker.build import find_existing_build, labels, why_build
from gpukiln.docker.builds import ContainerBuilds
from gpukiln.docker.context import requirements_for
from gpukiln.docker.plan import ContainerPlan, ContainerProbes, read_packages
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.typed import dump, load
from tests.support.docker_records import CUT_OFF, PROBES, a_build, a_plan, names

LEFT_OUT_WITHOUT_NVIDIA = ["cuda_nvcc", "actions_runner"]


def test_ubuntu_takes_everything_from_nvidia_by_its_own_names() -> None:
    plan = a_plan("ubuntu-22.04")
    assert names(plan.components, "left_out") == []
    cuda = plan.part("cuda")
    assert cuda is not None
    assert cuda.source.endswith("/ubuntu2204/x86_64")
    assert cuda.packages["cuda-libraries-dev-12-1"] == "12.1.1-1"
    assert a_plan("ubuntu-22.04", platform="linux/arm64").part("cuda").source.endswith("/ubuntu2204/sbsa")  # type: ignore[union-attr]
    assert "@sha256:" in (plan.base.image or "")


def test_a_source_that_cannot_be_reached_is_an_error_on_ubuntu_and_left_out_on_debian() -> None:
    with pytest.raises(UnavailableError, match=r"the source of cuda can't be used: .*InRelease") as caught:
        a_plan("ubuntu-22.04", CUT_OFF)
    assert "--base debian-12" in caught.value.hint
    plan = a_plan("debian-12", CUT_OFF)
    assert names(plan.components, "left_out") == LEFT_OUT_WITHOUT_NVIDIA
    assert names(a_plan("debian-12").components, "left_out") == ["cuda_nvcc"]
    runner = plan.part("actions_runner")
    assert runner is not None
    assert "can't be reached" in runner.reason


def test_a_package_that_the_mirror_lacks_is_an_error_that_names_it() -> None:
    probes = ContainerProbes(PROBES.unreachable, lambda wanted: {one: "1" for one in wanted if one != "tini"})
    with pytest.raises(UnavailableError, match="no package tini"):
        a_plan(probes=probes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": "debian-13"}, "unknown base 'debian-13'"),
        ({"platform": "linux/riscv"}, "unknown platform"),
        ({"overrides": ["cuda.versio=12"]}, "versio"),
        ({"overrides": ["cuda.version=12.9"]}, r"pins the packages and checksums .* 12\.1"),
        ({"overrides": ["nvtop.repository=1"]}, "key of nvtop"),
        ({"overrides": ["nvidia_driver.branch=580"]}, "unknown component of runner-gpu 'nvidia_driver'"),
    ],
)
def test_a_wrong_name_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        a_plan(**options)  # type: ignore[arg-type]


def test_redistributables_are_for_one_architecture() -> None:
    with pytest.raises(IncompatibleError, match="linux/amd64 only"):
        a_plan(platform="linux/arm64")


def test_the_digest_moves_with_what_changes_the_image_and_with_nothing_else(tmp_path: Path) -> None:
    for name in ("docker", "scripts", "components.yaml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / name)
    before = a_plan(root=tmp_path)
    changes = {
        "docker/runner-gpu/Dockerfile": "\nRUN true\n",
        "docker/runner-gpu/python.lock": "\nattrs==25.1.0\n",
        "docker/runner-gpu/apt-packages": "\nvim\n",
        "scripts/hooks/gpu-job-started.sh": "\ntrue\n",
    }
    seen = {before.digest}
    for name, text in changes.items():
        with (tmp_path / name).open("a") as file:
            file.write(text)
        seen.add(a_plan(root=tmp_path).digest)
    assert len(seen) == len(changes) + 1
    last = a_plan(root=tmp_path).digest
    for name in ("docker/runner-gpu/requirements.in", "docker/runner-gpu/examples/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("a") as file:
            file.write("# words\n")
    assert a_plan(root=tmp_path).digest == last
    security = ContainerProbes(PROBES.unreachable, lambda wanted: dict.fromkeys(wanted, "1.2-4"))
    assert a_plan(root=tmp_path, probes=security).digest != last
    pins = tmp_path / "components.yaml"
    pins.write_text(pins.read_text().replace("2.18.1", "2.17.1"))
    assert a_plan(root=tmp_path).digest != last


def test_a_plan_can_be_written_and_read() -> None:
    plan = a_plan()
    assert load(ContainerPlan, dump(plan), where="plan") == plan
    assert plan.version.endswith(plan.digest[:8])
    assert labels(plan, "b")["gpukiln.left-out"] == "cuda_nvcc"


def test_a_package_list_with_another_word_is_refused(tmp_path: Path) -> None:
    (list_ := tmp_path / "apt-packages").write_text("# why\ngit # fetches\nlibicu70 ubuntu # .NET\n")
    assert read_packages(list_, "debian") == ("git",)
    assert read_packages(list_, "ubuntu") == ("git", "libicu70")
    list_.write_text("git fedora\n")
    with pytest.raises(UsageError, match="line 1"):
        read_packages(list_, "debian")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"default_base": "x"}, "default_base 'x' is none of"),
        ({"bases": {"b": {"image": "ubuntu:22.04"}}, "default_base": "b"}, "has no digest"),
        (
            {"bases": {"b": {"codename": None, "image": None}}, "default_base": "b"},
            "needs an image by digest",
        ),
    ],
)
def test_a_definition_that_cannot_work_is_refused(
    change: dict[str, object], words: str, tmp_path: Path
) -> None:
    document = yaml.safe_load((ROOT / "docker/runner-gpu/image.yaml").read_text())
    for name, values in change.get("bases", {}).items():  # type: ignore[attr-defined]
        document["bases"][name] = {**document["bases"]["debian-12"], **values}
    document |= {key: value for key, value in change.items() if key != "bases"}
    (folder := tmp_path / "docker/runner-gpu").mkdir(parents=True)
    (folder / "image.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(UsageError, match=words):
        load_container("runner-gpu", tmp_path)


def test_the_locks_hold_what_components_yaml_wants_for_every_base() -> None:
    components, image = load_components(), load_container("runner-gpu")
    for lock, wanted in (("cuda", ("cuda", "cudnn", "nccl")), ("python", ("cmake", "ninja"))):
        text = (ROOT / f"docker/runner-gpu/{lock}.lock").read_text()
        for base in image.bases.values():
            lines = requirements_for(text, base.python, "x86_64")
            assert all("--hash=sha256:" in line for line in lines)
            pinned = dict(line.partition(" ")[0].split("==") for line in lines)
            for name in wanted:
                index = components[name].container.index  # type: ignore[union-attr]
                assert {package: pinned.get(package) for package in index or ()} == index


def test_only_a_build_whose_image_is_still_there_makes_another_one_needless(tmp_path: Path) -> None:
    builds, plan = ContainerBuilds(tmp_path), a_plan()

    class Store:
        name = "buildah"
        image = None

        def inspect(self, _: str) -> object:
            return self.image

    store = Store()
    assert why_build(plan, builds) == ["no image of it was built on this machine from debian-12 yet"]
    build = a_build(builds.folder / "1")
    assert find_existing_build(plan, builds, store) is None  # type: ignore[arg-type]
    assert "the engine no longer has it" in why_build(plan, builds)[0]
    store.image = build.read().image  # type: ignore[assignment]
    assert find_existing_build(plan, builds, store) == build  # type: ignore[arg-type]
    changed = replace(plan, digest="other", inputs={**plan.inputs, "package git": "2"})
    assert find_existing_build(changed, builds, store) is None  # type: ignore[arg-type]
    assert why_build(changed, builds) == ["since build 1:", "  package git: 1.2-3 -> 2"]
    store.name = "docker"
    assert find_existing_build(plan, builds, store) is None  # type: ignore[arg-type]
