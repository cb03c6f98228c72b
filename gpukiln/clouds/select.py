"""The one place that knows which clouds there are."""

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError

CLOUDS = ("embedded", "aws")


def make_cloud(name: str, region: str, *, profile: str | None = None, subnet_id: str | None = None) -> Cloud:
    """A cloud by its name; nothing is started or asked yet.

    Args:
        name: embedded or aws.
        region: The region.
        profile: AWS profile, for aws.
        subnet_id: Subnet of the machines, for aws.

    Returns:
        The cloud.

    Raises:
        UsageError: There is no such cloud or region.
    """
    from gpukiln.images.plan import check_region  # noqa: PLC0415 - reads boto3's list of regions

    check_region(region)
    if name == "aws":
        from gpukiln.clouds.aws import AwsCloud  # noqa: PLC0415

        return AwsCloud(region, profile=profile, subnet_id=subnet_id)
    if name == "embedded":
        from gpukiln.clouds.embedded.cloud import EmbeddedCloud  # noqa: PLC0415

        return EmbeddedCloud(region)
    raise UsageError(f"there is no cloud {name!r}", hint=f"clouds: {', '.join(CLOUDS)}")
