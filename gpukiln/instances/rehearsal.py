"""A NodeConfig for a machine in no cluster, so that an image for EKS on Amazon Linux can be verified.

There nodeadm makes a machine a node and writes containerd's configuration. Without a NodeConfig in user data
nodeadm-config.service fails ("could not find NodeConfig within UserData",
awslabs/amazon-eks-ami:nodeadm/internal/configprovider/mime.go), the machine is degraded, and containerd runs
with its defaults. With this one nodeadm works as on a node, at its place in the boot; only the kubelet finds
no cluster to join.
"""

from base64 import b64encode
from email.mime.nonmultipart import MIMENonMultipart

CLUSTER = "gpukiln-rehearsal"  # gather.py recognises it by this name
# InstanceIdNodeName: nodeadm then reads the metadata service alone; otherwise it calls EC2, for which the
# machine would need a role (nodeadm/internal/api/status.go). The other fields are the minimum of its README;
# the address is one for documentation (RFC 5737).
NODE_CONFIG = f"""\
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  featureGates:
    InstanceIdNodeName: true
  cluster:
    name: {CLUSTER}
    apiServerEndpoint: https://192.0.2.1
    certificateAuthority: {b64encode(b"no cluster").decode()}
    cidr: 10.100.0.0/16
"""


def node_config() -> MIMENonMultipart:
    """The part of user data that nodeadm looks for."""
    part = MIMENonMultipart("application", "node.eks.aws", charset="us-ascii")
    part.set_payload(NODE_CONFIG)
    return part
