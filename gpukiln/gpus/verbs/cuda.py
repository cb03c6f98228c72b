"""The verb cuda: the driver, and which CUDA installations run on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpukiln.errors import IncompatibleError
from gpukiln.gpus.collect import collect
from gpukiln.gpus.cuda import (
    COMPAT,
    NO,
    CudaInstallation,
    compilers,
    find_installations,
    not_data_center,
    print_not_examined,
)
from gpukiln.gpus.model import Device, Snapshot
from gpukiln.gpus.text import table
from gpukiln.gpus.verb import Options, Verb
from gpukiln.gpus.verbs.devices import print_head
from gpukiln.options import Option


@dataclass(frozen=True)
class CudaReport(Snapshot):
    """The driver and the CUDA installations; devices are NVIDIA's GPUs, processes null.

    Args:
        not_compiled_for: The GPUs for which a toolkit can't compile, in words.
        not_looked_at: What could not be examined, and why.
        exit_code: 1 where an image of --image does not run on this driver.
    """

    found: tuple[CudaInstallation, ...] = ()
    not_compiled_for: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = ()
    exit_code: int = 0


def _cuda(options: Options) -> CudaReport:
    seen = collect()
    if seen.source == "amd-smi":
        raise IncompatibleError(
            "cuda does not support AMD's GPUs yet", hint="run `hipconfig` and `rocminfo` for ROCm"
        )
    # Without the library the loaded module still says which driver it is.
    driver = seen.driver.version or seen.driver.module
    gpus = tuple(device for device in seen.devices if device.kind == "gpu" and device.vendor == "nvidia")
    others = not_data_center([gpu.name for gpu in gpus])
    installations, missing = find_installations(driver, others, python=options.python, image=options.image)
    print_not_examined(missing)
    bad = (
        any(installation.verdict.word in (NO, COMPAT) for installation in installations)
        if options.image
        else False
    )
    return CudaReport(
        # vars(), not asdict(): nested values stay dataclasses.
        **{**vars(seen), "devices": gpus, "processes": None},
        found=tuple(installations),
        not_compiled_for=tuple(_not_compiled(gpus, installations)),
        not_looked_at=tuple(missing),
        exit_code=seen.code or int(bad),
    )


def _not_compiled(gpus: tuple[Device, ...], installations: list[CudaInstallation]) -> list[str]:
    """A sentence for each toolkit that can't compile for a GPU of this machine, by the catalogue."""
    return [
        f"CUDA {installation.cuda} ({installation.where}) does not compile for {name}: {compiler} does"
        for name in sorted({gpu.architecture for gpu in gpus if gpu.architecture})
        for installation in installations
        if installation.kind == "toolkit"
        and installation.cuda is not None
        and (compiler := compilers(installation.cuda, name))
    ]


def _show(node: dict[str, Any], _: Options, print: Callable[[str], None]) -> None:
    print_head(node, print)
    driver = node["driver"]
    if driver["module"] and driver["version"] and driver["module"] != driver["version"]:
        print(
            f"the loaded module is {driver['module']}, the library is {driver['version']}: reboot the machine"
        )
    if driver["flavour"]:
        print(f"kernel module: {driver['flavour']}")
    rows = [
        (
            row["kind"],
            row["name"],
            row["cuda"] or "-",
            row["verdict"]["word"],
            row["verdict"]["why"]
            + (f"; {row['verdict']['package']} helps" if row["verdict"]["package"] else ""),
            row["where"],
        )
        for row in node["found"]
    ]
    for line in table(("KIND", "NAME", "CUDA", "HERE", "WHY", "WHERE"), rows) or [
        "no CUDA installation was found"
    ]:
        print(line)
    for line in node["not_compiled_for"]:
        print(line)


VERBS = (
    Verb(
        "cuda",
        "Show the driver, and whether each toolkit, wheel and container image runs on it.",
        (
            Option("image", "check only this container image; may be repeated", default=()),
            Option(
                "python",
                "the Python interpreter whose wheels are listed; default: the one on PATH",
                value="FILE",
            ),
        ),
        _cuda,
        _show,
        examples=("--image runner-gpu:12.1",),
    ),
)
