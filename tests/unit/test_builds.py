"""Records of builds: found, compared, and skipped by name when they are damaged."""

import io
import json
import logging
from dataclasses import replace

import pytest
from rich.console import Console

from gpukiln.errors import BusyError, UsageError
from gpukiln.images.builds import Build, Builds, Record
from gpukiln.images.modules import ModuleUse
from gpukiln.images.timings import timings, timings_table
from gpukiln.pipeline.steps import why_build
from gpukiln.release.compared_image import find_compared_image
from gpukiln.typed import dump, load
from tests.support.plans import BAKE, VERDICT


def test_a_build_is_found_by_each_of_its_names(proven):
    [build] = proven.all()
    assert {proven.find(name).id for name in ("last", build.id, BAKE.image_id)} == {build.id}
    assert build.read().verdict == VERDICT
    with pytest.raises(UsageError, match="no build 'nonsense'"):
        proven.find("nonsense")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        '{"schema": ' + "9" * 5000 + "}",
        '{"schema": 1, "plan": 3}',
        '{"schema": 2}',
    ],
)
def test_a_damaged_record_is_named_and_does_not_stop_the_others(proven, caplog, text):
    damaged = proven.create("eks-gpu")
    damaged.record_file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert len(proven.all()) == 1
    assert str(damaged.record_file) in caplog.text


def test_a_damaged_newest_build_is_not_passed_over(proven):
    [good] = proven.all()
    damaged = proven.create("z")
    damaged = Build(damaged.folder.rename(proven.folder / "99991231-235959-eks-gpu-0000"))
    document = json.loads(good.record_file.read_text())
    damaged.record_file.write_text(json.dumps({**document, "durations_s": 5}))
    for name in ("last", damaged.id):
        with pytest.raises(UsageError, match="durations_s: found 5, wanted keys with values") as caught:
            proven.find(name)
        assert str(damaged.folder) in caught.value.hint
    assert {proven.find(name).id for name in (good.id, BAKE.image_id)} == {good.id}


def test_another_file_than_a_record_is_never_to_be_removed(proven, tmp_path):
    (tmp_path / "passwd").write_text("root:x:0")
    for name in (str(tmp_path), str(tmp_path / "passwd")):
        with pytest.raises(UsageError, match="can't be read") as caught:
            find_compared_image(proven, name)
        assert "remove" not in caught.value.hint
    with pytest.raises(UsageError, match="no build ''"):
        find_compared_image(proven, "")


def test_a_build_is_one_processs(proven):
    [build] = proven.all()
    with build.locked(), pytest.raises(BusyError, match="another process"), build.locked():
        pass


def test_why_a_build_is_needed(proven, tmp_path):
    [build] = proven.all()
    old = build.read().plan
    newer = replace(old, inputs={**old.inputs, "component nvtop": "install 9.9"})
    since, line = why_build(newer, proven)
    assert since == f"since {BAKE.image_id} of build {build.id}, verified on 2026-11-21:"
    assert line == "available version of nvtop: 3.0.1-1 -> 9.9"
    [gone] = why_build(old, proven)
    assert gone == f"{BAKE.image_id} of build {build.id} had this digest, and does not exist any more"
    assert why_build(old, Builds(tmp_path / "other")) == ["no image of it was verified on this machine yet"]


def test_a_record_tells_where_modules_came_from_and_an_old_one_does_not(proven):
    [build] = proven.all()
    record = build.read()
    use = ModuleUse("6.1.0-1", "nvidia-current/535.309.01", cached=True, reason="verified")
    build.write(replace(record, bake=replace(BAKE, modules=(use,))))
    assert build.read().bake.modules == (use,)
    old = dump(record)
    del old["bake"]["modules"]
    assert load(Record, old, where="record").bake == BAKE


def test_builds_are_compared_step_by_step(proven):
    record = proven.all()[0].read()
    use = ModuleUse("6.1.0-1", "nvidia-current/535.309.01", cached=True, reason="verified")
    newer = replace(record, bake=replace(BAKE, modules=(use,)), durations_s={"bake": 2.0, "verify": 1.0})
    rows = timings([newer, record])
    assert [row["total_s"] for row in rows] == [3.0, 5.0]
    assert [row["modules"] for row in rows] == ["cache", "-"]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(timings_table(rows))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["bake", "2s", "5s", "0.40"] in lines
    assert ["verify", "1s", "-"] in lines
    assert ["all", "3s", "5s", "0.60"] in lines


def test_a_folder_whose_record_is_gone_is_named(proven, caplog):
    lost = proven.create("eks-gpu")
    with caplog.at_level(logging.WARNING):
        assert len(proven.all()) == 1
    assert f"{lost.folder} has lost its record.json" in caplog.text
