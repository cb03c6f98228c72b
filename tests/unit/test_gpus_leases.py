"""Who has which GPU: no GPU is ever granted twice, and none is lost, whoever is killed."""

import dataclasses
import fcntl
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpukiln.errors import BusyError, IncompatibleError, RefusedError, UnavailableError
from gpukiln.gpus import leases as module
from gpukiln.gpus import store as store_module
from gpukiln.gpus.config import Config, LeaseLimit, MachinePrice
from gpukiln.gpus.leases import DETACHED, JOB, LeaseGrant, LeaseHolder, Leases, rebuild_leases
from gpukiln.gpus.model import GpuProcess, Snapshot
from gpukiln.gpus.selection import SHARED, DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support.gpus import device, snapshot, uuid

ANN, BOB = LeaseHolder("ann", 1001), LeaseHolder("bob", 1002)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUKILN_GPUS_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Leases]]:
    made: list[Leases] = []

    def leases(found: Snapshot | None = None, config: Config | None = None, **more: Any) -> Leases:
        seen = found or snapshot()
        made.append(
            Leases(
                LeaseStore(folder),
                take_snapshot=lambda: seen,
                config=config or Config(Path("gpus.toml")),
                **more,
            )
        )
        return made[-1]

    yield leases
    for one in made:
        one.store.close()


def let_go(granted: LeaseGrant) -> None:
    """What the kernel does when the last process of a job ends."""
    for number in granted.descriptors:
        os.close(number)


def dead_pid() -> int:
    """The number of a process that was there, and is not."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def forget_process(leases: Leases, granted: LeaseGrant) -> None:
    """Have the lease belong to a process that ended, as if its wrapper had been killed."""
    with leases.store.change():
        leases.store.update(granted.lease.number, pid=dead_pid(), ticks=1)


def test_a_lease_has_its_gpus_alone_until_it_is_released(make: Callable[..., Leases]) -> None:
    leases = make()
    first = leases.acquire(DeviceRequest(count=6), ANN)
    second = leases.acquire(DeviceRequest(count=2), BOB)
    assert len({*first.uuids, *second.uuids}) == 8
    with pytest.raises(BusyError, match="0 of 8 devices") as error:
        leases.acquire(DeviceRequest(), ANN)
    assert f"leased: {first.lease.id} of ann" in " ".join(error.value.details)
    let_go(second)
    assert leases.release(second.lease, BOB)
    assert not leases.release(second.lease, BOB)  # once more, and nothing happens
    assert set(leases.acquire(DeviceRequest(count=2), ANN).uuids) == set(second.uuids)


def test_what_can_never_be_served_is_told_apart_from_what_is_not_free(make: Callable[..., Leases]) -> None:
    with pytest.raises(IncompatibleError, match="8 of this machine's devices can serve it, wanted 9"):
        make().acquire(DeviceRequest(count=9), ANN)


@pytest.mark.parametrize(
    ("found", "error", "told"),
    [
        (
            snapshot(state="no-device", message="no NVIDIA GPU is on the PCI bus"),
            IncompatibleError,
            "no NVIDIA",
        ),
        (snapshot(state="mismatch", message="does not fit"), UnavailableError, "does not fit"),
    ],
)
def test_without_a_driver_that_answers_nothing_is_leased(
    make: Callable[..., Leases], found: Snapshot, error: type[Exception], told: str
) -> None:
    leases = make(dataclasses.replace(found, devices=()))
    with pytest.raises(error, match=told):
        leases.acquire(DeviceRequest(), ANN)
    assert leases.current() == []


def test_a_killed_wrapper_leaves_the_job_its_gpu(make: Callable[..., Leases]) -> None:
    leases = make(snapshot(device()))
    granted = leases.acquire(DeviceRequest(), ANN)
    job = subprocess.Popen(["sleep", "60"], pass_fds=granted.descriptors)
    try:
        let_go(granted)
        forget_process(leases, granted)
        assert [one.id for one in leases.current()] == [granted.lease.id]  # the job still holds the lock
        with pytest.raises(BusyError):
            leases.acquire(DeviceRequest(), BOB)
    finally:
        job.kill()
        job.wait()
    assert leases.acquire(DeviceRequest(), BOB).uuids == granted.uuids
    [use] = leases.store.ledger()
    assert (use["user"], use["ended_by"]) == ("ann", "gone")


def test_a_job_that_closes_what_it_inherited_keeps_its_gpu_as_long_as_it_lives(
    make: Callable[..., Leases],
) -> None:
    leases = make(snapshot(device()))
    granted = leases.acquire(DeviceRequest(), ANN)
    job = subprocess.Popen(["sleep", "60"])  # without the locks
    try:
        leases.set_job(granted.lease, job.pid)
        let_go(granted)
        forget_process(leases, granted)
        with pytest.raises(BusyError):
            leases.acquire(DeviceRequest(), BOB)
    finally:
        job.kill()
        job.wait()
    assert leases.acquire(DeviceRequest(), BOB).uuids == granted.uuids


def test_a_number_that_was_given_again_keeps_no_lease(make: Callable[..., Leases]) -> None:
    leases = make(snapshot(device()))
    granted = leases.acquire(DeviceRequest(), ANN)
    let_go(granted)
    with leases.store.change():  # a process of this number lives, and began at another time
        leases.store.update(granted.lease.number, pid=os.getpid(), ticks=1)
    assert leases.current() == []


def test_another_boot_ends_every_lease(make: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch) -> None:
    leases = make()
    leases.acquire(DeviceRequest(count=3), ANN)
    leases.acquire(DeviceRequest(count=2), BOB, kind=DETACHED, hours=2)
    monkeypatch.setattr(store_module, "boot_id", lambda: "another")
    monkeypatch.setattr(module, "boot_id", lambda: "another")
    assert leases.current() == []
    assert {use["ended_by"] for use in leases.store.ledger()} == {"reboot"}
    assert all(use["seconds"] >= 0 for use in leases.store.ledger())


def test_a_clock_that_is_set_changes_nothing(
    make: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = make()
    granted = leases.acquire(DeviceRequest(), ANN, kind=DETACHED, hours=1)
    monkeypatch.setattr(time, "time", lambda: 10.0)  # 1970
    assert [one.id for one in leases.current()] == [granted.lease.id]
    monkeypatch.setattr(time, "time", lambda: 9e9)  # 2255
    assert [one.id for one in leases.current()] == [granted.lease.id]
    assert leases.release(granted.lease, ANN)
    [use] = leases.store.ledger()
    assert 0 <= use["seconds"] < 60


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So much later, by the clock that counts from the machine's start."""
    real = store_module.boot_clock
    later = real() + seconds
    for one in (module, store_module):
        monkeypatch.setattr(one, "boot_clock", lambda: later)


