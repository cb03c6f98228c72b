"""The steps that a release and a rollback share: make regions ready, move pointers, retire the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from gpukiln.images import pointer as pointers
from gpukiln.images.channels import Channel
from gpukiln.images.pointer import PointerVersion
from gpukiln.progress import Progress
from gpukiln.release.images import find_images, retire
from gpukiln.release.log import RegionResult, Release, ReleaseLog
from gpukiln.release.regions import Site, each


def retirement(channel: Channel, *, at_once: frozenset[str] = frozenset()) -> Callable[[str], timedelta]:
    """The time until a replaced image is deprecated.

    Args:
        channel: The channel's rules.
        at_once: Ids of images that must not be launched any more.

    Returns:
        A function of the image id.
    """
    return lambda image_id: timedelta(0 if image_id in at_once else channel.deprecate_after_days)


class ReleaseRun:
    """A running release or rollback: results, record and progress.

    Args:
        started: Its record before the first step.
        records: The store of the record.
    """

    def __init__(self, started: Release, records: ReleaseLog, progress: Progress, sites: list[Site]) -> None:
        self._release, self._records, self._progress, self._sites = started, records, progress, sites
        self._results = {result.region: result for result in started.regions}

    def all_steps(
        self,
        title: str,
        prepare: Callable[[Site], str],
        *,
        moved: Callable[[Site, str], None],
        retire: Callable[[str], timedelta],
    ) -> Release:
        """Make every region ready, then move every pointer, then retire images that no channel points at.

        Where a region fails in a step, the others finish that step, and no region begins the next.

        Args:
            title: The title of the first step.
            prepare: Makes the image of a region ready and returns its id.
            moved: Checks a region after its pointer was moved to the image with this id.
            retire: Returns the time until a replaced image is deprecated.

        Returns:
            The state of each region.
        """
        pointer, build = self._release.pointer, self._release.build
        try:
            self._record_state("running")
            if (
                self._run_step(
                    title, prepare, lambda result, value: replace(result, state="ready", image_id=value)
                )
                and self._run_step(
                    f"point {pointer.channel} at {build}",
                    lambda site: self._point_channel(site, moved),
                    lambda result, _: replace(result, state="published", published=True),
                )
                and self._run_step(
                    "retire what it replaces",
                    lambda site: self._retire(site, retire),
                    lambda result, _: replace(result, state="done"),
                )
            ):
                return self._record_state("done")
        except BaseException:
            # The record says so, and the next run of the same command completes it.
            self._record_state("interrupted")
            raise
        # `partial` only where at least one region has moved.
        all_failed = len(self._release.failures) == len(self._results)
        return self._record_state("failed" if all_failed else "partial")

    def _point_channel(self, site: Site, moved: Callable[[Site, str], None]) -> None:
        """Point the channel at the image by one PutParameter, unless the parameter is up to date."""
        # The parameter also has every region of the release, by which one region leads to the others: where a
        # region is added, it is written in all of them.
        pointer, image_id = self._release.pointer, self._results[site.region].image_id
        # The history, not the value: it has the regions of the last release, too.
        versions, regions = pointers.history(site.ssm, pointer), tuple(self._results)
        before, named = (versions[-1].image_id, versions[-1].regions) if versions else ("", ())
        if before != image_id or set(named) != set(regions):
            site.check_interrupted()
            version = PointerVersion(
                image_id, self._release.build, self._release.action, before, regions, pointers.current_user()
            )
            pointers.write(site.ssm, pointer, version, pause=site.pause)
        pointers.ensure_tags(site.ssm, pointer)
        # Also where nothing was written: a killed run may not have got this far.
        moved(site, image_id)

    def _retire(self, site: Site, when: Callable[[str], timedelta]) -> None:
        """Retire the images that this channel pointed at and no channel points at any more."""
        # Another channel may still point at it; it stays live then.
        live = set(pointers.read_all(site.ssm).values())
        # Of the whole history: a retirement that a kill prevented is made up for.
        old = {version.image_id for version in pointers.history(site.ssm, self._release.pointer)} - live
        for image_id, image in find_images(site, old).items():
            retire(site, image, after=when(image_id))

    def _run_step(
        self,
        title: str,
        work: Callable[[Site], Any],
        ended: Callable[[RegionResult, Any], RegionResult],
    ) -> bool:
        """Run a step in every region that has not failed yet; returns whether no region has failed."""
        left = [site for site in self._sites if self._results[site.region].state != "failed"]
        with self._progress.step(f"{title} ({len(left)} of {len(self._sites)} regions)"):
            for region, outcome in each(left, title, work).items():
                result = self._results[region]
                if outcome.error:
                    self._results[region] = result.failed(outcome.error)
                    self._progress.fail()
                else:
                    self._results[region] = ended(result, outcome.value)
        self._record_state("running")
        return all(result.state != "failed" for result in self._results.values())

    def _record_state(self, state: str) -> Release:
        self._release = replace(
            self._release.with_results(self._results),
            state=state,
            durations_s=dict(self._progress.durations),
        )
        self._records.write(self._release)
        return self._release
