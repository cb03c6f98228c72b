"""Finds the embedded cloud's server, or starts it."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.version import code_version
from gpukiln.errors import UnavailableError
from gpukiln.images.mirror import NAMESPACES

START_S = 60  # seconds that the server gets to answer
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
        Its status with its url, or None when no server runs.
    """
    try:
        url = str(json.loads(layout.endpoint.read_text())["url"])
        with urllib.request.urlopen(f"{url}/gpukiln/status", timeout=10) as answer:  # noqa: S310 - our own
            status: dict[str, Any] = json.load(answer)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {**status, "url": url}


def stop_server(layout: Layout) -> bool:
    """End the server and its machines.

    Args:
        layout: The cloud's files.

    Returns:
        Whether there was one.
    """
    status = server_status(layout)
    if status is None:
        return _kill_server(layout)
    request = urllib.request.Request(  # noqa: S310 - our own
        f"{status['url']}/gpukiln/stop",
        method="POST",
        headers={"Authorization": f"Credential={layout.access_key}/"},
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10):  # noqa: S310
        pass
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with layout.server_lock.open("a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.1)
    raise UnavailableError("the embedded cloud's server does not end", hint=f"its log: {layout.server_log}")


def _kill_server(layout: Layout) -> bool:
    """End a server that does not answer; its machines and mounts end with its namespaces."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"unshare" and SERVER.encode() in words and str(layout.home).encode() in words:
                os.kill(int(folder.name), signal.SIGKILL)
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
    with (layout.root / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = server_status(layout)
        if status and status["code"] != code_version() and not status["machines"]:
            stop_server(layout)
            status = None
        return status or _start_server(layout)


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
