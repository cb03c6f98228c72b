"""What a run of the tests costs in seconds of a processor: by test, by tier, and by kind of process.

Wall time depends on who else works on the computer, and processor time too: where others use its memory and
caches, the same tests took 2.6 times as long. `python_start` measures that meanwhile, and the budget in
`[tool.gpukiln.tests]` of pyproject.toml is for a quiet computer. Each process of pytest joins a control group
of its own, so what it starts is counted too: daemons, what lost its parent, and machines, whose groups are
made below its own (gpukiln/clouds/embedded/cgroups.py). The kinds come from the kernel's process accounting,
which notes each process that ends (acct(5)).
"""

import contextlib
import ctypes
import os
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ACCOUNTED = "GPUKILN_TESTS_ACCOUNTED"  # a run below this one must not end its accounting
OTHERS_ACCOUNT = (Path("/var/log/account/pacct"), Path("/var/account/pacct"))  # Debian's acct, RHEL's psacct
# linux/acct.h, acct_v3: flag, version, ..., pid, ppid, ..., user and system time (comp_t), ..., command
RECORD = struct.Struct("=BBHIIIIIIfHHHHHHHH16s")
_open, _read, _close = os.open, os.read, os.close
TICKS = 100  # AHZ: of a second, whatever the kernel's HZ is
KINDS = {
    "QEMU": r"qemu-.*",
    "Ansible": r"ansible.*",
    "Python": r"python.*|pytest.*|\[pytest.*|execnet.*",
    "compilers": r"cc1.*|as|ld|ld\..*|collect2|gcc.*|g\+\+.*|x86_64-linux-gn.*|nvcc.*|cicc|ptxas",
    "packages": r"dpkg.*|apt.*|mmdebstrap|perl|rpm|dnf.*|debconf.*|update-.*|ldconfig.*|depmod|.*initramfs.*",
    "compression": r"xz|gzip|zstd|unzstd|tar|mksquashfs|unsquashfs|mkfs\..*|e2fsck|qemu-img|sha256sum",
}


def group(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The control group of this process that counts its time; None where there is none."""
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        if "cpuacct" in names.split(","):
            return root / names / path.lstrip("/")
        if not names and (root / "cgroup.controllers").exists():
            return root / path.lstrip("/")
    return None


def join(name: str) -> Path | None:
    """Make a control group below this process's and move it there; None where that is not allowed."""
    with contextlib.suppress(OSError):
        if (parent := group()) is not None:
            made = parent / name
            made.mkdir(exist_ok=True)
            (made / "cgroup.procs").write_text("0")
            return made
    return None


def leave(made: Path) -> None:
    """Move this process out of a group, and remove what is empty of it."""
    with contextlib.suppress(OSError):
        (made.parent / "cgroup.procs").write_text("0")
    for folder, _, _ in os.walk(made, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def used(made: Path | None) -> float:
    """Seconds of a processor that a group has used; without one this process's and its ended children's.

    It is asked in the middle of tests, which may have replaced `Path.read_text` or `open`.
    """
    for name in ("cpuacct.usage", "cpu.stat") if made is not None else ():
        with contextlib.suppress(OSError):
            file = _open(f"{made}/{name}", os.O_RDONLY)
            text = _read(file, 4096)
            _close(file)
            if name == "cpuacct.usage":
                return int(text) / 1e9
            [usage] = re.findall(rb"^usage_usec (\d+)$", text, re.M)
            return int(usage) / 1e6
    return sum(os.times()[:4])


def python_start() -> float:
    """Seconds of a processor that a start of Python takes now: work that is always the same.

    What the suite does takes longer by as much as this. In eleven periods of two minutes, in which tests took
    1.3 to 2.6 times as long as in another run, the two were correlated with 0.93 (zlib 0.78, `compile` 0.61).
    """
    child = os.posix_spawn(sys.executable, (sys.executable, "-I", "-S", "-c", "pass"), {})
    _, _, usage = os.wait4(child, 0)
    return usage.ru_utime + usage.ru_stime


def members(made: Path | None) -> set[int]:
    """Numbers of the processes in a group and those below it."""
    found: set[int] = set()
    for folder, _, _ in os.walk(made) if made is not None else ():
        with contextlib.suppress(OSError):
            found |= {int(number) for number in (Path(folder) / "cgroup.procs").read_text().split()}
    return found


def account(file: Path | None) -> bool:
    """Have the kernel note each process that ends in a file, None: nowhere; whether it does."""
    return ctypes.CDLL(None, use_errno=True).acct(None if file is None else os.fsencode(file)) == 0


def may_account(folder: Path) -> bool:
    """Whether this run may use the one accounting there is: as root, in no other run, unused by others.

    Args:
        folder: Where runs have their files, `gpukiln-tests-PID-*.acct`.
    """
    runs = [file.name.split("-")[2] for file in folder.glob("gpukiln-tests-*-*.acct")]
    others = any(Path(f"/proc/{number}").exists() for number in runs)
    unused = not others and not any(file.exists() for file in OTHERS_ACCOUNT)
    return os.geteuid() == 0 and ACCOUNTED not in os.environ and unused


def seconds(compressed: int) -> float:
    """A comp_t of acct(5): three bits of an exponent of 8, thirteen of a fraction, in ticks.

    >>> seconds(0b001_0000000001010)
    0.8
    """
    return float((compressed & 0x1FFF) << (3 * (compressed >> 13))) / TICKS


def records(data: bytes) -> Iterator[tuple[int, int, float, str]]:
    """Number, parent, seconds of a processor and command of each process that ended."""
    for values in RECORD.iter_unpack(data[: len(data) - len(data) % RECORD.size]):
        if values[1] & 0x0F == 3:  # the lower bits are the version
            command = values[18].split(b"\0", 1)[0].decode(errors="replace")
            yield values[6], values[7], seconds(values[10]) + seconds(values[11]), command


def kinds(data: bytes, roots: Iterable[int]) -> dict[str, float]:
    """Seconds of a processor by kind of process, the most expensive first.

    Args:
        data: What the kernel noted.
        roots: Processes of the run; what they started is of the run too.
    """
    ended = list(records(data))
    ours = set(roots)
    for number, parent, _, _ in reversed(ended):  # a parent mostly ends after its children
        if parent in ours:
            ours.add(number)
    total: defaultdict[str, float] = defaultdict(float)
    for number, _, time, command in ended:
        if number in ours:
            kind = next((kind for kind, text in KINDS.items() if re.fullmatch(text, command)), "other")
            total[kind] += time
    return dict(sorted(total.items(), key=lambda item: -item[1]))
