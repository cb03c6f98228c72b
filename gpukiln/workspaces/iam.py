"""What a workspace's machine may do on AWS: a role of its own, with the least that its parts need."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.iam import (
    BOUNDARY_JOB,
    BOUNDARY_NAME,
    BOUNDARY_PATH,
    ROLE_PATH,
    VERSION,
    Scope,
    boundary_arn,
    ec2_service,
    partition_of,
)
from gpukiln.clouds.tags import MANAGED, MANAGED_TAG, OWN_TAGS, WORKSPACE_TAG
from gpukiln.errors import RefusedError, UnavailableError, UsageError
from gpukiln.instances.tags import tag_list, tags_of
from gpukiln.workspaces.contract import Workspace, workspace_tags

PART = "rights"
POLICY = "gpukiln-workspace"
# Systems Manager user guide, "Create a custom IAM role for Session Manager": they take no resource.
SESSION_MANAGER = (
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)
# Loose on purpose: these patterns only keep a pasted secret or a wildcard out of a policy; IAM checks the
# rest.
SECRET = re.compile(r"arn:aws[\w-]*:secretsmanager:[\w-]+:\d{12}:secret:\S+")
PARAMETER = re.compile(r"/?[\w.-]+(/[\w.-]+)*")
EFS = re.compile(r"fs-[0-9a-f]{8,40}")
CACHE = re.compile(r"s3://(?P<bucket>[a-z0-9.-]{3,63})(?:/(?P<prefix>[^*?]*))?")


def instance_profile(cloud: Cloud, workspace: Workspace) -> str:
    """The instance profile of a workspace: the named one, else one of its own, created or repaired.

    EC2 sees a new profile only after some seconds: the launch is then tried again. A role without the
    permissions boundary, which earlier versions created, is replaced: no machine uses it now.

    Returns:
        Its name; empty where the machine gets no permissions.

    Raises:
        RefusedError: The role of that name is not managed by gpukiln.
        UsageError: A secret or the cache has another form.
        UnavailableError: The cloud refused.
    """
    if workspace.capabilities.identity_mode == "none":
        return ""
    if workspace.instance_profile_name:
        return workspace.instance_profile_name
    # Before any call: a mistake in the contract must not leave a half-made role.
    document = policy(workspace)
    name, tags = role_name(workspace), tag_list(workspace_tags(workspace, PART))
    iam = cloud.client("iam")
    with explain_aws_errors("create the role of the workspace's machine"):
        account = cloud.client("sts").get_caller_identity()["Account"]
        bound = boundary_arn(partition_of([workspace.region]), account)
        try:
            _create_role(iam, workspace, bound)
        except iam.exceptions.EntityAlreadyExistsException:
            role = _require_managed(iam, workspace, name)
            there = role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn")
            if (role["Path"], there) != (ROLE_PATH, bound):
                remove_profile(cloud, workspace)
                _create_role(iam, workspace, bound)
        iam.put_role_policy(RoleName=name, PolicyName=POLICY, PolicyDocument=json.dumps(document))
        # An existing profile is of an interrupted call: the role of that name has the workspace's tags.
        with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
            iam.create_instance_profile(InstanceProfileName=name, Path=ROLE_PATH, Tags=tags)
        roles = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
        if not roles:
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return name


def remove_profile(cloud: Cloud, workspace: Workspace) -> bool:
    """Remove the profile and the role of a workspace; False: there was none.

    Raises:
        RefusedError: The role of that name is not managed by gpukiln.
        UnavailableError: The cloud refused.
    """
    name, iam = role_name(workspace), cloud.client("iam")
    # IAM refuses to delete a profile with a role and a role with policies, hence the order below. Each part
    # may be gone already, after a removal that was interrupted.
    missing = iam.exceptions.NoSuchEntityException
    with explain_aws_errors("remove the role of the workspace's machine"):
        try:
            _require_managed(iam, workspace, name)
        except missing:
            return False
        with contextlib.suppress(missing):
            for role in iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]:
                iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role["RoleName"])
            iam.delete_instance_profile(InstanceProfileName=name)
        with contextlib.suppress(missing):
            iam.delete_role_policy(RoleName=name, PolicyName=POLICY)
        iam.delete_role(RoleName=name)  # last: an interrupted removal finds the rest by the role's tags
    return True


def role_name(workspace: Workspace) -> str:
    """IAM's names are for all regions of an account."""
    return f"gpukiln-workspace-{workspace.region}-{workspace.workspace_name}"


