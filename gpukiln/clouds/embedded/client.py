"""Finds the embedded cloud's server, or starts it."""

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
from gpukiln.clouds.embedded.layout import ASKED_S, Layout, read_endpoint, set_aside
from gpukiln.clouds.embedded.version import code_version
from gpukiln.errors import BusyError, GpukilnError, RefusedError, UnavailableError, UsageError
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.sources.mirror import NAMESPACES
from gpukiln.ssh import HostKeys, Ssh
from gpukiln.typed import unknown

log = logging.getLogger(__name__)
START_S = 60  # seconds that the server gets to answer
ANSWER_S = 120  # seconds that it gets for what it is asked
SERVER = "gpukiln.clouds.embedded.server"
ANOTHER_RUNS = 75  # exit code of a server that finds another one
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
    """Ask the server how it is.

    Args:
        layout: The cloud's files.

    Returns:
        Its status with its url, or None when no server of this folder answers: a copied folder names the
        server of the one that it was copied from.
    """
    home = layout.identity()
    if home is None or not (url := read_endpoint(layout).get("url")):
        return None
    try:
        with urllib.request.urlopen(_request(layout, f"{url}/gpukiln/status"), timeout=10) as answer:  # noqa: S310 - our own
            status: dict[str, Any] = parse_json(answer.read())
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
    """Whether a server of this folder runs, be it that it answers or not."""
    if not layout.server_lock.exists():
        return False
    busy = BusyError("the embedded cloud's server runs", hint="`invoke cloud.stop` ends it")
    try:
        with locked(layout.server_lock, busy=busy, wait_s=ASKED_S):
            return False
    except BusyError:
        return True


def stop_server(layout: Layout) -> bool:
    """End the server and its machines.

    Args:
        layout: The cloud's files.

    Returns:
        Whether there was one.
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
        # its namespaces end after its lock is free
        if not server_runs(layout) and not any(_server_processes(layout)):
            return True
        time.sleep(0.1)
    raise UnavailableError("the embedded cloud's server does not end", hint=f"its log: {layout.server_log}")


def ask_server(layout: Layout, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the running server for something that no API of AWS has.

    Args:
        layout: The cloud's files.
        path: A path of the server's own, for example /gpukiln/interrupt.
        document: What it is told, as JSON.

    Returns:
        Its answer.

    Raises:
        GpukilnError: What the server raised.
        UnavailableError: No server runs, or it gave no answer.
    """
    status = server_status(layout)
    if status is None:
        raise UnavailableError(
            "the embedded cloud's server does not run, so it has no machines",
            hint="`invoke cloud.status` shows what there is; it starts with the next launch",
        )
    request = _request(layout, f"{status['url']}{path}", "POST", json.dumps(document).encode())
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 - our own
            found: dict[str, Any] = parse_json(answer.read())
            return found
    except urllib.error.HTTPError as refused:
        with refused:
            raise _error(refused.read(), refused) from refused
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnavailableError(
            f"the embedded cloud's server did not answer {path}: {error}",
            hint=f"its log: {layout.server_log}",
        ) from error


def _error(body: bytes, refused: Exception) -> GpukilnError:
    """The error that the server raised, of the same kind."""
    try:
        told = parse_json(body)["error"]
        kind = getattr(errors, told["kind"])
        error: GpukilnError = kind(told["message"], hint=told["hint"], details=tuple(told["details"]))
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
    """The processes that hold the namespaces of this folder's server, be it that it answers or not."""
    home = layout.identity()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"unshare" and SERVER.encode() in words:
                served = Path(os.fsdecode(words[words.index(SERVER.encode()) + 1]))
                if home and Layout(served).identity() == home:  # by whatever path
                    yield int(folder.name)


def _kill_server(layout: Layout) -> bool:
    """End a server that does not answer; its machines and mounts end with its namespaces."""
    for pid in _server_processes(layout):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def ensure_server(layout: Layout) -> dict[str, Any]:
    """The running server's status; it is started when there is none.

    Args:
        layout: The cloud's files.

    Returns:
        Its status with its url.

    Raises:
        UnavailableError: It can't run here or did not start.
    """
    check_host()
    layout.create()
    with locked(layout.root / "start.lock"):
        status = server_status(layout)
        if status is None and server_runs(layout):
            status = _wait_for_answer(layout)
        if status and status["code"] != code_version() and not status["machines"]:
            stop_server(layout)
            status = None
        if status is None:
            for line in prepare_files(layout):
                log.warning("warning: %s", line)
            status = _start_server(layout)
        return status


def prepare_files(layout: Layout) -> list[str]:
    """Make ready what a server reads when it starts; none may run.

    Returns:
        What was wrong and what was done.

    Raises:
        UnavailableError: Something can't be made again.
    """
    told = regions.mend(layout)
    last = read_endpoint(layout)
    if last and last.get("home") != layout.identity():
        told.append(f"{layout.home} is a copy: it gets a server, a port and an access key of its own")
        layout.endpoint.unlink()
        layout.new_access_key()
    elif layout.endpoint.is_symlink() or (layout.endpoint.exists() and not last):
        set_aside(layout.endpoint)
        told.append(f"{layout.endpoint} was damaged: `invoke cloud.env` prints the new settings of a shell")
    try:
        layout.access_key  # noqa: B018 - it is read to see whether it can be
    except UnavailableError as error:
        if layout.key_file.is_symlink() or layout.key_file.exists():
            set_aside(layout.key_file)
        layout.new_access_key()
        told.append(
            f"{error.message}, so another was made: `invoke cloud.env` prints the new settings of a shell"
        )
    base_image.check_generation(layout)
    return told


def _wait_for_answer(layout: Layout) -> dict[str, Any] | None:
    """A server that runs and can't be found writes its address again, or ends when its folder was moved."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server_runs(layout):
        if status := server_status(layout):
            return status
        time.sleep(0.2)
    if server_runs(layout):
        raise UnavailableError(
            "the embedded cloud's server runs and does not answer",
            hint=f"`invoke cloud.stop --force` ends it with its machines; its log: {layout.server_log}",
        )
    return None


def check_host() -> None:
    """Refuse a host that can't run machines.

    Raises:
        UnavailableError: Not Linux, not root, or a tool is missing.
    """
    remote = "`--cloud aws` needs none of this"
    if sys.platform != "linux":
        raise UnavailableError(f"the embedded cloud needs Linux, this is {sys.platform}", hint=remote)
    if os.geteuid() != 0:
        raise UnavailableError(
            "the embedded cloud boots machines, which needs root", hint=f"sudo scripts/run ...; {remote}"
        )
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        raise UnavailableError(
            f"the embedded cloud needs tools that are not installed: {', '.join(missing)}",
            hint=f"apt-get install {' '.join(missing)}, or call through scripts/run, which does it",
        )


def _start_server(layout: Layout) -> dict[str, Any]:
    # The server's own clients must not look at the user's AWS account.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    with layout.server_log.open("ab") as log:
        server = subprocess.Popen(
            [*NAMESPACES, sys.executable, "-m", SERVER, str(layout.home)],
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
