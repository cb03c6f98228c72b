"""The leases of this machine as whoever runs this program may use them.

Root has them at hand. Members of the group `gpu` ask the service (`gpukiln.gpus.service`), which runs as root
and knows by the socket who asks.
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
SOCKET_ENVIRONMENT = "GPUKILN_GPUS_SOCKET"  # another one, for tests
MAX_DESCRIPTORS = 128
START_HINT = "root starts it: systemctl enable --now gpukiln-gpu-leases.socket (role gpu_tools)"
AnyLeases = Union[Leases, "MemberLeases"]


def open_leases() -> AnyLeases:
    """The leases of this machine.

    Raises:
        RefusedError: This user may not lease.
        UnavailableError: The state can't be read, or the service does not answer.
    """
    path = socket_path()
    own = os.environ.get(ENVIRONMENT)
    if os.geteuid() == 0 or (own and not path.exists()):
        return Leases()  # a folder of their own keeps nobody else's GPUs
    return MemberLeases(path)


def open_existing_leases() -> AnyLeases | None:
    """As `open_leases`; None where nobody keeps any on this machine."""
    path = socket_path()
    if os.geteuid() == 0 or (os.environ.get(ENVIRONMENT) and not path.exists()):
        return Leases() if (folder() / "leases.db").exists() else None
    return MemberLeases(path) if path.exists() or folder().exists() else None


def socket_path() -> Path:
    """Where the service listens."""
    return Path(os.environ.get(SOCKET_ENVIRONMENT) or SOCKET)


@dataclasses.dataclass(frozen=True)
class PlannedSelection:
    """What a request would get; as `Selection`, without what only the service knows.

    Args:
        devices: With their UUIDs.
        possible: One each for those that could ever serve it.
    """

    devices: tuple[Any, ...]
    possible: tuple[None, ...]
    why: str
    considered: tuple[DeviceCandidate, ...]


class MemberLeases:
    """Leases of a member of the group, by the service. As `gpukiln.gpus.leases.Leases`.

    Args:
        path: Of its socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.take_snapshot: Callable[[], Snapshot] = collect

    def current(self) -> list[Lease]:
        """The leases that hold."""
        return [read_lifeline(text) for text in self._request("current")["leases"]]

    def find(self, name: str) -> Lease | None:
        """A lease that holds, by its id."""
        number = number_of(name)
        return next((lease for lease in self.current() if lease.number == number), None)

    def queue(self) -> list[dict[str, Any]]:
        """Who waits."""
        return list(self._request("queue")["waiting"])

    def ledger(self) -> list[dict[str, Any]]:
        """Every use that has ended."""
        return list(self._request("ledger")["uses"])

    def plan(self, request: DeviceRequest, _: Snapshot | None = None) -> PlannedSelection:
        """What a request would get now; nothing is changed."""
        said = self._request("plan", request=plain(request))
        return PlannedSelection(
            tuple(SimpleNamespace(uuid=uuid) for uuid in said["devices"]),
            (None,) * int(said["possible"]),
            said["why"],
            tuple(_candidate(data) for data in said["considered"]),
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
        """Have devices, or wait for them; as `Leases.acquire`."""
        said, descriptors = self._call(
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
        considered = tuple(_candidate(data) for data in said["considered"])
        return LeaseGrant(read_lifeline(said["lease"]), descriptors, considered, said["why"], said["indices"])

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
        """Let a detached lease go on."""
        return read_lifeline(self._request("renew", lease=lease.number, hours=hours)["lease"])

    def set_job(self, lease: Lease, pid: int) -> None:
        """Write down the process that runs under a lease."""
        self._request("began", lease=lease.number, pid=pid)

    def reconcile(self, _: LeaseHolder) -> list[str]:
        """Write leases for what runs without; returns their ids."""
        return list(self._request("reconcile")["adopted"])

    def is_running(self, lease: Lease) -> bool:
        """Whether anything of a lease's job still has its GPUs."""
        return bool(self._request("is_running", lease=lease.number)["running"])

    def share(self, lease: Lease) -> tuple[int, ...]:
        """Descriptors of locks by which one more command has the GPUs of a lease."""
        return self._call("share", None, lease=lease.number)[1]

    def container_runs(self, lease: Lease) -> bool:
        """Whether the container of a lease runs."""
        from gpukiln.gpus.engines import is_container_running  # noqa: PLC0415 - needs no engine as a rule

        return is_container_running(lease)

    def is_owner(self, lease: Lease, who: LeaseHolder) -> bool:
        """Whether this user may end or renew a lease without force."""
        return lease.uid == who.uid

    def energy_counters(self, _: Sequence[Lease]) -> dict[str, float]:
        """Nothing: the service reads energy counters itself."""
        return {}

    def close(self) -> None:
        """Close what is open: nothing is, between two calls."""

    def _request(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self._call(call, None, **arguments)[0]

    def _call(
        self, call: str, on_wait: Callable[[str], None] | None, **arguments: Any
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Ask the service one thing: its answer, and the descriptors that came with it."""
        descriptors: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(str(self._path))
                line.sendall(json.dumps({"call": call, **arguments}).encode() + b"\n")
                for message in _messages(line, descriptors):
                    if "waiting" in message and "answer" not in message:
                        if on_wait is not None:
                            on_wait(message["waiting"])
                    elif "error" in message:
                        raise _error(message["error"])
                    else:
                        return message["answer"], tuple(descriptors)
        except PermissionError as error:
            raise RefusedError(
                f"only root and the group {GROUP} may lease this machine's GPUs",
                hint=f"become a member: `usermod -aG {GROUP} USER` as root, then log in again",
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise RefusedError(
                f"only root may lease this machine's GPUs: no service answers at {self._path}",
                hint=START_HINT,
            ) from error
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
            f"{self._path} ended without an answer", hint="journalctl -u gpukiln-gpu-leases"
        )


def _messages(line: socket.socket, descriptors: list[int]) -> Any:
    """Each message of the service; descriptors come with them."""
    rest = b""
    size = array.array("i").itemsize
    while True:
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * size)
        data, ancillary, _, _ = line.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % size])
                descriptors += numbers
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for text in lines:
            yield json.loads(text)


def _candidate(data: dict[str, Any]) -> DeviceCandidate:
    return DeviceCandidate(**{**data, "never": tuple(data["never"]), "not_now": tuple(data["not_now"])})


def _error(said: dict[str, Any]) -> GpukilnError:
    """The error that the service met, as if it had been met here."""
    kind = getattr(errors, str(said.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, GpukilnError)):
        kind = UnavailableError
    met: GpukilnError = kind(str(said["message"]), hint=str(said["hint"]), details=tuple(said["details"]))
    return met
