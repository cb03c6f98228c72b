"""Starts the machine of a workspace: the first offer and zone that has one, and never a second one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from gpukiln.catalog.quotas import quota_of
from gpukiln.clouds import tags
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import BusyError, GpukilnError, IncompatibleError
from gpukiln.instances.launch import CAPACITY, Launched, Refusal, Try, subnets_by_zone, walk, zones_of
from gpukiln.offers.model import Offer
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.plan import plan_words
from gpukiln.workspaces.volumes import Home


def launch(
    cloud: Cloud,
    wanted: Workspace,
    offers: Sequence[Offer],
    request: dict[str, Any],
    *,
    group_id: str,
    last: str,
    home: Home | None,
    say: Callable[[str], None],
) -> Launched:
    """Start the machine of a workspace.

    Two commands that do this at once get the same machine: their tokens are made of the workspace's security
    group, which `down` removes and the next `up` makes anew, and of the machine that it had last.

    Args:
        offers: Of the cloud's region, the best first.
        request: Arguments of RunInstances but type, subnet, market and token.
        group_id: The workspace's security group.
        last: The machine that it had before, which has ended; empty: none.
        home: The home that is there; it pins the zone.
        say: Told what refused.

    Raises:
        BusyError: Nobody has capacity now; the details are the whole walk.
        IncompatibleError: No zone can have one, or the account's quotas are too low.
        RefusedError: The same machine was asked for before, but otherwise.
        UnavailableError: Not permitted, or the cloud refused for a reason that no other place cures.
    """
    places = _places(cloud, wanted, offers)
    tries = [one for one in places if home is None or one.zone == home.zone]
    others = list(dict.fromkeys(one.zone for one in places if home and one.zone != home.zone))
    if not tries:
        names = " or ".join(dict.fromkeys(offer.instance_type for offer in offers)) or "no type"
        where = f"{home.zone}, where its home is" if home else f"a zone of {cloud.region} with a subnet"
        hint = _move(wanted, others) if home else "name subnets of other zones, or another region"
        raise IncompatibleError(f"{names} is not offered in {where}", hint=hint)

    def token(one: Try) -> str:
        parts = (group_id, last, one.instance_type, one.zone, str(one.spot))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]

    launched, refusals = walk(cloud, request, tries, say=say, token=token)
    if launched is None:
        raise _nobody(wanted, home, others, refusals)
    return launched


def offer_tags(offer: Offer, zone: str) -> dict[str, str]:
    """The machine's tags that say which offer it became and what that costs.

    They are part of RunInstances: a command that is killed after it leaves no machine without them.
    """
    price = str(offer.price.value) if offer.price else ""
    return {tags.PLAN_TAG: plan_words(offer, zone), tags.PRICE_TAG: price}


def _places(cloud: Cloud, wanted: Workspace, offers: Sequence[Offer]) -> list[Try]:
    """Each offer in each zone that has it and a subnet, by the names that the account has for zones."""
    ec2 = cloud.client("ec2")
    with explain_aws_errors("look for zones that have the machine"):
        subnets = subnets_by_zone(ec2, wanted.subnet_ids)
        zones = {name: zones_of(ec2, name) for name in dict.fromkeys(one.instance_type for one in offers)}
    return [
        Try(offer.instance_type, zone, subnets[zone], offer.market == "spot", offer_tags(offer, zone))
        for offer in offers
        for zone in zones[offer.instance_type]
        if zone in subnets
    ]


def _nobody(
    wanted: Workspace, home: Home | None, others: Sequence[str], refusals: Sequence[Refusal]
) -> GpukilnError:
    names = " or ".join(dict.fromkeys(one.instance_type for one in refusals))
    details = tuple(map(str, refusals))
    if any(one.code in CAPACITY for one in refusals):
        where = f" in {home.zone}, where its home is" if home else ""
        hint = _move(wanted, others) if home else "try later, ask for less, or name another region"
        return BusyError(f"no capacity now for {names}{where}", hint=hint, details=details)
    quotas = [quota_of(one.instance_type, "spot" if one.spot else "on-demand") for one in refusals]
    codes = dict.fromkeys(f"{one.code}, {one.name}" for one in quotas if one)
    return IncompatibleError(
        f"the account's quota is too low for {names}",
        hint=f"ask for more vCPUs in Service Quotas ({'; '.join(codes) or 'service ec2'}), or for less",
        details=details,
    )


def _move(wanted: Workspace, others: Sequence[str]) -> str:
    if not others:
        return "no other zone with a subnet of yours has such a machine: try later, or ask for another one"
    return (
        f"`invoke workspace.move {wanted.workspace_name} --zone {others[0]}` takes the home to another zone"
    )
