"""Prune: remove images that no channel needs and nobody uses, with a reason for every one.

An image goes in three calls, in an order that lets a later run finish: its snapshots are tagged with its id,
it is deregistered, its snapshots are deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import ClientError

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import PRUNING_TAG, RECIPE_TAG
from gpukiln.errors import GpukilnError, PartialError, RefusedError
from gpukiln.images import pointer as pointers
from gpukiln.images.channels import load_channels
from gpukiln.images.pointer import Pointer
from gpukiln.instances.tags import snapshots_of, tag_list, tags_of
from gpukiln.release.images import (
    PAGE,
    find_images,
    is_protected,
    launch_permissions,
    parse_time,
)
from gpukiln.release.in_use import images_in_use
from gpukiln.release.log import ReleaseLog
from gpukiln.release.regions import Site, each, make_sites

FAILED = ("failed", "error", "invalid")  # ImageState of botocore's model, for images that never were
KEEP = 3  # releases of a channel that ami/channels.yaml does not know
GONE_CODES = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidSnapshot.NotFound")


@dataclass(frozen=True)
class Rules:
    """What may go.

    Args:
        older_than_days: Younger images stay.
        keep: Releases before the current one that stay; None: as ami/channels.yaml says for each channel.
        limit: Images that one run removes in a region.
        in_use: Image ids that the user says are in use, with who uses them.
        without_channels: Go on where no channel points at anything.
    """

    older_than_days: float
    keep: int | None
    limit: int
    in_use: Mapping[str, list[str]]
    without_channels: bool


@dataclass(frozen=True)
class PruneItem:
    """One image.

    Args:
        image_id: The AMI.
        created: When, ISO 8601.
        action: keep, remove (in a dry run), removed or failed.
        reason: Why.
    """

    image_id: str
    name: str
    created: str
    snapshots: tuple[str, ...]
    action: str
    reason: str


@dataclass(frozen=True)
class RegionPrune:
    """What was found and done in one region.

    Args:
        region: Its name.
        items: Every image of gpukiln, oldest first.
        leftovers: Per snapshot that an earlier run left what was done: remove, removed or failed.
        error: Why nothing could be done, or None.
    """

    region: str
    items: tuple[PruneItem, ...] = ()
    leftovers: dict[str, str] = field(default_factory=dict)
    error: GpukilnError | None = None

    @property
    def actions(self) -> list[str]:
        """Of each image, and of each snapshot of an earlier run."""
        return [*(item.action for item in self.items), *self.leftovers.values()]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "region": self.region,
            "images": [asdict(item) for item in self.items],
            "leftovers": self.leftovers,
            "error": self.error.message if self.error else "",
        }


def prune(
    cloud: Cloud, regions: list[str], rules: Rules, records: ReleaseLog, *, remove: bool
) -> list[RegionPrune]:
    """Find what can go, and remove it when told to.

    Args:
        cloud: The cloud, in any region.
        rules: What may go.
        records: Whose lock keeps a release of this machine apart; who only looks needs none.
        remove: False: only look.

    Returns:
        One result a region; what fails in one stops no other.

    Raises:
        BusyError: A release or rollback runs on this machine.
    """

    def work(site: Site) -> RegionPrune:
        items, leftovers = _survey(site, rules), _leftovers(site)
        if remove:
            leftovers = {snapshot: _delete(site, snapshot) for snapshot in leftovers}
            items = [_remove(site, item) if item.action == "remove" else item for item in items]
        return RegionPrune(site.region, tuple(items), leftovers)

    with records.locked() if remove else contextlib.nullcontext():
        outcomes = each(make_sites(cloud, regions), "prune", work)
    return [
        RegionPrune(region, error=outcome.error) if outcome.error else outcome.require()
        for region, outcome in outcomes.items()
    ]


def _survey(site: Site, rules: Rules) -> list[PruneItem]:
    """Every image of gpukiln in a region, with what is to be done and why."""
    found = calls.images(
        site.ec2,
        {"tag-key": [RECIPE_TAG]},
        page_size=PAGE,
        Owners=["self"],
        IncludeDeprecated=True,
        IncludeDisabled=True,
    )
    images = {image["ImageId"]: image for image in found}
    channels = _channels(site, rules, images)
    users = images_in_use(site)
    items: list[PruneItem] = []
    for image in sorted(images.values(), key=lambda one: (one["CreationDate"], one["ImageId"])):
        reason = _why_keep(site, image, rules, channels, users)
        action = "keep" if reason else "remove"
        age = (datetime.now(UTC) - parse_time(image["CreationDate"])).days
        if action == "remove" and sum(item.action == "remove" for item in items) >= rules.limit:
            action, reason = "keep", f"over the limit of {rules.limit} a run"
        failed = image["State"] in FAILED
        items.append(
            PruneItem(
                image_id=image["ImageId"],
                name=image.get("Name", ""),
                created=image["CreationDate"],
                snapshots=tuple(snapshots_of(image)),
                action=action,
                reason=reason
                or (
                    f"it is {image['State']}"
                    if failed
                    else f"{age} days old; no channel needs it and nobody uses it"
                ),
            )
        )
    return items


def _channels(site: Site, rules: Rules, images: Mapping[str, Any]) -> dict[str, str]:
    """Per image that a channel needs the reason; refuses to go on where the listings can't be whole."""
    values = pointers.read_all(site.ssm)
    if not values and images and not rules.without_channels:
        raise RefusedError(
            f"no channel points at anything in {site.region}, so nothing says which images are needed",
            hint="check --regions and --profile; --without-channels goes by age and use alone",
        )
    if missing := sorted(set(values.values()) - set(images)):
        raise RefusedError(
            f"channels of {site.region} point at {', '.join(missing)}, which the list of images lacks: it is "
            "not whole, or a channel is broken",
            hint="`invoke ami.channels` tells; nothing is removed before",
        )
    needed: dict[str, str] = {}
    for pointer, current in values.items():
        for image_id in _kept_releases(site, pointer, rules):
            needed.setdefault(image_id, f"a release that {_name(pointer)} can go back to")
        needed[current] = f"{_name(pointer)} points at it"
    return needed


