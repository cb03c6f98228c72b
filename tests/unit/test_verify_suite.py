"""The suite as a process: what it refuses, reports and leaves behind. No machine is asked for facts."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from gpukiln.cli.schemas import verdict_schema
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.ssh import Ssh
from gpukiln.verify import plugin, suite
from gpukiln.verify.target import Target, new_machine_target, ssh_target
from gpukiln.verify.verdict import CheckResult

TARGET = Target("i-1", "ssh://admin@192.0.2.1:22")
CONFTEST = """
    import os
    from pathlib import Path
    from gpukiln.verify import plugin
    from gpukiln.verify.facts import Facts
    pytest_plugins = ["gpukiln.verify.plugin"]
    def pytest_configure(config):
        plugin.add_suite(config, Path(__file__).parent)
        Path(__file__).with_name("pid").write_text(str(os.getpid()))
    def gather(host, profile, max_seconds):
        {gather}
    plugin.gather = gather
"""
RECORD = '{"data": None, "error": "gone"}'
FACTS = f'return Facts({{"gpus": {{"pci": []}}, "record": {RECORD}, "os": {{"title": "Test 1"}}}})'
CHECKS = """
    import time
    from gpukiln.verify.checks import check
    COMMON = {"profiles": ("image",), "fix": "mend it"}

    @check(id="gpu.there", title="GPU there", layer="gpu", needs=("gpu",), **COMMON)
    def test_gpu(facts):
        raise AssertionError("must not run")

    @check(id="hygiene.good", title="good", layer="hygiene", **COMMON)
    def test_good(facts):
        facts.note("3 files")

    @check(id="boot.bad", title="bad", layer="boot", causes=("somebody",), **COMMON)
    def test_bad(facts):
        found = 1
        assert found == 2, "found 1, wanted 2"

    @check(id="versions.record", title="record", layer="versions", needs=("record",), **COMMON)
    def test_record(facts):
        pass

    @check(id="boot.node-only", title="node", layer="boot", profiles=("node",), fix="-")
    def test_node(facts):
        pass
"""
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write a suite and make it the one that run_suite runs; returns the report folder."""

    def write(checks: str = CHECKS, gather: str = FACTS) -> Path:
        folder = tmp_path / "suite"
        folder.mkdir()
        (folder / "conftest.py").write_text(textwrap.dedent(CONFTEST.replace("{gather}", gather)))
        (folder / "test_it.py").write_text(textwrap.dedent(checks))
        monkeypatch.setattr(suite, "SUITE", folder)
        return tmp_path / "out"

    return write


def child_is_gone(out: Path) -> bool:
    pid = int((out.parent / "suite" / "pid").read_text())
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_verdict_counts_apart_and_streams_in_layer_order(make: Make) -> None:
    out, seen, started = make(), [], []
    verdict = suite.run_suite(
        TARGET, profile="image", out_dir=out, on_check=seen.append, on_start=started.append
    )
    assert [(c.id, c.outcome, c.reason) for c in verdict.checks] == [
        ("hygiene.good", "passed", "3 files"),
        ("versions.record", "failed", "gone"),
        ("boot.bad", "failed", "found 1, wanted 2"),
        ("gpu.there", "not_run", "no GPU"),
    ]
    assert verdict.counts == {"passed": 1, "failed": 2, "not_run": 1, "not_reached": 0}
    assert verdict.environment == {"GPUs": "none", "system": "Test 1"}
    assert verdict.checks[1].evidence == ("record",)
    assert (verdict.checks[2].causes, verdict.checks[0].causes) == (("somebody",), ())
    assert not verdict.passed
    assert verdict.target == "i-1"
    assert verdict.checks[2].remedy == "mend it"
    assert tuple(seen) == verdict.checks
    assert "gathering facts" in started
    document = json.loads((out / "results.json").read_text())
    assert document["counts"] == verdict.counts
    jsonschema.validate(document, verdict_schema())
    assert (out / "facts.json").exists()


def test_every_report_is_left_beside_the_verdict(make: Make) -> None:
    out = make()
    suite.run_suite(TARGET, profile="image", out_dir=out)
    assert {p.name for p in out.iterdir()} == {
        *("results.json", "facts.json", "report.html", "junit.xml", "checks.jsonl", "verify.log"),
    }
    page = (out / "report.html").read_text()
    assert "i-1" in page
    assert "found 1, wanted 2" in page
    root = ET.parse(out / "junit.xml").getroot()[0]  # noqa: S314 - written a moment ago by our own child
    assert [c.get("name") for c in root.iter("testcase")] == [
        *("hygiene.good", "versions.record", "boot.bad", "gpu.there"),
    ]


