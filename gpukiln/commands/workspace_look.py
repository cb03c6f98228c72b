"""Workspaces: listed, shown, workspace_ssh, verified, accounted for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpukiln.cli.command import DEFAULT_REGION, JsonOptions, ProfileOptions, results, words
from gpukiln.commands.workspace_place import ExistingOptions
from gpukiln.options import option


@dataclass(frozen=True)
class WorkspaceList(ProfileOptions, JsonOptions):
    """List workspaces as this computer remembers them, or as the clouds' tags say: --refresh."""

    refresh: bool = option("ask the regions what they have, and remember that", False)
    regions: str = option("which, separated by commas; default: those that are remembered", also="region")
    cloud: str = option("embedded or aws; default: both, as remembered")

    def run(self) -> None:
        from gpukiln.workspaces import local_state, locate, view

        records = local_state.regions()
        failed: list[str] = []
        if self.refresh:
            places = locate.places_to_ask(records, self.cloud, words(self.regions), DEFAULT_REGION)
            records, failed = locate.refreshed(places, records, self.connect_to)
        listing = view.WorkspaceListing(view.LIST, records)
        self.report(listing, view.listing_parts(listing))
        # After the list, which has the failed region as it is remembered: exit 5.
        locate.require_all(failed)


@dataclass(frozen=True)
class WorkspaceShow(ExistingOptions, JsonOptions):
    """Show a workspace as its tags say: its outputs, its machine, its home."""

    def run(self) -> None:
        from gpukiln.workspaces.operations import details
        from gpukiln.workspaces.view import shown_parts

        answer = details(*self.find())
        self.report(answer, shown_parts(answer))


@dataclass(frozen=True)
class WorkspaceSsh(ExistingOptions):
    """Open a session on a workspace, or run something there; ends with its exit code."""

    command: tuple[str, ...] = option("what is run there; without it a session opens", (), rest=True)
    print: bool = option("only print the command of SSH", False)

    def run(self) -> int:
        import os
        import shlex

        from gpukiln import programs
        from gpukiln.workspaces.reach import workspace_ssh

        cloud, workspace = self.find()
        # Not in batch mode: a person can answer what ssh asks.
        ssh = workspace_ssh(cloud, workspace).command(*self.command, batch=False)
        if self.print:
            results().show(shlex.join(ssh))
            return 0
        variables = {**os.environ, **cloud.environment()}
        # The cloud wants variables without a value to be unset, such as AWS_PROFILE of the user's own
        # account.
        environment = {name: value for name, value in variables.items() if value}
        return programs.run_on_terminal(ssh, environment=environment)


@dataclass(frozen=True)
class WorkspaceStatus(ExistingOptions, JsonOptions):
    """Show the state of a workspace by its tags, or --deep by a verification. Exit 1: unhealthy."""

    deep: bool = option(
        "verify the machine and its services with the verification suite, and keep the result", False
    )

    def run(self) -> int:
        from gpukiln.verify.report import ending
        from gpukiln.workspaces import lifecycle, operations, view

        cloud, workspace = self.find()
        verdict, folder, health = None, "", lifecycle.only_machine(workspace).health
        if self.deep:
            checked = operations.verify(cloud, workspace)
            verdict, folder, health = checked.verdict, str(checked.folder), checked.words
            # Again, because the verification has written its result into the tags.
            cloud, workspace = replace(self, cloud=cloud.name, region=cloud.region).find()
        status = view.status(workspace, health, verdict, folder)
        # Each check was shown while the suite ran.
        self.report(status, [*([ending(verdict)] if verdict else []), *view.status_parts(status)])
        return 0 if status.good else 1


@dataclass(frozen=True)
class WorkspaceEnv(ExistingOptions, JsonOptions):
    """Print the variables by which programs find a workspace: eval "$(invoke workspace.env NAME)"."""

    def run(self) -> None:
        import shlex

        from gpukiln.workspaces.lifecycle import environment

        _, workspace = self.find()
        # Quoted, since `eval` runs what is printed.
        variables = environment(workspace)
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        self.report(None, lines, schema="workspace.env/1", variables=variables)


@dataclass(frozen=True)
class WorkspaceUsageCommand(ProfileOptions, JsonOptions):
    """Report how many hours workspaces ran and what that cost, by owner."""

    since: str = option("the first day that counts, for example 2026-11-01; default: all that is known")
    owner: str = option("only theirs")
    refresh: bool = option("ask the regions first how long their machines have run", False)

    def run(self) -> None:
        from gpukiln.workspaces import local_state, locate, usage

        records = local_state.regions()
        failed: list[str] = []
        if self.refresh:
            places = [(record.cloud, record.region) for record in records]
            records, failed = locate.refreshed(places, records, self.connect_to)
        intervals = [interval for record in records for interval in record.spans]
        result = usage.usage(intervals, since=self.since, owner=self.owner)
        self.report(result, usage.usage_parts(result))
        locate.require_all(failed)
