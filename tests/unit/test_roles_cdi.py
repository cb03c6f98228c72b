"""When the toolkit's role makes the CDI specification anew: real Ansible, with an nvidia-ctk of our own."""

from pathlib import Path

import pytest

from tests.support.roles import play

PLAYBOOK = """\
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: nvidia_container_toolkit, tasks_from: cdi}
"""
# As the real one writes the nodes that it finds.
CTK = """#!/bin/sh
if [ "$1 $2" = "system create-device-nodes" ]; then exec touch "$HOME/uvm"; fi
for word; do file=${word#--output=}; done
{
  echo "  - path: /dev/nvidia-uvm-tools"
  if [ -e "$HOME/uvm" ]; then echo "  - path: /dev/nvidia-uvm"; fi
  echo "  - hostPath: /usr/lib/libcuda.so.$(cat "$HOME/loaded")"
} >"$file"
"""
WHOLE = "  - path: /dev/nvidia-uvm\n  - path: /dev/nvidia-uvm\n  - hostPath: /usr/lib/libcuda.so.580.178.04\n"


def converge(folder: Path) -> str:
    """What changed, from Ansible's last line."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/nvidia-ctk").write_text(CTK)
    (folder / "bin/nvidia-ctk").chmod(0o755)
    (folder / "loaded").write_text("580.178.04\n")
    values = {
        "nvidia_container_toolkit_loaded_file": str(folder / "loaded"),
        "nvidia_container_toolkit_cdi_file": str(folder / "nvidia.yaml"),
    }
    done = play(folder, PLAYBOOK, values)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("spec", "written"),
    [
        (None, True),
        (WHOLE, False),
        (WHOLE.replace("580.178.04", "535.309.01"), True),
        (WHOLE.replace("nvidia-uvm\n", "nvidia-uvm-tools\n"), True),
        (WHOLE + "  - hostPath: /usr/lib/libcuda.so.535.309.01\n", True),
    ],
    ids=["none", "right", "another driver", "no node for CUDA", "two drivers"],
)
def test_a_specification_that_is_right_stays(tmp_path: Path, spec: str | None, *, written: bool) -> None:
    if spec is not None:
        (tmp_path / "nvidia.yaml").write_text(spec)
    assert ("changed=0" not in converge(tmp_path)) == written
    assert "path: /dev/nvidia-uvm\n" in (tmp_path / "nvidia.yaml").read_text()
    if written:
        assert "changed=0" in converge(tmp_path)
