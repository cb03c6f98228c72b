"""Gathers what NVML says of the machine's GPUs.

Runs on the judged machine beside `gpukiln.probe.gather`, and obeys the same rules. It loads NVIDIA's own
bindings (pynvml of nvidia-ml-py), which are sent along and imported only where there is a GPU.

A value that a GPU or its driver doesn't have is null. An error that NVML did not have to give is kept as
`{"_error": text, "code": NVML's number}` in the value's place: a check that reads it fails.
"""

# See gpukiln/probe/gather.py.

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection
from typing import Any

from gpukiln.probe.child import Tell, call
from gpukiln.probe.nvml_more import bad as _bad
from gpukiln.probe.nvml_more import more

TIMEOUT_S = 180.0  # a GPU whose firmware hangs costs tens of seconds a call
NOT_SUPPORTED, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, VERSION_MISMATCH, NOT_FOUND = 3, 13, 2, 25, 6
NOTHING: dict[str, Any] = {
    "available": False,
    "error": None,
    "driver": None,
    "nvml": None,
    "cuda_driver": None,
    "confidential": {"on": None, "ready": None},
    "gpus": [],
}
# Bits of nvmlDeviceGetCurrentClocksEventReasons.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
LINK_ERRORS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}
# Fields (nvml.h, NVML_FI_DEV_*): how often a link of NVLink 5 recovered, and thresholds as T.Limit, in
# degrees of margin, on Ada and later.
RECOVERIES = 215
TLIMIT = {"shutdown": 193, "slowdown": 194, "memory": 195, "gpu": 196}
NO_HANDLE = {"_error": "NVML gives no handle of it", "code": NOT_SUPPORTED}
P2P = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pci": 4}


def address(bus_id: str) -> str:
    """A bus id of NVML, 00000000:00:1E.0, as sysfs writes it: 0000:00:1e.0."""
    domain, _colon, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def name_gpus(facts: dict[str, Any]) -> None:
    """Give the GPUs of the PCI bus (`gpus.pci`) the names by which NVML knows them."""
    known = {}
    for gpu in facts.get("nvml", {}).get("gpus", []):
        if isinstance(gpu.get("bus_id"), str) and isinstance(gpu.get("name"), str):
            known[address(gpu["bus_id"])] = gpu["name"]
    for gpu in facts.get("gpus", {}).get("pci", []):
        if gpu["address"] in known:
            gpu["name"] = known[gpu["address"]]


def nvml_facts(there: bool) -> dict[str, Any]:
    """What NVML says: {available, error, driver, nvml, cuda_driver, confidential, gpus}.

    Args:
        there: Whether there are GPUs to ask about; where there is none nothing is loaded.
    """
    return call(read_nvml, TIMEOUT_S) if there else dict(NOTHING)


def nvlink_facts(there: bool) -> dict[str, Any]:
    """The NVLinks once more, to be compared with what `nvml_facts` found: {error, gpus: [{index, nvlinks}]}.

    Args:
        there: As of `nvml_facts`.
    """
    return call(read_nvlinks, TIMEOUT_S) if there else {"error": None, "gpus": []}


class Nvml:
    """Asks pynvml, and turns its errors into values."""

    NOT_FOUND, VERSION_MISMATCH = NOT_FOUND, VERSION_MISMATCH

    def __init__(self) -> None:
        import pynvml  # noqa: PLC0415 - only where there is a GPU

        self.pynvml = pynvml

    def problem(self, error: Any) -> dict[str, Any]:
        return {"_error": str(error), "code": int(error.value)}

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function of pynvml by its name."""
        try:
            return getattr(self.pynvml, name)(*args)
        except self.pynvml.NVMLError as error:
            if error.value in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return None
            return {"_error": f"{name}: {error}", "code": int(error.value)}

    def either(self, newer: tuple[Any, ...], older: tuple[Any, ...]) -> Any:
        """As `ask`; the older function where the newer one is not there."""
        found = self.ask(*newer)
        return self.ask(*older) if found is None else found

    def field(self, handle: Any, number: int, kind: str, scope: int = 0) -> Any:
        """A field of a GPU, read as `kind` of NVML's union of values; null where this driver has no such."""
        found = self.ask("nvmlDeviceGetFieldValues", handle, [(number, scope)])
        if found is None or _bad(found):
            return found
        code = found[0].nvmlReturn  # of this field; what is in it means nothing unless it is 0
        if code in (NOT_SUPPORTED, INVALID_ARGUMENT):
            return None
        if code:
            return {"_error": f"field {number}: {self.pynvml.NVMLError(code)}", "code": int(code)}
        return getattr(found[0].value, kind)

    def handles(self, skip: Collection[int] = (), about: Callable[[int], None] | None = None) -> Any:
        """{index: handle, null or an error}; an error where not even the number of GPUs is told.

        Args:
            skip: Indices that are left out.
            about: Told of each index before it is asked for.
        """
        count = self.ask("nvmlDeviceGetCount")
        if not isinstance(count, int):
            return count
        found = {}
        for index in range(count):
            if index not in skip:
                if about is not None:
                    about(index)
                found[index] = self.ask("nvmlDeviceGetHandleByIndex", index)
        return found

    def gpu(self, index: int, handle: Any) -> dict[str, Any]:
        """What is judged of a GPU."""
        return _gpu(self, index, handle)

    def processes(self, handle: Any) -> Any:
        """The processes of a GPU or a MIG device."""
        return _processes(self, handle)


