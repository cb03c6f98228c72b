"""Where the double stands on a machine's disk, and what its GPUs are with the driver that is there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.gpus.machine_files import MARKER, MachineFiles, driver_version
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus, default_driver
from gpukiln.errors import UnavailableError
from tests.support import nvml_double

DEBIAN = "usr/lib/x86_64-linux-gnu/nvidia/current"


def make_root(folder: Path, library: str = "", *, links: dict[str, str] | None = None) -> Path:
    """A root file system with the driver's library, and links."""
    root = folder / "root"
    for name in ("usr/bin", "usr/lib/x86_64-linux-gnu" if "lib64" not in library else "usr/lib64", "etc"):
        (root / name).mkdir(parents=True)
    if library:
        (root / library).parent.mkdir(parents=True, exist_ok=True)
        (root / library).write_bytes(b"the driver's own")
        soname = (root / library).parent / "libnvidia-ml.so.1"
        soname.symlink_to(Path(library).name)
    for name, target in (links or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return root


Prepare = Callable[..., MachineFiles]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled, once."""
    folder = tmp_path_factory.mktemp("doubles")
    nvml_double.build(folder)
    return folder


@pytest.fixture
def prepare(tmp_path: Path, built: Path) -> Prepare:
    """Make the files of a machine."""

    def make(root: Path, instance_type: str = "g5.12xlarge") -> MachineFiles:
        gpus = SimulatedGpus(tmp_path, built, instance_type=instance_type, seed="i-1")
        gpus.prepare(root)
        return gpus.files

    return make


def places(files: MachineFiles) -> dict[str, str]:
    return dict(line.split() for line in (files.folder / "places").read_text().splitlines())


@pytest.mark.parametrize(
    ("system", "library", "links", "smi"),
    [
        (
            "Debian",
            f"{DEBIAN}/libnvidia-ml.so.535.309.01",
            {
                "usr/bin/nvidia-smi": "/etc/alternatives/nvidia--nvidia-smi",
                "etc/alternatives/nvidia--nvidia-smi": "/usr/lib/nvidia/current/nvidia-smi",
            },
            "/usr/lib/nvidia/current/nvidia-smi",
        ),
        ("Ubuntu", "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.309.01", {}, "/usr/bin/nvidia-smi"),
        ("RHEL, Amazon Linux", "usr/lib64/libnvidia-ml.so.535.309.01", {}, "/usr/bin/nvidia-smi"),
    ],
)
def test_it_stands_where_the_driver_has_its_own(
    tmp_path: Path, prepare: Prepare, system: str, library: str, links: dict[str, str], smi: str
) -> None:
    root = make_root(tmp_path, library, links=links)
    (root / smi[1:]).parent.mkdir(parents=True, exist_ok=True)
    (root / smi[1:]).write_bytes(b"the driver's own")
    files = prepare(root)
    assert places(files) == {"libnvidia-ml.so": f"/{library}", "nvidia-smi": smi}, system
    assert (root / library).read_bytes() == (root / smi[1:]).read_bytes() == b"the driver's own"
    assert driver_version(root) == files.state.rows()["driver"] == "535.309.01"
    assert files.state.rows()["cuda_driver"] == "12.2"
    assert (root / MARKER.relative_to("/")).exists()


@pytest.mark.parametrize("folder", ["usr/lib/x86_64-linux-gnu", "usr/lib64"])
def test_without_a_driver_it_stands_where_the_loader_looks(
    tmp_path: Path, prepare: Prepare, folder: str
) -> None:
    root = tmp_path / "root"
    (root / folder).mkdir(parents=True)
    files = prepare(root)
    assert places(files) == {
        "libnvidia-ml.so": f"/{folder}/libnvidia-ml.so.1",
        "nvidia-smi": "/usr/bin/nvidia-smi",
    }
    assert files.state.rows()["driver"] == default_driver()
    assert (root / folder / "libnvidia-ml.so.1").read_bytes() == b""
    assert not (root / "usr/bin/nvidia-smi").stat().st_mode & 0o111, "what is no program must not seem to run"


def test_a_driver_that_does_not_know_the_gpu_is_not_loaded(tmp_path: Path, prepare: Prepare) -> None:
    root = make_root(tmp_path, f"{DEBIAN}/libnvidia-ml.so.535.309.01")
    rows = prepare(root, "p6-b200.48xlarge").state.rows()
    assert rows["error.code"] == "9"
    assert "570.133.20" in rows["error._error"]
    assert rows["gpus.count"] == "0"


def test_a_recording_is_told_at_each_start_until_the_profile_is(tmp_path: Path, built: Path) -> None:
    root = make_root(tmp_path, f"{DEBIAN}/libnvidia-ml.so.535.309.01")
    gpus = SimulatedGpus(tmp_path, built, instance_type="g5.xlarge", seed="i-1")
    gpus.use_recording({"driver": "1.2.3", "gpus": [{"index": 0, "name": "of a host"}]})
    for name in ("of a host", "NVIDIA A10G"):
        gpus.prepare(root)
        assert gpus.files.state.rows()["gpus.0.name"] == name
        gpus.use_profile()


def test_a_virtual_machine_starts_it_by_itself(tmp_path: Path, prepare: Prepare) -> None:
    root = make_root(tmp_path)
    files = prepare(root)
    for _ in range(2):
        files.put_unit(root)
    wanted = root / "etc/systemd/system/sysinit.target.wants/gpukiln-simulated-gpus.service"
    assert "ExecStart=/bin/sh /etc/gpukiln/simulated-gpus.sh" in wanted.read_text()
    assert "virtiofs" in (root / "etc/gpukiln/simulated-gpus.sh").read_text()


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus = SimulatedGpus(tmp_path, tmp_path / "doubles", instance_type="g5.xlarge", seed="i-1")
    with pytest.raises(UnavailableError, match="simulated GPUs need gcc") as error:
        gpus.prepare(make_root(tmp_path))
    assert error.value.hint == "apt-get install gcc libc6-dev"
