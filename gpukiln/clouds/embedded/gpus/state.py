"""The state of a double of NVML: rows of `key value` at the end of a file, mostly of the library itself.

A program with the library has the state too, also in a container, and the state can change while programs
hold handles. The region (also read and written by nvml/state.c): a page with a magic, the number of changes
and the lengths of two slots. The lowest bit of the number selects the valid slot; the next change writes the
other one.
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
    """Append an empty state to a file; most of it is a hole."""
    with path.open("ab") as file:
        start = file.seek(0, os.SEEK_END)
        file.write(HEADER.pack(MAGIC, 0, 0, 0))
        file.truncate(start + REGION)


def rows_of(document: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Keys and values of a document: lists by position and with their length, nothing for null.

    >>> list(rows_of({"gpus": [{"fan": 30, "ecc": True, "serial": None}]}))
    [('gpus.count', '1'), ('gpus.0.fan', '30'), ('gpus.0.ecc', '1')]
    """
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
    """The rows as text of a slot.

    Raises:
        UnavailableError: They exceed a slot.
    """
    text = "".join(f"{key} {value}\n" for key, value in rows.items()).encode()
    if len(text) > SLOT:
        raise UnavailableError(
            f"the state of these GPUs has {len(text)} bytes, and the limit is {SLOT}",
            hint="use fewer GPUs, processes or NVLinks",
        )
    return text


class State:
    """The state of one machine's GPUs. Root of the machine may have replaced the file by anything.

    Args:
        path: The file with the region.
        root: Root of the path: /proc/PID/root of a running container.
    """

    def __init__(self, path: Path, root: Path = Path("/")) -> None:
        self.path, self._root = path, root

    def rows(self) -> Rows:
        """The present rows."""
        with self._opened(os.O_RDONLY) as (file, start):
            return self._read(file, start)

    def write(self, rows: Rows) -> None:
        """Replace all rows."""

        def replace(now: Rows) -> None:
            now.clear()
            now.update(rows)

        self.change(replace)

    def change(self, edit: Callable[[Rows], None]) -> Rows:
        """Change the rows atomically.

        Args:
            edit: Changes the rows that it gets; where it raises, nothing is changed.

        Returns:
            The new rows.
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
            os.pwrite(file, struct.pack("<Q", changes + 1), start + 32)  # this write makes the slot valid
            return rows

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[tuple[int, int]]:
        # O_NOFOLLOW, O_NONBLOCK: root of the machine could have placed a link or a FIFO there, on which open
        # would block.
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
        """Lock the file as nvml/state.c does; filelock would truncate it."""
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"a program of the machine has locked {self.path} for more than {LOCK_S} s",
                        hint="`lslocks` in the machine lists it",
                    ) from None
                time.sleep(0.01)

    def _damaged(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{self.path} can't be read: {why}",
            hint="create it again: invoke cloud.gpus MACHINE --off, then --on",
        )

    def _read(self, file: int, start: int) -> Rows:
        while True:
            _magic, changes, *lengths = HEADER.unpack(os.pread(file, HEADER.size, start))
            slot = changes & 1
            if lengths[slot] > SLOT:
                raise self._damaged(f"it has {lengths[slot]} bytes of text, and the limit is {SLOT}")
            text = os.pread(file, lengths[slot], start + PAGE + slot * SLOT)
            # Read again where a change came in between: the slot may have been overwritten.
            if HEADER.unpack(os.pread(file, HEADER.size, start))[1] == changes:
                return dict(line.split(" ", 1) for line in text.decode().split("\n") if " " in line)


def add_event(rows: Rows, *, gpu: int, kind: int, data: int = 0) -> None:
    """Add an event for programs that wait for events of a GPU.

    Args:
        kind: NVML's nvmlEventType..., for example 8 for an Xid.
        data: The number of the Xid.
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
    """Remove a key and all keys below it."""
    for name in [name for name in rows if name == key or name.startswith(f"{key}.")]:
        del rows[name]


def count_energy(rows: Rows, gpu: int, *, now: float | None = None) -> None:
    """Add the energy used up to now, so that the counter never decreases when the power changes."""
    at, key = time.time() if now is None else now, f"gpus.{gpu}.energy"
    if f"{key}.since" in rows:
        passed = max(0.0, at - float(rows[f"{key}.since"]))
        counted = float(rows[f"{key}.counted"]) + passed * float(rows[f"{key}.watts"]) * 1000
        rows.update({f"{key}.counted": f"{counted:.0f}", f"{key}.since": f"{at:.3f}"})
        if watts := rows.get(f"gpus.{gpu}.power.draw"):
            rows[f"{key}.watts"] = watts


def gpu_count(rows: Rows) -> int:
    """Number of GPUs.

    >>> gpu_count({"gpus.count": "8"}), gpu_count({})
    (8, 0)
    """
    return int(rows.get("gpus.count", 0))
