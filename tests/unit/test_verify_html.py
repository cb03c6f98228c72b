"""The page that people read: what it says, what it must never say, and what a hostile machine can't do."""

import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gpukiln.probe import base
from gpukiln.verify import html
from gpukiln.verify.html import render, write_html
from gpukiln.verify.verdict import CheckResult, Verdict
from gpukiln.verify.verification import Verification

PASSED = CheckResult("hygiene.history", "No shell history", "hygiene", "passed", "3 files", evidence=("os",))
FAILED = CheckResult(
    "boot.state",
    "systemd says running",
    "boot",
    "failed",
    "found degraded, wanted running",
    "run `systemctl --failed`",
    ("a unit that failed", "a slow disk"),
    ("boot", "packages"),
)
NOT_RUN = CheckResult("gpu.xid", "no Xid", "gpu", "not_run", "no GPU here", "-")
NOT_REACHED = CheckResult("gpu.ecc", "no errors", "gpu", "not_reached", "gpu.nvml failed", "-")
VERDICT = Verdict(
    target="i-1",
    profile="image",
    started_at="2026-01-01T00:00:00+00:00",
    duration_s=192,
    checks=(PASSED, FAILED, NOT_RUN, NOT_REACHED),
    suite_version="0.9.1",
    environment={"kernel": "6.1.0-44", "driver": "535.309.01"},
)
FACTS: dict[str, Any] = {
    "os": {"title": "Debian 12"},
    "boot": {"_error": "no systemd"},
    "packages": {"installed": {"nvidia-smi": "535.309.01-0", "libcuda1": "535.1", "zlib1g": "1.3-zlib"}},
    "kernel": {"running": "6.1.0-44", "installed": ["6.1.0-44", "6.1.0-43"]},
    "driver": {"nvidia_smi": {"version": "535.309.01"}, "libraries": {"libcuda.so": ["535.309.02"]}},
    "modules": {"6.1.0-44": {"nvidia": {"version": "535.309.03"}, "nvidia_uvm": None}},
    "record": {"data": {"components": {"docker": {"status": "left_out", "reason": "no source"}}}},
    "seconds": {"packages": 1.25},
    "evidence": {
        "packages": [
            {"command": "dpkg-query -W", "rc": 3, "out": "nvidia-smi\n", "err": "a warning"},
            {"file": "/etc/apt/sources.list", "out": "(missing)"},
        ]
    },
}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\" onclick='x' {{ 7*7 }} </pre></details>"


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    @property
    def ids(self) -> list[str]:
        return [str(a["id"]) for _tag, a in self.tags if "id" in a]


def page(*machines: Verification) -> Page:
    return Page(render(machines))


def test_verdict_counts_failures_and_evidence_are_there() -> None:
    text = page(Verification("i-1", VERDICT, FACTS)).text
    for words in (
        *("Failed", "i-1", "1 of 4 checks failed", "1 check could not be run here; their result is unknown"),
        *("1 passed", "1 failed", "1 not run", "1 not reached"),
        *("kernel 6.1.0-44", "driver 535.309.01", "image: a machine on its first boot", "suite 0.9.1"),
        *("2026-01-01 00:00:00 UTC", "3m12s"),
        *("found degraded, wanted running", "a unit that failed", "a slow disk", "systemctl --failed"),
        *("3 files", "no GPU here", "gpu.nvml failed", "boot.state", "hygiene.history"),
        *("$ dpkg-query -W exit 3", "a warning", "/etc/apt/sources.list file (missing)", "asked in 1.2s"),
        *("could not be gathered: no systemd", "Debian 12"),
    ):
        assert words in text, words


def test_failures_come_before_every_check_and_link_to_it() -> None:
    shown = page(Verification("i-1", VERDICT, FACTS))
    assert shown.text.index("found degraded") < shown.text.index("hygiene.history")
    links = [str(a["href"]) for tag, a in shown.tags if tag == "a"]
    assert "#m1-boot.state" in links
    assert all(link.removeprefix("#") in shown.ids for link in links)
    assert len(shown.ids) == len(set(shown.ids))


