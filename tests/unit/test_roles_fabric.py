"""What the driver's role does about NVSwitch: real Ansible on this machine, with a PCI bus made of files."""

from pathlib import Path

import pytest
import yaml

from gpukiln.catalog.load import ROOT
from tests.support.roles import play

ROLE = ROOT / "roles/nvidia_driver"
PLAYBOOK = f"""\
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {{name: nvidia_driver, tasks_from: gpus, public: true}}
    - ansible.builtin.template:
        src: {ROLE}/templates/nvidia-fabricmanager.conf.j2
        dest: "{{{{ playbook_dir }}}}/gpukiln.conf"
        lstrip_blocks: true
      vars: {{role_path: {ROLE}}}
      when: nvidia_driver_fabric
"""
H100, B200, B300, SWITCH = "0x2330", "0x2901", "0x3182", "0x22a3"
NVIDIA = {"nvidia_driver_source": "nvidia", "nvidia_driver_nvlink5_packages": ["nvlsm", "infiniband-diags"]}


def judge(folder: Path, *devices: str, **variables: object) -> tuple[str, str]:
    """What the role says, and the drop-in of the fabric manager's unit, empty where it has none."""
    for number, device in enumerate(devices):
        path = folder / "pci" / f"0000:{number + 0x10:02x}:00.0"
        path.mkdir(parents=True)
        kind = "0x068000" if device == SWITCH else "0x030200"
        for name, value in {"vendor": "0x10de", "class": kind, "device": device}.items():
            (path / name).write_text(f"{value}\n")
    values = {
        "nvidia_driver_branch": 580,
        "nvidia_driver_version": "580.178.04",
        "nvidia_driver_modules": "auto",
        "nvidia_driver_fabric_packages": ["nvidia-fabricmanager"],
        "ansible_facts": {"distribution": "Ubuntu", "os_family": "Debian"},
        **NVIDIA,
        **variables,
    }
    done = play(folder, PLAYBOOK, values, {"GPUKILN_PCI_DEVICES": str(folder / "pci")})
    dropin = folder / "gpukiln.conf"
    said = "" if done.returncode == 0 else " ".join(done.stdout.split())
    return said, dropin.read_text() if dropin.exists() else ""


@pytest.mark.parametrize("device", [B200, B300])
def test_hgx_b200_and_b300_get_a_fabric_manager_though_no_switch_is_on_the_bus(
    device: str, tmp_path: Path
) -> None:
    said, dropin = judge(tmp_path, device, device)
    assert said == ""
    assert "ExecCondition=/usr/local/sbin/nvidia-gpu-present --nvswitch --or-gpus 0x2901,0x3182\n" in dropin
    assert "Wants=modprobe@mlx5_ib.service modprobe@ib_umad.service\n" in dropin


def test_switches_on_the_bus_need_no_infiniband(tmp_path: Path) -> None:
    said, dropin = judge(tmp_path, H100, SWITCH)
    assert said == ""
    assert "ExecCondition=" in dropin
    assert "modprobe@" not in dropin


def test_gpus_without_switches_have_no_fabric_manager(tmp_path: Path) -> None:
    assert judge(tmp_path, H100) == ("", "")


def test_who_wants_none_gets_none(tmp_path: Path) -> None:
    """A virtual machine with one of the GPUs, whose fabric somebody else manages."""
    nothing = {"nvidia_driver_fabric_manager": "never", "nvidia_driver_nvlink5_packages": []}
    assert judge(tmp_path, B200, **nothing) == ("", "")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"nvidia_driver_source": "distribution", "nvidia_driver_nvlink5_packages": []},
            "no package of NVLink's subnet manager (NVLSM) from the source 'distribution' on Ubuntu; wanted",
        ),
        ({"nvidia_driver_fabric_packages": []}, "Found NVSwitch, and no fabric manager from the source"),
        (
            {"nvidia_driver_branch": 535, "nvidia_driver_version": "535.309.01"},
            "driver 535.309.01 does not know the B200 (Blackwell), wanted 570.133.20 or later",
        ),
    ],
)
def test_what_cannot_work_is_refused(variables: dict[str, object], words: str, tmp_path: Path) -> None:
    assert words in judge(tmp_path, B200, **variables)[0]


def test_nvidia_s_repositories_are_asked_for_the_subnet_manager_and_the_archives_are_not() -> None:
    found = {
        path.stem: yaml.safe_load(path.read_text()).get("nvidia_driver_nvlink5_packages")
        for path in (ROLE / "vars").glob("*.yml")
    }
    assert {name for name, packages in found.items() if packages} == {"nvidia_apt", "nvidia_dnf"}
    for tasks in ("choose_apt", "choose_dnf"):
        assert "nvidia_driver_nvlink5_packages" in (ROLE / f"tasks/{tasks}.yml").read_text()
