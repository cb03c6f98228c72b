"""The repository that an image is pushed to: of ECR, with its login, or of any other registry."""

import contextlib
import ipaddress
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import UnavailableError, UsageError

# ECR user guide, Private registries: the host names of the API, of FIPS and of dual-stack endpoints
ECR_HOST = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr(-fips)?\.(?P<region>[a-z0-9-]+)"
    r"\.(amazonaws\.com(\.cn)?|on\.aws|on\.amazonwebservices\.com\.cn)"
)
# lower case, as OCI's distribution-spec and ECR require
PATH = re.compile(r"[a-z0-9]+([._/-]+[a-z0-9]+)*")
UNTAGGED_DAYS = 14
LIFECYCLE = {
    "rules": [
        {
            "rulePriority": 1,
            "description": f"images without a tag go after {UNTAGGED_DAYS} days",
            "selection": {
                "tagStatus": "untagged",
                "countType": "sinceImagePushed",
                "countUnit": "days",
                "countNumber": UNTAGGED_DAYS,
            },
            "action": {"type": "expire"},
        }
    ]
}


@dataclass(frozen=True)
class Address:
    """The parts of --repository.

    Args:
        host: Host and port, or an empty string for ECR in the cloud's account and region.
        path: The repository's name.
        account: Its AWS account, when the host names one.
        region: Its AWS region, when the host names one.
    """

    host: str
    path: str
    account: str = ""
    region: str = ""

    @property
    def is_ecr(self) -> bool:
        """Whether it is a repository of ECR."""
        return not self.host or bool(self.account)


@dataclass(frozen=True)
class Repository:
    """A repository that can be pushed to.

    Args:
        name: host[:port]/path.
        token: User and password in base64, for ECR; never shown.
        missing: Whether it does not exist yet, in a dry run.
    """

    name: str
    token: str | None = field(default=None, repr=False)
    missing: bool = False

    @property
    def host(self) -> str:
        """Host and port of its registry."""
        return self.name.partition("/")[0]

    @property
    def plain_http(self) -> bool:
        """Whether it is reached without TLS: only on this machine itself, as Docker does."""
        name = re.sub(r":\d+$", "", self.host).strip("[]")
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(name).is_loopback
        return name == "localhost"

    @contextlib.contextmanager
    def login(self) -> Iterator[Path | None]:
        """Write its login to a file in the form of container tools.

        Yields:
            The file, in a private folder that is removed afterwards; None without a token.
        """
        if self.token is None:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="gpukiln-login-") as folder:  # mode 0700
            file = Path(folder) / "auth.json"
            file.write_text(json.dumps({"auths": {self.host: {"auth": self.token}}}))
            yield file


def parse(text: str) -> Address:
    """Parse a repository's name or URI.

    >>> parse("gpukiln/runner-gpu")
    Address(host='', path='gpukiln/runner-gpu', account='', region='')
    >>> parse("111122223333.dkr.ecr.us-west-2.amazonaws.com/runner-gpu").region
    'us-west-2'
    >>> parse("localhost:5000/runner-gpu").host
    'localhost:5000'

    Args:
        text: A name of ECR (gpukiln/runner-gpu), or host[:port]/path.

    Returns:
        Its parts.

    Raises:
        UsageError: It is neither, or it has a tag.
    """
    # As Docker decides: the first part is a host when it has a dot or a port, or is localhost.
    text = text.removeprefix("https://")
    first, slash, rest = text.partition("/")
    has_host = bool(slash) and (re.search(r"[.:]", first) is not None or first == "localhost")
    host, path = (first, rest) if has_host else ("", text)
    if not PATH.fullmatch(path):
        hint = "write a name such as gpukiln/runner-gpu, or host:port/name, without a tag"
        raise UsageError(f"--repository {text!r} is no repository", hint=hint)
    if match := ECR_HOST.fullmatch(host):
        return Address(host, path, account=match["account"], region=match["region"])
    return Address(host, path)


def find(
    address: Address, cloud: Cloud | None, *, create: bool, dry_run: bool, say: Callable[[str], None]
) -> Repository:
    """Find a repository, log in to it, and create it when asked to.

    Args:
        address: The parts of --repository.
        cloud: The cloud of ECR; not needed for another registry.
        create: Whether a missing repository is created.
        dry_run: Create nothing.

    Raises:
        UsageError: It can't be created here, or belongs to another cloud.
        UnavailableError: It is missing, or the cloud refuses.
    """
    if cloud is None or not address.is_ecr:
        if create:
            raise UsageError(
                f"--create is for ECR, and {address.host} is another registry",
                hint="leave it out: most registries create a repository with the first push",
            )
        return Repository(f"{address.host}/{address.path}")
    if address.account and cloud.name == "embedded":
        raise UsageError(f"{address.host} belongs to AWS, and --cloud is embedded", hint="add --cloud aws")
    of_account = {"registryId": address.account} if address.account else {}
    ecr = cloud.client("ecr")
    with explain_aws_errors(f"use the repository {address.path}"):
        try:
            repository = ecr.describe_repositories(repositoryNames=[address.path], **of_account)[
                "repositories"
            ][0]
        except ecr.exceptions.RepositoryNotFoundException:
            if not create:
                raise UnavailableError(
                    f"ECR in {cloud.region} has no repository {address.path}", hint="--create makes it"
                ) from None
            if dry_run:
                say(f"would create {address.path}: immutable tags, scan on push")
                return Repository(f"{address.host or 'ECR'}/{address.path}", missing=True)
            repository = ecr.create_repository(
                repositoryName=address.path,
                # A tag that was deployed must not become another image.
                imageTagMutability="IMMUTABLE",
                imageScanningConfiguration={"scanOnPush": True},
                **of_account,
            )["repository"]
            say(f"created {repository['repositoryUri']}: immutable tags, scan on push")
        if create and not dry_run:  # also after a run that ended between the two calls
            _ensure_lifecycle(ecr, address.path, of_account, say)
        # IMMUTABLE_WITH_EXCLUSION is immutable for gpukiln's tags unless they are excluded.
        if not str(repository["imageTagMutability"]).startswith("IMMUTABLE"):
            say(f"warning: the tags of {address.path} are mutable: others can move them")
        whose = {"registryIds": [address.account]} if address.account else {}
        # The token is valid for twelve hours (ECR API reference), far longer than a push.
        answer = ecr.get_authorization_token(**whose)
    return Repository(repository["repositoryUri"], answer["authorizationData"][0]["authorizationToken"])


def _ensure_lifecycle(ecr: Any, path: str, of_account: dict[str, str], say: Callable[[str], None]) -> None:
    """Set a lifecycle policy where the repository has none."""
    try:
        ecr.get_lifecycle_policy(repositoryName=path, **of_account)
    except ecr.exceptions.LifecyclePolicyNotFoundException:
        text = json.dumps(LIFECYCLE)
        ecr.put_lifecycle_policy(repositoryName=path, lifecyclePolicyText=text, **of_account)
        say(f"images without a tag go after {UNTAGGED_DAYS} days")
