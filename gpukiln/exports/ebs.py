"""Snapshots by the EBS direct APIs: read into a raw disk, written from one; no instance is launched.

Blocks are transferred in parallel, each with its SHA-256 compared. A journal next to the disk has a line with
the digest of each block that is done. A run after a killed one compares each block on the disk with the
journal, and transfers the others only.

Shapes and error codes: botocore's model of `ebs` 2019-11-02. "You should always retry requests that receive
server (5xx) error responses, and ThrottlingException and RequestThrottledException" (EBS API reference).
"""

import base64
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpukiln.clouds.base import explain_aws_errors
from gpukiln.clouds.ec2 import wait_until
from gpukiln.disks.sparse import blocks
from gpukiln.errors import UnavailableError
from gpukiln.files import remove, write_atomic
from gpukiln.units import Duration

BLOCK = 512 << 10  # bytes; EBS has no other size
PAGE = 10_000  # blocks of a listing, the most
TOKENS_RENEWED = 100  # blocks whose tokens are renewed when one is refused: the fewest that a listing has
WORKERS = 10  # calls at once: as many connections as a client of botocore keeps
ATTEMPTS = 9  # with the pauses below, a call that is throttled each time fails after about a minute
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 20.0
TIMEOUT_MIN = 24 * 60  # after so long without a block EBS cancels a snapshot (StartSnapshot, Timeout)
COMPLETES_S = 3600  # seconds that EBS gets to complete a snapshot after its last block
RETRY_CODES = {  # codes after which the same call may succeed
    *("RequestThrottledException", "ThrottlingException", "ConcurrentLimitExceededException"),
    *("InternalServerException", "RequestLimitExceeded", "ServiceUnavailable", "SlowDown"),
}
RETRY_REASONS = {"INVALID_BLOCK", "CONFLICTING_BLOCK_UPDATE"}  # a block that was damaged in transit
EXPIRED_LOGIN_CODES = {  # codes of expired credentials: after a new login the same call may succeed
    *("ExpiredToken", "ExpiredTokenException", "RequestExpired"),
    *("InvalidClientTokenId", "UnrecognizedClientException"),
}
TOKEN_REFUSED = "INVALID_BLOCK_TOKEN"  # noqa: S105 - a reason
RESUME_NOTE = (
    "written blocks are kept: the same command resumes; after a day `invoke cloud.sweep` removes them"
)
ZEROS = bytes(BLOCK)
T = TypeVar("T")