def _kept_releases(site: Site, pointer: Pointer, rules: Rules) -> list[str]:
    known = load_channels()
    keep = rules.keep
    if keep is None:
        keep = known[pointer.channel].keep if pointer.channel in known else KEEP
    releases = pointers.releases(pointers.history(site.ssm, pointer))
    return [version.image_id for version in releases[-(keep + 1) :]]


def _name(pointer: Pointer) -> str:
    return f"{pointer.channel} of {pointer.image} {pointer.kubernetes}"


def _why_keep(
    site: Site,
    image: Mapping[str, Any],
    rules: Rules,
    channels: Mapping[str, str],
    users: Mapping[str, list[str]],
) -> str:
    """Why an image stays, or an empty string; what costs a call of its own comes last."""
    image_id = image["ImageId"]
    if image_id in channels:
        return channels[image_id]
    if using := [*users.get(image_id, ()), *rules.in_use.get(image_id, ())]:
        more = f" and {len(using) - 1} more" if len(using) > 1 else ""
        return f"used by {using[0]}{more}"
    if is_protected(image) or image["State"] in ("pending", "transient"):
        return f"it is {image['State']}" + (
            " and protected from deregistration" if is_protected(image) else ""
        )
    if image["State"] in FAILED:
        return ""
    for what, when in (("created", image["CreationDate"]), ("launched", image.get("LastLaunchedTime"))):
        age = (datetime.now(UTC) - parse_time(when)).total_seconds() / 86400 if when else None
        if age is not None and age < rules.older_than_days:
            return f"{what} {int(age)} days ago, less than {rules.older_than_days:g}"
    shared = [value for permission in launch_permissions(site, image_id) for value in permission.values()]
    return f"shared with {', '.join(shared)}" if shared else ""


def _leftovers(site: Site) -> dict[str, str]:
    """Snapshots whose image an earlier run deregistered before it ended."""
    found = calls.pages(
        site.ec2,
        "describe_snapshots",
        "Snapshots",
        OwnerIds=["self"],
        Filters=calls.filters({"tag-key": [PRUNING_TAG]}),
        PaginationConfig={"PageSize": PAGE},
    )
    owner = {one["SnapshotId"]: tags_of(one)[PRUNING_TAG] for one in found}
    there = find_images(site, owner.values())
    return {snapshot: "remove" for snapshot, image_id in owner.items() if image_id not in there}


def _remove(site: Site, item: PruneItem) -> PruneItem:
    """Remove one image with its snapshots; a failure is its own result."""
    try:
        site.go_on()
        with explain_aws_errors(f"remove {item.image_id}"):
            if item.image_id in pointers.read_all(site.ssm).values():  # released since the survey
                return replace(item, action="keep", reason="a channel points at it now")
            if item.snapshots:
                tags = tag_list({PRUNING_TAG: item.image_id})
                site.ec2.create_tags(Resources=list(item.snapshots), Tags=tags)
            _unless_gone(site.ec2.deregister_image, ImageId=item.image_id)
            for snapshot in item.snapshots:
                _unless_gone(site.ec2.delete_snapshot, SnapshotId=snapshot)
    except GpukilnError as error:
        return replace(item, action="failed", reason=error.message)
    return replace(item, action="removed")


def _delete(site: Site, snapshot: str) -> str:
    try:
        site.go_on()
        with explain_aws_errors(f"remove {snapshot}"):
            _unless_gone(site.ec2.delete_snapshot, SnapshotId=snapshot)
    except GpukilnError:
        return "failed"
    return "removed"


def _unless_gone(call: Any, **what: str) -> None:
    try:
        call(**what)
    except ClientError as error:
        if error.response["Error"].get("Code") not in GONE_CODES:
            raise


def require_complete(done: list[RegionPrune]) -> None:
    """Turn what failed into the command's failure.

    Raises:
        GpukilnError: No region could be looked at, all for the same kind of reason.
        PartialError: Some of it failed.
    """
    errors = [one.error for one in done if one.error]
    if len(errors) == len(done) and len({error.exit_code for error in errors}) == 1:  # nothing was done
        raise type(errors[0])(
            errors[0].message, hint=errors[0].hint, details=tuple(error.message for error in errors[1:])
        )
    lines = [f"{one.region}: {one.error.message}" for one in done if one.error]
    for one in done:
        failed = [item for item in one.items if item.action == "failed"]
        lines += [f"{one.region}: {item.image_id}: {item.reason}" for item in failed]
        left = [snapshot for snapshot, action in one.leftovers.items() if action == "failed"]
        lines += [f"{one.region}: {snapshot} was not removed" for snapshot in left]
    if lines:
        raise PartialError(
            f"{len(lines)} thing{'s' if len(lines) > 1 else ''} failed",
            details=tuple(lines),
            hint="; ".join(dict.fromkeys(error.hint for error in errors if error.hint))
            or "run the same command again: it finishes what was begun",
        )
