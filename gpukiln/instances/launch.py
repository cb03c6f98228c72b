"""Starts one machine of the first instance type and zone with capacity; reports each refusal.

Error codes: Amazon EC2 API reference, "Error codes for the Amazon EC2 API"; for which of them another zone
can help: aws/karpenter-provider-aws:pkg/errors/errors.go.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpukiln.catalog.quotas import quota_of
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import BusyError, GpukilnError, IncompatibleError, RefusedError, UnavailableError
from gpukiln.instances.tags import tag_list

CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientReservedInstanceCapacity",
        "ReservationCapacityExceeded",
        "UnfulfillableCapacity",
        "SpotMaxPriceTooLow",
        "InsufficientFreeAddressesInSubnet",
        "Unsupported",  # this zone does not take the type
    }
)
QUOTA = frozenset(
    {
        "VcpuLimitExceeded",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "SpotInstanceCountExceeded",
    }
)
PERMISSION = frozenset(
    {
        "UnauthorizedOperation",
        "AccessDenied",
        "AuthFailure",
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
        "OptInRequired",
        "PendingVerification",
    }
)
MISMATCH = "IdempotentParameterMismatch"
# EC2's reasons for an instance that it took away again (StateReason of DescribeInstances).
LOST_CAPACITY = frozenset({"Server.InsufficientInstanceCapacity", "Server.SpotInstanceTermination"})
SPOT = {
    "MarketType": "spot",
    # One-time: a persistent request would start another machine after the end of this one.
    "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
}


@dataclass(frozen=True)
class LaunchedMachine:
    """A machine that was started.

    Args:
        zone: Its availability zone.
        spot: Whether it is a spot instance.
    """

    instance_id: str
    instance_type: str
    zone: str
    spot: bool


@dataclass(frozen=True)
class LaunchCandidate:
    """One place to try: a type in a zone of the cloud's region, in a market.

    Args:
        tags: Tags of a machine that starts there, in addition to those of the request.
    """

    instance_type: str
    zone: str
    subnet_id: str
    spot: bool
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchRefusal:
    """EC2's refusal for one candidate."""

    code: str
    text: str
    instance_type: str
    zone: str
    spot: bool

    def __str__(self) -> str:
        return f"{self.instance_type} in {self.zone}: {self.code}: {self.text}"


def launch(
    cloud: Cloud,
    request: dict[str, Any],
    *,
    instance_types: Sequence[str],
    spot: bool,
    say: Callable[[str], None],
    named_by: str = "--instance-types",
    subnet_ids: Sequence[str] = (),
) -> LaunchedMachine:
    """Start one machine, of the first type and zone that has capacity.

    Args:
        request: Arguments of RunInstances, without type, subnet and market.
        instance_types: The types to try, the preferred one first.
        spot: Whether to start a spot instance.
        say: Gets a line about each refusal.
        named_by: The option or setting that has the types, for the hint of an error.
        subnet_ids: The subnets to try; empty: the cloud's own, else those of the default VPC.

    Returns:
        The machine.

    Raises:
        BusyError: No zone has capacity for any of the types now.
        IncompatibleError: The account's quota is too low, or the region has none of the types.
        UnavailableError: The role lacks a permission, or EC2 refused for another reason.
    """
    ec2 = cloud.client("ec2")
    with explain_aws_errors("look for a zone that has the instance type"):
        subnets = subnets_by_zone(ec2, [cloud.subnet_id] if cloud.subnet_id else subnet_ids)
        offers = {name: [zone for zone in zones_of(ec2, name) if zone in subnets] for name in instance_types}
    if not any(offers.values()):
        raise IncompatibleError(
            f"{cloud.region} has no zone with {' or '.join(instance_types)}"
            + (f" and the subnet {cloud.subnet_id}" if cloud.subnet_id else ""),
            hint=f"name other types with {named_by}, or another subnet or region",
        )
    tries = [
        LaunchCandidate(name, zone, subnets[zone], spot) for name, zones in offers.items() for zone in zones
    ]
    launched, refusals = launch_in_order(cloud, request, tries, say=say)
    if launched is None:
        raise _no_place_error(refusals, spot, named_by)
    return launched