def trust(workspace: Workspace) -> dict[str, Any]:
    """Who takes the role: EC2, for the machine."""
    service = ec2_service(partition_of([workspace.region]))
    return {
        "Version": VERSION,
        "Statement": [{"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}],
    }


def policy(workspace: Workspace) -> dict[str, Any]:
    """What the machine may do.

    Raises:
        UsageError: A secret or the cache has another form.
    """
    partition = partition_of([workspace.region])
    of_workspace = {f"aws:ResourceTag/{WORKSPACE_TAG}": workspace.workspace_name}
    instances = f"arn:{partition}:ec2:{workspace.region}:*:instance/*"
    secrets, parameters = _secrets(workspace)
    prefix = f"arn:{partition}:ssm:{workspace.region}:*:parameter/"
    return {
        "Version": VERSION,
        "Statement": [
            _tag_itself(instances, of_workspace),
            _session_manager(),
            *_read(secrets, [prefix + name.lstrip("/") for name in parameters]),
            *_cache(workspace.capabilities.artifact_cache, partition),
        ],
    }


def boundary(scope: Scope, secrets: Sequence[str] = (), artifact_cache: str = "") -> dict[str, Any]:
    """The most that the machine of any workspace may do: the permissions boundary of their roles.

    Args:
        scope: Its account and regions.
        secrets: ARNs of secrets and names of parameters that workspaces may read; `*` at the end is any.
        artifact_cache: The s3://BUCKET/PREFIX that they may read and write.

    Raises:
        UsageError: The account, a secret or the cache has another form.
    """
    if not re.fullmatch(r"\d{12}", scope.account):
        raise UsageError(f"{scope.account!r} is no account id", hint="twelve digits: --account 111122223333")
    partition, region = scope.partition, scope.regions[0] if len(scope.regions) == 1 else "*"
    arns = [secret for secret in secrets if SECRET.fullmatch(secret)]
    names = [secret for secret in secrets if secret not in arns]
    if wrong := [name for name in names if not PARAMETER.fullmatch(name.removesuffix("*").rstrip("/"))]:
        raise UsageError(
            f"{wrong[0]!r} is neither a secret nor a parameter",
            hint="ARNs of Secrets Manager and names of SSM parameters, for example /team/*",
        )
    instances = f"arn:{partition}:ec2:{region}:{scope.account}:instance/*"
    prefix = f"arn:{partition}:ssm:{region}:{scope.account}:parameter/"
    regional = [
        _tag_itself(instances, {f"aws:ResourceTag/{MANAGED_TAG}": MANAGED}),
        _session_manager(),
        *_read(arns, [prefix + name.lstrip("/") for name in names]),
    ]
    # Only regional services: a bucket of another region is a valid cache, so the S3 statements stay without
    # the condition.
    for statement in regional if scope.regions else ():
        equal = statement.setdefault("Condition", {}).setdefault("StringEquals", {})
        equal["aws:RequestedRegion"] = list(scope.regions)
    return {"Version": VERSION, "Statement": [*regional, *_cache(artifact_cache, partition)]}


def _tag_itself(instances: str, tags: dict[str, str]) -> dict[str, Any]:
    return {
        "Sid": "TagItself",
        "Effect": "Allow",
        "Action": "ec2:CreateTags",
        "Resource": instances,
        "Condition": {
            "StringEquals": dict(tags),
            # A machine may change its reports (stage, use, driver) and no tag that says whose it is.
            "ForAllValues:StringEquals": {"aws:TagKeys": list(OWN_TAGS)},
        },
    }


def _session_manager() -> dict[str, Any]:
    return {"Sid": "SessionManager", "Effect": "Allow", "Action": list(SESSION_MANAGER), "Resource": "*"}


def _read(secrets: list[str], parameters: list[str]) -> list[dict[str, Any]]:
    asked = (
        ("ReadSecrets", "secretsmanager:GetSecretValue", secrets),
        ("ReadParameters", "ssm:GetParameter", parameters),
    )
    return [
        {"Sid": sid, "Effect": "Allow", "Action": action, "Resource": resources}
        for sid, action, resources in asked
        if resources
    ]


def _secrets(workspace: Workspace) -> tuple[list[str], list[str]]:
    """ARNs of Secrets Manager, and names of parameters."""
    secrets, parameters = [], []
    for variable, reference in workspace.capabilities.secrets.items():
        if SECRET.fullmatch(reference):
            secrets.append(reference)
        elif PARAMETER.fullmatch(reference):
            parameters.append(reference)
        else:
            raise UsageError(
                f"the value of the secret {variable} is no reference",  # it may be the secret: not shown
                hint="an ARN of Secrets Manager, or the name of an SSM parameter; never the secret itself",
            )
    return sorted(secrets), sorted(parameters)


def _cache(cache: str | None, partition: str) -> list[dict[str, Any]]:
    if not cache or EFS.fullmatch(cache):  # EFS is mounted over the network, without IAM permissions
        return []
    bucket_match = CACHE.fullmatch(cache)
    if not bucket_match:
        raise UsageError(
            f"artifact_cache is {cache!r}, wanted a bucket or an EFS file system",
            hint="s3://BUCKET/PREFIX, or an EFS id fs-...",
        )
    bucket, prefix = (
        f"arn:{partition}:s3:::{bucket_match['bucket']}",
        (bucket_match["prefix"] or "").strip("/"),
    )
    inside = f"{prefix}/*" if prefix else "*"
    return [
        {
            "Sid": "UseCache",
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject"],
            "Resource": f"{bucket}/{inside}",
        },
        {
            "Sid": "ListCache",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": bucket,
            "Condition": {"StringLike": {"s3:prefix": [inside, prefix] if prefix else ["*"]}},
        },
    ]


def _create_role(iam: Any, workspace: Workspace, bound: str) -> None:
    try:
        iam.create_role(
            RoleName=role_name(workspace),
            Path=ROLE_PATH,
            AssumeRolePolicyDocument=json.dumps(trust(workspace)),
            PermissionsBoundary=bound,
            Tags=tag_list(workspace_tags(workspace, PART)),
        )
    except iam.exceptions.NoSuchEntityException as error:
        account = bound.split(":")[4]
        raise UnavailableError(
            f"the account has no policy {bound}, which limits the permissions of workspaces",
            hint=f"an administrator creates it once: `invoke cloud.policy --for {BOUNDARY_JOB} "
            f"--account {account} >boundary.json`, `aws iam create-policy --path {BOUNDARY_PATH} "
            f"--policy-name {BOUNDARY_NAME} --policy-document file://boundary.json`",
        ) from error


def _require_managed(iam: Any, workspace: Workspace, name: str) -> dict[str, Any]:
    role: dict[str, Any] = iam.get_role(RoleName=name)["Role"]
    tags = tags_of(role)
    if tags.get(MANAGED_TAG) != MANAGED or tags.get(WORKSPACE_TAG) != workspace.workspace_name:
        raise RefusedError(
            f"the role {name} is not managed by gpukiln: it lacks the tag {MANAGED_TAG}={MANAGED}",
            hint="choose another workspace name, or remove that role",
        )
    return role
