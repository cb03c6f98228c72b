"""How container engines are given GPUs: one rendering of devices for each, by what the engine says of itself.

Docker and Podman are asked, never guessed at: Docker gives GPUs by a hook that lies on its daemon's PATH
(`--gpus`), by CDI from 25 on where it is told to and from 28.2 on by itself (docker/docs#22926), or by the
runtime `nvidia`; Podman by CDI. In a container GPUs are numbered from 0: neither CUDA_VISIBLE_DEVICES nor
NVIDIA_VISIBLE_DEVICES is set there by this.
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
# What NVIDIA's toolkit takes (NVIDIA/libnvidia-container, nvidia-container-cli(1)); `gpu` is Docker's own.
KNOWN_CAPABILITIES = ("compute", "compat32", "graphics", "utility", "video", "display", "ngx")
ALL = "all"  # instead of UUIDs, where somebody else than the leases gives GPUs: every GPU of the machine
CDI_KIND = "nvidia.com/gpu"
CDI_FILES = ("/etc/cdi/*.yaml", "/etc/cdi/*.json", "/var/run/cdi/*.yaml", "/var/run/cdi/*.json")
HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")
GENERATE_COMMAND = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml --device-name-strategy=uuid"
QUERY_S = 20.0
BY_CDI, BY_HOOK, BY_RUNTIME = "cdi", "hook", "runtime"


@dataclass(frozen=True)
class ContainerEngine:
    """What an engine says of itself, as far as GPUs are concerned.

    Args:
        name: docker or podman.
        runtimes: OCI runtimes that it knows by name.
        cdi_devices: Devices that its CDI specifications name, without their kind.
        hook: Whether NVIDIA's hook is on the PATH; the daemon's may be another one.
        toolkit: Whether nvidia-ctk is there, which makes specifications.
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
        uuids: Of the devices that it was given.
        lease: The lease that it runs under, by its label; empty where it has none.
    """

    engine: str
    id: str
    image: str
    uuids: tuple[str, ...]
    lease: str


def _output_of(*argv: str) -> str:
    """What an engine answers.

    Raises:
        UnavailableError: It is not installed, gives no answer, or an error.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except FileNotFoundError:
        raise UnavailableError(f"{argv[0]} is not installed", hint=f"install {argv[0]}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"{argv[0]} gives no answer in {QUERY_S:.0f} s",
            hint=f"look at its service: systemctl status {argv[0]}",
        ) from None
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split())[-300:]
        raise UnavailableError(f"{' '.join(argv[:3])}: {output}", hint=f"systemctl status {argv[0]}")
    return done.stdout


def cdi_devices(patterns: Sequence[str] = CDI_FILES) -> frozenset[str]:
    """The GPUs that this machine's CDI specifications name (CDI's SPEC.md: `kind`, `devices[].name`)."""
    names: set[str] = set()
    for pattern in patterns:
        for path in glob.glob(pattern):  # noqa: PTH207 - patterns are whole paths
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            if not re.search(rf"[\"']?kind[\"']?: *[\"']?{re.escape(CDI_KIND)}\b", text):
                continue
            devices = text[: text.rfind("containerEdits")] if path.endswith(".json") else text
            names |= set(re.findall(r"(?m)[\"']?\bname[\"']?: *[\"']?([A-Za-z0-9:._-]+)", devices))
    return frozenset(names)


def read_engine(name: str) -> ContainerEngine:
    """Ask an engine what it is.

    Raises:
        UnavailableError: It gives no answer.
    """
    if name == "podman":
        said = parse_json(_output_of("podman", "info", "--format", "json"))
        version = str(said.get("version", {}).get("Version", ""))
        return ContainerEngine(
            name, version, (), cdi_devices(), False, shutil.which("nvidia-ctk") is not None
        )
    said = parse_json(_output_of("docker", "info", "--format", "{{json .}}"))
    if errors := said.get("ServerErrors"):
        raise UnavailableError(f"docker: {'; '.join(errors)}", hint="systemctl status docker")
    listed = said.get("DiscoveredDevices")
    if listed is not None:  # Docker 28.2 and later tell what they found
        names = [str(device.get("ID", "")) for device in listed if device.get("Source") == "cdi"]
        devices = frozenset(name.partition("=")[2] for name in names if name.startswith(f"{CDI_KIND}="))
    else:
        folders = said.get("CDISpecDirs") or ()  # Docker 25 to 28.1: where it looks, if it does
        devices = cdi_devices([f"{folder}/*.{end}" for folder in folders for end in ("yaml", "json")])
    return ContainerEngine(
        name,
        str(said.get("ServerVersion", "")),
        tuple(sorted(said.get("Runtimes") or {})),
        devices,
        any(shutil.which(hook) for hook in HOOKS),
        shutil.which("nvidia-ctk") is not None,
    )