def test_a_passed_page_lists_no_failure_and_never_ticks_what_was_not_run() -> None:
    good = replace(VERDICT, checks=(PASSED, NOT_RUN))
    shown = page(Verification("i-1", good, FACTS))
    assert "Passed" in shown.text
    assert "Every check that could be run passed. 1 check could not be run here" in shown.text
    assert "What failed" not in shown.text
    assert shown.text.count("✓") == 1
    assert "○ not run" in shown.text
    assert ("header", {"class": "verdict passed"}) in shown.tags


def test_nothing_passed_is_shown_as_failed() -> None:
    text = page(Verification("i-1", replace(VERDICT, checks=(NOT_RUN,)))).text
    assert "Failed" in text
    assert "that is not a pass" in text
    assert "✓" not in text


def test_versions_that_matter() -> None:
    found = html.versions(FACTS)
    assert found["Packages"] == {"libcuda1": "535.1", "nvidia-smi": "535.309.01-0"}
    assert found["Driver"] == {
        "nvidia-smi": "535.309.01",
        "libcuda.so": "535.309.02",
        "module of 6.1.0-44": "535.309.03",
    }
    assert found["Kernel"]["installed"] == "6.1.0-44, 6.1.0-43"
    assert found["Components in the image's record"] == {"docker": "left_out, no source"}
    assert html.versions({}) == {}


def test_several_machines_have_a_table_and_what_failed_where() -> None:
    good = replace(VERDICT, checks=(PASSED,), target="gpu-2")
    shown = page(
        Verification("gpu-1", VERDICT, FACTS),
        Verification("gpu-2", good),
        Verification("gpu-3", reason="connection refused"),
    )
    for words in (
        *(
            "1 of 3 machines passed",
            "1 failed, 1 could not be verified",
            "connection refused",
            "? not verified",
        ),
        *("What failed where", "boot.state 1 gpu-1"),
    ):
        assert words in shown.text, words
    assert len(shown.ids) == len(set(shown.ids))
    assert ("header", {"class": "verdict failed"}) in shown.tags


def test_a_machine_that_was_not_judged_does_not_pass() -> None:
    good = Verification("a", replace(VERDICT, checks=(PASSED,)))
    assert "1 of 2 machines passed" in page(good, Verification("b", reason="gone")).text
    assert "Passed 2 of 2" not in page(good, Verification("b", reason="gone")).text
    alone = page(Verification("b", reason="gone"))
    assert "Not verified b gone" in alone.text


def test_the_page_needs_nothing_and_runs_its_one_script() -> None:
    text = render([Verification("i-1", VERDICT, FACTS)])
    shown = Page(text)
    assert not {"link", "img", "iframe", "object", "form"} & {tag for tag, _ in shown.tags}
    assert not re.search(r"https?://|url\(|@import", text)
    assert any("default-src 'none'" in str(a.get("content")) for _tag, a in shown.tags)
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


