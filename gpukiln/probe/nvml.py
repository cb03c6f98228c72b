"""Gathers NVML's values of the machine's GPUs.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`. It loads NVIDIA's own bindings
(pynvml of nvidia-ml-py), which are sent with it and imported only where there is a GPU.

A value that a GPU or its driver doesn't have is null. Whatever else goes wrong with a call (NVML's error, an
exception of the bindings, a result of another type, a call that does not return) is in the place of
that call's value as `{"_error": text, "code": NVML's number or null, "name": why}`, and affects no other
value: only a check that reads it fails. `name` is left out for NVML's own errors.
"""

# See gpukiln/probe/gather.py.

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpukiln.probe.base import HungError, NotReachedError
from gpukiln.probe.child import Hang, Send, SlowCall, call, in_child
from gpukiln.probe.nvml_values import (
    count,
    display_facts,
    flag,
    is_error,
    memory,
    spread_values,
    text,
    thousandth,
    whole_number,
)

TIMEOUT_S = 180.0  # of `nvlink_facts`, for all GPUs
# Without persistence mode the first handle of each GPU initialises it: more than 25 s for eight A100
# (Azure/AgentBaker#2829), and each step waits for other processes that initialise GPUs.
START_S = 120.0  # for NVML to start, while it makes progress
GPU_S = 60.0  # for one GPU, likewise
STUCK_S = 30.0  # in state D without progress: firmware that does not answer, a lost device
SLOW_S = 5.0  # of silence, after which a message says what is waited for
HUNG_CALLS = 2  # of one GPU, after which it is not asked again
HUNG, SLOW, CRASHED, UNEXPECTED = "HUNG", "SLOW", "FAILED", "UNEXPECTED"
LIBRARY, LIBRARY_NOT_FOUND = "libnvidia-ml.so.1", 12
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
LINK_ERRORS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}
# Fields (nvml.h, NVML_FI_DEV_*): how often a link of NVLink 5 recovered, how many links there are, and
# thresholds as T.Limit, in degrees of margin, on Ada and later.
RECOVERIES, LINK_COUNT = 215, 91
TLIMIT = {"shutdown": 193, "slowdown": 194, "memory": 195, "gpu": 196}
NO_HANDLE = {"_error": "NVML gives no handle of it", "code": NOT_SUPPORTED}
P2P = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pci": 4}
Read = Callable[[Any], Any]


def address(bus_id: str) -> str:
    """A bus id of NVML, 00000000:00:1E.0, as sysfs writes it: 0000:00:1e.0.

    Other texts are returned unchanged, for messages.

    >>> address("00000000:00:1E.0")
    '0000:00:1e.0'
    >>> address("unknown")
    'unknown'
    """
    domain, _colon, rest = bus_id.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return bus_id.lower()


def name_gpus(facts: dict[str, Any]) -> None:
    """Give the GPUs of the PCI bus (`gpus.pci`) NVML's names."""
    known = {}
    for gpu in facts.get("nvml", {}).get("gpus", []):
        if isinstance(gpu.get("bus_id"), str) and isinstance(gpu.get("name"), str):
            known[address(gpu["bus_id"])] = gpu["name"]
    for gpu in facts.get("gpus", {}).get("pci", []):
        if gpu["address"] in known:
            gpu["name"] = known[gpu["address"]]


def nvml_facts(has_gpus: bool) -> dict[str, Any]:
    """NVML's facts: {available, error, driver, nvml, cuda_driver, confidential, gpus}.

    Args:
        has_gpus: Whether there are GPUs; without one nothing is loaded.

    Raises:
        HungError: NVML does not start, or a GPU gives no answer.
        NotReachedError: NVML has not started yet.
        RuntimeError: The process that asked NVML ended.
    """
    if not has_gpus:
        return dict(NOTHING)
    answer = ask_nvml(shown=False)
    if answer.why:
        kind = RuntimeError if not isinstance(answer.why, Hang) else HungError
        raise NotReachedError(answer.why) if isinstance(answer.why, SlowCall) else kind(answer.why)
    for gpu in answer.gpus:
        if gpu["error"] and gpu["error"].get("name") in (HUNG, SLOW):
            raise HungError(gpu["error"]["_error"])
    return {**answer.head, "gpus": answer.gpus}


