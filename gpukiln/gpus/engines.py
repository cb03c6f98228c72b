"""GPUs in containers: renders devices for each container engine, by the method that the engine supports.

Docker passes GPUs to a container by CDI (from 25 on where it is configured, from 28.2 on by default,
docker/docs#22926), by NVIDIA's hook on its daemon's PATH (`--gpus`), or by the runtime `nvidia`; Podman by
CDI.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.gpus.model import Device
from gpukiln.parsing import parse_json

if TYPE_CHECKING:
    from gpukiln.gpus.leases import LeaseGrant
    from gpukiln.gpus.store import Lease

ENGINES = ("docker", "podman", "compose", "systemd")
LABEL = "gpukiln.lease"
CAPABILITIES = ("compute", "utility")
# NVIDIA_DRIVER_CAPABILITIES (NVIDIA/libnvidia-container, nvidia-container-cli(1)); `gpu` is Docker's own.
KNOWN_CAPABILITIES = ("compute", "compat32", "graphics", "utility", "video", "display", "ngx")
ALL = "all"  # in place of UUIDs: every GPU of the machine, for services that run without a lease
CDI_KIND = "nvidia.com/gpu"
CDI_FILES = ("/etc/cdi/*.yaml", "/etc/cdi/*.json", "/var/run/cdi/*.yaml", "/var/run/cdi/*.json")
# Names of NVIDIA's hook in different versions of its toolkit.
HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
# Leases name devices by UUID; the default of nvidia-ctk names them by index.
GENERATE_COMMAND = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml --device-name-strategy=uuid"
QUERY_S = 20.0  # for one command of an engine; its daemon may hang
BY_CDI, BY_HOOK, BY_RUNTIME = "cdi", "hook", "runtime"


@dataclass(frozen=True)
class ContainerEngine:
    """What an engine supports for GPUs.

    Args:
        name: docker or podman.
        runtimes: Names of its OCI runtimes.
        cdi_devices: Names of devices in its CDI specifications, without their kind.
        hook: Whether NVIDIA's hook is on this process's PATH; the daemon's PATH may differ.
        toolkit: Whether nvidia-ctk is installed, which generates specifications.
    """

    name: str
    version: str
    runtimes: tuple[str, ...]
    cdi_devices: frozenset[str]
    hook: bool
    toolkit: bool


@dataclass(frozen=True)
class RunningContainer:
    """A running container that has GPUs.

    Args:
        uuids: Its devices.
        lease: The lease in its label; empty where it has none.
    """

    engine: str
    id: str
    image: str
    uuids: tuple[str, ...]
    lease: str


def _output_of(*argv: str) -> str:
    """The output of an engine's command.

    Raises:
        UnavailableError: The engine is not installed, does not answer, or fails.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except FileNotFoundError:
        raise UnavailableError(f"{argv[0]} is not installed", hint=f"install {argv[0]}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"{argv[0]} does not answer within {QUERY_S:.0f} s",
            hint=f"check its service: systemctl status {argv[0]}",
        ) from None
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split())[-300:]
        raise UnavailableError(f"{' '.join(argv[:3])}: {output}", hint=f"systemctl status {argv[0]}")
    return done.stdout


def cdi_devices(patterns: Sequence[str] = CDI_FILES) -> frozenset[str]:
    """Names of the GPUs in this machine's CDI specifications (CDI's SPEC.md: `kind`, `devices[].name`)."""
    names: set[str] = set()
    for pattern in patterns:
        for path in glob.glob(pattern):  # noqa: PTH207 - patterns are whole paths
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            # By pattern: gpukiln-gpu parses YAML only where PyYAML is packed, and the two keys are enough.
            if not re.search(rf"[\"']?kind[\"']?: *[\"']?{re.escape(CDI_KIND)}\b", text):
                continue
            # The last containerEdits of a JSON document are those of all devices: no device follows.
            devices = text[: text.rfind("containerEdits")] if path.endswith(".json") else text
            names |= set(re.findall(r"(?m)[\"']?\bname[\"']?: *[\"']?([A-Za-z0-9:._-]+)", devices))
    return frozenset(names)


