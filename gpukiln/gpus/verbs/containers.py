"""The verb args: options that pass the devices of a lease to a container or a systemd unit."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.gpus.client import open_leases
from gpukiln.gpus.collect import collect
from gpukiln.gpus.engines import (
    BY_CDI,
    CAPABILITIES,
    ENGINES,
    arguments,
    device_nodes,
    device_request,
    injection_method,
    memory_limit_error,
    read_engine,
    shell_quoted,
)
from gpukiln.gpus.leases import device_environment
from gpukiln.gpus.verb import Options, Verb
from gpukiln.options import Option
from gpukiln.units import Memory


@dataclass(frozen=True)
class ContainerArguments:
    """The options for a container engine or a unit.

    Args:
        engine: docker, podman, compose or systemd.
        by: For Docker and Podman cdi, hook or runtime; null for compose and systemd.
        devices: UUIDs.
        lines: Words of a command line; for compose and systemd the lines of a file.
        device_request: The DeviceRequest for Docker's API; null for other engines.
    """

    node: str
    engine: str
    by: str | None
    devices: tuple[str, ...]
    lines: tuple[str, ...]
    device_request: dict[str, Any] | None
    exit_code: int


def _args(options: Options) -> ContainerArguments:
    if options.engine not in ENGINES:
        raise UsageError(f"--engine {options.engine!r}", hint=f"known are {', '.join(ENGINES)}")
    # An option that no engine can keep exists to say so, with what limits memory; ignoring it would be a
    # promise.
    if options.gpu_memory_limit:
        raise memory_limit_error(
            Memory.parse(options.gpu_memory_limit, "--gpu-memory-limit").mib, collect().devices
        )
    lease = open_leases().find(options.lease) if options.lease else None
    if lease is None:
        raise UsageError(
            f"{options.lease or 'no lease'} is not an active lease",
            hint="`gpukiln-gpu leases` lists the active ones",
        )
    # AMD's containers need other device nodes, and none of these methods passes them.
    if "ROCR_VISIBLE_DEVICES" in device_environment(lease.uuids):
        raise IncompatibleError(
            "args does not support AMD's GPUs yet", hint="run `gpukiln-gpu run` without a container"
        )
    capabilities = [word.strip() for word in options.capabilities.split(",") if word.strip()]
    asked = options.engine in ("docker", "podman")
    # compose and systemd are files for another machine or a later time: no engine is asked.
    by = injection_method(read_engine(options.engine), lease.uuids) if asked else None
    allowed = device_nodes(lease.uuids, collect().devices) if options.engine == "systemd" else ()
    return ContainerArguments(
        socket.gethostname(),
        options.engine,
        by,
        lease.uuids,
        tuple(arguments(lease.uuids, options.engine, capabilities, by or BY_CDI, allowed)),
        device_request(lease.uuids, capabilities) if options.engine == "docker" else None,
        0,
    )


def _show(node: dict[str, Any], _: Options, print: Callable[[str], None]) -> None:
    if node["by"] is None:
        for line in node["lines"]:
            print(line)
    else:
        print(shell_quoted(node["lines"]))


VERBS = (
    Verb(
        "args",
        "Print the options that pass a lease's devices to a container, a Compose service or a systemd unit.",
        (
            Option("lease", "id of the lease, for example L-42", first=True),
            Option("engine", "docker, podman, compose or systemd", default="docker"),
            Option(
                "capabilities",
                "capabilities of the driver for the container, separated by commas",
                default=",".join(CAPABILITIES),
            ),
            Option("gpu_memory_limit", "not supported by any engine: prints the alternatives", value="8GiB"),
        ),
        _args,
        _show,
        examples=("L-42 --engine compose",),
    ),
)
