"""The root service through which members of the group `gpu` lease; only root can read and write its state.

systemd starts it when a program connects to its socket (role gpu_tools), which root and the group can open.
The
kernel names the caller (SO_PEERCRED): no message names a user. One connection is one call, and each call has
a process of its own, so a call that waits or fails does not affect the others.

A call is a line of JSON, `{"call": NAME, ...}`. The answers are lines too: `{"waiting": WHY}`, then
`{"answer": {...}}` with descriptors of locks, or `{"error": {...}}`.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import socket
import struct
import syslog
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gpukiln import parsing
from gpukiln.errors import BusyError, GpukilnError, RefusedError, UnavailableError, UsageError
from gpukiln.gpus.leases import CONTAINER, DETACHED, JOB, LeaseGrant, LeaseHolder, Leases
from gpukiln.gpus.model import plain
from gpukiln.gpus.processes import user_name
from gpukiln.gpus.selection import EXCLUSIVE, SHARED, DeviceRequest
from gpukiln.gpus.store import Lease, LeaseStore, lifeline_text

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START (sd_listen_fds(3))
MAX_BYTES, MAX_TEXT, MAX_ITEMS = 1 << 16, 500, 64  # of a call; of a text and of a list in a call
READ_S, IDLE_S = 10.0, 300.0  # time for a call to arrive; time without a call after which the service ends
MAX_CALLS, MAX_CALLS_PER_USER = 256, 32  # at the same time
# Processes that wait for a call with the database open: forking one and opening the database take longer than
# the grant itself.
SPARE_PROCESSES = 2
DISCONNECT_CHECK_S = 1.0  # between checks whether the caller of a waiting call is still connected
ROOT_ONLY_FIELDS = ("repair", "counts")  # fields of a request that only root and the configuration set
Answer = dict[str, Any]


@dataclasses.dataclass
class ServiceCall:
    """A call in progress.

    Args:
        line: The connection.
        who: The caller.
    """

    line: socket.socket
    who: LeaseHolder
    arguments: dict[str, Any]
    checked_at: float = 0.0

    def waiting(self, why: str) -> None:
        """Send the caller the reason why it waits."""
        _send(self.line, {"waiting": why})

    def is_abandoned(self) -> bool:
        """Whether the caller has closed the connection."""
        if time.monotonic() - self.checked_at < DISCONNECT_CHECK_S:
            return False
        self.checked_at = time.monotonic()
        try:
            readable = select.select([self.line], [], [], 0)[0]
            return bool(readable) and self.line.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def text(self, name: str) -> str:
        """A text argument.

        Raises:
            UsageError: It is not a text, or too long.
        """
        value = self.arguments.get(name, "")
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise _argument_error(name, value, f"text of at most {MAX_TEXT} characters")
        return value

    def number(self, name: str) -> float | None:
        """A numeric argument of 0 or more; None where it is null."""
        value = self.arguments.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_sane(value):
            raise _argument_error(name, value, "a number of 0 or more")
        return float(value)

    def whole(self, name: str) -> int:
        """An argument that is an integer of 0 or more."""
        value = self.number(name)
        if value is None or value != int(value):
            raise _argument_error(name, self.arguments.get(name), "a whole number")
        return int(value)

    def lease(self, leases: Leases) -> Lease:
        """The lease that the call names.

        Raises:
            UsageError: It is not an active lease.
        """
        number = self.whole("lease")
        held = leases.find(str(number))
        if held is None:
            raise UsageError(
                f"there is no lease L-{number}", hint="`gpukiln-gpu leases` lists the active ones"
            )
        return held


def _argument_error(name: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"{name} is {str(value)[:80]!r}", hint=f"wanted: {expected}")


def _is_sane(value: float) -> bool:
    return math.isfinite(value) and 0 <= value < 1e12


def request_of(data: Any) -> DeviceRequest:
    """Read the request of a call.

    Raises:
        UsageError: A field has a wrong type or value.
    """
    if not isinstance(data, dict):
        raise _argument_error("request", data, "an object")
    known = {field.name: str(field.type) for field in dataclasses.fields(DeviceRequest)}
    values = {}
    for name, value in data.items():
        kind = known.get(name, "")
        # Null and false are the defaults, which a client of the same version sends for every field.
        if name in ROOT_ONLY_FIELDS or not kind:
            if value not in (None, False):
                raise _argument_error(name, value, "nothing: only root sets it")
        elif value is not None or "None" not in kind:
            values[name] = _typed_value(name, value, kind)
    if values.get("mode", EXCLUSIVE) not in (EXCLUSIVE, SHARED) or values.get("count", 1) < 1:
        raise _argument_error("request", data, "a mode and a count")
    return DeviceRequest(**values)


def _typed_value(name: str, value: Any, kind: str) -> Any:
    """A value of a request, with the type of its field."""
    if kind.startswith("tuple[tuple"):
        return tuple(_comparison(item) for item in _list(name, value))
    if kind.startswith("tuple"):
        part = "str" if "str" in kind else "int"
        return tuple(_typed_value(name, item, part) for item in _list(name, value))
    if kind == "bool":
        return value is True
    if kind == "str":
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise _argument_error(name, value, "text")
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not _is_sane(value):
        raise _argument_error(name, value, "a whole number")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise _argument_error(name, value, f"a list of at most {MAX_ITEMS}")
    return value


def _comparison(pair: Any) -> tuple[str, tuple[int, ...]]:
    fits = isinstance(pair, list) and len(pair) == 2 and pair[0] in (">=", "<=", "==", ">", "<")
    if not fits or not all(isinstance(part, int) for part in _list("cuda", pair[1])):
        raise _argument_error("cuda", pair, "comparisons with versions")
    return pair[0], tuple(pair[1])


# ---- the calls


def _current(leases: Leases, _: ServiceCall) -> Answer:
    return {"leases": [lifeline_text(lease) for lease in leases.current()]}


def _queue(leases: Leases, _: ServiceCall) -> Answer:
    rows = leases.queue()
    return {"waiting": [{name: row[name] for name in ("user", "pid", "count", "at")} for row in rows]}


def _ledger(leases: Leases, _: ServiceCall) -> Answer:
    leases.current()  # moves ended leases to the ledger
    return {"uses": leases.ledger()}


def _plan(leases: Leases, call: ServiceCall) -> Answer:
    planned = leases.plan(request_of(call.arguments.get("request")))
    return {
        "devices": [device.uuid for device in planned.devices if device.uuid],
        "possible": len(planned.possible),
        "why": planned.why,
        "considered": plain(planned.considered),
    }


def _acquire(leases: Leases, call: ServiceCall) -> LeaseGrant:
    kind, engine = call.text("kind"), call.arguments.get("engine")
    if kind not in (JOB, DETACHED, CONTAINER):
        raise _argument_error("kind", kind, f"{JOB}, {DETACHED} or {CONTAINER}")
    if engine not in (None, "docker", "podman"):
        raise _argument_error("engine", engine, "docker or podman")
    return leases.acquire(
        request_of(call.arguments.get("request")),
        dataclasses.replace(call.who, project=call.text("project")),
        kind=kind,
        hours=call.number("hours"),
        heartbeat_s=call.number("heartbeat_s"),
        wait_s=call.number("wait_s") or 0.0,
        command=str(call.arguments.get("command", ""))[:MAX_TEXT],
        engine=engine,
        on_wait=call.waiting,
        is_abandoned=call.is_abandoned,
    )


def _release(leases: Leases, call: ServiceCall) -> Answer:
    number = call.whole("lease")
    lease = next((held for held in leases.current() if held.number == number), None)
    if lease is None:
        return {"released": False}
    force = call.arguments.get("force") is True
    done = leases.release(lease, call.who, force=force, energy=leases.energy_counters([lease]))
    if done and not leases.is_owner(lease, call.who):
        text = f"gpukiln-gpu: {call.who.user} has ended {lease.id} of {lease.user}"
        syslog.syslog(syslog.LOG_NOTICE, text)
    return {"released": done}


def _renew(leases: Leases, call: ServiceCall) -> Answer:
    return {"lease": lifeline_text(leases.renew(call.lease(leases), call.who, call.number("hours")))}


def _began(leases: Leases, call: ServiceCall) -> Answer:
    lease, pid = call.lease(leases), call.whole("pid")
    try:
        owner = Path("/proc", str(pid)).stat().st_uid
    except OSError:
        owner = None  # the process has already ended
    if not leases.is_owner(lease, call.who) or owner not in (None, call.who.uid):
        raise RefusedError(f"{lease.id} or process {pid} belongs to another user")
    if owner is not None:
        leases.set_job(lease, pid)
    return {}


def _reconcile(leases: Leases, call: ServiceCall) -> Answer:
    return {"adopted": leases.reconcile(call.who)}


def _is_running(leases: Leases, call: ServiceCall) -> Answer:
    number = call.whole("lease")
    path = leases.store.path / "alive" / f"L-{number}"
    return {"running": leases.store.is_locked(path)}


def _share(leases: Leases, call: ServiceCall) -> tuple[int, ...]:
    lease = call.lease(leases)
    if not leases.is_owner(lease, call.who):
        raise RefusedError(f"{lease.id} belongs to {lease.user}", hint="lease GPUs of your own")
    return leases.share(lease)


CALLS: dict[str, Callable[[Leases, ServiceCall], Any]] = {
    "current": _current,
    "queue": _queue,
    "ledger": _ledger,
    "plan": _plan,
    "acquire": _acquire,
    "release": _release,
    "renew": _renew,
    "began": _began,
    "reconcile": _reconcile,
    "is_running": _is_running,
    "share": _share,
}


def answer(line: socket.socket, make: Callable[[], Leases] = Leases) -> None:
    """Answer the one call of a connection.

    Args:
        make: Opens the leases.
    """
    descriptors: tuple[int, ...] = ()
    try:
        call = ServiceCall(line, peer(line), _read(line))
        name = call.arguments.get("call")
        if name not in CALLS:
            raise _argument_error("call", name, ", ".join(CALLS))
        leases = make()
        result = CALLS[name](leases, call)
        if isinstance(result, LeaseGrant):
            descriptors = result.descriptors
            data = {
                "lease": lifeline_text(result.lease),
                "considered": plain(result.considered),
                "why": result.why,
                "indices": dict(result.indices),
            }
            try:
                _send(line, {"answer": data}, descriptors)
            except OSError:  # the caller is gone: nothing else would end its lease
                with contextlib.suppress(GpukilnError):
                    leases.release(result.lease, call.who, force=True)
        elif isinstance(result, tuple):
            descriptors = result
            _send(line, {"answer": {}}, descriptors)
        else:
            _send(line, {"answer": result})
    except GpukilnError as error:
        _refuse(line, error)
    except (OSError, ValueError, RecursionError) as error:
        _refuse(line, UnavailableError(f"the lease service: {error}"))
    finally:
        for number in descriptors:
            os.close(number)


def peer(line: socket.socket) -> LeaseHolder:
    """The caller at the other end of a connection, from the kernel (unix(7), SO_PEERCRED).

    Raises:
        RefusedError: The caller is in another PID namespace, so its PID is unknown here.
    """
    size = struct.calcsize("3i")
    pid, uid, _gid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if pid <= 0:
        raise RefusedError(
            "the caller is in another PID namespace", hint="lease on the host, not in a container"
        )
    return LeaseHolder(user_name(uid), uid, pid=pid)


def _read(line: socket.socket) -> dict[str, Any]:
    """The call.

    Raises:
        UsageError: It is not a call, or too long.
    """
    until, data = time.monotonic() + READ_S, b""
    while b"\n" not in data:
        line.settimeout(max(until - time.monotonic(), 0.01))
        more = line.recv(MAX_BYTES)
        data += more
        if not more or len(data) > MAX_BYTES:
            raise UsageError(
                "the connection has no call", hint=f"wanted: one line of JSON of at most {MAX_BYTES} bytes"
            )
    line.settimeout(READ_S)
    try:
        call = parsing.parse_json(data.partition(b"\n")[0])
    except ValueError as error:
        raise UsageError(f"the call is not JSON: {str(error)[:80]}") from None
    if not isinstance(call, dict):
        raise UsageError("the call is not a JSON object")
    return call


def _send(line: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode() + b"\n"
    if descriptors:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        data = data[line.sendmsg([data], [rights]) :]
    if data:  # nothing is left where sendmsg() sent all: the caller may have closed the connection by now
        line.sendall(data)


def _refuse(line: socket.socket, error: GpukilnError) -> None:
    data = {
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "details": list(error.details),
    }
    with contextlib.suppress(OSError):  # the caller has closed the connection
        _send(line, {"error": data})


# ---- the service


@dataclasses.dataclass(frozen=True)
class SpareProcess:
    """A process that waits for a call; it ends with the service.

    Args:
        line: The socket over which it gets the connection.
    """

    pid: int
    line: socket.socket


def serve(
    listener: socket.socket,
    *,
    idle_s: float = IDLE_S,
    store: Callable[[], LeaseStore] = LeaseStore,
    make: Callable[[LeaseStore | None], Leases] = Leases,
) -> None:
    """Answer calls until there was none for some time; systemd starts the service again for the next one.

    Args:
        idle_s: Time without a call after which it ends.
        store: Opens the database before a call comes.
        make: Returns the leases of a database, with the configuration at the time of the call; for None it
            opens the database.
    """
    calls: dict[int, int] = {}  # UID by PID
    spares: list[SpareProcess] = []
    last = time.monotonic()
    while calls or time.monotonic() - last < idle_s:
        while len(spares) < SPARE_PROCESSES:
            spares.append(_start_spare([listener, *(spare.line for spare in spares)], store, make))
        ready = select.select([listener], [], [], 1.0)[0]
        for pid in [process for process in calls if os.waitpid(process, os.WNOHANG)[0]]:
            del calls[pid]
        if not ready:
            continue
        last = time.monotonic()
        with (
            contextlib.suppress(OSError),
            listener.accept()[0] as line,
        ):  # the caller has closed the connection
            uid = peer(line).uid if _has_peer(line) else -1
            if len(calls) >= MAX_CALLS or list(calls.values()).count(uid) >= MAX_CALLS_PER_USER:
                _refuse(
                    line, BusyError("too many calls wait for GPUs", hint="end some of the waiting commands")
                )
                continue
            pid = _hand_over(line, spares)
            if not pid:  # the spare processes were killed
                spares.append(_start_spare([listener, line], store, make))
                pid = _hand_over(line, spares)
            if pid:
                calls[pid] = uid
            else:
                _refuse(line, UnavailableError("the lease service could not start a process"))


def _has_peer(line: socket.socket) -> bool:
    try:
        peer(line)
    except RefusedError as error:
        _refuse(line, error)
        return False
    return True


def _hand_over(line: socket.socket, spares: list[SpareProcess]) -> int:
    """Pass a connection to a spare process; returns its PID, or 0 where none is alive."""
    while spares:
        spare = spares.pop(0)
        with spare.line:
            try:
                socket.send_fds(spare.line, [b"."], [line.fileno()])
            except OSError:  # the spare was killed
                os.waitpid(spare.pid, 0)
            else:
                return spare.pid
    return 0


def _start_spare(
    inherited: Iterable[socket.socket],
    store: Callable[[], LeaseStore],
    make: Callable[[LeaseStore | None], Leases],
) -> SpareProcess:
    """Start a process for the next call.

    Args:
        inherited: Sockets of the service, which the new process closes: while it had an end of another
            spare's socket open, that spare would not see the end of the service.
    """
    own_end, far_end = socket.socketpair()
    pid = os.fork()
    if pid:
        far_end.close()
        return SpareProcess(pid, own_end)
    code = 1
    try:
        for connection in (*inherited, own_end):
            connection.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        _await_call(far_end, store, make)
        code = 0
    finally:
        os._exit(code)


def _await_call(
    service: socket.socket, store: Callable[[], LeaseStore], make: Callable[[LeaseStore | None], Leases]
) -> None:
    """Wait for a call and answer it."""
    opened = None
    with contextlib.suppress(GpukilnError, OSError):  # the call opens it again and reports the error
        opened = store()
        opened.leases()  # fills SQLite's cache
    _, descriptors, _, _ = socket.recv_fds(service, 1, 1, socket.MSG_CMSG_CLOEXEC)
    for number in descriptors:
        with socket.socket(fileno=number) as line:
            answer(line, lambda: make(opened if opened and opened.is_current() else None))


@contextlib.contextmanager
def listening(path: Path | None) -> Iterator[socket.socket]:
    """The socket that systemd passed, else a new one at a path.

    Raises:
        UsageError: systemd passed no socket, and `path` is None.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        with socket.socket(fileno=FIRST_DESCRIPTOR) as listener:
            yield listener
        return
    if path is None:
        raise UsageError(
            "systemd starts the command serve", hint="systemctl enable --now gpukiln-gpu-leases.socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o117)  # read and write for root and the group of the folder
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
        yield listener


def main(argv: list[str]) -> int:
    """`gpukiln-gpu serve [--socket PATH]`; returns the exit code.

    Raises:
        RefusedError: The user is not root.
        UsageError: systemd did not start it, and --socket is missing.
    """
    given = argparse.ArgumentParser(prog="gpukiln-gpu serve", description=__doc__)
    given.add_argument(
        "--socket", help="listen on this path; default: the socket that systemd passes", metavar="PATH"
    )
    path = given.parse_args(argv).socket
    if os.geteuid() != 0:
        raise RefusedError(
            "only root can run serve, which answers other users", hint="sudo gpukiln-gpu serve --socket PATH"
        )
    with listening(Path(path) if path else None) as listener:
        serve(listener)
    return 0