def read_engine(name: str) -> ContainerEngine:
    """Ask an engine what it supports.

    Raises:
        UnavailableError: The engine does not answer.
    """
    if name == "podman":
        info = parse_json(_output_of("podman", "info", "--format", "json"))
        version = str(info.get("version", {}).get("Version", ""))
        return ContainerEngine(
            name, version, (), cdi_devices(), False, shutil.which("nvidia-ctk") is not None
        )
    info = parse_json(_output_of("docker", "info", "--format", "{{json .}}"))
    # `docker info` reports a daemon that does not run in its output.
    if errors := info.get("ServerErrors"):
        raise UnavailableError(f"docker: {'; '.join(errors)}", hint="systemctl status docker")
    listed = info.get("DiscoveredDevices")
    if listed is not None:  # Docker 28.2 and later
        names = [str(device.get("ID", "")) for device in listed if device.get("Source") == "cdi"]
        devices = frozenset(name.partition("=")[2] for name in names if name.startswith(f"{CDI_KIND}="))
    else:
        folders = info.get("CDISpecDirs") or ()  # Docker 25 to 28.1; empty where CDI is off
        devices = cdi_devices([f"{folder}/*.{end}" for folder in folders for end in ("yaml", "json")])
    return ContainerEngine(
        name,
        str(info.get("ServerVersion", "")),
        tuple(sorted(info.get("Runtimes") or {})),
        devices,
        any(shutil.which(hook) for hook in HOOKS),
        shutil.which("nvidia-ctk") is not None,
    )


def injection_method(engine: ContainerEngine, uuids: Sequence[str]) -> str:
    """How an engine passes these devices to a container: cdi, hook or runtime.

    Raises:
        UnavailableError: The engine has no method; the hint says how to install one.
    """
    missing = [uuid for uuid in uuids if uuid not in engine.cdi_devices]
    if engine.cdi_devices and not missing:
        return BY_CDI
    # The hook before the runtime: it takes the lease's devices even where the image sets
    # NVIDIA_VISIBLE_DEVICES.
    if engine.name == "docker" and engine.hook:
        return BY_HOOK
    if engine.name == "docker" and "nvidia" in engine.runtimes:
        return BY_RUNTIME
    if engine.cdi_devices:
        raise UnavailableError(
            f"{engine.name}'s CDI specification does not name {', '.join(missing)}",
            details=(f"it names {', '.join(sorted(engine.cdi_devices))}",),
            hint=f"it names indices, or MIG has changed since; generate it again: {GENERATE_COMMAND}",
        )
    if engine.name == "podman":
        hint = (
            GENERATE_COMMAND
            if engine.toolkit
            else f"install nvidia-container-toolkit, then {GENERATE_COMMAND}"
        )
        raise UnavailableError("podman has no CDI specification of NVIDIA's GPUs", hint=hint)
    raise UnavailableError(
        f"docker {engine.version} can't use GPUs: it has no hook and no runtime of NVIDIA, and no CDI "
        "specification",
        hint="install nvidia-container-toolkit (role nvidia_container_toolkit), then "
        "`nvidia-ctk runtime configure` and restart docker",
    )


def check_capabilities(capabilities: Sequence[str]) -> tuple[str, ...]:
    """The driver's capabilities for a container, without Docker's own `gpu`.

    >>> check_capabilities(["gpu", "video", "video"])
    ('video',)
    >>> check_capabilities([])
    ('compute', 'utility')

    Raises:
        UsageError: A capability is unknown.
    """
    chosen = tuple(dict.fromkeys(capability for capability in capabilities if capability != "gpu"))
    if unknown := [capability for capability in chosen if capability not in KNOWN_CAPABILITIES]:
        raise UsageError(
            f"--capabilities has {unknown[0]!r}", hint=f"known are {', '.join(KNOWN_CAPABILITIES)}"
        )
    return chosen or CAPABILITIES


def device_request(uuids: Sequence[str], capabilities: Sequence[str] = CAPABILITIES) -> dict[str, Any]:
    """Docker's DeviceRequest for its API and SDK; the capability `gpu` selects NVIDIA's driver."""
    words = ["gpu", *check_capabilities(capabilities)]
    return {"Driver": "nvidia", "DeviceIDs": list(uuids), "Capabilities": [words]}


def device_nodes(uuids: Sequence[str], devices: Sequence[Device]) -> list[str]:
    """The device nodes that a unit needs for these devices, as systemd's DeviceAllow takes them.

    Raises:
        UnavailableError: The node of a device is not known.
    """
    # The nodes themselves: the class char-nvidia would allow every GPU, and has another name in /proc/devices
    # from driver 550 on (NVIDIA/nvidia-container-toolkit#324).
    known = {entry.uuid: entry for entry in devices if entry.uuid}
    rules: dict[str, None] = {}
    for uuid in uuids:
        device = known.get(uuid)
        whole = known.get(device.parent) if device and device.parent else device
        if device is None or whole is None or whole.minor is None:
            raise UnavailableError(
                f"the device node of {uuid} is not known",
                hint="`gpukiln-gpu show` prints what the driver reports",
            )
        rules[f"/dev/nvidia{whole.minor}"] = None
        if device.kind == "mig":
            # MIG devices share their GPU's node. The numbers of their capabilities are assigned by the
            # kernel, so the whole class is allowed.
            rules["char-nvidia-caps"] = None
    return list(rules)


