"""What a machine's disk gets before its start, so that it can join the cluster of this computer.

A base of EKS has a kubelet, its configuration and a script that joins; Debian has none of them. The kubelet
starts when user data calls JOIN, as on EKS, with the labels and taints that it registers with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h2
import hpack
import hyperframe

from gpukiln import recipes
from gpukiln.clouds.embedded.chroot import in_root
from gpukiln.clouds.embedded.cluster import device_plugin, image
from gpukiln.clouds.embedded.cluster.certificates import CertificateAuthority
from gpukiln.clouds.embedded.cluster.control_plane import JOIN, PODS, ClusterFiles, write_kubeconfig
from gpukiln.clouds.embedded.cluster.programs import CNI, PLUGIN, STAND_IN, TOOLKIT, Programs
from gpukiln.clouds.embedded.cluster.relay import API_PORT
from gpukiln.clouds.embedded.network import METADATA
from gpukiln.errors import IncompatibleError

IMAGE_FILE = "/var/lib/gpukiln/rehearsal.tar"
RUNTIME_SCRIPT = "/usr/local/lib/gpukiln/containerd-runtime"
MEMORY_MIB = 4096  # three test pods request 1 GiB each
JOIN_TEXT = """\
#!/bin/sh
# Starts the kubelet with labels and taints, now and at each boot.
set -eu
# Kubelet and runtime have to manage control groups in the same way (kubernetes.io, "Container Runtimes").
driver=cgroupfs
if containerd config dump | grep -q 'SystemdCgroup = true'; then driver=systemd; fi
sed -i "s/@driver@/$driver/" /etc/kubernetes/kubelet.json
printf 'LABELS=%s\\nTAINTS=%s\\n' "$1" "$2" >/etc/kubernetes/kubelet.env
systemctl enable kubelet.service
if ! timeout 300 systemctl start containerd.service gpukiln-pod-image.service kubelet.service; then
  journalctl --quiet --no-pager --output=cat --lines=20 -u containerd -u gpukiln-pod-image -u kubelet \\
    >/dev/console
  exit 1
fi
"""
KUBELET_UNIT = """\
[Unit]
Description=kubelet
Wants=network-online.target
After=network-online.target containerd.service gpukiln-pod-image.service gpukiln-cdi.service
Requires=containerd.service
ConditionPathExists=/etc/kubernetes/kubelet.env
[Service]
EnvironmentFile=/etc/kubernetes/kubelet.env
ExecStart=@kubelet@ --config=/etc/kubernetes/kubelet.json --kubeconfig=/etc/kubernetes/kubelet.kubeconfig \\
  --hostname-override=@name@ --node-labels=${LABELS} --register-with-taints=${TAINTS}
# The console is all that can be read of a machine that does not join.
ExecStopPost=/bin/sh -c '[ "$SERVICE_RESULT" = success ] || \\
  journalctl --quiet --no-pager --output=cat --lines=3 -u kubelet >/dev/console'
Restart=always
RestartSec=5
[Install]
WantedBy=multi-user.target
"""
# The sandbox of each pod runs the image that containerd's configuration names, which no registry has here.
IMAGE_UNIT = f"""\
[Unit]
Description=Image of the pods of this cluster
After=containerd.service
Requires=containerd.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -euc 'ctr -n k8s.io images import {IMAGE_FILE}; \\
  pause=$(containerd config dump | sed -n "s/^ *sandbox\\\\(_image\\\\)\\\\? = .\\\\(.*\\\\).$/\\\\2/p"); \\
  ctr -n k8s.io images tag --force {image.NAME} "$pause"'
[Install]
WantedBy=multi-user.target
"""
CDI_UNIT = """\
[Unit]
Description=CDI specification of the GPUs
After=gpukiln-simulated-gpus.service
Before=containerd.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml
[Install]
WantedBy=multi-user.target
"""
# In the file whose table containerd takes: a drop-in replaces the main file's (see the role's script).
RUNTIME_UNIT = f"""\
[Service]
ExecStartPre=/bin/sh -euc 'file=/etc/containerd/config.toml; own=/etc/containerd/conf.d/10-gpukiln.toml; \\
  if [ -e $own ]; then file=$own; fi; \\
  exec /bin/sh {RUNTIME_SCRIPT} nvidia /usr/bin/nvidia-container-runtime default $file'
