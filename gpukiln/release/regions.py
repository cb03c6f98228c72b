"""The same work in several regions at once, with one result each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import GpukilnError, UnavailableError

T = TypeVar("T")
AT_ONCE = 40  # more regions than AWS has: a copy that takes an hour must not delay another region
# boto3's sessions are not thread-safe while they make clients (boto3 documentation, "Multithreading").
_making = threading.Lock()


@dataclass(frozen=True)
class Site:
    """One region of the account.

    Args:
        region: Its name.
        stopping: Set when the command is interrupted: waits end, and no new change begins.
        cloud: The cloud in this region.
    """

    region: str
    ec2: Any
    ssm: Any
    stopping: threading.Event
    cloud: Cloud

    def client(self, service: str) -> Any:
        """A client of another service.

        Args:
            service: For example "autoscaling".
        """
        with _making:
            return self.cloud.client(service)

    def check_interrupted(self) -> None:
        """Raise when the command was interrupted; called between two changes.

        Raises:
            UnavailableError: It was interrupted.
        """
        if self.stopping.is_set():
            raise UnavailableError("interrupted", hint="run the same command again: it resumes")

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than until the command is interrupted.

        Args:
            seconds: How long.
        """
        # an Event instead of sleep, so that Ctrl-C ends the wait at once
        self.stopping.wait(seconds)
        self.check_interrupted()


def make_sites(cloud: Cloud, regions: Iterable[str]) -> list[Site]:
    """Make the clients of regions.

    Args:
        cloud: The cloud, in any region.
        regions: Names of regions; one that is named twice counts once.
    """
    # One event for all sites: Ctrl-C reaches every region's thread.
    stopping, sites = threading.Event(), []
    with explain_aws_errors("reach the cloud"):
        for region in dict.fromkeys(regions):
            # The cloud at hand has its credentials checked already.
            there = cloud if region == cloud.region else cloud.in_region(region)
            with _making:
                sites.append(Site(region, there.client("ec2"), there.client("ssm"), stopping, there))
    return sites


@dataclass(frozen=True)
class RegionOutcome(Generic[T]):
    """The outcome of one region: a value or an error."""

    value: T | None = None
    error: GpukilnError | None = None

    def require(self) -> T:
        """The value.

        Raises:
            GpukilnError: The work failed.
        """
        if self.error:
            raise self.error
        return cast(T, self.value)


def each(sites: Iterable[Site], action: str, work: Callable[[Site], T]) -> dict[str, RegionOutcome[T]]:
    """Do the same work in every region at once; a failure in one is its outcome and stops no other.

    Args:
        action: The action, for the message of an error of AWS.

    Returns:
        The outcomes by region.

    Raises:
        KeyboardInterrupt: After every region has ended its current call.
    """

    def guarded(site: Site) -> RegionOutcome[T]:
        try:
            site.check_interrupted()
            with explain_aws_errors(f"{action} in {site.region}"):
                return RegionOutcome(work(site))
        except GpukilnError as error:
            return RegionOutcome(error=error)

    chosen = list(sites)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {site.region: pool.submit(guarded, site) for site in chosen}
        try:
            return {region: future.result() for region, future in running.items()}
        # Ctrl-C: leaving the pool waits for its threads, which end at their next check
        except BaseException:
            for site in chosen:
                site.stopping.set()
            raise
