"""What a double of NVML tells: rows of `key value` at the end of a file, the library's own as a rule.

A program that has the library has its state with it, in a container too; and it can change while programs
hold handles. The region (nvml/state.c reads and writes it as well): a page with the magic, the number of
changes and the lengths of two slots; the slot that the number's lowest bit names is what holds, the next
change goes to the other.
"""

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.chroot import in_root
from gpukiln.errors import UnavailableError

MAGIC = b"gpukiln simulated GPUs 1".ljust(32, b"\0")
PAGE, SLOT = 4096, 512 * 1024
REGION = PAGE + 2 * SLOT  # bytes
HEADER = struct.Struct("<32sQQQ")
LAST_EVENTS = 64
LOCK_S = 10
Rows = dict[str, str]


def append_region(path: Path) -> None:
    """Give a file a state, an empty one, at its end; most of it is a hole."""
    with path.open("ab") as file:
        file.write(HEADER.pack(MAGIC, 0, 0, 0))
        file.truncate(file.tell() - HEADER.size + REGION)


def rows_of(document: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Keys and values of a document, lists by position and with their length, nothing for null."""
    dot = f"{key}." if key else ""
    if isinstance(document, Mapping):
        for name, inner in document.items():
            yield from rows_of(inner, f"{dot}{name}")
    elif isinstance(document, list):
        yield f"{dot}count", str(len(document))
        for position, inner in enumerate(document):
            yield from rows_of(inner, f"{dot}{position}")
    elif document is not None:
        yield key, str(int(document)) if isinstance(document, bool) else str(document).replace("\n", " ")


def encoded(rows: Rows) -> bytes:
    """The rows as a file has them.

    Raises:
        UnavailableError: They are more than fits.
    """
    text = "".join(f"{key} {value}\n" for key, value in rows.items()).encode()
    if len(text) > SLOT:
        raise UnavailableError(
            f"{len(text)} bytes describe these GPUs, and {SLOT} are the most that fit",
            hint="fewer GPUs, processes or NVLinks",
        )
    return text


class State:
    """The state of one machine's GPUs. Who is root on the machine may have put anything in its place.

    Args:
        path: The file; it has a region.
        root: Where the path begins: /proc/PID/root of a running container.
    """

    def __init__(self, path: Path, root: Path = Path("/")) -> None:
        self.path, self._root = path, root

    def rows(self) -> Rows:
        """What holds now."""
        with self._opened(os.O_RDONLY) as (file, start):
            return self._read(file, start)

    def write(self, rows: Rows) -> None:
        """Replace all of it."""

        def replace(now: Rows) -> None:
            now.clear()
            now.update(rows)

        self.change(replace)

    def change(self, edit: Callable[[Rows], None]) -> Rows:
        """Change it in one step.

        Args:
            edit: Changes the rows that it is given. When it raises, nothing is changed.

        Returns:
            What holds then.
        """
        with self._opened(os.O_RDWR) as (file, start):
            self._lock(file)
            rows = self._read(file, start)
            edit(rows)
            text = encoded(rows)
            _magic, changes, *_lengths = HEADER.unpack(os.pread(file, HEADER.size, start))
            slot = (changes + 1) & 1
            os.pwrite(file, text, start + PAGE + slot * SLOT)
            os.pwrite(file, struct.pack("<Q", len(text)), start + 40 + 8 * slot)
            os.pwrite(file, struct.pack("<Q", changes + 1), start + 32)  # from here on it holds
            return rows

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[tuple[int, int]]:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = in_root(self._root, lambda: os.open(self.path, flags))
        except OSError as error:
            raise self._damaged(str(error.strerror)) from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise self._damaged("it is no regular file")
            start = os.fstat(file).st_size - REGION
            if start < 0 or os.pread(file, len(MAGIC), start) != MAGIC:
                raise self._damaged("it has no state of simulated GPUs")
            yield file, start
        except UnicodeDecodeError as error:
            raise self._damaged(str(error)) from error
        finally:
            os.close(file)

    def _lock(self, file: int) -> None:
        """Not by filelock: nvml/state.c locks the same file, and it empties none."""
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"{self.path} is locked for more than {LOCK_S} s by a program of the machine",
                        hint="`lslocks` in the machine names it",
                    ) from None
                time.sleep(0.01)

    def _damaged(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{self.path} can't be read: {why}",
            hint="make it anew: invoke cloud.gpus MACHINE --off, then --on",
        )

    def _read(self, file: int, start: int) -> Rows:
        while True:
            _magic, changes, *lengths = HEADER.unpack(os.pread(file, HEADER.size, start))
            slot = changes & 1
            if lengths[slot] > SLOT:
                raise self._damaged(f"it has {lengths[slot]} bytes of text, at most {SLOT} fit")
            text = os.pread(file, lengths[slot], start + PAGE + slot * SLOT)
            if HEADER.unpack(os.pread(file, HEADER.size, start))[1] == changes:
                return dict(line.split(" ", 1) for line in text.decode().split("\n") if " " in line)


def add_event(rows: Rows, *, gpu: int, kind: int, data: int = 0) -> None:
    """Tell whoever waits for events of a GPU.

    Args:
        kind: NVML's nvmlEventType..., for example 8 for an Xid.
        data: The Xid.
    """
    count = int(rows.get("events.count", 0))
    events = [
        {name: rows[f"events.{n}.{name}"] for name in ("sequence", "gpu", "type", "data")}
        for n in range(count)
    ]
    last = max((int(event["sequence"]) for event in events), default=0)
    events.append({"sequence": str(last + 1), "gpu": str(gpu), "type": str(kind), "data": str(data)})
    remove(rows, "events")
    rows.update(rows_of({"events": events[-LAST_EVENTS:]}))


def remove(rows: Rows, key: str) -> None:
    """Forget a key and all that is below it."""
    for name in [name for name in rows if name == key or name.startswith(f"{key}.")]:
        del rows[name]


def count_energy(rows: Rows, gpu: int, *, now: float | None = None) -> None:
    """Add what a GPU has used up to now, so that the counter never falls when its power changes."""
    at, key = time.time() if now is None else now, f"gpus.{gpu}.energy"
    if f"{key}.since" in rows:
        passed = max(0.0, at - float(rows[f"{key}.since"]))
        counted = float(rows[f"{key}.counted"]) + passed * float(rows[f"{key}.watts"]) * 1000
        rows.update({f"{key}.counted": f"{counted:.0f}", f"{key}.since": f"{at:.3f}"})
        if watts := rows.get(f"gpus.{gpu}.power.draw"):
            rows[f"{key}.watts"] = watts


def gpu_count(rows: Rows) -> int:
    """How many GPUs the machine has."""
    return int(rows.get("gpus.count", 0))
