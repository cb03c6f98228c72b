"""Homes of embedded clouds that several processes have at once; a cloud's addresses follow from its path."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gpukiln.clouds.embedded.layout import FIRST_NETWORK, NETWORKS, Layout

TRIES = 10_000


def apart(
    folder: Path, worker: int, workers: int, regions: Sequence[str], others: Iterable[Path] = ()
) -> Path:
    """The path of a home in a folder whose cloud shares no address with those of other processes.

    Each process has a contiguous part of all networks, not every nth one: the numbers are CRCs, so that those
    of two regions differ in the same low bits for every home, and with four processes none would have a home.

    Args:
        worker: Number of the process, from 0.
        workers: How many there are.
        others: The homes that the process has.

    Raises:
        AssertionError: There is none.
    """
    taken = {network for home in others for network in networks(home, regions)}
    for number in range(TRIES):
        home = folder / str(number)
        found = networks(home, regions)
        parts = {network * workers // NETWORKS for network in found}
        if parts == {worker} and len(set(found)) == len(regions) and taken.isdisjoint(found):
            return home
    raise AssertionError(f"{folder} has no home for process {worker} of {workers} in {TRIES} tries")


def networks(home: Path, regions: Sequence[str]) -> list[int]:
    """Numbers of the networks of a home's regions, from 0 to NETWORKS - 1."""
    return [int(Layout(home).vpc_cidr(region).split(".")[1]) - FIRST_NETWORK for region in regions]
