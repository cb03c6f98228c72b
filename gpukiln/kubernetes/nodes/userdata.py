"""What a node runs before its first pod: GPU isolation, local storage, joining the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpukiln.kubernetes.addons.plugin import ISOLATION
from gpukiln.kubernetes.manifest import Manifest, dump
from gpukiln.kubernetes.nodes.group import NodeGroup

BOUNDARY = "NODE"
SCRATCH = "/mnt/k8s-disks/0"  # of awslabs/amazon-eks-ami:nodeadm/internal/system/local_disk.go
KUBELET = "/var/lib/kubelet"

# EC2's instance storage is identified by its model (EC2 User Guide, NVMe on Linux). It keeps its data over a
# reboot, so a disk that is formatted already is only mounted.
RAID = f"""\
# local NVMe as one RAID 0 at {SCRATCH}, as nodeadm mounts it; emptyDir volumes are on it
disks=$(lsblk --nodeps --noheadings --paths --output NAME,MODEL |
  awk '/Amazon EC2 NVMe Instance Storage/ {{print $1}}')
count=$(printf '%s' "$disks" | grep -c . || test $? -eq 1)
if [ "$count" -gt 0 ] && ! mountpoint --quiet {SCRATCH}; then
  device=$disks
  if [ "$count" -gt 1 ]; then
    device=/dev/md/k8s-disks
    # shellcheck disable=SC2086 # one word a disk
    test -e "$device" || mdadm --create "$device" --force --run --level=0 --raid-devices="$count" $disks
  fi
  blkid "$device" || mkfs.ext4 -q -E nodiscard -L k8s-disks "$device"
  mkdir -p {SCRATCH} {KUBELET}
  grep -q LABEL=k8s-disks /etc/fstab || cat >>/etc/fstab <<'FSTAB'
LABEL=k8s-disks {SCRATCH} ext4 defaults,noatime,nofail 0 2
{SCRATCH}/kubelet {KUBELET} none bind,nofail 0 0
FSTAB
  systemctl daemon-reload
  mount {SCRATCH}
  mkdir -p {SCRATCH}/kubelet
  cp -a {KUBELET}/. {SCRATCH}/kubelet/
  mount {KUBELET}
fi
"""


@dataclass(frozen=True)
class JoinValues:
    """What a machine needs to know of the EKS cluster that it joins, as DescribeCluster gives it.

    Args:
        certificate_authority: In base64.
        service_cidr: The network of the services.
        dns_ip: Address of the DNS service; only Ubuntu's bootstrap.sh needs it.
    """

    name: str
    endpoint: str
    certificate_authority: str
    service_cidr: str
    dns_ip: str


def user_data(group: NodeGroup, cluster: JoinValues, labels: Mapping[str, str], taints: Sequence[str]) -> str:
    """User data as MIME multipart, by which a machine of a group joins a cluster.

    Args:
        labels: Of the node from its registration on.
        taints: KEY=VALUE:EFFECT, of the node from its registration on.
    """
    if not group.nodeadm:
        script = ubuntu(
            # Double quotes: templatefile() of Terraform puts the values there.
            f'"{cluster.name}"',
            f'"{cluster.dns_ip}"',
            labels,
            ",".join(taints),
            local_storage=group.has_local_storage,
        )
        return multipart(("text/x-shellscript", script))
    spec = {
        "name": cluster.name,
        "apiServerEndpoint": cluster.endpoint,
        "certificateAuthority": cluster.certificate_authority,
        "cidr": cluster.service_cidr,
    }
    flags = [
        "--node-labels=" + ",".join(f"{name}={text}" for name, text in labels.items()),
        f"--register-with-taints={','.join(taints)}",
    ]
    return nodeadm(spec, flags, local_storage=group.has_local_storage)


def isolation() -> str:
    """A script: pods can use only the GPUs that the device plugin gave them."""
    return "#!/bin/bash\nset -eu\n" + "".join(f"{line}\n" for line in ISOLATION)


def nodeadm(cluster: Mapping[str, Any], flags: list[str], *, local_storage: bool) -> str:
    """User data of Amazon Linux 2023 as MIME multipart: a script and nodeadm's NodeConfig."""
    spec: dict[str, Any] = {"cluster": dict(cluster), "kubelet": {"flags": flags}}
    if local_storage:
        # nodeadm mounts the RAID itself before the kubelet starts.
        spec["instance"] = {"localStorage": {"strategy": "RAID0"}}
    config: Manifest = {"apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig", "spec": spec}
    return multipart(("text/x-shellscript", isolation()), ("application/node.eks.aws", dump(config)))


def ubuntu(cluster: str, dns_ip: str, labels: Mapping[str, str], taint: str, *, local_storage: bool) -> str:
    """A script for Canonical's EKS images, which have `bootstrap.sh` and no nodeadm.

    Args:
        cluster: As a word of the shell.
        dns_ip: As a word of the shell; the tenth address of the service network.
        taint: KEY=VALUE:EFFECT, or several with commas.
    """
    more = "".join(f",{key}={value}" for key, value in labels.items())
    return f"""\
{isolation()}{RAID if local_storage else ""}\
# ends when the driver has listed every GPU; if it fails, the node does not join the cluster
systemctl start gpukiln-bootstrap.service
labels=$(cat /run/gpukiln/node-labels)
/etc/eks/bootstrap.sh {cluster} \\
  --dns-cluster-ip {dns_ip} \\
  --kubelet-extra-args \\
  "--node-labels=$labels{more} --register-with-taints={taint}"
"""


def multipart(*parts: tuple[str, str]) -> str:
    """Content types and texts as one MIME multipart message for cloud-init."""
    lines = ["MIME-Version: 1.0", f'Content-Type: multipart/mixed; boundary="{BOUNDARY}"', ""]
    for kind, text in parts:
        lines += [f"--{BOUNDARY}", f"Content-Type: {kind}", "", text]
    return "\n".join([*lines, f"--{BOUNDARY}--", ""])
