"""Workspaces: looked at, reached, judged, accounted for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpukiln.commands.cli import JsonOptions, ProfileOptions, print_document, results, words
from gpukiln.commands.workspace_place import HERE, ExistingOptions, cloud_of, show_parts, tell
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.workspaces.local_state import RegionRecord


@dataclass(frozen=True)
class WorkspaceList(ProfileOptions, JsonOptions):
    """List workspaces as this computer remembers them, or as the clouds' tags say: --refresh."""

    refresh: bool = option("ask the regions what they have, and remember that", False)
    regions: str = option("which, separated by commas; default: those that are remembered", also="region")
    cloud: str = option("embedded or aws; default: both, as remembered")

    def run(self) -> None:
        from gpukiln.workspaces import local_state, view

        found = local_state.regions()
        failed: list[str] = []
        if self.refresh:
            pairs = [
                (self.cloud or one.cloud, one.region)
                for one in found
                if self.cloud in ("", one.cloud) and not self.regions
            ]
            pairs += [(self.cloud or "embedded", one) for one in words(self.regions)]
            pairs = pairs or [(self.cloud or "embedded", HERE)]
            found, failed = _refreshed(list(dict.fromkeys(pairs)), found, self.profile)
        answer = view.WorkspaceListing(view.LIST, found)
        if self.json:
            print_document(answer.schema, dump(answer))
        else:
            show_parts(view.listing_parts(answer))
        _require_all(failed)


def _refreshed(
    pairs: list[tuple[str, str]], remembered: tuple[RegionRecord, ...], profile: str
) -> tuple[tuple[RegionRecord, ...], list[str]]:
    """Regions as they answer now, or as they are remembered where they can't be asked.

    Args:
        pairs: Cloud and region of each.

    Returns:
        The regions, and a line for each that could not be asked.
    """
    from gpukiln.errors import GpukilnError
    from gpukiln.workspaces import local_state

    found: list[RegionRecord] = []
    failed: list[str] = []
    for cloud, region in pairs:
        try:
            found.append(local_state.refresh(cloud_of(cloud, region, profile)))
        except GpukilnError as error:
            if len(pairs) == 1:
                raise
            failed.append(f"{cloud} {region}: {error.message}")
            found += [one for one in remembered if (one.cloud, one.region) == (cloud, region)]
    return tuple(found), failed


def _require_all(failed: list[str]) -> None:
    """Raises PartialError where a region could not be asked."""
    from gpukiln.errors import PartialError

    if failed:
        raise PartialError(
            f"{len(failed)} of the regions could not be asked, and are shown as they are remembered",
            details=tuple(failed),
            hint="--cloud and --regions say which are asked",
        )


@dataclass(frozen=True)
class WorkspaceShow(ExistingOptions, JsonOptions):
    """Show a workspace as its tags say: what it answers, its machine, its home."""

    def run(self) -> None:
        where, found = self.find()
        tell(where, found, json=self.json)


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

        where, found = self.find()
        typed = workspace_ssh(where, found).command(*self.command, batch=False)
        if self.print:
            results().print_text(shlex.join(typed))
            return 0
        environment = {key: value for key, value in {**os.environ, **where.environment()}.items() if value}
        return programs.run_on_terminal(typed, environment=environment)


@dataclass(frozen=True)
class WorkspaceStatus(ExistingOptions, JsonOptions):
    """Say how a workspace is: as its tags say, or --deep as it is. Exit 1: unhealthy."""

    deep: bool = option(
        "judge the machine and its services with the verification suite, and keep what it says", False
    )

    def run(self) -> int:
        from gpukiln.progress import Progress
        from gpukiln.verify.report import LiveReport, ending
        from gpukiln.workspaces import lifecycle, reach, view

        where, found = self.find()
        verdict, folder, words_ = None, "", lifecycle.only_machine(found).health
        if self.deep:
            progress = Progress()
            with progress.step(f"look at {found.name}"):
                looked = reach.check_health(where, found, live=LiveReport(progress))
                if not looked.is_healthy:
                    progress.fail()
            verdict, folder, words_ = looked.verdict, str(looked.folder), looked.words
            where, found = replace(self, cloud=where.name, region=where.region).find()
        answer = view.status(found, words_, verdict, folder)
        if self.json:
            print_document(answer.schema, dump(answer))
        else:
            if verdict:
                results().print(ending(verdict))  # `Live` has shown each check
            show_parts(view.status_parts(answer))
        return 0 if answer.good else 1


@dataclass(frozen=True)
class WorkspaceEnv(ExistingOptions, JsonOptions):
    """Print the variables by which programs find a workspace: eval "$(invoke workspace.env NAME)"."""

    def run(self) -> None:
        import shlex

        from gpukiln.workspaces.lifecycle import environment

        _, found = self.find()
        variables = environment(found)
        if self.json:
            print_document("workspace.env/1", variables=variables)
        for key, value in variables.items() if not self.json else ():
            results().print_text(f"export {key}={shlex.quote(value)}")


@dataclass(frozen=True)
class WorkspaceUsageCommand(ProfileOptions, JsonOptions):
    """Say how many hours workspaces ran, and what that cost, by owner."""

    since: str = option("the first day that counts, for example 2026-11-01; default: all that is known")
    owner: str = option("only theirs")
    refresh: bool = option("ask the regions first how long their machines have run", False)

    def run(self) -> None:
        from gpukiln.workspaces import local_state
        from gpukiln.workspaces import usage as used

        found: tuple[RegionRecord, ...] = local_state.regions()
        failed: list[str] = []
        if self.refresh:
            found, failed = _refreshed([(one.cloud, one.region) for one in found], found, self.profile)
        answer = used.usage([span for one in found for span in one.spans], since=self.since, owner=self.owner)
        if self.json:
            print_document(answer.schema, dump(answer))
        else:
            show_parts(used.usage_parts(answer))
        _require_all(failed)
