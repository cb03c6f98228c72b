"""How quickly GPUs are looked at and leased, and that none is ever leased twice.

    scripts/run python -m bench.leases            # the race for leases, in the ledger and by the root service
                                                  # (as root), and one look beside gpustat and nvisel
    scripts/run python -m bench.leases --hosts 50 # and one look at so many hosts that take two seconds each

See bench/README.md, "Looking and leasing".
"""

import argparse
import contextlib
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpukiln.gpus import zipapp
from gpukiln.gpus.client import MemberLeases
from gpukiln.gpus.leases import LeaseHolder
from gpukiln.gpus.selection import DeviceRequest
from tests.support import nvml_double
from tests.support.gpus import double, snapshot

PROCESSES, REQUESTS, GPUS = 32, 20, 8
GRANT_BAR_MS, LOOK_BAR_S, HOSTS_BAR = 5.0, 0.35, 2.5
TYPE = "p4d.24xlarge"
ROOT = Path(__file__).parents[1]
RACER = """
import fcntl, os, random, signal, sys, time
from pathlib import Path
from gpukiln.errors import BusyError
from gpukiln.gpus.client import MemberLeases
from gpukiln.gpus.config import Config
from gpukiln.gpus.leases import LeaseHolder, Leases
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support.gpus import snapshot
folder, number, requests, kill = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
chance, seen = random.Random(number), snapshot()
if sys.argv[5]:
    os.umask(0)
    os.setgid(61000 + number)
    os.setuid(61000 + number)
    leases = MemberLeases(Path(sys.argv[5]))
else:
    leases = Leases(LeaseStore(folder), take_snapshot=lambda: seen, config=Config(Path("none")))
who = LeaseHolder(f"u{number}", number)
for turn in range(requests):
    request = DeviceRequest(count=chance.randint(1, 4))
    while True:
        began = time.perf_counter()
        try:
            granted = leases.acquire(request, who)
            break
        except BusyError:
            time.sleep(0.01 + chance.random() * 0.05)
    print((time.perf_counter() - began) * 1000, flush=True)
    held = []
    for uuid in granted.uuids:  # a second lock, which gpukiln knows nothing of: fails where two have it
        file = os.open(folder.parent / uuid, os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(file)
    if turn == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(chance.random() * 0.02)
    for file in (*held, *granted.descriptors):
        os.close(file)
    leases.release(granted.lease, who)
"""
CHECK = """
import sys
from pathlib import Path
from gpukiln.gpus.config import Config
from gpukiln.gpus.leases import LeaseHolder, Leases
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore
from tests.support.gpus import snapshot
leases = Leases(LeaseStore(Path(sys.argv[1])), take_snapshot=snapshot, config=Config(Path("none")))
print(len(leases.acquire(DeviceRequest(count=8), LeaseHolder("last", 1)).uuids))
"""


SERVICE = """
import pickle, sys
from pathlib import Path
from gpukiln.gpus import service
from gpukiln.gpus.config import Config
from gpukiln.gpus.leases import Leases
from gpukiln.gpus.store import LeaseStore
seen, config = pickle.load(sys.stdin.buffer), Config(Path("none"))
folder = Path(sys.argv[1])
with service.listening(Path(sys.argv[2])) as listener:
    Path(sys.argv[2]).chmod(0o666)
    service.serve(
        listener,
        store=lambda: LeaseStore(folder),
        make=lambda store: Leases(store or LeaseStore(folder), take_snapshot=lambda: seen, config=config),
    )
"""


@contextlib.contextmanager
def serving(state: Path, socket: Path) -> Iterator[None]:
    """The root service, as members reach it; it looks at no GPU, as the race in the ledger does not."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SERVICE, str(state), str(socket)]
    with tempfile.TemporaryFile() as seen:
        pickle.dump(snapshot(), seen)
        seen.seek(0)
        job = subprocess.Popen(command, env=env, stdin=seen)
    try:
        while not socket.exists() or not socket.stat().st_mode & 0o006:
            if job.poll() is not None:
                raise SystemExit(f"the service ended with {job.returncode}")
            time.sleep(0.02)
        yield
    finally:
        job.terminate()
        job.wait()


def alone(socket: Path, times: int = 300) -> list[float]:
    """Milliseconds of each grant to one member who asks while nobody else does."""
    leases, who, taken = MemberLeases(socket), LeaseHolder("root", 0), []
    for _ in range(times):
        began = time.perf_counter()
        granted = leases.acquire(DeviceRequest(), who)
        taken.append((time.perf_counter() - began) * 1000)
        for number in granted.descriptors:
            os.close(number)
        leases.release(granted.lease, who)
    return taken


def race(folder: Path, socket: Path | None = None) -> tuple[list[float], int]:
    """Milliseconds of each grant, and how many GPUs one request gets when all is over.

    Args:
        folder: Of the race; it is made.
        socket: Of the service that everybody asks; None: each has the ledger at hand.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    state = folder / "state"
    # A quarter of them is killed while it holds GPUs, each at another of its turns.
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", RACER, str(state), str(n), str(REQUESTS)),
                *(str(n if n % 4 == 0 else -1), str(socket or "")),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(PROCESSES)
    ]
    taken: list[float] = []
    for n, process in enumerate(started):
        out, err = process.communicate()
        wanted = -9 if n % 4 == 0 and n < REQUESTS else 0
        if process.returncode != wanted:
            raise SystemExit(f"process {n} ended with {process.returncode}, wanted {wanted}:\n{err}")
        taken += map(float, out.split())
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(state)], env=env, capture_output=True, text=True, check=True
    )
    return taken, int(done.stdout)


