"""Workspaces as the cloud knows them: finds them by their tags, stops, starts and removes them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds import tags
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import GPUS_TAG, OWNER_TAG, SIMULATED, WORKSPACE_TAG
from gpukiln.errors import BusyError, RefusedError, UnavailableError
from gpukiln.instances.tags import ENDED_STATES, tag_list, tags_of
from gpukiln.workspaces import iam, network, volumes
from gpukiln.workspaces.contract import (
    VARIABLES,
    Outputs,
    Provenance,
    VolumeMount,
    Workspace,
    filters,
    lasting_variables,
)
from gpukiln.workspaces.volumes import Home

MACHINE = "machine"
# Ten minutes: EC2 takes minutes to stop a machine with much memory, and bare metal longer.
POLL_S, WAIT_S = 2.0, 600.0
STOPPED_STATES = ("stopping", "stopped")
STARTING, DONE, FAILED = "starts", "done", "failed"  # stages: before the agent reports its own, and its last


@dataclass(frozen=True)
class WorkspaceMachine:
    """The machine of a workspace.

    Args:
        state: EC2's: pending, running, stopping, stopped.
        address: Private; ssh_address: where SSH reaches it.
        launched_at: ISO 8601; of its last start. created_at: of its first one.
        stage: The last that its agent reported; empty: none yet.
        health: Result of the last deep check; empty: not checked.
        busy: What is in use there, as its agent reported; empty: nothing.
        user: Who works there; ssh_user: the image's own, who may become root.
        by_session_manager: Whether SSH goes through Systems Manager, because no address can connect to it.
        plan: The offer that was taken, in words.
        usd_hour: The price at launch; empty: not known.
        ended_at: ISO 8601, where it is stopped and EC2 says since when.
        asked: The options that it was started with, a hash of each; None: not known.
    """

    instance_id: str
    instance_type: str
    zone: str
    state: str
    address: str
    ssh_address: str
    image_id: str
    spot: bool
    launched_at: str
    created_at: str
    ended_at: str
    stage: str
    health: str
    busy: str
    driver: str
    user: str
    ssh_user: str
    by_session_manager: bool
    simulated: bool
    home_id: str
    plan: str
    usd_hour: str
    image_digest: str
    image_verdict: str
    asked: str | None = None

    @property
    def lacks_gpus(self) -> bool:
        """Whether it was asked for without GPUs, whatever its type has."""
        return any(entry.startswith(tags.NO_GPUS) for entry in (self.asked or "").split())


@dataclass(frozen=True)
class ExistingWorkspace:
    """A workspace, or what is left of one.

    Args:
        machines: One as a rule; empty: it has none now.
        homes: One as a rule.
        group_ids: Its security groups.
    """

    name: str
    owner: str
    region: str
    machines: tuple[WorkspaceMachine, ...]
    homes: tuple[Home, ...]
    group_ids: tuple[str, ...]

    @property
    def state(self) -> str:
        """One word: its machine's state, `home` where only that is kept, else `orphaned`."""
        if self.machines:
            return self.machines[0].state
        return "home" if self.homes else "orphaned"


def find_workspaces(cloud: Cloud, name: str = "") -> tuple[ExistingWorkspace, ...]:
    """The workspaces of a region, by name, from tags alone; one of a name where that is given."""
    ec2 = cloud.client("ec2")
    with explain_aws_errors("look for workspaces"):
        rows = calls.pages(ec2, "describe_instances", "Reservations", Filters=filters(MACHINE, name))
        instances = [instance for row in rows for instance in row["Instances"]]
        asked = filters(network.PART, name)
        groups = list(calls.pages(ec2, "describe_security_groups", "SecurityGroups", Filters=asked))
    # EC2 lists a terminated instance for about an hour; it is no machine of the workspace any more.
    alive = [instance for instance in instances if instance["State"]["Name"] not in ENDED_STATES]
    kept = volumes.homes(cloud, name)
    tagged = [tags_of(resource) for resource in (*alive, *groups)]
    owners = {
        resource_tags[WORKSPACE_TAG]: resource_tags.get(OWNER_TAG, "")
        for resource_tags in tagged
        if WORKSPACE_TAG in resource_tags
    }
    owners |= {home.name: home.owner for home in kept}
    return tuple(
        ExistingWorkspace(
            name=each,
            owner=owners[each],
            region=cloud.region,
            machines=tuple(
                _machine(cloud, instance)
                for instance in alive
                if tags_of(instance).get(WORKSPACE_TAG) == each
            ),
            homes=tuple(home for home in kept if home.name == each),
            group_ids=tuple(
                group["GroupId"] for group in groups if tags_of(group).get(WORKSPACE_TAG) == each
            ),
        )
        for each in sorted(owners)
    )


