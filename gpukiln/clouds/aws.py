"""The user's AWS account."""

import functools
import ipaddress
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from gpukiln.catalog import bases
from gpukiln.errors import RefusedError


def refuse_this_computer(endpoint: str, service: str) -> None:
    """Refuse an endpoint on this computer: in a shell that `cloud.env` has set up it is the embedded cloud's.

    Args:
        endpoint: Its address.
        service: The service that is reached there.

    Raises:
        RefusedError: It leads to this computer.
    """
    host = urlsplit(endpoint).hostname or ""
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws")):
        return
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return  # nobody answers there: the first call says so
    if any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        raise RefusedError(
            f"--cloud aws is your account, and {service} is to be reached at {endpoint}, on this computer",
            hint="unset AWS_ENDPOINT_URL and the keys that `cloud.env` has set (or mend endpoint_url in AWS's"
            " config file), or take --cloud embedded",
        )


class AwsCloud:
    """EC2 in the user's account, reached with the credentials that boto3 finds.

    Args:
        region: The region to build in.
        profile: Name of an AWS profile, or None for the environment's.
        subnet_id: Subnet for the machines that build and verify; None takes the default VPC's.
        ssh_cidr: Who may reach SSH of those machines; None lets everybody who has the build's key.
    """

    name = "aws"
    strict_sources = True
    has_gpus = True
    keeps_stages = False
    ssh_port = 22

    def __init__(
        self,
        region: str,
        *,
        profile: str | None = None,
        subnet_id: str | None = None,
        ssh_cidr: str | None = None,
    ) -> None:
        self.region = region
        self.profile = profile
        self.subnet_id = subnet_id
        self.ssh_cidr = ssh_cidr or "0.0.0.0/0"

    @property
    def default_base(self) -> str:
        """The base image to take when none is named."""
        return bases.default_base(self.name)

    @functools.cached_property
    def _session(self) -> Any:
        import boto3  # noqa: PLC0415 - slow to import

        return boto3.Session(profile_name=self.profile, region_name=self.region)

    def client(self, service: str, *, attempts: int = 8) -> Any:
        """A boto3 client.

        Args:
            service: For example "ec2".
            attempts: How often a call is tried that was throttled or met a fault of the service.
        """
        from botocore.config import Config  # noqa: PLC0415 - slow to import

        retries: Any = {"mode": "standard", "total_max_attempts": attempts}
        client = self._session.client(service, region_name=self.region, config=Config(retries=retries))
        refuse_this_computer(client.meta.endpoint_url, service)
        return client

    def _private_endpoint(self) -> str:
        """The address of EC2 that environment or config file name, or an empty string."""
        from botocore.config import Config  # noqa: PLC0415 - slow to import

        ignoring = Config(ignore_configured_endpoint_urls=True)  # type: ignore[call-arg]  # the stubs lack it
        usual = self._session.client("ec2", region_name=self.region, config=ignoring).meta.endpoint_url
        found = str(self.client("ec2").meta.endpoint_url)
        return "" if found == usual else found

    def in_region(self, region: str) -> "AwsCloud":
        """The same account in another region; a login that asks for a code is asked for once.

        Args:
            region: Name of the region.
        """
        other = AwsCloud(region, profile=self.profile, subnet_id=self.subnet_id, ssh_cidr=self.ssh_cidr)
        other._session = self._session
        return other

    def environment(self) -> dict[str, str]:
        """Environment in which Packer talks to this account."""
        return {"AWS_REGION": self.region, **({"AWS_PROFILE": self.profile} if self.profile else {})}

    def packer_variables(self) -> dict[str, Any]:
        """Values of the template's variables that say which cloud it is.

        The SDK of Packer 1.6.6 (aws-sdk-go 1) reads no endpoint from environment or config file
        (aws/aws-sdk-go issue 4942), that of newer plugins (aws-sdk-go-v2) does: told, both take this one.
        """
        endpoint = self._private_endpoint()
        return {"ec2_endpoint": endpoint} if endpoint else {}

    def address(self, instance: dict[str, Any]) -> str:
        """Where SSH reaches an instance.

        Args:
            instance: As DescribeInstances gives it.
        """
        return str(instance.get("PublicIpAddress") or instance["PrivateIpAddress"])

    def prepare(self, image_id: str, say: Callable[[str], None]) -> None:
        """Nothing to do: public images are there.

        Args:
            image_id: The AMI that is going to be started.
            say: Not used.
        """
