"""Provisions a workspace, as `workspace.up` does: plan, consent, launch, wait; on a failure it rolls back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any, TypeVar

from gpukiln.catalog.quotas import quota_of
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds import tags
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import (
    BusyError,
    CheckFailedError,
    GpukilnError,
    IncompatibleError,
    RefusedError,
    UnavailableError,
)
from gpukiln.instances.console import require_booting
from gpukiln.instances.launch import (
    CAPACITY,
    LaunchCandidate,
    LaunchedMachine,
    LaunchRefusal,
    launch_in_order,
    subnets_by_zone,
    zones_of,
)
from gpukiln.instances.tags import PRIVILEGED, tag_list, tag_specifications, tags_of
from gpukiln.locks import locked
from gpukiln.offers.cost import OverBudgetError
from gpukiln.offers.model import Offer
from gpukiln.state import state_home
from gpukiln.workspaces import iam, lifecycle, local_state, network, reach, userdata, volumes
from gpukiln.workspaces.contract import Workspace, workspace_tags
from gpukiln.workspaces.lifecycle import DONE, FAILED, ExistingWorkspace, WorkspaceMachine
from gpukiln.workspaces.plan import WorkspacePlan, describe_offer, option_hashes, plan, require_same
from gpukiln.workspaces.spec import WorkspaceSpec, in_region
from gpukiln.workspaces.volumes import Home

HOME_DEVICE = "/dev/sdf"  # EC2 user guide, "Device names for volumes": /dev/sd[f-p] for what is attached
# Hop limit 2: containers reach instance metadata, too (EC2 user guide, "Use IMDSv2").
METADATA_OPTIONS = {
    "HttpEndpoint": "enabled",
    "HttpTokens": "required",
    "HttpPutResponseHopLimit": 2,
    "InstanceMetadataTags": "enabled",  # the agent reads there which volume is its home
}
LOCK_WAIT_S = 1800.0  # another `up` of the same workspace
# RunInstances answers InvalidParameterValue for an instance profile that EC2 does not see yet.
PROFILE_WAIT_S, POLL_S = 90.0, 3.0  # IAM shows what is new only after a while
CONSOLE_POLLS = 4  # until the agent has written its first stage
T = TypeVar("T")
# An hour: a service's image may have 10 GB and more, and ansible-pull on a foreign image compiles a driver.
BOOT_WAIT_S = 3600.0  # with its driver's deadline, its services' images and the user's script

Consent = Callable[[Cloud, WorkspacePlan], None]
"""Asked before money is spent: it returns, or raises RefusedError."""


def consent_to_all(_: Cloud, __: WorkspacePlan) -> None:
    """Consent to every plan."""


def today() -> date:
    """The day of prices and of support."""
    return datetime.now(UTC).date()


def provision_workspace(
    clouds: Sequence[Cloud],
    spec: WorkspaceSpec,
    say: Callable[[str], None],
    *,
    consent: Consent = consent_to_all,
    wait: bool = True,
    replace_unhealthy: bool = False,
) -> tuple[Cloud, ExistingWorkspace]:
    """A workspace in the first region that has a machine for it.

    Args:
        clouds: The same cloud in each region, the best first.
        consent: Asked in each region before a machine is started there.
        wait: Whether it is waited for until its stages are done.
        replace_unhealthy: Whether a machine that is unhealthy is removed, and the next offer is taken.

    Raises:
        BusyError: No region has capacity now; the details are the whole walk.
        IncompatibleError: No region can have it.
        CheckFailedError: It does not come up, or every machine was unhealthy.
    """

    def provision(cloud: Cloud, placed: WorkspaceSpec) -> ExistingWorkspace:
        return _in_region(cloud, placed, say, consent, wait=wait, replace_unhealthy=replace_unhealthy)

    return _first_region(clouds, spec, say, provision)


def preview_workspace(
    clouds: Sequence[Cloud], spec: WorkspaceSpec, say: Callable[[str], None]
) -> tuple[Cloud, WorkspacePlan | ExistingWorkspace]:
    """The plan of `provision_workspace` in the first region that has a machine for it, or what runs already.

    Nothing is made.

    Raises:
        IncompatibleError: No region can have it.
        RefusedError: See `provision_workspace`.
    """

    def ahead(cloud: Cloud, placed: WorkspaceSpec) -> WorkspacePlan | ExistingWorkspace:
        existing = find_existing(cloud, placed.contract)
        if existing and existing.machines:
            require_same(cloud, placed, existing)
            return existing
        return plan(cloud, placed, today(), homes=existing.homes if existing else (), say=say)

    return _first_region(clouds, spec, say, ahead)


def _first_region(
    clouds: Sequence[Cloud],
    spec: WorkspaceSpec,
    say: Callable[[str], None],
    work: Callable[[Cloud, WorkspaceSpec], T],
) -> tuple[Cloud, T]:
    """What the first region gives that has a machine for it; only the one that has the workspace already."""
    refusals: list[GpukilnError] = []
    # A workspace that exists in one region is completed there, not started a second time elsewhere.
    has_it = [cloud for cloud in clouds if find_existing(cloud, spec.contract)] if len(clouds) > 1 else []
    for cloud in has_it or clouds:
        try:
            return cloud, work(cloud, in_region(cloud, spec))
        except (BusyError, IncompatibleError, OverBudgetError) as error:
            if len(clouds) == 1:
                raise
            say(f"{cloud.region}: {error.message}")
            refusals.append(error)
    # The kindest reason decides the exit code: capacity may come back (75), a budget or a request can be
    # changed.
    kinds = (BusyError, OverBudgetError, IncompatibleError)
    kind = next(kind for kind in kinds if any(isinstance(refusal, kind) for refusal in refusals))
    raise kind(
        f"none of {', '.join(cloud.region for cloud in clouds)} has a machine for it",
        details=tuple(line for refusal in refusals for line in (refusal.message, *refusal.details)),
        hint="try later, ask for less, or name another region",
    )


def _in_region(
    cloud: Cloud,
    spec: WorkspaceSpec,
    say: Callable[[str], None],
    consent: Consent,
    *,
    wait: bool,
    replace_unhealthy: bool,
) -> ExistingWorkspace:
    contract = spec.contract
    with workspace_lock(cloud, contract.workspace_name):
        settled: WorkspacePlan | None = None
        existing = find_existing(cloud, contract)
        homes = existing.homes if existing else ()
        started = False
        try:
            if existing and existing.machines:
                require_same(cloud, spec, existing)
                resume(cloud, contract, existing, say=say)
            else:
                settled = plan(cloud, spec, today(), homes=homes, say=say)
                consent(cloud, settled)
                start(cloud, settled, say=say)
                started = True
            # Before the wait for its boot: `workspace.usage` counts the machine even if this command is
            # killed.
            local_state.refresh(cloud)  # it is there now, however its boot goes on
            while wait:
                try:
                    return _wait_until_healthy(cloud, contract, say, deep=replace_unhealthy)
                except CheckFailedError as error:
                    if not replace_unhealthy:
                        raise
                    rest = _remaining_plan(cloud, spec, settled, error, say)
                    # Replacing costs money too, and the user has agreed to nothing yet.
                    if settled is None:  # it ran already, so that the user has not consented yet
                        consent(cloud, rest)
                    _remove_unhealthy(cloud, contract, error, say, started=started)
                settled = rest
                start(cloud, settled, say=say)
                started = True
            return _require_machine(cloud, contract)
        except KeyboardInterrupt as interrupt:
            # Only what this call started: a machine that ran before may hold work of its user.
            mine = started and not spec.options.keep
            _clean_up_interrupted(cloud, contract, interrupt, mine=mine, keep_home=bool(homes))
            raise


def _clean_up_interrupted(
    cloud: Cloud, workspace: Workspace, interrupt: KeyboardInterrupt, *, mine: bool, keep_home: bool
) -> None:
    """Remove what this call started and is not usable yet; note what runs, its price, and the next commands.

    Args:
        mine: Whether the machine goes where it is not usable yet.
        keep_home: Whether the home was there before.
    """
    name = workspace.workspace_name
    try:
        for existing in lifecycle.find_workspaces(cloud, name):
            usable = any(machine.stage.startswith(DONE) for machine in existing.machines)
            if not existing.machines or usable or not mine:
                note_running_machines(cloud, existing, interrupt)
                continue
            lifecycle.remove_workspace(cloud, workspace, existing, keep_home=keep_home, force=True)
            ids = ", ".join(machine.instance_id for machine in existing.machines)
            interrupt.add_note(
                f"{ids} was not usable yet and is removed; the home stays"
                if keep_home
                else f"{ids} was not usable yet and is removed, and all that was made with it"
            )
        local_state.refresh(cloud)
    except (GpukilnError, KeyboardInterrupt) as error:
        what = error.message if isinstance(error, GpukilnError) else "interrupted again"
        interrupt.add_note(
            f"{name} may still run and cost money ({what}); `invoke workspace.down {name}` removes it"
        )


def note_running_machines(cloud: Cloud, existing: ExistingWorkspace, interrupt: KeyboardInterrupt) -> None:
    """Note what goes on running after Ctrl-C, what it costs, and the commands that go on or remove it."""
    place = f"--region {cloud.region} --cloud {cloud.name}"
    for machine in existing.machines:
        price = f"{machine.usd_hour} USD/hour" if machine.usd_hour else "at a price that is not known"
        interrupt.add_note(
            f"{existing.name} runs: {machine.instance_id}, {machine.instance_type} in {machine.zone}, "
            f"{price}, stage {machine.stage or 'none yet'}"
        )
        interrupt.add_note(
            f"`invoke workspace.up --name {existing.name} --owner {existing.owner} {place}` goes on, "
            f"`invoke workspace.down {existing.name} {place}` removes it"
        )


def _wait_until_healthy(
    cloud: Cloud, workspace: Workspace, say: Callable[[str], None], *, deep: bool
) -> ExistingWorkspace:
    """The workspace once its stages are done, and where that was asked for, once it was found healthy.

    Raises:
        CheckFailedError: A stage failed, or it is unhealthy.
    """
    if workspace.capabilities.identity_mode == "iam":
        wait_until_done(cloud, workspace, say=say)
    else:
        say(
            "the machine has no permission to report its boot (identity_mode none): "
            "`workspace.status --deep` checks it"
        )
    if deep:
        looked = reach.check_health(cloud, _require_machine(cloud, workspace))
        if not looked.is_healthy:
            raise CheckFailedError(
                f"{workspace.workspace_name} is {looked.words}", hint=f"the report is in {looked.folder}"
            )
    return _require_machine(cloud, workspace)


def _require_machine(cloud: Cloud, workspace: Workspace) -> ExistingWorkspace:
    existing = find_existing(cloud, workspace)
    if existing is None or not existing.machines:
        raise UnavailableError(f"{workspace.workspace_name} is gone: another command removed it meanwhile")
    return existing


def _remaining_plan(
    cloud: Cloud,
    spec: WorkspaceSpec,
    settled: WorkspacePlan | None,
    reason: CheckFailedError,
    say: Callable[[str], None],
) -> WorkspacePlan:
    """The plan without the type of the unhealthy machine.

    Args:
        settled: By which this call started it; None: it ran already.

    Raises:
        CheckFailedError: Nothing.
    """
    existing = _require_machine(cloud, spec.contract)
    unhealthy = lifecycle.only_machine(existing).instance_type
    try:
        if settled is None:
            return plan(cloud, spec, today(), homes=existing.homes, without=unhealthy, say=say)
        if others := tuple(offer for offer in settled.offers if offer.instance_type != unhealthy):
            return replace(settled, offers=others)
    except IncompatibleError as error:
        reason.add_note(error.message)
    reason.add_note("no other machine satisfies the request; this one is kept for inspection")
    raise reason


def _remove_unhealthy(
    cloud: Cloud, workspace: Workspace, reason: CheckFailedError, say: Callable[[str], None], *, started: bool
) -> None:
    """End the unhealthy machine; its home stays.

    Args:
        started: Whether this call started it, so that nobody has worked on it.

    Raises:
        CheckFailedError: It has no home volume, and files of its user may be on it.
    """
    existing = _require_machine(cloud, workspace)
    machine = lifecycle.only_machine(existing)
    if not started and not machine.home_id:
        reason.add_note(
            f"it has no home volume, so that its user's files are on it: it is kept; "
            f"`invoke workspace.down {existing.name}` removes it"
        )
        raise reason
    say(f"{machine.instance_id} ({machine.instance_type}) is removed: {reason.message}")
    lifecycle.remove_workspace(cloud, workspace, existing, keep_home=True, force=True)


@contextmanager
def workspace_lock(cloud: Cloud, name: str) -> Iterator[None]:
    """Hold a workspace's lock on this computer; wait for a command that holds it."""
    folder = state_home() / "workspaces" / "locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The lock is of this computer only; two computers are kept apart by the client token of RunInstances.
    busy = BusyError(f"another command works on {name}", hint="wait until it ends, or stop it")
    with locked(folder / f"{cloud.name}-{cloud.region}-{name}", busy=busy, wait_s=LOCK_WAIT_S):
        yield


