"""ami.verify on a stand-in for the machine and the suite: what the person sees, and where the report is."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from invoke.context import Context
from test_builds import BAKE, proven  # noqa: F401 - a fixture
from test_plan import debian  # noqa: F401 - a fixture that the other takes

from gpukiln.commands import ami
from gpukiln.images import killed, pipeline
from gpukiln.images.launch import Launched
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import CheckResult, Verdict

GOOD = CheckResult("hygiene.history", "No shell history", "hygiene", "passed", "3 files")
BAD = CheckResult("boot.state", "running", "boot", "failed", "found degraded", "look", ("a cause",))


@pytest.fixture
def judge(request, monkeypatch, capsys):
    """Run ami.verify with these results; returns its exit code, standard error and the build."""
    builds = request.getfixturevalue("proven")
    tags = []

    def run(*results, is_gone=False):
        def suite(target, *, profile, out_dir, on_check, on_start, expect_gpus):
            assert (target.name, expect_gpus) == ("i-1", None)
            on_start("gathering facts")
            for result in results:
                on_start(result.title)
                on_check(result)
            (out_dir / "report.html").write_text("the page")
            return Verdict("i-1", profile, "2026-01-01T00:00:00+00:00", 1.0, results)

        @contextmanager
        def machine(*_args, **_options):
            yield Target("192.0.2.1", name="i-1"), Launched("i-1", "g4dn.xlarge", "us-west-2a", False)

        image = {"ImageId": BAKE.image_id, "CreationDate": "2026-01-01T00:00:00Z", "BlockDeviceMappings": []}
        ec2 = SimpleNamespace(
            create_tags=lambda **options: tags.append(options),
            modify_image_attribute=lambda **_: None,
            describe_images=lambda **_: {"Images": [] if is_gone else [image]},
        )
        monkeypatch.setattr(pipeline, "run_suite", suite)
        monkeypatch.setattr(pipeline, "machine_from_image", machine)
        monkeypatch.setattr(killed, "clean_up_after_killed", lambda *_: [])
        monkeypatch.setattr(ami, "_builds", lambda: builds)
        monkeypatch.setattr(
            ami,
            "_cloud",
            lambda *_: SimpleNamespace(
                region="us-west-2", has_gpus=False, ssh_cidr="192.0.2.1/32", client=lambda _name: ec2
            ),
        )
        code = 0
        try:
            ami.verify(Context(), build="last")
        except SystemExit as error:
            code = error.code
        return code, capsys.readouterr().err, builds.find("last")

    return run


def test_each_check_is_shown_once_and_the_report_is_named(judge):
    code, shown, build = judge(GOOD, replace_id(GOOD, "hygiene.other"))
    assert code == 0
    assert shown.count("hygiene.history") == shown.count("hygiene.other") == 1
    assert shown.index("gathering facts") < shown.index("hygiene.history") < shown.index("ok verify")
    assert "i-1 (image): passed - 2 passed, 0 failed, 0 not run" in shown
    page = build.folder / "verify" / "report.html"
    assert f"report: {page}" in shown.splitlines()
    assert page.read_text() == "the page"
    assert (build.folder / "sbom.cdx.json").exists()


def test_a_failure_ends_with_its_causes_and_fix(judge):
    code, shown, build = judge(GOOD, BAD)
    assert code == 1
    assert "failed verify" in shown
    for words in ("found: found degraded", "cause? a cause", "fix:   look"):
        assert words in shown
    assert shown.count("found degraded") == 2  # as it came, and at the end with what to do
    assert f"report: {build.folder}/verify/report.html" in shown.splitlines()
    assert build.read().verdict.counts["failed"] == 1


def test_without_sbom_the_verdict_stays_and_the_way_to_write_it_is_said(judge):
    code, shown, build = judge(GOOD, is_gone=True)
    assert code == 4
    assert f"`invoke ami.attest {build.id}` writes what is missing" in shown
    assert build.read().verdict.counts["passed"] == 1


def replace_id(check, name):
    return CheckResult(name, check.title, check.layer, check.outcome, check.reason)
