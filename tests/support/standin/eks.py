"""What Ubuntu's EKS images join a cluster with, as far as it touches containerd.

As Canonical's own script does it: a template goes into the place of /etc/containerd/config.toml, with the
pause image of the region, and containerd is restarted. The kubelet, the cluster and AWS are left out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.harness import Node

PAUSE = "602401143452.dkr.ecr.us-west-2.amazonaws.com/eks/pause:3.5"
BOOTSTRAP = f"""\
#!/bin/bash
set -euo pipefail
runtime=containerd
while [ $# -gt 1 ]; do
  case $1 in --container-runtime) runtime=$2 ;; esac
  shift 2
done
mkdir -p /etc/containerd /etc/systemd/system/containerd.service.d
printf '[Service]\\nExecStartPre=/bin/ln -sf /run/containerd/containerd.sock /run/dockershim.sock\\n' \\
  >/etc/systemd/system/containerd.service.d/10-compat-symlink.conf
systemctl daemon-reload
templates=/usr/local/share/eks
case $runtime in
  containerd) sed "s,SANDBOX_IMAGE,{PAUSE},g" <$templates/containerd-config.toml ;;
  nvidia-container-runtime) cat $templates/nvidia-runtime-config.toml ;;
  *) exit 1 ;;
esac >/etc/containerd/config.toml
systemctl restart containerd
"""
# Of the same kind as amazon-eks-ami:templates/al2/runtime/containerd-config.toml.
TEMPLATE = """\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "SANDBOX_IMAGE"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "/etc/containerd/certs.d:/etc/docker/certs.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
"""
# It names no pause image and no cgroup driver (canonical/ubuntu-cloud-docs#389).
NVIDIA_TEMPLATE = """\
version = 2
[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".containerd]
      default_runtime_name = "nvidia"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes]
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
          runtime_type = "io.containerd.runc.v2"
          [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
            BinaryName = "/usr/bin/nvidia-container-runtime"
"""


def ubuntu_eks(node: "Node") -> None:
    """Make a machine one of an Ubuntu EKS image."""
    node.write("/etc/eks/bootstrap.sh", BOOTSTRAP)
    node.write("/usr/local/share/eks/containerd-config.toml", TEMPLATE)
    node.write("/usr/local/share/eks/nvidia-runtime-config.toml", NVIDIA_TEMPLATE)
    node.read("sudo chmod +x /etc/eks/bootstrap.sh")