def clocked(command: list[str], env: dict[str, str], times: int = 7) -> float:
    """Seconds of a command, the median."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        taken.append(time.perf_counter() - began)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr}")
    return statistics.median(taken)


def slow_ssh(folder: Path, seconds: float, answer: bytes) -> None:
    """A program `ssh` that brings an answer after so many seconds; encrypting costs it nothing."""
    (folder / "said.json").write_bytes(answer)
    program = folder / "bin/ssh"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nsleep {seconds}\nexec cat {folder}/said.json\n")
    program.chmod(0o755)


def row(name: str, value: float, unit: str, bar: float, more: str = "") -> None:
    """Print one figure with its bar."""
    told = "reached" if value <= bar else "not reached"
    print(f"{name:42} {value:8.2f} {unit:3} bar {bar:g} {unit}: {told}{more}", flush=True)


def grants(how: str, taken: list[float], free: int = GPUS, *, barred: bool = True) -> None:
    """Print how long grants took.

    Args:
        barred: Whether there is a bar: more calls than the processors can answer wait for each other.
    """
    cut = statistics.quantiles(taken, n=100)
    more = f"  p95 {cut[94]:.1f}, p99 {cut[98]:.1f}, worst {max(taken):.1f}; {len(taken)} grants"
    if barred:
        row(f"grant {how}, p50", cut[49], "ms", GRANT_BAR_MS, more)
    else:
        print(f"{f'grant {how}, p50':42} {cut[49]:8.2f} ms {more}", flush=True)
    if free != GPUS:
        raise SystemExit(f"{GPUS - free} GPUs are lost")


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=0, help="how many hosts are asked at once")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        raced = folder / "ledger"
        raced.mkdir()
        grants("in the ledger", *race(raced))
        if os.geteuid() == 0:
            folder.chmod(0o755)
            raced = folder / "service"
            raced.mkdir()
            raced.chmod(0o777)  # each process locks files of the GPUs that it got there
            with serving(raced / "state", raced / "gpus.sock"):
                grants("by the service, nobody else", alone(raced / "gpus.sock"))
                grants("by the service, all at once", *race(raced, raced / "gpus.sock"), barred=False)
        else:
            print("by the service: not measured, only root can be several members")
        node = double(nvml_double.build(folder, branch=535), folder, TYPE)
        program = folder / "gpukiln-gpu"
        zipapp.build(program)
        beside = {name: str(Path(sys.executable).parent / name) for name in ("gpustat", "nvisel")}
        look = clocked([str(program), "list"], node.environment)
        others = ", ".join(f"{name} {clocked([path], node.environment):.2f}" for name, path in beside.items())
        row(f"gpukiln-gpu list, {GPUS} GPUs", look, "s", LOOK_BAR_S, f"  ({others})")
        if asked.hosts:
            out = subprocess.run(
                [str(program), "list", "--json"], env=node.environment, capture_output=True, check=True
            ).stdout
            slow_ssh(folder, 2.0, out)
            env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
            command = [str(Path(sys.executable).parent / "invoke"), "gpu.list", "--json", "--hosts"]
            one = clocked([*command, "ssh://node-0"], env, 3)
            every = clocked([*command, ",".join(f"ssh://node-{n}" for n in range(asked.hosts))], env, 3)
            ratio = every / one
            row(
                f"{asked.hosts} hosts, of the slowest",
                ratio,
                "x",
                HOSTS_BAR,
                f"  ({one:.1f} s one, {every:.1f} s all)",
            )
    return 0


if __name__ == "__main__":
    sys.exit(main() or os.EX_OK)
