"""ansible/pve.yml with real Ansible, over a copy-on-write /etc and made-up PCI devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT
from tests.support.pve import Cluster, host

STUB = '#!/bin/sh\necho "${0##*/} $*" >>%s/calls\n'
# What is written to /etc lands in a folder of the test, and the PCI devices are the test's.
WITHIN = """
set -e
mount -t tmpfs none {folder}/over
mkdir {folder}/over/up {folder}/over/work
mount -t overlay none -o lowerdir=/etc,upperdir={folder}/over/up,workdir={folder}/over/work /etc
mount --bind {folder}/root/sys/bus/pci /sys/bus/pci
mkdir -p /etc/default && echo 'GRUB_CMDLINE_LINUX_DEFAULT="quiet"' >/etc/default/grub
for run in first second; do
  ansible-playbook -i {folder}/hosts.yml {root}/ansible/pve.yml
  echo "== $run"
done
cp /etc/modprobe.d/gpukiln-vfio.conf {folder}/options
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces are root's")
@pytest.mark.skipif(not Path("/sys/bus/pci").is_dir(), reason="the kernel has no PCI bus to put devices over")
def test_a_host_is_prepared_once_and_never_rebooted(tmp_path: Path) -> None:
    for name in ("pveversion", "qm", "pct", "update-initramfs", "update-grub", "reboot", "systemctl"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(STUB % tmp_path)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "over").mkdir()
    (tmp_path / "calls").touch()
    host(tmp_path / "root", Cluster(), {"0000:02:00.0": "nouveau"})
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_become": False,
        "pve_host_gpus": ["0000:02:00"],
    }
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": {"pve1": variables}}}))
    programs = Path(sys.executable).parent
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", WITHIN.format(folder=tmp_path, root=ROOT)],
        env={
            "PATH": f"{tmp_path}/bin:{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(tmp_path),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, _ = done.stdout.split("== ")
    assert "changed=0" not in first
    assert "changed=0" in second, second
    for run in (first, second):  # until there was one
        assert "A reboot is needed (this role does not, unless pve_host_reboot is set)" in run
        assert "0000:02:00.0 has nouveau" in run
    assert "softdep nouveau pre: vfio-pci" in (tmp_path / "options").read_text()
    calls = (tmp_path / "calls").read_text()
    assert calls.count("update-initramfs -u -k all\nupdate-grub \n") == calls.count("update-") // 2 == 1
    assert "reboot" not in calls
    assert not Path("/etc/modprobe.d/gpukiln-vfio.conf").exists()
