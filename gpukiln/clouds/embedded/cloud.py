"""The embedded cloud as a `Cloud`."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpukiln.catalog import bases
from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded.client import ensure_server
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.network import API
from gpukiln.state import state_home

NO_CONFIG = {"profile": None, "config_file": os.devnull, "credentials_file": os.devnull}
UNSET = (  # variables for the user's own cloud, which take precedence over those for this one
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
    *(f"AWS_ENDPOINT_URL_{service}" for service in ("EC2", "SSM", "STS", "ECR", "EBS", "AUTO_SCALING")),
    *(f"AWS_ENDPOINT_URL_{service}" for service in ("SERVICE_QUOTAS", "PRICING")),
)


class EmbeddedCloud:
    """An EC2 on this machine; its server is started on the first call.

    Args:
        region: Any AWS region's name.
        layout: Its files; None: those of this computer.
    """

    name = "embedded"
    strict_sources = False
    has_gpus = False
    has_session_manager = False
    keeps_stages = True
    subnet_id = None
    # Machines have addresses in loopback.
    ssh_cidr = "127.0.0.0/8"
    machine_endpoint = API

    def __init__(self, region: str, *, layout: Layout | None = None) -> None:
        self.region = region
        self.layout = layout or Layout(state_home())
        self._clients: dict[tuple[str, int], Any] = {}

    @property
    def default_base(self) -> str:
        """The base image to take when none is named."""
        return bases.default_base(self.name)

    @functools.cached_property
    def _server(self) -> dict[str, Any]:
        return ensure_server(self.layout)

    @property
    def ssh_port(self) -> int:
        """Port of SSH on a machine's private address."""
        return int(self._server["ssh_port"])

    def client(self, service: str, *, attempts: int = 1) -> Any:
        """A boto3 client of the embedded endpoint, cached because boto3 takes long to create one.

        Args:
            service: For example "ec2".
            attempts: How often a call is tried that met an error of the service.
        """
        key = (service, attempts)
        if key not in self._clients:
            self._clients[key] = self._new_client(service, attempts)
        return self._clients[key]

    @functools.cached_property
    def _session(self) -> Any:
        import boto3  # noqa: PLC0415 - slow to import
        from botocore.session import Session  # noqa: PLC0415 - slow to import

        # The user's profile, config and credentials are for another cloud, and a profile named there may not
        # exist.
        nobody = {name: (None, None, value, None) for name, value in NO_CONFIG.items()}
        return boto3.session.Session(region_name=self.region, botocore_session=Session(nobody))

    def _new_client(self, service: str, attempts: int) -> Any:
        from botocore.config import Config  # noqa: PLC0415

        return self._session.client(
            service,
            region_name=self.region,
            endpoint_url=self._server["url"],
            aws_access_key_id=self.layout.access_key,
            aws_secret_access_key="embedded",  # noqa: S106 - the server checks the key's id alone
            config=Config(
                # CreateImage answers when the disk is copied, which can take minutes.
                read_timeout=600,
                retries={"total_max_attempts": attempts},
                # AWS_USE_FIPS_ENDPOINT of the user's environment would change the endpoint.
                use_fips_endpoint=False,
                use_dualstack_endpoint=False,
            ),
        )

    def in_region(self, region: str) -> "EmbeddedCloud":
        """The same server in another region.

        Args:
            region: Name of the region.
        """
        other = EmbeddedCloud(region, layout=self.layout)
        other._server = self._server
        return other

    def environment(self) -> dict[str, str]:
        """Environment in which AWS's tools talk to this cloud; unset a variable with an empty value."""
        return {
            "AWS_ENDPOINT_URL": str(self._server["url"]),
            "AWS_ACCESS_KEY_ID": self.layout.access_key,
            "AWS_SECRET_ACCESS_KEY": "embedded",
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            # SDKs would otherwise look for credentials at 169.254.169.254 of this computer.
            "AWS_EC2_METADATA_DISABLED": "true",
            **dict.fromkeys(UNSET, ""),
        }

    def address(self, instance: dict[str, Any]) -> str:
        """Where SSH reaches an instance.

        Args:
            instance: As DescribeInstances gives it.
        """
        return str(instance["PrivateIpAddress"])

    def snapshot_disk(self, snapshot_id: str) -> Path:
        """See `Cloud.snapshot_disk`."""
        return self.layout.snapshot(snapshot_id)

    def prepare(self, image_id: str, say: Callable[[str], None]) -> None:
        """Make sure that a base image can be started without delay.

        Args:
            image_id: The AMI that is going to be started.
        """
        base = base_image.current_base(self.layout)
        if image_id == base.image_id and not base_image.is_built(self.layout, base):
            self.layout.create()
            base_image.build_base(self.layout, base, say=say)