def test_a_run_that_breaks_leaves_no_report_of_the_run_before(make: Make) -> None:
    out = make(gather='raise RuntimeError("connection refused")')
    out.mkdir()
    for name in ("report.html", "junit.xml", "results.json"):
        (out / name).write_text("of the run before: passed")
    with pytest.raises(UnavailableError):
        suite.run_suite(TARGET, profile="image", out_dir=out)
    assert "of the run before" not in (out / "report.html").read_text() + (out / "junit.xml").read_text()
    assert "connection refused" in (out / "report.html").read_text()
    assert not (out / "results.json").exists()


def test_no_secret_of_a_machine_is_in_any_file_of_the_report(make: Make) -> None:
    said = "https://bob:hunter2@example.com, token = s3cr3tvalue, AKIAABCDEFGHIJKLMNOP"
    evidence = f'"evidence": {{"os": [{{"command": "x {said}", "rc": 0, "out": "{said}", "err": ""}}]}}'
    checks = """
    @check(id="boot.says", title="a", layer="boot", **COMMON)
    def test_says(facts):
        assert "s3cr3tvalue" not in facts["os"]["title"], "found " + facts["os"]["title"]
    """
    out = make(CHECKS + checks, FACTS.replace('"Test 1"}', f'"{said}"}}, {evidence}'))
    verdict = suite.run_suite(TARGET, profile="image", out_dir=out, layers=["boot"])
    assert verdict.checks[-1].outcome == "failed"  # the check saw what the reports leave out
    for name in ("report.html", "junit.xml", "results.json", "facts.json", "checks.jsonl", "verify.log"):
        text = (out / name).read_text()
        assert "example.com" in text, name
        for secret in ("hunter2", "s3cr3tvalue", "AKIAABCDEFGHIJKLMNOP"):
            assert secret not in text, name


def test_a_machine_whose_facts_break_the_suite_is_not_judged(make: Make) -> None:
    out = make(gather='raise LookupError("odd, token=s3cr3t")')
    with pytest.raises(UnavailableError, match="i-1 can't be verified: LookupError: odd") as caught:
        suite.run_suite(TARGET, profile="image", out_dir=out, layers=["hygiene"])
    assert "s3cr3t" not in caught.value.message
    assert "LookupError: odd" in (out / "report.html").read_text()


def test_what_the_time_or_a_hanging_tool_left_open_is_not_reached_and_no_pass(make: Make) -> None:
    gather = FACTS.replace('{"title": "Test 1"}', '{"_not_reached": "the 5 s were up"}')
    checks = """
    @check(id="hygiene.os", title="a", layer="hygiene", **COMMON)
    def test_os(facts):
        assert facts["os"]

    @check(id="hygiene.apt", title="b", layer="hygiene", needs=("apt",), **COMMON)
    def test_apt(facts):
        raise AssertionError("must not run")
    """
    verdict = suite.run_suite(
        TARGET,
        profile="image",
        out_dir=make(CHECKS + checks, gather),
        layers=["hygiene"],
        require=["hygiene"],
    )
    assert {c.id: (c.outcome, c.reason) for c in verdict.checks} == {
        "hygiene.good": ("passed", "3 files"),
        "hygiene.os": ("not_reached", "the 5 s were up"),
        "hygiene.apt": ("not_reached", "the 5 s were up"),
    }
    assert verdict.counts["failed"] == 0
    assert not verdict.passed


def test_nobody_else_may_read_what_was_found(make: Make) -> None:
    before = os.umask(0)
    try:
        out = make()
        suite.run_suite(TARGET, profile="image", out_dir=out)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (out, *out.iterdir())}
    assert modes.pop("out") == 0o700
    assert len(modes) == 6
    assert set(modes.values()) == {0o600}, modes


def test_a_verdict_of_some_of_the_checks_is_none(make: Make) -> None:
    stops = """
    @check(id="versions.stop", title="a", layer="versions", **COMMON)
    def test_stop(facts):
        raise KeyboardInterrupt
    """
    out = make(CHECKS + stops)
    with pytest.raises(UnavailableError, match="pytest exits with 2"):
        suite.run_suite(TARGET, profile="image", out_dir=out, layers=["hygiene", "versions"])
    assert not (out / "results.json").exists()
    assert "the run ended with 1 of 3 checks missing" in (out / "report.html").read_text()


