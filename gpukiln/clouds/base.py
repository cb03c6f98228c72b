"""What a cloud is to the code above it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gpukiln.errors import UnavailableError

ADVICE = {  # error codes of EC2, SSM and STS, with the next step
    (
        *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId"),
        *("UnrecognizedClientException",),
    ): "the credentials are no longer valid: log in again (aws sso login), then run the same command again",
    (
        *("UnauthorizedOperation", "AccessDenied", "AccessDeniedException"),
    ): "let the role call {call}, then run the same command again",
    (
        *("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyUpdates"),
        "TooManyRequestsException",  # Service Quotas
    ): "AWS takes no more calls for now: wait a minute, then run the same command again",
    (
        *("ResourceLimitExceeded", "AMIQuotaExceeded", "SnapshotLimitExceeded"),
        *("SnapshotCopyLimitExceeded", "MaxLimitExceeded"),
    ): "a quota is used up: ask for more, or remove what is old with `invoke ami.prune`",
}


class NoCredentialsError(UnavailableError):
    """Nobody can ask the cloud: there are no credentials."""


class Cloud(Protocol):
    """An EC2 that machines can be started on: the user's account, or the embedded one."""

    @property
    def name(self) -> str:
        """The word after --cloud: aws or embedded."""

    @property
    def region(self) -> str:
        """The region that its clients talk to."""

    @property
    def default_base(self) -> str:
        """The base image to take when none is named."""

    @property
    def strict_sources(self) -> bool:
        """Whether machines have a network of their own, on which every source must be reachable.

        False: they share this machine's network and package archive. Versions can be looked up here, and a
        component whose source this machine can't reach is left out.
        """

    @property
    def subnet_id(self) -> str | None:
        """Subnet for the machines that bake and verify; None takes the default VPC's."""

    @property
    def ssh_cidr(self) -> str:
        """Who may reach SSH of those machines, in CIDR form; nobody gets in without the build's own key.

        Raises:
            GpukilnError: It can't be found out, and has to be named.
        """

    @property
    def has_gpus(self) -> bool:
        """Whether a machine of a GPU instance type has GPUs: then one without is a failure."""

    @property
    def keeps_stages(self) -> bool:
        """Whether a bake keeps its stages when nothing was said: their snapshots cost nothing here."""

    def client(self, service: str, *, attempts: int = 8) -> Any:
        """A boto3 client.

        Args:
            service: For example "ec2".
            attempts: How often a call is tried that was throttled or met a fault of the service.
        """

    def in_region(self, region: str) -> "Cloud":
        """The same cloud, with the same credentials, in another region.

        Args:
            region: Name of the region.
        """

    @property
    def has_session_manager(self) -> bool:
        """Whether a machine that nobody can connect to is reached by Systems Manager."""

    @property
    def ssh_port(self) -> int:
        """Port of SSH on its machines."""

    def address(self, instance: dict[str, Any]) -> str:
        """Where SSH reaches an instance.

        Args:
            instance: As DescribeInstances gives it.
        """

    @property
    def machine_endpoint(self) -> str:
        """Where its machines reach the API with the keys of their role; empty: AWS's own endpoints."""

    def environment(self) -> dict[str, str]:
        """Environment in which AWS's tools talk to this cloud."""

    def snapshot_disk(self, snapshot_id: str) -> Path | None:
        """Where a snapshot's disk lies on this machine; None: it is read by the EBS direct APIs."""

    def prepare(self, image_id: str, say: Callable[[str], None]) -> None:
        """Make sure that a base image can be started without delay.

        Args:
            image_id: The AMI that is going to be started.
        """


@contextmanager
def explain_aws_errors(action: str) -> Iterator[None]:
    """Turn the errors of boto3 into ours.

    Args:
        action: What was tried, for example "look up the base image".

    Yields:
        Nothing.

    Raises:
        NoCredentialsError: There are no credentials.
        UnavailableError: The cloud could not be reached, or it refused.
    """
    from botocore import exceptions  # noqa: PLC0415 - slow to import
    from botocore.exceptions import BotoCoreError, ClientError, ProfileNotFound  # noqa: PLC0415
    from botocore.parsers import ResponseParserError  # noqa: PLC0415

    try:
        yield
    except exceptions.NoCredentialsError as error:
        hint = "log in (aws sso login), set AWS_PROFILE, or use --cloud embedded"
        raise NoCredentialsError(f"can't {action}: no AWS credentials", hint=hint) from error
    except ProfileNotFound as error:
        hint = "`aws configure list-profiles` lists them; --profile or AWS_PROFILE names one"
        raise UnavailableError(f"can't {action}: {error}", hint=hint) from error
    except ClientError as error:
        code, text = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
        hint = next((advice for codes, advice in ADVICE.items() if code in codes), "")
        raise UnavailableError(
            f"can't {action}: {error.operation_name} answered {code}: {text}",
            hint=hint.format(call=error.operation_name),
        ) from error
    except (BotoCoreError, ResponseParserError) as error:
        raise UnavailableError(f"can't {action}: {error}") from error
