"""Fault injection: a forked copy of this process runs a command and is killed by SIGKILL at a chosen step.

A kill point is after each call of a cloud or a cluster that changes something or reads a block of a disk, and
before each change of a file in some folders.
"""

import gc
import hashlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from botocore.client import BaseClient

from gpukiln.disks import sparse
from gpukiln.kubernetes.cluster import Cluster
from tests.support.release_cloud import is_change

Work = Callable[[], object]
# Audit events of files, with the index of the changed path in their arguments (Python's manual, "Audit events
# table").
FILE_EVENTS = {"open": 0, "os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "shutil.rmtree": 0}
LARGE = 1 << 20  # bytes: a larger file is a disk
VARYING = (
    (r"\b(i|vol|sg|sgr|eni|key|r|iip-assoc|eipassoc|eni-attach|vol-attach)-[0-9a-f]{8,}", r"\1-ID"),
    (r"\b(ami|snap)-[0-9a-f]{17}\b", r"\1-ID"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.\d]*(\+00:00|Z)?", "TIME"),
    (r"\b(ec2-)?\d+[.-]\d+[.-]\d+[.-]\d+\b", "ADDRESS"),
    (r'"(KeyFingerprint|ClientToken|MacAddress|ReservationId)": "[^"]*"', r'"\1": ""'),
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID"),
    (r'"(resourceVersion|gpukiln.io/submission)": "[^"]*"', r'"\1": ""'),
)
"""Patterns of what differs between two runs: ids of EC2, times, addresses."""


def steps_of(work: Work, *folders: Path) -> list[str]:
    """Run some work to its end in a copy of this process; returns the names of its kill points."""
    # 0 is no kill point.
    status, steps = _run_in_copy(work, folders, 0)
    assert status == 0
    return steps


def run_killed_at(number: int, work: Work, *folders: Path) -> bool:
    """Run some work in a copy of this process that is killed at a kill point, counted from 1.

    Returns:
        Whether it was killed; False: the work has fewer kill points.
    """
    status, _ = _run_in_copy(work, folders, number)
    assert status in (0, -signal.SIGKILL), f"the work ended with {status}"
    return status != 0


def kill_at_each_step(work: Work, *folders: Path) -> Iterator[str]:
    """Run some work repeatedly, killed at its first kill point, its second, and so on, until it completes.

    Yields:
        The kill point, after each run; the caller undoes or continues what the work did.
    """
    for number in itertools.count(1):
        killed = run_killed_at(number, work, *folders)
        yield f"killed at step {number}" if killed else "not killed"
        if not killed:
            return


def select_steps(steps: list[str], *, first: int = 1, every: int = 0) -> list[int]:
    """Numbers of kill points to test: the first and the last of each name, and every n-th.

    Args:
        first: The smallest number.
        every: n; 0: no others.

    >>> select_steps(["open", "CreateTags", "CreateTags", "CreateTags", "os.rename"])
    [1, 2, 4, 5]
    >>> select_steps(["CreateTags"] * 6, every=2)
    [1, 3, 5, 6]
    """
    numbers = range(first, len(steps) + 1)
    earliest = {steps[number - 1]: number for number in reversed(numbers)}
    latest = {steps[number - 1]: number for number in numbers}
    return sorted({*earliest.values(), *latest.values(), *(numbers[::every] if every else ())})


def mask_varying(document: Any) -> str:
    """A document as text, with what differs between two runs replaced."""
    text = json.dumps(document, default=str, indent=1, sort_keys=True)
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text


def files_in(*folders: Path) -> dict[str, tuple[str, str]]:
    """Mode and masked content of each file in folders; for a disk its digest."""
    contents = {}
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            status = file.lstat()
            if not file.is_file():
                text = ""
            elif status.st_size > LARGE:
                text = digest_of_data(file)
            else:
                text = mask_varying(file.read_bytes().decode("latin-1"))
            contents[str(file.relative_to(folder.parent))] = (oct(status.st_mode), text)
    return contents


def digest_of_data(disk: Path) -> str:
    """Size and digest of a disk, equal for equal content: holes, and blocks of zeros, are not hashed.

    SHA-256 of a whole GiB takes 0.7 s of a processor.
    """
    digest = hashlib.sha256()
    with sparse.opened(disk) as number:
        for index in sparse.blocks(number, LARGE):
            block = os.pread(number, LARGE, index * LARGE)
            if block.strip(b"\0"):
                digest.update(index.to_bytes(8, "big") + block)
    return f"{disk.stat().st_size} bytes, {digest.hexdigest()}"


def _run_in_copy(work: Work, folders: tuple[Path, ...], number: int) -> tuple[int, list[str]]:
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        gc.disable()  # a collection touches every object, and so copies the whole memory of the parent
        try:
            os.close(read)
            _install_hooks(folders, number, write)
            work()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Without the parent's cleanup: pytest's fixtures and atexit handlers belong to the parent.
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as opened:
        steps = opened.read().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), steps


def _install_hooks(folders: tuple[Path, ...], number: int, write: int) -> None:
    """Count the kill points of this process, and kill it at one of them."""
    numbers, lock, seen = itertools.count(1), threading.Lock(), set()
    before: list[tuple[str, Path]] = []
    call, send = BaseClient._make_api_call, Cluster._send

    def step(name: str) -> None:
        with lock:
            os.write(write, f"{name}\n".encode())
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # SIGKILL is delivered within this time

    def calling(client: Any, action: str, arguments: Any) -> Any:
        with lock:  # a connection inherited from the parent would mix the answers of both
            if id(client) not in seen:
                seen.add(id(client))
                client._endpoint.http_session.close()
        answer = call(client, action, arguments)
        if is_change(action) or action == "GetSnapshotBlock":
            step(action)
        return answer

    def sending(cluster: Cluster, method: str, path: str, *more: Any, **options: Any) -> Any:
        answer = send(cluster, method, path, *more, **options)
        if method != "GET":
            step(f"{method} {path.rsplit('/', 2)[-1 if method == 'POST' else -2]}")
        return answer

    def changing(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS:
            return
        with suppress(TypeError):  # the argument is a file descriptor
            path = Path(os.fsdecode(arguments[FILE_EVENTS[event]]))
            if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # relative to an open folder
                path = Path(f"/proc/self/fd/{arguments[1]}").readlink() / path
            if any(path.is_relative_to(folder) for folder in folders) and _is_changed(path, event, arguments):
                if before[-1:] != [(event, path)]:  # open() with an opener raises the event twice
                    step(f"{event} {path.suffix or path.name}")
                before.append((event, path))

    BaseClient._make_api_call = calling  # type: ignore[assignment]
    Cluster._send = sending  # type: ignore[method-assign]
    # An audit hook can't be removed, which is why it is installed in the forked copy only (sys.addaudithook).
    sys.addaudithook(changing)


def _is_changed(path: Path, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the event changes anything; opening an existing lock or creating an existing folder doesn't."""
    if event == "open":
        flags = arguments[2]
        return bool(flags & os.O_TRUNC) or (bool(flags & os.O_CREAT) and not path.exists())
    return path.exists() is (event != "os.mkdir") or event == "os.rename"
