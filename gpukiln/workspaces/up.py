"""Starts a workspace whole: network, rights, key, machine and home; or leaves nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds import tags
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import GPUS_TAG, SIMULATED
from gpukiln.errors import BusyError, CheckFailedError, GpukilnError, RefusedError, UnavailableError
from gpukiln.instances.console import require_booting
from gpukiln.instances.launch import Launched
from gpukiln.instances.tags import tag_list, tags_of
from gpukiln.locks import locked
from gpukiln.state import state_home
from gpukiln.units import Memory
from gpukiln.workspaces import keys, lifecycle, network, rights, userdata, volumes
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.differs import marks
from gpukiln.workspaces.launch import launch
from gpukiln.workspaces.lifecycle import Found, Machine
from gpukiln.workspaces.plan import Plan
from gpukiln.workspaces.request import HOME_DEVICE, machine_request
from gpukiln.workspaces.volumes import Home

LOCK_WAIT_S = 1800.0  # another `up` of the same workspace
PROFILE_WAIT_S, POLL_S = 90.0, 3.0  # IAM shows what is new only after a while
CONSOLE_POLLS = 4  # until the agent has written its first stage
BOOT_WAIT_S = 3600.0  # with its driver's deadline, its services' images and the user's script
DONE, FAILED = "done", "failed"


@dataclass(frozen=True)
class Extras:
    """What a workspace's machine is told beside the contract.

    Args:
        compose: Its services, as a Compose file; empty: none.
        roles_url: Where a foreign image has the roles from; roles_commit: which.
        simulated: Whether the embedded cloud gives it simulated GPUs.
        roles: Both, as they were typed.
    """

    compose: str = ""
    roles_url: str = ""
    roles_commit: str = ""
    simulated: bool = False
    roles: str = ""


@contextmanager
def alone(cloud: Cloud, name: str) -> Iterator[None]:
    """Work on a workspace while no other command on this computer does; it is waited for."""
    folder = state_home() / "workspaces" / "locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    busy = BusyError(f"another command works on {name}", hint="wait for it, or end it")
    with locked(folder / f"{cloud.name}-{cloud.region}-{name}", busy=busy, wait_s=LOCK_WAIT_S):
        yield


def resume(
    cloud: Cloud,
    wanted: Workspace,
    found: Found,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Complete a workspace that has its machine already. The caller holds it alone, see `alone`.

    Raises:
        BusyError: It has two machines, or another machine has the home.
        RefusedError: It is stopped.
        UnavailableError: The cloud refused.
    """
    machine = lifecycle.only(found)
    if machine.state in ("stopped", "stopping"):
        raise RefusedError(
            f"{found.name} is {machine.state}: {machine.instance_id}",
            hint=f"`invoke workspace.start {found.name}` starts it again",
        )
    say(f"{found.name} has a machine already: {machine.instance_id}, {machine.instance_type}")
    lifecycle.wait_for(cloud, machine.instance_id, "running", sleep=sleep)
    for group_id in found.group_ids:
        _remember(cloud, machine.instance_id, group_id)
    if not wanted.capabilities.persistent_home:
        return
    if not machine.home_id:
        _give_home(cloud, wanted, machine.instance_id, machine.zone, sleep=sleep)
    for home in found.homes:
        if _grown(cloud, wanted, home):
            say("its home grows: its file system does when the machine starts next")


def there(cloud: Cloud, wanted: Workspace) -> Found | None:
    """The workspace, or what is left of one, in the cloud's region.

    Raises:
        RefusedError: It is another owner's.
    """
    found = next(iter(lifecycle.find(cloud, wanted.workspace_name)), None)
    if found and found.owner != wanted.owner:
        raise RefusedError(
            f"{found.name} in {found.region} is {found.owner}'s, wanted {wanted.owner}'s",
            hint="another name, or ask its owner",
        )
    return found