def injection_method(engine: ContainerEngine, uuids: Sequence[str]) -> str:
    """By what an engine gives these devices: cdi, hook or runtime.

    Raises:
        UnavailableError: By nothing; the error says what mends it.
    """
    missing = [uuid for uuid in uuids if uuid not in engine.cdi_devices]
    if engine.cdi_devices and not missing:
        return BY_CDI
    if engine.name == "docker" and engine.hook:
        return BY_HOOK
    if engine.name == "docker" and "nvidia" in engine.runtimes:
        return BY_RUNTIME
    if engine.cdi_devices:
        raise UnavailableError(
            f"{engine.name}'s CDI specification does not name {', '.join(missing)}",
            details=(f"it names {', '.join(sorted(engine.cdi_devices))}",),
            hint=f"make it anew, it names indices or MIG has changed since: {GENERATE_COMMAND}",
        )
    if engine.name == "podman":
        hint = (
            GENERATE_COMMAND
            if engine.toolkit
            else f"install nvidia-container-toolkit, then {GENERATE_COMMAND}"
        )
        raise UnavailableError("podman has no CDI specification of NVIDIA's GPUs", hint=hint)
    raise UnavailableError(
        f"docker {engine.version} can give no GPU: it has no hook and no runtime of NVIDIA, and no CDI "
        "specification",
        hint="install nvidia-container-toolkit (role nvidia_container_toolkit), then "
        "`nvidia-ctk runtime configure` and restart docker",
    )


def check_capabilities(capabilities: Sequence[str]) -> tuple[str, ...]:
    """The driver's capabilities that a container gets, without Docker's own `gpu`.

    Raises:
        UsageError: One is unknown.
    """
    chosen = tuple(dict.fromkeys(capability for capability in capabilities if capability != "gpu"))
    if unknown := [capability for capability in chosen if capability not in KNOWN_CAPABILITIES]:
        raise UsageError(
            f"--capabilities has {unknown[0]!r}", hint=f"there are {', '.join(KNOWN_CAPABILITIES)}"
        )
    return chosen or CAPABILITIES


def device_request(uuids: Sequence[str], capabilities: Sequence[str] = CAPABILITIES) -> dict[str, Any]:
    """Docker's DeviceRequest, as its API and SDK take it; the capability `gpu` selects NVIDIA's driver."""
    words = ["gpu", *check_capabilities(capabilities)]
    return {"Driver": "nvidia", "DeviceIDs": list(uuids), "Capabilities": [words]}


def device_nodes(uuids: Sequence[str], devices: Sequence[Device]) -> list[str]:
    """What a unit must be allowed to open for these devices, as DeviceAllow of systemd takes it.

    Only their own nodes: the whole class of /proc/devices would be every GPU, and has another name from
    driver 550 on (NVIDIA/nvidia-container-toolkit#324). MIG devices of one GPU share its node; their
    capabilities' numbers are the kernel's, so all of that class are allowed.

    Raises:
        UnavailableError: The node of one is not known.
    """
    known = {entry.uuid: entry for entry in devices if entry.uuid}
    rules: dict[str, None] = {}
    for uuid in uuids:
        device = known.get(uuid)
        whole = known.get(device.parent) if device and device.parent else device
        if device is None or whole is None or whole.minor is None:
            raise UnavailableError(
                f"the device node of {uuid} is not known", hint="`gpukiln-gpu show` says what it answers"
            )
        rules[f"/dev/nvidia{whole.minor}"] = None
        if device.kind == "mig":
            rules["char-nvidia-caps"] = None
    return list(rules)


