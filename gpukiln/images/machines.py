"""Machines and the resources around them that a build starts on a cloud, and their removal by tag."""

import os
import pwd
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.images.builds import BUILD_TAG
from gpukiln.images.deadline import DEADLINE_TAG, deadline_of, deadline_text, shutdown_user_data
from gpukiln.images.launch import Launched, launch, lost
from gpukiln.images.rehearsal import node_config
from gpukiln.verify.target import Target

GONE = ("terminated", "shutting-down")
POLL_S = 1.0
KEY_SUFFIX = ".key"
OWNER_TAG = "gpukiln:owner"
PURPOSE_TAG = "gpukiln:purpose"


def tag_list(tags: dict[str, str]) -> list[dict[str, str]]:
    """Tags in EC2's form.

    Args:
        tags: Names and values.
    """
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_specifications(tags: dict[str, str], *resources: str) -> list[dict[str, Any]]:
    """The same tags for several kinds of resources.

    Args:
        tags: Names and values.
        resources: For example `instance`, `volume`.
    """
    return [{"ResourceType": resource, "Tags": tag_list(tags)} for resource in resources]


def tags_of(resource: Mapping[str, Any]) -> dict[str, str]:
    """The tags of an image or a snapshot.

    Args:
        resource: As EC2 describes it.
    """
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


def snapshots_of(image: Mapping[str, Any]) -> list[str]:
    """The snapshots that an image points at.

    Args:
        image: As DescribeImages gives it.
    """
    devices = [device.get("Ebs", {}) for device in image.get("BlockDeviceMappings", ())]
    return [device["SnapshotId"] for device in devices if device.get("SnapshotId")]


def remove_image(cloud: Cloud, image_id: str) -> None:
    """Remove an AMI with its snapshots; one that is gone already is none.

    Args:
        cloud: Where it is.
        image_id: The AMI.

    Raises:
        UnavailableError: The cloud refused.
    """
    with explain_aws_errors(f"remove {image_id}"):
        ec2 = cloud.client("ec2")
        found = ec2.describe_images(Filters=[{"Name": "image-id", "Values": [image_id]}])["Images"]
        for image in found:
            ec2.deregister_image(ImageId=image_id)
            for snapshot in snapshots_of(image):
                ec2.delete_snapshot(SnapshotId=snapshot)


@dataclass(frozen=True)
class SshAccess:
    """What lets this build, and nobody else, log in on its machine, and until when there is one."""

    key_name: str
    private_key: Path
    group_id: str
    deadline: datetime


@contextmanager
def ssh_access(cloud: Cloud, build_id: str, *, purpose: str, folder: Path) -> Iterator[SshAccess]:
    """A key pair and a security group of a build; at the end everything of the build but its image is gone.

    Args:
        cloud: Where.
        build_id: On everything that is made, as a tag.
        purpose: bake or verify.
        folder: Where the private key lies meanwhile.

    Yields:
        Both.

    Raises:
        UnavailableError: The cloud refused.
    """
    deadline = deadline_of(purpose)
    tags = build_tags(build_id, purpose, deadline)
    name = f"gpukiln-{purpose}-{build_id}"
    private_key = folder / f"{purpose}{KEY_SUFFIX}"
    try:
        with explain_aws_errors(f"prepare to {purpose}"):
            ec2 = cloud.client("ec2")
            key = ec2.create_key_pair(
                KeyName=name, KeyType="ed25519", TagSpecifications=tag_specifications(tags, "key-pair")
            )
            private_key.touch(mode=0o600)
            private_key.write_text(key["KeyMaterial"])
            group = ec2.create_security_group(
                GroupName=name,
                Description=f"SSH to the machine of a gpukiln {purpose}",
                VpcId=_vpc(ec2, cloud.subnet_id),
                TagSpecifications=tag_specifications(tags, "security-group"),
            )["GroupId"]
            ec2.authorize_security_group_ingress(
                GroupId=group,
                IpPermissions=[
                    {
                        **{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22},
                        "IpRanges": [{"CidrIp": cloud.ssh_cidr}],
                    }
                ],
            )
        yield SshAccess(name, private_key, group, deadline)
    except BaseException as error:
        if datetime.now(UTC) >= deadline:
            error.add_note(
                f"its machine's deadline, {deadline_text(deadline)}, has passed: it shut itself down"
            )
        try:
            sweep(cloud, build_id)
        except GpukilnError as left:  # the first error is the one to tell; the next build tries again
            error.add_note(f"{left.message}; the next build or verification removes what is left")
        raise
    else:
        sweep(cloud, build_id)
    finally:
        private_key.unlink(missing_ok=True)


