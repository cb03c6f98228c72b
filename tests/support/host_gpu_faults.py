"""Faults of the layers that need a GPU: what breaks, and words that the failure must say."""

from collections.abc import Callable
from typing import Any

from tests.doubles.nvml_machine import LOST, UNKNOWN

Data = dict[str, Any]
Fault = Callable[[Data], Any]


def gpu(path: str, value: Any, index: int = 0) -> Fault:
    """A fault of what NVML says of one GPU, at a path such as `ecc/current`."""

    def inject(data: Data) -> None:
        value_at = data["nvml"]["gpus"][index]
        # Numbers in a path are indices of a list, such as nvlinks/3/state.
        *parents, last = path.split("/")
        for key in parents:
            value_at = value_at[int(key) if isinstance(value_at, list) else key]
        value_at[last] = value

    return inject


def both(*faults: Fault) -> Fault:
    """Several faults at once."""

    def inject(data: Data) -> None:
        for fault in faults:
            fault(data)

    return inject


def no_nvml(data: Data) -> None:
    data["nvml"].update(
        available=False, gpus=[], error={"_error": "NVML Shared Library Not Found", "code": 12}
    )


def row(**values: str) -> Fault:
    return lambda data: data["gpus"].update(rows=[{**data["gpus"]["rows"][0], **values}])


def gpus(**values: Any) -> Fault:
    return lambda data: data["gpus"].update(values)


def containerd(**values: Any) -> Fault:
    return lambda data: data["containerd"].update(values)


def dcgm(**values: Any) -> Fault:
    return lambda data: data["monitoring"]["dcgm"].update(values)


def expected(**values: Any) -> Fault:
    return lambda data: data["expected"].update(values)


def names(name: str) -> Fault:
    return both(gpu("name", name), gpu("name", name, 1))


XID_79 = "NVRM: Xid (PCI:0000:00:1e): 79, pid=1, GPU has fallen off the bus."


def cuda(**values: Any) -> Callable[[Data], None]:
    return lambda data: data["cuda"]["gpus"][0].update(values)


def put(path: str, value: Any) -> Fault:
    """A fault: set the value at a path such as `cuda/error`."""

    def inject(data: Data) -> None:
        *parents, last = path.split("/")
        for key in parents:
            data = data[key]
        data[last] = value

    return inject


def later(path: str, value: Any, index: int = 0) -> Fault:
    """A fault of a GPU's NVLinks that NVML shows when it is asked again."""
    # The second reading has the same form as the first one.
    return lambda data: gpu(f"nvlinks/{path}", value, index)({"nvml": data["nvlinks"]})


def no_link(index: int) -> Fault:
    """All of a GPU's NVLinks are inactive."""
    return both(*(gpu(f"nvlinks/{number}/state", False, index) for number in range(12)))


