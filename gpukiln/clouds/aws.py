"""The user's AWS account."""

import functools
import ipaddress
import socket
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from gpukiln.catalog import bases
from gpukiln.clouds.base import explain_aws_errors
from gpukiln.errors import RefusedError, UnavailableError, UsageError

# AWS's own answer to "from which address do I come" (IPv4), which its documents use for security groups
ADDRESS_URL = "https://checkip.amazonaws.com"
SSH_CIDR_HINT = (
    "pass the network that SSH connections come from, for example --ssh-cidr 203.0.113.7/32; with a VPN, a "
    "bastion or a private subnet it is that network; 0.0.0.0/0 allows every address"
)


def refuse_local_endpoint(endpoint: str, service: str) -> None:
    """Refuse an endpoint on this computer: in a shell that `cloud.env` has set up it is the embedded cloud's.

    Args:
        endpoint: URL of the endpoint.
        service: The service that the client calls there.

    Raises:
        RefusedError: The endpoint's host resolves to a loopback address.

    >>> refuse_local_endpoint("https://ec2.us-west-2.amazonaws.com", "ec2")
    >>> refuse_local_endpoint("http://127.0.0.1:4566", "ec2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    gpukiln.errors.RefusedError: --cloud aws is your account, but ec2's endpoint ... is on this computer
    """
    host = urlsplit(endpoint).hostname or ""
    # Suffixes of the partitions aws and aws-cn, and of the dual-stack endpoints: no DNS lookup for these.
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws")):
        return
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return  # the name does not resolve: the first call reports it
    if any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        raise RefusedError(
            f"--cloud aws is your account, but {service}'s endpoint {endpoint} is on this computer",
            hint="unset AWS_ENDPOINT_URL and the keys that `cloud.env` has set (or correct endpoint_url in "
            "AWS's config file), or use --cloud embedded",
        )


class AwsCloud:
    """EC2 in the user's account, reached with the credentials that boto3 finds.

    Args:
        region: The region to build in.
        profile: Name of an AWS profile, or None for the environment's.
        subnet_id: Subnet for the machines that build and verify; None takes the default VPC's.
        ssh_cidr: Network that may connect to SSH of those machines; None: this computer's public address.
    """

    name = "aws"
    strict_sources = True
    has_gpus = True
    has_session_manager = True
    keeps_stages = False
    ssh_port = 22
    machine_endpoint = ""

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
        self._asked_cidr = ssh_cidr

    @functools.cached_property
    def ssh_cidr(self) -> str:
        """Network that may connect to SSH of the machines, in CIDR form.

        Raises:
            UsageError: The subnet gives no public addresses, so this computer's address is not the source.
            UnavailableError: The lookup of this computer's public address failed.
        """
        if self._asked_cidr:
            return self._asked_cidr
        if self.subnet_id and not self._gives_public_addresses(self.subnet_id):
            raise UsageError(
                f"machines in {self.subnet_id} get no public address, so SSH does not reach them from this "
                "computer's public address",
                hint=SSH_CIDR_HINT,
            )
        return f"{_public_address()}/32"

    def _gives_public_addresses(self, subnet_id: str) -> bool:
        with explain_aws_errors(f"look at {subnet_id}"):
            [subnet] = self.client("ec2").describe_subnets(SubnetIds=[subnet_id])["Subnets"]
        return bool(subnet["MapPublicIpOnLaunch"])

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

        # "standard" also retries throttling and transient errors, which "legacy" does not all cover
        # (botocore, docs "Retries").
        retries: Any = {"mode": "standard", "total_max_attempts": attempts}
        client = self._session.client(service, region_name=self.region, config=Config(retries=retries))
        refuse_local_endpoint(client.meta.endpoint_url, service)
        return client

    def in_region(self, region: str) -> "AwsCloud":
        """The same account in another region, with the same session: an MFA code is needed once.

        Args:
            region: Name of the region.
        """
        other = AwsCloud(region, profile=self.profile, subnet_id=self.subnet_id, ssh_cidr=self._asked_cidr)
        # A cached_property accepts the value of another instance: the same credentials, no second login.
        other._session = self._session
        return other

    def environment(self) -> dict[str, str]:
        """Environment in which AWS's tools talk to this account."""
        return {"AWS_REGION": self.region, **({"AWS_PROFILE": self.profile} if self.profile else {})}

    def address(self, instance: dict[str, Any]) -> str:
        """Where SSH reaches an instance.

        Args:
            instance: As DescribeInstances gives it.
        """
        return str(instance.get("PublicIpAddress") or instance["PrivateIpAddress"])

    def snapshot_disk(self, snapshot_id: str) -> None:
        """See `Cloud.snapshot_disk`: None, because a disk of AWS is not on this computer."""

    def prepare(self, image_id: str, say: Callable[[str], None]) -> None:
        """Nothing to do: AWS's public images are ready to start.

        Args:
            image_id: The AMI that is going to be started.
            say: Not used.
        """


def _public_address() -> str:
    """This computer's public IPv4 address; not that of an HTTP proxy, because SSH does not go through one."""
    # An empty ProxyHandler ignores http_proxy and https_proxy of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(ADDRESS_URL, timeout=5) as answer:
            # A captive portal may answer with a page: more than an address is not read.
            text = answer.read(100).decode(errors="replace").strip()
        return str(ipaddress.IPv4Address(text))
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"the lookup of this computer's public address failed: {ADDRESS_URL}: {error}", hint=SSH_CIDR_HINT
        ) from error
