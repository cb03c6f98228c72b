"""Programs that hang, or wait on a full disk, are ended and named."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukiln import programs
from gpukiln.errors import UnavailableError
from gpukiln.sources import apt

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 1000 & echo $! >{pid}; wait"
    with pytest.raises(UnavailableError, match=r"`sh -c .*` did not end within 1 s"):
        programs.run(["sh", "-c", script], limit_s=1)
    deadline = time.monotonic() + 10
    stat = Path("/proc", pid.read_text().strip(), "stat")
    while stat.exists() and " Z " not in stat.read_text():
        assert time.monotonic() < deadline, "what it started is still there"
        time.sleep(0.05)


def test_output_input_and_status_are_given_back(tmp_path: Path) -> None:
    done = programs.run(["sh", "-c", "cat; echo wrong >&2; exit 3"], limit_s=10, given=b"x" * 100_000)
    assert (done.returncode, len(done.stdout), done.stderr) == (3, 100_000, b"wrong\n")
    with (tmp_path / "log").open("wb") as log:
        programs.run(["sh", "-c", "echo a; echo b >&2"], limit_s=10, folder=tmp_path, output=log)
    assert (tmp_path / "log").read_text() == "a\nb\n"


def test_what_is_not_installed_is_told() -> None:
    with pytest.raises(UnavailableError, match="no-such-tool is not installed"):
        programs.run(["no-such-tool"], limit_s=1)


def test_a_tool_that_fails_says_why() -> None:
    assert programs.tool("sh", "-c", "cat; echo ignored >&2", stdin="ä\n") == "ä\n"
    with pytest.raises(UnavailableError, match="sh failed with exit code 3") as failed:
        programs.tool("sh", "-c", "seq 9; echo why >&2; exit 3")
    assert failed.value.details == ("3", "4", "5", "6", "7", "8", "9", "why")  # the last eight lines


@pytest.mark.parametrize(("user", "refused"), [(0, False), (1000, True)])
def test_root_may_use_the_reserved_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, refused: bool
) -> None:
    """statvfs(3): f_bfree are free blocks, f_bavail those that an unprivileged user gets."""
    size = os.statvfs_result((4096, 4096, 1000, 1000, 0, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    expected = pytest.raises(UnavailableError, match="is full") if refused else contextlib.nullcontext()
    with expected:
        programs.require_space(tmp_path, 4096 * 1000)


@needs_root
def test_a_program_that_waits_for_room_is_ended(small_disk: Path) -> None:
    script = f"head -c 1000000 /dev/zero >{small_disk}/a; exec sleep 1000"
    with pytest.raises(
        UnavailableError, match=f"disk of {small_disk} is full: . (KiB|bytes) of 300 KiB are free"
    ):
        programs.run(["sh", "-c", script], limit_s=60, folder=small_disk)


@needs_root
def test_apt_does_not_wait_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """Apt 2.6 waits forever in the middle of `update` where its lists have no room."""
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "Packages").write_bytes(os.urandom(500_000).hex().encode())
    sources = f"Types: deb\nURIs: copy:{archive}\nSuites: ./\nTrusted: yes\n"
    for given in (sources, None):  # what turns out to be too large, and what is known to be
        with pytest.raises(UnavailableError, match="is full: ") as caught:
            apt.candidate_versions(["nvtop"], cache=small_disk / "apt", sources=given)
        assert "MiB are needed" in caught.value.message
        assert "GPUKILN_HOME" in caught.value.hint


ENDS = ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))


def gone(pid: int) -> bool:
    stat = Path("/proc", str(pid), "stat")
    return not stat.exists() or " Z " in stat.read_text()


def test_lines_are_handed_on_as_they_come_and_the_status_is_given_back(tmp_path: Path) -> None:
    """It goes on only when its first line was read."""
    lines: list[str] = []

    def each(line: str) -> None:
        lines.append(line)
        (tmp_path / "go").touch()

    script = "echo one; until [ -e go ]; do :; done; echo two >&2; printf 'a\\377b'; exit 3"
    assert programs.stream(["sh", "-c", script], each, ends=ENDS, folder=tmp_path) == 3
    assert lines == ["one\n", "two\n", "a\ufffdb"]


def test_what_a_streamed_program_leaves_running_is_ended() -> None:
    lines: list[str] = []
    assert programs.stream(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], lines.append, ends=ENDS) == 0
    assert gone(int(lines[0]))


def test_an_error_of_who_reads_ends_the_program_and_is_raised() -> None:
    pids: list[int] = []

    def each(line: str) -> None:
        pids.append(int(line))
        raise ValueError("the log is full")

    with pytest.raises(ValueError, match="the log is full"):
        programs.stream(["sh", "-c", "echo $$; exec sleep 1000"], each, ends=ENDS)
    assert gone(pids[0])


INTERRUPTED = """
import signal, sys
from gpukiln import programs
script = "trap 'echo ending; exit 0' INT; echo $$; while :; do sleep 0.1; done"
say = lambda words: print(words, end="", flush=True)
ends = ((signal.SIGINT, 20.0), (signal.SIGKILL, 5.0))
stopping = lambda: say("stopping\\n")
programs.stream(["bash", "-c", script], say, ends=ends, interrupted=stopping, dies_with_us=True)
"""


@pytest.mark.parametrize(
    ("how", "said"), [(signal.SIGINT, ["stopping", "ending"]), (signal.SIGKILL, [])], ids=["ctrl-c", "killed"]
)
def test_a_streamed_program_ends_with_this_one(how: signal.Signals, said: list[str]) -> None:
    """At Ctrl-C by its own end, whose lines are read; killed where this process is."""
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as here:
        assert here.stdout is not None
        pid = int(here.stdout.readline())
        here.send_signal(how)
        assert here.stdout.read().split() == said
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)


def test_a_streamed_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no-such-program is not installed"):
        programs.stream(["no-such-program"], print, ends=ENDS)
    with pytest.raises(FileNotFoundError, match="none"):
        programs.stream(["true"], print, ends=ENDS, folder=tmp_path / "none")