@pytest.mark.parametrize("fragment", ["m1-boot.state", "m1-boot"])
def test_a_link_to_a_check_opens_it(tmp_path: Path, fragment: str) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium here")
    path = tmp_path / "report.html"
    write_html([Verification("i-1", VERDICT, FACTS)], path)
    command = [browser, "--headless", "--no-sandbox", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    done = subprocess.run(
        [*command, f"{path.as_uri()}#{fragment}"], capture_output=True, text=True, check=True, timeout=60
    )
    found = [str(a["id"]) for tag, a in Page(done.stdout).tags if tag == "details" and "open" in a]
    assert found == [fragment] * (fragment == "m1-boot.state")


def hostile(value: Any) -> Any:
    """The same value, hostile in every text, keys that are ours excepted."""
    ours = {*FACTS, "_error", "installed", "data", "components", "command", "file", "rc", "out", "err"}
    if isinstance(value, dict):
        return {k if k in ours else k + HOSTILE: hostile(v) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v) for v in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_a_hostile_machine_adds_no_element() -> None:
    tags = page(Verification("i-1", VERDICT, FACTS)).tags
    bad = replace(
        VERDICT,
        target=HOSTILE,
        environment={name: text + HOSTILE for name, text in VERDICT.environment.items()},
        checks=tuple(replace(c, reason=c.reason + HOSTILE) for c in VERDICT.checks),
    )
    facts = {k: v if k in ("evidence", "seconds") else hostile(v) for k, v in FACTS.items()}
    facts["evidence"] = {"packages": hostile(FACTS["evidence"]["packages"])}
    shown = page(Verification(HOSTILE, bad, facts))
    assert [(tag, a) for tag, a in shown.tags if tag in ("script", "img")] == [("script", {})]
    assert not any(name.startswith("on") for _tag, a in shown.tags for name in a)
    structure = [tag for tag, _ in tags if tag in ("details", "section", "pre", "h1", "dt")]
    assert [tag for tag, _ in shown.tags if tag in ("details", "section", "pre", "h1", "dt")] == structure
    assert shown.text.count("<script>alert(1)</script>") > 10
    assert "{{ 7*7 }}" in shown.text


def test_text_that_html_can_t_hold_is_replaced() -> None:
    facts = {
        "os": {},
        "evidence": {"os": [{"command": "x", "rc": 0, "out": "\x1b[31mred\x00 \u202egnp \ud800"}]},
    }
    text = render([Verification("i-1", replace(VERDICT, checks=(PASSED,)), facts)])
    assert "␛[31mred␀ �gnp ?" in text
    assert text.encode("utf-8")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"evidence": "none", "os": []},
        {"evidence": {"os": ["x", {"out": 3}]}, "os": None, "seconds": 3},
        {"gpus": None, "driver": [], "modules": {"k": None}, "packages": {"installed": []}, "record": 3},
    ],
)
def test_facts_of_another_form_break_no_page(facts: dict[str, Any]) -> None:
    assert "3 files" in page(Verification("i-1", VERDICT, facts)).text


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nMIIEsecretbody\n-----END OPENSSH PRIVATE KEY-----"  # not a key
SECRETS = {
    "https://bob:hunter2@example.com/x": "hunter2",
    "id AKIAABCDEFGHIJKLMNOP.": "AKIAABCDEFGHIJKLMNOP",
    KEY: "MIIEsecretbody",
    "token = s3cr3tvalue": "s3cr3tvalue",
    'password: "two xyzzy"': "xyzzy",
    '{"Authorization": "Bearer abc.def"}': "abc.def",
    "Authorization: Bearer ghi.jkl": "ghi.jkl",
}


@pytest.mark.parametrize(("said", "secret"), SECRETS.items(), ids=range(len(SECRETS)))
def test_no_secret_reaches_evidence_or_page(tmp_path: Path, said: str, secret: str) -> None:
    (tmp_path / "file").write_text(f"before\n{said}\nafter")
    base.evidence.clear()
    base.run("cat", str(tmp_path / "file"))
    base.run("sh", "-c", f"cat {tmp_path}/file >&2")
    base.read_evidence(str(tmp_path / "file"))
    kept = [dict(row) for row in base.evidence]
    base.evidence.clear()
    assert [row["out" if row.get("out") else "err"].startswith("before\n") for row in kept] == [True] * 3
    assert secret not in str(kept)
    assert str(kept).count("after") == 3
    # The page does not rely on it: not for evidence, not for a reason, not for a section shown as it is.
    facts = {
        "os": {"said": said},
        "boot": {},
        "evidence": {"boot": [{"command": said, "rc": 0, "out": said}]},
    }
    bad = replace(VERDICT, checks=(PASSED, replace(FAILED, reason=f"found {said}")))
    text = render([Verification("i-1", bad, facts)])
    assert secret not in text
    assert "found " in text


def test_a_secret_at_the_cut_is_left_out() -> None:
    base.evidence.clear()
    base.run("printf", "%s", "x" * (base.EVIDENCE_CHARS - 20) + " https://bob:hunter2@example.com")
    [row] = base.evidence
    base.evidence.clear()
    assert "hunter" not in row["out"]


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_html([Verification("i-1", VERDICT, FACTS)], path)
    before = path.read_text()
    assert before.endswith("</html>\n") or before.endswith("</html>")

    def full(_self: Path, _target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_html([Verification("i-2", VERDICT, FACTS)], path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