def _spread(answer: Any, *names: str) -> dict[str, Any]:
    """One answer of several values, by name; null or the error for each where there is none."""
    if answer is None or _bad(answer):
        return dict.fromkeys(names, answer)
    return dict(zip(names, answer))


def _whether(value: Any) -> Any:
    return value if value is None or _bad(value) else bool(value)


def _scaled(value: Any, unit: float) -> Any:
    return value if value is None or _bad(value) else round(value / unit, 1)


def read_nvml() -> dict[str, Any]:
    """Ask NVML for everything that is judged; for what is what see `gpu_facts`."""
    gpus: dict[int, dict[str, Any]] = {}
    return {**_read(gpus.__setitem__, Nvml.gpu), "gpus": list(gpus.values())}


def read_gpus(tell: Tell, skip: Collection[int], limit_s: float) -> None:
    """Ask NVML for everything that is judged and shown, and tell it GPU by GPU, for one may hang.

    Args:
        tell: Given `head`, all that `read_nvml` returns but the GPUs, and each `gpu` with its `index`, which
            has what is shown beside it as `more`.
        skip: Indices of GPUs that are not asked.
        limit_s: For each GPU.
    """

    def about(index: int) -> None:
        tell(at=f"GPU {index}", limit=limit_s, index=index)

    def one(nvml: Nvml, index: int, handle: Any) -> dict[str, Any]:
        about(index)
        return {**nvml.gpu(index, handle), "more": more(nvml, handle)}

    tell(at="NVML's start", limit=limit_s)
    head = _read(lambda index, gpu: tell(gpu=gpu, index=index), one, skip=skip, about=about)
    tell(head=head)


