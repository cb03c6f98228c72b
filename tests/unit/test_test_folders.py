"""Folders of test runs: a killed run leaves none for long, none in use goes, a full disk is said first."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpukiln.disks import sparse
from tests import folders
from tests.support import homes
from tests.support.harness import ROOT

HOLD = """
import sys, time
from pathlib import Path
from tests.folders import folder
with folder(Path(sys.argv[1])) as path:
    print(path, flush=True)
    time.sleep(600)
"""
HOLD_DISKS = HOLD.replace("import folder", "import disks as folder").replace(
    "(sys.argv[1])", "(sys.argv[1]), Path(sys.argv[1])"
)


def same_names(paths):
    """Names that two modules have: pytest imports both by this name, and runs one."""
    return {name for name, count in Counter(path.name for path in paths).items() if count > 1}


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
def test_clouds_of_several_processes_have_networks_of_their_own(tmp_path, workers):
    regions = ("us-west-2", "us-east-1")
    used = Counter()
    for worker in range(workers):
        folder = tmp_path / str(worker)
        first = homes.apart(folder, worker, workers, regions)
        second = homes.apart(folder, worker, workers, regions, [first])
        used.update(homes.networks(first, regions) + homes.networks(second, regions))
    assert len(used) == used.total() == workers * 4


def test_a_process_that_can_have_no_cloud_says_so(tmp_path):
    with pytest.raises(AssertionError, match="has no home for process 3 of 3"):
        homes.apart(tmp_path, 3, 3, ["us-west-2"])


def test_no_two_modules_of_tests_have_one_name(tmp_path):
    places = [ROOT / "tests/unit", ROOT / "tests/e2e"]
    assert same_names(path for place in places for path in place.glob("test_*.py")) == set()
    assert same_names([tmp_path / "a/test_x.py", tmp_path / "b/test_x.py"]) == {"test_x.py"}


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


@pytest.mark.usefixtures("require_root_machine")
def test_disks_of_a_run_are_on_one_file_system_until_its_last_process_ends(tmp_path):
    with folders.disks(tmp_path, tmp_path) as first:
        with folders.disks(tmp_path, tmp_path) as second:
            assert first == second
            (second / "disk").write_bytes(bytes(range(256)) * 4096)
        sparse.copy_disk(first / "disk", first / "copy")
        shown = subprocess.run(["filefrag", "-v", first / "copy"], capture_output=True, text=True, check=True)
        assert "shared" in shown.stdout
    assert not first.parent.exists()
    assert str(first) not in Path("/proc/self/mounts").read_text()
    with folders.disks(tmp_path, tmp_path) as again:
        assert again.is_mount()


@pytest.mark.usefixtures("require_root_machine")
def test_disks_of_a_killed_run_are_unmounted_by_the_next(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_DISKS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as killed:
        path = Path(killed.stdout.readline().strip())
        assert folders.remove_abandoned(tmp_path) == []
        with (path / "open").open("w"):
            killed.kill()
            killed.wait()
            assert folders.remove_abandoned(tmp_path) == []  # somebody still uses it
        assert folders.remove_abandoned(tmp_path) == [path.parent]
    assert str(path) not in Path("/proc/self/mounts").read_text()


def test_a_disk_without_room_is_said_with_what_is_needed(tmp_path):
    assert folders.too_full(0, tmp_path) is None
    assert "take up to 1e+09 GiB" in folders.too_full(1e9, tmp_path)
