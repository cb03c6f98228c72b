"""The snapshot of a machine's GPUs. Every view is made from it; no other code of this package asks a driver.

An unknown value is null, and `unavailable` has the reason under the field's name: NVML's constant without
NVML_ERROR_, or a sentence. The keys are always the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpukiln.findings import Finding, Severity


@dataclass(frozen=True)
class LeaseMark:
    """A lease on a device.

    Args:
        id: The lease, for example L-42.
        user: Login name, or the UID of a user without one.
        mode: exclusive or shared.
        memory_mib: Budget of a shared lease; null for an exclusive one.
        expires_in_s: Null where the lease ends with its job.
    """

    id: str
    user: str
    mode: str
    memory_mib: int | None
    expires_in_s: float | None


@dataclass(frozen=True)
class Peer:
    """The connection of a GPU to another one.

    Args:
        uuid: Of the other GPU; null where it is not known.
        index: Of the other GPU.
        nvlinks: NVLinks between the two, direct or through a switch; 0 for none.
        ancestor: The nearest common ancestor, as NVML names it: one board, one switch, several switches, one
            host bridge, one NUMA node, across NUMA nodes. Null where it is not reported.
        p2p: Whether each can read the other's memory, in NVML's words: ok, or why not.
    """

    uuid: str | None
    index: int
    nvlinks: int
    ancestor: str | None
    p2p: str | None


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG device of one.

    Args:
        uuid: GPU-... or MIG-...; every command accepts it. Null for a lost GPU whose UUID is not known.
        kind: gpu or mig.
        vendor: nvidia or amd.
        index: The driver's number of the GPU; it changes when another GPU is lost. Of a MIG device the index
            of its GPU.
        mig_index: Index of a MIG device on its GPU.
        parent: UUID of a MIG device's GPU.
        bus_id: PCI address, 0000:00:1e.0.
        pci_id: Device and vendor as NVML writes them, for example 0x20B010DE.
        minor: N in /dev/nvidiaN.
        profile: Of a MIG device, for example 1g.10gb.
        compute_capability: For example 8.0.
        memory_used_mib: By all programs, without the driver's reserve.
        memory_free_mib: Memory that a program can allocate.
        utilization_percent: Share of the last sample period in which a kernel ran.
        temperature_margin_c: Degrees below the GPU's limit (T.Limit); negative above it.
        temperature_margin_slowdown_c: The margin below which the GPU slows down; 0 or negative.
        numa_node: The nearest NUMA node.
        cpus: The nearest processors, for example 0-31,64-95.
        energy_joules: Since the driver was loaded.
        clock_events: Reasons for lowered clocks, as NVML names them.
        ecc_uncorrected: Errors since the GPU was reset.
        recovery_action: The action that the driver requests: none, gpu reset, node reboot, drain P2P, drain
            and reset, recover IMEX domain, bus reset, system reboot.
        mig_pending: The MIG mode after the next reset.
        health: ok, warning, sick, lost, hung or unknown.
        findings: The reasons; ids are those of the table of faults (`gpukiln.gpus.faults`).
        leases: Who holds it.
        allocatable: Whether a request without conditions could lease it now.
        not_allocatable_because: Every reason.
        error: Why the driver reports nothing; null where it does.
        unavailable: By field, the reason why it is null.
    """

    uuid: str | None
    kind: str
    index: int
    vendor: str = "nvidia"
    mig_index: int | None = None
    parent: str | None = None
    bus_id: str | None = None
    pci_id: str | None = None
    minor: int | None = None
    name: str | None = None
    profile: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    serial: str | None = None
    vbios: str | None = None
    board_part_number: str | None = None
    gsp_firmware: str | None = None
    numa_node: int | None = None
    cpus: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    memory_reserved_mib: int | None = None
    memory_free_mib: int | None = None
    bar1_total_mib: int | None = None
    bar1_used_mib: int | None = None
    utilization_percent: int | None = None
    memory_utilization_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_margin_c: int | None = None
    temperature_margin_slowdown_c: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    clock_memory_mhz: int | None = None
    clock_memory_max_mhz: int | None = None
    clock_events: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    ecc_enabled: bool | None = None
    ecc_pending: bool | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected_lifetime: int | None = None
    ecc_corrected_lifetime: int | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    recovery_action: str | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None
    nvlinks_active: int | None = None
    nvlinks_total: int | None = None
    fabric_state: str | None = None
    peers: tuple[Peer, ...] = ()
    health: str = "unknown"
    findings: tuple[Finding, ...] = ()
    leases: tuple[LeaseMark, ...] = ()
    allocatable: bool = False
    not_allocatable_because: tuple[str, ...] = ()
    error: str | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        """Whether the driver reports anything of it."""
        return self.error is None

    @property
    def title(self) -> str:
        """Its name for people: the UUID, else the index."""
        return self.uuid or f"GPU {self.index}"


