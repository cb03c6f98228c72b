"""SSH access to the machines of a build, and the machines: created for the build, removed at its end."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import GPUS_TAG, MACHINE_TAG, SIMULATED
from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.instances.console import console_text, find_stop, require_booting, strip_control_characters
from gpukiln.instances.deadline import deadline_of, deadline_text, shutdown_user_data
from gpukiln.instances.launch import LaunchedMachine, capacity_loss, launch
from gpukiln.instances.orphans import sweep
from gpukiln.instances.rehearsal import node_config
from gpukiln.instances.tags import ENDED_STATES, PRIVILEGED, build_tags, tag_specifications
from gpukiln.state import state_home
from gpukiln.verify.target import SshTarget, new_machine_target

# DescribeInstances is cheap against the minutes of a boot, and a machine that is up is found at once.
POLL_S = 1.0
PAUSES_S = (2.0, 10.0)  # EC2 refuses to delete a security group for some seconds after its machine has ended
SAY_S = 10.0
AGAIN_S = 60.0  # after a longer wait for a machine to end there is no second attempt
KEYS = "keys"
ANY_ADDRESS = "0.0.0.0/0"


def keys_folder() -> Path:
    """Folder of private keys while their machines live: not the records' folder, which users upload."""
    return state_home() / KEYS


def key_files(build_id: str) -> list[Path]:
    """The private keys of a build that exist."""
    return sorted(keys_folder().glob(f"{build_id}.*"))


def _write_key(build_id: str, purpose: str, key: str) -> Path:
    folder = keys_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    file = folder / f"{build_id}.{purpose}"
    file.unlink(missing_ok=True)  # a killed command left it: the caller holds the build's lock
    # Created with mode 0600: a chmod after the write would leave the key readable for a moment.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(key)
    return file


def access_line(cloud: Cloud) -> str:
    """One sentence for the user: which network may connect to SSH of a build's machines.

    Raises:
        GpukilnError: It can't be detected: the user has to pass it.
    """
    if cloud.ssh_cidr == ANY_ADDRESS:
        return (
            "SSH of its machines is open to every address, as --ssh-cidr says; a login needs the build's key"
        )
    return f"SSH of its machines is open to {cloud.ssh_cidr}"


@dataclass(frozen=True)
class SshAccess:
    """Key pair and security group of a build, by which it alone can log in, and its machine's deadline."""

    key_name: str
    private_key: Path
    group_id: str
    deadline: datetime


@contextmanager
def ssh_access(
    cloud: Cloud, build_id: str, *, purpose: str, say: Callable[[str], None]
) -> Iterator[SshAccess]:
    """Create a key pair and a security group; at the end remove every resource of the build except its image.

    A resource that can't be removed is reported by `say`; it does not make the build a failure.

    Args:
        build_id: Tag of every resource.
        purpose: bake or verify.
        say: Gets a line about what could not be removed.

    Yields:
        Both.

    Raises:
        UnavailableError: A call failed.
    """
    cidr = cloud.ssh_cidr  # first: where it can't be detected, nothing is created
    deadline = deadline_of(purpose)
    tags = build_tags(build_id, purpose, deadline)
    name = f"gpukiln-{purpose}-{build_id}"
    try:
        with resources_removed(cloud, build_id, deadline, say=say):
            with explain_aws_errors(f"prepare to {purpose}"):
                ec2 = cloud.client("ec2")
                key = ec2.create_key_pair(
                    KeyName=name, KeyType="ed25519", TagSpecifications=tag_specifications(tags, "key-pair")
                )
                private_key = _write_key(build_id, purpose, key["KeyMaterial"])
                group = ec2.create_security_group(
                    GroupName=name,
                    Description=f"SSH to the machine of a gpukiln {purpose}",
                    VpcId=_vpc_of(ec2, cloud.subnet_id),
                    TagSpecifications=tag_specifications(tags, "security-group"),
                )["GroupId"]
                ec2.authorize_security_group_ingress(
                    GroupId=group,
                    IpPermissions=[
                        {
                            "IpProtocol": "tcp",
                            "FromPort": 22,
                            "ToPort": 22,
                            "IpRanges": [{"CidrIp": cidr}],
                        }
                    ],
                )
            yield SshAccess(name, private_key, group, deadline)
    finally:
        (keys_folder() / f"{build_id}.{purpose}").unlink(missing_ok=True)


