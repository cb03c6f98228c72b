"""Prune: remove images that no channel needs and no resource uses, with a reason for each.

An image is removed by three calls, in an order that lets a later run finish: its snapshots are tagged with
its id, it is deregistered, its snapshots are deleted.
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

FAILED = ("failed", "error", "invalid")  # ImageState of botocore's model: images that were never available
KEEP = 3  # releases of a channel that ami/channels.yaml does not know
# Another run, or a person, may remove the same image at the same time.
GONE_CODES = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidSnapshot.NotFound")


@dataclass(frozen=True)
class PruneRules:
    """What may be removed.

    Args:
        older_than_days: Younger images stay.
        keep: Releases before the current one that stay; None: the number of ami/channels.yaml.
        limit: The most images that one run removes in a region.
        in_use: Image ids that the user lists as in use, with their users.
        without_channels: Whether a region without any channel is pruned.
    """

    older_than_days: float
    keep: int | None
    limit: int
    in_use: Mapping[str, list[str]]
    without_channels: bool


@dataclass(frozen=True)
class PrunedImage:
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
class PruneResult:
    """The result of one region.

    Args:
        region: Its name.
        items: Every image of gpukiln, oldest first.
        orphaned_snapshots: By snapshot of an image that is gone, its state: remove, removed or failed.
        error: Why nothing could be done, or None.
    """

    region: str
    items: tuple[PrunedImage, ...] = ()
    orphaned_snapshots: dict[str, str] = field(default_factory=dict)
    error: GpukilnError | None = None

    @property
    def actions(self) -> list[str]:
        """Of each image, and of each snapshot of an earlier run."""
        return [*(item.action for item in self.items), *self.orphaned_snapshots.values()]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "region": self.region,
            "images": [asdict(item) for item in self.items],
            "orphaned_snapshots": self.orphaned_snapshots,
            "error": self.error.message if self.error else "",
        }


def prune(
    cloud: Cloud, regions: list[str], rules: PruneRules, records: ReleaseLog, *, remove: bool
) -> list[PruneResult]:
    """Find images that can be removed, and remove them.

    Args:
        cloud: The cloud, in any region.
        rules: What may be removed.
        records: Its lock excludes a release at the same time; a run that only lists takes no lock.
        remove: False: only list.

    Returns:
        One result a region; a failure in one stops no other.

    Raises:
        BusyError: A release or rollback runs on this machine.
    """

    def work(site: Site) -> PruneResult:
        items, orphaned_snapshots = _survey(site, rules), _find_orphaned_snapshots(site)
        if remove:
            orphaned_snapshots = {snapshot: _delete(site, snapshot) for snapshot in orphaned_snapshots}
            items = [_remove(site, item) if item.action == "remove" else item for item in items]
        return PruneResult(site.region, tuple(items), orphaned_snapshots)

    # A release on this machine could need an image between the survey and its removal.
    with records.locked() if remove else contextlib.nullcontext():
        outcomes = each(make_sites(cloud, regions), "prune", work)
    return [
        PruneResult(region, error=outcome.error) if outcome.error else outcome.require()
        for region, outcome in outcomes.items()
    ]


def _survey(site: Site, rules: PruneRules) -> list[PrunedImage]:
    """Every image of gpukiln in a region, with its action and the reason."""
    listed = calls.images(
        site.ec2,
        {"tag-key": [RECIPE_TAG]},
        page_size=PAGE,
        Owners=["self"],
        IncludeDeprecated=True,
        # Disabled images keep their snapshots, which are paid for.
        IncludeDisabled=True,
    )
    images = {image["ImageId"]: image for image in listed}
    channels = _channels(site, rules, images)
    users = images_in_use(site)
    # The oldest first, so that the limit keeps the younger ones.
    items: list[PrunedImage] = []
    for image in sorted(
        images.values(), key=lambda listed_image: (listed_image["CreationDate"], listed_image["ImageId"])
    ):
        reason = _why_keep(site, image, rules, channels, users)
        action = "keep" if reason else "remove"
        age = (datetime.now(UTC) - parse_time(image["CreationDate"])).days
        # A limit a run: a wrong rule is noticed before everything is gone.
        if action == "remove" and sum(item.action == "remove" for item in items) >= rules.limit:
            action, reason = "keep", f"over the limit of {rules.limit} a run"
        failed = image["State"] in FAILED
        items.append(
            PrunedImage(
                image_id=image["ImageId"],
                name=image.get("Name", ""),
                created=image["CreationDate"],
                snapshots=tuple(snapshots_of(image)),
                action=action,
                reason=reason
                or (
                    f"it is {image['State']}"
                    if failed
                    else f"{age} days old; no channel needs it and no resource uses it"
                ),
            )
        )
    return items


def _channels(site: Site, rules: PruneRules, images: Mapping[str, Any]) -> dict[str, str]:
    """By image that a channel needs, the reason; refuses where the listings can't be complete."""
    # An incomplete listing would make needed images look unneeded.
    values = pointers.read_all(site.ssm)
    if not values and images and not rules.without_channels:
        raise RefusedError(
            f"{site.region} has no channel, so it is unknown which images are needed",
            hint="check --regions and --profile; --without-channels decides by age and use alone",
        )
    if missing := sorted(set(values.values()) - set(images)):
        raise RefusedError(
            f"channels of {site.region} point at {', '.join(missing)}, which the list of images lacks: the "
            "list is incomplete, or a channel is broken",
            hint="`invoke ami.channels` shows which; nothing is removed until it is fixed",
        )
    needed: dict[str, str] = {}
    for pointer, current in values.items():
        for image_id in _kept_releases(site, pointer, rules):
            needed.setdefault(image_id, f"a release that {_pointer_title(pointer)} can be rolled back to")
        # Last, so that the current release's reason replaces the weaker one.
        needed[current] = f"{_pointer_title(pointer)} points at it"
    return needed


