"""What a machine needs to join an EKS cluster, from DescribeCluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import UsageError
from gpukiln.kubernetes.nodes.userdata import JoinValues

# `aws eks update-kubeconfig` names a context by the cluster's ARN unless --alias names another one.
ARN = re.compile(r"arn:[\w-]+:eks:(?P<region>[\w-]+):\d+:cluster/(?P<name>[\w-]+)")


@dataclass(frozen=True)
class EksCluster:
    """An EKS cluster.

    Args:
        security_group: The one that EKS made for nodes and control plane to reach each other.
        subnets: Those of the cluster, of which each node needs one.
    """

    join: JoinValues
    subnets: tuple[str, ...]
    security_group: str


def cluster_name(context: str, region: str) -> str:
    """The name of the EKS cluster of a context.

    >>> cluster_name("arn:aws:eks:us-west-2:111122223333:cluster/prod", "us-west-2")
    'prod'
    >>> cluster_name("arn:aws:eks:eu-west-1:111122223333:cluster/prod", "us-west-2")
    Traceback (most recent call last):
    gpukiln.errors.UsageError: the cluster prod is in eu-west-1, and the image is in us-west-2

    Args:
        region: Where the image is.

    Raises:
        UsageError: The context does not name a cluster, or names one in another region.
    """
    match = ARN.fullmatch(context)
    if not match:
        raise UsageError(
            f"the context {context} is no ARN of an EKS cluster, so its cluster is unknown",
            hint="name the cluster with --eks-cluster; where it is not on EKS, --user-data FILE joins it",
        )
    if match["region"] != region:
        raise UsageError(
            f"the cluster {match['name']} is in {match['region']}, and the image is in {region}",
            hint=f"release the image to {match['region']}, or name the context of a cluster in {region}",
        )
    return match["name"]


def describe(cloud: Cloud, name: str) -> EksCluster:
    """Read a cluster.

    Raises:
        UnavailableError: There is no such cluster, or the call was refused.
    """
    with explain_aws_errors(f"describe the EKS cluster {name}"):
        described: dict[str, Any] = cloud.client("eks").describe_cluster(name=name)["cluster"]
    cidr = described["kubernetesNetworkConfig"]["serviceIpv4Cidr"]
    network = described["resourcesVpcConfig"]
    join = JoinValues(
        name=name,
        endpoint=described["endpoint"],
        certificate_authority=described["certificateAuthority"]["data"],
        service_cidr=cidr,
        # EKS gives CoreDNS the tenth address of the services (awslabs/amazon-eks-ami, get_dns_cluster_ip).
        dns_ip=str(ip_network(cidr)[10]),
    )
    return EksCluster(join, tuple(network["subnetIds"]), network["clusterSecurityGroupId"])
