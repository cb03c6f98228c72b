"""IAM: the least policy for each job on AWS, and the trust policy for GitHub's workflows."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import Command, print_json, say, words
from gpukiln.errors import UsageError
from gpukiln.options import option


@dataclass(frozen=True)
class CloudPolicy(Command):
    """Print the least-privilege IAM policy of gpukiln's jobs on AWS, as JSON."""

    for_: str = option(
        "jobs, separated by commas: plan, build, verify, release, prune, sweep, push, export, import, offer, "
        "refresh, workspace, cluster; or workspace-boundary, which workspaces need once per account",
        first=True,
        required=True,
    )
    account: str = option("the account id, twelve digits; default: any")
    regions: str = option("the regions, separated by commas; default: any", also="region")
    channels: str = option("the channels that may be moved, separated by commas; default: every")
    repository: str = option("the repository of ECR that may be pushed to; default: those below gpukiln/")
    kms_keys: str = option(
        "ARNs of the keys of --kms-keys and of the account's default key, separated by commas"
    )
    module_cache: str = option("the s3://BUCKET/PREFIX that ami.build gets with --module-cache")
    sign_key: str = option(
        "ARN of the key of AWS KMS that signs statements (--sign-key awskms:...), or that a channel "
        "trusts by its ARN"
    )
    node_role: str = option("ARN of the role of the cluster's nodes, which ami.verify --cluster passes on")
    secrets: str = option(
        "with workspace-boundary: ARNs of secrets and names of parameters (/team/*), separated by commas, "
        "that workspaces may read; default: none"
    )
    artifact_cache: str = option(
        "with workspace-boundary: the s3://BUCKET/PREFIX of workspaces; default: none"
    )

    def run(self) -> None:
        from gpukiln.clouds import iam
        from gpukiln.images.channels import load_channel
        from gpukiln.release.options import region_names
        from gpukiln.workspaces.iam import boundary

        jobs = words(self.for_)
        # Refuses a misspelled name, for which the policy would allow a parameter that nothing reads.
        for channel in words(self.channels):
            load_channel(channel)
        scope = iam.Scope(
            **self.pick("account", "repository", "module_cache", "sign_key", "node_role"),
            regions=region_names(self.regions),
            channels=words(self.channels),
            kms_keys=words(self.kms_keys),
        )
        if iam.BOUNDARY_JOB not in jobs:
            if self.secrets or self.artifact_cache:
                raise UsageError(f"--secrets and --artifact-cache are for --for {iam.BOUNDARY_JOB}")
            print_json(iam.policy(jobs, scope))
            return
        # Standard output has one document, which `aws iam create-policy --policy-document` takes as it is.
        if len(jobs) > 1:
            raise UsageError(
                f"{', '.join(jobs)}: a permissions boundary is a policy of its own",
                hint=f"--for {jobs[0]} and --for {jobs[-1]} in two calls",
            )
        print_json(boundary(scope, words(self.secrets), self.artifact_cache))


@dataclass(frozen=True)
class CloudTrust(Command):
    """Print the trust policy of a role for GitHub's workflows, as JSON."""

    account: str = option("the account id, twelve digits", first=True, required=True)
    repository: str = option("OWNER/NAME on GitHub", first=True, required=True)
    ids: str = option(
        "OWNER-ID/REPOSITORY-ID, for repositories whose subject has them: those since 2026-07-15"
    )
    branch: str = option("the branch whose workflows may take the role")
    environment: str = option("the environment whose jobs may, instead of a branch")

    def run(self) -> None:
        from gpukiln.clouds import iam

        # Before the note, and without a field `schema`: IAM refuses fields that it does not know.
        print_json(iam.trust(**self.pick("account", "repository", "ids", "branch", "environment")))
        if not self.ids:
            say(
                "a repository created or renamed since 2026-07-15, or opted in, has ids in its subject: --ids"
            )
