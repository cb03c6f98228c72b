"""Finds, starts, stops and calls the embedded cloud's server."""

import contextlib
import http.client
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpukiln import errors
from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded import regions
from gpukiln.clouds.embedded.layout import LOCK_PROBE_S, Layout, read_endpoint, set_aside
from gpukiln.clouds.embedded.version import code_version
from gpukiln.errors import BusyError, GpukilnError, RefusedError, UnavailableError, UsageError
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.sources.mirror import NAMESPACES
from gpukiln.ssh import HostKeys, Ssh
from gpukiln.typed import unknown

log = logging.getLogger(__name__)
START_S = 60  # seconds for a new server to answer
ANSWER_S = 120  # seconds for the answer to a request
SERVER = "gpukiln.clouds.embedded.server"
ANOTHER_RUNS = 75  # exit code of a server that finds another one running
# Program and the Debian package that has it.
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "slirp4netns": "slirp4netns",
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "sfdisk": "fdisk",
    "sgdisk": "gdisk",
    "grub-mkimage": "grub-common",
    "ip": "iproute2",
}


def server_status(layout: Layout) -> dict[str, Any] | None:
    """The status of the running server.

    Args:
        layout: The cloud's files.

    Returns: Its status with its URL, or None where no server of this folder answers: a copied folder has the
    address of the original folder's server.
    """
    home = layout.identity()
    if home is None or not (url := read_endpoint(layout).get("url")):
        return None
    try:
        with urllib.request.urlopen(_request(layout, f"{url}/gpukiln/status"), timeout=10) as answer:  # noqa: S310 - our own
            status: dict[str, Any] = parse_json(answer.read())
        # A server of a copied folder reports the original folder.
        served = {name: status["home"][name] for name in home}
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException, UnavailableError):
        return None
    return {**status, "url": url} if served == home else None


def machine_ids(layout: Layout) -> list[str]:
    """The machines of the server, the newest last; none where no server runs."""
    return [machine["instance_id"] for machine in (server_status(layout) or {}).get("machines", ())]


def find_machine(layout: Layout, name: str) -> str:
    """The id of a machine by its id, or by `last`.

    Raises:
        UsageError: There is no such machine.
    """
    ids = machine_ids(layout)
    if name == "last" and ids:
        return ids[-1]
    if name not in ids:
        raise unknown("machine", name, ids)
    return name


def running_machines(layout: Layout) -> list[dict[str, Any]]:
    """The machines that run, as the server describes them."""
    return [machine for machine in (server_status(layout) or {}).get("machines", ()) if machine["running"]]


def refuse_while_machines_run(layout: Layout, *, force: bool) -> None:
    """Raises RefusedError where a machine runs: a build's machine would be lost with the others."""
    running = [machine["instance_id"] for machine in running_machines(layout)]
    if running and not force:
        raise RefusedError(
            f"{len(running)} machine{'s run' if len(running) > 1 else ' runs'}: {', '.join(running[:5])}",
            hint="a build may need it; wait for its end, or --force",
        )


def ssh_to(layout: Layout, name: str, user: str, key: Path) -> Ssh:
    """SSH to a machine that runs, by its id or by `last`.

    Raises:
        UsageError: No such machine runs.
    """
    running = running_machines(layout)
    chosen = [machine for machine in running if name in ("last", machine["instance_id"])]
    if not chosen:
        raise UsageError(
            f"no running machine {name!r}" if running else "no machine runs",
            hint="`invoke cloud.status` lists them",
            details=tuple(machine["instance_id"] for machine in running),
        )
    machine = chosen[-1]
    return Ssh(
        machine["address"],
        machine["ssh_port"],
        user,
        private_key=key,
        host_keys=HostKeys.NEW_MACHINE,
    )


def server_runs(layout: Layout) -> bool:
    """Whether a server of this folder runs, even if it does not answer."""
    if not layout.server_lock.exists():
        return False
    busy = BusyError("the embedded cloud's server is running", hint="`invoke cloud.stop` stops it")
    try:
        with locked(layout.server_lock, busy=busy, wait_s=LOCK_PROBE_S):
            return False
    except BusyError:
        return True


def stop_server(layout: Layout) -> bool:
    """Stop the server and its machines.

    Args:
        layout: The cloud's files.

    Returns:
        Whether a server was running.
    """
    status = server_status(layout)
    if status is None and not _kill_server(layout) and not server_runs(layout):
        return False
    if status is not None:
        request = _request(layout, f"{status['url']}/gpukiln/stop", method="POST")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10):  # noqa: S310 - our own
            pass
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        # the lock is free before its namespaces have ended
        if not server_runs(layout) and not any(_server_processes(layout)):
            return True
        time.sleep(0.1)
    raise UnavailableError(
        "the embedded cloud's server did not stop within 120 s", hint=f"see its log: {layout.server_log}"
    )