class CorruptBlockError(UnavailableError):
    """A block that arrived was not the one that was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="check the network, then run the same command again: it resumes")


@dataclass(frozen=True)
class BlockCounts:
    """How many blocks were transferred.

    Args:
        moved: Blocks that this run read or wrote.
        kept: Blocks that an earlier run had transferred.
    """

    moved: int
    kept: int


class Journal:
    """The blocks that are done, with their digests; a line that a kill cut short is ignored.

    Args:
        about: Facts of the snapshot; a journal with other facts is not resumed.
    """

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file, self._about, self._lock = file, json.dumps(about, sort_keys=True), threading.Lock()
        self.done: dict[int, str] = {}
        self._number = -1  # the descriptor, opened at the first line

    def resume(self) -> bool:
        """Read the journal of an earlier run; False where there is none of the same snapshot."""
        try:
            head, *lines = self.file.read_text().split("\n")
        except (OSError, UnicodeDecodeError):
            return False
        if head != self._about:
            return False
        for line in lines[:-1]:  # the text after the last newline is empty, or a line that was cut short
            index, _, digest = line.partition(" ")
            if index.isdecimal() and len(digest) == 64:
                self.done[int(index)] = digest
        return True

    def begin(self) -> None:
        """Start a new journal."""
        self.done = {}
        write_atomic(self.file, f"{self._about}\n")

    def add(self, index: int, digest: str) -> None:
        """Record a block, after it was transferred."""
        with self._lock:
            if self._number < 0:
                # O_APPEND and one write a line: a kill can cut only the last line short.
                self._number = os.open(self.file, os.O_WRONLY | os.O_APPEND)
                # The first line of this run must not continue one that was cut short.
                if not self.file.read_bytes().endswith(b"\n"):
                    os.write(self._number, b"\n")
            os.write(self._number, f"{index} {digest}\n".encode())
            self.done[index] = digest

    def close(self) -> None:
        if self._number >= 0:
            os.close(self._number)
            self._number = -1


def read_snapshot(
    ebs: Any,
    snapshot_id: str,
    disk: Path,
    journal_file: Path,
    *,
    begin: Callable[[int], None],
    moved: Callable[[int], None],
) -> BlockCounts:
    """Read a snapshot into a sparse raw disk; after a failure or a kill the next run resumes.

    Args:
        ebs: boto3's client of `ebs`.
        begin: Called with the number of bytes to read, before the first is read.
        moved: Called with the number of bytes of each block.

    Raises:
        UnavailableError: A block can't be read, or the disk is full; the blocks that were read stay.
    """
    tokens = _Tokens(ebs, snapshot_id)
    journal = Journal(journal_file, {"snapshot": snapshot_id, "bytes": tokens.size})
    if not (journal.resume() and disk.exists() and disk.stat().st_size == tokens.size):
        # A new file, not a truncated one: a killed run may still have the old one mounted.
        remove(disk)
        with disk.open("wb") as file:
            file.truncate(tokens.size)
        journal.begin()
    number = os.open(disk, os.O_RDWR)
    try:
        stop = threading.Event()
        kept = set(
            _run_parallel(list(journal.done.items()), lambda entry: _matching_block(number, *entry), stop)
        ) - {-1}
        missing = sorted(set(tokens.known) - kept)
        begin(len(missing) * BLOCK)

        def read_block(index: int) -> int:
            data = call_with_retries(
                f"read block {index} of {snapshot_id}", partial(tokens.block, index), stop
            )
            # Zeros stay a hole, unless an earlier run wrote to the block: it did not match the journal.
            if data != ZEROS or index in journal.done:
                _write(number, data, index)
            journal.add(index, hashlib.sha256(data).hexdigest())
            moved(BLOCK)
            return index

        for _ in _run_parallel(missing, read_block, stop):
            pass
        os.fsync(number)
    finally:
        journal.close()
        os.close(number)
    return BlockCounts(len(missing), len(kept))


class _Tokens:
    """The blocks of a snapshot, each with the token that GetSnapshotBlock needs."""

    def __init__(self, ebs: Any, snapshot_id: str) -> None:
        self._ebs, self._snapshot = ebs, snapshot_id
        self.known: dict[int, str] = {}
        self.size = 0
        token = ""
        while True:
            asked = {"MaxResults": PAGE, **({"NextToken": token} if token else {})}
            page = call_with_retries(f"list the blocks of {snapshot_id}", partial(self._list, **asked))
            self.size = page["VolumeSize"] << 30
            if page["BlockSize"] != BLOCK:
                raise UnavailableError(
                    f"{snapshot_id} has blocks of {page['BlockSize']} bytes, wanted {BLOCK}"
                )
            self.known |= {block["BlockIndex"]: block["BlockToken"] for block in page.get("Blocks", ())}
            if not (token := page.get("NextToken") or ""):
                break

    def _list(self, **asked: Any) -> Any:
        return self._ebs.list_snapshot_blocks(SnapshotId=self._snapshot, **asked)

    def block(self, index: int) -> bytes:
        """Read a block and compare its digest with the answer's; an expired token is renewed."""
        from botocore.exceptions import ClientError  # noqa: PLC0415 - slow to import

        try:
            return self._get(index)
        except ClientError as error:
            if error.response.get("Reason") != TOKEN_REFUSED:
                raise
        page = self._list(StartingBlockIndex=index, MaxResults=TOKENS_RENEWED)
        self.known |= {block["BlockIndex"]: block["BlockToken"] for block in page["Blocks"]}
        return self._get(index)

    def _get(self, index: int) -> bytes:
        answer = self._ebs.get_snapshot_block(
            SnapshotId=self._snapshot, BlockIndex=index, BlockToken=self.known[index]
        )
        data: bytes = answer["BlockData"].read()
        # botocore does not compare the checksum of this answer
        if len(data) != BLOCK or answer["Checksum"] != checksum(data):
            raise CorruptBlockError(f"block {index} of {self._snapshot} is not what its checksum says")
        return data


