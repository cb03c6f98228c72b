"""A file or folder is whole or not there, and what a killed process left goes by its name."""

import subprocess
import sys

import pytest

from gpukiln.files import atomic_path, remove_partial, write_atomic

DIE = (
    "import os, pathlib, sys\n"
    "from gpukiln.files import atomic_path\n"
    "with atomic_path(pathlib.Path(sys.argv[1])) as partial:\n"
    "    partial.mkdir()\n"
    "    (partial / 'file').touch()\n"
    "    os._exit(1)\n"
)


def test_bytes_and_modes(tmp_path):
    file = tmp_path / "file"
    write_atomic(file, b"\xff\0", mode=0o644)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"\xff\0", 0o644)
    write_atomic(file, "grün")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == ("grün".encode(), 0o600)


def names(folder):
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_block_made_takes_the_name_at_its_end(tmp_path, folder):
    path = tmp_path / "name"
    with atomic_path(path) as partial:
        partial.mkdir() if folder else partial.write_text("new")
        assert not path.exists()
    assert path.is_dir() is folder
    assert names(tmp_path) == ["name"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_of_a_failure_nothing_stays_and_what_stood_there_does(tmp_path, error):
    write_atomic(tmp_path / "name", "old")

    def fails():
        with atomic_path(tmp_path / "name") as partial:
            partial.mkdir()
            (partial / "file").touch()
            raise error

    with pytest.raises(error):
        fails()
    assert (tmp_path / "name").read_text() == "old"
    assert names(tmp_path) == ["name"]


def test_a_block_that_makes_nothing_is_a_mistake(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "name"):
        pass


def test_what_a_killed_process_left_goes_and_nothing_else(tmp_path):
    (tmp_path / "mine.partial").touch()
    subprocess.run([sys.executable, "-c", DIE, str(tmp_path / "name")], check=False)
    [left] = [path for path in tmp_path.iterdir() if path.name != "mine.partial"]
    assert (left / "file").exists()
    assert remove_partial(tmp_path) == [left]
    assert names(tmp_path) == ["mine.partial"]