@dataclass(frozen=True)
class ProcessContainer:
    """The container of a process, from its control group.

    Args:
        engine: docker, containerd, podman, crio or unknown.
        id: The engine's id in full.
        pod: The UID of its Kubernetes pod.
    """

    engine: str
    id: str
    pod: str | None


@dataclass(frozen=True)
class GpuProcess:
    """A process in the driver's list.

    Args:
        pid: In this system's PID namespace, except where `state` is foreign.
        device: UUID of the GPU or MIG device.
        kind: compute, graphics, or compute+graphics.
        state: running; gone: it has ended, and the driver still lists it; foreign: it is in another PID
            namespace, and nothing more is known of it.
        user: Login name, or the UID of a user without one.
        command: Its command line without secrets.
        started_at: RFC 3339, UTC.
        lease: The lease that covers it; null for none.
    """

    pid: int
    device: str | None
    kind: str
    state: str
    memory_mib: int | None = None
    user: str | None = None
    uid: int | None = None
    command: str | None = None
    started_at: str | None = None
    container: ProcessContainer | None = None
    lease: str | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Driver:
    """The driver; every field is null where there is none.

    On a machine with GPUs of both vendors it is NVIDIA's.

    Args:
        version: Of the user space, from NVML.
        module: Version of the loaded kernel module.
        flavour: open or proprietary, of that module.
        branch: Number of the branch.
        branch_type: LTSB, PB, NFB or unknown.
        supported_until: The last day of the branch's support, YYYY-MM-DD.
        ended: Whether that day has passed.
        cuda: The CUDA version of the driver.
    """

    version: str | None = None
    module: str | None = None
    flavour: str | None = None
    branch: int | None = None
    branch_type: str | None = None
    supported_until: str | None = None
    ended: bool | None = None
    cuda: str | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A machine's GPUs at one moment.

    Args:
        node: Host name.
        taken_at: RFC 3339, UTC.
        source: nvml or amd-smi; `nvml, amd-smi` where the machine has GPUs of both vendors.
        scope: host; or container, which sees its own GPUs only and no names of other processes.
        simulated: Whether the GPUs are simulated by the embedded cloud; they verify no hardware.
        state: ok; no-device; not-granted (a container without GPUs); or, where the driver does not answer,
            no-driver, no-library, mismatch, no-permission, starting, hung or failed.
        message: What was found; empty for ok.
        fix: The next step; empty for ok.
        errors: What could not be read; the id is NVML's constant (gpu-is-lost), or names another error.
        leases: yes; none (this machine has no leases); or why they can't be read.
    """

    node: str
    taken_at: str
    source: str
    scope: str
    simulated: bool
    state: str
    message: str
    fix: str
    driver: Driver
    devices: tuple[Device, ...]
    processes: tuple[GpuProcess, ...] | None
    errors: tuple[Finding, ...]
    leases: str = "none"

    @property
    def code(self) -> int:
        """Exit code: 4: the driver does not answer; 75: it is starting; 5: an unreadable device; else 0."""
        if self.state == "starting":
            return 75
        if self.state not in ("ok", "no-device", "not-granted"):
            return 4
        # A machine without GPUs is no error: exit code 0, and `message` says why.
        return 5 if any(not device.readable for device in self.devices) else 0

    def device(self, name: str) -> Device | None:
        """A device by its UUID or a unique prefix, its index or bus id; None for no or several devices."""
        exact = [
            device
            for device in self.devices
            if name in (device.uuid, device.bus_id) or (device.kind == "gpu" and name == str(device.index))
        ]
        if exact:  # an NVIDIA and an AMD GPU may have the same index
            return exact[0] if len({device.vendor for device in exact}) == 1 else None
        # As for ids of commits and containers: any prefix that is unique on this machine.
        begun = [
            device for device in self.devices if device.uuid and device.uuid.lower().startswith(name.lower())
        ]
        return begun[0] if len(begun) == 1 else None


def unreadable_finding(
    name: str, message: str, object: str = "", *, code: int | None = None, severity: Severity = "error"
) -> Finding:
    """A finding for something that could not be read.

    Args:
        name: NVML's constant without NVML_ERROR_, or the name of another error.
        object: The device; empty for the driver.
        code: NVML's number; None for other errors.
    """
    return Finding(name.lower().replace("_", "-"), severity, message, object, {"code": code, "name": name})


def plain(value: Any) -> Any:
    """Dataclasses, lists and mappings as plain data for JSON.

    >>> plain(Peer("GPU-1", 1, 4, "one switch", "ok"))
    {'uuid': 'GPU-1', 'index': 1, 'nvlinks': 4, 'ancestor': 'one switch', 'p2p': 'ok'}
    >>> plain(("a", 1, None))
    ['a', 1, None]
    """
    # Not dataclasses.asdict, which makes a deep copy of every value.
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value
