"""A NodeConfig for a machine that is in no cluster, so that an image for EKS's Amazon Linux can be judged.

There nodeadm makes a node of a machine, and containerd's configuration is its work. Without a NodeConfig in
user data nodeadm-config.service fails ("could not find NodeConfig within UserData",
awslabs/amazon-eks-ami:nodeadm/internal/configprovider/mime.go), the machine is degraded, and containerd runs
with its defaults. With this one nodeadm does its work as on a node, at its place in the boot; only the
kubelet has nobody to join.
"""

from base64 import b64encode
from email.mime.nonmultipart import MIMENonMultipart

CLUSTER = "gpukiln-rehearsal"  # gather.py knows it by this name
# With instance ids as names of nodes nodeadm asks the metadata service alone, and not EC2, for which the
# machine would need a role (nodeadm/internal/api/status.go). The rest is the least that its README asks for;
# the address is one of RFC 5737.
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
