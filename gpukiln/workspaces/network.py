"""Who reaches a workspace's machine, and what it reaches: a security group and a key pair of its own.

EC2 has the public half of the key, and one computer alone the private one.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.instances.tags import tag_specifications
from gpukiln.state import state_home
from gpukiln.workspaces.contract import Workspace, filters, workspace_tags
from gpukiln.workspaces.iam import EFS

PART, KEY_PART = "network", "key"
ANY4, ANY6 = "0.0.0.0/0", "::/0"
PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")  # RFC 1918
GONE_WAIT_S, POLL_S = 60.0, 2.0  # a group that EC2 still takes for used can be removed soon after


def security_group(cloud: Cloud, workspace: Workspace, vpc_id: str) -> str:
    """The security group of a workspace with its rules: created, or repaired where it exists.

    Only `ssh_from` reaches the machine, on port 22. Session Manager needs no ingress rule: its agent on the
    machine connects to AWS on port 443.

    Returns:
        Its id.

    Raises:
        UsageError: `ssh_from` is no network, or every address.
        UnavailableError: The cloud refused.
    """
    ingress, egress = ingress_rules(workspace), egress_rules(workspace)
    with explain_aws_errors("make the security group of the workspace"):
        ec2 = cloud.client("ec2")
        group = _existing(ec2, workspace, vpc_id)
        if group is None:
            group_id = ec2.create_security_group(**group_request(workspace), VpcId=vpc_id)["GroupId"]
            group = ec2.describe_security_groups(GroupIds=[group_id])["SecurityGroups"][0]
        # What is missing comes before what is too much goes: a machine that runs loses nothing meanwhile.
        # `has` is what EC2 reports, one permission of several networks; `wants` has one network a rule.
        for has, wants, add, take in (
            (
                group["IpPermissions"],
                ingress,
                ec2.authorize_security_group_ingress,
                ec2.revoke_security_group_ingress,
            ),
            (
                group["IpPermissionsEgress"],
                egress,
                ec2.authorize_security_group_egress,
                ec2.revoke_security_group_egress,
            ),
        ):
            there = [rule for permission in has for rule in _single(permission)]
            if missing := [rule for rule in wants if rule not in there]:
                add(GroupId=group["GroupId"], IpPermissions=missing)
            if extra := [rule for rule in there if rule not in wants]:
                take(GroupId=group["GroupId"], IpPermissions=extra)
    return str(group["GroupId"])


def remove_groups(cloud: Cloud, name: str, *, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """Remove the groups of a workspace whose machine is gone; none is fine.

    Returns:
        Those that were removed.

    Raises:
        UnavailableError: The cloud refused, or something still uses one.
    """
    ec2 = cloud.client("ec2")
    with explain_aws_errors("look for the security group of the workspace"):
        groups = ec2.describe_security_groups(Filters=filters(PART, name))["SecurityGroups"]
    for group in groups:
        _remove_group(ec2, group["GroupId"], sleep)
    return [group["GroupId"] for group in groups]


def _remove_group(ec2: Any, group_id: str, sleep: Callable[[float], None]) -> None:
    refused = UnavailableError("")

    def removed() -> bool | None:
        nonlocal refused
        try:
            with explain_aws_errors("remove the security group of the workspace"):
                ec2.delete_security_group(GroupId=group_id)
        except UnavailableError as error:
            # EC2 detaches the network interface of a terminated machine some seconds after its state says so.
            if "DependencyViolation" not in error.message:
                raise
            refused = error
            return None
        return True

    calls.wait_until(removed, lambda: refused, timeout_s=GONE_WAIT_S, pause_s=POLL_S, sleep=sleep)


def group_request(workspace: Workspace) -> dict[str, Any]:
    """Arguments of CreateSecurityGroup but the VPC."""
    return {
        "GroupName": f"gpukiln-workspace-{workspace.workspace_name}",
        "Description": f"gpukiln workspace {workspace.workspace_name}",
        "TagSpecifications": tag_specifications(workspace_tags(workspace, PART), "security-group"),
    }


def ingress_rules(workspace: Workspace) -> list[dict[str, Any]]:
    """Who reaches it, each rule of one network.

    Raises:
        UsageError: `ssh_from` is no network, or every address.
    """
    if not workspace.ssh_from:
        return []
    try:
        network = ipaddress.ip_network(workspace.ssh_from)
    except ValueError as error:
        raise UsageError(f"ssh_from: {error}", hint="for example 203.0.113.7/32") from None
    # AWS Config's managed rule restricted-ssh flags port 22 open to every address; a typo must not do that.
    if network.prefixlen == 0:
        raise UsageError(
            f"ssh_from {workspace.ssh_from} is every address",
            hint="your own address, for example 203.0.113.7/32; or none, and `workspace.ssh` goes by session "
            "manager",
        )
    return [_rule("tcp", 22, str(network))]


def egress_rules(workspace: Workspace) -> list[dict[str, Any]]:
    """What it reaches.

    The resolver of a VPC is reached whatever the group says, as are instance metadata and time (VPC user
    guide, "Security groups": traffic to Amazon DNS, DHCP and IMDS is not filtered), so names need no rule.
    `none` reaches private addresses on port 443: endpoints of AWS's services in the VPC, by which session
    manager works. An artifact cache on EFS is NFS, in the VPC.
    """
    # EC2 gives a new security group a rule that allows all egress; `security_group` revokes it where it is
    # too much.
    egress = workspace.capabilities.network_egress
    if egress == "open":
        return [_rule("-1", None, ANY4), _rule("-1", None, ANY6)]
    on_efs = EFS.fullmatch(workspace.capabilities.artifact_cache)
    nfs = [_rule("tcp", 2049, private) for private in PRIVATE_NETWORKS] if on_efs else []
    if egress == "https-only":
        return [_rule("tcp", 443, ANY4), _rule("tcp", 443, ANY6), *nfs]
    return [*(_rule("tcp", 443, private) for private in PRIVATE_NETWORKS), *nfs]


def _existing(ec2: Any, workspace: Workspace, vpc_id: str) -> dict[str, Any] | None:
    tagged = [*filters(PART, workspace.workspace_name), {"Name": "vpc-id", "Values": [vpc_id]}]
    groups = ec2.describe_security_groups(Filters=tagged)["SecurityGroups"]
    return groups[0] if groups else None


def _rule(protocol: str, port: int | None, network: str) -> dict[str, Any]:
    ports = {} if port is None else {"FromPort": port, "ToPort": port}
    ranges = (
        {"Ipv6Ranges": [{"CidrIpv6": network}]} if ":" in network else {"IpRanges": [{"CidrIp": network}]}
    )
    return {"IpProtocol": protocol, **ports, **ranges}


def _single(permission: dict[str, Any]) -> list[dict[str, Any]]:
    """A permission as rules of one network each, as `_rule` makes them; what names groups stays as it is.

    >>> _single({"IpProtocol": "-1", "IpRanges": [{"CidrIp": "10.0.0.0/8"}]})
    [{'IpProtocol': '-1', 'IpRanges': [{'CidrIp': '10.0.0.0/8'}]}]
    >>> addresses = [{"CidrIp": "10.0.0.1/32"}, {"CidrIp": "10.0.0.2/32"}]
    >>> len(_single({"IpProtocol": "tcp", "FromPort": 22, "IpRanges": addresses}))
    2
    """
    port = permission.get("FromPort") if permission["IpProtocol"] != "-1" else None
    networks = [ip_range["CidrIp"] for ip_range in permission.get("IpRanges", ())]
    networks += [ip_range["CidrIpv6"] for ip_range in permission.get("Ipv6Ranges", ())]
    rules = [_rule(permission["IpProtocol"], port, network) for network in networks]
    for key in ("UserIdGroupPairs", "PrefixListIds"):
        if permission.get(key):
            ports = {} if port is None else {"FromPort": port, "ToPort": permission.get("ToPort", port)}
            rules.append({"IpProtocol": permission["IpProtocol"], **ports, key: permission[key]})
    return rules


def key_file(cloud: Cloud, name: str) -> Path:
    """Where the private key of a workspace is on this computer, if it was started from here."""
    return state_home() / "workspaces" / "keys" / f"{cloud.name}-{cloud.region}-{name}"


def owner_file(cloud: Cloud, name: str) -> Path:
    """Where the owner of a workspace that this computer started is written; it outlives the key."""
    return state_home() / "workspaces" / "started" / f"{cloud.name}-{cloud.region}-{name}"


def is_started_here(cloud: Cloud, name: str, owner: str) -> bool:
    """Whether this computer started a workspace of that owner, or has its key."""
    try:
        return owner_file(cloud, name).read_text() == owner or key_file(cloud, name).exists()
    except OSError:
        return key_file(cloud, name).exists()


def key_pair(cloud: Cloud, workspace: Workspace) -> str:
    """The key pair of a workspace: EC2 has the public half, and this computer alone the private one.

    One that another computer made is taken as it is: it is the workspace that has one key.

    Returns:
        Its name.

    Raises:
        UnavailableError: The cloud refused.
    """
    from cryptography.hazmat.primitives import serialization as form  # noqa: PLC0415 - slow to import
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415 - likewise

    name, file = f"gpukiln-workspace-{workspace.workspace_name}", key_file(cloud, workspace.workspace_name)
    ec2 = cloud.client("ec2")
    with explain_aws_errors("make the workspace's key pair"):
        if ec2.describe_key_pairs(Filters=filters(KEY_PART, workspace.workspace_name))["KeyPairs"]:
            return name
        # Created here, not by EC2: a private key that never leaves this computer can't be read from an API
        # answer or a log.
        key = Ed25519PrivateKey.generate()
        text = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # of a workspace that is gone
        # O_EXCL with the mode at once: no other user can read or prepare the file before its content.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(text)
        started = owner_file(cloud, workspace.workspace_name)
        started.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        started.write_text(
            workspace.owner
        )  # not atomic: a half-written name matches no owner, and the key file decides as well
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        try:
            ec2.import_key_pair(
                KeyName=name,
                PublicKeyMaterial=public,
                TagSpecifications=tag_specifications(workspace_tags(workspace, KEY_PART), "key-pair"),
            )
        except BaseException:
            file.unlink()  # the public half is not there, or is another one's
            raise
    return name


def remove_key_pair(cloud: Cloud, name: str) -> None:
    """Remove the public half of a workspace's key; none is fine.

    Raises:
        UnavailableError: The cloud refused.
    """
    ec2 = cloud.client("ec2")
    with explain_aws_errors("remove the workspace's key pair"):
        for key_pair_row in ec2.describe_key_pairs(Filters=filters(KEY_PART, name))["KeyPairs"]:
            ec2.delete_key_pair(KeyName=key_pair_row["KeyName"])


def remove_key_file(cloud: Cloud, name: str) -> None:
    """Remove the private half, where it is on this computer."""
    key_file(cloud, name).unlink(missing_ok=True)
