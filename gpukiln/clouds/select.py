"""Makes a cloud from the value of --cloud."""

from gpukiln.catalog.regions import check_region
from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError

CLOUDS = ("embedded", "aws")


def make_cloud(
    name: str,
    region: str,
    *,
    profile: str | None = None,
    subnet_id: str | None = None,
    ssh_cidr: str | None = None,
) -> Cloud:
    """A cloud by its name; it starts no server and calls no API.

    Args:
        name: embedded or aws.
        profile: AWS profile, for aws.
        subnet_id: Subnet of the machines, for aws.
        ssh_cidr: Network that may connect to SSH of the machines, for aws.

    Raises:
        UsageError: The cloud or the region does not exist, or an option is for another cloud.
    """
    # Before any client exists: boto3 takes any text for a region and fails at the first call.
    check_region(region)
    if name == "aws":
        # Each cloud is imported when it is used: neither boto3 nor moto delays the other.
        from gpukiln.clouds.aws import AwsCloud  # noqa: PLC0415

        return AwsCloud(region, profile=profile, subnet_id=subnet_id, ssh_cidr=check_cidr(ssh_cidr))
    if given := {"--profile": profile, "--subnet-id": subnet_id, "--ssh-cidr": ssh_cidr}:
        for option, value in given.items():
            if value and name == "embedded":
                raise UsageError(f"{option} is for --cloud aws", hint="leave it out, or add --cloud aws")
    if name == "embedded":
        from gpukiln.clouds.embedded.cloud import EmbeddedCloud  # noqa: PLC0415

        return EmbeddedCloud(region)
    raise UsageError(f"unknown cloud {name!r}", hint=f"clouds: {', '.join(CLOUDS)}")


def check_cidr(text: str | None) -> str | None:
    """Check a network in CIDR form.

    Args:
        text: For example 203.0.113.7/32, or None.

    Returns:
        The network, normalised; None for None and for an empty text.

    Raises:
        UsageError: The text is not a network, or has bits set behind its prefix.

    >>> check_cidr("203.0.113.7/32")
    '203.0.113.7/32'
    >>> check_cidr("203.0.113.7/24")
    Traceback (most recent call last):
    gpukiln.errors.UsageError: --ssh-cidr: 203.0.113.7/24 has host bits set
    """
    import ipaddress  # noqa: PLC0415 - only with the option

    try:
        return str(ipaddress.ip_network(text)) if text else None
    except ValueError as error:
        raise UsageError(f"--ssh-cidr: {error}", hint="for example 203.0.113.7/32") from None