@contextmanager
def machine_from_image(
    cloud: Cloud,
    image_id: str,
    *,
    build_id: str,
    instance_types: Sequence[str],
    user: str,
    folder: Path,
    say: Callable[[str], None],
    spot: bool = False,
    rehearse_node: bool = False,
    timeout_s: float = 900,
) -> Iterator[tuple[Target, Launched]]:
    """A new machine booted from an image with its own kernel, reachable by SSH, gone at the end.

    Args:
        cloud: Where.
        image_id: The AMI.
        build_id: On everything that is made, as a tag.
        instance_types: The types to try, the best first.
        user: Who logs in.
        folder: Where the private key lies while the machine lives.
        say: Told what is being waited for.
        spot: Whether it may be a spot instance.
        rehearse_node: Whether nodeadm gets a NodeConfig, of a cluster that there is not.
        timeout_s: Seconds until SSH must answer.

    Yields:
        How to reach the machine, and what it is.

    Raises:
        BusyError: There is no capacity for any of the types now, or EC2 took the machine away.
        IncompatibleError: The account's quota is too low, or the region has none of the types.
        UnavailableError: The cloud refused, or the machine did not come up; the console's end is shown.
    """
    with ssh_access(cloud, build_id, purpose="verify", folder=folder) as access:
        # `gpukiln:machine`: the embedded cloud boots its own kernel, not the fast container
        tags = {**build_tags(build_id, "verify", access.deadline), "gpukiln:machine": "vm"}
        launched = launch(
            cloud,
            {
                "ImageId": image_id,
                "KeyName": access.key_name,
                "SecurityGroupIds": [access.group_id],
                "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
                "InstanceInitiatedShutdownBehavior": "terminate",
                "UserData": shutdown_user_data(access.deadline, *([node_config()] if rehearse_node else [])),
                "TagSpecifications": tag_specifications(tags, "instance", "volume"),
            },
            instance_types=instance_types,
            spot=spot,
            say=say,
        )
        target = _wait_until_reachable(
            cloud, launched.instance_id, user=user, key=access.private_key, say=say, timeout_s=timeout_s
        )
        yield target, launched


def build_tags(build_id: str, purpose: str, deadline: datetime) -> dict[str, str]:
    """Tags of what exists only while a build runs.

    Args:
        build_id: The build.
        purpose: bake or verify.
        deadline: When it must be gone.
    """
    return {
        BUILD_TAG: build_id,
        "Name": f"gpukiln {purpose} {build_id}",
        PURPOSE_TAG: purpose,
        DEADLINE_TAG: deadline_text(deadline),
        OWNER_TAG: _owner(),
    }


def _owner() -> str:
    """Who to ask about a machine, and where its build ran."""
    try:
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"


def _vpc(ec2: Any, subnet_id: str | None) -> str:
    if subnet_id:
        return str(ec2.describe_subnets(SubnetIds=[subnet_id])["Subnets"][0]["VpcId"])
    vpcs = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    if not vpcs:
        raise UnavailableError(
            "the region has no default VPC to start a machine in",
            hint="name a subnet with --subnet-id, or make one: aws ec2 create-default-vpc",
        )
    return str(vpcs[0]["VpcId"])


