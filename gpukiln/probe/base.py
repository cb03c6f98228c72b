"""Runs commands and reads files of this machine, and does not wait for a command that gives no answer.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH116, PTH119, PTH123, PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpukiln.redact import redact

PCI = "/sys/bus/pci/devices"
DRIVER_GPUS = "/proc/driver/nvidia/gpus"
DEVICES = "/dev"
MOUNTS = "/proc/self/mounts"
# sudo and ssh may give a PATH without the sbin folders, where modprobe and ldconfig are.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOT_REACHED = "_not_reached"  # the key in place of a value that is unknown: a tool hangs, or the time was up
ERROR = "_error"  # the key in place of a value that could not be gathered
TIMED_OUT = 124  # as timeout(1)
HUNG_S = 10  # with less time than this, no answer does not mean that the tool hangs
SECTION_S = 120  # how long a section may be silent outside of its commands
END_S = 2.0  # for a killed process to end
STATES = {
    "D": "waits in the kernel",
    "S": "sleeps",
    "R": "runs",
    "T": "stopped",
    "Z": "ended",
}
KERNEL_PROBLEM = re.compile(
    r"NVRM|Xid|nvidia-nvswitch|blocked for more than|nouveau .*(?:fail|error|timeout)"
)
EVIDENCE_CHARS = 4000  # of each output, from its beginning
REDACT_CHARS = 30000  # text is redacted up to here and then cut: half of a secret would not be recognised


evidence: list[dict[str, Any]] = []  # commands and files since the section began


class NotReachedError(RuntimeError):
    """The value is unknown: a tool hangs, or the time was up."""


class HungError(NotReachedError):
    """A tool gave no answer."""


class NotReportedError(RuntimeError):
    """No GPU reports the value: the GPUs do not have it, or are virtual."""


def require_reached(value: Any) -> Any:
    """A value of the facts.

    Raises:
        NotReachedError: It is unknown: its tool hangs, or the time was up.
    """
    if isinstance(value, dict) and NOT_REACHED in value:
        raise NotReachedError(value[NOT_REACHED])
    return value


def read_section(data: Mapping[str, Any], name: str) -> Any:
    """A section of the facts.

    Raises:
        NotReachedError: It is unknown.
        AssertionError: It could not be gathered.
    """
    value = require_reached(data[name])
    if isinstance(value, dict) and ERROR in value:
        raise AssertionError(f"the facts about {name} could not be gathered: {value[ERROR]}")
    return value


def tail(text: str, limit: int) -> str:
    """The last characters of an output, where the reason of a failure is; `...` marks the cut.

    >>> tail("a long output", 6)
    '...output'
    >>> tail("short", 6)
    'short'
    """
    return text if len(text) <= limit else f"...{text[-limit:]}"


def _shorten(text: str) -> str:
    more = len(text) - EVIDENCE_CHARS
    return redact(text[:REDACT_CHARS])[:EVIDENCE_CHARS] + (
        f"\n... and {more} more characters" if more > 0 else ""
    )


def run(*argv: str, timeout: float = 60, data: bytes | None = None, waits: bool = False) -> dict[str, Any]:
    """Run a command and keep its output as evidence; see `run_unrecorded`."""
    row: dict[str, Any] = {"command": " ".join(argv), "rc": TIMED_OUT, "out": "", "err": ""}
    evidence.append(row)
    try:
        said = run_unrecorded(*argv, timeout=timeout, data=data, waits=waits)
    except NotReachedError as error:
        row["err"] = str(error)
        raise
    row.update(rc=said["rc"], out=_shorten(said["out"]), err=redact(said["err"]))
    return said


def run_unrecorded(
    *argv: str, timeout: float = 60, data: bytes | None = None, waits: bool = False
) -> dict[str, Any]:
    """Run a command; rc 127 when it is missing.

    A command without an answer within `timeout` seconds is killed with all its processes, and its tool is not
    run again: every further run would take as long. With `waits` the command itself waits for an event: rc
    124 where that did not come in time.

    Raises:
        HungError: The tool gave no answer.
        NotReachedError: The time for gathering facts was up.
    """
    # Messages are parsed and shown, and must not depend on the machine's language.
    env = dict(os.environ, LC_ALL="C", PATH=PATH)
    tool = _tool(argv)
    # By its real path: modprobe and lsmod are one program, and hang together.
    if tool in watch.hung:
        said = watch.hung[tool]
        raise HungError(f"{said['tool']} hangs ({said['command']}), and was not run again")
    limit = watch.limit(timeout)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if data else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            # A process group of its own, so that all its processes can be killed at once.
            start_new_session=True,
        )
    except FileNotFoundError:
        return {"rc": 127, "out": "", "err": f"{argv[0]}: not found"}
    # The parent waits longer than this process does for its command, and kills the group itself otherwise.
    watch.alive(limit + 2 * END_S + 1, group=process.pid)
    try:
        out, said_err = process.communicate(data, timeout=limit)
    except subprocess.TimeoutExpired:
        # Before the kill: afterwards the state does not show what it waited for.
        state = process_state(process.pid)
        out, ended = _kill_group(process)
        how = "and was killed" if ended else "and can't be killed"
        problem = f"no answer in {limit:.0f} s; {state}, {how}"
        if waits:
            return {"rc": TIMED_OUT, "out": _text(out), "err": f"{argv[0]}: {problem}"}
        # The deadline cut the time short: that is no hang.
        if limit < min(timeout, HUNG_S):
            raise NotReachedError(watch.time_up()) from None
        name = os.path.basename(tool or argv[0])
        watch.hung[tool] = {"tool": name, "command": " ".join(argv)[:200], "reason": problem}
        watch.alive(SECTION_S, group=0, hung=watch.hung)
        raise HungError(f"{name} hangs: `{' '.join(argv)[:200]}`: {problem}") from None
    watch.alive(SECTION_S, group=0)
    err = tail(redact(_text(said_err).strip()[-REDACT_CHARS:]), 2000)
    return {"rc": process.returncode, "out": _text(out), "err": err}


def run_unless_hung(*argv: str, timeout: float = 60) -> dict[str, Any]:
    """As `run`; `{"_not_reached": why}` where the tool hangs."""
    try:
        return run(*argv, timeout=timeout)
    except NotReachedError as error:
        return {NOT_REACHED: str(error)}


class Watch:
    """The tools that hang, and the deadline for gathering all facts."""

    def __init__(self) -> None:
        self.hung: dict[str, dict[str, str]] = {}  # by a tool's real path
        self.seconds = 0.0
        self.until: float | None = None  # on the monotonic clock
        self.send: Callable[..., None] | None = None  # sends to the parent process, which watches this one

    def start(self, seconds: float | None) -> None:
        """Set the deadline, in seconds from now; None for none."""
        self.seconds = seconds or 0.0
        self.until = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.until is None else self.until - time.monotonic()

    def limit(self, seconds: float) -> float:
        """These seconds, or those until the deadline; NotReachedError after the deadline."""
        left = self.left()
        if left <= 0:
            raise NotReachedError(self.time_up())
        return min(seconds, left)

    def time_up(self) -> str:
        """The reason after the deadline."""
        return f"the {self.seconds:.0f} s that gathering facts may take were up"

    def alive(self, limit: float, **more: Any) -> None:
        """Report that this process works, and will be silent for at most `limit` seconds."""
        if self.send is not None:
            self.send(limit=limit, **more)


watch = Watch()


def _tool(argv: Sequence[str]) -> str:
    """The real path of what a command line starts: modprobe and lsmod are both kmod."""
    words = [word for word in argv if word != "env" and "=" not in word.partition("/")[0]] or list(argv)
    return os.path.realpath(shutil.which(words[0], path=PATH) or words[0])


def _kill_group(process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
    """Kill a command with all its processes: its output, and whether it ended.

    A process in uninterruptible sleep can't be killed: it is abandoned.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=END_S)[0], True
    except subprocess.TimeoutExpired as late:
        # Otherwise a process that can't be killed would keep the file descriptors of this one open.
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return late.output or b"", process.poll() is not None


