"""What the commands of workspaces share: where one is, and how it is shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.commands.cli import ProfileOptions, print_document, results, say
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpukiln.clouds.base import Cloud
    from gpukiln.errors import UsageError
    from gpukiln.workspaces.lifecycle import ExistingWorkspace

HERE = "us-west-2"


@dataclass(frozen=True)
class ExistingOptions(ProfileOptions):
    """A workspace that is there."""

    name: str = option("of the workspace", first=True)
    region: str = option("where it is; default: as this computer remembers", also="regions")
    cloud: str = option("embedded (this machine) or aws (your account); default: as this computer remembers")

    def find(self) -> tuple[Cloud, ExistingWorkspace]:
        """The workspace where it was typed to be, or where this computer remembers it."""
        where, found = self.find_or_gone()
        if found is None:
            raise _missing(where, self.name)
        return where, found

    def find_or_gone(self) -> tuple[Cloud, ExistingWorkspace | None]:
        """As `find`; None: this computer remembered one, and it is gone."""
        return find_or_gone(self.name, self.cloud, self.region, self.profile)


def find_or_gone(name: str, cloud: str, region: str, profile: str) -> tuple[Cloud, ExistingWorkspace | None]:
    """As `find`; None: this computer remembered one, and it is gone."""
    from gpukiln.errors import UsageError
    from gpukiln.workspaces import lifecycle, local_state

    if not name:
        raise UsageError("no workspace is named", hint="`invoke workspace.list` shows them")
    remembered = [
        (one.cloud, one.region) for one in local_state.regions_with(name) if cloud in ("", one.cloud)
    ]
    places = remembered
    if region:
        places = [(cloud or (places[0][0] if places else "embedded"), region)]
    if len(places) > 1:
        told = " and ".join(f"{where} {there}" for where, there in places)
        raise UsageError(f"{name} is in {told}", hint="--region and --cloud say which")
    if not places:
        names = ", ".join(sorted({found.name for one in local_state.regions() for found in one.workspaces}))
        raise UsageError(
            f"this computer knows no workspace {name!r}" + (f"; it knows {names}" if names else ""),
            hint="`invoke workspace.list --refresh --regions REGION --cloud CLOUD` asks a region",
        )
    where = cloud_of(*places[0], profile)
    found = lifecycle.find_workspaces(where, name)
    if found:
        return where, found[0]
    local_state.refresh(where)
    if places[0] not in remembered:
        raise _missing(where, name)
    return where, None


def _missing(where: Cloud, name: str) -> UsageError:
    from gpukiln.errors import UsageError

    return UsageError(
        f"{where.name} has no workspace {name} in {where.region}",
        hint="`invoke workspace.list --refresh` says what there is",
    )


def tell(where: Cloud, found: ExistingWorkspace, *, json: bool) -> None:
    from gpukiln.workspaces import local_state, view
    from gpukiln.workspaces.lifecycle import outputs

    local_state.refresh(where)
    answer = view.WorkspaceDetails(view.SHOW, found, outputs(where, found) if found.machines else None)
    if json:
        print_document(answer.schema, dump(answer))
    else:
        show_parts(view.shown_parts(answer))


def reach_by_name(where: Cloud, found: ExistingWorkspace) -> None:
    """Have `ssh NAME` reach a workspace; on a terminal the line in ~/.ssh/config is asked for once."""
    from gpukiln.commands.consent import require_consent
    from gpukiln.errors import GpukilnError, RefusedError
    from gpukiln.workspaces import ssh_config
    from gpukiln.workspaces.reach import workspace_ssh

    home = Path.home()
    try:
        file = ssh_config.write_entry(home, found.name, workspace_ssh(where, found))
    except GpukilnError as error:
        say(f"note: `ssh {found.name}` does not reach it: {error.message}")
        return
    line = ssh_config.include_line()
    if not ssh_config.is_included(home) and not ssh_config.is_declined() and sys.stdin and sys.stdin.isatty():
        try:
            require_consent("adding a line at the top of ~/.ssh/config", (line,), yes=False)
            ssh_config.include(home)
        except RefusedError:
            ssh_config.decline()
    if ssh_config.is_included(home):
        say(f"`ssh {found.name}` reaches it")
    else:
        say(f"`ssh -F '{file}' {found.name}` reaches it; ~/.ssh/config could begin with: {line}")


def cloud_of(name: str, region: str, profile: str) -> Cloud:
    from gpukiln.clouds.select import make_cloud

    return make_cloud(name, region, profile=profile or None)


def show_parts(parts: Iterable[RenderableType], *, notices: bool = False) -> None:
    """Show a document for people; `notices`: on standard error."""
    console = results(json=notices)
    for part in parts:
        if isinstance(part, str):
            console.print_text(part)
        else:
            console.print(part)
