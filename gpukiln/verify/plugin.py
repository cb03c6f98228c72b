"""The pytest plugin of tests/host: selects checks, runs them on the facts, writes results and reports.

Loaded by tests/host/conftest.py. It refuses a test that is no declared check, orders the layers, gathers
each host's facts in one round trip, and writes results while it runs:

    DIR/checks.jsonl     one JSON object a line: gather_start, check_start, check_end, unreachable, end
    DIR/results.json     the verdict (see gpukiln.verify.verdict); results-<host>.json when there are several
    DIR/facts.json       the facts of the machine, the evidence
    DIR/report.html      the report, every machine on one page
    DIR/junit.xml        the results for CI
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from testinfra.backend import BACKENDS, get_backends

from gpukiln.files import write_atomic
from gpukiln.findings import Outcome
from gpukiln.probe.base import NotReachedError
from gpukiln.reports.sanitize import sanitize, sanitize_values
from gpukiln.typed import dump
from gpukiln.verify.checks import LAYERS, PROFILES, Check, declaration
from gpukiln.verify.digest import suite_digest
from gpukiln.verify.facts import Facts, environment
from gpukiln.verify.gathering import gather
from gpukiln.verify.html import write_html
from gpukiln.verify.junit import write_junit
from gpukiln.verify.needs import applicability
from gpukiln.verify.verdict import CheckResult, Verdict, counts_text
from gpukiln.verify.verification import Verification

# prefixes of pytest's skips: which of the two outcomes it is
NOT_RUN, NOT_REACHED = "not run: ", "not reached: "
TESTINFRA_OPTIONS = (
    *("connection", "ssh_config", "ssh_identity_file", "sudo", "sudo_user"),
    *("ansible_inventory", "force_ansible"),
)  # the options by which testinfra reads hosts
UNREACHABLE = 4  # exit status when a machine can't be reached or asked


@dataclass
class SuiteSession:
    """State of one pytest session."""

    suites: list[Path] = field(default_factory=list)
    facts: dict[str, Facts] = field(default_factory=dict)
    results: dict[str, list[CheckResult]] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    report_dir: Path | None = None
    started: float = field(default_factory=time.time)

    def failed_dependency(self, host: str, check: Check) -> str:
        """The failure of an earlier check that this one depends on (`after`); empty where there is none.

        Args:
            host: Id of the host.
            check: The check that would be next.
        """
        results = self.results.get(host, [])
        for before in results:
            if before.id in check.after and before.outcome in ("failed", "not_reached"):
                return f"{before.id} {'failed' if before.outcome == 'failed' else 'was not reached'}"
        return ""

    def emit(self, event: str, **values: Any) -> None:
        """Append one event to checks.jsonl."""
        if self.report_dir is not None:
            line = json.dumps({"event": event, "time": round(time.time(), 3), **values})
            with (self.report_dir / "checks.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")


# testinfra has no interface for further backends; its table is by URL scheme.
BACKENDS.setdefault("buildah", "gpukiln.verify.buildah_backend.BuildahBackend")
BACKENDS.setdefault("facts", "gpukiln.verify.facts_backend.FactsBackend")
RUN_KEY = pytest.StashKey[SuiteSession]()


def add_suite(config: pytest.Config, folder: Path) -> None:
    """Treat every test below a folder as a check. Called by the folder's conftest.py."""
    config.stash.setdefault(RUN_KEY, SuiteSession()).suites.append(folder.resolve())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("gpukiln", "verification of a machine")
    group.addoption(
        "--profile", choices=sorted(PROFILES), default="node", help="kind of machine (default: node)"
    )
    group.addoption(
        "--layer", action="append", choices=list(LAYERS), default=[], help="only this layer; may be repeated"
    )
    group.addoption(
        "--require",
        action="append",
        choices=list(LAYERS),
        default=[],
        help="a check of this layer that is not run counts as failed; may be repeated",
    )
    group.addoption(
        "--expect-gpus", type=int, help="GPUs the machine must have (default: the profile's number)"
    )
    group.addoption("--simulated", action="store_true", help="verify simulated GPUs, as far as possible")
    group.addoption(
        "--gpukiln-report", type=Path, metavar="DIR", help="write results and facts into this folder"
    )
    group.addoption(
        "--gpukiln-until",
        type=float,
        metavar="TIME",
        help="when the facts of every machine must be there, in seconds since the epoch",
    )
    group.addoption("--gpukiln-target", metavar="NAME", help="what the report calls the machine")
    group.addoption("--gpukiln-instance-type", metavar="TYPE", default="", help="its type, for the verdict")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the report folder."""
    run = config.stash.setdefault(RUN_KEY, SuiteSession())
    run.report_dir = config.getoption("--gpukiln-report")
    if run.report_dir is not None:
        run.report_dir.mkdir(parents=True, exist_ok=True)
        (run.report_dir / "checks.jsonl").write_text("", encoding="utf-8")
        # An old report next to new results would be read as theirs.
        for stale in ("report.html", "junit.xml"):
            (run.report_dir / stale).unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Refuse a `--hosts` of which a part names no machine: testinfra would silently ignore that part."""
    options = session.config.option
    for spec in options.hosts.split(",") if options.hosts is not None else ():
        why = "no host of the inventory matches" if "://" in spec else "it has no scheme"
        try:
            given = {name: getattr(options, name) for name in TESTINFRA_OPTIONS}
            # Without a scheme testinfra needs --connection to know how to reach the host.
            if (options.connection or "://" in spec) and get_backends([spec], **given):
                continue
        except Exception as error:  # each backend of testinfra raises its own exceptions
            why = " ".join(str(error).split())[-1000:]
        raise pytest.UsageError(
            f"--hosts: {spec!r} names no machine: {why}; wanted local://, ssh://[USER@]HOST[:PORT] or "
            "ansible://PATTERN?ansible_inventory=FILE, several separated by commas"
        )


