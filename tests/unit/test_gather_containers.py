"""Which GPUs a system has: a container those whose device nodes it was given, a host all of the bus."""

from pathlib import Path

import pytest

from gpukiln.probe import base, gpus, runner

HOST = "devtmpfs /dev devtmpfs rw,nosuid,size=4096k 0 0\nsysfs /sys sysfs rw 0 0\n"
CONTAINER = "overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw,nosuid,size=65536k,mode=755 0 0\n"
ADDRESSES = [f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")]
SECOND = ADDRESSES[1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight GPUs as the kernel and NVIDIA's driver show them, and no device node; minors count backwards."""
    for name in ("pci", "driver", "dev"):
        (tmp_path / name).mkdir()
    for number, address in enumerate(ADDRESSES):
        device = tmp_path / "pci" / address
        device.mkdir()
        for name, value in {"vendor": "0x10de", "class": "0x030200", "device": "0x2330"}.items():
            (device / name).write_text(f"{value}\n")
        shown = tmp_path / "driver" / address
        shown.mkdir()
        # of kernel-open/nvidia/nv-procfs.c, which ends its names in blanks and tabs
        (shown / "information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{number}\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {7 - number}\nGPU Excluded:\t No\n"
        )
    for name, path in (("PCI", "pci"), ("DRIVER_GPUS", "driver"), ("DEVICES", "dev"), ("MOUNTS", "mounts")):
        monkeypatch.setattr(base, name, str(tmp_path / path), raising=False)
    monkeypatch.setattr(gpus, "PCI", str(tmp_path / "pci"))
    return tmp_path


def give(machine: Path, *minors: int, mounts: str = CONTAINER) -> None:
    (machine / "mounts").write_text(mounts.replace(" /dev ", f" {machine / 'dev'} "))
    for minor in minors:
        (machine / "dev" / f"nvidia{minor}").touch()
    (machine / "dev" / "nvidiactl").touch()


def seen() -> list[str]:
    return [gpu["address"] for gpu in base.pci_gpus()]


def test_a_container_with_one_of_eight_has_one(machine: Path) -> None:
    give(machine, 6)
    assert seen() == [SECOND]
    assert [gpu["address"] for gpu in gpus.gpus()["pci"]] == [SECOND]
    assert [gpu["address"] for gpu in runner.visible_gpus()["pci"]] == [SECOND]


def test_a_container_with_none_and_one_whose_host_has_no_driver_have_none(machine: Path) -> None:
    give(machine)
    assert seen() == []
    give(machine, 0)
    (machine / "driver").rename(machine / "gone")
    assert seen() == []


def test_a_privileged_container_has_all(machine: Path) -> None:
    give(machine, *range(8))
    assert seen() == ADDRESSES


def test_a_container_of_the_older_way_sees_its_own_below_proc_alone(machine: Path) -> None:
    give(machine, 6)
    for address in ADDRESSES:
        if address != SECOND:
            (machine / "driver" / address / "information").unlink()
    assert seen() == [SECOND]


def test_a_node_that_the_container_may_not_open_is_not_its_own(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cgroup's rules for devices forbid it; access(2) asks them."""
    give(machine, 5, 6)
    asked = []

    def access(path: str, mode: int) -> bool:
        asked.append(mode)
        return path.endswith("nvidia6")

    monkeypatch.setattr(base.os, "access", access)
    assert seen() == [SECOND]
    assert set(asked) == {base.os.R_OK | base.os.W_OK}


def test_a_host_has_what_is_on_the_bus_whatever_its_driver_says(machine: Path) -> None:
    """A GPU that the driver does not drive is missed, and not left out."""
    give(machine, 6, mounts=HOST)
    assert seen() == ADDRESSES