def test_required_layer_turns_not_run_into_failed(make: Make) -> None:
    verdict = suite.run_suite(TARGET, profile="image", out_dir=make(), layers=["gpu"], require=["gpu"])
    assert [(c.id, c.outcome) for c in verdict.checks] == [("gpu.there", "failed")]


def test_what_a_failure_makes_meaningless_is_not_reached(make: Make) -> None:
    after = """
    @check(id="runtime.first", title="a", layer="runtime", after=("boot.bad", "hygiene.good"), **COMMON)
    def test_first(facts):
        raise AssertionError("must not run")

    @check(id="container.second", title="b", layer="container", after=("runtime.first",), **COMMON)
    def test_second(facts):
        raise AssertionError("must not run")

    @check(id="container.other", title="c", layer="container", after=("hygiene.good",), **COMMON)
    def test_other(facts):
        pass
    """
    out = make(CHECKS + after)
    verdict = suite.run_suite(TARGET, profile="image", out_dir=out, require=["container"])
    assert {c.id: (c.outcome, c.reason) for c in verdict.checks[3:]} == {
        "runtime.first": ("not_reached", "boot.bad failed"),
        "gpu.there": ("not_run", "no GPU"),
        "container.second": ("not_reached", "runtime.first was not reached"),
        "container.other": ("passed", ""),
    }


def test_expected_gpus_are_a_failure_when_missing(make: Make) -> None:
    verdict = suite.run_suite(TARGET, profile="image", out_dir=make(), layers=["gpu"], expect_gpus=1)
    assert verdict.checks[0].outcome == "failed"
    assert "0 GPUs on the PCI bus" in verdict.checks[0].reason


def test_nothing_passed_is_not_a_pass(make: Make) -> None:
    verdict = suite.run_suite(TARGET, profile="image", out_dir=make(), layers=["gpu"])
    assert verdict.counts["failed"] == 0
    assert not verdict.passed


def test_own_skip_is_not_run(make: Make) -> None:
    checks = CHECKS.replace("facts.note(", "__import__('pytest').skip(")
    verdict = suite.run_suite(TARGET, profile="image", out_dir=make(checks), layers=["hygiene"])
    assert (verdict.checks[0].outcome, verdict.checks[0].reason) == ("not_run", "3 files")


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        ("def test_bare(facts):\n    pass\n", "without @check"),
        (CHECKS.replace("boot.bad", "boot.node-only"), "check id boot.node-only exists already"),
        (CHECKS.replace('profiles": ("image",)', 'profiles": ()'), "has no profile"),
        (CHECKS.replace('layer="gpu"', 'layer="gqu"'), "layer 'gqu' does not exist"),
        (CHECKS.replace('needs=("gpu",)', 'needs=("gqu",)'), "need 'gqu' does not exist"),
    ],
)
def test_undeclared_check_is_refused(make: Make, checks: str, words: str) -> None:
    out = make(checks)
    with pytest.raises(UnavailableError, match="the host suite itself failed") as caught:
        suite.run_suite(TARGET, profile="image", out_dir=out)
    assert words in " ".join((out / "verify.log").read_text().split())
    assert str(out / "verify.log") in caught.value.hint


def test_unreachable_machine_is_no_failed_check(make: Make) -> None:
    out = make(gather='raise RuntimeError("connection refused")')
    with pytest.raises(UnavailableError, match="i-1 can't be verified: connection refused"):
        suite.run_suite(TARGET, profile="image", out_dir=out)


def test_a_hung_machine_ends_at_the_timeout(make: Make) -> None:
    out = make(gather='import time; time.sleep(60); raise RuntimeError("late")')
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="did not end within 4 s; last: gather_start"):
        suite.run_suite(TARGET, profile="image", out_dir=out, max_seconds=4)
    assert time.monotonic() - started < 20
    assert child_is_gone(out)


def test_ctrl_c_leaves_no_process(make: Make) -> None:
    out = make(CHECKS.replace("found = 1", "found = 1; time.sleep(60)"))

    def interrupt(_result: CheckResult) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run_suite(TARGET, profile="image", out_dir=out, on_check=interrupt)
    assert child_is_gone(out)