def nvlink_facts(has_gpus: bool) -> dict[str, Any]:
    """The NVLinks again, for comparison with those of `nvml_facts`: {error, gpus: [{index, nvlinks}]}.

    Args:
        has_gpus: As of `nvml_facts`.
    """
    return call(read_nvlinks, TIMEOUT_S) if has_gpus else {"error": None, "gpus": []}


class CurrentCall:
    """The current call of a child process, in memory that the parent shares: a call may never return."""

    SIZE = 512

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.SIZE)

    def set(self, call: str) -> None:
        """Store the call that is about to be made."""
        data = call.encode()[: self.SIZE - 2] + b"\0"
        self._memory[: len(data)] = data

    def clear(self) -> None:
        """Store that no call is being made."""
        self._memory[0] = 0

    def get(self) -> str:
        """The stored call."""
        return bytes(self._memory[:]).partition(b"\0")[0].decode("utf-8", "replace")


class Nvml:
    """Calls pynvml, and returns errors as values.

    Args:
        calling: Stores each call while it is made.
        skip: Calls that are left out, in the form of `calling`, with the name of their earlier error.
    """

    NOT_FOUND, VERSION_MISMATCH = NOT_FOUND, VERSION_MISMATCH

    def __init__(self, calling: CurrentCall | None = None, skip: Mapping[str, str] | None = None) -> None:
        import pynvml  # noqa: PLC0415 - only where there is a GPU

        self.pynvml = pynvml
        self.index: int | None = None  # the GPU of the current call
        # leave out values that only the suite reads: counters of links, other kinds of P2P
        self.brief = False
        self._calling, self._skip = calling, skip or {}

    def ask(self, name: str, *args: Any, read: Read | None = None) -> Any:
        """Call a function of pynvml by its name.

        Args:
            read: Converts the returned value; raises TypeError or another exception where that has another
                type.
                Without it only bytes become text.
        """
        if self._calling is not None:
            more = [arg for arg in args[1:] if isinstance(arg, (int, list))] if len(args) > 1 else ""
            key = f"{self.index} {name} {more}"
            if self._skip and key in self._skip:
                return {"_error": f"{name} gave no answer before", "code": None, "name": self._skip[key]}
            self._calling.set(key)
        try:
            function = getattr(self.pynvml, name, None)
            if function is None:  # the bindings are older than the function
                return None
            returned = function(*args)
            return (read or _decoded)(returned)
        except self.pynvml.NVMLError as error:
            if _code(error) in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return None
            return {"_error": f"{name}: {error}", "code": _code(error)}
        except Exception as error:  # an exception or a wrong type affects only the value of this call
            why = f"{name}: {type(error).__name__}: {error}"
            return {"_error": why[:300], "code": None, "name": UNEXPECTED}
        finally:
            if self._calling is not None:
                self._calling.clear()

    def get(self, handle: Any, name: str, *args: Any, read: Read = whole_number) -> Any:
        """As `ask`, of nvmlDeviceGet and a name; most return a whole number."""
        return self.ask(f"nvmlDeviceGet{name}", handle, *args, read=read)

    def either(self, newer: tuple[Any, ...], older: tuple[Any, ...], read: Read | None = None) -> Any:
        """As `ask`; the older function where the newer one does not exist."""
        value = self.ask(*newer, read=read)
        return self.ask(*older, read=read) if value is None else value

    def field(self, handle: Any, number: int, kind: str, scope: int = 0) -> Any:
        """A field of a GPU, read as `kind` of NVML's union of values; null where the driver lacks it."""

        def read(values: Any) -> Any:
            status = whole_number(values[0].nvmlReturn)  # the union has a value only where this is 0
            if status in (NOT_SUPPORTED, INVALID_ARGUMENT):
                return None
            if status:
                return {"_error": f"field {number}: {self.pynvml.NVMLError(status)}", "code": status}
            return whole_number(getattr(values[0].value, kind))

        return self.ask("nvmlDeviceGetFieldValues", handle, [(number, scope)], read=read)

    def handles(self, skip: Collection[int] = (), about: Callable[[int], None] | None = None) -> Any:
        """{index: handle, null or an error}; an error where not even the number of GPUs is known.

        Args:
            skip: Indices that are left out.
            about: Called with each index before it is asked for.
        """
        self.index = None
        most = self.ask("nvmlDeviceGetCount", read=count)
        if not isinstance(most, int):
            return most or {"_error": "nvmlDeviceGetCount: Not Supported", "code": NOT_SUPPORTED}
        by_index = {}
        for index in range(most):
            if index not in skip:
                if about is not None:
                    about(index)
                self.index = index
                by_index[index] = self.ask("nvmlDeviceGetHandleByIndex", index, read=lambda handle: handle)
        return by_index

    def processes(self, handle: Any) -> Any:
        """The processes of a GPU or a MIG device."""
        return _processes(self, handle)


