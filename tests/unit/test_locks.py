"""A lock keeps others out, of this process and of another, and goes with whoever held it."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from gpukiln.errors import BusyError
from gpukiln.locks import locked

BUSY = BusyError("somebody bakes")
HOLD = (
    "import sys, time, pathlib\n"
    "from gpukiln.locks import locked\n"
    "with locked(pathlib.Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def holder(lock):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_of_a_killed_process_is_free_at_once(lock, holder):
    with pytest.raises(BusyError, match="somebody bakes"), locked(lock, busy=BUSY):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(lock, busy=BUSY):
        assert lock.exists()
    assert lock.exists()


def test_without_an_error_the_other_is_waited_for(lock, holder):
    threading.Timer(0.2, holder.kill).start()
    began = time.monotonic()
    with locked(lock):
        assert 0.1 < time.monotonic() - began < 30


def test_who_only_asks_for_a_moment_is_waited_for(lock, holder):
    threading.Timer(0.2, holder.kill).start()
    with locked(lock, busy=BUSY, wait_s=30):
        pass


def test_one_process_does_not_hold_it_twice_and_a_failure_lets_it_go(lock):
    with pytest.raises(BusyError), locked(lock, busy=BUSY), locked(lock, busy=BUSY, wait_s=0.1):
        pass
    with pytest.raises(ValueError, match="within"), locked(lock, busy=BUSY):
        raise ValueError("within")
    with locked(lock, busy=BUSY):
        pass
