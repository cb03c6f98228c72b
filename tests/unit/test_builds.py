"""Records of builds: found, compared, and skipped by name when they are damaged."""

import logging
from dataclasses import replace

import pytest
from test_plan import debian, plan  # noqa: F401 - `debian` is a fixture

from gpukiln.errors import BusyError, UsageError
from gpukiln.images.builds import Bake, Builds, Record
from gpukiln.images.pipeline import why_build
from gpukiln.verify.verdict import CheckResult, Verdict

BAKE = Bake("ami-0123456789abcdef0", "name", "us-west-2", "6.1.0-1-cloud-amd64", {}, {})
CHECK = CheckResult(
    id="boot.kernel", title="boots", layer="boot", outcome="passed", reason="", fix="", duration_s=0.1
)
VERDICT = Verdict(
    target="here", profile="image", started_at="2026-11-21T06:00:00+00:00", duration_s=1.0, checks=(CHECK,)
)


@pytest.fixture
def proven(request, tmp_path):
    """Builds, one of them proven."""
    request.getfixturevalue("debian")
    builds = Builds(tmp_path)
    build = builds.create("eks-gpu")
    build.write(Record(build.id, "verified", plan(), BAKE, VERDICT, {"bake": 5.0}))
    return builds


def test_a_build_is_found_by_each_of_its_names(proven):
    [build] = proven.all()
    assert {proven.find(name).id for name in ("last", build.id, BAKE.image_id)} == {build.id}
    assert build.read().verdict == VERDICT
    with pytest.raises(UsageError, match="no build 'nonsense'"):
        proven.find("nonsense")


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1, "plan": 3}'])
def test_a_damaged_record_is_named_and_does_not_stop_the_others(proven, caplog, text):
    damaged = proven.create("eks-gpu")
    damaged.record_file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert len(proven.all()) == 1
    assert str(damaged.record_file) in caplog.text


def test_a_build_is_one_processs(proven):
    [build] = proven.all()
    with build.locked(), pytest.raises(BusyError, match="another process"), build.locked():
        pass


def test_why_a_build_is_needed(proven, tmp_path):
    [build] = proven.all()
    old = build.read().plan
    newer = replace(old, inputs={**old.inputs, "component nvtop": "install 9.9"})
    [line] = why_build(newer, proven)
    assert line.startswith("component nvtop: install 3.0.1")
    assert why_build(old, proven) == [f"{BAKE.image_id} is not there any more"]
    assert why_build(old, Builds(tmp_path / "other")) == ["no image of it was proven on this machine yet"]