def _code(error: Any) -> int | None:
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def _decoded(returned: Any) -> Any:
    return text(returned) if isinstance(returned, bytes) else returned


def _several_values(nvml: Nvml, handle: Any, function: str, **reads: Read) -> dict[str, Any]:
    """A result of several values, each under its name; null or the error for each where the call failed."""

    def each(returned: Any) -> dict[str, Any]:
        if len(returned) < len(reads):
            raise TypeError(f"{len(returned)} values, wanted {len(reads)}")
        return {name: read(value) for (name, read), value in zip(reads.items(), returned)}

    return spread_values(nvml.ask(function, handle, read=each), *reads)


@dataclass
class NvmlAnswer:
    """The answer of NVML.

    Args:
        head: The result of `read_nvml` without the GPUs; empty without an answer.
        gpus: Each GPU, or the error in its place.
        why: Why the rest is unknown; a `Hang` where NVML gave no answer; usually empty.
    """

    head: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""


def ask_nvml(
    *, shown: bool, silent: Callable[[float, str, str], None] | None = None, ask: Any = None
) -> NvmlAnswer:
    """Ask NVML in a child process, GPU by GPU and call by call, because any call may never return.

    After a call that does not return the GPU is asked again without it, so that only its value is missing. A
    GPU with several such calls is given up.

    Args:
        shown: Whether each GPU gets the values for display too, as `more`.
        silent: Called while NVML is silent, as that of `in_child`.
        ask: Runs in the child instead of `read_gpus`.
    """
    answer = NvmlAnswer()
    done: dict[int, dict[str, Any]] = {}
    skip: dict[str, str] = {}
    hung: dict[int | None, int] = {}  # by GPU, how many calls did not return
    calling = CurrentCall()
    waited = False
    at: int | None = None

    def receive(message: dict[str, Any]) -> None:
        nonlocal at
        answer.head.update(message.get("head", {}))
        at = message.get("index", at)
        if "gpu" in message:
            done[message["index"]] = message["gpu"]

    def work(send: Send) -> None:
        (ask or read_gpus)(send, tuple(done), calling, skip, shown)

    while True:
        at = None
        calling.clear()
        # another process that holds the driver's lock had enough time in the first round
        stuck_s = STUCK_S / 3 if waited else STUCK_S
        ended = in_child(work, receive, stuck_s=stuck_s, silent=silent)
        waited = waited or isinstance(ended, Hang)
        call_made = calling.get()
        if not ended:
            break
        name = CRASHED
        if isinstance(ended, Hang):
            name = SLOW if isinstance(ended, SlowCall) else HUNG
        if call_made and not _is_vital(call_made):
            hung[at] = hung.get(at, 0) + 1
            if at is None or hung[at] < HUNG_CALLS:
                skip[call_made] = name
                continue
        if at is None or at in done:
            answer.why = ended
            break
        # This GPU gives no answer, or ends the process that asks it: the others are asked again without it.
        done[at] = {"index": at, "error": {"_error": str(ended), "code": None, "name": name}}
    answer.gpus = [done[index] for index in sorted(done)]
    return answer


def _is_vital(call: str) -> bool:
    """Whether a call is needed for all other values of a GPU, or of all GPUs."""
    return call.split()[1] in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")


def read_gpus(
    send: Send, skip: Collection[int], calling: CurrentCall, calls: Mapping[str, str], shown: bool
) -> None:
    """Ask NVML for the values of the checks and for display; runs in the child process of `ask_nvml`.

    Args:
        send: Called with `head`, the result of `read_nvml` without the GPUs, and each `gpu` with its `index`.
        skip: Indices of GPUs that are not asked.
        calling: Stores each call while it is made.
        calls: Calls that are not made.
        shown: As of `ask_nvml`.
    """

    def about(index: int) -> None:
        send(at=f"GPU {index}", limit=GPU_S, index=index)

    def one(nvml: Nvml, index: int, handle: Any) -> dict[str, Any]:
        about(index)
        gpu = gpu_facts(nvml, index, handle)
        return {**gpu, "more": display_facts(nvml, handle)} if shown else gpu

    send(at="NVML's start", limit=START_S)
    nvml = Nvml(calling, calls)
    nvml.brief = shown
    _read(
        nvml,
        lambda head: send(head=head),
        lambda index, gpu: send(gpu=gpu, index=index),
        one,
        skip=skip,
        about=about,
    )