def write_snapshot(
    cloud_clients: tuple[Any, Any],
    disk: Path,
    journal_file: Path,
    *,
    size_gib: int,
    tags: dict[str, str],
    description: str,
    token: str,
    begin: Callable[[int], None],
    moved: Callable[[int], None],
) -> tuple[str, BlockCounts]:
    """Write a raw disk into a new snapshot; the next run resumes where this one ended.

    Args:
        cloud_clients: boto3's clients of `ebs` and of `ec2`.
        tags: Tags that the snapshot has from its creation on.
        token: The same for the same disk: EBS answers it with the same snapshot.
        begin: Called with the number of bytes to write, before the first is written.
        moved: Called with the number of bytes of each block.

    Returns:
        The completed snapshot, and the numbers of blocks.

    Raises:
        UnavailableError: EBS refuses it. A snapshot that no later run can resume is deleted.
    """
    ebs, ec2 = cloud_clients
    snapshot_id, state = _start_snapshot(ebs, ec2, size_gib, tags, description, token)
    if state == "completed":  # by a run that ended before it registered an image
        return snapshot_id, BlockCounts(0, 0)
    journal = Journal(journal_file, {"snapshot": snapshot_id})
    if not journal.resume():
        journal.begin()
    number, stop = os.open(disk, os.O_RDONLY), threading.Event()
    try:
        done = dict(journal.done)
        missing = [index for index in blocks(number, BLOCK) if index not in done]
        begin(len(missing) * BLOCK)

        def write_block(index: int) -> int:
            data = os.pread(number, BLOCK, index * BLOCK).ljust(BLOCK, b"\0")
            # A block that was never written reads as zeros, so zeros are not sent.
            if data != ZEROS:
                put = partial(_put_block, ebs, snapshot_id, index, data)
                call_with_retries(f"write block {index} of {snapshot_id}", put, stop)
                journal.add(index, hashlib.sha256(data).hexdigest())
            moved(BLOCK)
            return index

        for _ in _run_parallel(missing, write_block, stop):
            pass
        # LINEAR: the digest of all blocks' digests, in the order of their indexes (CompleteSnapshot)
        linear = b"".join(bytes.fromhex(journal.done[index]) for index in sorted(journal.done))
        call_with_retries(
            f"complete {snapshot_id}",
            lambda: ebs.complete_snapshot(
                SnapshotId=snapshot_id,
                ChangedBlocksCount=len(journal.done),
                Checksum=checksum(linear),
                ChecksumAlgorithm="SHA256",
                ChecksumAggregationMethod="LINEAR",
            ),
        )
        _wait_completed(ec2, snapshot_id)
    except UnavailableError as error:
        if isinstance(error, FinalRefusalError):
            drop_snapshot(ec2, snapshot_id, error)
            journal_file.unlink(missing_ok=True)
        else:
            error.add_note(RESUME_NOTE)
        raise
    finally:
        journal.close()
        os.close(number)
    return snapshot_id, BlockCounts(len(journal.done) - len(done), len(done))


def _start_snapshot(
    ebs: Any, ec2: Any, size_gib: int, tags: dict[str, str], description: str, token: str
) -> tuple[str, str]:
    """The snapshot that an earlier run started and that still exists, or a new one; and its state."""
    # EBS answers a used token with its first snapshot, even a deleted one: then the next token is tried.
    for attempt in range(100):
        start = partial(
            ebs.start_snapshot,
            VolumeSize=size_gib,
            Description=description,
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
            ClientToken=f"{token}-{attempt}",
            Timeout=TIMEOUT_MIN,
        )
        snapshot_id = str(call_with_retries("start a snapshot", start)["SnapshotId"])
        if (state := _state(ec2, snapshot_id)) in ("pending", "completed"):
            return snapshot_id, state
    raise UnavailableError(
        "EBS answers with snapshots that were deleted", hint="run the same command again in an hour"
    )


def _put_block(ebs: Any, snapshot_id: str, index: int, data: bytes) -> None:
    answer = ebs.put_snapshot_block(
        SnapshotId=snapshot_id,
        BlockIndex=index,
        BlockData=data,
        DataLength=BLOCK,
        Checksum=checksum(data),
        ChecksumAlgorithm="SHA256",
    )
    if answer["Checksum"] != checksum(data):
        raise CorruptBlockError(f"block {index} of {snapshot_id} arrived damaged")


def _state(ec2: Any, snapshot_id: str) -> str:
    # a filter, for an id of a deleted snapshot would be an error
    with explain_aws_errors(f"read the state of {snapshot_id}"):
        named = [{"Name": "snapshot-id", "Values": [snapshot_id]}]
        snapshots = ec2.describe_snapshots(Filters=named)["Snapshots"]
    return str(snapshots[0]["State"]) if snapshots else ""


