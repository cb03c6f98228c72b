"""The EBS direct APIs on the disks of snapshots: read and write them block by block.

Formats, limits and codes: botocore's model of `ebs` 2019-11-02. moto's own backend keeps blocks in memory,
apart from its snapshots, and checks neither tokens nor checksums. A snapshot that is being written is a
separate file until CompleteSnapshot and ends with the server (EBS too cancels a snapshot without writes).
"""

import base64
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.refusals import SCOPE
from gpukiln.clouds.embedded.volume_files import mark_untrusted
from gpukiln.clouds.tags import TRUST_TAG, TRUSTED
from gpukiln.disks import sparse
from gpukiln.parsing import parse_json
from gpukiln.programs import FULL_BYTES, free_bytes
from gpukiln.units import is_whole

log = logging.getLogger(__name__)
BLOCK = 512 << 10  # bytes
TOKEN_S = 7 * 86400  # seconds that a block token is valid
FEWEST, MOST = 100, 10_000  # blocks a page
LARGEST_GIB = 65536
TIMEOUT_MIN = 60  # StartSnapshot$Timeout
_PATHS = (
    ("POST", re.compile(r"/snapshots"), "StartSnapshot"),
    ("POST", re.compile(r"/snapshots/completion/(?P<snapshot>[^/]+)"), "CompleteSnapshot"),
    ("GET", re.compile(r"/snapshots/(?P<snapshot>[^/]+)/blocks"), "ListSnapshotBlocks"),
    ("GET", re.compile(r"/snapshots/(?P<snapshot>[^/]+)/blocks/(?P<block>\d+)"), "GetSnapshotBlock"),
    ("PUT", re.compile(r"/snapshots/(?P<snapshot>[^/]+)/blocks/(?P<block>\d+)"), "PutSnapshotBlock"),
)
Answer = tuple[int, dict[str, str], bytes]  # status, headers, body
Start = Callable[..., Any]