def read_nvml() -> dict[str, Any]:
    """Ask NVML for the values that the checks read, in this process; `gpu_facts` explains them."""
    head: dict[str, Any] = {}
    gpus: dict[int, dict[str, Any]] = {}
    _read(Nvml(), head.update, gpus.__setitem__, gpu_facts)
    return {**head, "gpus": list(gpus.values())}


def _read(
    nvml: Nvml,
    general: Callable[[dict[str, Any]], None],
    add: Callable[[int, dict[str, Any]], None],
    ask_gpu: Callable[[Nvml, int, Any], dict[str, Any]],
    skip: Collection[int] = (),
    about: Callable[[int], None] | None = None,
) -> None:
    """Ask for all GPUs.

    Args:
        general: Called with the values that are not about one GPU.
        add: Called with each GPU.
        ask_gpu: Returns the values of one GPU.
    """
    head = {**NOTHING}
    del head["gpus"]
    if error := _start(nvml):
        general({**head, "error": error})
        return
    general(
        {
            **head,
            "available": True,
            "driver": nvml.ask("nvmlSystemGetDriverVersion", read=text),
            "nvml": nvml.ask("nvmlSystemGetNVMLVersion", read=text),
            "cuda_driver": nvml.ask("nvmlSystemGetCudaDriverVersion_v2", read=_cuda_version),
            "confidential": _confidential(nvml),
        }
    )
    handles = nvml.handles(skip, about)
    if is_error(handles):
        general({"available": False, "error": handles})
        return
    good = {i: h for i, h in handles.items() if h is not None and not is_error(h)}
    for index, handle in handles.items():
        if index not in good:
            add(index, {"index": index, "error": handle or NO_HANDLE})
            continue
        nvml.index = index
        gpu = ask_gpu(nvml, index, handle)
        peers = [_peer(nvml, i, handle, other) for i, other in good.items() if i != index]
        add(index, {**gpu, "peers": peers})


def _start(nvml: Nvml) -> dict[str, Any] | None:
    """Start NVML; returns the error where it does not start."""
    error = nvml.ask("nvmlInit")
    if not is_error(error):
        return None
    error["_error"] = error["_error"].replace("nvmlInit: ", "")
    # The loader's own message names the missing file.
    if error["code"] == LIBRARY_NOT_FOUND:  # the bindings hide why the library can't be loaded
        try:
            ctypes.CDLL(LIBRARY)
        except OSError as why:
            return {**error, "library": str(why)}
    return dict(error)


def _cuda_version(returned: Any) -> str:
    return f"{whole_number(returned) // 1000}.{whole_number(returned) % 1000 // 10}"


def read_nvlinks() -> dict[str, Any]:
    """Ask NVML for the NVLinks alone; an error for each GPU that can't be asked."""
    nvml = Nvml()
    if error := _start(nvml):
        return {"error": error, "gpus": []}
    handles = nvml.handles()
    if is_error(handles):
        return {"error": handles, "gpus": []}
    gpus = [
        {"index": i, "nvlinks": (h or NO_HANDLE) if h is None or is_error(h) else _links(nvml, h)}
        for i, h in handles.items()
    ]
    return {"error": None, "gpus": gpus}


def _confidential(nvml: Nvml) -> dict[str, Any]:
    """{on: whether confidential computing is on, ready: whether the GPUs accept work then}.

    Until the ready state is set, CUDA answers 802 (NVIDIA/nvtrust#87; `nvidia-smi
    conf-compute -srs 1`).
    """
    return {
        "on": nvml.ask("nvmlSystemGetConfComputeState", read=lambda state: flag(state.ccFeature)),
        "ready": nvml.ask("nvmlSystemGetConfComputeGpusReadyState", read=flag),
    }