def arguments(
    uuids: Sequence[str],
    engine: str,
    capabilities: Sequence[str] = CAPABILITIES,
    by: str = BY_CDI,
    allowed: Sequence[str] = (),
) -> list[str]:
    """The options that pass devices to a container of an engine, or to a systemd unit.

    Args:
        uuids: Of GPUs or MIG devices; for compose also ALL alone.
        engine: One of ENGINES.
        by: For Docker, the result of `injection_method`.
        allowed: For systemd, the result of `device_nodes`.

    Returns:
        Words of a command line; for compose and systemd the lines of a file.

    Raises:
        UsageError: A capability is unknown, or the engine does not let it be chosen.
    """
    chosen = check_capabilities(capabilities)
    if engine == "compose":
        named = "count: all" if [*uuids] == [ALL] else f"device_ids: {json.dumps(list(uuids))}"
        return [
            "deploy:",
            "  resources:",
            "    reservations:",
            "      devices:",
            "        - driver: nvidia",
            f"          {named}",
            f"          capabilities: {json.dumps(['gpu', *chosen])}",
        ]
    asked = engine in ("docker", "podman")
    if set(chosen) != set(CAPABILITIES) and (engine == "systemd" or (asked and by == BY_CDI)):
        raise UsageError(
            f"--capabilities {','.join(chosen)} for {engine}" + (", which uses GPUs by CDI" if asked else ""),
            hint="leave --capabilities out: a CDI specification fixes them, a unit has all",
        )
    if engine == "systemd":
        shared = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
        return [
            # A unit sees the host's numbering of GPUs, unlike a container.
            f"Environment=CUDA_VISIBLE_DEVICES={','.join(uuids)}",
            *(f"DeviceAllow={node} rw" for node in (*shared, *allowed)),
        ]
    # In a container GPUs are numbered from 0: no CUDA_VISIBLE_DEVICES with the host's indices is set there.
    if engine == "podman" or by == BY_CDI:
        return [word for uuid in uuids for word in ("--device", f"{CDI_KIND}={uuid}")]
    if by == BY_RUNTIME:
        return [
            *("--runtime", "nvidia"),
            *("--env", f"NVIDIA_VISIBLE_DEVICES={','.join(uuids)}"),
            *("--env", f"NVIDIA_DRIVER_CAPABILITIES={','.join(chosen)}"),
        ]
    # Docker reads the value as a line of CSV (docker/cli, opts/gpus.go): fields with commas need quotes.
    return ["--gpus", f'"device={",".join(uuids)}","capabilities={",".join(chosen)}"']


def container_command(granted: LeaseGrant, engine: str, image: str, command: Sequence[str]) -> list[str]:
    """The command line that runs an image on the devices of a lease.

    Raises:
        UnavailableError: The engine can't pass the devices to a container.
    """
    uuids = granted.uuids
    given = arguments(uuids, engine, by=injection_method(read_engine(engine), uuids))
    # Docker refuses --tty where standard input is not a terminal.
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    name = f"{LABEL}={granted.lease.id}"
    return [engine, "run", "--rm", "--interactive", *terminal, "--label", name, *given, image, *command]


def memory_limit_error(limit_mib: int, devices: Sequence[Device]) -> IncompatibleError:
    """The error that no engine limits the memory of a GPU, with the alternatives."""
    fits = sorted(
        {
            (device.memory_total_mib, device.profile)
            for device in devices
            if device.kind == "mig" and device.profile and (device.memory_total_mib or 0) >= limit_mib
        }
    )
    instead = [
        f"a MIG device {fits[0][1]} of {fits[0][0]} MiB: --mig {fits[0][1]}"
        if fits
        else "a MIG device of that size, where the board has MIG: gpukiln-gpu mig",
        "MPS with CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, which limits its clients",
        "a budget that users of leases keep by agreement: --shared --memory",
    ]
    return IncompatibleError(
        f"no container engine limits a GPU's memory to {limit_mib} MiB",
        details=tuple(instead),
        hint="use one of these",
    )


