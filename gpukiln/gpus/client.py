"""Opens the leases of this machine with the rights of the user who runs this program.

Root opens the store itself. Members of the group `gpu` ask the service (`gpukiln.gpus.service`), which runs
as root and reads the caller's user from the socket.
"""

from __future__ import annotations

import array
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

from gpukiln import errors
from gpukiln.errors import GpukilnError, RefusedError, UnavailableError
from gpukiln.gpus.collect import collect
from gpukiln.gpus.leases import JOB, LeaseGrant, LeaseHolder, Leases
from gpukiln.gpus.model import Snapshot, plain
from gpukiln.gpus.selection import DeviceCandidate, DeviceRequest
from gpukiln.gpus.store import ENVIRONMENT, GROUP, Lease, folder, number_of, read_lifeline

SOCKET = "/run/gpukiln/gpus.sock"
SOCKET_ENVIRONMENT = "GPUKILN_GPUS_SOCKET"  # another path, for tests
# Locks in one answer: a lease has one and each of its devices one. Linux passes 253 at most (SCM_MAX_FD,
# unix(7)).
MAX_DESCRIPTORS = 128
START_HINT = "start it as root: systemctl enable --now gpukiln-gpu-leases.socket (role gpu_tools)"
# Evaluated when the module is imported, so Python 3.9 needs Union in place of |.
AnyLeases = Union[Leases, "MemberLeases"]


def open_leases() -> AnyLeases:
    """The leases of this machine.

    Raises:
        RefusedError: This user has no permission to lease.
        UnavailableError: The state can't be read, or the service does not answer.
    """
    path = socket_path()
    own = os.environ.get(ENVIRONMENT)
    # A state folder of the user's own, for tests: it protects no other user's GPUs.
    if os.geteuid() == 0 or (own and not path.exists()):
        return Leases()
    return MemberLeases(path)


def open_existing_leases() -> AnyLeases | None:
    """As `open_leases`; None where this machine has no leases yet. Creates nothing."""
    path = socket_path()
    if os.geteuid() == 0 or (os.environ.get(ENVIRONMENT) and not path.exists()):
        return Leases() if (folder() / "leases.db").exists() else None
    # The folder without the socket: the service is not set up, and the error says how to start it.
    return MemberLeases(path) if path.exists() or folder().exists() else None


def socket_path() -> Path:
    """The socket of the service."""
    return Path(os.environ.get(SOCKET_ENVIRONMENT) or SOCKET)


@dataclasses.dataclass(frozen=True)
class PlannedSelection:
    """What a request would get; as `Selection`, with what the service sends of it.

    Args:
        devices: Values with a `uuid`.
        possible: A None for each device that could ever serve it.
    """

    devices: tuple[Any, ...]
    possible: tuple[None, ...]
    why: str
    considered: tuple[DeviceCandidate, ...]