def gpu_facts(nvml: Nvml, index: int, handle: Any) -> dict[str, Any]:
    """One GPU: the changing values, as `current_values` reads them, and the constant ones."""
    get = partial(nvml.get, handle)
    now = current_values(nvml, handle)
    return {
        "index": index,
        "error": None,
        "bus_id": get("PciInfo", read=lambda pci: text(pci.busId)),
        "name": get("Name", read=text),
        "uuid": get("UUID", read=text),
        "serial": get("Serial", read=text),
        "persistence": get("PersistenceMode", read=flag),
        "ecc": {
            **_several_values(nvml, handle, "nvmlDeviceGetEccMode", current=flag, pending=flag),
            "volatile_uncorrected": get("TotalEccErrors", 1, 0),
            "volatile_corrected": get("TotalEccErrors", 0, 0),
            "aggregate_uncorrected": get("TotalEccErrors", 1, 1),
            "aggregate_corrected": get("TotalEccErrors", 0, 1),
        },
        "remapped_rows": _several_values(
            nvml,
            handle,
            "nvmlDeviceGetRemappedRows",
            correctable=whole_number,
            uncorrectable=whole_number,
            pending=flag,
            failed=flag,
        ),
        "retired_pages_pending": get("RetiredPagesPendingStatus", read=flag),
        "clocks": {
            **now["clocks"],
            "max_sm": get("MaxClockInfo", 1),
            "max_mem": get("MaxClockInfo", 2),
        },
        "throttle": now["throttle"],
        # On Ada and later T.Limit, the margin at which the GPU acts, supersedes the threshold, which is 0 or
        # missing there (nvml.h).
        "temperature": {
            **now["temperature"],
            "slowdown": get("TemperatureThreshold", 1) or None,
            "tlimit": {name: nvml.field(handle, number, "siVal") for name, number in TLIMIT.items()},
        },
        "power": {**now["power"], "limit": get("EnforcedPowerLimit", read=thousandth)},
        "pcie": {
            **now["pcie"],
            "max_gen": get("MaxPcieLinkGeneration"),
            "max_width": get("MaxPcieLinkWidth"),
        },
        "mig": _several_values(nvml, handle, "nvmlDeviceGetMigMode", current=flag, pending=flag),
        "memory": now["memory"],
        "nvlinks": _links(nvml, handle),
        "fabric": _fabric(nvml, handle),
        "processes": _processes(nvml, handle),
    }


def current_values(nvml: Nvml, handle: Any) -> dict[str, Any]:
    """The values that change all the time; `watch` reads only these.

    Clocks in MHz, memory in MiB (`memory`), power in W, temperature in degrees Celsius; margin: the
    distance to the limit, negative above it.
    """
    get = partial(nvml.get, handle)
    # NVML renamed throttle reasons to event reasons; older libraries have only the older name.
    mask = nvml.either(
        ("nvmlDeviceGetCurrentClocksEventReasons", handle),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
        read=whole_number,
    )
    return {
        "clocks": {"sm": get("ClockInfo", 1), "mem": get("ClockInfo", 2)},
        "throttle": {"mask": mask},
        "temperature": {
            "gpu": nvml.either(
                ("nvmlDeviceGetTemperatureV", handle, 0),
                ("nvmlDeviceGetTemperature", handle, 0),
                read=whole_number,
            ),
            "margin": get("MarginTemperature"),
        },
        "power": {"draw": get("PowerUsage", read=thousandth)},
        "pcie": {"gen": get("CurrPcieLinkGeneration"), "width": get("CurrPcieLinkWidth")},
        "memory": memory(nvml, handle),
    }


def _links(nvml: Nvml, handle: Any) -> Any:
    """[{link, state, version, remote_bus_id, errors}], null where the GPU has no NVLink.

    errors are counted since the driver was loaded or the GPU was reset.
    """
    links = []
    listed = nvml.field(handle, LINK_COUNT, "uiVal")
    most = nvml.pynvml.NVML_NVLINK_MAX_LINKS
    for link in range(min(listed, most) if isinstance(listed, int) else most):
        state = nvml.ask("nvmlDeviceGetNvLinkState", handle, link, read=flag)
        # Some drivers do not have the field with the number of links; they answer the index of a missing
        # link with "invalid argument".
        if state is None or (is_error(state) and state["code"] == INVALID_ARGUMENT):
            continue
        row: dict[str, Any] = {
            "link": link,
            "state": state,
            "version": None,
            "remote_bus_id": None,
            "errors": dict.fromkeys(LINK_ERRORS),
        }
        if row["state"] is True:
            row["remote_bus_id"] = nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, read=_remote)
        if row["state"] is True and not nvml.brief:
            row.update(
                version=nvml.ask("nvmlDeviceGetNvLinkVersion", handle, link, read=whole_number),
                errors={
                    n: nvml.ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, number, read=whole_number)
                    for n, number in LINK_ERRORS.items()
                },
            )
            row["errors"]["recovery"] = _recoveries(nvml, handle, link, row["errors"]["recovery"])
        links.append(row)
    if links and all(is_error(row["state"]) for row in links):
        return links[0]["state"]
    return links or None


