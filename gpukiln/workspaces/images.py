"""The AMI that somebody names for a workspace: by its id, or by a build of this computer."""

from __future__ import annotations

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.images.builds import Builds
from gpukiln.state import state_home


def image_id_of(cloud: Cloud, name: str) -> str:
    """The id of an AMI.

    Args:
        name: It, or a build: its id or `last`.

    Raises:
        UsageError: There is no such build, it has no image, or its image is elsewhere.
    """
    if name.startswith("ami-"):
        return name
    record = Builds(state_home()).find(name).read()
    if record.bake is None:
        raise UsageError(
            f"build {record.build_id} has no image: it is {record.state}",
            hint="`invoke ami.list` shows others",
        )
    if (record.plan.cloud, record.plan.region) != (cloud.name, cloud.region):
        raise UsageError(
            f"the image of build {record.build_id} is on {record.plan.cloud} in {record.plan.region}, "
            f"wanted {cloud.name} in {cloud.region}",
            hint="--cloud and --region say where the workspace is to be",
        )
    return record.bake.image_id
