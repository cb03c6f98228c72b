"""Computes on every GPU of this machine, and runs an all-reduce on several, through the CUDA driver API.

Needs only the driver's libcuda.so.1, no CUDA toolkit. Runs on the machine that is verified, see
gpukiln/probe/gather.py. It takes memory while it runs (64 MiB of each GPU and of the host, and what a CUDA
context takes), resets nothing and changes no setting; the driver may load nvidia-uvm, as for every CUDA
program.

All calls are made in child processes: this one never loads the library, and never hangs with it.

`pytest tests/host --hosts=local:// --layer gpu --layer compute` on a GPU host verifies these results.

Names and numbers are those of cuda.h of CUDA 12.1; NAME_v2 is what its macros make of NAME.
"""

# ruff: noqa: PTH207
# See gpukiln/probe/gather.py.

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import random
import time
from collections.abc import Callable
from typing import Any

from gpukiln.probe.base import pci_gpus, require_driver_answers
from gpukiln.probe.child import Send, in_child
from gpukiln.probe.pcie import link, pin_to_local_cpus
from gpukiln.probe.ptx import PTX, ROUNDS, TILE, expected_result
from gpukiln.probe.xids import faults_since, kernel_buffer

ELEMENTS = 1 << 24  # of 32 bits each: 64 MiB
REDUCE_ELEMENTS = 1 << 20  # 32-bit elements of each GPU in the all-reduce
# A multiple of the warp size, and allowed on every GPU.
BLOCK = 256  # threads
# Least number and duration of the copies in one direction: an idle link needs time to speed up.
REPEATS, COPYING_S = 2, 0.4
# Seconds after which a child counts as hung. Without persistence mode cuInit wakes every GPU, one by one.
# A step of the all-reduce is one context, one mapping of a peer or one copy: a context takes more than a
# second, and with every GPU there is another peer for each (rapidsai/dask-cuda, issue 198).
INIT_S, GPU_S, STEP_S = 60.0, 30.0, 15.0
OUT_OF_MEMORY, UNAVAILABLE, PEER_ON, NO_PEER, UNSUPPORTED = 2, 46, 704, (217, 711), 801  # CUresult
COMPUTE_MODE, MAJOR, MINOR, EXCLUSIVE = 20, 75, 76, 3  # CUdevice_attribute, CUcomputemode
MIG = "/proc/driver/nvidia/capabilities/gpu*/mig/gi[0-9]*"  # one for each instance
UNKNOWN = (
    "bus_id",
    "name",
    "compute_capability",
    "error",
    "kernel_ms",
    "h2d_gb_s",
    "d2h_gb_s",
    "link",
    "pinned",
)
LOG, LOG_BYTES = 5, 6  # CUjit_option: buffer for errors, and its size


