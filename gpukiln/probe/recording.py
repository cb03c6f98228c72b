"""Records NVML's values of this host's GPUs, to replay them on a machine without a GPU.

    scripts/run python -m gpukiln.probe.recording recording.json

Only reads, as root or not, and ends within three minutes. UUIDs, serial numbers and clusters are replaced by
numbers in the order of the GPUs, processes lose their names: a recording does not identify its
host. `invoke cloud.gpus MACHINE --recording recording.json` replays the part `nvml`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpukiln import __version__
from gpukiln.errors import UnavailableError
from gpukiln.files import write_atomic
from gpukiln.probe.base import pci_gpus
from gpukiln.probe.child import call
from gpukiln.probe.nvml import read_nvml
from gpukiln.probe.simulated import is_simulated

TIMEOUT_S = 150.0
SCHEMA = 1


def redact(nvml: dict[str, Any]) -> dict[str, Any]:
    """NVML's facts without ids and names of the host.

    Args:
        nvml: The section `nvml` of the facts; it is not changed.

    Returns:
        A copy with other UUIDs, serial numbers and clusters, the same each time, and processes without names.
    """
    shown = copy.deepcopy(nvml)
    pids: dict[int, int] = {}
    clusters: dict[str, str] = {}
    for gpu in shown["gpus"]:
        for key, form in (("uuid", "GPU-00000000-0000-0000-0000-{:012d}"), ("serial", "{:013d}")):
            if isinstance(gpu.get(key), str):
                gpu[key] = form.format(gpu["index"])
        cluster = gpu.get("fabric", {}).get("cluster")
        # GPUs without a fabric have only zeros, which identify nothing.
        if isinstance(cluster, str) and cluster.strip("0"):
            gpu["fabric"]["cluster"] = clusters.setdefault(cluster, f"{len(clusters) + 1:032x}")
        processes = gpu.get("processes")
        for process in processes if isinstance(processes, list) else []:
            number = pids.setdefault(process["pid"], 1000 + len(pids))
            process.update(pid=number, name=f"process-{number}" if process["name"] else None)
    return shown


def make_recording(pci: list[dict[str, str]]) -> dict[str, Any]:
    """Make the recording.

    Args:
        pci: The GPUs of the PCI bus, as `pci_gpus` lists them.

    Returns:
        {schema, gpukiln, pci, nvml}.

    Raises:
        UnavailableError: There is no GPU or a simulated one, the bindings are missing, or NVML gave no
            answer.
    """
    if is_simulated():
        raise UnavailableError(
            "the GPUs of this machine are simulated, wanted real ones",
            hint="run it on a host with a GPU",
        )
    if not pci:
        raise UnavailableError("found no NVIDIA GPU on the PCI bus", hint="run it on a host with a GPU")
    if importlib.util.find_spec("pynvml") is None:
        raise UnavailableError(
            f"{sys.executable} has no NVML bindings (nvidia-ml-py)",
            hint="run it with scripts/run, which installs them",
        )
    try:
        nvml = call(read_nvml, TIMEOUT_S)
    except RuntimeError as error:
        raise UnavailableError(str(error), hint="see `dmesg` and `nvidia-smi`") from error
    return {"schema": SCHEMA, "gpukiln": __version__, "pci": pci, "nvml": redact(nvml)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the recording.

    Args:
        arguments: Of the command line; the process's own when None.

    Returns:
        The exit code; 4 where no recording can be made; no file is written then.
    """
    parser = argparse.ArgumentParser(
        prog="gpukiln.probe.recording", description="Records NVML's values of this host's GPUs."
    )
    parser.add_argument("file", nargs="?", type=Path, help="where to write it; left out: standard output")
    file = parser.parse_args(arguments).file
    try:
        text = json.dumps(make_recording(pci_gpus()), indent=1) + "\n"
    except UnavailableError as error:
        sys.stderr.write(f"no recording: {error}; {error.hint}\n")
        return error.exit_code
    if file is None:
        sys.stdout.write(text)
    else:
        write_atomic(file, text)
        sys.stderr.write(f"wrote {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