def start(
    cloud: Cloud,
    settled: WorkspacePlan,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Start a workspace that has no machine; its home is attached, its agent may still be at work then.

    The caller holds the lock, see `workspace_lock`. After a failure nothing is left but an existing home.

    Raises:
        BusyError: No zone has capacity now, or another machine has the home.
        IncompatibleError: No zone can have such a machine, or the account's quota is too low.
        RefusedError: The home is another owner's.
        UnavailableError: The cloud refused.
    """
    contract = settled.contract
    keeps = contract.capabilities.persistent_home
    home = volumes.find_home(cloud, contract) if keeps else None
    if home:
        _grow_home(cloud, contract, home)
    vpc_id, subnet_ids = subnets_of(cloud, contract)
    # From here on everything costs money or has a name that would block the next attempt.
    with _rollback_on_error(cloud, contract, made_home=keeps and home is None, sleep=sleep):
        group_id = network.security_group(cloud, contract, vpc_id)
        request = machine_request(
            contract,
            image=settled.image,
            user_data=settled.user_data(cloud.machine_endpoint),
            group_id=group_id,
            # Group, role and key come before the machine: RunInstances needs all of them, and none of them
            # costs money.
            profile=iam.instance_profile(cloud, contract),
            key_name=network.key_pair(cloud, contract),
            tags=_machine_tags(cloud, settled),
        )
        launched = _launch(cloud, settled, subnet_ids, request, group_id, home, say=say, sleep=sleep)
        # AttachVolume refuses an instance that is still pending.
        lifecycle.wait_for(cloud, launched.instance_id, "running", sleep=sleep)
        _tag_last_machine(cloud, launched.instance_id, group_id)
        if keeps:
            _attach_home(cloud, contract, launched.instance_id, launched.zone, sleep=sleep)


def subnets_of(cloud: Cloud, workspace: Workspace) -> tuple[str, tuple[str, ...]]:
    """The VPC of a workspace, and the subnets that it may use; none: the default ones.

    Raises:
        RefusedError: The subnets are of several VPCs.
        UnavailableError: There is none.
    """
    ec2 = cloud.client("ec2")
    with explain_aws_errors("look up the network"):
        if workspace.subnet_ids:
            subnets = ec2.describe_subnets(SubnetIds=list(workspace.subnet_ids))["Subnets"]
        elif workspace.vpc_id:
            filters = [{"Name": "vpc-id", "Values": [workspace.vpc_id]}]
            subnets = ec2.describe_subnets(Filters=filters)["Subnets"]
        else:
            subnets = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])[
                "Subnets"
            ]
    # Group and subnets must be of one VPC, or RunInstances refuses them.
    vpcs = {subnet["VpcId"] for subnet in subnets}
    if not vpcs:
        what = workspace.vpc_id or "a default VPC"
        raise UnavailableError(f"{cloud.region} has no subnet of {what}", hint="name --subnet-ids")
    if len(vpcs) > 1 or (workspace.vpc_id and vpcs != {workspace.vpc_id}):
        raise RefusedError(
            f"the subnets are of {', '.join(sorted(vpcs))}, wanted one VPC"
            + (f", {workspace.vpc_id}" if workspace.vpc_id else ""),
            hint="name subnets of one VPC, one a zone",
        )
    named = workspace.subnet_ids or (
        tuple(subnet["SubnetId"] for subnet in subnets) if workspace.vpc_id else ()
    )
    return vpcs.pop(), named


def machine_request(
    workspace: Workspace,
    *,
    image: Mapping[str, Any],
    user_data: bytes,
    group_id: str,
    profile: str,
    key_name: str = "",
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Arguments of RunInstances but type, subnet, market, number and token, which the launch walk adds.

    Args:
        image: As DescribeImages gives it, of which ImageId and RootDeviceName count.
        user_data: As it is; the client of AWS encodes it.
        profile: Name of the instance profile; empty: the machine has no rights.
        key_name: Of a key pair; empty: none.
        tags: More tags of the machine.
    """
    own_tags = workspace_tags(workspace, lifecycle.MACHINE)
    may_be_none: dict[str, Any] = {}
    if profile:
        may_be_none["IamInstanceProfile"] = {"Name": profile}
    if key_name:
        may_be_none["KeyName"] = key_name
    return {
        "ImageId": image["ImageId"],
        "UserData": user_data,
        "SecurityGroupIds": [group_id],
        **may_be_none,
        "MetadataOptions": dict(METADATA_OPTIONS),
        # A one-time spot instance can't be stopped (EC2 user guide, "Stop a Spot Instance"): its shutdown
        # ends it, and the home, which was attached later, is kept.
        "InstanceInitiatedShutdownBehavior": "terminate" if workspace.spot else "stop",
        "BlockDeviceMappings": [
            {
                "DeviceName": image["RootDeviceName"],  # its size stays the image's
                "Ebs": {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
            }
        ],
        "TagSpecifications": [
            *tag_specifications({**own_tags, **PRIVILEGED, **(tags or {})}, "instance"),
            *tag_specifications(own_tags, "volume"),
        ],
    }


def _machine_tags(cloud: Cloud, settled: WorkspacePlan) -> dict[str, str]:
    """Tags of the machine that are the same whichever offer it is of: they are part of what is asked for."""
    direct = bool(settled.contract.ssh_from) or not cloud.has_session_manager
    return {
        tags.USER_TAG: userdata.user_of(settled.contract.owner),
        # AWS's DLAMIs are Ubuntu's.
        tags.SSH_USER_TAG: settled.subject.ssh_user if settled.subject else "ubuntu",
        tags.REACH_TAG: "ssh" if direct else tags.BY_SESSION_MANAGER,
        tags.IMAGE_DIGEST_TAG: settled.digest,
        tags.IMAGE_VERDICT_TAG: settled.verdict,
        tags.OPTIONS_TAG: option_hashes(settled.contract, settled.roles),
        **({tags.GPUS_TAG: tags.SIMULATED} if settled.simulated else {}),
    }


def _launch(
    cloud: Cloud,
    settled: WorkspacePlan,
    subnet_ids: Sequence[str],
    request: dict[str, Any],
    group_id: str,
    home: Home | None,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> LaunchedMachine:
    """As `launch`; an instance profile that EC2 does not know yet is waited for."""
    with explain_aws_errors("look at the security group"):
        [group] = cloud.client("ec2").describe_security_groups(GroupIds=[group_id])["SecurityGroups"]
    tagged = tags_of(group)
    last = tagged.get(tags.LAST_MACHINE_TAG) or tagged.get(tags.OLD_LAST_MACHINE_TAG, "")
    refused = UnavailableError("")

    def launched() -> LaunchedMachine | None:
        nonlocal refused
        try:
            return launch(
                cloud,
                settled.contract.workspace_name,
                settled.offers,
                request,
                subnet_ids=subnet_ids,
                group_id=group_id,
                last=last,
                home=home,
                say=say,
            )
        except UnavailableError as error:
            if "iamInstanceProfile" not in error.message:
                raise
            refused = error
            return None

    return calls.wait_until(launched, lambda: refused, timeout_s=PROFILE_WAIT_S, pause_s=POLL_S, sleep=sleep)


def launch(
    cloud: Cloud,
    name: str,
    offers: Sequence[Offer],
    request: dict[str, Any],
    *,
    subnet_ids: Sequence[str],
    group_id: str,
    last: str,
    home: Home | None,
    say: Callable[[str], None],
) -> LaunchedMachine:
    """Start the machine of a workspace.

    Two commands that do this at once get the same machine: their tokens are made of the workspace's security
    group, which `down` removes and the next `up` makes anew, and of the machine that it had last.

    Args:
        name: Of the workspace.
        offers: Of the cloud's region, the best first.
        request: Arguments of RunInstances but type, subnet, market and token.
        subnet_ids: One a zone; empty: the default VPC's.
        group_id: The workspace's security group.
        last: The machine that it had before, which has ended; empty: none.
        home: The home that is there; it pins the zone.
        say: Receives what refused.

    Raises:
        BusyError: No zone has capacity now; the details are the whole walk.
        IncompatibleError: No zone can have one, or the account's quotas are too low.
        RefusedError: The same machine was asked for before, but otherwise.
        UnavailableError: Not permitted, or the cloud refused for a reason that no other place cures.
    """
    places = _launch_candidates(cloud, subnet_ids, offers)
    tries = [place for place in places if home is None or place.zone == home.zone]
    # An EBS volume can be attached in its own zone only; other zones are named for `workspace.move`.
    others = list(dict.fromkeys(place.zone for place in places if home and place.zone != home.zone))
    if not tries:
        names = " or ".join(dict.fromkeys(offer.instance_type for offer in offers)) or "no type"
        where = f"{home.zone}, where its home is" if home else f"a zone of {cloud.region} with a subnet"
        hint = _move_hint(name, others) if home else "name subnets of other zones, or another region"
        raise IncompatibleError(f"{names} is not offered in {where}", hint=hint)

    def token(candidate: LaunchCandidate) -> str:
        # A client token must change with the request: EC2 answers IdempotentParameterMismatch otherwise.
        parts = (group_id, last, candidate.instance_type, candidate.zone, str(candidate.spot))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    launched, refusals = launch_in_order(cloud, request, tries, say=say, token=token)
    if launched is None:
        raise _no_capacity(name, home, others, refusals)
    return launched


def offer_tags(offer: Offer, zone: str) -> dict[str, str]:
    """The machine's tags that say which offer it became and what that costs.

    They are part of RunInstances: a command that is killed after it leaves no machine without them.
    """
    price = str(offer.price.value) if offer.price else ""
    return {tags.PLAN_TAG: describe_offer(offer, zone), tags.PRICE_TAG: price}


def _launch_candidates(
    cloud: Cloud, subnet_ids: Sequence[str], offers: Sequence[Offer]
) -> list[LaunchCandidate]:
    """Each offer in each zone that has it and a subnet, by the names that the account has for zones."""
    ec2 = cloud.client("ec2")
    with explain_aws_errors("look for zones that have the machine"):
        subnets = subnets_by_zone(ec2, subnet_ids)
        zones = {
            type_: zones_of(ec2, type_) for type_ in dict.fromkeys(offer.instance_type for offer in offers)
        }
    return [
        LaunchCandidate(
            offer.instance_type, zone, subnets[zone], offer.market == "spot", offer_tags(offer, zone)
        )
        for offer in offers
        for zone in zones[offer.instance_type]
        if zone in subnets
    ]


def _no_capacity(
    name: str, home: Home | None, others: Sequence[str], refusals: Sequence[LaunchRefusal]
) -> GpukilnError:
    names = " or ".join(dict.fromkeys(refusal.instance_type for refusal in refusals))
    details = tuple(map(str, refusals))
    # Capacity before quota: one zone without capacity means that trying later can help.
    if any(refusal.code in CAPACITY for refusal in refusals):
        where = f" in {home.zone}, where its home is" if home else ""
        hint = _move_hint(name, others) if home else "try later, ask for less, or name another region"
        return BusyError(f"no capacity now for {names}{where}", hint=hint, details=details)
    quotas = [
        quota_of(refusal.instance_type, "spot" if refusal.spot else "on-demand") for refusal in refusals
    ]
    codes = dict.fromkeys(f"{quota.code}, {quota.name}" for quota in quotas if quota)
    return IncompatibleError(
        f"the account's quota is too low for {names}",
        hint=f"ask for more vCPUs in Service Quotas ({'; '.join(codes) or 'service ec2'}), or for less",
        details=details,
    )


def _move_hint(name: str, others: Sequence[str]) -> str:
    if not others:
        return "no other zone with a subnet of yours has such a machine: try later, or ask for another one"
    return f"`invoke workspace.move {name} --zone {others[0]}` takes the home to another zone"


def _tag_last_machine(cloud: Cloud, instance_id: str, group_id: str) -> None:
    """Write down which machine the group has: the token of its next one is made of it."""
    with explain_aws_errors("tag the workspace's security group"):
        cloud.client("ec2").create_tags(
            Resources=[group_id], Tags=tag_list({tags.LAST_MACHINE_TAG: instance_id})
        )


def _attach_home(
    cloud: Cloud, workspace: Workspace, instance_id: str, zone: str, *, sleep: Callable[[float], None]
) -> None:
    """Attach the home to its machine; a step that this or another computer has done already is skipped."""
    ec2 = cloud.client("ec2")

    def attached() -> Home | None:
        homes = volumes.homes(cloud, workspace.workspace_name)
        return next((subnet for subnet in homes if subnet.instance_id == instance_id), None)

    home = attached()
    if home is None:
        try:
            home = volumes.ensure_home(cloud, workspace, zone, instance_id, sleep=sleep)
            with explain_aws_errors("attach the home"):
                ec2.attach_volume(VolumeId=home.volume_id, InstanceId=instance_id, Device=HOME_DEVICE)
        # Two commands at once: the other one has attached the home between the look and the call.
        except (BusyError, UnavailableError):
            if (home := attached()) is None:
                raise
    with explain_aws_errors("tag the machine with its home"):
        ec2.create_tags(Resources=[instance_id], Tags=tag_list({tags.HOME_TAG: home.volume_id}))


def _grow_home(cloud: Cloud, workspace: Workspace, home: Home) -> bool:
    """Whether the home grows, because more was asked for; it never shrinks."""
    size = workspace.compute_profile.storage_gib
    return bool(size) and volumes.grow(cloud, home, size)


@contextmanager
def _rollback_on_error(
    cloud: Cloud, workspace: Workspace, *, made_home: bool, sleep: Callable[[float], None]
) -> Iterator[None]:
    """Remove everything that the block created if it fails; an existing home stays."""
    try:
        yield
    except BaseException as error:
        name = workspace.workspace_name
        try:
            for existing in lifecycle.find_workspaces(cloud, name):
                lifecycle.remove_workspace(
                    cloud, workspace, existing, keep_home=not made_home, force=True, sleep=sleep
                )
            iam.remove_profile(cloud, workspace)
            network.remove_key_pair(cloud, name)
            network.remove_key_file(cloud, name)
        except GpukilnError as left:
            error.add_note(
                f"the removal is incomplete: {left.message}; `invoke workspace.down {name}` removes it"
            )
        raise


def resume(
    cloud: Cloud,
    workspace: Workspace,
    existing: ExistingWorkspace,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Complete a workspace that has its machine already. The caller holds the lock, see `workspace_lock`.

    Raises:
        BusyError: It has two machines, or another machine has the home.
        RefusedError: It is stopped.
        UnavailableError: The cloud refused.
    """
    machine = lifecycle.only_machine(existing)
    if machine.state in ("stopped", "stopping"):
        raise RefusedError(
            f"{existing.name} is {machine.state}: {machine.instance_id}",
            hint=f"`invoke workspace.start {existing.name}` starts it again",
        )
    say(f"{existing.name} has a machine already: {machine.instance_id}, {machine.instance_type}")
    lifecycle.wait_for(cloud, machine.instance_id, "running", sleep=sleep)
    for group_id in existing.group_ids:
        _tag_last_machine(cloud, machine.instance_id, group_id)
    if not workspace.capabilities.persistent_home:
        return
    if not machine.home_id:
        _attach_home(cloud, workspace, machine.instance_id, machine.zone, sleep=sleep)
    for home in existing.homes:
        if _grow_home(cloud, workspace, home):
            say("its home grows: its file system does when the machine starts next")


def find_existing(cloud: Cloud, workspace: Workspace) -> ExistingWorkspace | None:
    """The workspace, or what is left of one, in the cloud's region.

    Raises:
        RefusedError: It is another owner's.
    """
    existing = next(iter(lifecycle.find_workspaces(cloud, workspace.workspace_name)), None)
    if existing and existing.owner != workspace.owner:
        raise RefusedError(
            f"{existing.name} in {existing.region} is {existing.owner}'s, wanted {workspace.owner}'s",
            hint="another name, or ask its owner",
        )
    return existing


def wait_until_done(
    cloud: Cloud,
    workspace: Workspace,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    timeout_s: float = BOOT_WAIT_S,
) -> WorkspaceMachine:
    """Wait until the machine's agent has done its stages.

    Raises:
        CheckFailedError: A stage failed; the machine stays, to be looked at.
        UnavailableError: It was not done in time, or the machine has ended or can't boot.
    """
    last_stage, looks, name = "", 0, workspace.workspace_name

    def done() -> WorkspaceMachine | None:
        nonlocal last_stage, looks
        existing, looks = find_existing(cloud, workspace), looks + 1
        if existing is None or not existing.machines:
            raise UnavailableError(f"the machine of {name} has ended", hint="run the same command again")
        machine = lifecycle.only_machine(existing)
        # A machine whose agent never reported may hang in its boot: only its console shows that.
        if machine.stage in ("", lifecycle.STARTING) and not looks % CONSOLE_POLLS:
            require_booting(cloud, machine.instance_id)
        if machine.stage != last_stage:
            last_stage = machine.stage
            say(f"{machine.instance_id}: {last_stage}")
        word = last_stage.partition(" ")[0]
        if word == DONE:
            return machine
        if word == FAILED:
            raise CheckFailedError(
                f"{name} does not come up: {last_stage}",
                hint=f"`invoke workspace.ssh {name}` to look (/var/lib/gpukiln/workspace/status.json), "
                f"`invoke workspace.down {name} --keep-home` to remove it",
            )
        return None

    return calls.wait_until(
        done,
        lambda: UnavailableError(
            f"{name} is not done after {timeout_s:.0f} s: {last_stage or 'its agent has reported nothing'}",
            hint=f"`invoke workspace.show {name}` shows its progress",
        ),
        timeout_s=timeout_s,
        pause_s=POLL_S,
        sleep=sleep,
    )
