"""IAM: the least policy for each job on AWS, and the trust policy for GitHub's workflows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_json, say, words
from gpukiln.errors import UsageError

if TYPE_CHECKING:
    from gpukiln.clouds.iam import Document, Scope

ACCOUNT = "the account id, twelve digits"


@command(
    help={
        "for": "jobs, separated by commas: build, verify, release, prune, sweep, push, export, import, "
        "offer, refresh, workspace; or workspace-boundary, which workspaces need once per account",
        "account": f"{ACCOUNT}; default: any",
        "regions": "the regions, separated by commas; default: any",
        "channels": "the channels that may be moved, separated by commas; default: every",
        "repository": "the repository of ECR that may be pushed to; default: those below gpukiln/",
        "kms_keys": "ARNs of the keys of --kms-keys and of the account's default key, separated by commas",
        "module_cache": "the s3://BUCKET/PREFIX that ami.build gets with --module-cache",
        "sign_key": "ARN of the key of AWS KMS that signs statements (--sign-key awskms:...), or that a "
        "channel trusts by its ARN",
        "secrets": "with workspace-boundary: ARNs of secrets and names of parameters (/team/*), separated by "
        "commas, that workspaces may read; default: none",
        "artifact_cache": "with workspace-boundary: the s3://BUCKET/PREFIX of workspaces; default: none",
    }
)
def policy(
    _: Any,
    for_: str,
    account: str = "",
    regions: str = "",
    channels: str = "",
    repository: str = "",
    kms_keys: str = "",
    module_cache: str = "",
    sign_key: str = "",
    secrets: str = "",
    artifact_cache: str = "",
) -> None:
    """Print the least IAM policy for what gpukiln does on AWS, as JSON."""
    from gpukiln.clouds.iam import BOUNDARY_JOB, Scope
    from gpukiln.clouds.iam import policy as make
    from gpukiln.images.channels import load_channel
    from gpukiln.release.options import region_names

    for channel in words(channels):
        load_channel(channel)
    scope = Scope(
        account=account,
        regions=region_names(regions),
        channels=words(channels),
        repository=repository,
        kms_keys=words(kms_keys),
        module_cache=module_cache,
        sign_key=sign_key,
    )
    if BOUNDARY_JOB in words(for_):
        print_json(_boundary(words(for_), scope, words(secrets), artifact_cache))
        return
    if secrets or artifact_cache:
        raise UsageError(f"--secrets and --artifact-cache are for --for {BOUNDARY_JOB}")
    print_json(make(words(for_), scope))


def _boundary(jobs: Sequence[str], scope: Scope, secrets: Sequence[str], artifact_cache: str) -> Document:
    from gpukiln.workspaces.iam import boundary

    if len(jobs) > 1:
        raise UsageError(
            f"{', '.join(jobs)}: a permissions boundary is a policy of its own",
            hint=f"--for {jobs[0]} and --for {jobs[-1]} in two calls",
        )
    return boundary(scope, secrets, artifact_cache)


@command(
    help={
        "account": ACCOUNT,
        "repository": "OWNER/NAME on GitHub",
        "ids": "OWNER-ID/REPOSITORY-ID, for repositories whose subject has them: those since 2026-07-15",
        "branch": "the branch whose workflows may take the role",
        "environment": "the environment whose jobs may, instead of a branch",
    }
)
def trust(
    _: Any, account: str, repository: str, ids: str = "", branch: str = "", environment: str = ""
) -> None:
    """Print the trust policy of a role for GitHub's workflows, as JSON."""
    from gpukiln.clouds.iam import trust as make

    print_json(make(account, repository, ids=ids, branch=branch, environment=environment))
    if not ids:
        say("a repository created or renamed since 2026-07-15, or opted in, has ids in its subject: --ids")