def _kept_releases(site: Site, pointer: Pointer, rules: PruneRules) -> list[str]:
    known = load_channels()
    keep = rules.keep
    if keep is None:
        keep = known[pointer.channel].keep if pointer.channel in known else KEEP
    releases = pointers.releases(pointers.history(site.ssm, pointer))
    return [version.image_id for version in releases[-(keep + 1) :]]


def _pointer_title(pointer: Pointer) -> str:
    return f"{pointer.channel} of {pointer.image} {pointer.kubernetes}"


def _why_keep(
    site: Site,
    image: Mapping[str, Any],
    rules: PruneRules,
    channels: Mapping[str, str],
    users: Mapping[str, list[str]],
) -> str:
    """Why an image stays, or an empty string."""
    # The check that needs a call of its own comes last.
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
    # A failed image can't be launched, so neither age nor sharing keeps it.
    if image["State"] in FAILED:
        return ""
    # LastLaunchedTime is reported with a delay of a day (EC2 API reference).
    for what, when in (("created", image["CreationDate"]), ("launched", image.get("LastLaunchedTime"))):
        age = (datetime.now(UTC) - parse_time(when)).total_seconds() / 86400 if when else None
        if age is not None and age < rules.older_than_days:
            return f"{what} {int(age)} days ago, less than {rules.older_than_days:g}"
    # Other accounts' instances are invisible here, so a shared image counts as used.
    shared = [value for permission in launch_permissions(site, image_id) for value in permission.values()]
    return f"shared with {', '.join(shared)}" if shared else ""


def _find_orphaned_snapshots(site: Site) -> dict[str, str]:
    """Snapshots whose image an earlier run deregistered before it was interrupted."""
    # PRUNING_TAG has the id of the image; where that still exists, the run ended before deregistering it.
    snapshots = calls.pages(
        site.ec2,
        "describe_snapshots",
        "Snapshots",
        OwnerIds=["self"],
        Filters=calls.filters({"tag-key": [PRUNING_TAG]}),
        PaginationConfig={"PageSize": PAGE},
    )
    owner = {snapshot["SnapshotId"]: tags_of(snapshot)[PRUNING_TAG] for snapshot in snapshots}
    there = find_images(site, owner.values())
    return {snapshot: "remove" for snapshot, image_id in owner.items() if image_id not in there}


def _remove(site: Site, item: PrunedImage) -> PrunedImage:
    """Remove one image with its snapshots; a failure becomes the image's result."""
    try:
        site.check_interrupted()
        with explain_aws_errors(f"remove {item.image_id}"):
            # another machine may have released it since the survey
            if item.image_id in pointers.read_all(site.ssm).values():
                return replace(item, action="keep", reason="a channel points at it now")
            if item.snapshots:
                tags = tag_list({PRUNING_TAG: item.image_id})
                # First the tag: once the image is gone, only the tag has the image of these snapshots.
                site.ec2.create_tags(Resources=list(item.snapshots), Tags=tags)
            _unless_gone(site.ec2.deregister_image, ImageId=item.image_id)
            for snapshot in item.snapshots:
                _unless_gone(site.ec2.delete_snapshot, SnapshotId=snapshot)
    except GpukilnError as error:
        return replace(item, action="failed", reason=error.message)
    return replace(item, action="removed")


def _delete(site: Site, snapshot: str) -> str:
    try:
        site.check_interrupted()
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


def require_complete(done: list[PruneResult]) -> None:
    """Raise an error for what failed.

    Raises:
        GpukilnError: No region could be read, all for the same kind of reason.
        PartialError: A part failed.
    """
    errors = [result.error for result in done if result.error]
    if len(errors) == len(done) and len({error.exit_code for error in errors}) == 1:  # nothing was done
        raise type(errors[0])(
            errors[0].message, hint=errors[0].hint, details=tuple(error.message for error in errors[1:])
        )
    lines = [f"{result.region}: {result.error.message}" for result in done if result.error]
    for result in done:
        failed = [item for item in result.items if item.action == "failed"]
        lines += [f"{result.region}: {item.image_id}: {item.reason}" for item in failed]
        left = [snapshot for snapshot, action in result.orphaned_snapshots.items() if action == "failed"]
        lines += [f"{result.region}: {snapshot} was not removed" for snapshot in left]
    if lines:
        raise PartialError(
            f"{len(lines)} removal{'s' if len(lines) > 1 else ''} failed",
            details=tuple(lines),
            hint="; ".join(dict.fromkeys(error.hint for error in errors if error.hint))
            or "run the same command again: it completes the removals",
        )
