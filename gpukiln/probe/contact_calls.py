"""Calls NVML and CUDA as the suite does, and records the answer of each call.

Runs on the machine that is examined, with Python 3.9 or newer. Every call only reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpukiln.probe import cuda
from gpukiln.probe.child import Send, in_child
from gpukiln.probe.nvml import TLIMIT, read_nvml

CALL_S = 40.0  # for one call: with hung firmware a call takes tens of seconds
LINKS = 36  # more than NVML has, to record the answer for a link that does not exist
# Calls for every GPU in addition to the suite's, with their arguments after the handle.
GPU_CALLS: tuple[tuple[str, tuple[tuple[Any, ...], ...]], ...] = (
    ("TemperatureThreshold", tuple((kind,) for kind in range(8))),
    ("FieldValues", tuple(([field],) for field in TLIMIT.values())),
    ("MarginTemperature", ((),)),
    ("Temperature", ((0,),)),
    ("NvLinkState", tuple((link,) for link in range(LINKS))),
    ("ClockInfo", ((0,), (1,), (2,), (3,))),
    ("MaxClockInfo", ((0,), (1,), (2,), (3,))),
    *(
        (name, ((),))
        for name in (
            "Architecture",
            "CudaComputeCapability",
            "ComputeMode",
            "PerformanceState",
            "UtilizationRates",
            "PowerUsage",
            "EnforcedPowerLimit",
            "PowerManagementLimit",
            "PcieSpeed",
            "GpuMaxPcieLinkGeneration",
            "PcieLinkMaxSpeed",
            "PcieReplayCounter",
            "MinorNumber",
            "VirtualizationMode",
            "GspFirmwareMode",
            "MaxMigDeviceCount",
            "RowRemapperHistogram",
            "SupportedClocksEventReasons",
            "AddressingMode",
        )
    ),
)
SYSTEM_CALLS = ("ConfComputeState", "ConfComputeGpusReadyState", "ConfComputeCapabilities")


def ask_nvml(receive: Callable[[dict[str, Any]], None]) -> str:
    """Make the suite's calls of NVML, then further ones, in a child process.

    Args:
        receive: Given {nvml: the section of the facts} once, and {call: {call, suite: whether the suite
            makes it too, gpu, args, code, out}} of each.

    Returns:
        How it ended, for messages; empty after success.
    """
    return str(in_child(_ask_nvml, receive))


def _ask_nvml(send: Send) -> None:
    import pynvml  # noqa: PLC0415 - only where there is a GPU

    send(at="NVML", limit=CALL_S)
    suite = {"asks": True}
    record_nvml_calls(pynvml, lambda **message: send(**_mark_suite(message, suite["asks"])))
    send(nvml=read_nvml())
    suite["asks"] = False
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return  # the section has its error
    for name in SYSTEM_CALLS:
        _call_if_possible(pynvml, f"nvmlSystemGet{name}")
    for index in range(_call_if_possible(pynvml, "nvmlDeviceGetCount") or 0):
        handle = _call_if_possible(pynvml, "nvmlDeviceGetHandleByIndex", index)
        for name, questions in GPU_CALLS if handle is not None else ():
            for arguments in questions:
                _call_if_possible(pynvml, f"nvmlDeviceGet{name}", handle, *arguments)


def _mark_suite(message: dict[str, Any], asks: bool) -> dict[str, Any]:
    return {**message, "call": {**message["call"], "suite": asks}} if "call" in message else message


def _call_if_possible(pynvml: Any, name: str, *arguments: Any) -> Any:
    """Call a function, whose answer is recorded in any case; None where it fails."""
    try:
        return getattr(pynvml, name)(*arguments)
    except (pynvml.NVMLError, AttributeError):  # AttributeError: the bindings do not have it
        return None


def record_nvml_calls(pynvml: Any, send: Send) -> None:
    """Report every call of the library with its code, and the kinds of its output arguments."""
    # Every function of the bindings gets the C function from here, so that one replacement sees all calls.
    pointer = pynvml._nvmlGetFunctionPointer
    gpus: dict[Any, int] = {}

    def noted(name: str) -> Any:
        try:
            function = pointer(name)
        except pynvml.NVMLError as error:
            send(call={"call": name, "gpu": None, "args": [], "code": int(error.value), "out": []})
            raise
        if name == "nvmlErrorString":
            return function

        def call(*arguments: Any) -> int:
            send(at=name, limit=CALL_S)
            code = int(function(*arguments))
            gpu, given, out = None, [], []
            for argument in arguments:
                written = getattr(argument, "_obj", argument)  # of byref()
                if isinstance(argument, ctypes._Pointer):
                    gpu = gpus.setdefault(ctypes.cast(argument, ctypes.c_void_p).value, len(gpus))
                elif written is not argument or isinstance(argument, ctypes.Array):
                    out.append(_output_kind(written) if code == 0 else None)
                elif isinstance(getattr(argument, "value", argument), int):
                    given.append(getattr(argument, "value", argument))
                if isinstance(written, ctypes.Array) and hasattr(written[0], "fieldId"):
                    # Field ids say more than their number.
                    given = [field.fieldId for field in written]  # in place of their number
            if name == "nvmlSystemGetProcessName":
                given = []  # a process id and name of a user
            send(call={"call": name, "gpu": gpu, "args": given, "code": code, "out": out})
            return code

        return call

    pynvml._nvmlGetFunctionPointer = noted


def _output_kind(value: Any) -> Any:
    """An output argument: a number, or its kind. Texts are names and serial numbers of a user's GPU."""
    if isinstance(value, ctypes.Array):
        if value._type_ is ctypes.c_char:
            return "text" if value.value else "empty text"
        return [_output_kind(item) for item in value][:8]
    if isinstance(value, ctypes.Structure):
        if hasattr(value, "nvmlReturn"):
            return {"field": value.fieldId, "code": value.nvmlReturn, "value": value.value.siVal}
        return type(value).__name__
    if isinstance(value, ctypes._Pointer):
        return "handle"
    number = getattr(value, "value", None)
    return number if isinstance(number, (int, float)) else type(value).__name__


def record_cuda_calls(path: str) -> None:
    """Append every call of CUDA by this process and its children to a file, as [name, code, ms] on a line."""

    class Noted(cuda.CudaLibrary):
        def __call__(self, name: str, *args: Any) -> None:
            began, code = time.monotonic(), 0
            try:
                super().__call__(name, *args)
            except cuda.CudaError as error:
                code = error.code
                raise
            finally:
                row = [name, code, round((time.monotonic() - began) * 1e3, 3)]
                # O_APPEND: several processes write single lines without a lock (write(2)).
                number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.write(number, json.dumps(row).encode() + b"\n")
                os.close(number)

    vars(cuda)["CudaLibrary"] = Noted


def summarize_cuda_calls(path: str) -> list[dict[str, Any]]:
    """The calls of CUDA by name and code: [{call, code, times, ms, longest_ms}]; the file is removed."""
    rows: dict[tuple[str, int], list[float]] = {}
    file = Path(path)
    if not file.exists():
        return []
    for line in file.read_text(encoding="utf-8").splitlines():
        name, code, took = json.loads(line)
        rows.setdefault((name, code), []).append(took)
    file.unlink()
    return [
        {"call": name, "code": code, "times": len(took), "ms": round(sum(took), 3), "longest_ms": max(took)}
        for (name, code), took in sorted(rows.items())
    ]