def process_state(group: int) -> str:
    """The state of a process group for messages: of a process in uninterruptible sleep, if there is one."""
    processes = []
    for path in glob.glob("/proc/[0-9]*/stat"):
        text = read(path)  # None where the process ended meanwhile
        # The name is in brackets and may itself contain blanks and brackets (proc_pid_stat(5)).
        name, _, rest = (text or "").partition("(")[2].rpartition(")")
        fields = rest.split()
        if len(fields) > 3 and group in (int(fields[2]), int(path.split("/")[2])):
            processes.append((fields[0] == "D", int(path.split("/")[2]), name, fields[0]))
    if not processes:
        return "the process has ended, but another process keeps its output open"
    _deep, pid, name, state = max(processes)
    try:
        # The function of the kernel in which it waits; needs root (proc_pid_wchan(5)).
        where = (read(f"/proc/{pid}/wchan") or "").strip("0\n ")
    except OSError:
        where = ""
    means = STATES.get(state, "")
    return f"process {pid} ({name}) is in state {state}{f' ({means})' if means else ''}" + (
        f", in the kernel's {where}" if where else ""
    )


def require_driver_answers() -> None:
    """Raise HungError where the driver hangs: further calls of the driver would hang too."""
    for tool in watch.hung.values():
        if tool["tool"] in ("nvidia-smi", "NVML"):
            raise HungError(f"{tool['tool']} hangs, so that this was not tried")


