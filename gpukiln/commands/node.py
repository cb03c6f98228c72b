"""Live GPU nodes: converge, verify and compare them; test the roles on machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpukiln.cli import settings
from gpukiln.cli.command import HostOptions, JsonOptions, RemovalOptions, say, words
from gpukiln.errors import UsageError
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.nodes.playbook import PlaybookRequest
    from gpukiln.nodes.results import RunResult

# As gpukiln/nodes/converge.py has them, which is slow to import for a help text.
OPTIONAL_ROLES = "docker_compose, dcgm, ci_runner, kasmvnc"
MAX_SECONDS = "end within so many seconds, whatever hangs: what was not checked by then is not reached"


@dataclass(frozen=True)
class ConvergeOptions(JsonOptions):
    """What nodes should be."""

    inventory: str = option("Ansible inventory: a file or a folder")
    limit: str = option("only these hosts, an Ansible pattern")
    forks: int = option("hosts that are worked on at the same time", 20)
    set: str = option("change a component, NAME.FIELD=VALUE, separated by commas", setting="components")
    leave_out: str = option(
        "components not to install, separated by commas, for example nvidia_container_toolkit"
    )
    also: str = option(f"optional roles, separated by commas: {OPTIONAL_ROLES}")

    def request(self, playbook: str, *, check: bool, **variables: Any) -> PlaybookRequest:
        """What Ansible does."""
        from gpukiln.nodes.converge import playbook_request

        return playbook_request(
            playbook,
            **self.pick("inventory", "limit", "forks"),
            check=check,
            overrides=words(self.set),
            left_out=words(self.leave_out),
            also=words(self.also),
            **variables,
        )

    def converge(self, purpose: str, request: PlaybookRequest) -> RunResult:
        """Run a request and print its result."""
        from gpukiln.nodes.converge import converge, converge_parts

        run, result = converge(purpose, request, say)
        self.show(*converge_parts(run, result, request))
        self.report(result, schema=f"node.{purpose}/1", id=run.id, unfinished=result.unfinished)
        return result


@dataclass(frozen=True)
class NodeApply(ConvergeOptions):
    """Converge live GPU nodes: driver, persistence, container runtime and toolkit, nvtop, bootstrap."""

    check: bool = option("change nothing, show what would change", False)
    batch: str = option(
        "hosts a batch, as a number, a percentage or a list of them (1,10%,50%); a failure ends it", "100%"
    )
    reboot: bool = option(
        "reboot a node where another driver, or nouveau, is loaded; without --reboot that is an error", False
    )
    resume: str = option("only the hosts that an earlier run did not finish: its id, or `last`")
    pve: bool = option(
        "prepare Proxmox VE hosts to give their GPUs to VMs (the role pve_host), nothing else", False
    )

    def run(self) -> int:
        from gpukiln.nodes.converge import PVE, exit_code, parse_batches, resumed

        batches = parse_batches(self.batch)
        if self.resume:
            if self.limit:
                raise UsageError("--resume names its hosts itself, --limit can't be given with it")
            inventory, limit = resumed(self.resume, self.inventory)
            # By the command itself: all that is checked below holds for the resumed hosts, too.
            return replace(self, inventory=inventory, limit=limit, resume="").run()
        # The project's components are a default here, and no --set that somebody typed.
        changed = self.set if self.set != settings.components() else ""
        if self.pve and (self.leave_out or self.also or changed or self.reboot):
            raise UsageError(
                "--pve has one role, and --set, --leave-out, --also and --reboot are about others",
                hint="pve_host_reboot in the inventory has it reboot",
            )
        # Only with --reboot: an extra variable takes precedence over the inventory (Ansible's documentation,
        # "Understanding variable precedence"), which may allow it for some hosts.
        reboot = {"nvidia_driver_reboot_allowed": True} if self.reboot else {}
        playbook = PVE if self.pve else "node.yml"
        request = self.request(playbook, check=self.check, gpukiln_batch=batches, **reboot)
        return exit_code(self.converge("apply", request))


@dataclass(frozen=True)
class NodeDrift(ConvergeOptions):
    """Compare live nodes with what they should be; nothing is changed. Exit 1: something differs."""

    def run(self) -> int:
        from gpukiln.nodes.converge import exit_code

        result = self.converge("drift", self.request("drift.yml", check=True))
        # A difference is the answer, whatever became of other hosts. An interrupted run has none: exit_code
        # raises.
        if any(host.changes for host in result.hosts.values()) and not result.stopped:
            return 1
        return exit_code(result)


@dataclass(frozen=True)
class VerifyOptions(HostOptions):
    """What the host suite verifies."""

    profile: str = option(
        "what they are: node, or eks-node for one that was booted from a baked image", "node"
    )
    # -1 is no number, because a host may have to have 0.
    expect_gpus: int = option(
        "GPUs that each must have; default: at least one, or 0 where the profile expects none", -1
    )
    simulated: bool = option(
        "verify simulated GPUs too, as far as that makes sense; such a verdict does not count", False
    )
    forks: int = option("hosts that are verified at the same time", 4)
    max_seconds: int = option(MAX_SECONDS, 1800)

    def examine(self, purpose: str, **layers: Any) -> int:
        """Run the suite on each host; returns the exit code."""
        from gpukiln.nodes.verify import examine, exit_code
        from gpukiln.nodes.view import render_verified, verification_rows

        options = self.pick("profile", "expect_gpus", "simulated", "forks", "max_seconds")
        # The function, not the hosts: an inventory's plug-in may be slow, and its time counts for
        # --max-seconds.
        verifications, page = examine(purpose, self.targets, **options, **layers)
        self.show(render_verified(verifications), f"report: {page}")
        self.report(None, schema=f"node.{purpose}/1", hosts=verification_rows(verifications))
        return exit_code([result.verdict for result in verifications])


@dataclass(frozen=True)
class NodeVerify(VerifyOptions):
    """Verify live nodes with the host suite, docs/checks.md; nothing is changed. Exit 1: a check failed."""

    layer: str = option("only these layers of docs/checks.md, separated by commas")
    require: str = option("layers in which a check that is not run counts as failed, separated by commas")

    def run(self) -> int:
        return self.examine("verify", layers=words(self.layer), require=words(self.require))


@dataclass(frozen=True)
class NodeDoctor(VerifyOptions):
    """Find all that is wrong with a sick node, what keeps its GPUs from working first. Changes nothing."""

    max_seconds: int = option(MAX_SECONDS, 300)

    def run(self) -> int:
        return self.examine("doctor")


@dataclass(frozen=True)
class NodeTest(JsonOptions):
    """Test the roles with Molecule: real machines, converged twice and verified. Exit 1: one failed."""

    scenario: str = option("names separated by commas; without it all that need no image pulled")
    list: bool = option("only list the scenarios", False)

    def run(self) -> int:
        from gpukiln.nodes.runs import RunStore
        from gpukiln.nodes.scenarios import choose_scenarios, load_scenarios, run_scenarios
        from gpukiln.nodes.view import render_outcomes, render_scenarios
        from gpukiln.progress import Progress
        from gpukiln.typed import dump

        if self.list:
            scenarios = [*load_scenarios().values()]
            rows = [scenario.to_dict() for scenario in scenarios]
            self.report(None, [render_scenarios(scenarios)], schema="node.test.list/1", scenarios=rows)
            return 0
        chosen, others = choose_scenarios(words(self.scenario))
        run = RunStore().create("test")
        outcomes = run_scenarios(chosen, run.folder, Progress(RunStore().last_test_durations()))
        document = {
            "id": run.id,
            "scenarios": [dump(outcome) for outcome in outcomes],
            "not_run": [scenario.name for scenario in others],
        }
        # Before it is shown: the next run takes the durations from it, also where this output can't be
        # written.
        run.write_document(document)
        self.show(render_outcomes(outcomes, others), f"logs: {run.folder}")
        self.report(document, schema="node.test/1")
        return int(any(outcome.state == "failed" for outcome in outcomes))


@dataclass(frozen=True)
class NodeRunsCommand(RemovalOptions, JsonOptions):
    """Show the folders of earlier runs, and of verdicts on images made elsewhere; --yes removes old ones."""

    keep: int = option("runs of each kind that stay, the newest", 20)
    older_than: int = option("days; younger runs stay", 30)

    def run(self) -> None:
        from gpukiln.nodes.runs import RunStore, old_runs, removal_notice, remove_run, require_removed
        from gpukiln.nodes.view import render_runs
        from gpukiln.pipeline.verify import report_folders
        from gpukiln.state import state_home

        # A verification of an image that another machine built has no build's folder to keep its report in.
        images = [("image", folder) for folder in report_folders(state_home())]
        folders = [*RunStore().folders(), *images]
        runs = old_runs(folders, keep=self.keep, older_than_days=self.older_than)
        if self.removes:
            runs = [remove_run(run) if run.action == "remove" else run for run in runs]
        rows = [run.to_dict() for run in runs]
        self.report(None, [render_runs(runs)] if runs else (), schema="node.runs/1", runs=rows)
        if not runs and not self.json:
            say("no run has left anything on this machine")
        if runs and not self.removes:
            say(removal_notice(runs))
        # After the table, which says which ones were removed.
        require_removed(runs)
