"""Workspaces: from an offer to a machine on which somebody works, with a home that is kept; and away."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import Command, JsonOptions, ProfileOptions, print_document, results, say, words
from gpukiln.commands.workspace_place import HERE, ExistingOptions, cloud_of, reach_by_name, show_parts, tell
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.workspaces.contract import Workspace
    from gpukiln.workspaces.lifecycle import ExistingWorkspace
    from gpukiln.workspaces.spec import WorkspaceSpec


@dataclass(frozen=True)
class WorkspaceOptions(Command):
    """What a workspace is to be."""

    name: str = option("of the workspace: small letters, digits and `-`")
    owner: str = option("who works on it: tags and costs are by owner")
    gpu: str = option("GPU and count, as offer.list takes them: T4:1")
    cpu: int = option("vCPUs, at least", 0)
    memory: str = option("main memory, at least, for example 32GiB")
    storage: str = option("of the home, for example 100GiB; a home that is there grows to it")
    region: str = option(
        "regions to try, separated by commas, the best first; a home that is there pins its own",
        also="regions",
        setting="region",
    )
    image: str = option("an AMI, a build (id or `last`); default: as `offer.list --image auto` chooses")
    instance_types: str = option("only these of what satisfies the request, separated by commas")
    spot: bool = option("a spot instance: cheaper, and EC2 may take it away; the home stays", False)
    service: str = option("of services/, separated by commas: ollama, vllm, jupyter")
    ssh_from: str = option(
        "who reaches its port 22: a network, or `me`; default: nobody, by session manager alone"
    )
    idle_minutes: int = option("nobody there for so long: it stops itself; 0: never", 0)
    set: tuple[str, ...] = option(
        "any field of the contract (docs/workspaces.md), FIELD=YAML, for example "
        "capabilities.network_egress=none; as often as needed",
        (),
    )
    from_: str = option("a file with the contract, YAML or JSON, which the other options change")
    roles: str = option(
        "for an image that is not ours: the https:// repository and the commit whose roles it runs, with "
        "@ between them"
    )

    def spec(self, **more: Any) -> WorkspaceSpec:
        """The contract and its options: a file, changed by options, changed by --set.

        Args:
            more: Of `UpOptions`, what these options don't have.
        """
        from gpukiln.workspaces.spec import UpOptions, contract_document, typed_spec

        fields = {
            "workspace_name": self.name,
            "region": (words(self.region) or [""])[0],
            **{
                f"compute_profile.{key}": value
                for key, value in self.pick("cpu", "memory", "storage").items()
            },
            "instance_types": words(self.instance_types),
            "services": words(self.service),
            **self.pick("owner", "spot", "idle_minutes"),
        }
        options = UpOptions(**self.pick("image", "ssh_from", "roles"), **more)
        document = contract_document(Path(self.from_)) if self.from_ else {}
        given = {key: value for key, value in fields.items() if value}
        return typed_spec({"region": HERE, **document}, given, self.gpu, self.set, options)


@dataclass(frozen=True)
class WorkspaceUp(WorkspaceOptions, ProfileOptions, JsonOptions):
    """Start a workspace on the best machine that can be had, with its home; again: complete or show it."""

    simulated: bool = option("simulated GPUs (embedded cloud): a rehearsal", False)
    no_wait: bool = option("do not wait until its stages are done", False)
    keep: bool = option(
        "Ctrl-C keeps a machine that is not usable yet, too; without it, that is removed", False
    )
    replace_unhealthy: bool = option(
        "look deep when it is up, and try the next machine where this one is unhealthy", False
    )
    max_price: str = option("USD an hour that the machine costs at most")
    budget: str = option(
        "USD a month that machine, home and address cost at most; exit 6 where all cost more"
    )
    no_ssh_config: bool = option("no entry by which ssh, rsync and editors reach it by its name", False)
    yes: bool = option("start it without a question; needed where there is no terminal", False)
    dry_run: bool = option("only show which machines and which image it would be, and what they cost", False)
    cloud: str = option("embedded (this machine) or aws (your account)", "embedded", setting="cloud")

    def run(self) -> None:
        from gpukiln.commands.consent import require_consent
        from gpukiln.units import Money
        from gpukiln.workspaces import view
        from gpukiln.workspaces.lifecycle import ExistingWorkspace
        from gpukiln.workspaces.plan import WorkspacePlan
        from gpukiln.workspaces.provision import preview_workspace, provision_workspace, today

        spec = self.spec(
            **self.pick("simulated", "keep"),
            max_price=Money.parse(self.max_price, "--max-price") if self.max_price else None,
            budget=Money.parse(self.budget, "--budget") if self.budget else None,
        )
        regions = words(self.region) or [spec.contract.region]
        clouds = [cloud_of(self.cloud, region, self.profile) for region in regions]
        if self.dry_run:
            where, ahead = preview_workspace(clouds, spec, say)
            preview = (
                view.running_preview(where, ahead)
                if isinstance(ahead, ExistingWorkspace)
                else view.preview(where, ahead, today())
            )
            if self.json:
                print_document(preview.schema, dump(preview))
            else:
                show_parts(view.preview_parts(preview))
            say("dry run: nothing was started")
            return

        def consent(where: Cloud, plan: WorkspacePlan) -> None:
            """Show what it costs, and ask."""
            show_parts(view.preview_parts(view.preview(where, plan, today())), notices=True)
            require_consent(f"starting {plan.contract.workspace_name}", (), yes=self.yes)

        where, found = provision_workspace(
            clouds,
            spec,
            say,
            consent=consent,
            wait=not self.no_wait,
            replace_unhealthy=self.replace_unhealthy,
        )
        tell(where, found, json=self.json)
        if not self.no_ssh_config:
            reach_by_name(where, found)


@dataclass(frozen=True)
class WorkspaceStop(ExistingOptions, JsonOptions):
    """Stop the machine of a workspace; its disks and its home stay, and cost what volumes cost."""

    def run(self) -> None:
        from gpukiln.workspaces import lifecycle, local_state
        from gpukiln.workspaces.provision import workspace_lock

        where, found = self.find()
        with workspace_lock(where, found.name):
            local_state.refresh(where)
            if not lifecycle.stop(where, found):
                say(f"{found.name} was stopped")
        tell(where, _again(where, found), json=self.json)


@dataclass(frozen=True)
class WorkspaceStart(ExistingOptions, JsonOptions):
    """Start the machine of a workspace again: another address, the same home; and look whether it is well."""

    no_wait: bool = option("do not wait until its stages are done", False)

    def run(self) -> None:
        from gpukiln.errors import CheckFailedError
        from gpukiln.workspaces import lifecycle, reach, ssh_config
        from gpukiln.workspaces.network import key_file
        from gpukiln.workspaces.provision import note_running_machines, wait_until_done, workspace_lock

        where, found = self.find()
        looked = None
        with workspace_lock(where, found.name):
            try:
                if not lifecycle.start(where, found):
                    say(f"{found.name} ran")
                elif not self.no_wait:
                    wait_until_done(where, _named(found), say=say)
                    if key_file(where, found.name).exists():  # else nobody here can look
                        looked = reach.check_health(where, _again(where, found))
            except KeyboardInterrupt as interrupt:
                note_running_machines(where, _again(where, found), interrupt)
                raise
        found = _again(where, found)
        tell(where, found, json=self.json)
        if ssh_config.has_entry(found.name):  # it has another address now
            reach_by_name(where, found)
        if looked and not looked.is_healthy:
            raise CheckFailedError(
                f"{found.name} is {looked.words}", hint=f"the report is in {looked.folder}"
            )


@dataclass(frozen=True)
class WorkspaceDown(ExistingOptions):
    """Put a workspace away: machine, network, rights, key, and the home unless it is kept."""

    keep_home: bool = option("its home stays: `workspace.up` of that name finds it again", False)
    owner: str = option("whose it is, where this computer did not start it")
    force: bool = option("although somebody works there", False)
    yes: bool = option(
        "remove what is in the home without a question; needed where there is no terminal", False
    )
    dry_run: bool = option("only show what would be removed", False)

    def run(self) -> None:
        from datetime import UTC, datetime

        from gpukiln.commands.consent import require_consent
        from gpukiln.errors import RefusedError
        from gpukiln.workspaces import lifecycle, local_state, reach, ssh_config, view
        from gpukiln.workspaces.network import is_started_here, owner_file
        from gpukiln.workspaces.provision import workspace_lock

        where, found = self.find_or_gone()
        if found is None:  # a `down` that was killed had removed all of it
            owner_file(where, self.name).unlink(missing_ok=True)
            ssh_config.remove_entry(self.name)
            say(f"{self.name} is removed")
            return
        removes = found.machines or (found.homes and not self.keep_home)
        if removes and not self.owner and not is_started_here(where, found.name, found.owner):
            raise RefusedError(
                f"{found.name} is {found.owner}'s, and this computer did not start it",
                hint=f"--owner {found.owner} says that you know",
            )
        removed = view.removed_lines(found, datetime.now(UTC), keep_home=self.keep_home)
        if self.dry_run:
            for line in removed:
                results().print_text(f"would remove {line}")
            say("dry run: nothing was removed")
            return
        if view.loses_work(found, keep_home=self.keep_home):
            require_consent(
                f"removing {found.name} for good",
                removed,
                yes=self.yes,
                answer=found.name,
                keeps="--keep-home keeps the home" if found.homes else "",
            )
        with workspace_lock(where, found.name):
            local_state.refresh(where)
            wanted = replace(_named(found), owner=self.owner or found.owner)
            work = None if self.force else reach.ask_busy(where, found)
            ssh_config.remove_entry(found.name)
            lifecycle.remove_workspace(
                where, wanted, found, keep_home=self.keep_home, force=self.force, busy=work
            )
            if not self.keep_home:
                owner_file(where, found.name).unlink(missing_ok=True)
            local_state.refresh(where)
        for home in found.homes:
            what = "is kept" if self.keep_home else "is removed"
            say(f"its home {home.volume_id} of {home.size_gib} GiB in {home.zone} {what}")
        say(f"{found.name} is removed")


@dataclass(frozen=True)
class WorkspaceMove(ExistingOptions, JsonOptions):
    """Copy a home into another zone by a snapshot, where its own has no machine; the old one goes then."""

    zone: str = option("where the home is to be")

    def run(self) -> None:
        from gpukiln.errors import UnavailableError, UsageError
        from gpukiln.workspaces import local_state, volumes
        from gpukiln.workspaces.provision import workspace_lock

        if not self.zone:
            raise UsageError("--zone is missing", hint="for example --zone us-west-2b")
        where, found = self.find()
        if not found.homes:
            raise UnavailableError(f"{found.name} has no home", hint="there is nothing to move")
        with workspace_lock(where, found.name):
            moved = volumes.move(where, found.homes[0], self.zone, say=say)
            local_state.refresh(where)
        if self.json:
            print_document("workspace.move/1", dump(moved))
        else:
            results().print_text(f"the home of {found.name} is {moved.volume_id} in {moved.zone}")


RENDERED = ("compose", "userdata", "tfvars", "terraform")


@dataclass(frozen=True)
class WorkspaceRender(WorkspaceOptions):
    """Write what a workspace is made of, without a cloud: Compose file, user data, Terraform."""

    to: str = option("what is written: compose, userdata, tfvars, terraform")
    out: str = option("a file; for terraform a folder. Without it standard output")
    region: str = option("where it is to be", also="regions", setting="region")
    image: str = option("the AMI, which tfvars and terraform need")

    def run(self) -> None:
        from gpukiln.errors import UsageError
        from gpukiln.files import write_atomic
        from gpukiln.typed import unknown
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
        if self.to == "terraform" and not self.out:
            raise UsageError("--out is missing", hint="a folder: Terraform reads several files")
        folder = Path(self.out) if self.to == "terraform" else Path(self.out).parent
        for file, content in files.items():
            if self.out:
                path = folder / file if self.to == "terraform" else Path(self.out)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, content, mode=0o644)
                say(f"{path}: {len(content)} bytes")
            else:
                sys.stdout.buffer.write(content)


def _again(where: Cloud, found: ExistingWorkspace) -> ExistingWorkspace:
    from gpukiln.workspaces import local_state

    return next((one for one in local_state.refresh(where).workspaces if one.name == found.name), found)


def _named(found: ExistingWorkspace) -> Workspace:
    """What is known of a workspace by its tags, as far as it can be removed."""
    from gpukiln.workspaces.contract import Workspace

    return Workspace(found.name, found.owner, found.region)
