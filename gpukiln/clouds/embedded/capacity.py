"""RunInstances where capacity is scarce: the zone for a launch, or EC2's refusal.

EC2 refuses with status 500 (hashicorp/packer issue 2485), which SDKs retry. Sources of the texts: for a zone
in the request aws/eks-anywhere-build-tooling pull request 772, for no zone fedora-copr/copr issue 3279, for
spot published logs of launches (where another zone has capacity, spot gets the text of on demand).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

from gpukiln.catalog.quotas import Market
from gpukiln.clouds.embedded import market, scarcity
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import UnavailableError

NO_TOKEN = "ABCDE"  # noqa: S105 - moto's default where a request has none
PROVISIONING_TEXT = "Our system will be working on provisioning additional capacity."


class InsufficientCapacityError(EC2ClientError):
    """EC2's refusal for lack of capacity."""

    code = "InsufficientInstanceCapacity"
    status = 500


@contextlib.contextmanager
def take_capacity(
    layout: Layout,
    ec2: Any,
    arguments: Mapping[str, Any],
    template: Mapping[str, Any],
    devices: Sequence[Any],
) -> Iterator[str]:
    """Take capacity for the launch in the block.

    Args:
        ec2: moto's EC2 backend.
        arguments: The keyword arguments of moto's run_instances, and `count`.
        template: The data of the launch template.
        devices: The merged block device mappings, the root first.

    Yields:
        The zone for the launch.

    Raises:
        InsufficientCapacityError: No allowed zone has capacity.
        EC2ClientError: The account's quota is used up, or the rules can't be read.
    """
    # The default of RunInstances (API reference, InstanceType).
    name = arguments.get("instance_type") or "m1.small"
    if arguments.get("is_instance_type_default"):
        name = template.get("InstanceType") or name
    token = arguments.get("client_token") or ""
    spot = "spot" in (arguments.get("instance_market_options"), arguments.get("lifecycle"))
    requested_market: Market = "spot" if spot else "on-demand"
    # Before capacity: EC2 checks the quota first, and a refused launch takes no capacity.
    market.refuse_beyond_quota(layout, ec2, name, requested_market, arguments["count"])
    launch = scarcity.Launch(name, requested_market, arguments["count"], "" if token == NO_TOKEN else token)
    named, offered = _requested_zone(ec2, arguments), zones_of(ec2, name)
    try:
        with scarcity.capacity(layout, launch, [named] if named else offered, offered) as available:
            if available.zone is not None:
                yield available.zone
    except UnavailableError as error:
        raise EC2ClientError("InternalError", f"{error.message}; {error.hint}") from error
    if available.zone is None:
        # Behind the block: capacity was noted as refused before the error leaves.
        raise InsufficientCapacityError(_refusal_text(launch, named, available.elsewhere, devices))


def zones_of(ec2: Any, instance_type: str) -> list[str]:
    """The zones of a region where a type can start: those in moto's offerings, else all with a subnet."""
    offers = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(ec2.region_name, [])
    known_zones = [offer["Location"] for offer in offers if offer["InstanceType"] == instance_type]
    zones = sorted(zone for zone, subnets in ec2.subnets.items() if subnets)
    return [zone for zone in zones if zone in known_zones] or zones or [f"{ec2.region_name}a"]


def _requested_zone(ec2: Any, arguments: Mapping[str, Any]) -> str | None:
    """The zone of a request: its own, or that of its subnet or network interface."""
    subnet_id = arguments.get("subnet_id")
    for nic in arguments.get("nics") or ():
        if interface := nic.get("NetworkInterfaceId"):
            return str(ec2.get_network_interface(interface).subnet.availability_zone)
        subnet_id = subnet_id or nic.get("SubnetId")
    if subnet_id:
        return str(ec2.get_subnet(subnet_id).availability_zone)
    return arguments.get("placement") or None


def _refusal_text(
    launch: scarcity.Launch, named: str | None, elsewhere: Sequence[str], devices: Sequence[Any]
) -> str:
    lack = f"We currently do not have sufficient {launch.instance_type} capacity in"
    if named and elsewhere:
        return (
            f"{lack} the Availability Zone you requested ({named}). {PROVISIONING_TEXT} You can "
            f"currently get {launch.instance_type} capacity by not specifying an Availability Zone in "
            f"your request or choosing {', '.join(elsewhere)}."
        )
    if launch.market == "spot":
        return "There is no Spot capacity available that matches your request."
    if named:
        return f"{lack} the Availability Zone you requested ({named}). {PROVISIONING_TEXT}"
    volume = devices[0]["Ebs"].get("VolumeType") or "gp2"
    return f"{lack} zones with support for '{volume}' volumes. {PROVISIONING_TEXT}"