GPU_FAULTS: dict[str, list[tuple[Fault, str]]] = {
    "runtime.containerd-nvidia": [
        (containerd(runtimes=["runc"]), "containerd's runtimes are runc"),
        (containerd(joined={"/t.toml": {"rc": 0, "error": "", "runtimes": ["runc"]}}), "with /t.toml, which"),
        (containerd(joined={"/t.toml": {"rc": 1, "error": "no TOML", "runtimes": ["nvidia"]}}), "no TOML"),
    ],
    "gpu.driver-loaded": [
        (gpus(module=None), "not loaded"),
        (gpus(module="535.261.03"), "535.261.03"),
        (gpus(pci=[]), "0 GPUs"),
    ],
    "gpu.nvidia-smi": [
        (gpus(smi={"rc": 9, "out": "couldn't communicate"}), "exits 9"),
        (gpus(rows=[]), "lists 0 GPUs"),
        (row(persistence="[GPU is lost]"), "can't read"),
    ],
    "gpu.nvml": [
        (no_nvml, "NVML Shared Library Not Found; nvidia-smi exits 0"),
        (lambda d: d["nvml"].update(available=False), "was not called"),
        (lambda d: d["nvml"].update(gpus=[]), "lists no GPU"),
        (lambda d: d["nvml"].update(gpus=[{"index": 0, "error": LOST}]), "can't reach GPU 0: GPU is lost"),
        (lambda d: d["gpus"]["pci"].append({"address": "0000:00:1f.0"}), "the PCI bus has"),
        (gpu("bus_id", "00000000:00:0A.0"), "the PCI bus has"),
        (gpu("bus_id", LOST), "bus_id: GPU is lost"),
        (gpu("uuid", None), "no UUID"),
    ],
    "gpu.persistence": [
        (gpu("persistence", False), "GPU 0 (00000000:00:1E.0): persistence mode is off"),
        (gpu("persistence", UNKNOWN), "Unknown Error"),
        (lambda d: d["nvml"].update(gpus=[]), "no GPU"),
    ],
    "gpu.xid": [
        (gpus(xids=[XID_79]), "Xid 79 GPU_HAS_FALLEN_OFF_THE_BUS: device no longer answers on PCIe; restart"),
        (gpus(xids=["NVRM: GPU at PCI:0000:00:1e has fallen off the bus."]), "Xid 79"),
        (gpus(xids=["NVRM: Xid (PCI:0000:00:1e): 13, Graphics Exception"]), "restart the application"),
        (gpus(xids=["NVRM: Xid (PCI:0000:00:1e): 9999, new"]), "look it up"),
        (gpus(xids=["nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal"]), "SXid"),
    ],
    "gpu.ecc": [
        (gpu("ecc/pending", False), "ECC is on, and will be off after a reset"),
        (gpu("ecc/volatile_uncorrected", 3), "3 uncorrected"),
        (gpu("ecc/current", LOST), "ecc.current: GPU is lost"),
        (gpu("ecc/volatile_uncorrected", UNKNOWN), "Unknown Error"),
    ],
    "gpu.memory-repair": [
        (gpu("remapped_rows/pending", True), "pending"),
        (gpu("remapped_rows/failed", True), "failed"),
        (gpu("retired_pages_pending", True), "wait to be retired"),
        (gpu("retired_pages_pending", UNKNOWN), "Unknown Error"),
    ],
    "gpu.throttle": [
        (gpu("throttle/mask", 0x48), "hardware thermal slowdown at 31 degrees Celsius"),
        (gpu("throttle/mask", 0x80), "hardware power brake"),
        (gpu("throttle/mask", 0x20), "software thermal slowdown"),
        (gpu("throttle/mask", LOST), "GPU is lost"),
    ],
    "gpu.clocks": [
        (gpu("clocks/max_sm", 0), "0 MHz"),
        (both(gpu("temperature/margin", -4), gpu("temperature/tlimit/slowdown", -3)), "margin of -4 degrees"),
        (gpu("temperature/margin", UNKNOWN), "Unknown Error"),
        (gpu("temperature/gpu", 92), "92 degrees, wanted less than 92"),
        (gpu("temperature/gpu", LOST), "GPU is lost"),
    ],
    "gpu.pcie-link": [
        (gpu("pcie/width", 4), "4 lanes, wanted 16"),
        (gpu("pcie/width", LOST), "GPU is lost"),
    ],
    "gpu.mig": [
        (gpu("mig/pending", True), "MIG is off, and will be on after a reset"),
        (both(gpu("mig/pending", True), gpu("mig/current", True)), "MIG is on, wanted disabled"),
        (gpu("mig/current", LOST), "GPU is lost"),
        (expected(mig="enabled"), "MIG is off, wanted enabled by /etc/gpukiln/expected.json"),
        (both(expected(mig="enabled"), gpu("mig", dict.fromkeys(("current", "pending")))), "unsupported"),
        (expected(mig="on"), "has MIG 'on', wanted: enabled, disabled or any"),
        (both(expected(mig=None), gpu("mig/pending", True)), "MIG is off, and will be on after a reset"),
        (put("expected", {"_error": "JSONDecodeError: line 1"}), "could not be gathered: JSONDecodeError"),
    ],
    "gpu.idle": [
        (
            gpu("processes", [{"pid": 7, "name": "Xorg", "kind": "graphics", "memory": 4}]),
            "Xorg (7, graphics)",
        ),
        (gpu("processes", LOST), "GPU is lost"),
    ],
    "multi-gpu.topology": [
        (gpu("peers/0/ancestor", 50), "several switches, back"),
        (gpu("peers/0/ancestor", 35), "level 35"),
        (gpu("peers/0/ancestor", UNKNOWN), "Unknown Error"),
        (gpu("peers", []), "NVML was not asked"),
    ],
    "multi-gpu.p2p": [
        (gpu("peers/0/p2p/read", 5), "peer read is not supported, wanted ok"),
        (gpu("peers/0/p2p/write", None), "peer write is not supported"),
        (gpu("peers/0/p2p/read", LOST), "GPU is lost"),
        (both(gpu("nvlinks", None), gpu("peers/0/p2p/read", 4)), "disabled by registry key"),
        (both(gpu("nvlinks", None), gpu("peers/0/p2p/read", 42)), "status 42"),
    ],
    "multi-gpu.nvlink": [
        (gpu("nvlinks/3/state", False), "GPU 0 (00000000:00:1E.0) 11 of 12, not 3; GPU 1"),
        (both(no_link(0), no_link(1)), "all NVLinks of all NVIDIA A100-SXM4-40GB are inactive"),
        (gpu("nvlinks/3/state", LOST), "NVLink 3: GPU is lost"),
        (gpu("nvlinks", LOST), "GPU is lost"),
        (later("2/errors/crc_flit", 3000), "NVLink 2: crc_flit errors grew by 100 a second"),
        (later("2/errors/recovery", 1), "recovery errors grew by 1 in 30 s, wanted no"),
        (later("2/errors/replay", 7), "NVLink 2: replay errors grew by 7 in 30 s"),
        (later("2/state", False), "NVLink 2 is inactive 30 s after it was active"),
        (gpu("nvlinks/2/errors/replay", UNKNOWN), "Unknown Error"),
        (later("2/errors/replay", UNKNOWN), "Unknown Error"),
        (lambda d: d["nvlinks"]["gpus"][0].update(nvlinks=LOST), "GPU is lost"),
        (put("nvlinks/gpus", []), "was listed, and was missing 30 s later"),
        (put("nvlinks/error", LOST), "later failed: GPU is lost"),
        (both(names("NVIDIA A100-PCIE-40GB"), gpu("nvlinks/0/state", False)), "as many on each"),
        (gpu("nvlinks", None, 1), "as many on each"),
    ],
    "multi-gpu.fabric": [
        (gpu("fabric/state", 2), "in the fabric is: in progress"),
        (gpu("fabric/status", 999), "completed with status 999"),
        (gpu("fabric/state", LOST), "GPU is lost"),
        (gpu("fabric/health", 0x52), "reports route unhealthy"),
        (gpu("fabric/health", 0x582), "incorrect configuration 5"),
    ],
    "gpu.confidential": [
        (put("nvml/confidential", {"on": True, "ready": False}), "ready state is off, wanted set"),
        (put("nvml/confidential/on", UNKNOWN), "on: Unknown Error"),
    ],
    "monitoring.nvtop": [
        (lambda d: d["monitoring"].update(nvtop={"rc": 127, "out": "nvtop: not found"}), "exits 127")
    ],
    "desktop.kasmvnc": [
        (lambda d: d["packages"]["installed"].pop("kasmvncserver"), "is not installed"),
        (lambda d: d["packages"]["installed"].update(kasmvncserver="1.4.0-1"), "found KasmVNC 1.4.0"),
        (lambda d: d.update(desktop={"unit": False}), "found no unit"),
        (lambda d: d["desktop"].update(listens=[], log="No users"), "port 6800: No users"),
        (lambda d: d["desktop"].update(listens=["*"]), "open on *"),
        (lambda d: d["desktop"].update(listens=["0.0.0.0", "127.0.0.1"]), "open on 0.0.0.0"),  # noqa: S104
        (lambda d: d["desktop"].update(http={"status": 200}), "answers 200, wanted 401"),
    ],
    "monitoring.dcgm": [
        (dcgm(ran=False), "dcgmi is missing"),
        (dcgm(rc=226), "exits 226"),
        (dcgm(problem="its output is no JSON"), "no JSON"),
        (dcgm(tests=[]), "ran no test"),
        (dcgm(tests=[{"name": "nvlink", "status": "Fail", "warning": "link 3"}]), "nvlink: Fail link 3"),
    ],
    "compute.kernel": [
        (put("cuda/error", "cuInit: error 999"), "cuInit: error 999"),
        (cuda(ok=False, error="the kernel's result is wrong"), "0000:00:1e.0: the kernel's result"),
        (put("cuda/gpus", []), "does not see 0000:00:1e.0"),
        (put("cuda/xids", ["NVRM: Xid (PCI:0000:00:1e): 48"]), "48"),
        (cuda(elements=0), "compared [0"),
    ],
    "compute.bandwidth": [
        (cuda(h2d_gb_s=7.5), "7.5 GB/s to the GPU"),
        (cuda(d2h_gb_s=7.5), "7.5 from it"),
        (put("cuda/gpus", []), "no GPU"),
        (expected(bandwidth_share=0.8), "at least 80% of the link's rate"),
        (expected(bandwidth_share=1.5), "bandwidth_share 1.5"),
        (expected(bandwidth_share="half"), "bandwidth_share 'half'"),
    ],
    "multi-gpu.all-reduce": [
        (lambda d: d["cuda"]["all_reduce"].update(tried=False, reason="why"), "not run: why"),
        (put("cuda/all_reduce/error", "cuMemcpyPeer does not return"), "does not return"),
        (lambda d: d["cuda"]["all_reduce"].update(ok=False, wrong=["0000:00:1e.0: x"]), "0000:00:1e.0: x"),
    ],
    **{
        f"container.{check}": [
            (put(f"container/{engine}", {"rc": 125, "out": "no such device"}), "exits 125: no such device"),
            (put(f"container/{engine}", {"rc": 0, "out": ""}), "sees 0 GPUs"),
            *([] if engine == "podman" else [(put("container", {}), "missing")]),
        ]
        for check, engine in (
            ("docker-gpu", "docker"),
            ("containerd-gpu", "containerd"),
            ("podman-cdi", "podman"),
        )
    },
}
