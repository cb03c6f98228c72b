"""What is known of a machine's GPUs at one moment. Every view is made of it; nothing else asks a driver.

A value that is not known is null, and `unavailable` has the reason under the field's name: what NVML
answered, by its constant's name without NVML_ERROR_. The keys are always the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpukiln.findings import Finding, Severity


@dataclass(frozen=True)
class LeaseMark:
    """Who has a GPU.

    Args:
        id: The lease, for example L-42.
        user: Login name, or the number of a user who has none.
        mode: exclusive or shared.
        memory_mib: What a shared one may use; null for an exclusive one.
        expires_in_s: Null where it ends with its job.
    """

    id: str
    user: str
    mode: str
    memory_mib: int | None
    expires_in_s: float | None


@dataclass(frozen=True)
class Peer:
    """How one GPU reaches another.

    Args:
        uuid: The other one; null where it has no UUID to tell.
        index: The other one's.
        nvlinks: NVLinks that join the two directly, or through a switch; 0: none.
        ancestor: The nearest thing that both hang on, as NVML names it: one board, one switch, several
            switches, one host bridge, one NUMA node, across NUMA nodes. Null where it is not told.
        p2p: Whether each reads the other's memory, in NVML's words: ok, or why not.
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
        uuid: GPU-... or MIG-...; how every command names it. Null of a GPU that is lost and left no name.
        kind: gpu or mig.
        vendor: nvidia or amd.
        index: The driver's number of the GPU; it changes when another GPU is lost. Of a MIG device its
            parent's.
        mig_index: Of a MIG device, among its parent's.
        parent: Of a MIG device its GPU's UUID.
        bus_id: PCI address, 0000:00:1e.0.
        pci_id: Device and vendor as NVML writes them, 0x20B010DE.
        minor: N of /dev/nvidiaN.
        profile: Of a MIG device, such as 1g.10gb.
        compute_capability: Such as 8.0.
        memory_used_mib: By whoever, without what the driver has reserved.
        memory_free_mib: What a program could have.
        utilization_percent: How much of the last moments a kernel ran.
        temperature_margin_c: Degrees to the GPU's limit (T.Limit), below 0 above it.
        temperature_margin_slowdown_c: The margin from which down the GPU slows down; 0 or below.
        numa_node: The NUMA node whose memory is nearest.
        cpus: Processors that are nearest, as 0-31,64-95.
        energy_joules: Since the driver was loaded.
        clock_events: Why clocks are lower than they could be, as NVML names it.
        ecc_uncorrected: Errors since the GPU was reset.
        recovery_action: What the driver itself asks for: none, gpu reset, node reboot, drain P2P, drain and
            reset, recover IMEX domain, bus reset, system reboot.
        mig_pending: Whether another mode waits for a reset.
        health: ok, warning, sick, lost, hung or unknown.
        findings: Why; ids are those of the table of faults (`gpukiln.gpus.faults`).
        leases: Who has it.
        allocatable: Whether a lease could have it now, as far as can be said without a request.
        not_allocatable_because: Every reason.
        error: Why nothing could be read.
        unavailable: Field to the reason why it is null.
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
        """Whether the driver tells anything of it."""
        return self.error is None

    @property
    def title(self) -> str:
        """How people are told which one it is."""
        return self.uuid or f"GPU {self.index}"


@dataclass(frozen=True)
class ProcessContainer:
    """The container that a process is in, by its control group.

    Args:
        engine: docker, containerd, podman, crio or unknown.
        id: The engine's, whole.
        pod: The UID of its Kubernetes pod.
    """

    engine: str
    id: str
    pod: str | None


@dataclass(frozen=True)
class GpuProcess:
    """A process that the driver lists.

    Args:
        pid: As this system numbers it; see `state`.
        device: UUID of the GPU or MIG device.
        kind: compute, graphics, or compute+graphics.
        state: running; gone: the driver still lists it; foreign: of another namespace of process ids, of
            which nothing more is known here.
        user: Login name, or the number of a user who has none.
        command: Its whole command line, with secrets taken out.
        started_at: RFC 3339, UTC.
        lease: The lease that covers it, null where none does.
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
    """The driver, as far as it is known; every field is null where there is none.

    Of a machine with GPUs of both vendors it is NVIDIA's.

    Args:
        version: Of the user space, which NVML tells.
        module: Version of the kernel module that is loaded.
        flavour: open or proprietary, of that module.
        branch: Number of the branch.
        branch_type: LTSB, PB, NFB or unknown.
        supported_until: The branch's last day, YYYY-MM-DD.
        ended: Whether that day is over.
        cuda: The CUDA version that it brings.
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
        scope: host, or container: only what was granted is seen, and others' processes have no names.
        simulated: Whether the GPUs are the embedded cloud's, which prove nothing.
        state: ok; no-device; not-granted: a container that got none; and without the driver's answer
            no-driver, no-library, mismatch, no-permission, starting, hung or failed.
        message: What that means here; empty for ok.
        fix: The next step; empty for ok.
        errors: What could not be read; the id is NVML's constant (gpu-is-lost), or what else went wrong.
        leases: Whether leases could be read: yes, none: nobody keeps any here, or why not.
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
        """0; 4 where the driver does not answer at all, 75 where not yet; 5 where a device can't be read."""
        if self.state == "starting":
            return 75
        if self.state not in ("ok", "no-device", "not-granted"):
            return 4
        return 5 if any(not device.readable for device in self.devices) else 0

    def device(self, name: str) -> Device | None:
        """The device of a UUID, or the beginning of one that is only one's, an index or a bus id."""
        exact = [
            device
            for device in self.devices
            if name in (device.uuid, device.bus_id) or (device.kind == "gpu" and name == str(device.index))
        ]
        if exact:  # GPUs of two vendors may have one index
            return exact[0] if len({device.vendor for device in exact}) == 1 else None
        begun = [
            device for device in self.devices if device.uuid and device.uuid.lower().startswith(name.lower())
        ]
        return begun[0] if len(begun) == 1 else None


def unreadable_finding(
    name: str, message: str, object: str = "", *, code: int | None = None, severity: Severity = "error"
) -> Finding:
    """What could not be read.

    Args:
        name: NVML's constant without NVML_ERROR_, or what else went wrong.
        object: The device; empty: the driver.
        code: NVML's number; None where it is none of NVML's.
    """
    return Finding(name.lower().replace("_", "-"), severity, message, object, {"code": code, "name": name})


def plain(value: Any) -> Any:
    """A value of these types as JSON has it."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value
