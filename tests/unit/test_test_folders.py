"""Folders of test runs: a killed run leaves none for long, none in use goes, a full disk is said first."""

import subprocess
import sys

from tests import folders
from tests.support.harness import ROOT

HOLD = """
import sys, time
from pathlib import Path
from tests.folders import folder
with folder(Path(sys.argv[1])) as path:
    print(path, flush=True)
    time.sleep(600)
"""


def hold(parent):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_the_folder_of_a_killed_run_is_removed_by_the_next_and_one_in_use_is_not(tmp_path):
    with hold(tmp_path) as killed, hold(tmp_path) as runs:
        names = [process.stdout.readline().strip() for process in (killed, runs)]
        assert folders.remove_abandoned(tmp_path) == []
        killed.kill()
        killed.wait()
        assert [str(path) for path in folders.remove_abandoned(tmp_path)] == names[:1]
        assert [str(path) for path in tmp_path.glob("gpukiln-tests-*/")] == names[1:]
        runs.kill()


def test_a_folder_is_gone_at_its_end(tmp_path):
    with folders.folder(tmp_path) as path:
        (path / "disk").write_text("")
    assert not path.exists()


def test_a_disk_without_room_is_said_with_what_is_needed(tmp_path):
    assert folders.too_full(0, tmp_path) is None
    assert "take up to 1e+09 GiB" in folders.too_full(1e9, tmp_path)