class MemberLeases:
    """The methods of `gpukiln.gpus.leases.Leases` for members of the group, who ask the service.

    Args:
        path: The service's socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.take_snapshot: Callable[[], Snapshot] = collect

    def current(self) -> list[Lease]:
        """The active leases."""
        return [read_lifeline(text) for text in self._request("current")["leases"]]

    def find(self, name: str) -> Lease | None:
        """An active lease by its id."""
        number = number_of(name)
        return next((lease for lease in self.current() if lease.number == number), None)

    def queue(self) -> list[dict[str, Any]]:
        """The requests that wait."""
        return list(self._request("queue")["waiting"])

    def ledger(self) -> list[dict[str, Any]]:
        """The ended uses."""
        return list(self._request("ledger")["uses"])

    def plan(self, request: DeviceRequest, _: Snapshot | None = None) -> PlannedSelection:
        """What a request would get now; nothing is changed."""
        answer = self._request("plan", request=plain(request))
        return PlannedSelection(
            tuple(SimpleNamespace(uuid=uuid) for uuid in answer["devices"]),
            (None,) * int(answer["possible"]),
            answer["why"],
            tuple(_candidate(data) for data in answer["considered"]),
        )

    def acquire(
        self,
        request: DeviceRequest,
        who: LeaseHolder,
        *,
        kind: str = JOB,
        hours: float | None = None,
        heartbeat_s: float | None = None,
        wait_s: float = 0.0,
        command: str = "",
        engine: str | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> LeaseGrant:
        """Lease devices, or wait for them; as `Leases.acquire`."""
        answer, descriptors = self._call(
            "acquire",
            on_wait,
            request=plain(request),
            project=who.project,
            kind=kind,
            hours=hours,
            heartbeat_s=heartbeat_s,
            wait_s=wait_s,
            command=command,
            engine=engine,
        )
        considered = tuple(_candidate(data) for data in answer["considered"])
        return LeaseGrant(
            read_lifeline(answer["lease"]), descriptors, considered, answer["why"], answer["indices"]
        )

    def release(
        self,
        lease: Lease,
        _: LeaseHolder,
        *,
        force: bool = False,
        energy: Mapping[str, float] | None = None,  # noqa: ARG002 - the service reads the counters itself
    ) -> bool:
        """End a lease; False where it had ended already."""
        return bool(self._request("release", lease=lease.number, force=force)["released"])

    def renew(self, lease: Lease, _: LeaseHolder, hours: float | None = None) -> Lease:
        """Extend a detached lease."""
        return read_lifeline(self._request("renew", lease=lease.number, hours=hours)["lease"])

    def set_job(self, lease: Lease, pid: int) -> None:
        """Record the process that runs under a lease."""
        self._request("began", lease=lease.number, pid=pid)

    def reconcile(self, _: LeaseHolder) -> list[str]:
        """Create leases for containers and processes without one; returns their ids."""
        return list(self._request("reconcile")["adopted"])

    def is_running(self, lease: Lease) -> bool:
        """Whether a process of the lease's job still holds its GPUs."""
        return bool(self._request("is_running", lease=lease.number)["running"])

    def share(self, lease: Lease) -> tuple[int, ...]:
        """Descriptors of locks by which one more command uses the GPUs of a lease."""
        return self._call("share", None, lease=lease.number)[1]

    def container_runs(self, lease: Lease) -> bool:
        """Whether the container of a lease runs."""
        from gpukiln.gpus.engines import is_container_running  # noqa: PLC0415 - needs no engine as a rule

        return is_container_running(lease)

    def is_owner(self, lease: Lease, who: LeaseHolder) -> bool:
        """Whether a user can end or renew a lease without --force."""
        return lease.uid == who.uid

    def energy_counters(self, _: Sequence[Lease]) -> dict[str, float]:
        """Empty: the service reads energy counters itself."""
        return {}

    def close(self) -> None:
        """Nothing to close: each call has a connection of its own."""

    def _request(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self._call(call, None, **arguments)[0]

    def _call(
        self, call: str, on_wait: Callable[[str], None] | None, **arguments: Any
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Send one call to the service; returns its answer and the descriptors that came with it."""
        descriptors: list[int] = []
        try:
            # One connection for each call: a connection that breaks costs one call, and the kernel names the
            # caller of each.
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(str(self._path))
                line.sendall(json.dumps({"call": call, **arguments}).encode() + b"\n")
                for message in _messages(line, descriptors):
                    # The answer of the call `queue` has a key `waiting` too.
                    if "waiting" in message and "answer" not in message:
                        if on_wait is not None:
                            on_wait(message["waiting"])
                    elif "error" in message:
                        raise _error(message["error"])
                    else:
                        return message["answer"], tuple(descriptors)
        except PermissionError as error:
            raise RefusedError(
                f"only root and the group {GROUP} have permission to lease this machine's GPUs",
                hint=f"run `usermod -aG {GROUP} USER` as root, then log in again",
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise RefusedError(
                f"only root can lease this machine's GPUs: no service listens on {self._path}",
                hint=START_HINT,
            ) from error
        # An older or newer service may answer in another form.
        except (OSError, ValueError, KeyError) as error:
            for number in descriptors:
                os.close(number)
            raise UnavailableError(
                f"{self._path}: {error}", hint="journalctl -u gpukiln-gpu-leases"
            ) from error
        except BaseException:
            for number in descriptors:
                os.close(number)
            raise
        raise UnavailableError(
            f"the service at {self._path} closed the connection without an answer",
            hint="journalctl -u gpukiln-gpu-leases",
        )


def _messages(line: socket.socket, descriptors: list[int]) -> Any:
    """Each message of the service; appends the descriptors that come with them."""
    rest = b""
    size = array.array("i").itemsize
    while True:
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * size)
        # Without CLOEXEC every program that is started meanwhile would inherit the locks.
        data, ancillary, _, _ = line.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                # A truncated message may end within a number.
                numbers.frombytes(content[: len(content) - len(content) % size])
                descriptors += numbers
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for text in lines:
            yield json.loads(text)


def _candidate(data: dict[str, Any]) -> DeviceCandidate:
    return DeviceCandidate(**{**data, "never": tuple(data["never"]), "not_now": tuple(data["not_now"])})


def _error(data: dict[str, Any]) -> GpukilnError:
    """The service's error as an exception of the same class."""
    kind = getattr(errors, str(data.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, GpukilnError)):
        kind = UnavailableError
    met: GpukilnError = kind(str(data["message"]), hint=str(data["hint"]), details=tuple(data["details"]))
    return met
