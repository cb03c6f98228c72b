"""Live GPU nodes: converge them, judge them, tell how they drifted; test the roles on machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, say, words
from gpukiln.typed import dump

if TYPE_CHECKING:
    from pathlib import Path

    from gpukiln.nodes.playbook import PlaybookRequest
    from gpukiln.nodes.results import RunResult
    from gpukiln.nodes.runs import NodeRun
    from gpukiln.verify.verdict import Verdict

OPTIONAL_ROLES = ("docker_compose", "dcgm", "ci_runner", "kasmvnc")
COMMON = {
    "inventory": "Ansible inventory: a file or a folder",
    "limit": "only these hosts, an Ansible pattern",
    "forks": "hosts that are worked on at the same time",
    "set": "change a component, NAME.FIELD=VALUE, separated by commas",
    "leave_out": "components not to install, separated by commas, for example nvidia_container_toolkit",
    "also": "optional roles, separated by commas: docker_compose, dcgm, ci_runner, kasmvnc",
    "json": "print one JSON document to standard output",
}


@command(
    help={
        **COMMON,
        "check": "change nothing, show what would change",
        "batch": "hosts a batch, as a number, a percentage or a list of them (1,10%,50%); a failure ends it",
        "reboot": "reboot a node where another driver, or nouveau, is loaded; without, that is an error",
        "pve": "prepare Proxmox VE hosts to give their GPUs to VMs (the role pve_host), nothing else",
        "resume": "only the hosts that an earlier run did not finish: its id, or `last`",
    }
)
def apply(
    _: Any,
    inventory: str = "",
    limit: str = "",
    check: bool = False,
    batch: str = "100%",
    forks: int = 20,
    reboot: bool = False,
    resume: str = "",
    set: str = "",
    leave_out: str = "",
    also: str = "",
    pve: bool = False,
    json: bool = False,
) -> int:
    """Converge live GPU nodes: driver, persistence, container runtime and toolkit, nvtop, bootstrap."""
    from gpukiln.errors import UsageError

    batches = [part.strip() for part in batch.split(",")]
    if wrong := [part for part in batches if not re.fullmatch(r"[1-9]\d*%?", part)]:
        raise UsageError(
            f"--batch has {wrong[0]!r}, wanted a number or a percentage", hint="--batch 1,10%,50%"
        )
    if resume:
        if limit:
            raise UsageError("--resume names its hosts itself, --limit can't be given with it")
        inventory, limit = _resumed(resume, inventory)
    if pve and (leave_out or also or set or reboot):
        raise UsageError(
            "--pve has one role, and --set, --leave-out, --also and --reboot are about others",
            hint="pve_host_reboot in the inventory has it reboot",
        )
    request = _request(
        "pve.yml" if pve else "node.yml",
        inventory,
        limit,
        forks,
        set,
        leave_out,
        also,
        check=check,
        variables={
            "gpukiln_batch": batches,
            # without the flag it is the inventory's choice
            **({"nvidia_driver_reboot_allowed": True} if reboot else {}),
        },
    )
    run, result = _run("apply", request)
    _report("apply", run, result, request, as_json=json)
    return _exit_code(result)


@command(help=COMMON)
def drift(
    _: Any,
    inventory: str = "",
    limit: str = "",
    forks: int = 20,
    set: str = "",
    leave_out: str = "",
    also: str = "",
    json: bool = False,
) -> int:
    """Compare live nodes with what they should be; nothing is changed. Exit 1: something differs."""
    request = _request("drift.yml", inventory, limit, forks, set, leave_out, also, check=True, variables={})
    run, result = _run("drift", request)
    _report("drift", run, result, request, as_json=json)
    if any(host.changes for host in result.hosts.values()) and not result.stopped:
        return 1
    return _exit_code(result)


LEAST_SECONDS = 10  # a suite needs some to start, and a machine to answer
JUDGED = {
    **{name: COMMON[name] for name in ("inventory", "limit", "json")},
    "hosts": "ssh://[USER@]HOST[:PORT], local:// or ansible://PATTERN, separated by commas",
    "profile": "what they are: node, or eks-node for one that was booted from a baked image",
    "expect_gpus": "GPUs that each must have; without it one at least, 0 where there is none to expect",
    "forks": "hosts that are judged at the same time",
    "max_seconds": "end within so many seconds, whatever hangs: what was not looked at is not reached",
    "simulated": "judge simulated GPUs too, as far as that makes sense; such a verdict proves nothing",
}


@command(
    help={
        **JUDGED,
        "layer": "only these layers of docs/checks.md, separated by commas",
        "require": "layers in which a check that is not run counts as failed, separated by commas",
    }
)
def verify(
    _: Any,
    inventory: str = "",
    limit: str = "",
    hosts: str = "",
    profile: str = "node",
    expect_gpus: int = -1,
    layer: str = "",
    require: str = "",
    simulated: bool = False,
    forks: int = 4,
    max_seconds: int = 1800,
    json: bool = False,
) -> int:
    """Judge live nodes with the host suite, docs/checks.md; nothing is changed. Exit 1: a check failed."""
    return _verify(
        "verify",
        hosts,
        inventory,
        limit,
        forks,
        max_seconds,
        as_json=json,
        profile=profile,
        expect_gpus=None if expect_gpus < 0 else expect_gpus,
        layers=words(layer),
        require=words(require),
        simulated=simulated,
    )


@command(help=JUDGED)
def doctor(
    _: Any,
    inventory: str = "",
    limit: str = "",
    hosts: str = "",
    profile: str = "node",
    expect_gpus: int = -1,
    simulated: bool = False,
    forks: int = 4,
    max_seconds: int = 300,
    json: bool = False,
) -> int:
    """Find all that is wrong with a sick node, what keeps its GPUs from working first. Changes nothing."""
    return _verify(
        "doctor",
        hosts,
        inventory,
        limit,
        forks,
        max_seconds,
        as_json=json,
        profile=profile,
        expect_gpus=None if expect_gpus < 0 else expect_gpus,
        simulated=simulated,
    )


def _verify(
    purpose: str,
    hosts: str,
    inventory: str,
    limit: str,
    forks: int,
    max_seconds: int,
    *,
    as_json: bool,
    **how: Any,
) -> int:
    from time import monotonic

    from gpukiln.errors import UsageError
    from gpukiln.nodes.hosts import find_targets
    from gpukiln.nodes.verify import verify_hosts
    from gpukiln.nodes.view import render_verified
    from gpukiln.progress import Progress
    from gpukiln.verify.html import write_html
    from gpukiln.verify.report import Live

    if forks < 1:
        raise UsageError(f"--forks is {forks}, wanted 1 or more")
    if max_seconds < LEAST_SECONDS:
        raise UsageError(f"--max-seconds is {max_seconds}, wanted {LEAST_SECONDS} or more")
    until = monotonic() + max_seconds
    targets = find_targets(hosts, _absolute(inventory) if inventory else None, limit)
    run, progress = _runs().create(purpose), Progress()
    with progress.step(f"judge {len(targets)} host{'s' if len(targets) > 1 else ''}"):
        verified = verify_hosts(
            targets,
            run.folder,
            **how,
            forks=forks,
            max_seconds=until - monotonic(),
            on_host=lambda host, words: progress.say(f"{host}: {words}"),
            live=Live(progress) if len(targets) == 1 and purpose == "verify" else None,
        )
        if not all(one.verdict and one.verdict.passed for one in verified):
            progress.fail()
    shown = results(json=as_json)
    shown.print(render_verified(verified))
    page = run.folder / "report.html"
    write_html(verified, page)
    shown.tell(f"report: {page}")
    if as_json:
        rows = [
            {
                "host": one.target,
                "reason": one.reason,
                "diagnosis": one.diagnosis,
                "verdict": dump(one.verdict) if one.verdict else None,
            }
            for one in verified
        ]
        print_document(f"node.{purpose}/1", hosts=rows)
    return _exit_code_of_verdicts([one.verdict for one in verified])


@command(
    name="test",
    help={
        "scenario": "names separated by commas; without it all that need no image pulled",
        "list": "only list the scenarios",
        "json": COMMON["json"],
    },
)
def run_scenarios(_: Any, scenario: str = "", list: bool = False, json: bool = False) -> int:
    """Test the roles with Molecule: real machines, converged twice and judged. Exit 1: one failed."""
    from gpukiln.nodes.scenarios import choose, load_scenarios, run_scenario
    from gpukiln.nodes.view import render_outcomes, render_scenarios
    from gpukiln.progress import Progress

    if list:
        scenarios = load_scenarios()
        if json:
            print_document("node.test.list/1", scenarios=[one.to_dict() for one in scenarios.values()])
        else:
            results().print(render_scenarios([*scenarios.values()]))
        return 0
    chosen, others = choose(words(scenario))
    runs = _runs()
    progress, run = Progress(runs.last_test_durations()), runs.create("test")
    outcomes = []
    for one in chosen:
        with progress.step(one.name):
            outcomes.append(run_scenario(one, run.folder / f"{one.name}.log", progress.say))
            if outcomes[-1].state == "failed":
                progress.fail()
    document = {
        "id": run.id,
        "scenarios": [dump(outcome) for outcome in outcomes],
        "not_run": [one.name for one in others],
    }
    run.write_document(document)
    shown = results(json=json)
    shown.print(render_outcomes(outcomes, others))
    shown.tell(f"logs: {run.folder}")
    if json:
        print_document("node.test/1", document)
    return int(any(outcome.state == "failed" for outcome in outcomes))


@command(
    help={
        "keep": "runs of each kind that stay, the newest",
        "older_than": "days; younger runs stay",
        "yes": "remove them; without it nothing is removed",
        "dry_run": "only show them, the default",
        "json": COMMON["json"],
    }
)
def runs(
    _: Any, keep: int = 20, older_than: int = 30, yes: bool = False, dry_run: bool = False, json: bool = False
) -> int:
    """Show the folders of earlier runs, and of verdicts on images made elsewhere; --yes removes old ones."""
    from gpukiln.errors import PartialError
    from gpukiln.nodes.runs import old_runs, remove_run
    from gpukiln.nodes.view import render_runs
    from gpukiln.proof.verify import report_folders
    from gpukiln.state import state_home

    images = [("image", folder) for folder in report_folders(state_home())]
    found = old_runs([*_runs().folders(), *images], keep=keep, older_than_days=older_than)
    removing = yes and not dry_run
    if removing:
        found = [remove_run(run) if run.action == "remove" else run for run in found]
    if json:
        print_document("node.runs/1", runs=[run.to_dict() for run in found])
    elif found:
        results().print(render_runs(found))
    else:
        say("no run has left anything on this machine")
    if found and not removing:
        going = sum(run.action == "remove" for run in found)
        what = f"--yes removes these {going} of {len(found)}" if going else "all of them stay"
        say(f"nothing was removed: {what}")
    if failed := [run for run in found if run.action == "failed"]:
        raise PartialError(
            f"{len(failed)} of {len(found)} runs could not be removed",
            details=tuple(f"{run.folder}: {run.reason}" for run in failed),
        )
    return 0


def _exit_code_of_verdicts(verdicts: list[Verdict | None]) -> int:
    from gpukiln.errors import CheckFailedError, PartialError, UnavailableError

    if any(verdict and verdict.failures for verdict in verdicts):
        return CheckFailedError.exit_code
    if all(verdict and verdict.passed for verdict in verdicts):
        return 0
    # neither wrong nor well: a host could not be judged, or the time was up before all of it was
    return PartialError.exit_code if any(verdicts) else UnavailableError.exit_code


def _request(
    playbook: str,
    inventory: str,
    limit: str,
    forks: int,
    overrides: str,
    leave_out: str,
    also: str,
    *,
    check: bool,
    variables: dict[str, Any],
) -> PlaybookRequest:
    from pathlib import Path

    from gpukiln.catalog.components import apply_overrides, as_plain, load_components
    from gpukiln.errors import UsageError
    from gpukiln.nodes.playbook import PlaybookRequest

    if not inventory:
        raise UsageError("--inventory is missing", hint="ansible/inventory/example.yml is one to copy")
    if forks < 1:
        raise UsageError(f"--forks is {forks}, wanted 1 or more")
    components = as_plain(apply_overrides(load_components(), words(overrides)))
    left_out = words(leave_out)
    if unknown := [name for name in left_out if name not in components]:
        raise UsageError(f"there is no component {unknown[0]!r}", hint=f"valid: {', '.join(components)}")
    if unknown := [name for name in words(also) if name not in OPTIONAL_ROLES]:
        raise UsageError(
            f"there is no optional role {unknown[0]!r}", hint=f"valid: {', '.join(OPTIONAL_ROLES)}"
        )
    return PlaybookRequest(
        playbook=playbook,
        inventory=Path(inventory).expanduser().absolute(),
        limit=limit,
        check=check,
        forks=forks,
        variables={
            "components": components,
            **({"gpukiln_left_out": left_out} if left_out else {}),
            **({"gpukiln_also": words(also)} if also else {}),
            **variables,
        },
    )


def _resumed(name: str, inventory: str) -> tuple[str, str]:
    from gpukiln.errors import UsageError

    earlier = _runs().find(name).read()
    if inventory and str(_absolute(inventory)) != earlier["inventory"]:
        raise UsageError(f"run {earlier['id']} was made with the inventory {earlier['inventory']}")
    if not earlier["unfinished"]:
        raise UsageError(f"run {earlier['id']} finished every host, there is nothing to resume")
    return earlier["inventory"], ",".join(earlier["unfinished"])


def _run(purpose: str, request: PlaybookRequest) -> tuple[NodeRun, RunResult]:
    from gpukiln.nodes.playbook import (
        list_hosts,
        read_inventory,
        require_known_variables,
        run_playbook,
        without_group,
    )
    from gpukiln.progress import Progress

    hosts = list_hosts(request)
    inventory = read_inventory(request)
    require_known_variables(request, inventory)
    if told := without_group(request, inventory, hosts):
        say(told)
    run = _runs().create(purpose)
    progress = Progress()
    what = (
        f"{purpose}{' (check)' if request.check else ''} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    )
    with progress.step(what):
        result = run_playbook(
            request,
            hosts,
            run.folder,
            on_host=lambda host, words: progress.say(f"{host}: {words}"),
            on_task=lambda host, task: progress.doing(f"{host}: {task}"),
        )
        if result.unfinished:
            progress.fail()
    run.write(request, result)
    return run, result


def _report(
    purpose: str, run: NodeRun, result: RunResult, request: PlaybookRequest, *, as_json: bool
) -> None:
    from gpukiln.nodes.view import render

    shown = results(json=as_json)
    shown.print(render(result, check=request.check))
    shown.tell(f"logs: {run.folder}")
    if result.unfinished and not request.check:
        pve = " --pve" if request.playbook == "pve.yml" else ""
        shown.tell(f"resume: invoke node.apply --resume {run.id}{pve}")
    if as_json:
        print_document(f"node.{purpose}/1", dump(result), id=run.id, unfinished=result.unfinished)


def _exit_code(result: RunResult) -> int:
    from gpukiln.errors import CheckFailedError, PartialError, UnavailableError

    if result.stopped:
        raise KeyboardInterrupt
    if not result.unfinished:
        return 0
    if len(result.unfinished) < len(result.hosts):
        return PartialError.exit_code
    reached = any(host.state == "failed" for host in result.hosts.values())
    return CheckFailedError.exit_code if reached else UnavailableError.exit_code


def _runs() -> Any:
    from gpukiln.nodes.runs import NodeRuns
    from gpukiln.state import state_home

    return NodeRuns(state_home())


def _absolute(path: str) -> Path:
    from pathlib import Path

    return Path(path).expanduser().absolute()
