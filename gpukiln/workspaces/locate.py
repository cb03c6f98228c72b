"""Where a workspace is: as it was named, or as this computer remembers; and regions that are asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpukiln.clouds.base import Cloud
from gpukiln.errors import GpukilnError, PartialError, UsageError
from gpukiln.workspaces import lifecycle, local_state
from gpukiln.workspaces.lifecycle import ExistingWorkspace
from gpukiln.workspaces.local_state import RegionRecord

Connect = Callable[[str, str], Cloud]
"""A cloud by its name and region."""


def locate(name: str, cloud: str, region: str, connect: Connect) -> tuple[Cloud, ExistingWorkspace | None]:
    """A workspace in the region that is named, or where this computer remembers it.

    Args:
        cloud: Its name; empty: as this computer remembers.
        region: Empty: as this computer remembers.

    Returns:
        The cloud, and the workspace; None: this computer remembered one, and it is gone.

    Raises:
        UsageError: No workspace is named, it is in several regions, or there is none of the name.
    """
    if not name:
        raise UsageError("no workspace is named", hint="`invoke workspace.list` shows them")
    remembered = [
        (record.cloud, record.region)
        for record in local_state.regions_with(name)
        if cloud in ("", record.cloud)
    ]
    places = remembered
    if region:
        # The typed region takes precedence over what is remembered, which may be old; of a cloud that is not
        # named what is remembered still counts.
        places = [(cloud or (places[0][0] if places else "embedded"), region)]
    if len(places) > 1:
        text = " and ".join(f"{cloud_name} {region_name}" for cloud_name, region_name in places)
        raise UsageError(f"{name} is in {text}", hint="--region and --cloud say which")
    if not places:
        records = local_state.regions()
        names = ", ".join(sorted({workspace.name for record in records for workspace in record.workspaces}))
        raise UsageError(
            f"this computer knows no workspace {name!r}" + (f"; it knows {names}" if names else ""),
            hint="`invoke workspace.list --refresh --regions REGION --cloud CLOUD` asks a region",
        )
    connected = connect(*places[0])
    if workspaces := lifecycle.find_workspaces(connected, name):
        return connected, workspaces[0]
    # So that the next list does not show what is gone.
    local_state.refresh(connected)
    if places[0] not in remembered:
        raise missing(connected, name)
    return connected, None


def missing(cloud: Cloud, name: str) -> UsageError:
    """The error of a workspace that a region does not have."""
    return UsageError(
        f"{cloud.name} has no workspace {name} in {cloud.region}",
        hint="`invoke workspace.list --refresh` shows the workspaces of a region",
    )


def places_to_ask(
    records: Sequence[RegionRecord], cloud: str, regions: Sequence[str], default_region: str
) -> list[tuple[str, str]]:
    """Cloud and region of each place that a list asks: those named, else those remembered, else the default.

    Args:
        cloud: Only this one; empty: any.
    """
    places = [(cloud or "embedded", region) for region in regions]
    if not regions:
        places = [(record.cloud, record.region) for record in records if cloud in ("", record.cloud)]
    # Each region once, in the order typed.
    return list(dict.fromkeys(places)) or [(cloud or "embedded", default_region)]


def refreshed(
    places: Sequence[tuple[str, str]], remembered: Sequence[RegionRecord], connect: Connect
) -> tuple[tuple[RegionRecord, ...], list[str]]:
    """Regions as they answer now, or as they are remembered where they can't be asked.

    Args:
        places: Cloud and region of each.

    Returns:
        The regions, and a line for each that could not be asked.
    """
    records: list[RegionRecord] = []
    failed: list[str] = []
    for cloud, region in places:
        try:
            records.append(local_state.refresh(connect(cloud, region)))
        except GpukilnError as error:
            # Of a single region there is nothing else to show: its own error and exit code are the answer.
            if len(places) == 1:
                raise
            failed.append(f"{cloud} {region}: {error.message}")
            records += [record for record in remembered if (record.cloud, record.region) == (cloud, region)]
    return tuple(records), failed


def require_all(failed: Sequence[str]) -> None:
    """Raises PartialError where a region could not be asked."""
    if failed:
        raise PartialError(
            f"{len(failed)} of the regions could not be asked, and are shown as they are remembered",
            details=tuple(failed),
            hint="--cloud and --regions say which are asked",
        )
