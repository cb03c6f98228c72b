"""JUnit as CI reads it: the check's id, what to do, and why something was not run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

from gpukiln.verify.junit import write_junit
from gpukiln.verify.verdict import CheckResult, Verdict
from gpukiln.verify.verification import Verification

VERDICT = Verdict(
    target="i-1",
    profile="image",
    started_at="2026-01-01T00:00:00+00:00",
    duration_s=12.3,
    checks=(
        CheckResult("hygiene.history", "No history", "hygiene", "passed", "3 files", duration_s=0.25),
        CheckResult(
            "boot.state",
            "running",
            "boot",
            "failed",
            "found <degraded>\x1b, wanted running",
            "look at it",
            ("a cause", "another"),
            ("boot",),
        ),
        CheckResult("gpu.xid", "no Xid", "gpu", "not_run", "no GPU", "-"),
        CheckResult("gpu.ecc", "no errors", "gpu", "not_reached", "gpu.nvml failed", "-"),
    ),
    suite_version="0.9.1",
    environment={"host name": "vm", "kernel": "6.1"},
)


def written(tmp_path: Path, *verdicts: Verdict, reasons: Mapping[str, str] | None = None) -> ET.Element:
    machines = [Verification(one.target, one) for one in verdicts]
    machines += [Verification(target, reason=reason) for target, reason in (reasons or {}).items()]
    write_junit(machines, tmp_path / "junit.xml")
    return ET.parse(tmp_path / "junit.xml").getroot()  # noqa: S314 - written a moment ago by ourselves


def properties(element: ET.Element) -> dict[str | None, str | None]:
    return {p.get("name"): p.get("value") for p in element.findall("properties/property")}


def test_a_case_is_a_check(tmp_path: Path) -> None:
    root = written(tmp_path, VERDICT)
    [suite] = root
    cases = suite.findall("testcase")
    assert [(c.get("classname"), c.get("name")) for c in cases] == [
        ("gpukiln.image.hygiene", "hygiene.history"),
        ("gpukiln.image.boot", "boot.state"),
        ("gpukiln.image.gpu", "gpu.xid"),
        ("gpukiln.image.gpu", "gpu.ecc"),
    ]
    assert cases[0].get("time") == "0.250"
    assert cases[0].findtext("system-out") == "3 files"
    assert properties(cases[0]) == {"title": "No history", "layer": "hygiene", "outcome": "passed"}


def test_counts_environment_and_time(tmp_path: Path) -> None:
    root = written(tmp_path, VERDICT)
    for element in (root, root[0]):
        counts = [element.get(k) for k in ("tests", "failures", "errors", "skipped", "time")]
        assert counts == ["4", "1", "0", "2", "12.300"]
    assert (root[0].get("name"), root[0].get("hostname")) == ("i-1", "vm")
    assert root[0].get("timestamp") == "2026-01-01T00:00:00+00:00"
    wanted = {"profile": "image", "suite_version": "0.9.1", "simulated": "false"}
    wanted |= {"host name": "vm", "kernel": "6.1"}
    assert properties(root[0]) == wanted


def test_a_failure_says_what_was_found_what_is_likely_and_what_to_do(tmp_path: Path) -> None:
    [failure] = written(tmp_path, VERDICT).iter("failure")
    assert failure.get("message") == "found <degraded>␛, wanted running"
    assert (failure.text or "").splitlines() == [
        "wanted: running",
        "found: found <degraded>␛, wanted running",
        *("likely cause: a cause", "likely cause: another"),
        *("fix: look at it", "evidence: boot (see report.html)"),
    ]


def test_not_run_and_not_reached_are_skipped_with_their_reasons(tmp_path: Path) -> None:
    found = [(s.get("type"), s.get("message")) for s in written(tmp_path, VERDICT).iter("skipped")]
    assert found == [("not_run", "not run: no GPU"), ("not_reached", "not reached: gpu.nvml failed")]


def test_several_machines_are_told_apart_and_one_not_judged_is_an_error(tmp_path: Path) -> None:
    other = replace(VERDICT, target="i-2", checks=VERDICT.checks[:1])
    root = written(tmp_path, VERDICT, other, reasons={"i-3": "connection refused"})
    assert [s.get("name") for s in root] == ["i-1", "i-2", "i-3"]
    names = [(c.get("classname"), c.get("name")) for c in root.iter("testcase")]
    assert len(names) == len(set(names)) == 6
    assert [e.get("message") for e in root.iter("error")] == ["connection refused"]
    assert [root.get(k) for k in ("tests", "failures", "errors", "skipped")] == ["6", "1", "1", "2"]
