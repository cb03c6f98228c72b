"""IAM policies for the calls that gpukiln makes, and trust policies for the roles that have them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpukiln.catalog import permissions
from gpukiln.errors import UsageError
from gpukiln.typed import unknown

VERSION = "2012-10-17"
ISSUER = "token.actions.githubusercontent.com"
_ACCOUNT = re.compile(r"\d{12}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# CreateRepository of ECR's API reference, repositoryName
_ECR_NAME = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_IDS = re.compile(r"\d+/\d+", re.ASCII)
# Requests to these carry the region of the partition's control plane, wherever the caller works (AWS
# Organizations user guide, "Deny access to AWS based on the requested AWS Region": exempt by NotAction).
GLOBAL_SERVICES = frozenset({"iam", "organizations", "sts"})
ROLE_PATH = "/gpukiln/workspace/"
"""Of the roles and instance profiles of workspaces: roles with it have the boundary, see `boundary_arn`."""
BOUNDARY_PATH, BOUNDARY_NAME = "/gpukiln/", "gpukiln-workspace-boundary"
BOUNDARY_JOB = "workspace-boundary"
OWN_ACCOUNT = "${aws:PrincipalAccount}"  # IAM replaces it by the caller's

Document = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """What a policy is limited to; an empty field sets no limit.

    Args:
        channels: The channels that may be moved.
        repository: The repository of ECR that may be pushed to; empty: those below gpukiln/.
        kms_keys: ARNs of the keys that encrypt volumes and copies, except AWS's own `aws/ebs`; empty: the
            policy has no calls on keys.
        module_cache: The s3://BUCKET/PREFIX of --module-cache; empty: the policy has no calls of S3.
        sign_key: ARN of the KMS key that signs statements; empty: the policy has no calls on it.
        node_role: ARN of the role of a cluster's nodes; empty: the policy has no call on it.
    """

    account: str = ""
    regions: Sequence[str] = ()
    channels: Sequence[str] = ()
    repository: str = ""
    kms_keys: Sequence[str] = ()
    module_cache: str = ""
    sign_key: str = ""
    node_role: str = ""

    @property
    def partition(self) -> str:
        """The partition of the regions."""
        return partition_of(self.regions)


def partition_of(regions: Sequence[str]) -> str:
    """The partition that regions are in: aws, aws-cn or aws-us-gov.

    Args:
        regions: Their names; none means aws.

    Returns:
        The partition's name in ARNs.

    Raises:
        UsageError: The regions are in several partitions; no role spans two.

    >>> partition_of(["us-west-2", "eu-west-1"])
    'aws'
    >>> partition_of(["cn-north-1"])
    'aws-cn'
    """
    partitions = {_partition(region) for region in regions} or {"aws"}
    if len(partitions) > 1:
        raise UsageError(
            f"{', '.join(regions)} are in {' and '.join(sorted(partitions))}: no role spans partitions"
        )
    return partitions.pop()


@cache
def _partition(region: str) -> str:
    from botocore.session import Session  # noqa: PLC0415 - slow to import

    return str(Session().get_partition_for_region(region))


def policy(jobs: Iterable[str], scope: Scope) -> Document:
    """The smallest policy that jobs need.

    Args:
        jobs: Names of permissions.yaml, for example build.
        scope: What it is limited to.

    Raises:
        UsageError: A job does not exist, or a field of the scope is malformed.
    """
    job_names = _with_included(jobs)
    _check(scope)
    statements = []
    for statement in permissions.statements():
        if statement.needs and not getattr(scope, statement.needs):
            continue
        if actions := sorted({call.action for call in statement.calls if job_names & set(call.jobs)}):
            statements.append(_statement(statement, actions, scope))
    return {"Version": VERSION, "Statement": statements}


def trust(
    account: str, repository: str, *, ids: str = "", branch: str = "", environment: str = ""
) -> Document:
    """A trust policy for the workflows of one GitHub repository, on one branch or in one environment.

    Args:
        account: The account of the role and of its OIDC provider.
        repository: OWNER/NAME.
        ids: OWNER-ID/REPOSITORY-ID. GitHub puts them into the subject for repositories that were created or
            renamed on 2026-07-15 or later or opted in (GitHub changelog, 2026-04-23, "Immutable subject
            claims for GitHub Actions OIDC tokens").
        branch: The branch that jobs without an environment must run on.
        environment: The environment that the job must run in, instead of a branch.

    Returns:
        The trust policy.

    Raises:
        UsageError: One of them is malformed, or not exactly one of branch and environment is given.
    """
    if not _ACCOUNT.fullmatch(account):
        raise UsageError(f"{account!r} is not an account id", hint="twelve digits: --account 111122223333")
    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"{repository!r} is not OWNER/NAME", hint="--repository OWNER/NAME")
    if ids and not _IDS.fullmatch(ids):
        hint = f"gh api repos/{repository} --jq '\"\\(.owner.id)/\\(.id)\"'"
        raise UsageError(f"{ids!r} is not OWNER-ID/REPOSITORY-ID", hint=hint)
    if bool(branch) == bool(environment):
        raise UsageError(
            "exactly one of --branch and --environment is needed", hint="for example --branch main"
        )
    # A wildcard in StringEquals is a literal; a reader of the policy would take it for a pattern.
    if wild := [text for text in (branch, environment) if set(text) & set("*?:")]:
        raise UsageError(
            f"{wild[0]!r} is a pattern, not a name", hint="a trust policy names one branch or environment"
        )
    names, numbers = repository.split("/"), ids.split("/") if ids else []
    parts = [f"{name}@{number}" for name, number in zip(names, numbers, strict=True)] if numbers else names
    context = f"environment:{environment}" if environment else f"ref:refs/heads/{branch}"
    return {
        "Version": VERSION,
        "Statement": [
            {
                "Sid": "GitHubActions",
                "Effect": "Allow",
                "Principal": {"Federated": f"arn:aws:iam::{account}:oidc-provider/{ISSUER}"},
                "Action": "sts:AssumeRoleWithWebIdentity",
                "Condition": {
                    "StringEquals": {
                        f"{ISSUER}:aud": "sts.amazonaws.com",
                        f"{ISSUER}:sub": f"repo:{'/'.join(parts)}:{context}",
                    }
                },
            }
        ],
    }


def boundary_arn(partition: str, account: str) -> str:
    """ARN of the managed policy that is the permissions boundary of workspaces' roles.

    Args:
        account: Its id, or `OWN_ACCOUNT` in a condition.
    """
    return f"arn:{partition}:iam::{account}:policy{BOUNDARY_PATH}{BOUNDARY_NAME}"


def ec2_service(partition: str) -> str:
    """EC2's service principal, for trust policies and for iam:PassedToService."""
    return "ec2.amazonaws.com.cn" if partition == "aws-cn" else "ec2.amazonaws.com"


def _with_included(jobs: Iterable[str]) -> set[str]:
    known = permissions.jobs()
    job_names = set(jobs)
    if wrong := sorted(job_names - set(known)):
        raise UsageError(
            f"unknown job {', '.join(wrong)}",
            hint=unknown("job", wrong[0], known).hint or "--for takes these jobs, separated by commas",
            details=tuple(f"{name}: {job.what}" for name, job in known.items()),
        )
    if not job_names:
        raise UsageError("the policy needs a job", hint=f"--for {','.join(known)}, or some of these")
    return job_names | {known[name].includes for name in job_names if known[name].includes}


def _check(scope: Scope) -> None:
    if scope.account and not _ACCOUNT.fullmatch(scope.account):
        raise UsageError(
            f"{scope.account!r} is not an account id", hint="twelve digits: --account 111122223333"
        )
    if scope.repository and not _ECR_NAME.fullmatch(scope.repository):
        raise UsageError(
            f"{scope.repository!r} is not the name of a repository of ECR",
            hint="pass the name without the registry, for example --repository gpukiln/runner-gpu",
        )
    keys = [*scope.kms_keys, *([scope.sign_key] if scope.sign_key else ())]
    if wrong := [key for key in keys if not re.fullmatch(r"arn:aws[\w-]*:kms:\S+:key/\S+", key)]:
        raise UsageError(
            f"{wrong[0]!r} is not the ARN of a key", hint="pass the key's ARN: IAM accepts no alias"
        )
    if scope.node_role and not re.fullmatch(r"arn:aws[\w-]*:iam::\d{12}:role/[\w+=,.@/-]+", scope.node_role):
        raise UsageError(
            f"{scope.node_role!r} is not the ARN of a role",
            hint="for example --node-role arn:aws:iam::111122223333:role/nodes",
        )
    if scope.module_cache and not re.fullmatch(r"s3://[a-z0-9.-]+(/.*)?", scope.module_cache):
        raise UsageError(
            f"--module-cache {scope.module_cache} is not s3://BUCKET/PREFIX",
            hint="for example s3://BUCKET/PREFIX",
        )


def _statement(statement: permissions.Statement, actions: list[str], scope: Scope) -> Document:
    condition: dict[str, dict[str, Any]] = {}
    # Null=false: the tag exists, whatever its value is (IAM user guide, "Condition operators").
    if statement.has_tag:
        condition.setdefault("Null", {})[f"aws:ResourceTag/{statement.has_tag}"] = "false"
    if statement.gets_tag:
        condition.setdefault("Null", {})[f"aws:RequestTag/{statement.gets_tag}"] = "false"
    if statement.tag_keys:
        condition["ForAllValues:StringEquals"] = {"aws:TagKeys": list(statement.tag_keys)}
    # Roles without the boundary would let the holder of --for workspace make an administrator.
    if statement.bound:
        arn = boundary_arn(scope.partition, scope.account or OWN_ACCOUNT)
        condition.setdefault("StringEquals", {})["iam:PermissionsBoundary"] = arn
    # A role that can be passed to any service is a way to its permissions through that service.
    if statement.passed_to:
        condition.setdefault("StringEquals", {})["iam:PassedToService"] = ec2_service(scope.partition)
    # Grants only for AWS services such as EBS: without it the holder of the policy can give the key to
    # anybody.
    if statement.for_aws:
        condition["Bool"] = {"kms:GrantIsForAWSResource": "true"}
    if statement.creating:
        condition.setdefault("StringEquals", {})["ec2:CreateAction"] = list(statement.creating)
    if statement.through:
        suffix = "amazonaws.com.cn" if scope.partition == "aws-cn" else "amazonaws.com"
        services = [f"{statement.through}.{region}.{suffix}" for region in scope.regions or ("*",)]
        condition.setdefault("StringLike", {})["kms:ViaService"] = services
    elif statement.needs == "sign_key":  # its ARN names its region, which need not be one of the images
        pass
    elif scope.regions and not {action.partition(":")[0] for action in actions} <= GLOBAL_SERVICES:
        regions = [statement.region] if statement.region else list(scope.regions)
        condition.setdefault("StringEquals", {})["aws:RequestedRegion"] = regions
    return {
        "Sid": statement.sid,
        "Effect": "Allow",
        "Action": actions,
        "Resource": [arn for template in statement.resources for arn in _arns(template, scope)],
        **({"Condition": condition} if condition else {}),
    }


def _arns(template: str, scope: Scope) -> list[str]:
    if template == "{key}":
        return list(scope.kms_keys)
    if template == "{sign_key}":
        return [scope.sign_key]
    if template == "{node_role}":
        return [scope.node_role]
    bucket, _, prefix = scope.module_cache.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    values = {
        "partition": scope.partition,
        "region": scope.regions[0] if len(scope.regions) == 1 else "*",
        "account": scope.account or "*",
        "repository": scope.repository or "gpukiln/*",
        "bucket": bucket,
        "prefix": f"{prefix}/" if prefix else "",
    }
    channels = scope.channels or ("*",)
    # dict.fromkeys: a template without {channel} gives the same ARN for each channel.
    return list(dict.fromkeys(template.format(**values, channel=channel) for channel in channels))
