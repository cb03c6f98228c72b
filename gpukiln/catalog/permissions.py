"""Which calls of AWS's API each job makes, and on what."""

from functools import cache
from typing import Literal

from gpukiln.catalog.load import data
from gpukiln.typed import load, strict

# skopeo pushes images, and EC2 itself uses the key of an encrypted volume through a grant.
Caller = Literal["gpukiln", "skopeo", "ec2"]


@strict
class Job:
    """Something that a role is made for.

    Args:
        what: The commands that it is.
        includes: Another job whose calls it makes too, or an empty string.
    """

    what: str
    includes: str = ""


@strict
class ApiCall:
    """One call.

    Args:
        action: As IAM names it, for example ec2:RunInstances.
        jobs: The jobs that make it; a job that includes one of them makes it too.
        by: Who makes it.
    """

    action: str
    jobs: tuple[str, ...]
    by: Caller = "gpukiln"


@strict
class Statement:
    """Calls with the same resources and conditions.

    Args:
        sid: Its name in a policy, letters and digits.
        resources: Templates of ARNs.
        has_tag: A tag that the resource must have.
        gets_tag: A tag that the request must give.
        creating: For CreateTags: the calls that make what is tagged.
        needs: An option without which the statement is left out.
        region: The region where the calls are made, whatever regions the policy is for, or an empty string.
        through: A service that must make the call on the caller's behalf, or an empty string.
        tag_keys: The only tags that the request may give; none: any.
        bound: Whether the role must have the permissions boundary of workspaces.
        passed_to: The service that a role may be passed to, or an empty string.
        for_aws: Whether a grant must be for a service of AWS.
    """

    sid: str
    resources: tuple[str, ...]
    calls: tuple[ApiCall, ...]
    # Conditions by name: cloud.policy turns each into IAM's condition keys.
    has_tag: str = ""
    gets_tag: str = ""
    creating: tuple[str, ...] = ()
    needs: Literal["", "kms_keys", "module_cache", "node_role", "sign_key"] = ""
    region: str = ""
    # kms:ViaService: a key may be used by EBS for the caller, and not by the caller directly.
    through: str = ""
    tag_keys: tuple[str, ...] = ()
    bound: bool = False
    passed_to: Literal["", "ec2"] = ""
    for_aws: bool = False


@cache
def jobs() -> dict[str, Job]:
    """Every job by its name."""
    return load(dict[str, Job], data("permissions")["jobs"], where="permissions.yaml: jobs")


@cache
def statements() -> tuple[Statement, ...]:
    """Every statement, whatever job it is for."""
    return load(
        tuple[Statement, ...], data("permissions")["statements"], where="permissions.yaml: statements"
    )