@contextmanager
def resources_removed(
    cloud: Cloud, build_id: str, deadline: datetime, *, say: Callable[[str], None]
) -> Iterator[None]:
    """Remove every resource of a build except its image at the end, whatever happened meanwhile.

    Args:
        deadline: Of its machine.
        say: Gets a line about what could not be removed.
    """
    try:
        yield
    except BaseException as error:
        if datetime.now(UTC) >= deadline:
            error.add_note(f"the machine shut itself down at its deadline, {deadline_text(deadline)}")
        if left := _remove_resources(cloud, build_id):  # the first error is the one to raise
            error.add_note(left)
        raise
    else:
        if left := _remove_resources(cloud, build_id):  # the build has succeeded
            say(left)


def _remove_resources(cloud: Cloud, build_id: str) -> str:
    """Remove a build's resources, in up to three attempts; returns a sentence about those left, or ""."""
    started, pauses = time.monotonic(), list(PAUSES_S)
    while True:
        try:
            sweep(cloud, build_id)
        except GpukilnError as error:
            if pauses and time.monotonic() - started < AGAIN_S:
                time.sleep(pauses.pop(0))
                continue
            return (
                f"{error.message}; the next build or verification here, or `invoke cloud.sweep`, removes it"
            )
        return ""


@contextmanager
def machine_from_image(
    cloud: Cloud,
    image_id: str,
    *,
    build_id: str,
    instance_types: Sequence[str],
    user: str,
    say: Callable[[str], None],
    spot: bool = False,
    simulated: bool = False,
    rehearse_node: bool = False,
    timeout_s: float = 900,
) -> Iterator[tuple[SshTarget, LaunchedMachine]]:
    """Start a machine from an image with the image's own kernel, wait for SSH, and remove it at the end.

    Args:
        image_id: The AMI.
        build_id: Tag of every resource.
        instance_types: The types to try, the preferred one first.
        user: User of the login.
        say: Gets a line about each wait, and about what could not be removed at the end.
        spot: Whether to start a spot instance.
        simulated: Whether the machine gets simulated GPUs; only the embedded cloud has them.
        rehearse_node: Whether nodeadm gets a NodeConfig of a cluster that does not exist.
        timeout_s: Seconds until SSH has to answer.

    Yields:
        The SSH target, and the machine.

    Raises:
        BusyError: No zone has capacity for any of the types now, or EC2 took the machine away.
        IncompatibleError: The account's quota is too low, or the region has none of the types.
        UnavailableError: A call failed, or SSH did not answer; the details are the end of the console.
    """
    with ssh_access(cloud, build_id, purpose="verify", say=say) as access:
        # The suite verifies the image's kernel; a container of the embedded cloud runs this computer's.
        tags = {**build_tags(build_id, "verify", access.deadline), MACHINE_TAG: "vm"}
        if simulated:
            tags[GPUS_TAG] = SIMULATED
        user_data = shutdown_user_data(access.deadline, *([node_config()] if rehearse_node else []))
        launched = launch(
            cloud,
            _launch_request(access, image_id, tags, user_data),
            instance_types=instance_types,
            spot=spot,
            say=say,
        )
        target = _wait_until_reachable(
            cloud, launched.instance_id, user=user, key=access.private_key, say=say, timeout_s=timeout_s
        )
        try:
            yield target, launched
        except UnavailableError as error:
            if stopped := find_stop(cloud, launched.instance_id):
                lines = "".join(f"\n  {line}" for line in stopped.lines)
                error.add_note(f"the console of {launched.instance_id} shows {stopped.state}:{lines}")
            raise


