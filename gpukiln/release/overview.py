"""The state of every channel in every region, and its problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from gpukiln.attest import trust
from gpukiln.clouds.base import Cloud
from gpukiln.errors import CheckFailedError, GpukilnError, PartialError, RefusedError
from gpukiln.images import pointer as pointers
from gpukiln.images.pointer import Pointer, PointerVersion
from gpukiln.release.images import deprecated_at, find_images, is_protected
from gpukiln.release.regions import Site, each, make_sites


@dataclass(frozen=True)
class ChannelRow:
    """One channel in one region.

    Args:
        image_id: The image that it points at, or an empty string where it is missing.
        build: The build of that image.
        since: The time of the release, ISO 8601.
        by: The user who released it.
        previous: The build that a rollback returns to, or an empty string.
        problems: Problems, in words.
        trust: Why the image is trusted, in words; empty where it is not trusted or missing.
    """

    pointer: Pointer
    region: str
    image_id: str
    build: str
    since: str
    by: str
    previous: str
    problems: tuple[str, ...]
    trust: str = ""

    @model_serializer(mode="wrap")
    def _document(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"parameter": self.pointer.path, **plain(self)}


@dataclass(frozen=True)
class Overview:
    """Every channel.

    Args:
        rows: By channel, then by region.
        asked: The regions that answered.
        errors: By region that did not answer, the error.
    """

    rows: tuple[ChannelRow, ...]
    asked: tuple[str, ...]
    errors: Mapping[str, GpukilnError]


@dataclass(frozen=True)
class _ChannelState:
    versions: list[PointerVersion]
    image: dict[str, Any] | None
    trust: str
    refused: str


def read_channels(cloud: Cloud, regions: list[str]) -> Overview:
    """Read every channel.

    Args:
        cloud: The cloud, in any region.
        regions: Regions to read; the regions that their pointers name are added.
    """
    channels_by_region: dict[str, dict[Pointer, _ChannelState]] = {}
    errors: dict[str, GpukilnError] = {}
    asked: list[str] = []
    # Each pointer has the regions of its release, so one region leads to all others.
    while missing := [region for region in dict.fromkeys(regions) if region not in asked]:
        asked += missing
        for region, outcome in each(make_sites(cloud, missing), "read the channels", _read_region).items():
            if outcome.error:
                errors[region] = outcome.error
                continue
            channels_by_region[region] = outcome.require()
            regions = [
                *regions,
                *(r for state in channels_by_region[region].values() for r in state.versions[-1].regions),
            ]
    # Sorted by channel, so that its regions are next to each other.
    rows: list[ChannelRow] = []
    for pointer in sorted({pointer for channels in channels_by_region.values() for pointer in channels}):
        here = {
            region: channels[pointer]
            for region, channels in channels_by_region.items()
            if pointer in channels
        }
        # Regions that some region's release names and that do not have the channel are shown as missing.
        belongs = {region for state in here.values() for region in state.versions[-1].regions}
        # The newest release is right; a region with another build was left behind.
        newest = max(here.values(), key=lambda state: state.versions[-1].at).versions[-1].build
        rows += [_row(pointer, region, state, newest) for region, state in here.items()]
        rows += [
            ChannelRow(pointer, region, "", "", "", "", "", ("the channel is missing here",))
            for region in sorted(belongs - set(here) - set(errors))
        ]
    return Overview(tuple(rows), tuple(channels_by_region), errors)


def require_channel_build(cloud: Cloud, pointer: Pointer, build: str, regions: Iterable[str]) -> None:
    """Refuse a build that a channel does not point at.

    Args:
        cloud: The cloud, in any region.
        build: The build that it must point at.
        regions: In each of these regions.

    Raises:
        RefusedError: It points at another build, or at nothing, in one of them.
    """
    chosen = list(regions)
    overview = read_channels(cloud, chosen)
    there = {row.region: row.build for row in overview.rows if row.pointer == pointer}
    wrong = {region: there.get(region, "") for region in chosen if there.get(region) != build}
    for region in wrong:
        if region in overview.errors:
            raise overview.errors[region]
    if wrong:
        raise RefusedError(
            f"{pointer.channel} does not point at {build} in {', '.join(wrong)}",
            hint=f"`invoke ami.channels` shows all; release the build to {pointer.channel} first",
            details=tuple(f"{region}: {other or 'nothing'}" for region, other in wrong.items()),
        )


def _read_region(site: Site) -> dict[Pointer, _ChannelState]:
    values = pointers.read_all(site.ssm)
    images = find_images(site, values.values())
    states = {}
    for pointer, image_id in values.items():
        image, words, refused = images.get(image_id), "", ""
        if image is not None:
            try:
                # A refusal is a problem of this channel and must not hide the others.
                words = trust.require_released(site.cloud, image, pointer, site.ssm)
            except RefusedError as error:
                refused = "; ".join((error.message, *error.details))
        states[pointer] = _ChannelState(pointers.history(site.ssm, pointer), image, words, refused)
    return states


def _row(pointer: Pointer, region: str, state: _ChannelState, newest: str) -> ChannelRow:
    releases = pointers.releases(state.versions)
    current, image = releases[-1], state.image
    problems = []
    if current.build != newest:
        problems.append(f"another region points at {newest or 'an image of no build'}")
    if not current.build:
        problems.append("written by hand: no build is known")
    if image is None:
        problems.append("the image is gone")
    else:
        if image["State"] != "available":
            problems.append(f"the image is {image['State']}")
        deprecation = deprecated_at(image)
        if deprecation and deprecation < datetime.now(UTC):
            problems.append("the image is deprecated")
        if not is_protected(image):
            problems.append("the image can be deregistered")
    if state.refused:
        problems.append(state.refused)
    return ChannelRow(
        pointer=pointer,
        region=region,
        image_id=current.image_id,
        build=current.build,
        since=current.at,
        by=current.by,
        previous=releases[-2].build if len(releases) > 1 else "",
        problems=tuple(problems),
        trust=state.trust,
    )


def require_consistent(overview: Overview) -> None:
    """Raise an error for the problems of an overview.

    Raises:
        CheckFailedError: A channel differs between regions, or points at an image that can't be used.
        PartialError: A region did not answer.
        GpukilnError: No region answered.
    """
    wrong = tuple(
        f"{row.pointer.path} in {row.region}: {problem}" for row in overview.rows for problem in row.problems
    )
    # No region answered: the first error, with its own exit code, says more than a summary.
    if overview.errors and not overview.asked:
        raise next(iter(overview.errors.values()))
    if overview.errors:
        details = tuple(f"{region}: {error.message}" for region, error in overview.errors.items())
        raise PartialError(
            f"{', '.join(overview.errors)} did not answer",
            details=(*details, *wrong),
            hint="; ".join(dict.fromkeys(error.hint for error in overview.errors.values() if error.hint)),
        )
    if wrong:
        raise CheckFailedError(
            f"{len(wrong)} problem{'s' if len(wrong) > 1 else ''} with the channels",
            details=wrong,
            hint="`invoke ami.release` again completes a release, `invoke ami.rollback` takes it back",
        )
