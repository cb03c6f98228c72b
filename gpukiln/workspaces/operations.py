"""What commands do with a workspace: each works while no other command of this computer does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from gpukiln.clouds.base import Cloud
from gpukiln.errors import CheckFailedError, GpukilnError, RefusedError, UnavailableError
from gpukiln.files import write_atomic
from gpukiln.progress import Progress
from gpukiln.verify.report import LiveReport
from gpukiln.workspaces import lifecycle, local_state, reach, ssh_config, view, volumes
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.lifecycle import ExistingWorkspace
from gpukiln.workspaces.network import is_started_here, key_file, owner_file
from gpukiln.workspaces.provision import note_running_machines, wait_until_done, workspace_lock
from gpukiln.workspaces.reach import HealthReport, workspace_ssh
from gpukiln.workspaces.volumes import Home

Say = Callable[[str], None]


def details(cloud: Cloud, workspace: ExistingWorkspace) -> view.WorkspaceDetails:
    """A workspace with its outputs; this computer remembers its region as it is now."""
    local_state.refresh(cloud)
    outputs = lifecycle.outputs(cloud, workspace) if workspace.machines else None
    return view.WorkspaceDetails(view.SHOW, workspace, outputs)


def stop(cloud: Cloud, workspace: ExistingWorkspace, say: Say) -> ExistingWorkspace:
    """Stop the machine of a workspace; returns the workspace as it is then."""
    with workspace_lock(cloud, workspace.name):
        # Before the stop, to store the hours until now while the machine is seen running.
        local_state.refresh(cloud)
        if not lifecycle.stop(cloud, workspace):
            say(f"{workspace.name} was stopped already")
    return _refreshed(cloud, workspace)


def start(
    cloud: Cloud, workspace: ExistingWorkspace, say: Say, *, wait: bool
) -> tuple[ExistingWorkspace, HealthReport | None]:
    """Start the machine of a workspace again.

    Args:
        wait: Whether it is waited for, and verified where this computer has its key.

    Returns:
        The workspace as it is then, and its health where it was verified.
    """
    health = None
    with workspace_lock(cloud, workspace.name):
        try:
            if not lifecycle.start(cloud, workspace):
                say(f"{workspace.name} runs already")
            elif wait:
                wait_until_done(cloud, _by_tags(workspace), say=say)
                if key_file(cloud, workspace.name).exists():  # else this computer can't reach it
                    health = reach.check_health(cloud, _refreshed(cloud, workspace))
        # Ctrl-C ends the waiting, not the machine: the note names what runs and costs money.
        except KeyboardInterrupt as interrupt:
            note_running_machines(cloud, _refreshed(cloud, workspace), interrupt)
            raise
    return _refreshed(cloud, workspace), health


def require_healthy(workspace: ExistingWorkspace, health: HealthReport | None) -> None:
    """Raises CheckFailedError where a workspace was found unhealthy."""
    if health and not health.is_healthy:
        raise CheckFailedError(
            f"{workspace.name} is {health.words}", hint=f"the report is in {health.folder}"
        )


def verify(cloud: Cloud, workspace: ExistingWorkspace) -> HealthReport:
    """Verify the machine of a workspace by the host suite; each check is shown when it is done."""
    progress = Progress()
    with progress.step(f"look at {workspace.name}"):
        health = reach.check_health(cloud, workspace, live=LiveReport(progress))
        if not health.is_healthy:
            progress.fail()
    return health


def require_owner(cloud: Cloud, workspace: ExistingWorkspace, owner: str, *, keep_home: bool) -> None:
    """Refuse to remove a workspace that another computer started, unless its owner is named.

    Raises:
        RefusedError: The owner is not named.
    """
    # With --keep-home and no machine nothing of the owner's is lost.
    removes = workspace.machines or (workspace.homes and not keep_home)
    if removes and not owner and not is_started_here(cloud, workspace.name, workspace.owner):
        raise RefusedError(
            f"{workspace.name} is {workspace.owner}'s, and this computer did not start it",
            hint=f"--owner {workspace.owner} confirms that you know",
        )


def remove(
    cloud: Cloud, workspace: ExistingWorkspace, owner: str, *, keep_home: bool, force: bool
) -> Iterator[str]:
    """Remove a workspace; yields what became of its home and of itself, a line each.

    Args:
        owner: As it was named; empty: by its tags.
        force: Whether it is removed though somebody works there.
    """
    with workspace_lock(cloud, workspace.name):
        # Before the removal: a machine that is gone counts until it was last seen running, which is now.
        local_state.refresh(cloud)
        removed = replace(_by_tags(workspace), owner=owner or workspace.owner)
        # Asked now, since the tag on the machine may be minutes old.
        busy = None if force else reach.ask_busy(cloud, workspace)
        lifecycle.remove_workspace(cloud, removed, workspace, keep_home=keep_home, force=force, busy=busy)
        # After the removal, which can be refused: the workspace is still reached by its name then.
        ssh_config.remove_entry(workspace.name)
        # With a kept home the owner stays noted, so that a later `workspace.down` of it needs no --owner
        # here.
        if not keep_home:
            owner_file(cloud, workspace.name).unlink(missing_ok=True)
        local_state.refresh(cloud)
    for home in workspace.homes:
        result = "is kept" if keep_home else "is removed"
        yield f"its home {home.volume_id} of {home.size_gib} GiB in {home.zone} {result}"
    yield f"{workspace.name} is removed"


def forget(cloud: Cloud, name: str) -> None:
    """Remove what this computer still has of a workspace that is gone."""
    owner_file(cloud, name).unlink(missing_ok=True)
    ssh_config.remove_entry(name)


def move(cloud: Cloud, workspace: ExistingWorkspace, zone: str, say: Say) -> Home:
    """Copy the home of a workspace into another zone, and remove the old one.

    Raises:
        UnavailableError: It has no home, or the cloud refused.
    """
    if not workspace.homes:
        raise UnavailableError(f"{workspace.name} has no home", hint="there is nothing to move")
    with workspace_lock(cloud, workspace.name):
        home = volumes.move(cloud, workspace.homes[0], zone, say=say)
        local_state.refresh(cloud)
    return home


def reach_by_name(
    cloud: Cloud, workspace: ExistingWorkspace, say: Say, ask: Callable[[str], bool] | None
) -> None:
    """Have `ssh NAME` reach a workspace.

    Args:
        ask: Asks whether a line is added to ~/.ssh/config, once; None: there is no terminal.
    """
    home, name = Path.home(), workspace.name
    try:
        file = ssh_config.write_entry(home, name, workspace_ssh(cloud, workspace))
    # The workspace runs, and has been reported: a missing entry is no failure of the command.
    except GpukilnError as error:
        say(f"note: `ssh {name}` does not reach it: {error.message}")
        return
    line = ssh_config.include_line()
    if ask and not ssh_config.is_included(home) and not ssh_config.is_declined():
        if ask(line):
            ssh_config.include(home)
        else:
            ssh_config.decline()
    if ssh_config.is_included(home):
        say(f"`ssh {name}` reaches it")
    else:
        say(f"`ssh -F '{file}' {name}` reaches it; ~/.ssh/config could begin with: {line}")


def write_files(files: dict[str, bytes], out: str, say: Say, *, folder: bool) -> None:
    """Write rendered files.

    Args:
        out: A file, or a folder that is made where it is missing.
        folder: Whether it is a folder, for one file or several.
    """
    for name, content in files.items():
        path = Path(out) / name if folder else Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Rendered files are committed or given to Terraform; they have no secrets.
        write_atomic(path, content, mode=0o644)
        say(f"{path}: {len(content)} bytes")


def _refreshed(cloud: Cloud, workspace: ExistingWorkspace) -> ExistingWorkspace:
    same = (item for item in local_state.refresh(cloud).workspaces if item.name == workspace.name)
    # Where the region does not list it any more, the last known state is shown.
    return next(same, workspace)


def _by_tags(workspace: ExistingWorkspace) -> Workspace:
    """What the tags of a workspace say, which is all that is needed to remove it."""
    return Workspace(workspace.name, workspace.owner, workspace.region)
