"""Workspaces: from an offer to a machine on which somebody works, with a home that is kept; and its end."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.cli.command import (
    CLOUD,
    DEFAULT_REGION,
    Command,
    JsonOptions,
    ProfileOptions,
    results,
    say,
    words,
)
from gpukiln.commands.workspace_place import ExistingOptions, reach_by_name
from gpukiln.errors import UsageError
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.workspaces.plan import WorkspacePlan
    from gpukiln.workspaces.spec import WorkspaceSpec


@dataclass(frozen=True)
class WorkspaceOptions(Command):
    """What a workspace is made of."""

    name: str = option("name of the workspace: small letters, digits and `-`")
    owner: str = option("the person who works on it: tags and costs are by owner")
    gpu: str = option("GPU and count, as offer.list takes them: T4:1")
    cpu: int = option("vCPUs, at least", 0)
    memory: str = option("main memory, at least, for example 32GiB")
    storage: str = option("size of the home, for example 100GiB; an existing home grows to it")
    region: str = option(
        "regions to try, separated by commas, the best first; an existing home stays in its own",
        also="regions",
        setting="region",
    )
    image: str = option("an AMI, a build (id or `last`); default: as `offer.list --image auto` chooses")
    instance_types: str = option("only these types of those that satisfy the request, separated by commas")
    spot: bool = option("a spot instance: cheaper, and EC2 may take it away; the home stays", False)
    service: str = option("of services/, separated by commas: ollama, vllm, jupyter")
    ssh_from: str = option(
        "network that reaches its port 22, or `me`; default: none, and sessions by Session Manager"
    )
    idle_minutes: int = option("stops itself after so many minutes without use; 0: never", 0)
    set: tuple[str, ...] = option(
        "any field of the contract (docs/workspaces.md), FIELD=YAML, for example "
        "capabilities.network_egress=none; as often as needed",
        (),
    )
    from_: str = option("a file with the contract, YAML or JSON, which the other options change")
    roles: str = option(
        "for an image that gpukiln did not build: the roles it runs, as https://REPOSITORY@COMMIT"
    )

    def spec(self, **more: Any) -> WorkspaceSpec:
        """The contract and its options: --set takes precedence over options, and these over the file.

        Args:
            more: Fields of `UpOptions` that only some commands have.
        """
        from gpukiln.workspaces.spec import UpOptions, contract_document, typed_spec

        profile = {f"compute_profile.{key}": getattr(self, key) for key in ("cpu", "memory", "storage")}
        fields = {
            "workspace_name": self.name,
            "region": (words(self.region) or [""])[0],
            **profile,
            "instance_types": words(self.instance_types),
            "services": words(self.service),
            **self.pick("owner", "spot", "idle_minutes"),
        }
        options = UpOptions(**self.pick("image", "ssh_from", "roles"), **more)
        document = contract_document(Path(self.from_)) if self.from_ else {}
        # An option that was not typed replaces no field of the file.
        given = {key: value for key, value in fields.items() if value}
        # In this order: the default, the file, the options, then --set.
        return typed_spec({"region": DEFAULT_REGION, **document}, given, self.gpu, self.set, options)


@dataclass(frozen=True)
class WorkspaceUp(WorkspaceOptions, ProfileOptions, JsonOptions):
    """Start a workspace on the best available machine, with its home; typed again, complete or show it."""

    simulated: bool = option("simulated GPUs (embedded cloud): a rehearsal", False)
    no_wait: bool = option("do not wait until its stages are done", False)
    keep: bool = option(
        "Ctrl-C also keeps a machine that is not usable yet; without --keep it is removed", False
    )
    replace_unhealthy: bool = option(
        "verify it when it runs, and try the next machine where this one is unhealthy", False
    )
    max_price: str = option("USD an hour that the machine costs at most")
    budget: str = option(
        "USD a month that machine, home and address cost at most; exit 6 where all cost more"
    )
    no_ssh_config: bool = option("write no entry by which ssh, rsync and editors reach it by its name", False)
    yes: bool = option("start it without a question; needed where there is no terminal", False)
    dry_run: bool = option("only show the machines, their costs and the image that would be taken", False)
    cloud: str = CLOUD

    def run(self) -> None:
        from gpukiln.cli.consent import require_consent
        from gpukiln.units import Money
        from gpukiln.workspaces import view
        from gpukiln.workspaces.operations import details
        from gpukiln.workspaces.provision import preview_workspace, provision_workspace, today

        spec = self.spec(
            **self.pick("simulated", "keep"),
            max_price=Money.parse(self.max_price, "--max-price") if self.max_price else None,
            budget=Money.parse(self.budget, "--budget") if self.budget else None,
        )
        regions = words(self.region) or [spec.contract.region]
        # All of them before a machine is started: a misspelled last region is refused at once.
        clouds = [self.connect_to(self.cloud, region) for region in regions]
        if self.dry_run:
            preview = view.preview_of(*preview_workspace(clouds, spec, say), today())
            self.report(preview, view.preview_parts(preview))
            say("dry run: nothing was started")
            return

        def consent(cloud: Cloud, plan: WorkspacePlan) -> None:
            """Show what it costs, and ask."""
            # On standard error, with and without --json: it belongs to the question, not to the result.
            results(json=True).show(*view.preview_parts(view.preview(cloud, plan, today())))
            require_consent(f"starting {plan.contract.workspace_name}", (), yes=self.yes)

        cloud, workspace = provision_workspace(
            clouds,
            spec,
            say,
            consent=consent,
            wait=not self.no_wait,
            replace_unhealthy=self.replace_unhealthy,
        )
        answer = details(cloud, workspace)
        self.report(answer, view.shown_parts(answer))
        # Last, as the workspace is complete without it; a failure is only a note.
        if not self.no_ssh_config:
            reach_by_name(cloud, workspace)


@dataclass(frozen=True)
class WorkspaceStop(ExistingOptions, JsonOptions):
    """Stop the machine of a workspace; its disks and its home stay, and cost what volumes cost."""

    def run(self) -> None:
        from gpukiln.workspaces.operations import details, stop
        from gpukiln.workspaces.view import shown_parts

        cloud, workspace = self.find()
        answer = details(cloud, stop(cloud, workspace, say))
        self.report(answer, shown_parts(answer))


@dataclass(frozen=True)
class WorkspaceStart(ExistingOptions, JsonOptions):
    """Start the machine of a workspace again: another address, the same home; and verify its health."""

    no_wait: bool = option("do not wait until its stages are done", False)

    def run(self) -> None:
        from gpukiln.workspaces.operations import details, require_healthy, start
        from gpukiln.workspaces.ssh_config import has_entry
        from gpukiln.workspaces.view import shown_parts

        cloud, workspace = self.find()
        workspace, health = start(cloud, workspace, say, wait=not self.no_wait)
        answer = details(cloud, workspace)
        self.report(answer, shown_parts(answer))
        if has_entry(workspace.name):  # a machine gets another address at each start
            reach_by_name(cloud, workspace)
        # After the document, which names the machine that runs and costs money.
        require_healthy(workspace, health)


@dataclass(frozen=True)
class WorkspaceDown(ExistingOptions):
    """Remove a workspace: machine, network, role, key, and the home unless it is kept."""

    keep_home: bool = option("its home stays: `workspace.up` of that name uses it again", False)
    owner: str = option("its owner, where this computer did not start it")
    force: bool = option("although somebody works there", False)
    yes: bool = option(
        "remove what is in the home without a question; needed where there is no terminal", False
    )
    dry_run: bool = option("only show what would be removed", False)

    def run(self) -> None:
        from datetime import UTC, datetime

        from gpukiln.cli.consent import require_consent
        from gpukiln.workspaces import operations, view

        cloud, workspace = self.find_or_gone()
        if workspace is None:  # a `down` that was killed had removed all of it
            operations.forget(cloud, self.name)
            say(f"{self.name} is removed")
            return
        # In a dry run, too: it answers what the same command with consent would.
        operations.require_owner(cloud, workspace, self.owner, keep_home=self.keep_home)
        lines = view.removed_lines(workspace, datetime.now(UTC), keep_home=self.keep_home)
        if self.dry_run:
            results().show(*(f"would remove {line}" for line in lines))
            say("dry run: nothing was removed")
            return
        # No question where nothing is lost that the same `workspace.up` would not make again.
        if view.loses_work(workspace, keep_home=self.keep_home):
            require_consent(
                f"removing {workspace.name} for good",
                lines,
                yes=self.yes,
                answer=workspace.name,
                keeps="--keep-home keeps the home" if workspace.homes else "",
            )
        options = self.pick("keep_home", "force")
        for line in operations.remove(cloud, workspace, self.owner, **options):
            say(line)


@dataclass(frozen=True)
class WorkspaceMove(ExistingOptions, JsonOptions):
    """Copy a home into another zone by a snapshot, where its own has no machine; the old one is removed."""

    zone: str = option("the zone that the home moves to")

    def run(self) -> None:
        from gpukiln.workspaces.operations import move

        if not self.zone:
            raise UsageError("--zone is missing", hint="for example --zone us-west-2b")
        cloud, workspace = self.find()
        home = move(cloud, workspace, self.zone, say)
        line = f"the home of {workspace.name} is {home.volume_id} in {home.zone}"
        self.report(home, [line], schema="workspace.move/1")


RENDERED = ("compose", "userdata", "tfvars", "terraform")


@dataclass(frozen=True)
class WorkspaceRender(WorkspaceOptions):
    """Write what a workspace is made of, without a cloud: Compose file, user data, Terraform."""

    to: str = option("what to write: compose, userdata, tfvars, terraform")
    out: str = option("a file; for terraform a folder. Without it standard output")
    region: str = option("region of the workspace", also="regions", setting="region")
    image: str = option("the AMI, which tfvars and terraform need")

    def run(self) -> None:
        from gpukiln.typed import unknown
        from gpukiln.workspaces.operations import write_files
        from gpukiln.workspaces.render import rendered_files

        spec = self.spec()
        if self.to not in RENDERED:
            raise unknown("--to", self.to, RENDERED)
        contract = replace(
            spec.contract,
            image_id=self.image or spec.contract.image_id,
            ssh_from=self.ssh_from or spec.contract.ssh_from,
        )
        files = rendered_files(self.to, replace(spec, contract=contract), say)
        if self.out:
            write_files(files, self.out, say, folder=self.to == "terraform")
        elif self.to == "terraform":
            raise UsageError("--out is missing", hint="a folder: Terraform reads several files")
        else:
            sys.stdout.buffer.write(b"".join(files.values()))
