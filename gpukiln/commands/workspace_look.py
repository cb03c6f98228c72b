"""Workspaces: looked at, reached, judged, accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, words
from gpukiln.commands.workspace_place import HERE, JSON, PLACE, cloud_of, find, show_parts, tell
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.workspaces.local_state import RegionRecord


@command(
    name="list",
    help={
        "refresh": "ask the regions what they have, and remember that",
        "regions": "which, separated by commas; default: those that are remembered",
        "cloud": "embedded or aws; default: both, as remembered",
        "profile": "AWS profile (aws only)",
        "json": JSON,
    },
)
def list_(
    _: Any, refresh: bool = False, regions: str = "", cloud: str = "", profile: str = "", json: bool = False
) -> None:
    """List workspaces as this computer remembers them, or as the clouds' tags say: --refresh."""
    from gpukiln.workspaces import local_state, view

    found = local_state.regions()
    failed: list[str] = []
    if refresh:
        pairs = [
            (cloud or one.cloud, one.region) for one in found if cloud in ("", one.cloud) and not regions
        ]
        pairs += [(cloud or "embedded", one) for one in words(regions)]
        pairs = pairs or [(cloud or "embedded", HERE)]
        found, failed = _refreshed(list(dict.fromkeys(pairs)), found, profile)
    answer = view.WorkspaceListing(view.LIST, found)
    if json:
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


@command(help={"name": "of the workspace", **PLACE})
def show(
    _: Any, name: str = "", region: str = "", cloud: str = "", profile: str = "", json: bool = False
) -> None:
    """Show a workspace as its tags say: what it answers, its machine, its home."""
    where, found = find(name, cloud, region, profile)
    tell(where, found, json=json)


show.first = "name"


@command(
    help={
        "name": "of the workspace",
        "command": "what is run there; without it a session opens",
        "print": "only print the command of SSH",
        **{key: PLACE[key] for key in ("region", "cloud", "profile")},
    },
    iterable=["command"],
)
def ssh(
    _: Any,
    name: str = "",
    command: Any = None,
    print: bool = False,
    region: str = "",
    cloud: str = "",
    profile: str = "",
) -> int:
    """Open a session on a workspace, or run something there; ends with its exit code."""
    import os
    import shlex

    from gpukiln import programs
    from gpukiln.workspaces.reach import reached

    where, found = find(name, cloud, region, profile)
    typed = reached(where, found).command(*(command or ()), batch=False)
    if print:
        results().tell(shlex.join(typed))
        return 0
    environment = {key: value for key, value in {**os.environ, **where.environment()}.items() if value}
    return programs.attached(typed, environment=environment)


ssh.first = "name"


@command(
    help={
        "name": "of the workspace",
        "deep": "judge the machine and its services with the verification suite, and keep what it says",
        **PLACE,
    }
)
def status(
    _: Any,
    name: str = "",
    deep: bool = False,
    region: str = "",
    cloud: str = "",
    profile: str = "",
    json: bool = False,
) -> int:
    """Say how a workspace is: as its tags say, or --deep as it is. Exit 1: unhealthy."""
    from gpukiln.progress import Progress
    from gpukiln.verify.report import Live, ending
    from gpukiln.workspaces import lifecycle, reach, view

    where, found = find(name, cloud, region, profile)
    verdict, folder, words_ = None, "", lifecycle.only(found).health
    if deep:
        progress = Progress()
        with progress.step(f"look at {found.name}"):
            looked = reach.look(where, found, live=Live(progress))
            if not looked.good:
                progress.fail()
        verdict, folder, words_ = looked.verdict, str(looked.folder), looked.words
        where, found = find(name, where.name, where.region, profile)
    answer = view.status(found, words_, verdict, folder)
    if json:
        print_document(answer.schema, dump(answer))
    else:
        if verdict:
            results().print(ending(verdict))  # `Live` has shown each check
        show_parts(view.status_parts(answer))
    return 0 if answer.good else 1


status.first = "name"


@command(help={"name": "of the workspace", **PLACE})
def env(
    _: Any, name: str = "", region: str = "", cloud: str = "", profile: str = "", json: bool = False
) -> None:
    """Print the variables by which programs find a workspace: eval "$(invoke workspace.env NAME)"."""
    import shlex

    from gpukiln.workspaces.lifecycle import environment

    _, found = find(name, cloud, region, profile)
    variables = environment(found)
    if json:
        print_document("workspace.env/1", variables=variables)
    for key, value in variables.items() if not json else ():
        results().tell(f"export {key}={shlex.quote(value)}")


env.first = "name"


@command(
    help={
        "since": "the first day that counts, for example 2026-11-01; default: all that is known",
        "owner": "only theirs",
        "refresh": "ask the regions first how long their machines have run",
        "profile": "AWS profile (aws only)",
        "json": JSON,
    }
)
def usage(
    _: Any, since: str = "", owner: str = "", refresh: bool = False, profile: str = "", json: bool = False
) -> None:
    """Say how many hours workspaces ran, and what that cost, by owner."""
    from gpukiln.workspaces import local_state
    from gpukiln.workspaces import usage as used

    found: tuple[RegionRecord, ...] = local_state.regions()
    failed: list[str] = []
    if refresh:
        found, failed = _refreshed([(one.cloud, one.region) for one in found], found, profile)
    answer = used.usage([span for one in found for span in one.spans], since=since, owner=owner)
    if json:
        print_document(answer.schema, dump(answer))
    else:
        show_parts(used.usage_parts(answer))
    _require_all(failed)