def machine_to_bake(
    cloud: Cloud,
    access: SshAccess,
    image_id: str,
    *,
    build_id: str,
    instance_type: str,
    user: str,
    root_volume: dict[str, Any],
    say: Callable[[str], None],
    timeout_s: float = 600,
) -> SshTarget:
    """Start a machine to configure and capture, and wait for SSH; the end of `ssh_access` removes it.

    Args:
        access: Of the build, for the purpose bake.
        image_id: The base image, or a stage.
        build_id: Tag of the machine and its volume.
        user: User of the login.
        root_volume: An element of BlockDeviceMappings of RunInstances.
        say: Gets a line about each wait.
        timeout_s: Seconds until SSH has to answer.

    Returns:
        The SSH target; its name is the instance's id.

    Raises:
        BusyError: No zone has capacity for the type now.
        IncompatibleError: The account's quota is too low, or the region does not have the type.
        UnavailableError: A call failed, or SSH did not answer; the details are the end of the console.
    """
    tags = {**build_tags(build_id, "bake", access.deadline), **PRIVILEGED}
    launched = launch(
        cloud,
        {
            **_launch_request(access, image_id, tags, shutdown_user_data(access.deadline)),
            "BlockDeviceMappings": [root_volume],
        },
        instance_types=[instance_type],
        spot=False,
        say=say,
        named_by="builder_instance_type in the image's image.yaml",
    )
    return _wait_until_reachable(
        cloud, launched.instance_id, user=user, key=access.private_key, say=say, timeout_s=timeout_s
    )


def _launch_request(access: SshAccess, image_id: str, tags: dict[str, str], user_data: str) -> dict[str, Any]:
    """Arguments of RunInstances, without type, subnet and market."""
    return {
        "KeyName": access.key_name,
        "SecurityGroupIds": [access.group_id],
        **machine_request(image_id, tags, user_data),
    }


def machine_request(image_id: str, tags: dict[str, str], user_data: str) -> dict[str, Any]:
    """Arguments of RunInstances for a machine on which nobody logs in."""
    return {
        "ImageId": image_id,
        # IMDSv2 alone; two hops, so that a container on the machine reaches it (EC2 user guide,
        # "Configure the Instance Metadata Service options").
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        # The deadline powers the machine off, and that has to end its cost.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "UserData": user_data,
        "TagSpecifications": tag_specifications(tags, "instance", "volume"),
    }


def _vpc_of(ec2: Any, subnet_id: str | None) -> str:
    if subnet_id:
        return str(ec2.describe_subnets(SubnetIds=[subnet_id])["Subnets"][0]["VpcId"])
    vpcs = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    if not vpcs:
        raise UnavailableError(
            "the region has no default VPC",
            hint="pass a subnet with --subnet-id, or create the default VPC: aws ec2 create-default-vpc",
        )
    return str(vpcs[0]["VpcId"])


def _wait_until_reachable(
    cloud: Cloud, instance_id: str, *, user: str, key: Path, say: Callable[[str], None], timeout_s: float
) -> SshTarget:
    began, said, state = time.monotonic(), 0.0, ""

    def reached() -> SshTarget | None:
        nonlocal state
        instance = calls.instance(cloud, instance_id)
        state = instance["State"]["Name"]
        # A machine that shut itself down (cloud-init, deadline) would be waited for until the timeout.
        if state in (*ENDED_STATES, "stopped", "stopping"):
            if error := capacity_loss(instance):
                raise error
            reason = instance.get("StateReason", {}).get("Message", "no reason given")
            raise UnavailableError(f"{instance_id} is {state} instead of running: {reason}")
        if state == "running" and _speaks_ssh(cloud.address(instance), cloud.ssh_port):
            return new_machine_target(
                instance_id, cloud.address(instance), port=cloud.ssh_port, user=user, private_key=key
            )
        return None

    def late() -> UnavailableError:
        return UnavailableError(
            f"{instance_id} is {state}, but SSH does not answer after {timeout_s:.0f} s",
            hint="the end of its console is above",
            details=tuple(strip_control_characters(console_text(cloud, instance_id)).splitlines()[-15:]),
        )

    def pause(seconds: float) -> None:
        nonlocal said
        # The console is read only every SAY_S: it is a call of 64 KiB.
        if (waited := time.monotonic() - began) - said >= SAY_S:
            said = waited
            require_booting(cloud, instance_id)
            say(f"{instance_id} is {state}, waiting for SSH")
        time.sleep(seconds)

    return calls.wait_until(reached, late, timeout_s=timeout_s, pause_s=POLL_S, sleep=pause)


def _speaks_ssh(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.settimeout(5)
            # The banner, not the open port: a port forward accepts connections before sshd
            # runs (RFC 4253, 4.2, "Protocol Version Exchange").
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