def stop(cloud: Cloud, existing: ExistingWorkspace, *, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Stop the machine; its disks and its home stay. False: it was stopped.

    Raises:
        RefusedError: It is a spot instance, which can't be stopped and started.
        UnavailableError: The cloud refused, or it does not end.
    """
    machine = only_machine(existing)
    if machine.state == "stopped":
        return False
    # EC2 stops only persistent spot requests; workspaces use one-time ones.
    if machine.spot:
        raise RefusedError(
            f"{machine.instance_id} is a one-time spot instance, which can't be stopped",
            hint=f"`invoke workspace.down {existing.name} --keep-home` ends it and keeps the home",
        )
    with explain_aws_errors("stop the workspace's machine"):
        cloud.client("ec2").stop_instances(InstanceIds=[machine.instance_id])
    # Waited for: a start while it is stopping is refused by EC2 (IncorrectInstanceState).
    wait_for(cloud, machine.instance_id, "stopped", sleep=sleep)
    return True


def start(cloud: Cloud, existing: ExistingWorkspace, *, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Start the machine again. False: it ran.

    Raises:
        UnavailableError: The cloud refused, or it does not start.
    """
    machine = only_machine(existing)
    if machine.state == "running":
        return False
    ec2 = cloud.client("ec2")
    with explain_aws_errors("start the workspace's machine"):
        # What its agent said of the boot before is no longer so.
        reset_tags = {tags.STAGE_TAG: STARTING, tags.BUSY_TAG: ""}
        ec2.create_tags(Resources=[machine.instance_id], Tags=tag_list(reset_tags))
        ec2.start_instances(InstanceIds=[machine.instance_id])
    wait_for(cloud, machine.instance_id, "running", sleep=sleep)
    return True


def remove_workspace(
    cloud: Cloud,
    workspace: Workspace,
    existing: ExistingWorkspace,
    *,
    keep_home: bool,
    force: bool = False,
    busy: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Remove a workspace: machine, group, role, and the home unless it is kept. Safe to repeat.

    Args:
        busy: What is in use there now; None: not known, so that the last report of the machine counts.

    Raises:
        RefusedError: Somebody works there, or it is another owner's.
        UnavailableError: The cloud refused; the same command completes it.
    """
    # The name says nothing about the owner: two people may choose the same one.
    if existing.owner != workspace.owner:
        raise RefusedError(
            f"{existing.name} is {existing.owner}'s", hint="ask its owner, or take --owner with care"
        )
    for machine in existing.machines:
        work = machine.busy if busy is None else busy
        # A stopped machine reports what was in use before it stopped.
        if work and machine.state not in STOPPED_STATES and not force:
            raise RefusedError(f"{existing.name} is in use: {work}", hint="--force removes it all the same")
    # Machines end first: EC2 refuses to delete a volume, a group or a role that one of them uses.
    ids = [machine.instance_id for machine in existing.machines]
    if ids:
        with explain_aws_errors("end the workspace's machine"):
            cloud.client("ec2").terminate_instances(InstanceIds=ids)
        for instance_id in ids:
            wait_for(cloud, instance_id, "terminated", sleep=sleep)
    iam.remove_profile(cloud, workspace)
    network.remove_key_pair(cloud, existing.name)
    if not keep_home:
        for home in volumes.homes(cloud, existing.name):
            volumes.remove(cloud, home)
    network.remove_key_file(
        cloud, existing.name
    )  # after the homes: without it this computer may not remove them
    network.remove_groups(
        cloud, existing.name, sleep=sleep
    )  # last: by it the next `up` knows the old machine


def wait_for(
    cloud: Cloud, instance_id: str, state: str, *, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """Wait until an instance is in a state; what EC2 says of it.

    Raises:
        UnavailableError: It is not in ten minutes, or has ended.
    """
    now = "unknown"

    def reached() -> dict[str, Any] | None:
        nonlocal now
        instance = calls.instance(cloud, instance_id)
        now = instance["State"]["Name"]
        # A launch that fails for want of an EBS volume or a KMS key ends this way, with the cause in
        # StateReason.
        if now in ENDED_STATES and state != "terminated":
            reason = instance.get("StateReason", {}).get("Message", "no reason given")
            raise UnavailableError(f"{instance_id} is {now}, wanted {state}: {reason}")
        return instance if now == state else None

    return calls.wait_until(
        reached,
        lambda: UnavailableError(
            f"{instance_id} is {now} after {WAIT_S:.0f} s, wanted {state}", hint="run it again"
        ),
        timeout_s=WAIT_S,
        pause_s=POLL_S,
        sleep=sleep,
    )


def only_machine(existing: ExistingWorkspace) -> WorkspaceMachine:
    """The machine of a workspace.

    Raises:
        UnavailableError: It has none.
        BusyError: It has more than one.
    """
    if not existing.machines:
        raise UnavailableError(
            f"{existing.name} has no machine now: {existing.state}",
            hint=f"`invoke workspace.up --name {existing.name}` starts one"
            + (" with its home" * bool(existing.homes)),
        )
    if len(existing.machines) > 1:
        ids = ", ".join(machine.instance_id for machine in existing.machines)
        raise BusyError(
            f"{existing.name} has {len(existing.machines)} machines: {ids}", hint="end one of them by hand"
        )
    return existing.machines[0]


def outputs(cloud: Cloud, existing: ExistingWorkspace) -> Outputs:
    """The outputs of a workspace with a machine.

    Raises:
        UnavailableError: It has no machine.
    """
    machine = only_machine(existing)
    type_ = instance_types().get(machine.instance_type)
    # An instance of the embedded cloud has the GPUs of its type only when they are simulated.
    has_gpus = type_ is not None and (cloud.has_gpus or machine.simulated)
    return Outputs(
        agent_endpoint=machine.address,
        runtime_env=environment(existing),
        volume_mounts=tuple(
            VolumeMount(home.volume_id, f"/home/{machine.user}", home.size_gib, persistent=True)
            for home in existing.homes
            if home.instance_id == machine.instance_id
        ),
        metadata=Provenance(
            image_id=machine.image_id,
            image_digest=machine.image_digest,
            verdict=machine.image_verdict,
            plan=machine.plan,
            usd_hour=machine.usd_hour or None,
            launched_at=machine.created_at,
        ),
        instance_id=machine.instance_id,
        instance_type=machine.instance_type,
        gpu_type=gpu(type_.gpu).name if type_ and has_gpus else "",
        gpu_count=type_.gpus if type_ and has_gpus else 0,
        zone=machine.zone,
        driver_version=machine.driver,
        health=machine.health or "unknown: not checked",
    )


def environment(existing: ExistingWorkspace) -> dict[str, str]:
    """Variables by which programs find a workspace and its machine."""
    machine = only_machine(existing)
    machine_variables = {VARIABLES["instance"]: machine.instance_id, VARIABLES["host"]: machine.ssh_address}
    return {
        **lasting_variables(existing.name, existing.owner, existing.region, machine.user),
        **machine_variables,
    }


def _machine(cloud: Cloud, instance: dict[str, Any]) -> WorkspaceMachine:
    machine_tags = tags_of(instance)
    # EC2's launch time is of the last start; the root volume has been attached since the first one
    attached = [
        mapping["Ebs"]["AttachTime"]
        for mapping in instance.get("BlockDeviceMappings", ())
        if "Ebs" in mapping
    ]
    running = instance["State"]["Name"] == "running"
    return WorkspaceMachine(
        instance_id=instance["InstanceId"],
        instance_type=instance["InstanceType"],
        zone=instance["Placement"]["AvailabilityZone"],
        state=instance["State"]["Name"],
        address=instance.get("PrivateIpAddress", ""),
        ssh_address=cloud.address(instance) if running else "",
        image_id=instance["ImageId"],
        spot=instance.get("InstanceLifecycle") == "spot",
        launched_at=instance["LaunchTime"].isoformat(timespec="seconds"),
        created_at=min([instance["LaunchTime"], *attached]).isoformat(timespec="seconds"),
        ended_at=_since(instance.get("StateTransitionReason", "")),
        stage=machine_tags.get(tags.STAGE_TAG, ""),
        health=machine_tags.get(tags.HEALTH_TAG, ""),
        busy=machine_tags.get(tags.BUSY_TAG, ""),
        driver=machine_tags.get(tags.DRIVER_TAG, ""),
        user=machine_tags.get(tags.USER_TAG, ""),
        ssh_user=machine_tags.get(tags.SSH_USER_TAG, ""),
        by_session_manager=machine_tags.get(tags.REACH_TAG) == tags.BY_SESSION_MANAGER,
        simulated=machine_tags.get(GPUS_TAG) == SIMULATED,
        home_id=machine_tags.get(tags.HOME_TAG, ""),
        plan=machine_tags.get(tags.PLAN_TAG, ""),
        usd_hour=machine_tags.get(tags.PRICE_TAG, ""),
        image_digest=machine_tags.get(tags.IMAGE_DIGEST_TAG, ""),
        image_verdict=machine_tags.get(tags.IMAGE_VERDICT_TAG, ""),
        asked=machine_tags.get(tags.OPTIONS_TAG),
    )


def _since(reason: str) -> str:
    """The time of a stop, ISO 8601, from EC2's text `User initiated (2026-11-23 10:00:00 GMT)`.

    >>> _since("User initiated (2026-11-23 10:00:00 GMT)")
    '2026-11-23T10:00:00+00:00'
    >>> _since("")
    ''
    """
    time_match = re.search(r"\((\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d) (?:GMT|UTC)\)", reason)
    return f"{time_match[1]}T{time_match[2]}+00:00" if time_match else ""
