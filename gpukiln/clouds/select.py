"""The one place that knows which clouds there are."""

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
    """A cloud by its name; nothing is started or asked yet.

    Args:
        name: embedded or aws.
        profile: AWS profile, for aws.
        subnet_id: Subnet of the machines, for aws.
        ssh_cidr: Who may reach SSH of the machines, for aws.

    Raises:
        UsageError: There is no such cloud or region.
    """
    from gpukiln.catalog.regions import check_region  # noqa: PLC0415 - reads boto3's list of regions

    check_region(region)
    if name == "aws":
        from gpukiln.clouds.aws import AwsCloud  # noqa: PLC0415

        return AwsCloud(region, profile=profile, subnet_id=subnet_id, ssh_cidr=check_cidr(ssh_cidr))
    if given := {"--profile": profile, "--subnet-id": subnet_id, "--ssh-cidr": ssh_cidr}:
        for option, value in given.items():
            if value and name == "embedded":
                raise UsageError(f"{option} is for --cloud aws", hint="leave it out, or add --cloud aws")
    if name == "embedded":
        from gpukiln.clouds.embedded.cloud import EmbeddedCloud  # noqa: PLC0415

        return EmbeddedCloud(region)
    raise UsageError(f"there is no cloud {name!r}", hint=f"clouds: {', '.join(CLOUDS)}")


def check_cidr(text: str | None) -> str | None:
    """Refuse what is no network in CIDR form.

    Args:
        text: For example 203.0.113.7/32, or None.

    Returns:
        The same.

    Raises:
        UsageError: It is none.
    """
    import ipaddress  # noqa: PLC0415 - only with the option

    try:
        return str(ipaddress.ip_network(text)) if text else None
    except ValueError as error:
        raise UsageError(f"--ssh-cidr: {error}", hint="for example 203.0.113.7/32") from None
