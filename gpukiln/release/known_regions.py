"""The regions that a command looks at: named ones, or those of this computer's releases and builds."""

from collections.abc import Callable

from gpukiln.errors import UsageError
from gpukiln.images.builds import Builds
from gpukiln.release.log import ReleaseLog
from gpukiln.release.options import region_names


def known_regions(cloud: str, text: str, say: Callable[[str], None]) -> list[str]:
    """The regions that were named, else those this computer released to, else that of its last build.

    Args:
        cloud: The cloud's name.
        text: Names separated by commas; empty: none is named.
        say: Gets a notice of regions that were not named.

    Raises:
        UsageError: A region does not exist, or this computer knows none on the cloud.
    """
    if named := region_names(text):
        return named
    if released := ReleaseLog().regions(cloud):
        say(f"--regions {','.join(released)}: where this machine has released")
        return released
    for build in Builds().all():
        if (record := build.read()).plan.cloud == cloud:
            say(f"--regions {record.plan.region}: of this machine's last build, {record.build_id}")
            return [record.plan.region]
    raise UsageError(
        f"this machine has built and released nothing on {cloud}, so it knows no region to look at",
        hint="--regions us-west-2: one region of a release is enough, it names the others",
    )
