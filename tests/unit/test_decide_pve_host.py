"""What the role pve_host decides: tables, without any machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roles.plan import Node, Plan
from roles.pve_host import decide as pve_host
from tests.support.roles import asked, node

GPU, AUDIO, OTHER = "0000:01:00.0", "0000:01:00.1", "0000:02:00.0"
DEVICES = {
    GPU: {"vendor": "0x10de", "device": "0x2236", "class": "0x030000"},
    AUDIO: {"vendor": "0x10de", "device": "0x1aef", "class": "0x040300"},
    OTHER: {"vendor": "0x10de", "device": "0x2236", "class": "0x030000"},
    "0000:03:00.0": {"vendor": "0x8086", "device": "0x1533", "class": "0x020000"},
}
PT = "iommu=pt"


def host(
    files: dict[str, str] | None = None,
    *,
    kernel: str = "6.8.12-4-pve",
    cmdline: str = "quiet",
    cpu: str = "AuthenticAMD",
    drivers: dict[str, str] | None = None,
    groups: int = 20,
    guests: str = "",
    version: int = 0,
) -> Node:
    devices = {
        address: {
            **one,
            "driver": (drivers or {}).get(address),
            "group": 1,
            "boot_vga": False,
            "bridge": False,
        }
        for address, one in DEVICES.items()
    }
    found = {"host": "pve1", "kernel": kernel, "cmdline": cmdline, "groups": groups, "devices": devices}
    answers = {
        "version": {"rc": version, "stdout": "pve-manager/8.4.1", "stderr": ""},
        "host": {"rc": 0, "stdout": json.dumps(found), "stderr": ""},
        "cpu": {"rc": 0, "stdout": f"vendor_id : {cpu}", "stderr": ""},
        "guests": {"rc": 0, "stdout": guests, "stderr": ""},
    }
    return node(files=files or {pve_host.GRUB_DEFAULTS: ""}, answers=answers)


def role(**given: Any) -> Any:
    return asked("pve_host", **({"gpus": ["0000:01:00"]} | given))


def texts(plan: Plan) -> dict[str, str]:
    return {file.path: file.text for file in plan.files}


def converged(plan: Plan, **more: Any) -> Node:
    """A host on which a plan was carried out, and that was rebooted."""
    files = {pve_host.GRUB_DEFAULTS: "", **texts(plan), **{file.path: file.text for file in plan.do["stamp"]}}
    return host(files, **({"cmdline": f"quiet {PT}", "drivers": {GPU: "vfio-pci", AUDIO: "vfio-pci"}} | more))


def test_by_address_and_the_second_time_nothing() -> None:
    plan = pve_host.decide(role(), host(drivers={GPU: "nouveau", AUDIO: "snd_hda_intel"}))
    options = texts(plan)[pve_host.OPTIONS]
    assert f"for a in {GPU} {AUDIO}; do" in options
    assert "softdep nouveau pre: vfio-pci" in options
    assert OTHER not in options  # a board of the same kind stays with the host
    assert "ids=" not in options
    assert texts(plan)[pve_host.MODULES].splitlines()[1:] == ["vfio", "vfio_iommu_type1", "vfio_pci"]
    assert PT in texts(plan)[pve_host.GRUB]
    assert plan.do["commands"] == [["update-initramfs", "-u", "-k", "all"], ["update-grub"]]
    for why in (f"{GPU} has nouveau", "without iommu=pt", "vfio-pci's options are new", "this role does not"):
        assert why in plan.do["reboot"]
    again = pve_host.decide(role(), converged(plan))
    assert (again.acts, again.do["reboot"]) == (False, "")


def test_what_was_interrupted_before_the_initramfs_is_done_again() -> None:
    plan = pve_host.decide(role(), host())
    there = converged(plan)
    there["files"].pop(pve_host.STAMP)
    again = pve_host.decide(role(), there)
    assert (again.files, again.do["commands"], again.acts) == ([], plan.do["commands"], True)


def test_it_says_that_a_reboot_is_needed_until_there_was_one() -> None:
    plan = pve_host.decide(role(), host())
    again = pve_host.decide(role(), converged(plan, cmdline="quiet", drivers={GPU: "nvidia"}))
    assert (again.acts, f"{GPU} has nvidia" in again.do["reboot"]) == (False, True)
    off = pve_host.decide(role(), converged(plan, groups=0))
    assert "turn VT-d or AMD-Vi on in the firmware" in off.do["reboot"]


@pytest.mark.parametrize(
    ("kernel", "cpu", "given", "wanted"),
    [
        ("6.5.13-1-pve", "GenuineIntel", {}, [PT, "intel_iommu=on"]),
        ("6.8.12-4-pve", "GenuineIntel", {}, [PT]),
        ("6.5.13-1-pve", "AuthenticAMD", {}, [PT]),
        (
            "6.5.13-1-pve",
            "GenuineIntel",
            {"kernel_arguments": ["intel_iommu=on,sm_on"]},
            ["intel_iommu=on,sm_on"],
        ),
    ],
)
def test_kernel_arguments(kernel: str, cpu: str, given: dict[str, Any], wanted: list[str]) -> None:
    grub = texts(pve_host.decide(role(**given), host(kernel=kernel, cpu=cpu)))[pve_host.GRUB]
    assert (
        grub.splitlines()[1] == f'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT {" ".join(wanted)}"'
    )


def test_systemd_boot_keeps_what_stands_there() -> None:
    files = {pve_host.CMDLINE: "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n", pve_host.BOOT_TOOL: "AAAA-BBBB\n"}
    plan = pve_host.decide(role(), host(files))
    assert texts(plan)[pve_host.CMDLINE] == "root=ZFS=rpool/ROOT/pve-1 boot=zfs iommu=pt\n"
    assert pve_host.GRUB not in texts(plan)
    assert plan.do["commands"][1:] == [["proxmox-boot-tool", "refresh"]]


def test_by_id_every_board_of_it() -> None:
    given = role(gpus=[], ids=["10DE:2236", "10de:1aef"], blacklist=["nouveau"])
    plan = pve_host.decide(given, host(drivers={OTHER: "nouveau"}))
    options = texts(plan)[pve_host.OPTIONS]
    assert "options vfio-pci ids=10de:2236,10de:1aef" in options
    assert options.endswith("blacklist nouveau\n")
    assert "install vfio-pci" not in options
    assert f"{OTHER} has nouveau" in plan.do["reboot"]


@pytest.mark.parametrize(
    ("given", "there", "told"),
    [
        ({}, {"version": 127}, "Found no Proxmox VE"),
        ({"gpus": []}, {}, f"This host has {GPU} (10de:2236), {OTHER} (10de:2236)."),
        ({"gpus": ["0000:07:00"]}, {}, "Found no device 0000:07:00"),
        ({"gpus": ["01:00"]}, {}, "wanted a value such as 0000:01:00"),
        ({"gpus": [], "ids": ["10de:ffff"]}, {}, "Found no device 10de:ffff"),
        ({"gpus": [], "ids": ["10de"]}, {}, "wanted a value such as 10de:2236"),
        ({"reboot": True}, {"guests": "  120 train  running  16384\n"}, "Found that 120 run"),
    ],
)
def test_refused(given: dict[str, Any], there: dict[str, Any], told: str) -> None:
    plan = pve_host.decide(role(**given), host(**there))
    assert told in plan.refusal
    assert not plan.acts


def test_a_reboot_that_was_asked_for_follows() -> None:
    assert "(it follows)" in pve_host.decide(role(reboot=True), host()).do["reboot"]


def test_the_options_do_what_they_say(tmp_path: Path) -> None:
    """The line that modprobe gives to a shell, on files in the place of the kernel's."""
    options = texts(pve_host.decide(role(), host()))[pve_host.OPTIONS]
    (line,) = [one for one in options.splitlines() if one.startswith("install vfio-pci ")]
    command = line.removeprefix("install vfio-pci ").replace("/sys/bus/pci/devices", str(tmp_path))
    (tmp_path / GPU).mkdir()
    (tmp_path / GPU / "driver_override").write_text("(null)\n")
    (tmp_path / "modprobe").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/called\n')
    (tmp_path / "modprobe").chmod(0o755)
    subprocess.run(["sh", "-ec", command], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert (tmp_path / GPU / "driver_override").read_text() == "vfio-pci\n"
    assert not (tmp_path / AUDIO).exists()
    assert (tmp_path / "called").read_text() == "--ignore-install vfio-pci\n"


def test_what_is_looked_at() -> None:
    asks = pve_host.look(role())
    done = subprocess.run([*asks["commands"]["host"]], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) == {"host", "kernel", "cmdline", "groups", "devices", "gpus", "users"}