def _wait_completed(ec2: Any, snapshot_id: str) -> None:
    def completed() -> bool | None:
        state = _state(ec2, snapshot_id)
        if state == "error":
            raise FinalRefusalError(f"EBS could not complete {snapshot_id}: its state is error")
        return True if state == "completed" else None

    def late() -> UnavailableError:
        return UnavailableError(f"{snapshot_id} is not completed after {Duration(COMPLETES_S).shown}")

    wait_until(completed, late, timeout_s=COMPLETES_S, pause_s=0.1, longest_pause_s=15.0, sleep=time.sleep)


def drop_snapshot(ec2: Any, snapshot_id: str, error: BaseException) -> None:
    """Delete a snapshot that no later run can resume; if that fails too, the error says so."""
    try:
        with explain_aws_errors(f"delete {snapshot_id}"):
            ec2.delete_snapshot(SnapshotId=snapshot_id)
    except UnavailableError as left:
        error.add_note(f"{left.message}: `invoke cloud.sweep` removes it")


def checksum(data: bytes) -> str:
    """SHA-256 as EBS writes it.

    >>> checksum(b"")
    '47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='
    >>> len(checksum(bytes(BLOCK)))
    44
    """
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


class FinalRefusalError(UnavailableError):
    """EBS would refuse another attempt for the same reason."""


def call_with_retries(action: str, call: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Call until it succeeds, with a pause that doubles; a final refusal is raised at once.

    Args:
        action: What the call does, for the message.
        stop: Set when the answer is not needed any more.

    Raises:
        UnavailableError: The call was refused, or each of ATTEMPTS failed.
    """
    stop = stop or threading.Event()
    for attempt in range(ATTEMPTS):
        try:
            with explain_aws_errors(action):
                return call()
        except UnavailableError as error:
            _raise_unless_retryable(error)
            if attempt == ATTEMPTS - 1 or stop.is_set():
                raise
        # jitter: ten workers that were throttled together would call together again
        stop.wait(min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1))  # noqa: S311 - a pause
    raise AssertionError("unreachable")


def _raise_unless_retryable(error: UnavailableError) -> None:
    """Raise an error that another attempt can't change."""
    from botocore import exceptions  # noqa: PLC0415 - slow to import
    from botocore.parsers import ResponseParserError  # noqa: PLC0415 - slow to import

    cause: Any = error.__cause__
    if isinstance(cause, exceptions.ClientError):
        code = cause.response["Error"].get("Code", "")
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in RETRY_CODES or status >= 500 or cause.response.get("Reason") in RETRY_REASONS:
            return
        if code in EXPIRED_LOGIN_CODES:
            raise error  # no final refusal: the snapshot is kept for a run after a new login
        raise FinalRefusalError(error.message, hint=_hint(cause) or error.hint) from cause
    network = (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError)
    if not isinstance(error, CorruptBlockError) and not isinstance(cause, (*network, ResponseParserError)):
        raise error


def _hint(error: Any) -> str:
    if error.response.get("Reason") == "DEPENDENCY_ACCESS_DENIED":
        return "the snapshot is encrypted: allow the role to use its key (`cloud.policy --kms-keys`)"
    return ""


def _matching_block(number: int, index: int, digest: str) -> int:
    """The index of a block that has the journal's digest on the disk, else -1."""
    data = os.pread(number, BLOCK, index * BLOCK)
    return index if hashlib.sha256(data).hexdigest() == digest else -1


def _write(number: int, data: bytes, index: int) -> None:
    # pwrite may write less than it is given (pwrite(2)), for example on a disk that fills up
    at, left = index * BLOCK, memoryview(data)
    while left:
        count = os.pwrite(number, left, at)
        left, at = left[count:], at + count


def _run_parallel(items: Iterable[T], work: Callable[[T], int], stop: threading.Event) -> Iterator[int]:
    """Do the work on every item, WORKERS at once; a failure or Ctrl-C lets the running ones end first."""
    # At most 2 * WORKERS are submitted at once: a disk of 1 TiB has two million blocks.
    with ThreadPoolExecutor(WORKERS) as pool:
        running: set[Future[int]] = set()
        try:
            for item in items:
                running.add(pool.submit(work, item))
                if len(running) >= 2 * WORKERS:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            for future in running:
                yield future.result()
        except BaseException:
            stop.set()
            for future in running:
                future.cancel()
            raise