def wait_until_done(
    cloud: Cloud,
    wanted: Workspace,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    timeout_s: float = BOOT_WAIT_S,
) -> Machine:
    """Wait until the machine's agent has done its stages.

    Raises:
        CheckFailedError: A stage failed; the machine stays, to be looked at.
        UnavailableError: It was not done in time, or the machine has ended or can't boot.
    """
    told, looks, name = "", 0, wanted.workspace_name

    def done() -> Machine | None:
        nonlocal told, looks
        found, looks = there(cloud, wanted), looks + 1
        if found is None or not found.machines:
            raise UnavailableError(f"the machine of {name} has ended", hint="run the same command again")
        machine = lifecycle.only(found)
        if machine.stage in ("", lifecycle.STARTS) and not looks % CONSOLE_POLLS:
            require_booting(cloud, machine.instance_id)
        if machine.stage != told:
            told = machine.stage
            say(f"{machine.instance_id}: {told}")
        word = told.partition(" ")[0]
        if word == DONE:
            return machine
        if word == FAILED:
            raise CheckFailedError(
                f"{name} does not come up: {told}",
                hint=f"`invoke workspace.ssh {name}` to look (/var/lib/gpukiln/workspace/status.json), "
                f"`invoke workspace.down {name} --keep-home` to put it away",
            )
        return None

    return calls.wait_until(
        done,
        lambda: UnavailableError(
            f"{name} is not done after {timeout_s:.0f} s: {told or 'its agent has said nothing'}",
            hint=f"`invoke workspace.show {name}` says how it goes on",
        ),
        timeout_s=timeout_s,
        pause_s=POLL_S,
        sleep=sleep,
    )


