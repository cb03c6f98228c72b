"""What a workspace's machine may do on AWS: a role of its own, with the least that its parts need."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.iam import VERSION, partition_of
from gpukiln.errors import RefusedError, UsageError
from gpukiln.instances.tags import tag_list, tags_of
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.tags import MANAGED, MANAGED_TAG, OWN_TAGS, WORKSPACE_TAG, workspace_tags

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
SECRET = re.compile(r"arn:aws[\w-]*:secretsmanager:[\w-]+:\d{12}:secret:\S+")
PARAMETER = re.compile(r"/?[\w.-]+(/[\w.-]+)*")
EFS = re.compile(r"fs-[0-9a-f]{8,40}")
CACHE = re.compile(r"s3://(?P<bucket>[a-z0-9.-]{3,63})(?:/(?P<prefix>[^*?]*))?")


def instance_profile(cloud: Cloud, wanted: Workspace) -> str:
    """The instance profile of a workspace: the one that was named, else one of its own, made or mended.

    IAM shows what is new only after a while: a launch that does not know it yet is tried again.

    Returns:
        Its name; empty where the machine gets no rights.

    Raises:
        RefusedError: Somebody else has a role of that name.
        UsageError: A secret or the cache is none.
        UnavailableError: The cloud refused.
    """
    if wanted.capabilities.identity_mode == "none":
        return ""
    if wanted.instance_profile_name:
        return wanted.instance_profile_name
    document = policy(wanted)
    name, tags = role_name(wanted), tag_list(workspace_tags(wanted, PART))
    iam = cloud.client("iam")
    with explain_aws_errors("give the workspace's machine its rights"):
        try:
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust(wanted)), Tags=tags)
        except iam.exceptions.EntityAlreadyExistsException:
            _require_ours(iam, wanted, name)
        iam.put_role_policy(RoleName=name, PolicyName=POLICY, PolicyDocument=json.dumps(document))
        # One that is there is of a call that was interrupted: the role of that name is ours.
        with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
            iam.create_instance_profile(InstanceProfileName=name, Tags=tags)
        roles = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
        if not roles:
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return name


def remove_profile(cloud: Cloud, wanted: Workspace) -> bool:
    """Remove the profile and the role of a workspace; False: there was none.

    Raises:
        RefusedError: Somebody else has a role of that name.
        UnavailableError: The cloud refused.
    """
    name, iam = role_name(wanted), cloud.client("iam")
    missing = iam.exceptions.NoSuchEntityException
    with explain_aws_errors("remove the rights of the workspace's machine"):
        try:
            _require_ours(iam, wanted, name)
        except missing:
            return False
        with contextlib.suppress(missing):
            for role in iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]:
                iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role["RoleName"])
            iam.delete_instance_profile(InstanceProfileName=name)
        with contextlib.suppress(missing):
            iam.delete_role_policy(RoleName=name, PolicyName=POLICY)
        iam.delete_role(RoleName=name)  # last: by its tags the rest is known as ours
    return True


def role_name(wanted: Workspace) -> str:
    """IAM's names are for all regions of an account."""
    return f"gpukiln-workspace-{wanted.region}-{wanted.workspace_name}"


def trust(wanted: Workspace) -> dict[str, Any]:
    """Who takes the role: EC2, for the machine."""
    suffix = "amazonaws.com.cn" if partition_of([wanted.region]) == "aws-cn" else "amazonaws.com"
    return {
        "Version": VERSION,
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": f"ec2.{suffix}"}, "Action": "sts:AssumeRole"}
        ],
    }


def policy(wanted: Workspace) -> dict[str, Any]:
    """What the machine may do.

    Raises:
        UsageError: A secret or the cache is none.
    """
    partition = partition_of([wanted.region])
    statements: list[dict[str, Any]] = [
        {
            "Sid": "TagItself",
            "Effect": "Allow",
            "Action": "ec2:CreateTags",
            "Resource": f"arn:{partition}:ec2:{wanted.region}:*:instance/*",
            "Condition": {
                "StringEquals": {f"aws:ResourceTag/{WORKSPACE_TAG}": wanted.workspace_name},
                "ForAllValues:StringEquals": {"aws:TagKeys": list(OWN_TAGS)},
            },
        },
        {"Sid": "SessionManager", "Effect": "Allow", "Action": list(SESSION_MANAGER), "Resource": "*"},
    ]
    secrets, parameters = _secrets(wanted)
    if secrets:
        statements.append(
            {
                "Sid": "ReadSecrets",
                "Effect": "Allow",
                "Action": "secretsmanager:GetSecretValue",
                "Resource": secrets,
            }
        )
    if parameters:
        resources = [
            f"arn:{partition}:ssm:{wanted.region}:*:parameter/{name.lstrip('/')}" for name in parameters
        ]
        statements.append(
            {"Sid": "ReadParameters", "Effect": "Allow", "Action": "ssm:GetParameter", "Resource": resources}
        )
    return {"Version": VERSION, "Statement": [*statements, *_cache(wanted, partition)]}


def _secrets(wanted: Workspace) -> tuple[list[str], list[str]]:
    """ARNs of Secrets Manager, and names of parameters."""
    secrets, parameters = [], []
    for variable, reference in wanted.capabilities.secrets.items():
        if SECRET.fullmatch(reference):
            secrets.append(reference)
        elif PARAMETER.fullmatch(reference):
            parameters.append(reference)
        else:
            raise UsageError(
                f"what stands for the secret {variable} is no reference",  # it may be the secret: not shown
                hint="an ARN of Secrets Manager, or the name of an SSM parameter; never the secret itself",
            )
    return sorted(secrets), sorted(parameters)


def _cache(wanted: Workspace, partition: str) -> list[dict[str, Any]]:
    cache = wanted.capabilities.artifact_cache
    if not cache or EFS.fullmatch(cache):  # EFS is reached by the network, not by rights
        return []
    found = CACHE.fullmatch(cache)
    if not found:
        raise UsageError(f"artifact_cache {cache!r} is none", hint="s3://BUCKET/PREFIX, or an EFS id fs-...")
    bucket, prefix = f"arn:{partition}:s3:::{found['bucket']}", (found["prefix"] or "").strip("/")
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


def _require_ours(iam: Any, wanted: Workspace, name: str) -> None:
    tags = tags_of(iam.get_role(RoleName=name)["Role"])
    if tags.get(MANAGED_TAG) != MANAGED or tags.get(WORKSPACE_TAG) != wanted.workspace_name:
        raise RefusedError(
            f"the role {name} is none of ours: it lacks the tag {MANAGED_TAG}={MANAGED}",
            hint="another workspace name, or remove that role",
        )
