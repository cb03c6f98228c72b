"""Fixtures that several modules of unit tests share."""

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpukiln.cli import command as commands
from gpukiln.clouds.embedded import scarcity
from gpukiln.clouds.embedded.gpus import settings
from gpukiln.clouds.embedded.gpus.state import State
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.gpus import cli
from gpukiln.images.builds import Builds, Record
from gpukiln.images.plan import ImagePlan
from gpukiln.probe.base import evidence, watch
from gpukiln.release.log import ReleaseLog
from tests.support import documents, nvml_double, pve
from tests.support.endpoint import Endpoint, serve
from tests.support.exit_codes import invoke
from tests.support.gpus import double
from tests.support.plans import BAKE, VERDICT, ec2_with_a_base, plan
from tests.support.release_cloud import Cloud, end_server, make_image, running, server, tell

if TYPE_CHECKING:
    from tests.support.passthrough import Rig


@pytest.fixture(scope="session", autouse=True)
def documents_are_of_their_published_form() -> Iterator[None]:
    """Every document that a command prints in this process is checked, whatever its test reads of it."""
    printed = commands.print_json

    def checked(document: Any) -> None:
        documents.read(json.dumps(document))
        printed(document)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "print_json", checked)  # cloud.policy has it by its own name: IAM's form
        yield


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """An EC2 endpoint without moto's thousand images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        with serve() as endpoint:
            yield endpoint


@pytest.fixture
def nodes(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Types k8s.nodes: its exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = 0
        try:
            invoke(["k8s.nodes", *argv])
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def debian() -> Iterator[str]:
    """The id of the one image of an EC2, on which images are based."""
    with ec2_with_a_base() as image_id:
        yield image_id


@pytest.fixture(scope="session")
def planned() -> ImagePlan:
    """A plan, for modules that look at what is done with one."""
    with ec2_with_a_base():
        return plan()


@pytest.fixture
def proven(planned: ImagePlan, tmp_path: Path) -> Builds:
    """Builds, one of them proven; as of a base with Kubernetes, of whose channels the tests are."""
    planned = replace(planned, kubernetes="1.34")
    builds = Builds(tmp_path)
    build = builds.create("eks-gpu")
    build.write(Record(build.id, "verified", planned, BAKE, (VERDICT,), {"bake": 5.0}))
    return builds


@pytest.fixture
def records(tmp_path: Path) -> ReleaseLog:
    return ReleaseLog(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def server_of_release_cloud() -> Iterator[None]:
    """Has it end with the last test."""
    yield
    end_server()


@pytest.fixture
def empty_cloud() -> None:
    """The cloud of release_cloud, without images."""
    tell("reset")


@pytest.fixture(scope="module")
def image_id() -> Iterator[str]:
    """The one image of release_cloud."""
    tell("reset")
    yield make_image("b1")
    tell("reset")


@pytest.fixture
def layout(image_id: str) -> Iterator[Layout]:
    """Where release_cloud keeps its scripts; afterwards nothing is scripted, and nothing runs."""
    assert image_id
    layout = server()[1]
    yield layout
    scarcity.clear(layout)
    if alive := running():
        Cloud().client("ec2").terminate_instances(InstanceIds=[*alive])
    tell("forget")
    tell("calls")


@pytest.fixture
def nothing_hangs() -> Iterator[None]:
    """The probe has met no tool that hangs, and kept nothing of what it read; nor has it afterwards."""

    def forget() -> None:
        watch.__init__()  # type: ignore[misc]  # as it is made: it has no other way to forget
        evidence.clear()

    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def loaded_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The double of NVML in this process: what asks for its soname later gets it."""
    path = nvml_double.build(tmp_path_factory.mktemp("nvml"))
    ctypes.CDLL(str(path))
    return path


@pytest.fixture
def simulated(loaded_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., State]:
    """This process sees the simulated GPUs of an instance type, changed by settings and a scenario."""

    def make(instance_type: str, *texts: str, scenario: str = "") -> State:
        made = double(loaded_nvml, tmp_path, instance_type, driver="580.65.06", cuda="13.0")
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)

        def change(rows: dict[str, str]) -> None:
            for text in texts:
                settings.apply_setting(rows, text)
            if scenario:
                settings.play_scenario(rows, scenario)

        made.state.change(change)
        return made.state

    return make


@pytest.fixture
def typed_gpu(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Types `gpukiln-gpu`; returns the exit code, the output and the errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(list(words))
        said = capsys.readouterr()
        if "--json" in words and said.out.startswith("{"):
            documents.read(said.out)
        return code, said.out, said.err

    return run


@pytest.fixture
def rig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> "Iterator[Rig]":
    """A double of Proxmox VE: a host, a VM, a mapping of a GPU, and a token that may all that is needed."""
    from tests.support.passthrough import rigged  # noqa: PLC0415 - all commands, which few modules need

    with rigged(tmp_path, monkeypatch, capfd) as made:
        yield made


@pytest.fixture
def programs(rig: "Rig", monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`pvesh` and `qm` on PATH, which are started."""
    rig.real()
    with pve.programs(rig.cluster, rig.folder / "bin") as folder:
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield folder


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that gives no answer is given up soon."""
    monkeypatch.setattr("gpukiln.probe.nvml.GPU_S", 2.0)
    monkeypatch.setattr("gpukiln.probe.nvml.STUCK_S", 0.3)
    monkeypatch.setattr("gpukiln.probe.child.LOOK_S", 0.1)