def check_of(item: pytest.Item) -> Check | None:
    """Return the declaration of a test, or None."""
    return declaration(getattr(item, "function", None))


def host_of(item: pytest.Item) -> str:
    """Return the host that a test is run on, as in its id; empty without testinfra's parameter."""
    callspec = getattr(item, "callspec", None)
    host = callspec.params.get("_testinfra_host") if callspec else None
    return str(host.backend.get_pytest_id()) if host is not None else ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse undeclared checks, select by profile and layer, and order by host and layer."""
    run = config.stash[RUN_KEY]
    suite_items = [i for i in items if any(s in i.path.resolve().parents for s in run.suites)]
    _refuse_undeclared(suite_items)
    profile, layers = config.getoption("--profile"), config.getoption("--layer")
    selected: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in suite_items:
        check = check_of(item)
        applies = check is not None and profile in check.profiles and (not layers or check.layer in layers)
        (selected if applies else dropped).append(item)
    order = list(LAYERS)
    # By host first: the facts of each host are gathered once, when its first check runs.
    selected.sort(key=lambda i: (host_of(i), order.index(c.layer) if (c := check_of(i)) else 0))
    # Other tests of the same pytest run are left alone.
    others = [i for i in items if i not in suite_items]
    items[:] = others + selected
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def _refuse_undeclared(items: list[pytest.Item]) -> None:
    seen: dict[str, str] = {}
    problems = []
    for item in items:
        check, where = check_of(item), item.nodeid.partition("[")[0]
        if check is None:
            problems.append(f"{where}: a test of the host suite without @check(...)")
        elif seen.setdefault(check.id, where) != where:
            problems.append(f"{where}: check id {check.id} exists already: {seen[check.id]}")
    if problems:
        raise pytest.UsageError("\n".join(sorted(set(problems))))


# testinfra's `host` has this scope, and a fixture can't have a wider one than those that it uses.
@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest, host: Any) -> Facts:
    """The facts of the host; gathered once a session for each host, and written to the report folder."""
    run = request.config.stash[RUN_KEY]
    name = str(host.backend.get_pytest_id())
    if name not in run.facts:
        run.emit("gather_start", host=name)
        try:
            until = request.config.getoption("--gpukiln-until")
            left = None if until is None else max(until - time.time(), 0)
            run.facts[name] = gather(host, request.config.getoption("--profile"), left)
        except Exception as error:  # whatever fails here, no check of this machine can run
            # testinfra raises the whole result of an ssh that exits 255.
            result = error.args[0] if error.args else error
            text = str(getattr(result, "stderr", "") or result).strip()
            if not isinstance(error, RuntimeError):
                text = f"{type(error).__name__}: {text}"
            message = sanitize(text[-1000:])
            run.unreachable[name] = message
            run.emit("unreachable", host=name, message=message)
            # No check of this machine can run without facts, and the run gives no verdict.
            pytest.exit(f"{name} can't be verified: {message}", returncode=UNREACHABLE)
        run.facts[name].profile = request.config.getoption("--profile")
        run.facts[name].allow_simulated = request.config.getoption("--simulated")
        # facts.json is an artifact of CI jobs: no secret may be in it.
        shown = sanitize_values(run.facts[name].to_dict())
        _write(run, "facts", name, shown, several=_several(request.session))
    return run.facts[name]


@pytest.fixture(autouse=True)
def _gpukiln_facts(request: pytest.FixtureRequest) -> None:
    """Gather the facts before the first check, and reset note, remedy and evidence before each."""
    if declaration(request.function) is not None:
        host_facts = request.getfixturevalue("facts")
        host_facts.take_note()
        host_facts.take_remedy()
        host_facts.take_read()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip a check where a need is missing, or where the facts that it reads were not reached."""
    check = check_of(item)
    try:
        if check is not None:
            _skip_or_fail(item, check)
        return (yield)
    except NotReachedError as error:
        pytest.skip(f"{NOT_REACHED}{error}")


