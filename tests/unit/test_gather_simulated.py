"""Whether a machine's GPUs are simulated, and what of that is on its disk, by made-up files."""

from pathlib import Path

import pytest

from gpukiln.probe import base, gather, gpus, simulated

DOUBLE = b"\x7fELF" + bytes(1000) + simulated.HEADER + bytes(simulated.STATE_BYTES - len(simulated.HEADER))
REAL = b"\x7fELF" + bytes(simulated.STATE_BYTES + 1000)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without anything of it, all of whose folders are below one."""
    for name in ("lib", "bin", "run", "systemd/multi-user.target.wants"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mountinfo").write_text("22 1 0:21 / / rw shared:1 - ext4 /dev/vda1 rw\n")
    for name, path in {
        "FOLDER": "run/gpukiln-simulated",
        "NOTE": "note",
        "UNITS": f"systemd/{simulated.UNIT}",
        "WANTS_LINKS": f"systemd/*.wants/{simulated.UNIT}",
        "MOUNTINFO": "mountinfo",
    }.items():
        monkeypatch.setattr(simulated, name, str(tmp_path / path))
    monkeypatch.setattr(simulated, "LIBRARIES", (str(tmp_path / "lib"),))
    monkeypatch.setattr(simulated, "PROGRAMS", (str(tmp_path / "bin"),))
    monkeypatch.setattr(simulated, "DEFAULT_FOLDERS", (str(tmp_path / "default"),))
    monkeypatch.setattr(simulated, "_cached_libraries", list)
    monkeypatch.setattr(simulated, "pci_gpus", list)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def test_a_real_driver_is_no_double(disk: Path) -> None:
    (disk / "lib" / "libnvidia-ml.so.535.309.01").write_bytes(REAL)
    (disk / "lib" / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.535.309.01")
    (disk / "lib" / "libnvidia-ml.so").symlink_to("nowhere")
    (disk / "bin" / "nvidia-smi").write_bytes(b"\x7fELF NVIDIA System Management Interface")
    assert simulated.simulated() == {"machine": False, "disk": []}
    assert not simulated.gpus_to_ask()


def test_a_file_is_the_double_by_its_header_at_its_place(disk: Path) -> None:
    for name, content, expected in (
        ("it", DOUBLE, True),
        ("real", REAL, False),
        ("short", simulated.HEADER, False),
        ("elsewhere", simulated.HEADER + REAL, False),
    ):
        (disk / name).write_bytes(content)
        assert simulated.is_double(str(disk / name)) is expected, name


def test_all_that_a_baked_image_could_carry_is_found(disk: Path) -> None:
    left = [disk / "note", disk / "systemd" / simulated.UNIT]
    for path in left:
        path.write_text("simulated\n")
    (disk / "systemd" / "multi-user.target.wants" / simulated.UNIT).symlink_to(left[1])
    (disk / "lib" / "libnvidia-ml.so.535.309.01").write_bytes(DOUBLE)
    (disk / "lib" / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.535.309.01")
    (disk / "bin" / "nvidia-smi").write_text("#!/bin/sh\n# gpukiln simulated nvidia-smi\n")
    assert simulated.simulated()["disk"] == sorted(
        map(
            str,
            [
                *left,
                disk / "systemd" / "multi-user.target.wants" / simulated.UNIT,
                disk / "lib" / "libnvidia-ml.so.535.309.01",
                disk / "bin" / "nvidia-smi",
            ],
        )
    )


def test_what_is_mounted_over_the_image_s_files_is_not_on_the_disk(disk: Path) -> None:
    """As on a machine with simulated GPUs; only what is no mount would be in an image that is baked there."""
    (disk / "run" / "gpukiln-simulated").mkdir()
    (disk / "lib" / "a library").mkdir()
    library, program = disk / "lib" / "libnvidia-ml.so.535.309.01", disk / "bin" / "nvidia-smi"
    library.write_bytes(DOUBLE)
    (disk / "lib" / "libnvidia-ml.so.1").symlink_to(library.name)
    program.write_bytes(b"gpukiln simulated nvidia-smi")
    assert len(simulated.simulated()["disk"]) == 2
    with (disk / "mountinfo").open("a") as file:
        for path in (library, program):
            shown = str(path).replace(" ", "\\040")
            file.write(f"90 22 0:25 /gpukiln-simulated/x {shown} ro,nosuid - tmpfs tmpfs rw\n")
    assert simulated.simulated() == {"machine": True, "disk": []}


def test_mount_points_with_blanks_are_read(disk: Path) -> None:
    (disk / "mountinfo").write_text("90 22 0:25 / /a\\040b\\134c rw - tmpfs tmpfs rw\n")
    assert simulated._mount_points() == {"/a b\\c"}


def test_a_library_that_programs_find_is_enough(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "own").mkdir()
    (disk / "own" / "libnvidia-ml.so.1").write_bytes(REAL)
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{disk / 'own'}")
    assert not simulated.is_simulated()
    (disk / "own" / "libnvidia-ml.so.1").write_bytes(DOUBLE)
    assert simulated.is_simulated()
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert not simulated.is_simulated()
    monkeypatch.setattr(simulated, "_cached_libraries", lambda: [str(disk / "own" / "libnvidia-ml.so.1")])
    assert simulated.is_simulated()
    assert simulated.simulated()["disk"] == [str(disk / "own" / "libnvidia-ml.so.1")]
    monkeypatch.setattr(simulated, "_cached_libraries", list)
    (disk / "default").mkdir()
    (disk / "default" / "libnvidia-ml.so.1").symlink_to(disk / "own" / "libnvidia-ml.so.1")
    assert simulated.is_simulated()  # not in the cache: ldconfig can't map a file on virtiofs


def test_the_loader_s_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "2 libs found in cache `/etc/ld.so.cache'",
        "\tlibnvidia-ml.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-ml.so.1",
        "\tlibnvidia-cfg.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-cfg.so.1",
    )
    monkeypatch.setattr(simulated, "run", lambda *_: {"rc": 0, "out": "\n".join(lines), "err": ""})
    assert simulated._cached_libraries() == ["/lib/x86_64-linux-gnu/libnvidia-ml.so.1"]


def test_nvml_and_nvidia_smi_are_asked_though_the_bus_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row = "00000000:00:1E.0, Tesla T4, GPU-1, 535.309.01, Enabled\n"
    monkeypatch.setattr(base, "bus_gpus", list)
    monkeypatch.setattr(gpus, "run_unless_hung", lambda *_, **__: {"rc": 0, "out": row, "err": ""})
    monkeypatch.setattr(gpus, "xids", lambda: pytest.fail("the kernel knows nothing of simulated GPUs"))
    monkeypatch.setattr(gather, "nvml_facts", lambda there: {"asked": there})
    for there in (False, True):
        monkeypatch.setattr(gpus, "is_simulated", lambda there=there: there)
        monkeypatch.setattr(simulated, "is_simulated", lambda there=there: there)
        found = gpus.gpus()
        assert found["pci"] == []
        assert [one["name"] for one in found.get("rows", [])] == ["Tesla T4"] * there
        assert gather.nvml()["asked"] is there