def _remote(pci: Any) -> str | None:
    """The device at a link's other end; None for all ones, which is no PCI device (GB200's switches)."""
    bus_id = text(pci.busId)
    return None if not bus_id or bus_id.upper().startswith("FFFFFFFF:FF") else bus_id


def _recoveries(nvml: Nvml, handle: Any, link: int, counted: Any) -> Any:
    """How often a link recovered: by its counter or, on NVLink 5, by a field; the other value may be 0."""
    listed = nvml.field(handle, RECOVERIES, "ullVal", link)
    if counted is None or (isinstance(counted, int) and isinstance(listed, int) and listed > counted):
        return listed
    return counted


def _fabric(nvml: Nvml, handle: Any) -> dict[str, Any]:
    """{state, status, cluster, clique, health}.

    state: 0 none, 1 not started, 2 in progress, 3 completed; status: NVML's number of its outcome; GPUs
    with the same cluster and clique reach each other; health: NVML's mask, null where it has none.
    """
    info: Any = None

    def ask(name: str, layout: str) -> Any:
        nonlocal info
        # The versioned structure has the health mask; the older one is for older drivers.
        make = getattr(nvml.pynvml, layout, None)  # older bindings do not have it
        if make is None:
            return None
        info = make()
        return nvml.ask(name, handle, ctypes.byref(info), read=lambda _: {})

    answer = ask("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t")
    if answer is None or (is_error(answer) and answer["code"] == VERSION_MISMATCH):
        answer = ask("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t")
    if answer is None or is_error(answer):
        return dict.fromkeys(("state", "status", "cluster", "clique", "health"), answer)
    return {
        "state": int(info.state),
        "status": int(info.status),
        "cluster": bytes(info.clusterUuid).hex(),
        "clique": int(info.cliqueId),
        "health": int(getattr(info, "healthMask", 0)) or None,
    }


def _processes(nvml: Nvml, handle: Any) -> Any:
    """[{pid, name, kind, memory}] in MiB, null where the GPU does not report them.

    kind: compute, graphics, or compute+graphics for a process that NVML lists as both (C+G of nvidia-smi).
    """

    def read(rows: Any) -> dict[int, int | None]:
        return {whole_number(row.pid): _used_mib(row.usedGpuMemory) for row in rows}

    listed: dict[int, dict[str, Any]] = {}
    # NVML lists a process that does both in both lists.
    for kind in ("compute", "graphics"):
        name = f"nvmlDeviceGet{kind.capitalize()}RunningProcesses"
        by_pid = nvml.either((f"{name}_v3", handle), (f"{name}_v2", handle), read=read)
        if is_error(by_pid) or (by_pid is None and kind == "compute"):
            return by_pid
        for pid, mib in (by_pid or {}).items():
            if pid in listed:
                listed[pid].update(kind="compute+graphics", memory=listed[pid]["memory"] or mib)
                continue
            command = nvml.ask("nvmlSystemGetProcessName", pid, read=text)
            command = command if isinstance(command, str) else None
            listed[pid] = {"pid": pid, "name": command, "kind": kind, "memory": mib}
    return list(listed.values())


def _used_mib(memory: Any) -> int | None:
    """MiB of bytes; all ones are NVML_VALUE_NOT_AVAILABLE (nvml.h)."""
    return None if memory is None or whole_number(memory) >= (1 << 63) else whole_number(memory) >> 20


def _peer(nvml: Nvml, index: int, handle: Any, other: Any) -> dict[str, Any]:
    """The path to another GPU, in NVML's numbers: {index, ancestor, p2p: {read, write, nvlink, ...}}."""
    kinds = {"read": P2P["read"]} if nvml.brief else P2P
    return {
        "index": index,
        "ancestor": nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handle, other, read=whole_number),
        "p2p": {
            name: nvml.ask("nvmlDeviceGetP2PStatus", handle, other, n, read=whole_number)
            for name, n in kinds.items()
        },
    }