def _skip_or_fail(item: pytest.Item, check: Check) -> None:
    run = item.config.stash[RUN_KEY]
    if broken := run.failed_dependency(host_of(item), check):
        pytest.skip(f"{NOT_REACHED}{broken}")
    answer = applicability(
        check.needs,
        run.facts[host_of(item)],
        PROFILES[item.config.getoption("--profile")],
        expect_gpus=item.config.getoption("--expect-gpus"),
    )
    if answer.answer == "fail":
        run.facts[host_of(item)].remedy(answer.remedy)
        pytest.fail(answer.reason, pytrace=False)
    if answer.answer == "not_run":
        pytest.skip(f"{NOT_RUN}{answer.reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item,
    nextitem: pytest.Item | None,  # noqa: ARG001 - the hook is found by its arguments
) -> Generator[None, object, object]:
    """Announce a check."""
    check = check_of(item)
    if check is not None:
        item.user_properties.append(("check", check.id))
        item.config.stash[RUN_KEY].emit(
            "check_start", host=host_of(item), id=check.id, title=check.title, layer=check.layer
        )
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn pytest's report into a check's result."""
    report = yield
    check = check_of(item)
    if check is None:
        return report
    not_reached = report.skipped and _reason(call).startswith(NOT_REACHED)
    # `--require` is for pipelines in which a skipped layer means a broken machine.
    if report.skipped and not not_reached and check.layer in item.config.getoption("--require"):
        report.outcome = "failed"
        report.longrepr = f"{_reason(call)}, and layer {check.layer} is required"
    # Setup counts only when it ends the check; teardown only when it fails.
    if report.when == "call" or (report.when == "setup" and not report.passed) or report.failed:
        run = item.config.stash[RUN_KEY]
        outcome: Outcome = "passed" if report.passed else "failed" if report.failed else "not_run"
        if not_reached:
            outcome = "not_reached"
        host_facts = run.facts.get(host_of(item))
        note = host_facts.take_note() if host_facts is not None else ""
        reason = note if report.passed else _reason(call).removeprefix(NOT_RUN).removeprefix(NOT_REACHED)
        # A need is missing: the check's own causes would explain another failure (see `_skip_or_fail`).
        unmet = isinstance(call.excinfo and call.excinfo.value, pytest.fail.Exception)
        remedy = sanitize((host_facts.take_remedy() if host_facts is not None else "") or check.fix)
        result = CheckResult(
            id=check.id,
            title=check.title,
            layer=check.layer,
            outcome=outcome,
            reason=reason,
            remedy="" if report.passed else remedy,
            causes=check.causes if report.failed and not unmet else (),
            evidence=host_facts.take_read() if host_facts is not None else (),
            duration_s=round(call.duration, 3),
        )
        # pytest's traceback shows code of the suite; users need the reason and the fix.
        if report.failed and isinstance(
            call.excinfo and call.excinfo.value, AssertionError | pytest.fail.Exception
        ):
            report.longrepr = f"{check.id}: {reason}\n  fix: {remedy}"
        run.results.setdefault(host_of(item), []).append(result)
        run.emit("check_end", host=host_of(item), **asdict(result))
    return report


def _reason(call: pytest.CallInfo[None]) -> str:
    """The message of an assertion or a skip, without pytest's explanation of the expression."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, AssertionError | pytest.fail.Exception | pytest.skip.Exception):
        # pytest appends its explanation of the expression to the assertion's message.
        text = str(error).split("\nassert ", 1)[0].strip()
    else:
        text = f"{type(error).__name__}: {error}"
    return sanitize(re.sub(r"\s+", " ", text))


