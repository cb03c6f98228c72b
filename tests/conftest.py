"""What every test shares: which tests this machine can run, where, the list of the others, and the time."""

import functools
import gc
import os
import shutil
import signal
import statistics
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from botocore import session

from tests import folders, processor

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# What one end-to-end test needs of the machine: the tool, and the Debian package that has it.
MACHINE_TOOLS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "packer": "packer",
    "qemu-system-x86_64": "qemu-system-x86",
    "gpg": "gpg",
    "sgdisk": "gdisk",
    "grub-mkimage": "grub-common",
    "mksquashfs": "squashfs-tools",
    "xorriso": "xorriso",
    "busybox": "busybox",
    "mkfs.xfs": "xfsprogs",
}
# Processes of the whole suite. Tests of machines keep two cores busy in three of them, unit tests do not, as
# many wait for something: the fourth has those alone, until all have them.
WORKERS = 4
MACHINE_WORKERS = ("gw0", "gw1", "gw2")
# Virtual machines of several processes of the suite boot at once: gpukiln/clouds/embedded/accelerator.py.
os.environ.setdefault("GPUKILN_MACHINE_CPUS", "1")
# What the disks of the whole suite take at most, as measured.
DISK_GIB = 17
# Module, or machine of one -> the one before it whose image it needs too.
SAME_IMAGE = {
    "tests/e2e/test_runtime_platforms.py[amazon-2023]": "tests/e2e/test_driver_dnf.py",
    "tests/e2e/test_runtime_platforms.py[rocky-9]": "tests/e2e/test_driver_dnf.py",
    "tests/e2e/test_rehearsal.py": "tests/e2e/test_build.py",
    "tests/e2e/test_workspace.py": "tests/e2e/test_build.py",
}
# With it tests have an image that another process of the run bakes (tests/e2e/conftest.py).
IMAGE_FIXTURE = "image_cloud"
# The first modules: they take longest, and the image of the run is baked meanwhile.
LONGEST = ("test_build.py", "test_driver_dnf.py", "test_driver_platforms.py", "test_runner_image.py")
# Modules in which every parameter is a machine of its own.
MACHINES_APART = ("tests/e2e/test_runtime_platforms.py", "tests/e2e/test_volumes.py")
# Tests of texts and generated files, of the code's form, and of the tests themselves.
OF_TEXTS = ("docs", "doctests", "hints", "prose", "role_reference", "schemas")
OF_CODE = ("concepts", "dead_code", "lint")
OF_TESTS = ("affected", "distribution", "summary", "test_folders")
LINTERS = {f"tests/unit/test_{name}.py" for name in (*OF_TEXTS, *OF_CODE, *OF_TESTS)}
STARTED = time.monotonic()
SLOWEST = 15
SLOW_S = 1.0  # what takes less is not worth a line
SPEED_S = 10  # seconds between two measurements of the computer's speed
PROCESSOR = "processor_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-e2e", action="store_true", help="leave out the tests that start real machines")
    parser.addoption(
        "--changed",
        nargs="?",
        const="",
        metavar="REVISION",
        help="first run what a change affects, the nearest first: of the working tree, or since a revision",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Lets Ctrl-C reach what tests start (a shell's background ignores it), and counts processor time."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Cost(of_worker=hasattr(config, "workerinput")), "cost")
    if _whole_suite(config) and not config.getoption("no_e2e"):
        folders.remove_abandoned()
        if reason := folders.too_full(DISK_GIB):
            raise pytest.UsageError(reason)


def pytest_unconfigure(config: pytest.Config) -> None:
    cost = config.pluginmanager.get_plugin("cost")
    if isinstance(cost, Cost):
        cost.end()


class Cost:
    """Counts the seconds of a processor of this process of pytest and of all that it starts.

    Args:
        of_worker: Whether pytest-xdist started this process.
    """

    def __init__(self, *, of_worker: bool) -> None:
        self._of_worker = of_worker
        self.group = processor.join(f"gpukiln-tests-{os.getpid()}")
        self.began = self._read = processor.used(self.group)
        self.roots, self._sampled_at = {os.getpid()}, 0.0
        self._starts: list[float] = []
        self._measured_at = 0.0
        self.file: Path | None = None
        if processor.may_account(Path(tempfile.gettempdir())):
            handle, name = tempfile.mkstemp(prefix=f"gpukiln-tests-{os.getpid()}-", suffix=".acct")
            os.close(handle)
            if processor.account(Path(name)):
                self.file = Path(name)
                os.environ[processor.ACCOUNTED] = name
            else:
                Path(name).unlink()

    @property
    def total(self) -> float:
        return processor.used(self.group) - self.began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Notes with each step of a test what the processor did since the step before."""
        report = yield
        before, self._read = self._read, processor.used(self.group)
        report.user_properties = [*report.user_properties, (PROCESSOR, self._read - before)]
        return report

    def pytest_runtest_logfinish(self) -> None:
        """Samples the processes of the run, and the computer's speed.

        A daemon whose parent has ended belongs to the run, too.
        """
        if self._of_worker:
            return
        now = time.monotonic()
        if self.file is not None and now > self._sampled_at + 1:
            self._sampled_at = now
            self.roots |= processor.members(self.group)
        if not self._starts or now > self._measured_at + SPEED_S:
            self._measured_at = now
            self._starts.append(processor.python_start())

    @property
    def python_start_s(self) -> float | None:
        """What a start of Python took while the tests ran: the harmonic mean, as of work per time."""
        return statistics.harmonic_mean(self._starts) if self._starts else None

    def kinds(self) -> dict[str, float]:
        """Seconds by kind of process; empty where they can't be counted."""
        return processor.kinds(self.file.read_bytes(), self.roots) if self.file is not None else {}

    def end(self) -> None:
        if self.file is not None:
            processor.account(None)
            self.file.unlink(missing_ok=True)
            del os.environ[processor.ACCOUNTED]
            self.file = None
        if self.group is not None:
            processor.leave(self.group)
            self.group = None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Has several processes where the whole suite is asked for.

    A module's tests stay in one process, or a machine's. They begin in the order in which they are collected:
    what boots machines is slow, and the unit tests fill what is left. This is before pytest-xdist reads these
    options; never in a process that it started, or each would start as many more.
    """
    if _whole_suite(config) and config.getoption("numprocesses") is None:
        config.option.numprocesses = WORKERS
        config.option.dist = "loadscope"
        config.option.loadscopereorder = False


def _whole_suite(config: pytest.Config) -> bool:
    """Whether this process was asked for every test, and is not one of a run's."""
    own = not hasattr(config, "workerinput") and "PYTEST_XDIST_WORKER" not in os.environ
    return own and config.args_source is pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Has the process that baked an image run the other module that needs it, and lets machines run apart.

    Where there is a fourth process, it begins machines only when nothing else is left.
    """
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - only where pytest-xdist is

    class ByMachine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = super()._split_scope(nodeid)
            machine = nodeid[nodeid.rfind("[") :] if module in MACHINES_APART else ""
            return SAME_IMAGE.get(module + machine, module + machine)

        def _assign_work_unit(self, node: "WorkerController") -> None:
            if node.gateway.id not in MACHINE_WORKERS:
                without = (scope for scope in self.workqueue if not scope.startswith("tests/e2e/"))
                if scope := next(without, ""):
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByMachine(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps modules and ten thousand tests, which stay until the end, out of every garbage collection.

    With them collections take a tenth of the unit tests' time, and copy their memory in every forked process.
    Afterwards a collection begins with as many new objects as syntax trees of some files have: with
    Python's 700, parsing all of them takes three times as long.
    """
    gc.disable()
    gc.set_threshold(20_000)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the end-to-end tests where they can't run, with the reason; the default runs all that can."""
    reason = "left out by --no-e2e" if config.getoption("--no-e2e") else why_no_machines()
    for item in items:
        if "e2e" not in item.path.parts and item.get_closest_marker("e2e") is None:
            continue
        if item.get_closest_marker("e2e") is None:
            item.add_marker(pytest.mark.e2e)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    longest_first(items)
    if (revision := config.getoption("changed")) is not None:
        nearest_first(revision, items)


def longest_first(items: list[pytest.Item]) -> None:
    """Moves the longest modules of machines to the front, and behind them those that need the run's image.

    The short ones come last of all with machines, so that no process has a long one left when others end.
    """
    waiting = {item.path for item in items if IMAGE_FIXTURE in getattr(item, "fixturenames", ())}

    def place(item: pytest.Item) -> int:
        if "e2e" not in item.path.parts:
            return 3
        return 0 if item.path.name in LONGEST else 1 if item.path in waiting else 2

    items.sort(key=place)  # stable: within a module the order stays


def nearest_first(revision: str, items: list[pytest.Item]) -> None:
    """Moves what a change affects to the front: without machines first, since an answer is to come soon."""
    from tests.affected import affected  # noqa: PLC0415 - reads all imports of the checkout

    try:
        near = affected(revision)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    far = max(near.values(), default=0) + 1

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        is_affected = item.path in near
        needs_machines = item.get_closest_marker("e2e") is not None
        return not is_affected, is_affected and needs_machines, near.get(item.path, far)

    items.sort(key=place)  # stable: within a file the order stays


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gives every test, and the fixtures made for it, a /dev/null of its own.

    An ssh that is killed leaves its standard input such that reads of it don't block, for everybody who
    shares it, and Ansible refuses to run with one: what a test leaves must not reach the next one.
    """
    if os.isatty(0):  # somebody looks at a test with -s
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)


def why_no_machines(
    *, uid: int | None = None, which: Callable[[str], str | None] = shutil.which, system: str | None = None
) -> str:
    """Why this computer can't start the embedded cloud's machines; an empty string where it can.

    Args:
        uid: The user id to judge, by default this process's.
        which: Finds a tool on PATH.
        system: The kernel's name as `uname -s` prints it, by default this machine's.
    """
    system = os.uname().sysname if system is None else system
    if system != "Linux":
        return f"machines need Linux, this is {system}"
    missing = sorted({package for tool, package in MACHINE_TOOLS.items() if which(tool) is None})
    if missing:
        return f"missing packages: {' '.join(missing)} (scripts/run installs them as root)"
    if (os.geteuid() if uid is None else uid) != 0:
        return "starting machines needs root"
    return ""


@pytest.fixture(scope="session", autouse=True)
def one_loader_of_botocore() -> Generator[None, None, None]:
    """Reads the model of a service once: each session, of the AWS CLI and of moto's mocks, would read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "create_loader", functools.cache(session.create_loader))
        yield


@pytest.fixture
def require_root_machine() -> None:
    """For a test outside tests/e2e that starts a machine: skips with the reason where none can run."""
    if reason := why_no_machines():
        pytest.skip(reason)


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason alone: pytest keeps (path, line, 'Skipped: reason')."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    list_not_run(terminalreporter)
    list_time(terminalreporter)


def list_not_run(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists what was not run, grouped by reason: a green line must not hide what nobody looked at."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        groups[skip_reason(report)].append(report.nodeid)
    if deselected := len(terminalreporter.stats.get("deselected", [])):
        groups["deselected on the command line"] = [f"{deselected} tests"]
    if not groups:
        return
    terminalreporter.section("not run")
    for reason, tests in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        terminalreporter.write_line(f"{reason}  ({len(tests)})", yellow=True)
        for test in tests[:5]:
            terminalreporter.write_line(f"    {test}")
        if len(tests) > 5:
            terminalreporter.write_line(f"    and {len(tests) - 5} more")


def tier_of(report: pytest.TestReport) -> str:
    if "e2e" in report.keywords:
        return "machines"
    return "linters" if report.nodeid.partition("::")[0] in LINTERS else "unit"


def budget_of(root: Path) -> dict[str, float]:
    """The processor seconds of a whole run, and what a start of Python takes on the computer they are for."""
    file = root / "pyproject.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    budget: dict[str, float] = data.get("tool", {}).get("gpukiln", {}).get("tests", {})
    return budget


def list_time(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows where the time went; a fixture's is the time of the test that had to wait for it."""
    skipped = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
    seconds: defaultdict[str, float] = defaultdict(float)
    processor_s: defaultdict[str, float] = defaultdict(float)
    tiers: defaultdict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                processor_s[report.nodeid] += dict(report.user_properties).get(PROCESSOR, 0.0)
            if isinstance(report, pytest.TestReport) and report.nodeid not in skipped:
                seconds[report.nodeid] += report.duration
                tiers[tier_of(report)].add(report.nodeid)
    cost = terminalreporter.config.pluginmanager.get_plugin("cost")
    if not seconds or not isinstance(cost, Cost):
        return
    terminalreporter.section("time")
    write = terminalreporter.write_line
    limits, whole = budget_of(terminalreporter.config.rootpath), is_whole(terminalreporter.config)
    budget, quiet_start = limits.get(PROCESSOR), limits.get("python_start_s")
    total, start = cost.total, cost.python_start_s
    quiet = total * quiet_start / start if quiet_start and start else total
    if budget is not None and whole and quiet > budget:
        write(f"over budget: {quiet:.0f} s of a processor, {budget:.0f} s in pyproject.toml", red=True)
    write(f"{'clock':>10}  {'processor':>11}")
    for tier, tests in sorted(tiers.items()):
        clock, used = sum(seconds[test] for test in tests), sum(processor_s[test] for test in tests)
        write(f"{clock:8.1f} s  {used:9.1f} s  {tier}, {len(tests)} tests")
    write(f"{time.monotonic() - STARTED:8.1f} s  {total:9.1f} s  altogether")
    if quiet_start and start:
        why = f"a start of Python took {start * 1000:.1f} ms, there {quiet_start * 1000:.1f} ms"
        write(f"{'':10}  {quiet:9.1f} s  on a quiet computer: {why}")
    for kind, used in cost.kinds().items():
        write(f"{'':10}  {used:9.1f} s  {kind}")
    for test in sorted(seconds, key=lambda test: -max(seconds[test], processor_s[test]))[:SLOWEST]:
        if max(seconds[test], processor_s[test]) >= SLOW_S:
            write(f"    {seconds[test]:6.1f} s  {processor_s[test]:6.1f} s  {test}")


def is_whole(config: pytest.Config) -> bool:
    """Whether the whole suite runs, which the budget is for."""
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not config.getoption("keyword")
        and not config.getoption("no_e2e")
    )