class CudaError(Exception):
    """A call of the driver that failed.

    Args:
        call: Its name.
        code: CUresult.
        text: For people.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: error {code}{text}")
        self.call, self.code = call, code


class CudaLibrary:
    """The driver's library; an instance is called with a function's name and its arguments.

    Args:
        send: Called with the name of each function before that is called.

    Raises:
        OSError: There is no libcuda.so.1.
    """

    visible = ""  # GPUs by UUID; empty: all, whatever the environment says

    def __init__(self, send: Send) -> None:
        # A service manager or login may have set it, and hide GPUs.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if self.visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible
        # Without this the driver would leave compiled kernels in root's home (~/.nv/ComputeCache).
        # By default CUDA numbers GPUs from the fastest on; NVML and the bus by address.
        os.environ.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_CACHE_DISABLE="1")
        self.send = send
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *args: Any) -> None:
        """Call a function; CudaError where it fails."""
        self.send(at=name)
        code = getattr(self.library, name)(*args)
        if code:
            raise CudaError(name, code, self._text(code))

    def _text(self, code: int) -> str:
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if getattr(self.library, name)(code, ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode("utf-8", "replace"))
        return f" ({': '.join(words)})" if words else ""

    def number(self, name: str, *args: Any) -> int:
        """Call a function whose first argument is an int for its answer."""
        answer = ctypes.c_int()
        self(name, ctypes.byref(answer), *args)
        return answer.value

    def handle(self, name: str, *args: Any) -> ctypes.c_void_p:
        """Call a function whose first argument is a pointer, or a device's address, for its answer."""
        answer = ctypes.c_void_p()
        self(name, ctypes.byref(answer), *args)
        return answer

    def text(self, name: str, device: int) -> str:
        """Call a function that writes a text about a device."""
        answer = ctypes.create_string_buffer(256)
        self(name, answer, 256, device)
        return answer.value.decode("utf-8", "replace")

    def module(self) -> ctypes.c_void_p:
        """Compile the kernels for the GPU of the current context."""
        log = ctypes.create_string_buffer(2048)
        options = (ctypes.c_int * 2)(LOG, LOG_BYTES)
        # cuda.h passes option values as pointers, also the size of the buffer.
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), ctypes.sizeof(log))
        try:
            return self.handle("cuModuleLoadDataEx", PTX.encode(), 2, options, values)
        except CudaError as error:
            said = " ".join(log.value.decode("utf-8", "replace").split())
            error.args = (f"{error}: {said}",) if said else error.args
            raise

    def launch(self, kernel: ctypes.c_void_p, count: int, *args: Any) -> None:
        """Start a kernel with a thread for each of `count` elements."""
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
        grid = (-(-count // BLOCK), 1, 1, BLOCK, 1, 1)
        self("cuLaunchKernel", kernel, *grid, 0, None, pointers, None)


def cuda(visible: str = "") -> dict[str, Any]:
    """The results of every GPU: {error, driver_version, count, gpus, all_reduce, xids}.

    visible: only these, by UUID with commas.

    error: why no GPU could be tested, or null. gpus: [{index, bus_id, name, compute_capability, ok, busy,
    error, elements: how many, all compared, kernel_ms, h2d_gb_s, d2h_gb_s, link, pinned}]; busy: its
    memory is in use or another process has it exclusively, which is no fault; pinned: whether the host's
    memory was pinned, pageable memory is copied slower. all_reduce: {tried, reason, ok, error, elements, ms,
    direct: how many copies, through_host: pairs of GPUs that need it, wrong: [what]}. xids, log_gap, pids:
    see `xids.faults_since`. mig: whether a GPU is divided; then CUDA shows a process one instance and no
    other GPU (MIG User Guide, "CUDA Device Enumeration").
    """
    result: dict[str, Any] = {
        "error": None,
        "driver_version": None,
        "count": 0,
        "gpus": [],
        "xids": [],
        "log_gap": None,
        "pids": [],
        "mig": bool(glob.glob(MIG)),
        "all_reduce": {"tried": False, "reason": "no GPU"},
    }
    require_driver_answers()
    CudaLibrary.visible = visible
    if not pci_gpus():
        result["error"] = "no NVIDIA GPU on the PCI bus"
        return result
    log = kernel_buffer()
    expected = expected_result(ELEMENTS // TILE)
    gpus: dict[int, dict[str, Any]] = {}

    def receive(message: dict[str, Any]) -> None:
        if "gpu" in message:
            gpus[message["gpu"]["index"]] = message["gpu"]
        result.update({k: message[k] for k in ("count", "driver_version") if k in message})

    # A CUDA error can leave the whole process unusable (sticky errors), so that the next GPU is tested in a
    # new process.
    while True:
        tested = len(gpus)
        ended = in_child(functools.partial(_test_gpus, expected, tested), receive)
        if len(gpus) > tested:
            last = gpus[len(gpus) - 1]
            if not (last["ok"] or last["error"]):
                last["error"] = ended or "the test ended without a result"
        else:
            result["error"] = ended or (None if gpus else "CUDA finds no GPU")
        if len(gpus) == tested or len(gpus) >= result["count"]:
            break
    result["gpus"] = [gpus[i] for i in sorted(gpus)]
    result["all_reduce"] = _run_all_reduce(result)
    return {**result, **faults_since(log)}


def _test_gpus(expected: bytes, first: int, send: Send) -> None:
    """Test the GPUs from an index on, up to one that fails."""
    cuda = CudaLibrary(send)
    send(limit=INIT_S)
    cuda("cuInit", 0)
    version, count = cuda.number("cuDriverGetVersion"), cuda.number("cuDeviceGetCount")
    send(count=count, driver_version=f"{version // 1000}.{version % 1000 // 10}")
    for index in range(first, count):
        report = {"index": index, **dict.fromkeys(UNKNOWN), "ok": False, "busy": False, "elements": 0}
        send(limit=GPU_S, gpu=report)
        try:
            _test_gpu(cuda, report, expected)
        except CudaError as error:
            report["error"], report["busy"] = str(error), _is_busy(cuda, index, error)
        send(gpu=report)
        if not report["ok"]:
            return


def _is_busy(cuda: CudaLibrary, index: int, error: CudaError) -> bool:
    """Whether a call failed because another process uses the GPU, and not because of a fault."""
    with contextlib.suppress(CudaError):
        if error.code == UNAVAILABLE:
            return cuda.number("cuDeviceGetAttribute", COMPUTE_MODE, index) == EXCLUSIVE
        if error.code == OUT_OF_MEMORY and error.call != "cuMemAllocHost_v2":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            # with four times as much free memory, the GPU is not out of memory
            return free.value < 16 * ELEMENTS
    # Without a context the free memory is unknown: the context itself takes hundreds of MiB.
    return error.code == OUT_OF_MEMORY and error.call == "cuDevicePrimaryCtxRetain"


def _test_gpu(cuda: CudaLibrary, report: dict[str, Any], expected: bytes) -> None:
    device = cuda.number("cuDeviceGet", report["index"])
    report["bus_id"] = cuda.text("cuDeviceGetPCIBusId", device).lower()
    report["name"] = cuda.text("cuDeviceGetName", device)
    major, minor = (cuda.number("cuDeviceGetAttribute", a, device) for a in (MAJOR, MINOR))
    report["compute_capability"] = f"{major}.{minor}"
    cuda.send(gpu=report)
    # Before memory is allocated: it then lies on the GPU's NUMA node, and copies do not cross sockets.
    pin_to_local_cpus(report["bus_id"])
    cuda("cuCtxSetCurrent", cuda.handle("cuDevicePrimaryCtxRetain", device))
    module, size = cuda.module(), ctypes.c_size_t(4 * ELEMENTS)
    kernel = cuda.handle("cuModuleGetFunction", module, b"gpukiln_hash")
    memory = cuda.handle("cuMemAlloc_v2", size)
    host, report["pinned"] = _host_memory(cuda, size)
    # Otherwise the correct result of an earlier run could still be in memory.
    cuda("cuMemsetD32_v2", memory, 0, ctypes.c_size_t(ELEMENTS))
    begin, end = cuda.handle("cuEventCreate", 0), cuda.handle("cuEventCreate", 0)
    cuda("cuEventRecord", begin, None)
    cuda.launch(
        kernel,
        ELEMENTS,
        ctypes.c_uint64(memory.value or 0),
        ctypes.c_uint32(ELEMENTS),
        ctypes.c_uint32(ROUNDS),
    )
    cuda("cuEventRecord", end, None)
    # Kernels run asynchronously; their errors are reported here.
    cuda("cuCtxSynchronize")
    took = ctypes.c_float()
    cuda("cuEventElapsedTime", ctypes.byref(took), begin, end)
    report["kernel_ms"] = round(took.value, 3)
    cuda("cuMemcpyDtoH_v2", host, memory, size)
    report["elements"] = ELEMENTS
    report["error"] = _difference(ctypes.string_at(host, 4 * ELEMENTS), expected, "the kernel's result")
    if report["error"]:
        return
    cuda("cuMemsetD32_v2", memory, 0, ctypes.c_size_t(ELEMENTS))
    report["h2d_gb_s"] = _rate(lambda: cuda("cuMemcpyHtoD_v2", memory, host, size))
    # So that the copy back is really compared, and not what was there before.
    ctypes.memset(host, 0, 4 * ELEMENTS)
    report["d2h_gb_s"] = _rate(lambda: cuda("cuMemcpyDtoH_v2", host, memory, size))
    report["link"] = link(report["bus_id"])  # immediately: an idle GPU lowers its link's speed
    report["error"] = _difference(ctypes.string_at(host, 4 * ELEMENTS), expected, "a copy there and back")
    cuda("cuEventDestroy_v2", begin)
    cuda("cuEventDestroy_v2", end)
    if report["pinned"]:
        cuda("cuMemFreeHost", host)
    cuda("cuMemFree_v2", memory)
    cuda("cuModuleUnload", module)
    cuda("cuDevicePrimaryCtxRelease_v2", device)
    report["ok"] = not report["error"]


def _host_memory(cuda: CudaLibrary, size: ctypes.c_size_t) -> tuple[Any, bool]:
    """Memory to copy to and from, and whether it is pinned.

    With confidential computing there may be no pinned memory (NVIDIA Confidential Computing, release notes of
    R550 TRD1, "Limitations").
    """
    try:
        return cuda.handle("cuMemAllocHost_v2", size), True
    except CudaError as error:
        if error.code != UNSUPPORTED:
            raise
    return ctypes.create_string_buffer(size.value), False


def _difference(actual: bytes, expected: bytes, what: str) -> str | None:
    """Where two arrays of 32-bit elements differ, for messages; None where they are equal."""
    if actual == expected:
        return None
    size = 4 * TILE
    tiles = [o for o in range(0, len(expected), size) if actual[o : o + size] != expected[o : o + size]]
    at = next(o for o in range(tiles[0], tiles[0] + size, 4) if actual[o : o + 4] != expected[o : o + 4])
    got, due = (int.from_bytes(x[at : at + 4], "little") for x in (actual, expected))
    return (
        f"{what} is wrong in {len(tiles)} of {len(expected) // size} blocks of {TILE} elements, first in "
        f"element {at // 4}: {got:#010x}, wanted {due:#010x}"
    )


def _rate(copy: Callable[[], None]) -> float:
    """GB/s (10^9 bytes) of the fastest of some copies of ELEMENTS."""
    took: list[float] = []
    while len(took) < REPEATS or sum(took) < COPYING_S:
        start = time.perf_counter()
        copy()
        # The fastest copy: others may have waited for a job or for the link to speed up.
        took.append(time.perf_counter() - start)
    return round(4 * ELEMENTS / min(took) / 1e9, 2)


def _run_all_reduce(result: dict[str, Any]) -> dict[str, Any]:
    why = "one GPU" if result["count"] == 1 else result["error"] or ""
    if not why:
        why = "; ".join(f"{g['bus_id'] or g['index']}: {g['error']}" for g in result["gpus"] if not g["ok"])
    if why:
        return {"tried": False, "reason": why}
    report: dict[str, Any] = {
        "tried": True,
        "reason": "",
        "ok": False,
        "error": None,
        "elements": REDUCE_ELEMENTS,
        "ms": None,
        "direct": 0,
        "through_host": [],
        "wrong": [],
    }
    ended = in_child(_all_reduce, lambda message: report.update(message.get("all_reduce", {})))
    if ended:
        report.update(ok=False, error=ended)
    return report


def _all_reduce(send: Send) -> None:
    """Every GPU adds the numbers of every other GPU to its own; all must have the same sum."""
    send(limit=INIT_S)
    cuda, size = CudaLibrary(send), ctypes.c_size_t(4 * REDUCE_ELEMENTS)
    cuda("cuInit", 0)
    devices = [cuda.number("cuDeviceGet", i) for i in range(cuda.number("cuDeviceGetCount"))]
    send(limit=STEP_S * len(devices))  # for this process to generate their numbers
    # No secrets (S311): every run has the same numbers.
    # 26 bits: 64 GPUs' numbers add up without a carry into the next element.
    bits = int.from_bytes(b"\xff\xff\xff\3" * REDUCE_ELEMENTS, "little")
    numbers = [
        int.from_bytes(random.Random(i).randbytes(4 * REDUCE_ELEMENTS), "little") & bits  # noqa: S311
        for i in devices
    ]
    expected = sum(numbers).to_bytes(4 * REDUCE_ELEMENTS, "little")
    contexts: list[ctypes.c_void_p] = []
    kernels: list[ctypes.c_void_p] = []
    own: list[ctypes.c_void_p] = []
    sums: list[ctypes.c_void_p] = []
    others: list[ctypes.c_void_p] = []
    for device, number in zip(devices, numbers):
        send(limit=STEP_S)
        contexts.append(cuda.handle("cuDevicePrimaryCtxRetain", device))
        cuda("cuCtxSetCurrent", contexts[-1])
        kernels.append(cuda.handle("cuModuleGetFunction", cuda.module(), b"gpukiln_add"))
        for place in (own, sums, others):
            place.append(cuda.handle("cuMemAlloc_v2", size))
        data = number.to_bytes(4 * REDUCE_ELEMENTS, "little")
        cuda("cuMemcpyHtoD_v2", own[-1], data, size)
        cuda("cuMemcpyHtoD_v2", sums[-1], data, size)
    # Every ordered pair of GPUs, each one's neighbour first.
    pairs = [((i + step) % len(devices), i) for step in range(1, len(devices)) for i in range(len(devices))]
    direct = {pair for pair in pairs if _enable_peer_access(cuda, contexts, devices, *pair)}
    staged = ctypes.create_string_buffer(4 * REDUCE_ELEMENTS)
    began = time.perf_counter()
    for source, target in pairs:
        send(limit=STEP_S)
        if (source, target) in direct:
            cuda("cuMemcpyPeer", others[target], contexts[target], own[source], contexts[source], size)
        else:
            cuda("cuCtxSetCurrent", contexts[source])
            cuda("cuMemcpyDtoH_v2", staged, own[source], size)
            cuda("cuCtxSetCurrent", contexts[target])
            cuda("cuMemcpyHtoD_v2", others[target], staged, size)
        cuda("cuCtxSetCurrent", contexts[target])
        cuda("cuCtxSynchronize")
        cuda.launch(
            kernels[target],
            REDUCE_ELEMENTS,
            ctypes.c_uint64(sums[target].value or 0),
            ctypes.c_uint64(others[target].value or 0),
            ctypes.c_uint32(REDUCE_ELEMENTS),
        )
        cuda("cuCtxSynchronize")
    took = time.perf_counter() - began
    names = [cuda.text("cuDeviceGetPCIBusId", d).lower() for d in devices]
    wrong = []
    for index, context in enumerate(contexts):
        send(limit=STEP_S)
        cuda("cuCtxSetCurrent", context)
        cuda("cuMemcpyDtoH_v2", staged, sums[index], size)
        problem = _difference(staged.raw, expected, "the sum")
        wrong += [f"{names[index]}: {problem}"] if problem else []
    shown = [[names[source], names[target]] for source, target in pairs if (source, target) not in direct]
    send(
        all_reduce={
            "ok": not wrong,
            "wrong": wrong,
            "ms": round(took * 1e3, 3),
            "through_host": shown,
            "direct": len(direct),
        }
    )


def _enable_peer_access(
    cuda: CudaLibrary, contexts: list[ctypes.c_void_p], devices: list[int], source: int, target: int
) -> bool:
    """Enable one GPU to read another one's memory; whether that is possible."""
    cuda.send(limit=STEP_S)
    if not cuda.number("cuDeviceCanAccessPeer", devices[target], devices[source]):
        return False
    cuda("cuCtxSetCurrent", contexts[target])
    try:
        cuda("cuCtxEnablePeerAccess", contexts[source], 0)
    except CudaError as error:
        if error.code in NO_PEER:
            return False
        if error.code != PEER_ON:
            raise
    return True
