"""An EKS cluster of moto, with what EKS has and moto leaves out."""

from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.eks.models import eks_backends

PROFILE = "nodes"  # the instance profile of its nodes


def make_cluster(endpoint: Any, name: str = "prod") -> None:
    """Make a cluster in every subnet, with its security group and an instance profile of nodes."""
    ec2 = endpoint.client("ec2")
    endpoint.client("iam").create_instance_profile(InstanceProfileName=PROFILE)
    endpoint.client("eks").create_cluster(
        name=name,
        version="1.34",
        roleArn="arn:aws:iam::123456789012:role/eks",
        resourcesVpcConfig={"subnetIds": [one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]]},
        kubernetesNetworkConfig={"serviceIpv4Cidr": "10.100.0.0/16"},
    )
    # EKS makes a group for every cluster and tags it (EKS user guide, "security group requirements").
    made = ec2.create_security_group(GroupName=f"eks-cluster-sg-{name}", Description="nodes")["GroupId"]
    region = endpoint.region
    ec2_backends[DEFAULT_ACCOUNT_ID][region].create_tags([made], {"aws:eks:cluster-name": name})
    config = eks_backends[DEFAULT_ACCOUNT_ID][region].clusters[name].resources_vpc_config
    config["clusterSecurityGroupId"] = made