def kernel_errors() -> list[str]:
    """The last lines of the kernel log about the driver or a hung task; empty where it can't be read.

    Read without journalctl, which may hang itself; each read of /dev/kmsg is one record
    (Linux, Documentation/ABI/testing/dev-kmsg).
    """
    lines = []
    try:
        device = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        while True:
            try:
                record = os.read(device, 8192)
            except BrokenPipeError:  # the record was overwritten before it was read: go on with the next
                continue
            lines.append(_text(record).partition(";")[2].splitlines()[0])
    except (OSError, IndexError):  # BlockingIOError: no more records
        pass
    finally:
        os.close(device)
    return [redact(line)[:300] for line in lines if KERNEL_PROBLEM.search(line)][-3:]


def check_output(*argv: str, timeout: float = 60) -> str:
    """The output of a command; RuntimeError where it fails."""
    done = run(*argv, timeout=timeout)
    if done["rc"] != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit {done['rc']}: {tail(done['err'] or done['out'], 500)}")
    return str(done["out"])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def read_evidence(path: str) -> str | None:
    """Text of a file, kept as evidence; see `read`."""
    text = read(path)
    evidence.append({"file": path, "out": "(missing)" if text is None else _shorten(text)})
    return text


def read(path: str) -> str | None:
    """Text of a file, or None where it is missing; also a file in /proc of a process that has ended."""
    try:
        with open(path, "rb") as file:
            return _text(file.read())
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return None


def mtime(path: str) -> float:
    """When a file was last written, seconds since the epoch."""
    return os.stat(path).st_mtime


def init_started() -> float:
    """When this system's init started; in a container the kernel's boot time would be the host's."""
    btime = re.search(r"(?m)^btime (\d+)$", read("/proc/stat") or "")
    # Field 22 is the start time in clock ticks after boot (proc_pid_stat(5)).
    fields = (read("/proc/1/stat") or "").rpartition(")")[2].split()
    if not btime or len(fields) < 20:
        raise RuntimeError("/proc/stat and /proc/1/stat do not have the start time of init")
    return int(btime.group(1)) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def bus_gpus() -> list[dict[str, str]]:
    """NVIDIA's GPUs on the PCI bus: [{address, device}].

    PCI class 0x03 is a display controller: 0x0300 VGA, 0x0302 3D.
    """
    return _pci_devices("0x10de", "0x03")


def amd_gpus() -> list[dict[str, str]]:
    """AMD's GPUs on the PCI bus, as `bus_gpus`; those of Instinct are processing accelerators, 0x1200."""
    return _pci_devices("0x1002", "0x03", "0x1200")


def _pci_devices(vendor: str, *classes: str) -> list[dict[str, str]]:
    gpus = []
    for path in sorted(glob.glob(f"{PCI}/*")):
        kind = read(f"{path}/class") or ""
        if (read(f"{path}/vendor") or "").strip() == vendor and kind.startswith(classes):
            device = (read(f"{path}/device") or "").strip()
            gpus.append({"address": os.path.basename(path), "device": device})
    return gpus


def in_container() -> bool:
    """Whether this system has only some of the kernel's device nodes.

    On a host /dev is the kernel's devtmpfs, which systemd requires (its README, "REQUIREMENTS"); container
    runtimes mount a tmpfs there. A container with the host's /dev counts as a host.
    """
    mounts = [line.split() for line in (read(MOUNTS) or "").splitlines()]
    return [fields[2] for fields in mounts if fields[1] == DEVICES][-1:] != ["devtmpfs"]


def accessible_gpus() -> list[dict[str, str]]:
    """The GPUs of the PCI bus whose device node this system can open; see `bus_gpus`.

    The bus shows a container every GPU of the host, and so does the driver below /proc, which CDI does not
    mask (NVIDIA/nvidia-container-toolkit, issue 1203). `Device Minor` N there is /dev/nvidiaN
    (NVIDIA/open-gpu-kernel-modules: kernel-open/nvidia/nv-procfs.c). access(2) also checks the cgroup's
    device rules (Linux, fs/namei.c, inode_permission), and opens nothing, so that no GPU wakes up.
    """
    gpus = []
    for gpu in bus_gpus():
        said = read(f"{DRIVER_GPUS}/{gpu['address']}/information") or ""
        minor = re.search(r"(?m)^Device Minor:\s*(\d+)", said)
        if minor and os.access(f"{DEVICES}/nvidia{minor[1]}", os.R_OK | os.W_OK):
            gpus.append(gpu)
    return gpus


def pci_gpus() -> list[dict[str, str]]:
    """The GPUs that this system has: all of the PCI bus, in a container those that it can open."""
    return accessible_gpus() if in_container() else bus_gpus()
