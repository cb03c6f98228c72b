"""Live GPU nodes: converge them, judge them, tell how they drifted; test the roles on machines."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpukiln.commands import settings
from gpukiln.commands.cli import HostOptions, JsonOptions, RemovalOptions, print_document, results, say, words
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from pathlib import Path

    from gpukiln.nodes.playbook import PlaybookRequest
    from gpukiln.nodes.results import RunResult
    from gpukiln.nodes.runs import NodeRun, RunStore
    from gpukiln.verify.verdict import Verdict

OPTIONAL_ROLES = ("docker_compose", "dcgm", "ci_runner", "kasmvnc")


@dataclass(frozen=True)
class ConvergeOptions(JsonOptions):
    """What nodes are to be."""

    inventory: str = option("Ansible inventory: a file or a folder")
    limit: str = option("only these hosts, an Ansible pattern")
    forks: int = option("hosts that are worked on at the same time", 20)
    set: str = option("change a component, NAME.FIELD=VALUE, separated by commas", setting="components")
    leave_out: str = option(
        "components not to install, separated by commas, for example nvidia_container_toolkit"
    )
    also: str = option(f"optional roles, separated by commas: {', '.join(OPTIONAL_ROLES)}")

    def request(self, playbook: str, *, check: bool, **variables: Any) -> PlaybookRequest:
        """What Ansible is to do."""
        from gpukiln.catalog.components import apply_overrides, as_plain, load_components
        from gpukiln.errors import UsageError
        from gpukiln.nodes.playbook import PlaybookRequest
        from gpukiln.project import OwnRoles, role_variables, roles

        if not self.inventory:
            raise UsageError("--inventory is missing", hint="ansible/inventory/example.yml is one to copy")
        if self.forks < 1:
            raise UsageError(f"--forks is {self.forks}, wanted 1 or more")
        components = as_plain(apply_overrides(load_components(), words(self.set)))
        left_out, also = words(self.leave_out), words(self.also)
        if unknown := [name for name in left_out if name not in components]:
            raise UsageError(f"there is no component {unknown[0]!r}", hint=f"valid: {', '.join(components)}")
        if unknown := [name for name in also if name not in OPTIONAL_ROLES]:
            raise UsageError(
                f"there is no optional role {unknown[0]!r}", hint=f"valid: {', '.join(OPTIONAL_ROLES)}"
            )
        chosen = {"gpukiln_left_out": left_out, "gpukiln_also": also}
        own = OwnRoles() if playbook == "pve.yml" else roles()  # a hypervisor is no GPU node
        return PlaybookRequest(
            playbook=playbook,
            inventory=_absolute(self.inventory),
            limit=self.limit,
            check=check,
            forks=self.forks,
            variables={
                "components": components,
                **{name: value for name, value in chosen.items() if value},
                **role_variables(own),
                **variables,
            },
            own_roles=own,
        )


@dataclass(frozen=True)
class NodeApply(ConvergeOptions):
    """Converge live GPU nodes: driver, persistence, container runtime and toolkit, nvtop, bootstrap."""

    check: bool = option("change nothing, show what would change", False)
    batch: str = option(
        "hosts a batch, as a number, a percentage or a list of them (1,10%,50%); a failure ends it", "100%"
    )
    reboot: bool = option(
        "reboot a node where another driver, or nouveau, is loaded; without, that is an error", False
    )
    resume: str = option("only the hosts that an earlier run did not finish: its id, or `last`")
    pve: bool = option(
        "prepare Proxmox VE hosts to give their GPUs to VMs (the role pve_host), nothing else", False
    )

    def run(self) -> int:
        from gpukiln.errors import UsageError

        batches = [part.strip() for part in self.batch.split(",")]
        if wrong := [part for part in batches if not re.fullmatch(r"[1-9]\d*%?", part)]:
            raise UsageError(
                f"--batch has {wrong[0]!r}, wanted a number or a percentage", hint="--batch 1,10%,50%"
            )
        if self.resume:
            if self.limit:
                raise UsageError("--resume names its hosts itself, --limit can't be given with it")
            inventory, limit = _resumed(self.resume, self.inventory)
            return replace(self, inventory=inventory, limit=limit, resume="").run()
        changed = self.set if self.set != settings.components() else ""
        if self.pve and (self.leave_out or self.also or changed or self.reboot):
            raise UsageError(
                "--pve has one role, and --set, --leave-out, --also and --reboot are about others",
                hint="pve_host_reboot in the inventory has it reboot",
            )
        # without --reboot it is the inventory's choice
        reboot = {"nvidia_driver_reboot_allowed": True} if self.reboot else {}
        playbook = "pve.yml" if self.pve else "node.yml"
        request = self.request(playbook, check=self.check, gpukiln_batch=batches, **reboot)
        run, result = _run("apply", request)
        _report("apply", run, result, request, as_json=self.json)
        return _exit_code(result)


@dataclass(frozen=True)
class NodeDrift(ConvergeOptions):
    """Compare live nodes with what they should be; nothing is changed. Exit 1: something differs."""

    def run(self) -> int:
        request = self.request("drift.yml", check=True)
        run, result = _run("drift", request)
        _report("drift", run, result, request, as_json=self.json)
        if any(host.changes for host in result.hosts.values()) and not result.stopped:
            return 1
        return _exit_code(result)


LEAST_SECONDS = 10  # a suite needs some to start, and a machine to answer


@dataclass(frozen=True)
class VerifyOptions(HostOptions):
    """What is examined by the host suite."""

    profile: str = option(
        "what they are: node, or eks-node for one that was booted from a baked image", "node"
    )
    expect_gpus: int = option(
        "GPUs that each must have; without it one at least, 0 where there is none to expect", -1
    )
    simulated: bool = option(
        "judge simulated GPUs too, as far as that makes sense; such a verdict proves nothing", False
    )
    forks: int = option("hosts that are judged at the same time", 4)
    max_seconds: int = option(
        "end within so many seconds, whatever hangs: what was not looked at is not reached", 1800
    )

    def examine(self, purpose: str, **how: Any) -> int:
        """Run the suite on each; returns the exit code."""
        from time import monotonic

        from gpukiln.errors import UsageError
        from gpukiln.nodes.verify import verify_hosts
        from gpukiln.nodes.view import render_verified
        from gpukiln.progress import Progress
        from gpukiln.verify.html import write_html
        from gpukiln.verify.report import Live

        if self.forks < 1:
            raise UsageError(f"--forks is {self.forks}, wanted 1 or more")
        if self.max_seconds < LEAST_SECONDS:
            raise UsageError(f"--max-seconds is {self.max_seconds}, wanted {LEAST_SECONDS} or more")
        until = monotonic() + self.max_seconds
        targets = self.targets()
        run, progress = _runs().create(purpose), Progress()
        with progress.step(f"judge {len(targets)} host{'s' if len(targets) > 1 else ''}"):
            verified = verify_hosts(
                targets,
                run.folder,
                **how,
                **self.pick("profile", "simulated", "forks"),
                expect_gpus=None if self.expect_gpus < 0 else self.expect_gpus,
                max_seconds=until - monotonic(),
                on_host=lambda host, words: progress.say(f"{host}: {words}"),
                live=Live(progress) if len(targets) == 1 and purpose == "verify" else None,
            )
            if not all(one.verdict and one.verdict.passed for one in verified):
                progress.fail()
        shown = results(json=self.json)
        shown.print(render_verified(verified))
        page = run.folder / "report.html"
        write_html(verified, page)
        shown.tell(f"report: {page}")
        if self.json:
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


@dataclass(frozen=True)
class NodeVerify(VerifyOptions):
    """Judge live nodes with the host suite, docs/checks.md; nothing is changed. Exit 1: a check failed."""

    layer: str = option("only these layers of docs/checks.md, separated by commas")
    require: str = option("layers in which a check that is not run counts as failed, separated by commas")

    def run(self) -> int:
        return self.examine("verify", layers=words(self.layer), require=words(self.require))


@dataclass(frozen=True)
class NodeDoctor(VerifyOptions):
    """Find all that is wrong with a sick node, what keeps its GPUs from working first. Changes nothing."""

    max_seconds: int = option(
        "end within so many seconds, whatever hangs: what was not looked at is not reached", 300
    )

    def run(self) -> int:
        return self.examine("doctor")


@dataclass(frozen=True)
class NodeTest(JsonOptions):
    """Test the roles with Molecule: real machines, converged twice and judged. Exit 1: one failed."""

    scenario: str = option("names separated by commas; without it all that need no image pulled")
    list: bool = option("only list the scenarios", False)

    def run(self) -> int:
        from gpukiln.nodes.scenarios import choose, load_scenarios, run_scenario
        from gpukiln.nodes.view import render_outcomes, render_scenarios
        from gpukiln.progress import Progress

        if self.list:
            scenarios = load_scenarios()
            if self.json:
                print_document("node.test.list/1", scenarios=[one.to_dict() for one in scenarios.values()])
            else:
                results().print(render_scenarios([*scenarios.values()]))
            return 0
        chosen, others = choose(words(self.scenario))
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
        shown = results(json=self.json)
        shown.print(render_outcomes(outcomes, others))
        shown.tell(f"logs: {run.folder}")
        if self.json:
            print_document("node.test/1", document)
        return int(any(outcome.state == "failed" for outcome in outcomes))


@dataclass(frozen=True)
class NodeRunsCommand(RemovalOptions, JsonOptions):
    """Show the folders of earlier runs, and of verdicts on images made elsewhere; --yes removes old ones."""

    keep: int = option("runs of each kind that stay, the newest", 20)
    older_than: int = option("days; younger runs stay", 30)

    def run(self) -> int:
        from gpukiln.errors import PartialError
        from gpukiln.nodes.runs import old_runs, remove_run
        from gpukiln.nodes.view import render_runs
        from gpukiln.proof.verify import report_folders
        from gpukiln.state import state_home

        images = [("image", folder) for folder in report_folders(state_home())]
        found = old_runs([*_runs().folders(), *images], keep=self.keep, older_than_days=self.older_than)
        if self.removes:
            found = [remove_run(run) if run.action == "remove" else run for run in found]
        if self.json:
            print_document("node.runs/1", runs=[run.to_dict() for run in found])
        elif found:
            results().print(render_runs(found))
        else:
            say("no run has left anything on this machine")
        if found and not self.removes:
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


def _runs() -> RunStore:
    from gpukiln.nodes.runs import RunStore
    from gpukiln.state import state_home

    return RunStore(state_home())


def _absolute(path: str) -> Path:
    from pathlib import Path

    return Path(path).expanduser().absolute()
