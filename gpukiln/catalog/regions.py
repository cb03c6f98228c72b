"""The regions that AWS has, from botocore's own data: no network, profile or account is needed."""

from functools import cache

from gpukiln.errors import UsageError
from gpukiln.typed import unknown

PARTITIONS = ("aws", "aws-us-gov", "aws-cn")  # the others are closed to almost everybody


def check_region(name: str) -> str:
    """Refuse a region that AWS does not have.

    Raises:
        UsageError: The message names the nearest ones.

    >>> check_region("us-west-2")
    'us-west-2'
    >>> "cn-north-1" in regions()
    True
    """
    if not name:
        raise UsageError("--region is missing", hint="for example --region us-west-2")
    if name not in regions():
        raise unknown("region", name, regions())
    return name


@cache
def regions() -> frozenset[str]:
    """Every region with EC2."""
    from botocore.loaders import create_loader  # noqa: PLC0415 - slow to import, and few commands come here
    from botocore.regions import EndpointResolver  # noqa: PLC0415 - as above

    # botocore's endpoints are of the day of its release: a newer region needs a newer botocore.
    resolver = EndpointResolver(create_loader().load_data("endpoints"))
    return frozenset(
        region for name in PARTITIONS for region in resolver.get_available_endpoints("ec2", name)
    )