def ask_server(layout: Layout, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Call the running server for what no API of AWS has.

    Args:
        layout: The cloud's files.
        path: One of the server's own paths, for example /gpukiln/interrupt.
        document: The request, sent as JSON.

    Returns:
        Its answer.

    Raises:
        GpukilnError: The error that the server raised.
        UnavailableError: No server runs, or it did not answer.
    """
    status = server_status(layout)
    if status is None:
        raise UnavailableError(
            "the embedded cloud's server is not running, so there are no machines",
            hint="`invoke cloud.status` shows what exists; the next launch starts the server",
        )
    request = _request(layout, f"{status['url']}{path}", "POST", json.dumps(document).encode())
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 - our own
            result: dict[str, Any] = parse_json(answer.read())
            return result
    except urllib.error.HTTPError as refused:
        with refused:
            raise _error_of(refused.read(), refused) from refused
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnavailableError(
            f"the embedded cloud's server did not answer {path}: {error}",
            hint=f"see its log: {layout.server_log}",
        ) from error


def _error_of(body: bytes, refused: Exception) -> GpukilnError:
    """The error that the server raised, as the same class."""
    try:
        document = parse_json(body)["error"]
        kind = getattr(errors, document["kind"])
        error: GpukilnError = kind(
            document["message"], hint=document["hint"], details=tuple(document["details"])
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        text = body.decode(errors="replace")[:200]
        return UnavailableError(f"the embedded cloud's server refused: {refused}: {text}")
    return error


def _request(
    layout: Layout, url: str, method: str = "GET", body: bytes | None = None
) -> urllib.request.Request:
    headers = {"Authorization": f"Credential={layout.access_key}/"}
    return urllib.request.Request(url, body, method=method, headers=headers)  # noqa: S310 - our own


def _server_processes(layout: Layout) -> Iterator[int]:
    """Processes that hold the namespaces of this folder's server, even if it does not answer."""
    home = layout.identity()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            # The server is PID 1 of its namespace; `unshare` is its parent outside, and killing it ends the
            # namespace.
            if words[0] == b"unshare" and SERVER.encode() in words:
                served = Path(os.fsdecode(words[words.index(SERVER.encode()) + 1]))
                if home and Layout(served).identity() == home:  # the same folder, by any path
                    yield int(folder.name)


def _kill_server(layout: Layout) -> bool:
    """Kill a server that does not answer; its machines and mounts end with its namespaces."""
    for pid in _server_processes(layout):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def ensure_server(layout: Layout) -> dict[str, Any]:
    """The status of the running server; starts one if none runs.

    Args:
        layout: The cloud's files.

    Returns:
        Its status with its URL.

    Raises:
        UnavailableError: It can't run on this computer, or did not start.
    """
    check_host()
    layout.create()
    # Two commands at once would start two servers.
    with locked(layout.root / "start.lock"):
        status = server_status(layout)
        if status is None and server_runs(layout):
            status = _wait_for_answer(layout)
        # A server of older code is replaced only when idle: its machines and its cluster end with it.
        idle = status and not status["machines"] and not status.get("cluster")
        if status and idle and status["code"] != code_version():
            stop_server(layout)
            status = None
        if status is None:
            for line in prepare_files(layout):
                log.warning("warning: %s", line)
            status = _start_server(layout)
        return status


def prepare_files(layout: Layout) -> list[str]:
    """Check and repair the files that a server reads when it starts; no server may be running.

    Returns:
        A line for each repair.

    Raises:
        UnavailableError: A file can't be repaired.
    """
    notices = regions.repair_files(layout)
    last = read_endpoint(layout)
    if last and last.get("home") != layout.identity():
        notices.append(f"{layout.home} is a copy: it gets its own server, port and access key")
        layout.endpoint.unlink()
        layout.new_access_key()
    elif layout.endpoint.is_symlink() or (layout.endpoint.exists() and not last):
        set_aside(layout.endpoint)
        notices.append(f"{layout.endpoint} was damaged: `invoke cloud.env` prints a shell's new settings")
    try:
        layout.access_key  # noqa: B018 - the property raises for a damaged file
    except UnavailableError as error:
        if layout.key_file.is_symlink() or layout.key_file.exists():
            set_aside(layout.key_file)
        layout.new_access_key()
        notices.append(
            f"{error.message}, so a new key was created: `invoke cloud.env` prints a shell's new settings"
        )
    base_image.check_generation(layout)
    return notices


def _wait_for_answer(layout: Layout) -> dict[str, Any] | None:
    """Wait for a server whose address is damaged: it writes it again, or ends if its folder was moved."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server_runs(layout):
        if status := server_status(layout):
            return status
        time.sleep(0.2)
    if server_runs(layout):
        raise UnavailableError(
            "the embedded cloud's server is running but does not answer",
            hint=f"`invoke cloud.stop --force` kills it with its machines; its log: {layout.server_log}",
        )
    return None


def check_host() -> None:
    """Check that this computer can run machines.

    Raises:
        UnavailableError: Not Linux, not root, or a tool is missing.
    """
    remote = "`--cloud aws` needs none of this"
    if sys.platform != "linux":
        raise UnavailableError(f"the embedded cloud needs Linux, and this is {sys.platform}", hint=remote)
    if os.geteuid() != 0:
        raise UnavailableError(
            "the embedded cloud boots machines and therefore needs root",
            hint=f"sudo scripts/run ...; {remote}",
        )
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        raise UnavailableError(
            f"the embedded cloud needs tools that are not installed: {', '.join(missing)}",
            hint=f"apt-get install {' '.join(missing)}, or use scripts/run, which installs them",
        )


def _start_server(layout: Layout) -> dict[str, Any]:
    # Clients inside the server must not use the user's AWS account.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    with layout.server_log.open("ab") as log:
        server = subprocess.Popen(
            [*NAMESPACES, sys.executable, "-m", SERVER, str(layout.home)],
            # The caller's working folder may be removed or unmounted while the server runs.
            cwd="/",
            env={**environment, "PYTHONPATH": str(_source_root())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() in (None, ANOTHER_RUNS) and (status := server_status(layout)):
            return status
        if server.poll() not in (None, ANOTHER_RUNS):
            break
        time.sleep(0.1)
    tail = layout.server_log.read_text(errors="replace").splitlines()[-5:]
    raise UnavailableError(
        f"the embedded cloud's server did not start (log: {layout.server_log})", details=tuple(tail)
    )


def _source_root() -> str:
    import gpukiln  # noqa: PLC0415

    return str(next(iter(gpukiln.__path__)).rsplit("/", 1)[0])