def test_unknown_profile_and_layer_name_the_choices(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="profile 'imagine' is unknown, wanted one of image"):
        suite.run_suite(TARGET, profile="imagine", out_dir=tmp_path)
    with pytest.raises(UsageError, match="layer 'gqu' is unknown, wanted one of hardware, hygiene"):
        suite.run_suite(TARGET, profile="image", out_dir=tmp_path, require=["gqu"])


def test_target_keeps_no_connection_and_no_host_key(tmp_path: Path) -> None:
    target = new_machine_target("i-1", "192.0.2.1", port=2222, user="ubuntu", private_key=tmp_path / "key")
    assert target.hostspec.startswith("ssh://ubuntu@192.0.2.1:2222?controlpersist=0")
    assert f'IdentityFile "{tmp_path / "key"}"' in target.ssh_config()
    assert "UserKnownHostsFile /dev/null" in target.ssh_config()
    assert ssh_target("i-1", Ssh("2001:db8::1")).hostspec.startswith("ssh://[2001:db8::1]?")


def test_a_check_knows_the_profile(make: Make) -> None:
    checks = CHECKS.replace('facts.note("3 files")', "facts.note(facts.profile)")
    verdict = suite.run_suite(TARGET, profile="image", out_dir=make(checks), layers=["hygiene"])
    assert verdict.checks[0].reason == "image"


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("", "'' names no machine: it has no scheme; wanted local://"),
        ("local://,gpu-1", "'gpu-1' names no machine: it has no scheme"),
        ("bogus://x", "'bogus://x' names no machine: Unknown connection type 'bogus'"),
    ],
)
def test_hosts_that_name_no_machine_are_refused(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, hosts: str, words: str
) -> None:
    monkeypatch.setattr(request.config.option, "hosts", hosts)
    with pytest.raises(pytest.UsageError, match=words):
        plugin.pytest_collection(request.session)
    monkeypatch.setattr(request.config.option, "hosts", "local://,ssh://gpu-1")
    plugin.pytest_collection(request.session)


def test_a_group_without_a_host_is_a_usage_error(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("all: {hosts: {gpu-1: {ansible_connection: local}}}\n")
    hosts = f"local://,ansible://nobody?ansible_inventory={inventory}"
    command = [sys.executable, "-m", "pytest", "tests/host", f"--hosts={hosts}"]
    done = subprocess.run(
        [*command, f"--gpukiln-report={tmp_path}/out"],
        cwd=suite.ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "names no machine: no host of the inventory matches" in done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert not (tmp_path / "out/report.html").exists()


DOUBLE = FACTS.replace(
    "Facts({", 'Facts({"simulated": {"machine": True, "disk": []}, "nvml": {"gpus": [{"name": "A100"}]}, '
)
ON_DOUBLES = """
    from gpukiln.verify.checks import check
    COMMON = {"profiles": ("image",), "fix": "mend it"}

    @check(id="hygiene.good", title="good", layer="hygiene", **COMMON)
    def test_good(facts):
        pass

    @check(id="gpu.there", title="GPU there", layer="gpu", needs=("gpu",), **COMMON)
    def test_gpu(facts):
        pass

    @check(id="compute.right", title="computes", layer="compute", needs=("gpu", "real-gpu"), **COMMON)
    def test_compute(facts):
        raise AssertionError("must not run")
"""


@pytest.mark.parametrize("asked", [False, True])
def test_simulated_gpus_are_judged_only_where_that_is_asked_for(make: Make, asked: bool) -> None:
    verdict = suite.run_suite(
        TARGET, profile="image", out_dir=make(ON_DOUBLES, DOUBLE), expect_gpus=1, simulated=asked
    )
    found = {check.id: (check.outcome, check.reason) for check in verdict.checks}
    no = ("not_run", "GPUs are simulated")
    assert found == {
        "hygiene.good": ("passed", ""),
        "gpu.there": ("passed", "") if asked else no,
        "compute.right": no,
    }
    assert (verdict.simulated, verdict.passed, verdict.passed_without_simulation) == (True, True, False)
    assert verdict.environment["GPUs"] == "1 x A100 (simulated)"


def test_a_verdict_that_was_to_be_of_simulated_gpus_proves_nothing_of_others(make: Make) -> None:
    verdict = suite.run_suite(TARGET, profile="image", out_dir=make(ON_DOUBLES), simulated=True)
    assert [check.id for check in verdict.failures] == ["gpu.there", "compute.right"]
    assert verdict.simulated
