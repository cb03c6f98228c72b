"""Rollback: the pointer of every region returns to the previous release, the same one in all regions."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gpukiln.attest import trust
from gpukiln.clouds.base import Cloud
from gpukiln.errors import RefusedError, UnavailableError, UsageError
from gpukiln.images import pointer as pointers
from gpukiln.images.channels import Channel
from gpukiln.images.pointer import Pointer, PointerVersion
from gpukiln.progress import Progress
from gpukiln.release.images import find_images, make_live
from gpukiln.release.log import RegionResult, Release, ReleaseLog, UnfinishedRollback, now
from gpukiln.release.options import kubernetes_version
from gpukiln.release.regions import Site, each, make_sites
from gpukiln.release.run import ReleaseRun, retirement
from gpukiln.release.signing import require_newest_release, sign_release

if TYPE_CHECKING:
    from securesystemslib.signer import Signer


def rollback(
    pointer: Pointer,
    channel: Channel,
    cloud: Cloud,
    regions: list[str],
    records: ReleaseLog,
    progress: Progress,
    *,
    signer: Signer | None = None,
    to: str = "",
    dry_run: bool = False,
) -> Release:
    """Move a channel back; the failure of a region is in its result, not an exception.

    Args:
        channel: The channel's rules.
        cloud: The cloud, in any region.
        regions: Regions to read; the regions that their pointers name are added.
        records: The store of the record.
        signer: The key that signs the rollback, where the channel trusts keys.
        to: Build or image id to return to; an empty string: the release before the current one.
        dry_run: Only read.

    Returns:
        The state of each region.

    Raises:
        RefusedError: The regions have no common release to return to, or its image was not released with a
            trusted signature; nothing was changed.
        UnavailableError: A region does not answer, or the image is gone there; nothing was changed.
        UsageError: The channel points at nothing.
        BusyError: Another release or rollback runs on this machine.
    """
    if not dry_run:
        trust.require_signer(pointer.channel, channel, signer, cloud)
    with contextlib.nullcontext() if dry_run else records.locked():
        with progress.step("read the current state"):
            histories = _histories(pointer, cloud, regions)
            releases = {region: pointers.releases(versions) for region, versions in histories.items()}
            current = {region: stack[-1].image_id for region, stack in releases.items()}
            # A killed rollback has moved some regions: repeated naively, those would go back twice.
            begun = _find_resumable(records.unfinished_rollbacks(pointer, cloud.name), current, to)
            target = _find_targets(pointer, releases, to or (begun.build if begun else ""))
            sites = make_sites(cloud, releases)
            seen = each(
                sites, "look up the image", lambda site: _require_usable(site, target[site.region], pointer)
            )
            # Raises where a region failed: no region moves unless all can.
            trusts = [outcome.require() for outcome in seen.values()]
        build = next(iter(target.values())).build
        # A killed run has moved some pointers: what they pointed at before is in its record only.
        if begun and begun.build == build:
            current = begun.replaces
        # every image of the builds that are rolled back from, so that none of them is launched again
        left = {v.build for region, vs in histories.items() for v in vs if v.image_id == current[region]} - {
            build
        }
        bad = {v.image_id for versions in histories.values() for v in versions if v.build in left}
        results = tuple(
            RegionResult(site.region, image_id=target[site.region].image_id, replaces=current[site.region])
            for site in sites
        )
        started = Release(
            action="rollback",
            pointer=pointer,
            build=build,
            cloud=cloud.name,
            regions=results,
            trust=trusts[0],
            started_at=now(),
        )
        if dry_run:
            planned = {result.region: replace(result, state="planned") for result in results}
            return replace(started.with_results(planned), state="planned")

        def revive(site: Site) -> str:
            image_id = target[site.region].image_id
            # Read again: the survey's data may be minutes old.
            image = find_images(site, [image_id])[image_id]
            make_live(site, image)
            if channel.trust and signer:
                there, keys = trust.channel_statements(site.cloud, image, channel.trust, site.ssm)
                # The old release's own claim, with a new number: a rollback is a release of the same image.
                claim = there.releases[pointer.channel].claim
                sign_release(site, pointer, claim, there, keys, signer)
            return image_id

        return ReleaseRun(started, records, progress, sites).all_steps(
            "protect the release before",
            revive,
            moved=lambda site, image_id: require_newest_release(site, pointer, channel, image_id),
            # at once: an image that was rolled back from must not be launched again
            retire=retirement(channel, at_once=frozenset(bad)),
        )


def pointer_of(image: str, channel: str, cloud: Cloud, region: str) -> Pointer:
    """The pointer of a channel, without a Kubernetes version that was typed.

    Returns:
        The channel's only pointer, where it has one: that of an image whose base has no Kubernetes is
        `NO_KUBERNETES`. Else the pointer of the version in components.yaml.
    """
    [site] = make_sites(cloud, [region])
    there = [
        pointer
        for pointer in pointers.read_all(site.ssm)
        if (pointer.image, pointer.channel) == (image, channel)
    ]
    return there[0] if len(there) == 1 else Pointer(image, kubernetes_version(), channel)


def _histories(pointer: Pointer, cloud: Cloud, regions: list[str]) -> dict[str, list[PointerVersion]]:
    """The history in each region of the channel; a pointer names all regions of its release."""
    histories: dict[str, list[PointerVersion]] = {}
    asked: list[str] = []
    while missing := [region for region in dict.fromkeys(regions) if region not in asked]:
        asked += missing
        outcomes = each(
            make_sites(cloud, missing),
            "read the channel",
            lambda site: pointers.history(site.ssm, pointer),
        )
        for region, outcome in outcomes.items():
            if versions := outcome.require():
                histories[region] = versions
                regions = [*regions, *versions[-1].regions]
    if not histories:
        raise UsageError(
            f"{pointer.path} does not exist in {', '.join(asked)}",
            hint="`invoke ami.channels --regions ...` shows every channel",
        )
    return histories


def _find_resumable(
    unfinished: list[UnfinishedRollback], current: Mapping[str, str], to: str
) -> UnfinishedRollback | None:
    """The unfinished rollback to complete: every region points at its old image, or at its new one."""
    for rollback in unfinished:
        known = all(
            image_id and image_id in (rollback.images.get(region), rollback.replaces.get(region))
            for region, image_id in current.items()
        )
        if known and to in ("", rollback.build, *rollback.images.values()):
            return rollback
    return None


def _find_targets(
    pointer: Pointer, releases: Mapping[str, list[PointerVersion]], to: str
) -> dict[str, PointerVersion]:
    """The release of each region to return to: the same build everywhere."""
    if to:
        # An image id is of one region; its build leads to the images of the other regions.
        named = {v.build for stack in releases.values() for v in stack if v.image_id == to and v.build}
        fitting = [
            build for build in named or {to} if all(_has_build(stack, build) for stack in releases.values())
        ]
        why = f"has no release {to!r} in every region"
    else:
        fitting = _release_before(releases)
        why = "differs between its regions"
        if all(len(stack) < 2 for stack in releases.values()):
            why = "has no release before this one"
    if len(fitting) != 1:
        raise RefusedError(
            f"{pointer.path} {why}",
            details=_history_lines(releases),
            hint="name a build that every region had, --to BUILD, or release an earlier one by `ami.release`",
        )
    return {
        region: next(version for version in reversed(stack) if version.build == fitting[0])
        for region, stack in releases.items()
    }


def _has_build(stack: list[PointerVersion], build: str) -> bool:
    return any(version.build == build for version in stack)


def _release_before(releases: Mapping[str, list[PointerVersion]]) -> list[str]:
    """The builds that a rollback can return to; one where the choice is clear."""
    # Regions differ after a release or a rollback that did not finish: then the target is the build that some
    # point at and that all others had just before.
    current = {region: stack[-1].build for region, stack in releases.items()}
    before = {region: stack[-2].build for region, stack in releases.items() if len(stack) > 1}
    if len(set(current.values())) == 1:
        return list(set(before.values())) if len(before) == len(current) and all(before.values()) else []
    return [
        build
        for build in set(current.values())
        if build and all(build in (current[region], before.get(region)) for region in releases)
    ]


def _history_lines(releases: Mapping[str, list[PointerVersion]]) -> tuple[str, ...]:
    return tuple(
        f"{region}: {' <- '.join(version.build or version.image_id for version in reversed(stack[-4:]))}"
        for region, stack in releases.items()
    )


def _require_usable(site: Site, version: PointerVersion, pointer: Pointer) -> str:
    """Check that an image can be released again; returns why it is trusted, in words."""
    image = find_images(site, [version.image_id]).get(version.image_id)
    if image is None or image["State"] != "available":
        raise UnavailableError(
            f"{version.image_id} of {version.build or 'an unknown build'} is "
            f"{image['State'] if image else 'gone'} in {site.region}",
            hint="name an earlier build, --to BUILD, or release another image by `invoke ami.release`",
        )
    return trust.require_released(site.cloud, image, pointer, site.ssm, pointed=False)
