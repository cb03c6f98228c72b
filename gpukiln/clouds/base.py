"""The interface of a cloud, and gpukiln's errors for those of boto3."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gpukiln.errors import UnavailableError

# One error has several codes, by service and by age of the API (boto3 reports what the service sent).
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
    ): "AWS throttles this account's calls: wait a minute, then run the same command again",
    (
        *("ResourceLimitExceeded", "AMIQuotaExceeded", "SnapshotLimitExceeded"),
        *("SnapshotCopyLimitExceeded", "MaxLimitExceeded"),
    ): "a quota is used up: request an increase, or remove old images with `invoke ami.prune`",
}


class NoCredentialsError(UnavailableError):
    """boto3 finds no credentials for the cloud."""


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
        """Whether a component whose source is unreachable from this computer is an error.

        False: the machines share this computer's network and package archive, so versions are looked up here,
        and the plan leaves out a component whose source this computer can't reach.
        """

    @property
    def subnet_id(self) -> str | None:
        """Subnet for the machines that bake and verify; None takes the default VPC's."""

    @property
    def ssh_cidr(self) -> str:
        """Network that may connect to SSH of those machines, in CIDR form; a login needs the build's key too.

        Raises:
            GpukilnError: It can't be detected: the user has to pass it.
        """

    @property
    def has_gpus(self) -> bool:
        """Whether machines of GPU instance types have GPUs; if so, one without GPUs fails verification."""

    @property
    def keeps_stages(self) -> bool:
        """Whether a bake keeps its stages by default, because their snapshots cost nothing on this cloud."""

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
        """Whether Systems Manager reaches a machine that has no reachable SSH port."""

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
        """Endpoint at which its machines call the API with their role's keys; empty: AWS's endpoints."""

    def environment(self) -> dict[str, str]:
        """Environment in which AWS's tools talk to this cloud."""

    def snapshot_disk(self, snapshot_id: str) -> Path | None:
        """Path of a snapshot's disk on this computer; None: the EBS direct APIs read it."""

    def prepare(self, image_id: str, say: Callable[[str], None]) -> None:
        """Make sure that a base image can be started without delay.

        Args:
            image_id: The AMI that is going to be started.
        """


@contextmanager
def explain_aws_errors(action: str) -> Iterator[None]:
    """Turn boto3's errors into gpukiln's.

    Args:
        action: What the block does, for example "look up the base image".

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
    # Before BotoCoreError, whose subclass it is.
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
    # A proxy or portal that answers with HTML is a ResponseParserError, which is no BotoCoreError.
    except (BotoCoreError, ResponseParserError) as error:
        raise UnavailableError(f"can't {action}: {error}") from error
