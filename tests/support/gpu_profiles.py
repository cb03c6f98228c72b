"""Healthy machines as their GPUs describe them, and a real fault of each. Made up, not recorded on any host.

What sets a kind apart was read in public, and stands beside it: captures of `nvidia-smi -q -x` are those of
NVIDIA/k8s-test-infra (tests/e2e/go/assertions/nvidiasmi/testdata/hardware/).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.nvml_machine import made_up_gpu, nvlinks_later
from tests.support.host_gpu_faults import Fault, gpu, later, put
from tests.support.host_machine import Data, machine

NO_ERRORS = {"replay": 0, "recovery": 0, "crc_flit": 0, "crc_data": 0}
UNKNOWN_ERRORS = dict.fromkeys(NO_ERRORS)
SWITCHES = [f"00000000:{bus:02X}:00.0" for bus in range(0xC1, 0xC7)]


@dataclass(frozen=True)
class Profile:
    """A kind of healthy machine.

    Args:
        make: Its facts.
        not_run: The checks that are not run there, with a word of the reason.
        faults: Id of a check, the fault that it finds there, and words of the failure.
        old_driver: Whether a driver of the branch 535 says all of it.
    """

    make: Callable[[], Data]
    not_run: dict[str, str] = field(default_factory=dict)
    faults: tuple[tuple[str, Fault, str], ...] = ()
    old_driver: bool = False


def link(number: int, remote: str | None, version: int, errors: Data | None = None) -> Data:
    """An active NVLink."""
    return {
        "link": number,
        "state": True,
        "version": version,
        "remote_bus_id": remote,
        "errors": dict(NO_ERRORS if errors is None else errors),
    }


def inactive(number: int) -> Data:
    """An NVLink that is switched off or leads nowhere."""
    return {
        "link": number,
        "state": False,
        "version": None,
        "remote_bus_id": None,
        "errors": dict(UNKNOWN_ERRORS),
    }


def bus_id(index: int) -> str:
    return f"00000000:{0x10 + index:02X}:00.0"


def peers(index: int, count: int, **p2p: Any) -> list[Data]:
    """The ways to the other GPUs, over host bridges."""
    known = {"read": 0, "write": 0, "nvlink": 0, "atomics": 0, "pci": None, **p2p}
    return [{"index": n, "ancestor": 30, "p2p": dict(known)} for n in range(count) if n != index]


def host(gpus: list[Data], *, device: str, driver: str, cuda: str, virtual: str = "none") -> Data:
    """The facts of a machine with these GPUs, which differ from one with two A100 in what is given.

    Args:
        gpus: What NVML says of each, beside `made_up_gpu`.
        device: PCI device id.
        driver: Version of the driver.
        cuda: Version of CUDA that it brings.
        virtual: What systemd-detect-virt says.
    """
    data = machine(gpus=1)
    rows = [
        {**made_up_gpu(n, len(gpus)), "bus_id": bus_id(n), "peers": peers(n, len(gpus)), **row}
        for n, row in enumerate(gpus)
    ]
    data["nvml"] |= {
        "driver": driver,
        "nvml": f"{cuda.partition('.')[0]}.{driver}",
        "cuda_driver": cuda,
        "gpus": rows,
    }
    computed = data["cuda"]["gpus"][0]
    data["cuda"]["gpus"] = [
        {**copy.deepcopy(computed), "index": n, "bus_id": bus_id(n)[4:].lower(), "name": row["name"]}
        for n, row in enumerate(rows)
    ]
    if len(rows) == 1:
        data["cuda"]["all_reduce"] = {"tried": False, "reason": "one GPU"}
    listed = "".join(f"GPU {n}: {row['name']} (UUID: {row['uuid']})\n" for n, row in enumerate(rows))
    data["container"] = {engine: {"rc": 0, "out": listed} for engine in data["container"]}
    data["driver"]["nvidia_smi"]["version"] = driver
    data["boot"]["virtualization"] = virtual
    data["gpus"] |= {
        "pci": [{"address": bus_id(n)[4:].lower(), "device": device} for n in range(len(rows))],
        "module": driver,
        "rows": [
            {
                "bus_id": row["bus_id"],
                "name": row["name"],
                "uuid": row["uuid"],
                "driver": driver,
                "persistence": "Enabled",
            }
            for row in rows
        ],
    }
    data["nvlinks"] = nvlinks_later(data["nvml"])
    return data


def a100_mig_mixed() -> Data:
    """HGX A100, where the GPUs 0 and 1 are divided.

    Their NVLinks are trained off then (Fabric Manager user guide, "Interoperability with MIG"), and no GPU
    reaches them (an engineer of NVIDIA, NVIDIA/nccl#1716: MIG has no P2P, by PCIe or NVLink).
    """
    rows: list[Data] = []
    for index in range(8):
        ways = peers(index, 8)
        for way in ways:
            if index < 2 or way["index"] < 2:
                way["p2p"] |= {"read": 2, "write": 2, "nvlink": 2, "atomics": 2}
        links = [inactive(n) if index < 2 else link(n, SWITCHES[n % 6], 4) for n in range(12)]
        mode = {"current": index < 2, "pending": index < 2}
        nowhere = dict.fromkeys(("state", "status", "cluster", "clique", "health"))
        rows.append({"mig": mode, "nvlinks": links, "peers": ways, "fabric": nowhere})
    data = host(rows, device="0x20b0", driver="535.309.01", cuda="12.2")
    data["expected"]["mig"] = "any"
    data["cuda"].update(mig=True, gpus=data["cuda"]["gpus"][:1])
    data["cuda"]["gpus"][0]["name"] += " MIG 1g.5gb"
    data["cuda"]["all_reduce"] = {"tried": False, "reason": "one GPU"}
    # NVIDIA/DCGM#31, #70
    words = (
        "GPU 0's MIG configuration is incompatible with the diagnostic because it prevents access to the "
        "entire GPU."
    )
    data["monitoring"]["dcgm"].update(rc=223, out=words, tests=[], problem="its output is no JSON: line 1")
    return data


def h200_after_200_days() -> Data:
    """HGX H200 in use: counters that only ever grow, and SXids that are seen on healthy machines."""
    seen = {"replay": 3, "recovery": 1, "crc_flit": 118, "crc_data": None}
    rows: list[Data] = [
        {
            "name": "NVIDIA H200",
            "ecc": {
                "current": True,
                "pending": True,
                "volatile_uncorrected": 0,
                "volatile_corrected": 12,
                "aggregate_uncorrected": 0,
                "aggregate_corrected": 431,
            },
            "remapped_rows": {"correctable": 2, "uncorrectable": 1, "pending": False, "failed": False},
            "clocks": {"sm": 345, "mem": 3201, "max_sm": 1980, "max_mem": 3201},
            # slowdown at a T.Limit of -2: NVIDIA/NVSentinel#1371, on an H100
            "temperature": {
                "gpu": 34,
                "slowdown": None,
                "margin": 51,
                "tlimit": {"shutdown": -5, "slowdown": -2, "memory": 0, "gpu": 0},
            },
            "power": {"draw": 76.1, "limit": 700.0},
            "pcie": {"gen": 5, "width": 16, "max_gen": 5, "max_width": 16},
            "memory": {"total": 143771, "used": 71230, "reserved": 0, "free": 143771 - 71230},
            "nvlinks": [link(n, SWITCHES[n % 4], 6, {**seen, "replay": n % 3}) for n in range(18)],
            "fabric": {"state": 3, "status": 0, "cluster": "0" * 32, "clique": 0, "health": 0x2},
            "processes": [{"pid": 900 + index, "name": "train", "kind": "compute", "memory": 71218}],
        }
        for index in range(8)
    ]
    data = host(rows, device="0x2335", driver="570.211.01", cuda="12.8")
    later("3/errors/crc_flit", 121, 6)(data)  # a few of them happen all the time
    switch = "nvidia-nvswitch1: SXid (PCI:0000:c2:00.0): 22013, "
    data["gpus"]["xids"] = [
        f"{switch}Non-fatal, Link 28 Minion Link DLREQ interrupt",
        f"{switch}Severity 0 Engine instance 28 Sub-engine instance 00",
        "NVRM: Xid (PCI:0000:12:00): 31, pid=77, name=train, Ch 00000008, MMU Fault",
    ]
    return data


def b200() -> Data:
    """HGX B200, as in qx-b200.xml. Its NVSwitches are no PCI devices: what is at a link's end is not told.

    NVML's per-link counters are not for NVLink 5; the number of its recoveries is a field.
    """
    recoveries = {**UNKNOWN_ERRORS, "recovery": 0}
    row: Data = {
        "name": "NVIDIA B200",
        "clocks": {"sm": 120, "mem": 3996, "max_sm": 1965, "max_mem": 3996},
        "temperature": {
            "gpu": 39,
            "slowdown": None,
            "margin": 49,
            "tlimit": {"shutdown": -5, "slowdown": -3, "memory": 0, "gpu": 0},
        },
        "power": {"draw": 195.7, "limit": 1000.0},
        "pcie": {"gen": 5, "width": 16, "max_gen": 5, "max_width": 16},
        "memory": {"total": 183359, "used": 0, "reserved": 0, "free": 183359 - 0},
        "nvlinks": [link(n, None, 7, recoveries) for n in range(18)],
        "fabric": {"state": 3, "status": 0, "cluster": "0" * 32, "clique": 0, "health": 0x80},
    }
    return host([copy.deepcopy(row) for _ in range(8)], device="0x2901", driver="580.105.08", cuda="13.0")


def v100_with_four_links() -> Data:
    """A virtual machine with 4 of 8 GPUs, and so 4 of each one's 6 links (Azure/azhpc-diagnostics#73)."""
    far = {
        0: (1, 1, 2, None, 3, None),
        1: (0, 0, 3, None, 2, None),
        2: (3, 3, 0, None, 1, None),
        3: (2, 2, 1, None, 0, None),
    }
    rows: list[Data] = [
        {
            "name": "Tesla V100-SXM2-16GB",
            "remapped_rows": dict.fromkeys(("correctable", "uncorrectable", "pending", "failed")),
            "retired_pages_pending": False,
            "clocks": {"sm": 135, "mem": 877, "max_sm": 1530, "max_mem": 877},
            "power": {"draw": 41.9, "limit": 300.0},
            "pcie": {"gen": 3, "width": 16, "max_gen": 3, "max_width": 16},
            "mig": {"current": None, "pending": None},
            "memory": {"total": 16384, "used": 0, "reserved": 0, "free": 16384 - 0},
            "nvlinks": [
                inactive(n) if to is None else link(n, bus_id(to), 2) for n, to in enumerate(far[index])
            ],
            "fabric": dict.fromkeys(("state", "status", "cluster", "clique", "health")),
        }
        for index in range(4)
    ]
    data = host(rows, device="0x1db1", driver="535.309.01", cuda="12.2", virtual="microsoft")
    data["nvml"]["confidential"] = {"on": None, "ready": None}
    return data


def vgpu_t4() -> Data:
    """Two virtual T4: clocks, heat, links and ways are the hypervisor's (NVIDIA/TensorRT-LLM#1861)."""
    nothing = made_up_gpu(0, 1)
    rows: list[Data] = [
        {
            "name": "GRID T4-16Q",
            "serial": None,
            **{
                key: dict.fromkeys(nothing[key])
                for key in ("ecc", "remapped_rows", "clocks", "throttle", "power", "pcie", "mig", "fabric")
            },
            "temperature": {
                "gpu": None,
                "slowdown": None,
                "margin": None,
                "tlimit": dict.fromkeys(nothing["temperature"]["tlimit"]),
            },
            "memory": {"total": 16384, "used": 350, "reserved": 0, "free": 16384 - 350},
            "nvlinks": None,
            "peers": [
                {
                    "index": 1 - index,
                    "ancestor": None,
                    "p2p": dict.fromkeys(("read", "write", "nvlink", "atomics", "pci")),
                }
            ],
        }
        for index in range(2)
    ]
    data = host(rows, device="0x1eb8", driver="550.163.01", cuda="12.4", virtual="vmware")
    data["nvml"]["confidential"] = {"on": None, "ready": None}
    for found in data["cuda"]["gpus"]:
        found["link"] = {"speed": "Unknown", "width": "0", "gb_s": None}
    data["cuda"]["all_reduce"] |= {"direct": 0, "through_host": [["0000:10:00.0", "0000:11:00.0"]] * 2}
    return data


def h100_confidential() -> Data:
    """An H100 of a confidential virtual machine, set ready (`nvidia-smi conf-compute -srs 1`)."""
    row: Data = {
        "name": "NVIDIA H100 PCIe",
        "clocks": {"sm": 345, "mem": 1593, "max_sm": 1755, "max_mem": 1593},
        "temperature": {
            "gpu": 32,
            "slowdown": None,
            "margin": 55,
            "tlimit": {"shutdown": -5, "slowdown": -2, "memory": 0, "gpu": 0},
        },
        "power": {"draw": 47.2, "limit": 350.0},
        "pcie": {"gen": 5, "width": 16, "max_gen": 5, "max_width": 16},
        "memory": {"total": 81559, "used": 0, "reserved": 0, "free": 81559 - 0},
        "nvlinks": [inactive(n) for n in range(18)],  # no bridge
        "fabric": dict.fromkeys(("state", "status", "cluster", "clique", "health")),
    }
    data = host([row], device="0x2331", driver="550.163.01", cuda="12.4", virtual="kvm")
    data["nvml"]["confidential"] = {"on": True, "ready": True}
    link = {"speed": "32.0 GT/s PCIe", "width": "16", "gb_s": 63.02}
    data["cuda"]["gpus"][0].update(h2d_gb_s=9.1, d2h_gb_s=8.7, link=link)
    return data


ONE_GPU = {f"multi-gpu.{name}": "one GPU" for name in ("topology", "p2p", "nvlink", "fabric", "all-reduce")}
PROFILES: dict[str, Profile] = {
    "A100 x 8, MIG mixed": Profile(
        a100_mig_mixed,
        {"compute.kernel": "MIG is on", "multi-gpu.all-reduce": "MIG is on", "monitoring.dcgm": "MIG is on"},
        (
            ("multi-gpu.nvlink", gpu("nvlinks/3/state", False, 5), "GPU 5 (00000000:15:00.0) 11 of 12"),
            ("multi-gpu.p2p", gpu("peers/6/p2p/read", 5, 4), "GPU 4 (00000000:14:00.0) to GPU 7"),
            ("monitoring.dcgm", put("monitoring/dcgm/out", "Error: unable to connect"), "exits 223"),
        ),
        old_driver=True,
    ),
    "H200 x 8 after 200 days": Profile(
        h200_after_200_days,
        {},
        (
            ("multi-gpu.nvlink", later("7/errors/recovery", 2, 3), "recovery errors grew by 1 in 30 s"),
            ("multi-gpu.nvlink", later("7/errors/crc_flit", 9118, 3), "crc_flit errors grew by 300 a second"),
            ("multi-gpu.nvlink", later("7/state", False, 3), "NVLink 7 is inactive"),
            ("gpu.clocks", gpu("temperature/margin", -3), "a margin of -3 degrees, wanted at least -2"),
            ("multi-gpu.fabric", gpu("fabric/health", 0x1), "degraded bandwidth"),
        ),
    ),
    "B200 x 8": Profile(
        b200,
        {},
        (
            ("multi-gpu.p2p", gpu("peers/0/p2p/read", 5), "peer read is not supported, wanted ok"),
            ("multi-gpu.fabric", gpu("fabric/state", 1, 2), "in the fabric is: not started"),
            ("multi-gpu.nvlink", later("17/errors/recovery", 3), "NVLink 17: recovery errors grew by 3"),
        ),
    ),
    "V100 with 4 of 6 links": Profile(
        v100_with_four_links,
        {},
        (("multi-gpu.nvlink", gpu("nvlinks/4/state", False, 2), "3 of 6, not 3, 4, 5"),),
        old_driver=True,
    ),
    "vGPU T4": Profile(
        vgpu_t4,
        {
            "gpu.clocks": "not reported",
            "gpu.ecc": "not reported",
            "gpu.memory-repair": "not reported",
            "gpu.throttle": "not reported",
            "gpu.pcie-link": "not reported",
            "compute.bandwidth": "does not report the link's rate",
            "multi-gpu.topology": "no GPU reports its paths",
        },
        (
            ("gpu.clocks", gpu("clocks/max_sm", 0), "0 MHz, wanted more than 0"),
            ("gpu.nvml", gpu("uuid", None, 1), "no UUID"),
        ),
    ),
    "H100 with confidential computing": Profile(
        h100_confidential,
        {**ONE_GPU, "compute.bandwidth": "bounce buffer"},
        (("gpu.confidential", put("nvml/confidential/ready", False), "ready state is off, wanted set"),),
    ),
}