def test_a_detached_lease_ends_at_its_deadline_and_not_before(
    make: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = make()
    granted = leases.acquire(DeviceRequest(), ANN, kind=DETACHED, hours=2)
    assert granted.descriptors == ()
    at(monkeypatch, 7100)
    assert leases.current() != []
    at(monkeypatch, 7300 - 7100)
    assert leases.current() == []
    [use] = leases.store.ledger()
    assert (use["ended_by"], round(use["seconds"])) == ("expired", 7200)


def test_a_heartbeat_must_be_renewed(make: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch) -> None:
    leases = make()
    kept = leases.acquire(DeviceRequest(), ANN, kind=DETACHED, hours=2, heartbeat_s=600)
    lost = leases.acquire(DeviceRequest(), ANN, kind=DETACHED, hours=2, heartbeat_s=600)
    at(monkeypatch, 500)
    leases.renew(kept.lease, ANN)
    at(monkeypatch, 200)
    assert [one.id for one in leases.current()] == [kept.lease.id]
    with pytest.raises(RefusedError, match="belongs to ann"):
        leases.renew(kept.lease, BOB)
    del lost


def test_somebody_elses_lease_needs_force_and_that_is_written_down(make: Callable[..., Leases]) -> None:
    leases = make(snapshot(device()))
    granted = leases.acquire(DeviceRequest(), ANN)
    with pytest.raises(RefusedError, match=f"{granted.lease.id} belongs to ann") as error:
        leases.release(granted.lease, BOB)
    assert error.value.exit_code == 6
    assert leases.release(granted.lease, BOB, force=True)
    assert leases.store.ledger()[0]["ended_by"] == "taken away by bob"
    # Its job still runs, and still has the GPU: nobody else gets it before that ends.
    with pytest.raises(BusyError, match="0 of 1 devices") as busy:
        leases.acquire(DeviceRequest(), BOB)
    assert "a job without a lease" in " ".join(busy.value.details)
    let_go(granted)
    assert leases.acquire(DeviceRequest(), BOB).uuids == granted.uuids


def test_shared_gpus_are_filled_up_to_their_memory_and_no_further(make: Callable[..., Leases]) -> None:
    leases = make(snapshot(device(0), device(1)))
    wanted = DeviceRequest(mode=SHARED, memory_mib=16384)
    spread = [leases.acquire(wanted, ANN).uuids[0] for _ in range(2)]
    assert sorted(spread) == [uuid(0), uuid(1)]
    packed = leases.acquire(dataclasses.replace(wanted, pack=True), ANN)
    leases.acquire(wanted, BOB)
    with pytest.raises(BusyError, match="0 of 2"):
        leases.acquire(wanted, BOB)
    with pytest.raises(BusyError, match="0 of 2"):  # nor does anybody have one alone
        leases.acquire(DeviceRequest(), BOB)
    del packed


def test_limits_are_of_the_user_else_of_the_project_else_of_everybody(make: Callable[..., Leases]) -> None:
    config = Config(
        Path("gpus.toml"),
        everybody=LeaseLimit(1, 1),
        users={"ann": LeaseLimit(2, 0, "user ann")},
        projects={"big": LeaseLimit(4, 48, "project big", ("ann", "bob"))},
    )
    leases = make(config=config)
    leases.acquire(DeviceRequest(count=2), ANN)
    with pytest.raises(RefusedError, match="ann has 2 GPUs and requests 1 more, the limit of user ann is 2"):
        leases.acquire(DeviceRequest(), ANN)
    with pytest.raises(RefusedError, match="the limit of everybody is 1"):
        leases.acquire(DeviceRequest(count=2), BOB)
    with pytest.raises(RefusedError, match="longer than the 1 hours of everybody"):
        leases.acquire(DeviceRequest(), BOB, kind=DETACHED, hours=2)
    granted = leases.acquire(DeviceRequest(count=2), LeaseHolder("bob", 1002, "big"), kind=DETACHED)
    assert granted.lease.expires_boot == pytest.approx(granted.lease.granted_boot + 48 * 3600)


def test_what_works_without_a_lease_is_not_given_away(make: Callable[..., Leases]) -> None:
    busy = GpuProcess(4711, uuid(0), "compute", "running", user="eve", uid=1003)
    gone = GpuProcess(4712, uuid(1), "compute", "gone")
    leases = make(snapshot(device(0), device(1), processes=(busy, gone)))
    assert leases.acquire(DeviceRequest(), ANN).uuids == (uuid(1),)
    with pytest.raises(BusyError) as error:
        leases.acquire(DeviceRequest(), ANN)
    assert "busy without a lease: pid 4711 (compute) of eve; --ignore-unleased" in error.value.details[0]
    assert leases.acquire(DeviceRequest(ignore_unleased=True), ANN).uuids == (uuid(0),)


@pytest.mark.parametrize(("kind", "program"), [("graphics", "Xorg"), ("compute+graphics", "kwin_wayland")])
def test_what_draws_on_a_gpu_keeps_nobody_from_it_unless_the_machine_says_so(
    make: Callable[..., Leases], kind: str, program: str
) -> None:
    """A display server has 120 MiB of every GPU of a workstation, for ever."""
    command = f"/usr/lib/{program} :0"
    draws = GpuProcess(950, uuid(0), kind, "running", memory_mib=120, user="root", uid=0, command=command)
    seen = snapshot(device(0), processes=(draws,))
    leases = make(seen)
    assert leases.reconcile(ANN) == []
    granted = leases.acquire(DeviceRequest(), ANN)
    leases.release(granted.lease, ANN)
    let_go(granted)
    strict = make(seen, Config(Path("gpus.toml"), counts=("compute", kind)))
    with pytest.raises(BusyError) as error:
        strict.acquire(DeviceRequest(), BOB)
    assert f"pid 950 {program} ({kind}) of root; --ignore-unleased selects it" in error.value.details[0]
    assert "[busy] counts in /etc/gpukiln/gpus.toml" in error.value.details[0]


def test_who_gets_nothing_is_not_told_that_free_gpus_are_not_needed(make: Callable[..., Leases]) -> None:
    leases = make(snapshot(device(0), device(1)))
    leases.acquire(DeviceRequest(), ANN)
    with pytest.raises(BusyError) as error:
        leases.acquire(DeviceRequest(count=2), BOB)
    assert [line.partition(": ")[2].partition(" (")[0] for line in error.value.details] == [
        "leased: L-1 of ann",
        "free",
    ]


def test_who_looks_at_a_lock_for_a_moment_is_not_in_the_way_of_who_takes_it(
    make: Callable[..., Leases],
) -> None:
    """`gpukiln-gpu list` of others looks at every lock, again and again."""
    leases = make(snapshot(device(0)))
    number = os.open(leases.store.guard(uuid(0)), os.O_RDWR | os.O_CREAT)
    fcntl.flock(number, fcntl.LOCK_SH)
    timer = threading.Timer(0.2, os.close, (number,))
    timer.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeaseStore, "is_locked", lambda *_: False)  # as it was a moment ago
        assert leases.acquire(DeviceRequest(), ANN).uuids == (uuid(0),)
    timer.join()