def launch_in_order(
    cloud: Cloud,
    request: dict[str, Any],
    tries: Iterable[LaunchCandidate],
    *,
    say: Callable[[str], None],
    token: Callable[[LaunchCandidate], str] = lambda _: "",
) -> tuple[LaunchedMachine | None, tuple[LaunchRefusal, ...]]:
    """Start one machine at the first candidate that EC2 accepts.

    A quota applies to a type and market in every zone, so after one refusal their other zones are skipped.

    Args:
        request: Arguments of RunInstances, without type, subnet, market and token.
        say: Gets a line about each refusal.
        token: The ClientToken of a candidate, so that a repeated call starts no second machine; empty: none.

    Returns:
        The machine, None where every candidate was refused; and the refusals.

    Raises:
        RefusedError: The token was used with other arguments.
        UnavailableError: The role lacks a permission, or EC2 refused for a reason that applies to every
            candidate.
    """
    # EC2 answers "no capacity" with status 500, which boto3 would retry in the same zone up to its limit
    starter = cloud.client("ec2", attempts=2)
    refusals: list[LaunchRefusal] = []
    for candidate in tries:
        name, zone = candidate.instance_type, candidate.zone
        # Quotas count vCPUs of a family and market in the region, not in a zone.
        if any(r.code in QUOTA and (r.instance_type, r.spot) == (name, candidate.spot) for r in refusals):
            continue
        more = _with_machine_tags(request, candidate.tags) | (
            {"InstanceMarketOptions": SPOT} if candidate.spot else {}
        )
        if used := token(candidate):
            more["ClientToken"] = used
        try:
            with explain_aws_errors("start a machine from the image"):
                instance = starter.run_instances(
                    **more,
                    InstanceType=name,
                    SubnetId=candidate.subnet_id,
                    MinCount=1,
                    MaxCount=1,
                )["Instances"][0]
        except UnavailableError as error:
            refusal = LaunchRefusal(*_code_and_text(error), name, zone, candidate.spot)
            if refusal.code in PERMISSION:
                raise _permission_error(refusal, candidate.spot) from error
            if refusal.code == MISMATCH:
                raise RefusedError(
                    f"the token of this launch of {name} in {zone} was used before with other arguments",
                    hint="repeat the command exactly as you typed it first, or terminate that machine",
                    details=(str(refusal),),
                ) from error
            if refusal.code not in CAPACITY | QUOTA:
                raise
            refusals.append(refusal)
            say(str(refusal))
        else:
            return LaunchedMachine(instance["InstanceId"], name, zone, candidate.spot), tuple(refusals)
    return None, tuple(refusals)


def _with_machine_tags(request: dict[str, Any], tags: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of RunInstances with additional tags for the machine."""
    if not tags:
        return request
    given = request.get("TagSpecifications", [])
    own = [
        tag
        for specification in given
        if specification["ResourceType"] == "instance"
        for tag in specification["Tags"]
    ]
    named = [
        *(specification for specification in given if specification["ResourceType"] != "instance"),
        {"ResourceType": "instance", "Tags": [*own, *tag_list(dict(tags))]},
    ]
    return {**request, "TagSpecifications": named}


def capacity_loss(instance: dict[str, Any]) -> GpukilnError | None:
    """The error for a machine that EC2 took away for lack of capacity, which is no fault of the image.

    Args:
        instance: As DescribeInstances gives it.

    Returns:
        The error to raise, or None.
    """
    reason = instance.get("StateReason", {})
    if reason.get("Code") not in LOST_CAPACITY:
        return None
    return BusyError(
        f"EC2 took {instance['InstanceId']} away: {reason.get('Message', reason['Code'])}",
        hint="run the command again; EC2 takes other instance types and on-demand machines away less often",
    )


def zones_of(ec2: Any, instance_type: str) -> list[str]:
    """The zones of a region that offer a type."""
    offerings = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
    )["InstanceTypeOfferings"]
    return sorted(offer["Location"] for offer in offerings)


def subnets_by_zone(ec2: Any, subnet_ids: Sequence[str]) -> dict[str, str]:
    """One subnet for each zone: of those given, else of the default VPC."""
    default = [{"Name": "default-for-az", "Values": ["true"]}]
    described = ec2.describe_subnets(**({"SubnetIds": [*subnet_ids]} if subnet_ids else {"Filters": default}))
    return {subnet["AvailabilityZone"]: subnet["SubnetId"] for subnet in described["Subnets"]}


def _code_and_text(error: UnavailableError) -> tuple[str, str]:
    """EC2's code and text of an error; an empty code where EC2 did not answer."""
    from botocore.exceptions import ClientError  # noqa: PLC0415 - slow to import

    cause = error.__cause__
    if not isinstance(cause, ClientError):
        return "", error.message
    answer = cause.response["Error"]
    return answer.get("Code", ""), answer.get("Message", "")


def _permission_error(refusal: LaunchRefusal, spot: bool) -> UnavailableError:
    hint = "the role needs ec2:CreateTags, and ec2:RunInstances on image, subnet, security group and key too"
    # Without its service-linked role an account can start no spot instance; RunInstances creates it only for
    # a caller that may (EC2 user guide, "Service-linked role for EC2 Spot").
    if "ServiceLinkedRole" in refusal.code or ("spot" in refusal.text.lower() and spot):
        hint = (
            "create the role once: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
        )
    return UnavailableError(f"the role is not allowed to start {refusal}", hint=hint)


def _no_place_error(refusals: Sequence[LaunchRefusal], spot: bool, named_by: str) -> GpukilnError:
    details = tuple(map(str, refusals))
    names = list(dict.fromkeys(refusal.instance_type for refusal in refusals))
    ask = "ask for more vCPUs in Service Quotas"
    market = "spot " if spot else ""
    without = " or leave out --spot" if spot else ""
    # One refusal for capacity suffices: the same command can succeed later, which a quota does not allow.
    if any(refusal.code in CAPACITY for refusal in refusals):
        return BusyError(
            f"no {market}capacity now for {' or '.join(names)}",
            hint=f"try later, name more types with {named_by}{without}",
            details=details,
        )
    quotas = filter(None, (quota_of(name, "spot" if spot else "on-demand") for name in names))
    codes = " and ".join(dict.fromkeys(quota.code for quota in quotas))
    return IncompatibleError(
        f"the account's {market}quota is too low for {' and '.join(names)}",
        hint=f"{ask} ({codes or 'service ec2'}), name smaller types with {named_by}{without}",
        details=details,
    )