def _read(
    add: Callable[[int, dict[str, Any]], None],
    one: Callable[[Nvml, int, Any], dict[str, Any]],
    skip: Collection[int] = (),
    about: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    nvml, found = Nvml(), {**NOTHING, "gpus": []}
    try:
        nvml.pynvml.nvmlInit()
    except nvml.pynvml.NVMLError as error:
        return {**found, "error": nvml.problem(error)}
    cuda = nvml.ask("nvmlSystemGetCudaDriverVersion_v2")
    found.update(
        available=True,
        driver=nvml.ask("nvmlSystemGetDriverVersion"),
        nvml=nvml.ask("nvmlSystemGetNVMLVersion"),
        cuda_driver=f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else cuda,
        confidential=_confidential(nvml),
    )
    handles = nvml.handles(skip, about)
    if not isinstance(handles, dict) or _bad(handles):
        return {**found, "available": False, "error": handles}
    good = {i: h for i, h in handles.items() if h is not None and not _bad(h)}
    for index, handle in handles.items():
        if index not in good:
            add(index, {"index": index, "error": handle or NO_HANDLE})
            continue
        gpu = one(nvml, index, handle)
        peers = [_peer(nvml, i, handle, other) for i, other in good.items() if i != index]
        add(index, {**gpu, "peers": peers})
    with contextlib.suppress(nvml.pynvml.NVMLError):
        nvml.pynvml.nvmlShutdown()
    return found


def read_nvlinks() -> dict[str, Any]:
    """Ask NVML for the NVLinks alone; each GPU's are an error where it can't be asked."""
    nvml = Nvml()
    try:
        nvml.pynvml.nvmlInit()
    except nvml.pynvml.NVMLError as error:
        return {"error": nvml.problem(error), "gpus": []}
    handles = nvml.handles()
    if not isinstance(handles, dict) or _bad(handles):
        return {"error": handles, "gpus": []}
    gpus = [
        {"index": i, "nvlinks": (h or NO_HANDLE) if h is None or _bad(h) else _links(nvml, h)}
        for i, h in handles.items()
    ]
    with contextlib.suppress(nvml.pynvml.NVMLError):
        nvml.pynvml.nvmlShutdown()
    return {"error": None, "gpus": gpus}


def _confidential(nvml: Nvml) -> dict[str, Any]:
    """{on: whether the GPUs do confidential computing, ready: whether they accept work then}.

    Until somebody has set the ready state, CUDA answers 802 there (NVIDIA/nvtrust#87; `nvidia-smi
    conf-compute -srs 1`).
    """
    state = nvml.ask("nvmlSystemGetConfComputeState")
    on = state if state is None or _bad(state) else bool(state.ccFeature)
    return {"on": on, "ready": _whether(nvml.ask("nvmlSystemGetConfComputeGpusReadyState"))}


def _gpu(nvml: Nvml, index: int, handle: Any) -> dict[str, Any]:
    """One GPU: clocks in MHz, memory in MiB, power in W, temperature in degrees Celsius."""
    ask = nvml.ask

    def get(name: str, *args: Any) -> Any:
        return ask(f"nvmlDeviceGet{name}", handle, *args)

    pci, memory = get("PciInfo"), get("MemoryInfo")
    gone = pci is None or _bad(pci)
    no_memory = memory is None or _bad(memory)
    mode = _spread(get("EccMode"), "current", "pending")
    rows = _spread(get("RemappedRows"), "correctable", "uncorrectable", "pending", "failed")
    mask = nvml.either(
        ("nvmlDeviceGetCurrentClocksEventReasons", handle),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
    )
    return {
        "index": index,
        "error": None,
        "bus_id": pci if gone else pci.busId,
        "name": get("Name"),
        "uuid": get("UUID"),
        "serial": get("Serial"),
        "persistence": _whether(get("PersistenceMode")),
        "ecc": {
            **{name: _whether(value) for name, value in mode.items()},
            "volatile_uncorrected": get("TotalEccErrors", 1, 0),
            "volatile_corrected": get("TotalEccErrors", 0, 0),
            "aggregate_uncorrected": get("TotalEccErrors", 1, 1),
            "aggregate_corrected": get("TotalEccErrors", 0, 1),
        },
        "remapped_rows": {
            **rows,
            "pending": _whether(rows["pending"]),
            "failed": _whether(rows["failed"]),
        },
        "retired_pages_pending": _whether(get("RetiredPagesPendingStatus")),
        "clocks": {
            "sm": get("ClockInfo", 1),
            "mem": get("ClockInfo", 2),
            "max_sm": get("MaxClockInfo", 1),
            "max_mem": get("MaxClockInfo", 2),
        },
        "throttle": {
            "mask": mask,
            "names": [n for b, n in REASONS.items() if mask & b] if isinstance(mask, int) else None,
        },
        "temperature": _temperature(nvml, handle),
        "power": {
            "draw": _scaled(get("PowerUsage"), 1000),
            "limit": _scaled(get("EnforcedPowerLimit"), 1000),
        },
        "pcie": {
            "gen": get("CurrPcieLinkGeneration"),
            "width": get("CurrPcieLinkWidth"),
            "max_gen": get("MaxPcieLinkGeneration"),
            "max_width": get("MaxPcieLinkWidth"),
        },
        "mig": {k: _whether(v) for k, v in _spread(get("MigMode"), "current", "pending").items()},
        "memory": {
            "total": memory if no_memory else memory.total >> 20,
            "used": memory if no_memory else memory.used >> 20,
        },
        "nvlinks": _links(nvml, handle),
        "fabric": _fabric(nvml, handle),
        "processes": _processes(nvml, handle),
    }


def _temperature(nvml: Nvml, handle: Any) -> dict[str, Any]:
    """{gpu, slowdown, margin, tlimit: {shutdown, slowdown, memory, gpu}} in degrees Celsius.

    On Ada and later T.Limit supersedes the threshold (nvml.h), which answers 0 or nothing then. margin: how
    far it is to the limit, negative above it; tlimit: the margins at which something is done.
    """
    now = nvml.either(("nvmlDeviceGetTemperatureV", handle, 0), ("nvmlDeviceGetTemperature", handle, 0))
    return {
        "gpu": now,
        "slowdown": nvml.ask("nvmlDeviceGetTemperatureThreshold", handle, 1) or None,
        "margin": nvml.ask("nvmlDeviceGetMarginTemperature", handle),
        "tlimit": {name: nvml.field(handle, number, "siVal") for name, number in TLIMIT.items()},
    }


def _links(nvml: Nvml, handle: Any) -> Any:
    """[{link, state, version, remote_bus_id, errors}], null where the GPU has no NVLink.

    errors count since the driver was loaded, or the GPU was reset.
    """
    links = []
    for link in range(nvml.pynvml.NVML_NVLINK_MAX_LINKS):
        state = nvml.ask("nvmlDeviceGetNvLinkState", handle, link)
        # No number of links can be asked for on every driver; which are not there are no valid argument.
        if state is None or (_bad(state) and state["code"] == INVALID_ARGUMENT):
            continue
        row: dict[str, Any] = {
            "link": link,
            "state": _whether(state),
            "version": None,
            "remote_bus_id": None,
            "errors": dict.fromkeys(LINK_ERRORS),
        }
        if row["state"] is True:
            remote = nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            row.update(
                version=nvml.ask("nvmlDeviceGetNvLinkVersion", handle, link),
                remote_bus_id=remote if remote is None or _bad(remote) else remote.busId,
                errors={
                    n: nvml.ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, number)
                    for n, number in LINK_ERRORS.items()
                },
            )
            row["errors"]["recovery"] = _recoveries(nvml, handle, link, row["errors"]["recovery"])
        links.append(row)
    if links and all(_bad(row["state"]) for row in links):
        return links[0]["state"]
    return links or None


