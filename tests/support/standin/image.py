"""The end of an image's build: its last roles, what the plan decided, and what a build leaves behind."""

from typing import Any

PLAYBOOK = """\
- name: The end of an image's build
  hosts: all
  become: true
  gather_subset: [min]
  tasks:
    - name: Say what is in it
      ansible.builtin.include_role: {name: "{{ item }}", tasks_from: install}
      loop: [gpu_bootstrap, image_record]
    - name: Compare
      ansible.builtin.include_role: {name: image_record, tasks_from: drift, apply: {check_mode: true}}
    - name: Remove what belongs to the build
      ansible.builtin.include_role: {name: image_hygiene, tasks_from: install}
    - name: Let the test in
      ansible.builtin.command: {argv: [ssh-keygen, -A]}
"""
LEFTOVERS = {
    "/var/cache/dnf/x-1/packages/y.rpm": "",
    "/var/lib/NetworkManager/secret_key": "",
    "/etc/sysconfig/network-scripts/ifcfg-eth0": "# Created by cloud-init automatically, do not edit.\n",
}
KEPT = {"/etc/sysconfig/network-scripts/ifcfg-eth1": "DEVICE=eth1\n"}


def components(toolkit: str, *, nvtop: bool) -> dict[str, dict[str, Any]]:
    """What the plan of an image decided about each component that has a stand-in.

    Args:
        toolkit: Version of the container toolkit.
        nvtop: Whether the platform has nvtop.
    """
    return {
        "docker": {"status": "install", "version": None},
        "containerd": {"status": "install", "version": None},
        "nvidia_container_toolkit": {"status": "install", "version": toolkit},
        "nvtop": {"status": "install" if nvtop else "left_out", "version": None},
    }
