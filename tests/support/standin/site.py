"""A machine that says it is another system, with every repository that the runtime's roles use there."""

import json
import re

from tests.support.standin import runtime
from tests.support.standin.packages import Package
from tests.support.standin.platforms import EPEL, disguise, package, publish

VERSION = "1.19.1"
ONLY_TOOLKIT = {"these": ["nvidia_container_toolkit"]}
PLAYBOOK = """\
- name: The runtime of a GPU node
  hosts: all
  become: true
  gather_subset: [min]
  vars:
    these: [nvidia_persistence, container_runtime, nvidia_container_toolkit, nvtop]
  tasks:
    - name: Install
      ansible.builtin.include_role: {name: "{{ item }}", tasks_from: install}
      loop: "{{ these }}"
    - name: Run
      ansible.builtin.include_role: {name: "{{ item }}", tasks_from: runtime}
      loop: "{{ these | difference(['nvtop']) }}"
"""
SERVE = (
    "sudo systemd-run --unit vendor -p WorkingDirectory=/srv/vendor python3 -m http.server -b 127.0.0.1 8080"
)
ENGINES = {"rocky-9": ("containerd.io", "docker-ce"), "amazon-2023": ("containerd", "docker")}
# As NVIDIA's own installation steps leave it.
CUDA_REPO = """\
[cuda-rhel9-x86_64]
name=cuda-rhel9-x86_64
baseurl=file:///srv/nvidia
enabled=1
gpgcheck=1
gpgkey=file:///srv/nvidia/gpgkey
"""


class Site:
    """A machine with what it installs from.

    Args:
        node: The machine.
        platform: What it says it is.
    """

    def __init__(self, node, platform):
        self.node, self.platform = node, platform
        self.is_apt = platform not in ENGINES
        self.kind = "apt" if self.is_apt else "rpm"
        engines = [] if self.is_apt else runtime.engines(*ENGINES[platform])
        disguise(node, platform, base=engines if platform == "amazon-2023" else ())
        versions = [runtime.toolkit(one, rpm=not self.is_apt) for one in (VERSION, "1.19.0", "1.19.2")]
        vendor = [*versions[0], *versions[1][:4], *versions[2][:4]]  # not the newest is wanted
        self.fingerprint = publish(node, "/srv/vendor", vendor, kind=self.kind)
        if self.is_apt:
            unit = runtime.UBUNTU_UNIT
            archive = [
                runtime.persistence("nvidia-compute-utils-535-server", unit),
                Package("nvtop", "3.0-1"),
            ]
            publish(node, "/srv/archive", archive)
            listed = "deb [signed-by=/srv/archive/gpgkey] file:/srv/archive /\n"
            node.write("/etc/apt/sources.list.d/archive.list", listed)
            node.read("sudo apt-get -q update")
            node.read(SERVE)
        else:
            self._publish_others(engines)

    def _publish_others(self, engines):
        """NVIDIA's CUDA repository has the toolkit too, signed with the toolkit's key, not with its own."""
        persistence = [runtime.persistence("nvidia-persistenced")]
        carried = ["/srv/vendor/*nvidia-container*.rpm"]
        publish(self.node, "/srv/nvidia", persistence, kind="rpm", carried=carried)
        self.node.write("/etc/yum.repos.d/cuda-rhel9.repo", CUDA_REPO)
        if self.platform == "rocky-9":
            self.others = {
                "epel": publish(self.node, "/srv/epel", map(package, EPEL), kind="rpm"),
                "docker": publish(self.node, "/srv/docker", engines, kind="rpm"),
            }

    def other(self, name):
        """What the roles are told of another vendor's repository."""
        folder = f"file:///srv/{name}"
        return {"url": folder, "key_url": f"{folder}/gpgkey", "key_fingerprint": self.others[name]}

    def repository(self, **changed):
        url = "http://127.0.0.1:8080" if self.is_apt else "file:///srv/vendor"
        found = {
            "url": url,
            "key_url": f"{url}/gpgkey",
            "key_fingerprint": self.fingerprint,
            **changed,
        }
        return {"apt": {**found, "suite": "/"}, "rpm": {**found, "repo_gpgcheck": True}}

    def _variables(self, variables):
        found = {
            "nvidia_container_toolkit_repository": self.repository(),
            "nvidia_container_toolkit_version": VERSION,
        }
        if self.platform == "rocky-9":
            here = {"distributions": ["rocky"]}
            found["container_runtime_repository"] = {"rpm": {**self.other("docker"), **here}}
            epel = {**self.other("epel"), **here, "includepkgs": ["nvtop"]}
            found["nvtop_repository"] = {"rpm": epel}
        return {**found, **variables}

    def play(self, *options, **variables):
        return self.node.play(PLAYBOOK, *options, **self._variables(variables))

    def apply(self, *options, **variables):
        return self.node.apply(PLAYBOOK, *options, **self._variables(variables))

    def converge(self, **variables):
        return self.node.converge(PLAYBOOK, **self._variables(variables))

    def refused(self, **variables):
        return self.node.refused(PLAYBOOK, **self._variables(variables))

    def refused_from(self, **changed):
        """What the toolkit's role says of its repository."""
        repository = self.repository(**changed)
        return self.refused(**ONLY_TOOLKIT, nvidia_container_toolkit_repository=repository)

    def installed(self):
        command = "dpkg-query -W -f '${db:Status-Abbrev}|${Package}|${Version}\\n' | grep ^.i"
        if not self.is_apt:
            command = "rpm -qa --qf 'ii |%{name}|%{version}-%{release}\\n'"
        return dict(line.split("|")[1:] for line in self.node.read(command).splitlines())

    def held(self):
        text = self.node.read("apt-mark showhold" if self.is_apt else "sudo dnf -q versionlock list")
        return {name for name in runtime.TOOLKIT if re.search(rf"(?m)^{name}(-0:|$)", text)}

    def daemon_json(self):
        return json.loads(self.node.read("cat /etc/docker/daemon.json"))