def _recoveries(nvml: Nvml, handle: Any, link: int, counted: Any) -> Any:
    """How often a link recovered: by its counter or, of NVLink 5, by a field; the other one may be 0."""
    told = nvml.field(handle, RECOVERIES, "ullVal", link)
    if counted is None or (isinstance(counted, int) and isinstance(told, int) and told > counted):
        return told
    return counted


def _fabric(nvml: Nvml, handle: Any) -> dict[str, Any]:
    """{state, status, cluster, clique, health}.

    state: 0 none, 1 not started, 2 in progress, 3 completed; status: NVML's number of its outcome; GPUs that
    have cluster and clique in common reach each other; health: NVML's mask, null where it says nothing.
    """
    info = nvml.pynvml.c_nvmlGpuFabricInfoV_t()
    answer = nvml.ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    if answer is None or (_bad(answer) and answer["code"] == VERSION_MISMATCH):
        info = nvml.pynvml.c_nvmlGpuFabricInfo_t()
        answer = nvml.ask("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
    if answer is None or _bad(answer):
        return dict.fromkeys(("state", "status", "cluster", "clique", "health"), answer)
    return {
        "state": int(info.state),
        "status": int(info.status),
        "cluster": bytes(info.clusterUuid).hex(),
        "clique": int(info.cliqueId),
        "health": int(getattr(info, "healthMask", 0)) or None,
    }


def _processes(nvml: Nvml, handle: Any) -> Any:
    """[{pid, name, kind, memory}] in MiB, null where the GPU does not tell."""
    rows = []
    for kind in ("Compute", "Graphics"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        found = nvml.either((f"{name}_v3", handle), (f"{name}_v2", handle))
        if _bad(found) or (found is None and kind == "Compute"):
            return found
        for row in found or []:
            command, used = nvml.ask("nvmlSystemGetProcessName", row.pid), row.usedGpuMemory
            rows.append(
                {
                    "pid": row.pid,
                    "name": command if isinstance(command, str) else None,
                    "kind": kind.lower(),
                    "memory": None if used is None else used >> 20,
                }
            )
    return rows


def _peer(nvml: Nvml, index: int, handle: Any, other: Any) -> dict[str, Any]:
    """How another GPU is reached, in NVML's numbers: {index, ancestor, p2p: {read, write, nvlink, ...}}."""
    return {
        "index": index,
        "ancestor": nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handle, other),
        "p2p": {name: nvml.ask("nvmlDeviceGetP2PStatus", handle, other, n) for name, n in P2P.items()},
    }