def is_container_running(lease: Lease) -> bool:
    """Whether the container of a lease runs; true where its engine does not answer."""
    engine = lease.engine or "docker"
    asked = f"id={lease.container}" if lease.container else f"label={LABEL}={lease.id}"
    try:
        return bool(_output_of(engine, "ps", "--quiet", "--no-trunc", "--filter", asked).split())
    except UnavailableError:
        return True


def kill_container(lease: Lease) -> None:
    """Kill the container of a lease, if it runs.

    Raises:
        UnavailableError: Its engine does not answer.
    """
    engine = lease.engine or "docker"
    if ids := _output_of(
        engine, "ps", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={lease.id}"
    ).split():
        _output_of(engine, "kill", *ids)


def running_containers(devices: Sequence[Device]) -> list[RunningContainer]:
    """The running containers of Docker and Podman that have GPUs.

    Args:
        devices: The machine's, to resolve `all`, indices and device nodes.
    """
    rows = []
    for engine in ("docker", "podman"):
        if shutil.which(engine) is None:
            continue
        try:
            ids = _output_of(engine, "ps", "--quiet", "--no-trunc").split()
            listed = parse_json(_output_of(engine, "inspect", *ids)) if ids else []
        except UnavailableError as error:
            print(f"{engine}: its containers are not examined: {error.message}", file=sys.stderr)
            continue
        for container in listed:
            if uuids := devices_of_container(container, devices):
                labels = container.get("Config", {}).get("Labels") or {}
                image = str(container.get("Config", {}).get("Image", ""))
                rows.append(
                    RunningContainer(engine, str(container["Id"]), image, uuids, labels.get(LABEL, ""))
                )
    return rows


def devices_of_container(container: dict[str, Any], devices: Sequence[Device]) -> tuple[str, ...]:
    """UUIDs of a container's devices, from the output of `inspect`."""
    host, config = container.get("HostConfig") or {}, container.get("Config") or {}
    named: list[str] = []
    # Docker keeps the request: names of devices, or a count, which stands for the first ones (moby/moby,
    # daemon/nvidia_linux.go).
    for request in host.get("DeviceRequests") or ():
        granted = [word for words in request.get("Capabilities") or () for word in words]
        ids = [str(id) for id in request.get("DeviceIDs") or ()]
        count = int(request.get("Count") or 0)
        if request.get("Driver") == "cdi":
            named += [id.partition("=")[2] for id in ids if id.startswith(f"{CDI_KIND}=")]
        elif request.get("Driver") == "nvidia" or "gpu" in granted:
            named += ids or (
                ["all"] if count < 0 else [str(number) for number in range(min(count, len(devices)))]
            )
    # Podman keeps the command that created the container, and the device nodes that CDI added
    # (containers/podman, libpod/container_inspect_linux.go).
    for word in config.get("CreateCommand") or ():
        named += re.findall(rf"{re.escape(CDI_KIND)}=([A-Za-z0-9:._-]+)", str(word))
    if host.get("Runtime") == "nvidia":
        for pair in config.get("Env") or ():
            name, _, value = str(pair).partition("=")
            if name == "NVIDIA_VISIBLE_DEVICES":
                named += value.split(",")
    if not named:
        paths = [str(device.get("PathOnHost", "")) for device in host.get("Devices") or ()]
        named = [path for path in paths if re.fullmatch(r"/dev/nvidia\d+", path)]
    return tuple(dict.fromkeys(uuid for name in named for uuid in _devices_named(name, devices)))


def _devices_named(name: str, devices: Sequence[Device]) -> list[str]:
    """UUIDs of the devices that a word names: a UUID, all, an index, GPU:MIG, or a device node."""
    if name.startswith(("GPU-", "MIG-")):
        return [name]
    parents = {device.parent for device in devices if device.parent}
    uuids = []
    for device in devices:
        node = next((whole.minor for whole in devices if whole.uuid == (device.parent or device.uuid)), None)
        words = ("all", str(device.index), f"{device.index}:{device.mig_index}", f"/dev/nvidia{node}")
        if device.uuid and device.vendor == "nvidia" and name in words and device.uuid not in parents:
            uuids.append(device.uuid)
    return uuids


def shell_quoted(words: Sequence[str]) -> str:
    """The words of a command line, quoted for a shell.

    >>> shell_quoted(["docker", "run", "an image"])
    "docker run 'an image'"
    >>> shell_quoted(["--device", "nvidia.com/gpu=GPU-7c49744b"])
    '--device nvidia.com/gpu=GPU-7c49744b'
    """
    return shlex.join(words)
