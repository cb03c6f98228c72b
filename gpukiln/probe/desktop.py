"""Gathers whether the browser desktop starts, and on which addresses it listens.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`. A running
desktop is only read; else that of the first user is started, then stopped, and its files are removed.
"""

from __future__ import annotations

import pwd
import re
import shutil
import time
from pathlib import Path
from typing import Any

from gpukiln.probe.base import run, tail
from gpukiln.probe.services import http_request

UNIT = "kasmvnc@{}.service"
PORT = re.compile(r"-websocketPort (\d+)")
START_S = 30.0
FIRST_USER = 1000  # the first uid of a human user (Debian Policy 9.2.2)
FILES = (".kasmpasswd", ".vnc", ".Xauthority")


def desktop() -> dict[str, Any]:
    """{unit, port, unit_of, listens, http, log}; the last four only where there is a unit.

    unit_of is the unit that was queried; listens the addresses of the open port.
    """
    said = run("systemctl", "cat", UNIT.format(""))
    port = PORT.search(said["out"])
    if said["rc"] or not port:
        return {"unit": False}
    running = run("systemctl", "list-units", "--plain", "--no-legend", "--state=active", UNIT.format("*"))[
        "out"
    ]
    if running.split():
        return _query_desktop(running.split()[0], int(port[1]))
    user = next((row for row in pwd.getpwall() if row.pw_uid == FIRST_USER), None)
    if user is None:
        return {"unit": True, "unit_of": None}
    created = [path for name in FILES if not (path := Path(user.pw_dir, name)).exists()]
    unit = UNIT.format(user.pw_name)
    try:
        run("systemctl", "start", unit)
        return _query_desktop(unit, int(port[1]))
    finally:
        run("systemctl", "stop", unit)
        # A failed unit would make systemd degraded, and the check boot.state fail.
        run("systemctl", "reset-failed", unit)
        for path in created:
            # Only files that did not exist before: the user's own settings stay.
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _query_desktop(unit: str, port: int) -> dict[str, Any]:
    until = time.monotonic() + START_S
    while not (listens := _listening_addresses(port)) and time.monotonic() < until:
        time.sleep(0.5)
    log = (
        "" if listens else run("journalctl", "--no-pager", "--lines=5", "--output=cat", "--unit", unit)["out"]
    )
    return {
        "unit": True,
        "unit_of": unit,
        "port": port,
        "listens": listens,
        "http": http_request(port, "/") if listens else None,
        "log": tail(log.strip(), 500),
    }


def _listening_addresses(port: int) -> list[str]:
    lines = run("ss", "-Hltn", f"sport = :{port}")["out"].splitlines()
    return sorted({line.split()[3].rpartition(":")[0].strip("[]") for line in lines})