WAITER = """
import sys, time
from pathlib import Path
from gpukiln.gpus.leases import LeaseHolder, Leases
from gpukiln.gpus.config import Config
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support.gpus import device, snapshot
folder, user, uid, hold = sys.argv[1:]
seen = snapshot(device())
leases = Leases(LeaseStore(Path(folder)), take_snapshot=lambda: seen, config=Config(Path("x")))
print("ready", flush=True)
granted = leases.acquire(DeviceRequest(), LeaseHolder(user, int(uid)), wait_s=30)
print("granted", time.monotonic(), flush=True)
time.sleep(float(hold))
"""


def waiter(folder: Path, user: LeaseHolder, hold: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITER, str(folder), user.user, str(user.uid), str(hold)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def tickets(leases: Leases, count: int) -> None:
    """Wait until so many wait."""
    until = time.monotonic() + 20
    while len(leases.queue()) != count:
        assert time.monotonic() < until, leases.queue()
        time.sleep(0.02)


def test_who_waits_is_served_in_turn_and_each_holder_once_before_another_twice(
    make: Callable[..., Leases], folder: Path
) -> None:
    leases = make(snapshot(device()))
    granted = leases.acquire(DeviceRequest(), BOB)
    asked = [(ANN, "ann 1"), (ANN, "ann 2"), (BOB, "bob 1")]
    started: list[tuple[str, subprocess.Popen[str]]] = []
    for who, name in asked:
        started.append((name, waiter(folder, who)))
        tickets(leases, len(started))
    assert [row["user"] for row in leases.queue()] == ["ann", "bob", "ann"]
    with pytest.raises(BusyError):  # who does not wait does not go before them
        leases.acquire(DeviceRequest(), LeaseHolder("eve", 1003))
    let_go(granted)
    leases.release(granted.lease, BOB)
    when = {}
    for name, process in started:
        said = process.communicate(timeout=30)[0].split()
        when[name] = float(said[2])
    assert sorted(when, key=lambda name: when[name]) == ["ann 1", "bob 1", "ann 2"]
    assert leases.queue() == []


def test_who_is_killed_while_waiting_waits_no_longer(make: Callable[..., Leases], folder: Path) -> None:
    leases = make(snapshot(device()))
    granted = leases.acquire(DeviceRequest(), BOB)
    process = waiter(folder, ANN)
    tickets(leases, 1)
    process.kill()
    process.wait()
    let_go(granted)
    leases.release(granted.lease, BOB)
    assert leases.acquire(DeviceRequest(), BOB).uuids == (uuid(0),)


def test_a_wait_ends(make: Callable[..., Leases]) -> None:
    leases = make(snapshot(device()))
    leases.acquire(DeviceRequest(), ANN)
    told: list[str] = []
    with pytest.raises(BusyError) as error:
        leases.acquire(DeviceRequest(), BOB, wait_s=0.2, on_wait=told.append)
    assert error.value.exit_code == 75
    assert told == ["0 of 1 devices that can serve it are free, wanted 1"]
    assert leases.queue() == []


RACER = """
import fcntl, os, random, signal, sys, time
from pathlib import Path
from gpukiln.errors import BusyError
from gpukiln.gpus.leases import LeaseHolder, Leases
from gpukiln.gpus.config import Config
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support.gpus import snapshot
folder, number, requests, kill = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "kill"
chance = random.Random(number)
seen = snapshot()
leases = Leases(LeaseStore(folder), take_snapshot=lambda: seen, config=Config(Path("x")))
for turn in range(requests):
    who = LeaseHolder(f"u{number}", number)
    granted = leases.acquire(DeviceRequest(count=chance.randint(1, 4)), who, wait_s=120)
    held = []
    for uuid in granted.uuids:  # whoever else has it holds this lock, which gpukiln knows nothing of
        file = os.open(folder.parent / uuid, os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(file)
    if kill and turn == requests // 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(chance.random() * 0.004)
    for file in held:
        os.close(file)
    for file in granted.descriptors:
        os.close(file)
    leases.release(granted.lease, who)
"""


def test_no_gpu_is_granted_twice_and_none_is_lost_whoever_is_killed(
    make: Callable[..., Leases], folder: Path
) -> None:
    make()  # the folder
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    many, killed = 8, 2
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(folder), str(n), "8", "kill" if n < killed else "live"],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(many)
    ]
    ended = [(process.communicate(timeout=240)[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [-signal.SIGKILL] * killed + [0] * (many - killed), ended
    leases = make()
    assert len(leases.acquire(DeviceRequest(count=8), ANN).uuids) == 8
    assert leases.queue() == []


OPENERS = """
import os, random, signal, sys, time
from pathlib import Path
from gpukiln.gpus.store import LeaseStore
folder, chance = Path(sys.argv[1]), random.Random(1)
for turn in range(80):
    began, pids = time.monotonic() + 0.003, []
    for number in range(4):
        pids.append(os.fork())
        if not pids[-1]:
            while time.monotonic() < began:
                pass
            code = 1
            try:
                LeaseStore(folder / str(turn)).leases()
                code = 0
            finally:
                os._exit(code)
    if turn % 2:
        time.sleep(0.003 + 0.008 * chance.random())
        killed = pids.pop()
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids), turn
"""


def test_processes_that_open_a_new_state_at_the_same_time_are_not_refused(tmp_path: Path) -> None:
    """As the processes of the service do at a machine's first call; without the lock 1 of 60 was refused."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OPENERS, str(tmp_path)]
    done = subprocess.run(command, env=env, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_that_never_ends_opening_the_state_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.1)
    folder.mkdir(mode=0o700)
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(BusyError, match=r"other processes locked .*leases\.db"):
        LeaseStore(folder)
    os.close(other)
    LeaseStore(folder).close()


@pytest.mark.parametrize("moment", ["add", "lifeline", "commit"])
def test_a_process_that_is_killed_in_the_middle_of_a_grant_has_changed_nothing(
    make: Callable[..., Leases], folder: Path, moment: str
) -> None:
    make()
    code = f"""
import os, signal
from pathlib import Path
from gpukiln.gpus import leases as module
from gpukiln.gpus.leases import LeaseHolder, Leases
from gpukiln.gpus.config import Config
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support.gpus import snapshot
store = LeaseStore(Path({str(folder)!r}))
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} == "add":
    real = store.add
    store.add = lambda lease: (real(lease), die())
elif {moment!r} == "lifeline":
    store.write = die
else:
    real_guard = store.open_locked
    module.LeaseGrant = die  # all is done but the end of the transaction
leases = Leases(store, take_snapshot=snapshot, config=Config(Path("x")))
leases.acquire(DeviceRequest(count=8), LeaseHolder("ann", 1001))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    leases = make()
    assert leases.current() == []
    assert list((folder / "alive").iterdir()) == []
    assert len(leases.acquire(DeviceRequest(count=8), BOB).uuids) == 8


def test_a_newer_database_is_left_alone(make: Callable[..., Leases], folder: Path) -> None:
    make()
    with sqlite3.connect(folder / "leases.db") as db:
        db.execute("pragma user_version = 99")
    with pytest.raises(UnavailableError, match="has version 99, this gpukiln knows 1"):
        LeaseStore(folder)


@pytest.mark.parametrize("damage", ["garbage", "half"])
def test_a_broken_database_is_made_anew_from_what_holds_the_locks(
    make: Callable[..., Leases], folder: Path, damage: str
) -> None:
    leases = make()
    granted = leases.acquire(DeviceRequest(count=3), ANN)
    detached = leases.acquire(DeviceRequest(count=2), BOB, kind=DETACHED, hours=5)
    leases.store.close()
    file = folder / "leases.db"
    for end in ("-wal", "-shm"):
        Path(f"{file}{end}").unlink(missing_ok=True)
    file.write_bytes(b"nothing" * 999 if damage == "garbage" else file.read_bytes()[:5000])
    with pytest.raises(UnavailableError, match=r"leases.db can't be read") as error:
        make().current()
    assert "--rebuild" in error.value.hint
    again, moved, found = rebuild_leases()
    assert all(Path(one).exists() for one in moved)
    assert str(file) + ".broken" in moved[0]
    assert found == [granted.lease.id, detached.lease.id]
    held = {one.id: set(one.uuids) for one in again.current()}
    assert held == {granted.lease.id: set(granted.uuids), detached.lease.id: set(detached.uuids)}
    other = make()
    assert len(other.acquire(DeviceRequest(count=3), BOB).uuids) == 3
    again.store.close()


def test_a_lost_database_gives_no_gpu_away_that_a_job_has(make: Callable[..., Leases], folder: Path) -> None:
    leases = make()
    granted = leases.acquire(DeviceRequest(count=3), ANN)
    leases.store.close()
    for one in folder.glob("leases.db*"):
        one.unlink()
    for one in (folder / "alive").iterdir():
        one.unlink()
    other = make().acquire(DeviceRequest(count=5), BOB)
    assert not set(other.uuids) & set(granted.uuids)
    with pytest.raises(BusyError):
        make().acquire(DeviceRequest(), BOB)


def test_a_full_disk_changes_nothing(make: Callable[..., Leases], folder: Path) -> None:
    leases = make()
    before = leases.acquire(DeviceRequest(), ANN)
    pages = leases.store.db.execute("pragma page_count").fetchone()[0]
    leases.store.db.execute(
        f"pragma max_page_count = {pages}"
    )  # SQLite says then what it says of a full disk

    def fill() -> None:
        for _ in range(7):
            leases.acquire(DeviceRequest(), BOB, command="x" * 4000)

    with pytest.raises(UnavailableError, match="is full: nothing was changed"):
        fill()
    held = make().current()
    assert held[0].id == before.lease.id
    assert {path.name for path in (folder / "alive").iterdir()} == {one.id for one in held}


def test_who_is_not_in_the_group_is_told_so(make: Callable[..., Leases], folder: Path) -> None:
    make()
    folder.chmod(0o2770)
    code = """
import sys
from pathlib import Path
from gpukiln.errors import RefusedError
from gpukiln.gpus.store import LeaseStore
try:
    LeaseStore(Path(sys.argv[1]))
except RefusedError as error:
    print(error, "|", error.hint)
"""
    for one in folder.parents:
        if one.is_relative_to(Path(tempfile.gettempdir(), "pytest-of-root")):
            one.chmod(0o755)
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=env,
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "only root and the group root have permission to lease this machine's GPUs | run `usermod -aG "
        in done.stdout
    ), done


def test_a_use_is_accounted_by_its_share_of_the_machine(make: Callable[..., Leases]) -> None:
    config = Config(Path("gpus.toml"), price=MachinePrice(16.0, "contract"))
    leases = make(config=config)
    granted = leases.acquire(DeviceRequest(count=2), ANN, kind=DETACHED, hours=1)
    with leases.store.change():
        leases.store.update(granted.lease.number, granted_boot=granted.lease.granted_boot - 1800)
    leases.release(leases.current()[0], ANN)
    uses = leases.store.ledger()
    assert [round(use["usd"], 2) for use in uses] == [1.0, 1.0]  # half an hour of an eighth of 16 USD
    assert {use["price"] for use in uses} == {"contract"}


def test_locks_are_not_inherited_by_what_was_not_given_them(make: Callable[..., Leases]) -> None:
    granted = make().acquire(DeviceRequest(), ANN)
    for number in granted.descriptors:
        assert fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_the_text_of_a_lifeline_is_the_lease(make: Callable[..., Leases], folder: Path) -> None:
    granted = make().acquire(DeviceRequest(count=2), ANN, kind=JOB, command="train")
    text = (folder / "alive" / granted.lease.id).read_text()
    assert json.loads(text)["command"] == "train"
    assert store_module.read_lifeline(text) == granted.lease


def test_random_requests_never_get_what_another_has(make: Callable[..., Leases]) -> None:
    chance = random.Random(7)  # noqa: S311 - the same each time
    leases = make()
    held: list[LeaseGrant] = []
    for _ in range(120):
        if held and chance.random() < 0.5:
            one = held.pop(chance.randrange(len(held)))
            let_go(one)
            assert leases.release(one.lease, ANN)
        else:
            try:
                held.append(leases.acquire(DeviceRequest(count=chance.randint(1, 4)), ANN))
            except BusyError:
                assert sum(len(one.uuids) for one in held) > 4
        taken = [uuid for one in held for uuid in one.uuids]
        assert len(taken) == len(set(taken))