"""
# Volume mounts name the GPUs of a container: containerd has CDI devices in its interface since 1.7
# (containerd/containerd#6654), Debian 12 has 1.6. A pod without a GPU can't name one by its environment.
RUNTIME_CONFIG = """\
accept-nvidia-visible-devices-envvar-when-unprivileged = false
accept-nvidia-visible-devices-as-volume-mounts = true
[nvidia-container-runtime]
mode = "cdi"
runtimes = ["runc", "crun"]
[nvidia-container-runtime.modes.cdi]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]
"""
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "rehearsal",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            # no masquerading, which needs iptables: the pods of this cluster call nothing
            "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS}]]},
        }
    ],
}


@dataclass(frozen=True)
class NodeFiles:
    """The files of one machine.

    Args:
        name: Of the Node, which is the instance id.
        files: Those of the cluster.
    """

    name: str
    files: ClusterFiles
    programs: Programs

    def prepare(self, root: Path) -> None:
        """Write them on a machine's disk; a second call changes nothing.

        Args:
            root: Its mounted root file system.

        Raises:
            IncompatibleError: It has no containerd, or is not made of Debian's packages.
        """
        if in_root(root, Path("/etc/kubernetes/kubelet.json").exists):
            return
        if not in_root(root, Path("/usr/bin/containerd").exists):
            raise IncompatibleError(
                f"the disk of {self.name} has no containerd, so it can't be a node",
                hint="build the image with the role container_runtime",
            )
        if not in_root(root, image.STATUS.exists):
            raise IncompatibleError(
                f"the disk of {self.name} has no {image.STATUS}: the pods' image needs it"
            )
        own_toolkit = in_root(root, Path("/usr/bin/nvidia-container-runtime").exists)
        own_kubelet = in_root(root, Path("/usr/bin/kubelet").exists)
        kubelet = "/usr/bin/kubelet" if own_kubelet else "/usr/local/bin/kubelet"
        programs = {f"/opt/cni/bin/{name}": name for name in CNI}
        if not own_kubelet:
            programs[kubelet] = "kubelet"
        texts = {**self._texts(kubelet), **self._secrets()}
        units = ["gpukiln-pod-image.service"]
        if not own_toolkit and self.programs.has(*TOOLKIT):
            programs |= {f"/usr/bin/{name}": name for name in TOOLKIT}
            texts |= _toolkit_texts()
            units.append("gpukiln-cdi.service")
        plugin = _plugin_files(self.programs)
        pods = image.oci_archive(in_root(root, lambda: image.layer(plugin)))
        contents = {path: self.programs[name].read_bytes() for path, name in programs.items()}
        in_root(root, lambda: _write(texts, {**contents, IMAGE_FILE: pods}, units))

    def _texts(self, kubelet: str) -> dict[str, str]:
        unit = KUBELET_UNIT.replace("@kubelet@", kubelet).replace("@name@", self.name)
        return {
            JOIN: JOIN_TEXT,
            "/etc/systemd/system/kubelet.service": unit,
            "/etc/systemd/system/gpukiln-pod-image.service": IMAGE_UNIT,
            "/etc/cni/net.d/10-rehearsal.conflist": json.dumps(NETWORK),
            "/etc/kubernetes/kubelet.json": json.dumps(_kubelet_configuration(), indent=2),
        }

    def _secrets(self) -> dict[str, str]:
        """The kubelet's certificate, for its server and for its own calls, and the cluster's address."""
        folder, name = self.files.folder, f"node-{self.name}"
        # The groups of a node (kubernetes.io, "Using Node Authorization").
        certificate, key = CertificateAuthority(folder).issue(
            name, f"system:node:{self.name}", groups=("system:nodes",), hosts=(self.name,)
        )
        kubeconfig = folder / f"{name}.kubeconfig"
        write_kubeconfig(kubeconfig, f"https://{METADATA}:{API_PORT}", folder, name)
        return {
            "/etc/kubernetes/ca.crt": (folder / "ca.crt").read_text(),
            "/etc/kubernetes/kubelet.crt": certificate.read_text(),
            "/etc/kubernetes/kubelet.key": key.read_text(),
            "/etc/kubernetes/kubelet.kubeconfig": kubeconfig.read_text(),
        }


def _plugin_files(programs: Programs) -> dict[str, bytes]:
    """NVIDIA's device plugin, else the stand-in with what it imports; for the image of the pods."""
    if programs.has(PLUGIN):
        return {f"/usr/bin/{PLUGIN}": programs[PLUGIN].read_bytes()}
    files = {f"/usr/bin/{STAND_IN}": b"#!/usr/bin/python3\n" + Path(device_plugin.__file__).read_bytes()}
    for package in (h2, hpack, hyperframe):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            files[f"/usr/lib/python3/dist-packages/{file.relative_to(folder.parent)}"] = file.read_bytes()
    return files


def _toolkit_texts() -> dict[str, str]:
    script = recipes.file("roles/container_runtime/files/containerd-runtime.sh").read_text()
    return {
        RUNTIME_SCRIPT: script,
        "/etc/nvidia-container-runtime/config.toml": RUNTIME_CONFIG,
        "/etc/systemd/system/gpukiln-cdi.service": CDI_UNIT,
        "/etc/systemd/system/containerd.service.d/rehearsal.conf": RUNTIME_UNIT,
    }


def _kubelet_configuration() -> dict[str, Any]:
    """See kubernetes.io, "Kubelet Configuration (v1beta1)"; as that of kubeadm, without cluster DNS."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": "/etc/kubernetes/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "@driver@",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "failSwapOn": False,
        "tlsCertFile": "/etc/kubernetes/kubelet.crt",
        "tlsPrivateKeyFile": "/etc/kubernetes/kubelet.key",
        # Without hardware virtualization a container takes some seconds to answer.
        "runtimeRequestTimeout": "10m",
    }


def _write(texts: Mapping[str, str], contents: Mapping[str, bytes], units: list[str]) -> None:
    for name, content in {**{path: text.encode() for path, text in texts.items()}, **contents}.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        executable = path.parts[1:3] == ("usr", "local") or "bin" in path.parts
        path.chmod(0o755 if executable else 0o600 if name.startswith("/etc/kubernetes/") else 0o644)
    links = Path("/etc/systemd/system/multi-user.target.wants")
    links.mkdir(parents=True, exist_ok=True)
    for unit in units:
        (links / unit).unlink(missing_ok=True)
        (links / unit).symlink_to(f"../{unit}")