def _several(session: pytest.Session) -> bool:
    return len({host_of(i) for i in session.items if check_of(i)}) > 1


def _write(run: SuiteSession, kind: str, host: str, data: Any, *, several: bool) -> None:
    if run.report_dir is None:
        return
    # Host names of testinfra contain URLs.
    suffix = "-" + re.sub(r"[^\w.]+", "_", host) if several else ""
    write_atomic(run.report_dir / f"{kind}{suffix}.json", json.dumps(data, indent=2) + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the verdicts and the reports."""
    run = session.config.stash[RUN_KEY]
    name = session.config.getoption("--gpukiln-target")
    expected_ids: dict[str, set[str]] = {}
    for item in session.items:
        if check := check_of(item):
            expected_ids.setdefault(host_of(item), set()).add(check.id)
    machines = []
    for host, ids in expected_ids.items():
        results = run.results.get(host, [])
        # A verdict must not lack checks: a run that was interrupted gives none.
        if missing := len(ids - {result.id for result in results}):
            ended = run.unreachable.get(host, f"the run ended with {missing} of {len(ids)} checks missing")
            machines.append(Verification(name or host, reason=ended))
            continue
        host_facts = run.facts.get(host, Facts({}))
        verdict = Verdict(
            target=name or host,
            profile=session.config.getoption("--profile"),
            started_at=datetime.fromtimestamp(run.started, UTC).isoformat(timespec="seconds"),
            duration_s=round(time.time() - run.started, 3),
            checks=tuple(results),
            suite_version=suite_digest(),
            environment=sanitize_values(environment(host_facts)) if host in run.facts else {},
            instance_type=session.config.getoption("--gpukiln-instance-type"),
            simulated=host_facts.has_simulated_gpus or session.config.getoption("--simulated"),
        )
        _write(run, "results", host, dump(verdict), several=_several(session))
        machines.append(Verification(verdict.target, verdict, host_facts.to_dict()))
    if run.report_dir is not None and machines:
        write_html(machines, run.report_dir / "report.html")
        write_junit(machines, run.report_dir / "junit.xml")
    run.emit("end", exitstatus=int(exitstatus))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the number of checks of each outcome."""
    for host, results in config.stash[RUN_KEY].results.items():
        terminalreporter.write_line(f"{host or 'host'}: {counts_text(results)}")
