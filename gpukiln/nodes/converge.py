"""Converges nodes, or compares them with what they should be: the request, the run and its exit code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from gpukiln.catalog.components import apply_overrides, load_components, to_plain_data
from gpukiln.errors import CheckFailedError, PartialError, UnavailableError, UsageError
from gpukiln.nodes.playbook import (
    PlaybookRequest,
    list_hosts,
    read_inventory,
    require_known_variables,
    run_playbook,
    ungrouped_warning,
)
from gpukiln.nodes.results import RunResult
from gpukiln.nodes.runs import NodeRun, RunStore
from gpukiln.nodes.view import render
from gpukiln.progress import Progress
from gpukiln.project import OwnRoles, role_variables, roles

# Roles of the playbook that run only if they are named, see `gpukiln_also` in ansible/node.yml.
OPTIONAL_ROLES = ("docker_compose", "dcgm", "ci_runner", "kasmvnc")
PVE = "pve.yml"


def playbook_request(
    playbook: str,
    *,
    inventory: str,
    limit: str,
    check: bool,
    forks: int,
    overrides: Sequence[str],
    left_out: Sequence[str],
    also: Sequence[str],
    **variables: Any,
) -> PlaybookRequest:
    """A request to Ansible from options as they are typed.

    Args:
        overrides: NAME.FIELD=VALUE of components.
        left_out: Components that are not installed.
        also: Optional roles.
        variables: Further variables of the playbook.

    Raises:
        UsageError: A name is unknown, or no inventory is named.
    """
    if not inventory:
        raise UsageError("--inventory is missing", hint="ansible/inventory/example.yml is one to copy")
    if forks < 1:
        raise UsageError(f"--forks is {forks}, wanted 1 or more")
    components = to_plain_data(apply_overrides(load_components(), overrides))
    # Ansible would skip nothing for a misspelled name, and install the component.
    if unknown := [name for name in left_out if name not in components]:
        raise UsageError(f"there is no component {unknown[0]!r}", hint=f"valid: {', '.join(components)}")
    if unknown := [name for name in also if name not in OPTIONAL_ROLES]:
        raise UsageError(
            f"there is no optional role {unknown[0]!r}", hint=f"valid: {', '.join(OPTIONAL_ROLES)}"
        )
    if left_out:
        variables["gpukiln_left_out"] = [*left_out]
    if also:
        variables["gpukiln_also"] = [*also]
    own = OwnRoles() if playbook == PVE else roles()  # a hypervisor is no GPU node
    # The caller's variables last: they are the ones that were typed.
    variables = {"components": components, **role_variables(own), **variables}
    return PlaybookRequest(playbook, absolute(inventory), limit, check, forks, variables, own_roles=own)


def parse_batches(text: str) -> list[str]:
    """The sizes of batches of hosts, as Ansible's `serial` takes them.

    >>> parse_batches("1, 10%,50%")
    ['1', '10%', '50%']
    >>> parse_batches("100%")
    ['100%']

    Raises:
        UsageError: A size is neither a number nor a percentage.
    """
    # `serial` repeats its last size until all hosts are done.
    batches = [size.strip() for size in text.split(",")]
    if wrong := [size for size in batches if not re.fullmatch(r"[1-9]\d*%?", size)]:
        raise UsageError(
            f"--batch has {wrong[0]!r}, wanted a number or a percentage", hint="--batch 1,10%,50%"
        )
    return batches


def resumed(name: str, inventory: str) -> tuple[str, str]:
    """The inventory of an earlier run, and the hosts that it did not finish.

    Args:
        inventory: As typed; empty: that of the run.

    Raises:
        UsageError: There is no such run, it had another inventory, or it finished every host.
    """
    earlier = RunStore().find(name).read()
    # The names of an earlier run may mean other machines in another inventory.
    if inventory and str(absolute(inventory)) != earlier["inventory"]:
        raise UsageError(f"run {earlier['id']} was made with the inventory {earlier['inventory']}")
    if not earlier["unfinished"]:
        raise UsageError(f"run {earlier['id']} finished every host, there is nothing to resume")
    return earlier["inventory"], ",".join(earlier["unfinished"])


def converge(purpose: str, request: PlaybookRequest, say: Callable[[str], None]) -> tuple[NodeRun, RunResult]:
    """Run a playbook on the hosts of a request, and keep its logs and its result.

    Args:
        purpose: apply or drift.
        say: Gets a notice of hosts that the playbook does not reach.
    """
    # All of it before the folder of the run exists: a refused request leaves none.
    hosts = list_hosts(request)
    inventory = read_inventory(request)
    # Before a host is reached: Ansible ignores a misspelled variable without a warning.
    require_known_variables(request, inventory)
    if notice := ungrouped_warning(request, inventory, hosts):
        say(notice)
    # After all checks, so that a request that is refused leaves no folder of a run.
    run, progress = RunStore().create(purpose), Progress()
    check, plural = " (check)" if request.check else "", "s" if len(hosts) > 1 else ""
    with progress.step(f"{purpose}{check} on {len(hosts)} host{plural}"):
        result = run_playbook(
            request,
            hosts,
            run.folder,
            on_host=lambda host, state: progress.say(f"{host}: {state}"),
            on_task=lambda host, task: progress.show_activity(f"{host}: {task}"),
        )
        if result.unfinished:
            progress.fail()
    run.write(request, result)
    return run, result


def converge_parts(run: NodeRun, result: RunResult, request: PlaybookRequest) -> Iterator[RenderableType]:
    """The result of a run, for people."""
    yield render(result, check=request.check)
    yield f"logs: {run.folder}"
    if result.unfinished and not request.check:
        pve = " --pve" if request.playbook == PVE else ""
        yield f"resume: invoke node.apply --resume {run.id}{pve}"


def exit_code(result: RunResult) -> int:
    """The exit code of a run.

    Raises:
        KeyboardInterrupt: The run was interrupted.
    """
    # As after Ctrl-C in any command: exit code 130; the result was written before.
    if result.stopped:
        raise KeyboardInterrupt
    if not result.unfinished:
        return 0
    if len(result.unfinished) < len(result.hosts):
        return PartialError.exit_code
    # No host is done. A failed task is the host's fault (1); hosts that were only unreachable are the
    # environment's (4).
    reached = any(host.state == "failed" for host in result.hosts.values())
    return CheckFailedError.exit_code if reached else UnavailableError.exit_code


def absolute(path: str) -> Path:
    """A path as it is typed: Ansible runs in another folder."""
    return Path(path).expanduser().absolute()