def arguments(
    uuids: Sequence[str],
    engine: str,
    capabilities: Sequence[str] = CAPABILITIES,
    by: str = BY_CDI,
    allowed: Sequence[str] = (),
) -> list[str]:
    """What gives devices to a container of an engine, or to a unit.

    Args:
        uuids: Of GPUs or MIG devices; of compose also ALL alone.
        engine: One of ENGINES.
        by: Of Docker: cdi, hook or runtime, see `way`.
        allowed: Of systemd: what it may open, see `nodes`.

    Returns:
        Words of a command line; of compose and systemd lines of a file.

    Raises:
        UsageError: A capability is unknown, or can't be chosen there.
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
            f"--capabilities {','.join(chosen)} for {engine}"
            + (", which gives GPUs by CDI" if asked else ""),
            hint="its specification says what a container gets, a unit has all: leave --capabilities out",
        )
    if engine == "systemd":
        shared = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
        return [
            f"Environment=CUDA_VISIBLE_DEVICES={','.join(uuids)}",
            *(f"DeviceAllow={node} rw" for node in (*shared, *allowed)),
        ]
    if engine == "podman" or by == BY_CDI:
        return [word for uuid in uuids for word in ("--device", f"{CDI_KIND}={uuid}")]
    if by == BY_RUNTIME:
        return [
            *("--runtime", "nvidia"),
            *("--env", f"NVIDIA_VISIBLE_DEVICES={','.join(uuids)}"),
            *("--env", f"NVIDIA_DRIVER_CAPABILITIES={','.join(chosen)}"),
        ]
    # One value of Docker's, read as a line of CSV (docker/cli, opts/gpus.go): what has commas is quoted.
    return ["--gpus", f'"device={",".join(uuids)}","capabilities={",".join(chosen)}"']


def container_command(granted: LeaseGrant, engine: str, image: str, command: Sequence[str]) -> list[str]:
    """The command line that runs an image on the devices of a lease.

    Raises:
        UnavailableError: The engine can't give them.
    """
    uuids = granted.uuids
    given = arguments(uuids, engine, by=injection_method(read_engine(engine), uuids))
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    name = f"{LABEL}={granted.lease.id}"
    return [engine, "run", "--rm", "--interactive", *terminal, "--label", name, *given, image, *command]


def memory_limit_error(limit_mib: int, devices: Sequence[Device]) -> IncompatibleError:
    """Why no engine limits the memory of a GPU, and what can be had instead."""
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
        "MPS with CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, which holds for its clients",
        "a promise among those who lease: --shared --memory",
    ]
    return IncompatibleError(
        f"no container engine limits a GPU's memory to {limit_mib} MiB",
        details=tuple(instead),
        hint="take one of these",
    )


def is_container_running(lease: Lease) -> bool:
    """Whether the container of a lease runs; if its engine gives no answer: nothing is lost so."""
    engine = lease.engine or "docker"
    asked = f"id={lease.container}" if lease.container else f"label={LABEL}={lease.id}"
    try:
        return bool(_output_of(engine, "ps", "--quiet", "--no-trunc", "--filter", asked).split())
    except UnavailableError:
        return True


def kill_container(lease: Lease) -> None:
    """End the container of a lease, if it runs.

    Raises:
        UnavailableError: Its engine gives no answer.
    """
    engine = lease.engine or "docker"
    if ids := _output_of(
        engine, "ps", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={lease.id}"
    ).split():
        _output_of(engine, "kill", *ids)


def running_containers(devices: Sequence[Device]) -> list[RunningContainer]:
    """The running containers of Docker and Podman that were given GPUs.

    Args:
        devices: The machine's, by which `all`, indices and device nodes are understood.
    """
    rows = []
    for engine in ("docker", "podman"):
        if shutil.which(engine) is None:
            continue
        try:
            ids = _output_of(engine, "ps", "--quiet", "--no-trunc").split()
            listed = parse_json(_output_of(engine, "inspect", *ids)) if ids else []
        except UnavailableError as error:
            print(f"{engine}: its containers are not looked at: {error.message}", file=sys.stderr)
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
    """UUIDs of the devices that a container was given, by what `inspect` says of it.

    Docker keeps what was asked for: names, or how many, which are the first ones (moby/moby,
    daemon/nvidia_linux.go). Podman keeps the command that made it, and the device nodes that CDI led to
    (containers/podman, libpod/container_inspect_linux.go).
    """
    host, config = container.get("HostConfig") or {}, container.get("Config") or {}
    named: list[str] = []
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
    """The devices that one word means: a UUID, all, an index, GPU:MIG, or a device node."""
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
    """Words of a command line as a shell reads them."""
    return shlex.join(words)
