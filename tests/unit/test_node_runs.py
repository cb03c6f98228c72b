"""node.runs: which folders of earlier runs go, and that none goes while a process works in it."""

import json
import os
import subprocess
import sys
import time

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.commands import node
from gpukiln.nodes import runs as kept
from gpukiln.nodes.runs import RunStore
from tests.support.exit_codes import code_of

DAY_S = 86400


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Run node.runs; returns its exit code, output and errors."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))

    def run(**options):
        code = code_of(node.NodeRunsCommand, **options)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture
def make(tmp_path):
    """Make what a run left so many days ago."""

    def make_run(name, days):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "a.log").write_text("x" * 10_000)
        when = time.time() - days * DAY_S
        for one in (folder / "a.log", folder):
            os.utime(one, (when, when))
        return folder

    return make_run


def test_neither_the_newest_nor_the_young_go(typed, make):
    old = [make(f"nodes/2026010{n}-000000-apply-000{n}", 50 - n) for n in (1, 2, 3)]
    young = make("nodes/20260201-000000-drift-0001", 3)
    younger = make("nodes/20260202-000000-drift-0001", 2)
    image = make("verify/ami-1/1", 40)
    stranger = make("nodes/of-somebody", 90)

    code, out, err = typed(keep=1)
    assert code == 0
    said = {line.split()[-1]: line.split()[0] for line in out.splitlines()[1:]}
    assert {name for name, action in said.items() if action == "remove"} == {str(old[0]), str(old[1])}
    assert "3 days old, less than 30" in out
    assert str(stranger) not in out
    assert "nothing was removed: --yes removes these 2 of 6" in err
    assert typed(keep=1, yes=True, dry_run=True)[2] == err
    assert all(one.exists() for one in old)

    code, out, _ = typed(keep=1, yes=True, json=True)
    actions = {one["folder"]: one["action"] for one in json.loads(out)["runs"]}
    assert code == 0
    assert [actions[str(one)] for one in old] == ["removed", "removed", "keep"]
    assert [one.exists() for one in old] == [False, False, True]
    assert all(one.exists() for one in (young, younger, image, stranger))

    typed(keep=0, older_than=0, yes=True)
    assert [one for one in (*old, young, younger, image) if one.exists()] == []
    assert stranger.exists()


def test_twenty_of_each_kind_and_thirty_days_stay_where_nothing_is_typed(typed, make):
    for n in range(22):
        make(f"nodes/20260101-0000{n:02}-verify-0000", 60 + n)
    make("nodes/20260101-000000-doctor-0000", 60)
    assert "--yes removes these 2 of 23" in typed()[2]


def test_nothing_goes_while_a_process_works_in_it(typed, tmp_path, make):
    make("nodes/20260101-000000-apply-0000", 60)
    script = (
        "import sys, pathlib; from gpukiln.nodes.runs import RunStore\n"
        "run = RunStore(pathlib.Path(sys.argv[1])).create('apply'); print(run.folder, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        folder = other.stdout.readline().strip()
        code, out, _ = typed(keep=0, older_than=0, yes=True, json=True)
        left = {one["folder"]: one["reason"] for one in json.loads(out)["runs"] if one["action"] == "keep"}
        assert (code, left) == (0, {folder: "a process works in it"})
        other.stdin.close()
    typed(keep=0, older_than=0, yes=True)
    assert RunStore(tmp_path).folders() == []


def test_what_can_not_be_removed_is_told(typed, make, monkeypatch):
    folder = make("nodes/20260101-000000-apply-0000", 60)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(kept.shutil, "rmtree", refuse)
    code, _, err = typed(keep=0, yes=True)
    assert code == 5
    assert f"{folder}: {folder}: Operation not permitted" in err


def test_a_run_that_somebody_removes_meanwhile_is_none(tmp_path):
    (tmp_path / "there").mkdir()
    found = kept.old_runs(
        [("apply", tmp_path / "gone"), ("apply", tmp_path / "there")], keep=20, older_than_days=30
    )
    assert [run.folder.name for run in found] == ["there"]