def start(
    cloud: Cloud,
    plan: Plan,
    extras: Extras,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Start a workspace that has no machine; its home is attached, its agent may still be at work then.

    The caller holds it alone, see `alone`. Where something fails, nothing is left but a home that was there.

    Raises:
        BusyError: Nobody has capacity now, or another machine has the home.
        IncompatibleError: No zone can have such a machine, or the account's quota is too low.
        RefusedError: The home is another owner's.
        UnavailableError: The cloud refused.
    """
    wanted = plan.wanted
    keeps = wanted.capabilities.persistent_home
    home = volumes.existing(cloud, wanted) if keeps else None
    if home:
        _grown(cloud, wanted, home)
    wanted, vpc_id = _placed(cloud, wanted)
    with _whole(cloud, wanted, made_home=keeps and home is None, sleep=sleep):
        group_id = network.security_group(cloud, wanted, vpc_id)
        request = machine_request(
            wanted,
            image=plan.image,
            user_data=userdata.render(
                wanted,
                own_image=plan.subject is not None,
                gpus=plan.gpus,
                home=keeps,
                compose=extras.compose,
                roles_url=extras.roles_url,
                roles_commit=extras.roles_commit,
                endpoint=cloud.machine_endpoint,
            ),
            group_id=group_id,
            profile=rights.instance_profile(cloud, wanted),
            key_name=keys.key_pair(cloud, wanted),
            tags=_told(cloud, plan, extras),
        )
        launched = _launch(cloud, plan, wanted, request, group_id, home, say=say, sleep=sleep)
        lifecycle.wait_for(cloud, launched.instance_id, "running", sleep=sleep)
        _remember(cloud, launched.instance_id, group_id)
        if keeps:
            _give_home(cloud, wanted, launched.instance_id, launched.zone, sleep=sleep)


def _placed(cloud: Cloud, wanted: Workspace) -> tuple[Workspace, str]:
    """The workspace with its subnets, and their VPC."""
    ec2 = cloud.client("ec2")
    with explain_aws_errors("look up the network"):
        if wanted.subnet_ids:
            found = ec2.describe_subnets(SubnetIds=list(wanted.subnet_ids))["Subnets"]
        elif wanted.vpc_id:
            filters = [{"Name": "vpc-id", "Values": [wanted.vpc_id]}]
            found = ec2.describe_subnets(Filters=filters)["Subnets"]
        else:
            found = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
    vpcs = {one["VpcId"] for one in found}
    if not vpcs:
        what = wanted.vpc_id or "a default VPC"
        raise UnavailableError(f"{cloud.region} has no subnet of {what}", hint="name --subnet-ids")
    if len(vpcs) > 1 or (wanted.vpc_id and vpcs != {wanted.vpc_id}):
        raise RefusedError(
            f"the subnets are of {', '.join(sorted(vpcs))}, wanted one VPC"
            + (f", {wanted.vpc_id}" if wanted.vpc_id else ""),
            hint="name subnets of one VPC, one a zone",
        )
    named = wanted.subnet_ids or (tuple(one["SubnetId"] for one in found) if wanted.vpc_id else ())
    return replace(wanted, subnet_ids=named), vpcs.pop()


def _told(cloud: Cloud, plan: Plan, extras: Extras) -> dict[str, str]:
    """Tags of the machine that are the same whichever offer it is of: they are part of what is asked for."""
    direct = bool(plan.wanted.ssh_from) or not cloud.has_session_manager
    return {
        tags.USER_TAG: userdata.user_of(plan.wanted.owner),
        tags.SSH_USER_TAG: plan.subject.ssh_user if plan.subject else "ubuntu",  # AWS's DLAMIs are Ubuntu's
        tags.REACH_TAG: "ssh" if direct else tags.BY_SESSION_MANAGER,
        tags.IMAGE_DIGEST_TAG: plan.digest,
        tags.IMAGE_VERDICT_TAG: plan.verdict,
        tags.ASKED_TAG: marks(plan.wanted, extras.roles),
        **({GPUS_TAG: SIMULATED} if extras.simulated else {}),
    }


def _launch(
    cloud: Cloud,
    plan: Plan,
    wanted: Workspace,
    request: dict[str, Any],
    group_id: str,
    home: Home | None,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> Launched:
    """As `launch`; an instance profile that EC2 does not know yet is waited for."""
    with explain_aws_errors("look at the security group"):
        [group] = cloud.client("ec2").describe_security_groups(GroupIds=[group_id])["SecurityGroups"]
    tagged = tags_of(group)
    last = tagged.get(tags.LAST_MACHINE_TAG) or tagged.get(tags.OLD_LAST_MACHINE_TAG, "")
    refused = UnavailableError("")

    def launched() -> Launched | None:
        nonlocal refused
        try:
            return launch(
                cloud, wanted, plan.offers, request, group_id=group_id, last=last, home=home, say=say
            )
        except UnavailableError as error:
            if "iamInstanceProfile" not in error.message:
                raise
            refused = error
            return None

    return calls.wait_until(launched, lambda: refused, timeout_s=PROFILE_WAIT_S, pause_s=POLL_S, sleep=sleep)


def _remember(cloud: Cloud, instance_id: str, group_id: str) -> None:
    """Write down which machine the group has: the token of its next one is made of it."""
    with explain_aws_errors("tag the workspace's security group"):
        cloud.client("ec2").create_tags(
            Resources=[group_id], Tags=tag_list({tags.LAST_MACHINE_TAG: instance_id})
        )


def _give_home(
    cloud: Cloud, wanted: Workspace, instance_id: str, zone: str, *, sleep: Callable[[float], None]
) -> None:
    """The home on its machine; what is done already, here or by another computer, is not done again."""
    ec2 = cloud.client("ec2")

    def attached() -> Home | None:
        found = volumes.homes(cloud, wanted.workspace_name)
        return next((one for one in found if one.instance_id == instance_id), None)

    home = attached()
    if home is None:
        try:
            home = volumes.home(cloud, wanted, zone, instance_id, sleep=sleep)
            with explain_aws_errors("attach the home"):
                ec2.attach_volume(VolumeId=home.volume_id, InstanceId=instance_id, Device=HOME_DEVICE)
        except (BusyError, UnavailableError):
            if (home := attached()) is None:
                raise
    with explain_aws_errors("tell the machine its home"):
        ec2.create_tags(Resources=[instance_id], Tags=tag_list({tags.HOME_TAG: home.volume_id}))


def _grown(cloud: Cloud, wanted: Workspace, home: Home) -> bool:
    """Whether the home grows, because more was asked for; it never shrinks."""
    asked = wanted.compute_profile.storage
    return bool(asked) and volumes.grow(cloud, home, Memory.parse(asked or "", "storage").gib)


@contextmanager
def _whole(
    cloud: Cloud, wanted: Workspace, *, made_home: bool, sleep: Callable[[float], None]
) -> Iterator[None]:
    """All of it, or nothing: what was made goes again, and a home that was there stays."""
    try:
        yield
    except BaseException as error:
        name = wanted.workspace_name
        try:
            for found in lifecycle.find(cloud, name):
                lifecycle.down(cloud, wanted, found, keep_home=not made_home, force=True, sleep=sleep)
            rights.remove_profile(cloud, wanted)
            keys.remove_key_pair(cloud, name)
            keys.remove_key_file(cloud, name)
        except GpukilnError as left:
            error.add_note(f"something is left: {left.message}; `invoke workspace.down {name}` removes it")
        raise