def _wait_until_reachable(
    cloud: Cloud, instance_id: str, *, user: str, key: Path, say: Callable[[str], None], timeout_s: float
) -> Target:
    started, said = time.monotonic(), 0.0
    while True:
        instance = _describe(cloud, instance_id)
        state = instance["State"]["Name"]
        waited = time.monotonic() - started
        if state in (*GONE, "stopped", "stopping"):
            if error := lost(instance):
                raise error
            reason = instance.get("StateReason", {}).get("Message", "no reason given")
            raise UnavailableError(f"{instance_id} is {state} instead of running: {reason}")
        if state == "running" and _speaks_ssh(cloud.address(instance), cloud.ssh_port):
            return Target(
                host=cloud.address(instance),
                port=cloud.ssh_port,
                user=user,
                private_key=key,
                name=instance_id,
            )
        if waited > timeout_s:
            with explain_aws_errors("read the machine's console"):
                answer = cloud.client("ec2").get_console_output(InstanceId=instance_id)
            console = str(answer.get("Output", ""))
            raise UnavailableError(
                f"{instance_id} is {state}, but SSH does not answer after {timeout_s:.0f} s",
                hint="the end of its console is above",
                details=tuple(console.splitlines()[-15:]),
            )
        if waited - said >= 10:
            said = waited
            say(f"{instance_id} is {state}, waiting for SSH")
        time.sleep(POLL_S)


def _describe(cloud: Cloud, instance_id: str) -> dict[str, Any]:
    """An instance; one that EC2 does not show yet is pending (it is consistent only after a while)."""
    with explain_aws_errors("ask for the machine's state"):
        found = cloud.client("ec2").describe_instances(
            Filters=[{"Name": "instance-id", "Values": [instance_id]}]
        )["Reservations"]
    pending: dict[str, Any] = {"State": {"Name": "pending"}}
    return found[0]["Instances"][0] if found else pending


def _speaks_ssh(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.settimeout(5)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def sweep(cloud: Cloud, build_id: str) -> list[str]:
    """Remove everything of a build but its image; what is gone already is no error.

    Args:
        cloud: Where.
        build_id: The build.

    Returns:
        What was removed.
    """
    mine = [{"Name": f"tag:{BUILD_TAG}", "Values": [build_id]}]
    removed: list[str] = []
    with explain_aws_errors(f"remove what build {build_id} started"):
        ec2 = cloud.client("ec2")
        reservations = ec2.describe_instances(Filters=mine)["Reservations"]
        instances = [
            instance["InstanceId"]
            for reservation in reservations
            for instance in reservation["Instances"]
            if instance["State"]["Name"] != "terminated"
        ]
        if instances:
            ec2.terminate_instances(InstanceIds=instances)
            waiter = ec2.get_waiter("instance_terminated")
            waiter.wait(InstanceIds=instances, WaiterConfig={"Delay": 2, "MaxAttempts": 150})
            removed += instances
        for key in ec2.describe_key_pairs(Filters=mine)["KeyPairs"]:
            ec2.delete_key_pair(KeyName=key["KeyName"])
            removed.append(key["KeyName"])
        for group in ec2.describe_security_groups(Filters=mine)["SecurityGroups"]:
            ec2.delete_security_group(GroupId=group["GroupId"])
            removed.append(group["GroupId"])
    return removed


def builds_with_leftovers(cloud: Cloud) -> set[str]:
    """The builds of which a machine, a key pair or a security group exists.

    Args:
        cloud: Where to look.

    Returns:
        Build ids; those of running builds are among them.
    """
    tagged = [{"Name": "tag-key", "Values": [BUILD_TAG]}]
    with explain_aws_errors("look for what earlier builds left"):
        ec2 = cloud.client("ec2")
        found = [
            instance
            for reservation in ec2.describe_instances(Filters=tagged)["Reservations"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] != "terminated"
        ]
        found += ec2.describe_key_pairs(Filters=tagged)["KeyPairs"]
        found += ec2.describe_security_groups(Filters=tagged)["SecurityGroups"]
    return {tag["Value"] for one in found for tag in one.get("Tags", ()) if tag["Key"] == BUILD_TAG}