class EbsError(Exception):
    """An error that EBS answers."""

    def __init__(self, status: int, code: str, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.reason = status, code, reason

    def answer(self) -> Answer:
        body = {"Message": str(self), **({"Reason": self.reason} if self.reason else {})}
        headers = {"Content-Type": "application/json", "x-amzn-ErrorType": self.code}
        return self.status, headers, json.dumps(body).encode()


def operation_of(environ: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """The call of a request and the parameters in its path; None: the request is for another service."""
    scope = SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    if scope is None or scope["service"] != "ebs":
        return None
    for method, path, name in _PATHS:
        if method == environ["REQUEST_METHOD"] and (match := path.fullmatch(environ["PATH_INFO"])):
            return name, match.groupdict()
    return "", {}


@dataclass
class _Unfinished:
    """A snapshot that is being written."""

    file: Path
    size_gib: int
    timeout_s: int
    digests: dict[int, bytes] = field(default_factory=dict)
    written: float = field(default_factory=time.monotonic)


class SnapshotBlocks:
    """WSGI application: the service `ebs`.

    Args:
        layout: The cloud's files.
    """

    def __init__(self, layout: Layout) -> None:
        # Tokens are valid for this server alone.
        self._layout, self._key = layout, secrets.token_bytes(32)
        self._unfinished: dict[str, _Unfinished] = {}
        self._answered: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}  # by client token
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Start) -> list[bytes]:
        """Answer one request."""
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        try:
            status, headers, answer = self._answer(environ, body)
        except EbsError as refused:
            status, headers, answer = refused.answer()
        except Exception as error:  # a crash would answer a page of HTML
            log.exception("%s %s", environ["REQUEST_METHOD"], environ["PATH_INFO"])
            status, headers, answer = EbsError(500, "InternalServerException", str(error)).answer()
        start_response(
            f"{status} {HTTPStatus(status).phrase}",
            [*headers.items(), ("Content-Length", str(len(answer)))],
        )
        return [answer]

    def _answer(self, environ: dict[str, Any], body: bytes) -> Answer:
        name, named = operation_of(environ) or ("", {})
        ec2 = _backend(environ)
        query = {key: values[0] for key, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
        match name:
            case "ListSnapshotBlocks":
                return self._list(ec2, named["snapshot"], query)
            case "GetSnapshotBlock":
                return self._get(ec2, named["snapshot"], int(named["block"]), query)
            case "StartSnapshot":
                return self._start(ec2, _document(body))
            case "PutSnapshotBlock":
                return self._put(ec2, named["snapshot"], int(named["block"]), environ, body)
            case "CompleteSnapshot":
                return self._complete(ec2, named["snapshot"], environ)
        raise EbsError(400, "UnknownOperationException", f"{environ['PATH_INFO']}: not in the embedded EBS")

    # --- reading ---

    def _list(self, ec2: Any, snapshot_id: str, query: dict[str, str]) -> Answer:
        snapshot, disk = self._readable(ec2, snapshot_id)
        most = _number(query, "maxResults", MOST)
        if not FEWEST <= most <= MOST:
            raise _invalid("INVALID_PARAMETER_VALUE", f"MaxResults is {most}, wanted {FEWEST} to {MOST}")
        start = _number(query, "startingBlockIndex", 0)
        if token := query.get("pageToken"):
            start = self._open(token, snapshot_id, "INVALID_PAGE_TOKEN")
        with sparse.opened(disk) as number:
            indexes = [index for index in sparse.blocks(number, BLOCK) if index >= start]
        page, rest = indexes[:most], indexes[most:]
        expires = int(time.time()) + TOKEN_S
        document = {
            "BlockSize": BLOCK,
            "VolumeSize": snapshot.volume.size,
            "ExpiryTime": expires,
            "Blocks": [
                {"BlockIndex": index, "BlockToken": self._seal(snapshot_id, index, expires)} for index in page
            ],
        }
        if rest:
            document["NextToken"] = self._seal(snapshot_id, rest[0], expires)
        return _json(200, document)

    def _get(self, ec2: Any, snapshot_id: str, index: int, query: dict[str, str]) -> Answer:
        _, disk = self._readable(ec2, snapshot_id)
        if self._open(query.get("blockToken", ""), snapshot_id, "INVALID_BLOCK_TOKEN") != index:
            raise _invalid("INVALID_BLOCK_TOKEN", "The block token is for another block")
        with disk.open("rb") as file:
            data = os.pread(file.fileno(), BLOCK, index * BLOCK).ljust(BLOCK, b"\0")
        headers = {
            "Content-Type": "application/octet-stream",
            "x-amz-Data-Length": str(BLOCK),
            "x-amz-Checksum": _checksum(data),
            "x-amz-Checksum-Algorithm": "SHA256",
        }
        return 200, headers, data

    def _readable(self, ec2: Any, snapshot_id: str) -> tuple[Any, Path]:
        snapshot, disk = _snapshot(ec2, snapshot_id), self._layout.snapshot(snapshot_id)
        if snapshot.status != "completed":
            raise _invalid("INVALID_SNAPSHOT_ID", f"The snapshot {snapshot_id} is {snapshot.status}")
        if not disk.exists():
            raise EbsError(500, "InternalServerException", f"{disk} is missing")
        return snapshot, disk

    def _seal(self, snapshot_id: str, index: int, expires: int) -> str:
        what = index.to_bytes(8, "big") + expires.to_bytes(8, "big")
        mac = hmac.digest(self._key, snapshot_id.encode() + what, "sha256")[:16]
        return base64.b64encode(what + mac).decode()

    def _open(self, token: str, snapshot_id: str, reason: str) -> int:
        """The block of a block token, or the first block of a page token."""
        try:
            # parse_qs decodes "+" of base64 as a space.
            content = base64.b64decode(token.replace(" ", "+"), validate=True)
        except ValueError:
            content = b""
        index, expires = int.from_bytes(content[:8], "big"), int.from_bytes(content[8:16], "big")
        if not hmac.compare_digest(
            self._seal(snapshot_id, index, expires).encode(), base64.b64encode(content)
        ):
            raise _invalid(reason, "The token is invalid")
        if expires < time.time():
            raise _invalid(reason, "The token has expired")
        return index

    # --- writing ---

    def _start(self, ec2: Any, request: dict[str, Any]) -> Answer:
        size, timeout = request.get("VolumeSize"), request.get("Timeout", TIMEOUT_MIN)
        if not isinstance(size, int) or not 1 <= size <= LARGEST_GIB:
            raise _invalid("INVALID_VOLUME_SIZE", f"VolumeSize is {size}, wanted 1 to {LARGEST_GIB} GiB")
        if not isinstance(timeout, int) or not 10 <= timeout <= 4320:
            raise _invalid("INVALID_PARAMETER_VALUE", f"Timeout is {timeout}, wanted 10 to 4320 minutes")
        from gpukiln.clouds.embedded import store  # noqa: PLC0415 - moto reads its settings first

        parent = request.get("ParentSnapshotId")
        if parent and request.get("Encrypted"):
            raise _invalid("INVALID_PARAMETER_VALUE", "Encrypted and ParentSnapshotId exclude each other")
        with self._lock:
            self._cancel_old(ec2)
            token = ec2.region_name, str(request.get("ClientToken") or secrets.token_hex(8))
            if token in self._answered:
                before, answer = self._answered[token]
                if before != request:
                    message = "The client token was used with other parameters"
                    raise EbsError(409, "ConflictException", message)
                return _json(201, answer)  # the first answer, even if the snapshot has changed
            source = self._readable(ec2, parent)[1] if parent else None
            snapshot_id = f"snap-{secrets.token_hex(9)[1:]}"
            file = self._layout.unfinished_snapshot(snapshot_id)
            if source:
                sparse.copy_disk(source, file)
            with file.open("ab") as opened:
                opened.truncate(size << 30)
            tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", ())}
            if tags.get(TRUST_TAG) != TRUSTED:
                # The blocks come from outside: a container would have this computer's kernel mount the file
                # system.
                mark_untrusted(file)
            snapshot = store.add_snapshot(
                ec2,
                snapshot_id,
                size_gib=size,
                description=request.get("Description", ""),
                encrypted=bool(request.get("Encrypted") or request.get("KmsKeyArn")),
                kms_key_id=request.get("KmsKeyArn"),
                owner_id=ec2.account_id,
                tags=tags,
            )
            snapshot.status = "pending"
            self._unfinished[snapshot_id] = _Unfinished(file, size, timeout * 60)
            self._answered[token] = request, _described(ec2, snapshot_id)
        return _json(201, self._answered[token][1])

    def _put(self, ec2: Any, snapshot_id: str, index: int, environ: dict[str, Any], data: bytes) -> Answer:
        writing = self._writable(ec2, snapshot_id)
        if len(data) != BLOCK or environ.get("HTTP_X_AMZ_DATA_LENGTH") != str(BLOCK):
            raise _invalid("INVALID_BLOCK", f"A block of {len(data)} bytes, wanted {BLOCK}")
        if index >= (writing.size_gib << 30) // BLOCK:
            raise _invalid("INVALID_BLOCK", f"The block {index} is beyond the end of the volume")
        if environ.get("HTTP_X_AMZ_CHECKSUM_ALGORITHM") != "SHA256":
            raise _invalid("INVALID_PARAMETER_VALUE", "The checksum algorithm has to be SHA256")
        if environ.get("HTTP_X_AMZ_CHECKSUM") != _checksum(data):
            raise _invalid("INVALID_BLOCK", "The checksum does not match the data")
        if free_bytes(writing.file.parent) < FULL_BYTES + BLOCK:
            raise EbsError(500, "InternalServerException", f"the disk of {writing.file.parent} is full")
        with writing.file.open("r+b") as file:
            os.pwrite(file.fileno(), data, index * BLOCK)
        with self._lock:
            writing.digests[index] = hashlib.sha256(data).digest()
            writing.written = time.monotonic()
        return 201, {"x-amz-Checksum": _checksum(data), "x-amz-Checksum-Algorithm": "SHA256"}, b""

    def _complete(self, ec2: Any, snapshot_id: str, environ: dict[str, Any]) -> Answer:
        snapshot = _snapshot(ec2, snapshot_id)
        if snapshot.status == "completed" and snapshot_id not in self._unfinished:
            return _json(202, {"Status": "completed"})  # a retry after a lost answer
        writing = self._writable(ec2, snapshot_id)
        if environ.get("HTTP_X_AMZ_CHANGEDBLOCKSCOUNT") != str(len(writing.digests)):
            raise _invalid("INVALID_PARAMETER_VALUE", f"{len(writing.digests)} blocks were written")
        if given := environ.get("HTTP_X_AMZ_CHECKSUM"):
            # The LINEAR aggregation: the checksum of the blocks' checksums in their order (CompleteSnapshot,
            # ChecksumAggregationMethod).
            linear = b"".join(writing.digests[index] for index in sorted(writing.digests))
            if given != _checksum(linear):
                raise _invalid("INVALID_PARAMETER_VALUE", "The checksum does not match the blocks' checksums")
        with writing.file.open("rb") as file:
            # Before the rename gives the snapshot its name.
            os.fsync(file.fileno())
        writing.file.replace(self._layout.snapshot(snapshot_id))
        snapshot.status = "completed"
        self._unfinished.pop(snapshot_id)
        return _json(202, {"Status": "pending"})  # EBS completes it later; DescribeSnapshots has the state

    def _writable(self, ec2: Any, snapshot_id: str) -> _Unfinished:
        snapshot = _snapshot(ec2, snapshot_id)
        with self._lock:
            self._cancel_old(ec2)
        if snapshot.status == "error":
            raise _invalid(
                "WRITE_REQUEST_TIMEOUT", f"The snapshot {snapshot_id} was cancelled at its timeout"
            )
        if snapshot_id not in self._unfinished:
            raise _invalid("INVALID_SNAPSHOT_ID", f"The snapshot {snapshot_id} is {snapshot.status}")
        return self._unfinished[snapshot_id]

    def _cancel_old(self, ec2: Any) -> None:
        """Cancel snapshots without writes for their timeout, and forget deleted ones."""
        for snapshot_id, unfinished in list(self._unfinished.items()):
            if not unfinished.file.exists():
                self._unfinished.pop(snapshot_id)
            elif time.monotonic() - unfinished.written > unfinished.timeout_s:
                if snapshot_id in ec2.snapshots:
                    ec2.snapshots[snapshot_id].status = "error"
                unfinished.file.unlink()
                self._unfinished.pop(snapshot_id)


def _backend(environ: Mapping[str, Any]) -> Any:
    from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - moto reads its settings first
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto reads its settings first

    scope = SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    return ec2_backends[DEFAULT_ACCOUNT_ID][scope["region"] if scope else ""]


def _snapshot(ec2: Any, snapshot_id: str) -> Any:
    snapshot = ec2.snapshots.get(snapshot_id)
    if snapshot is None:
        message = f"The snapshot '{snapshot_id}' does not exist."
        raise EbsError(404, "ResourceNotFoundException", message, "SNAPSHOT_NOT_FOUND")
    return snapshot


def _described(ec2: Any, snapshot_id: str) -> dict[str, Any]:
    snapshot = ec2.snapshots[snapshot_id]
    return {
        "SnapshotId": snapshot_id,
        "OwnerId": ec2.account_id,
        "Status": snapshot.status,
        "StartTime": int(snapshot.start_time.timestamp()),
        "VolumeSize": snapshot.volume.size,
        "BlockSize": BLOCK,
        "Description": snapshot.description,
        "Tags": [{"Key": key, "Value": value} for key, value in ec2.tags.get(snapshot_id, {}).items()],
        **({"KmsKeyArn": snapshot.kms_key_id} if snapshot.kms_key_id else {}),
        "SseType": "sse-kms" if snapshot.encrypted else "none",
    }


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = parse_json(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise EbsError(400, "SerializationException", "The request is not a JSON object")
    return document


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not is_whole(text):
        raise _invalid("INVALID_PARAMETER_VALUE", f"{name} is {text!r}, wanted a number")
    return int(text)


def _invalid(reason: str, message: str) -> EbsError:
    return EbsError(400, "ValidationException", message, reason)


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _json(status: int, document: dict[str, Any]) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(document).encode()
