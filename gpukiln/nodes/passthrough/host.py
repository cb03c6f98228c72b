"""What no API of Proxmox VE reports: the host's drivers, kernel arguments and leases."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

from gpukiln import programs
from gpukiln.errors import UnavailableError
from gpukiln.gpus import store
from gpukiln.nodes.gpus import NOT_FOUND, PROGRAM
from gpukiln.parsing import parse_json
from gpukiln.probe import passthrough
from gpukiln.ssh import parse_ssh

ROOT = "/"


@dataclass(frozen=True)
class Host:
    """A host as its kernel knows it.

    Args:
        devices: By address, as `gpukiln.probe.passthrough` returns them.
        gpus: Addresses of the GPUs that the loaded NVIDIA driver has, by UUID.
        users: Processes that have such a GPU open, by address.
        leases: As `gpukiln-gpu leases --json` prints them; empty for a host without gpukiln-gpu.
    """

    name: str
    kernel: str
    cmdline: str
    groups: int
    devices: dict[str, dict[str, Any]]
    gpus: dict[str, str] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=dict)
    leases: tuple[dict[str, Any], ...] = ()


def inspect_host(ssh: str) -> Host:
    """Look at a host.

    Args:
        ssh: `ssh://[USER@]HOST[:PORT]`, or empty for this machine.

    Raises:
        UnavailableError: It can't be reached or read.
    """
    if not ssh:
        facts = passthrough.read_host(ROOT)
    else:
        # The module is sent on standard input: nothing is installed on a hypervisor.
        source = inspect.getsource(passthrough)
        # `python3 -` reads the program from standard input; the argument is the root of /proc and /sys.
        command = parse_ssh(ssh).command(f"python3 - {ROOT}", terminal=False)
        done = programs.run(command, limit_s=programs.QUICK_S, given=source.encode())
        if done.returncode:
            output = " ".join(done.stderr.decode(errors="replace").split())[-300:]
            raise UnavailableError(
                f"{ssh} can't be inspected: {output}", hint="try `ssh` by hand; it needs python3"
            )
        facts = parse_json(done.stdout)
    return Host(
        name=facts["host"],
        kernel=facts["kernel"],
        cmdline=facts["cmdline"],
        groups=facts["groups"],
        devices=facts["devices"],
        gpus=facts["gpus"],
        users=facts["users"],
        leases=_leases(ssh),
    )


def _leases(ssh: str) -> tuple[dict[str, Any], ...]:
    if ssh:
        command = parse_ssh(ssh).command(f"{PROGRAM} leases --json", terminal=False)
    elif (store.folder() / "leases.db").exists():
        command = [sys.executable, "-m", "gpukiln.gpus", "leases", "--json"]
    else:  # asking would make the database
        return ()
    done = programs.run(command, limit_s=programs.QUICK_S)
    errors = done.stderr.decode(errors="replace")
    # A hypervisor without gpukiln-gpu has no leases.
    if done.returncode == NOT_FOUND or "No such file" in errors:
        return ()
    try:
        document = parse_json(done.stdout)
        return tuple(lease for node in document["nodes"] for lease in node["leases"])
    except (ValueError, KeyError) as error:
        output = " ".join((errors or done.stdout.decode(errors="replace")).split())[-300:]
        raise UnavailableError(
            f"the leases of {ssh or 'this host'} can't be read: {output}",
            hint="`gpukiln-gpu leases --rebuild` on the host repairs them",
        ) from error
