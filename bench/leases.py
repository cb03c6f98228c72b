"""How quickly GPUs are looked at and leased, and that none is ever leased twice.

    scripts/run python -m bench.leases            # the race for leases, one look beside gpustat and nvisel
    scripts/run python -m bench.leases --hosts 50 # and one look at so many hosts that take two seconds each

See bench/README.md, "Looking and leasing".
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpukiln.gpus import zipapp
from tests.support import nvml_double
from tests.support.gpus import double

PROCESSES, REQUESTS, GPUS = 32, 20, 8
GRANT_BAR_MS, LOOK_BAR_S, HOSTS_BAR = 5.0, 0.35, 2.5
TYPE = "p4d.24xlarge"
ROOT = Path(__file__).parents[1]
RACER = """
import fcntl, os, random, signal, sys, time
from pathlib import Path
from gpukiln.errors import BusyError
from gpukiln.gpus.config import Config
from gpukiln.gpus.leases import Leases, Who
from gpukiln.gpus.selection import Request
from gpukiln.gpus.store import Store
from tests.support.gpus import snapshot
folder, number, requests, kill = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
chance, seen = random.Random(number), snapshot()
leases = Leases(Store(folder), look=lambda: seen, config=Config(Path("none")))
who = Who(f"u{number}", number)
for turn in range(requests):
    request = Request(count=chance.randint(1, 4))
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
from gpukiln.gpus.leases import Leases, Who
from gpukiln.gpus.selection import Request
from gpukiln.gpus.store import Store
from tests.support.gpus import snapshot
leases = Leases(Store(Path(sys.argv[1])), look=snapshot, config=Config(Path("none")))
print(len(leases.acquire(Request(count=8), Who("last", 1)).uuids))
"""


def race(folder: Path) -> tuple[list[float], int]:
    """Milliseconds of each grant, and how many GPUs one request gets when all is over."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    state = folder / "race/state"
    state.parent.mkdir()
    # A quarter of them is killed while it holds GPUs, each at another of its turns.
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(state), str(n), str(REQUESTS), str(n if n % 4 == 0 else -1)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(PROCESSES)
    ]
    grants: list[float] = []
    for n, process in enumerate(started):
        out, err = process.communicate()
        wanted = -9 if n % 4 == 0 and n < REQUESTS else 0
        if process.returncode != wanted:
            raise SystemExit(f"process {n} ended with {process.returncode}, wanted {wanted}:\n{err}")
        grants += map(float, out.split())
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(state)], env=env, capture_output=True, text=True, check=True
    )
    return grants, int(done.stdout)


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


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=0, help="how many hosts are asked at once")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grants, free = race(folder)
        cut = statistics.quantiles(grants, n=100)
        more = (
            f"  p95 {cut[94]:.1f}, worst {max(grants):.1f}; {len(grants)} grants, {free} GPUs free at the end"
        )
        row(f"grant, {PROCESSES} processes, p50", cut[49], "ms", GRANT_BAR_MS, more)
        if free != GPUS:
            raise SystemExit(f"{GPUS - free} GPUs are lost")
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
