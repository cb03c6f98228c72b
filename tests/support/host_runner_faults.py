"""A container without a fault, and the faults that the checks of a container must find."""

from collections.abc import Callable
from typing import Any

Data = dict[str, Any]
Fault = Callable[[Data], Any]
STARTED, COMPLETED = "ACTIONS_RUNNER_HOOK_JOB_STARTED", "ACTIONS_RUNNER_HOOK_JOB_COMPLETED"
VERSIONS = {
    "cuda": "12.1",
    "cuda_nvcc": "12.1",
    "cudnn": "8.9.2",
    "nccl": "2.18.1",
    "cmake": "3.31.10",
    "ninja": "1.13.0",
    "ccache": "4.7.5",
    "git": "2.39.5",
    "actions_runner": "2.335.1",
}


def container() -> Data:
    """Facts of a container, as gpukiln/probe/runner.py prints them."""
    said = {
        "cmake": "cmake version 3.31.10",
        "ninja": "1.13.0.git.kitware.jobserver-pipe-1",
        "ccache": "ccache version 4.7.5",
        "git": "git version 2.39.5",
        "gcc": "gcc 12",
        "g++": "g++ 12",
        "python3": "Python 3.11.2",
        "tini": "tini version 0.19.0",
        "ptxas": "release 12.1, V12.1.105",
        "nvcc": "Cuda compilation tools, release 12.1, V12.1.105",
    }
    hook = {"rc": 0, "out": "gpukiln: no GPU here: nothing to free\n"}
    return {
        "simulated": {"machine": False, "disk": []},
        "record": {
            "error": None,
            "data": {
                "schema": 1,
                "image": "runner-gpu",
                "digest": "d",
                "user": "runner",
                "size_budget_gib": 6,
                "components": {n: {"status": "installed", "version": v} for n, v in VERSIONS.items()},
            },
        },
        "os": {"id": "debian", "version": "12", "family": "debian"},
        "gpus": {"pci": [], "container": True, "module": None},
        "hung": {"tools": [], "kernel": []},
        "runner": {
            "user": {"uid": 1001, "name": "runner", "home": "/home/runner", "root_without_password": False},
            "process_1": "/usr/bin/tini -- sleep infinity",
            "build_files": [],
            "credentials": [],
            "writable": [],
            # Folders that the container's user may not read, such as /root.
            "size": {"bytes": 3 << 30, "unseen": 2},
            "tools": {name: {"rc": 0, "out": out} for name, out in said.items()},
            "packages": {
                "check": {"rc": 0, "out": ""},
                "installed": {"numpy": "2.2.6"},
                "imports": {"numpy": None, "yaml": None},
            },
            "ccache": {"rc": [0, 0, 0], "hits": 1, "misses": 1, "folder": "/home/runner/.cache/ccache"},
            "hooks": {STARTED: {"path": "/opt/a.sh", **hook}, COMPLETED: {"path": "/opt/b.sh", **hook}},
            "actions_runner": {"present": True, "rc": 0, "version": "2.335.1"},
            "libraries": {
                "cudart": {"version": 12010, "error": ""},
                "cublas": {"version": None, "error": ""},
                "cudnn": {"version": 8902, "error": ""},
                "nccl": {"version": 21801, "error": ""},
            },
            "nvrtc": {"version": "12.1", "error": ""},
            "ptxas": {"rc": 0, "out": "", "cubin": True},
            "nvcc": {"rc": 0, "out": "", "program": True},
        },
    }


def put(path: str, value: Any) -> Fault:
    """A fault: set the value at a path below `runner`."""

    def inject(data: Data) -> None:
        value_at = data["runner"]
        *parents, last = path.split("/")
        for key in parents:
            value_at = value_at[key]
        value_at[last] = value

    return inject


RUNNER_FAULTS: dict[str, list[tuple[Fault, str]]] = {
    "hygiene.runner-user": [
        (put("user/uid", 0), "uid 0"),
        (put("user/name", "ubuntu"), "wanted runner"),
        (put("user/root_without_password", True), "sudo"),
    ],
    "hygiene.runner-build-files": [(put("build_files", ["/var/lib/apt/lists/a_Packages"]), "a_Packages")],
    "hygiene.runner-credentials": [(put("credentials", ["/home/runner/.netrc"]), ".netrc")],
    "hygiene.runner-writable": [(put("writable", ["/opt/gpukiln/hooks"]), "/opt/gpukiln/hooks")],
    "hygiene.runner-size": [
        (put("size/bytes", 7 << 30), "7.00 GiB"),
        (put("size/bytes", 0), "no file was counted"),
    ],
    "versions.runner-tools": [
        (put("tools/cmake/out", "cmake version 3.22.1"), "wanted 3.31.10"),
        (put("tools/cmake/out", "cmake version 3.31.101"), "wanted 3.31.10"),
        (put("tools/g++", {"rc": 127, "out": "g++: not found"}), "g++ --version exits 127"),
    ],
    "versions.runner-python": [
        (put("packages/imports/numpy", "ImportError: libblas.so.3"), "libblas"),
        (put("packages/imports", {}), "no package"),
        (put("packages/check", {"rc": 1, "out": "sympy requires mpmath"}), "mpmath"),
    ],
    "versions.runner-cuda": [
        (put("libraries/cudart/version", 12020), "cudart 12.2"),
        (put("nvrtc/version", "12.4"), "nvrtc 12.4"),
        (put("libraries/cublas/error", "cannot open shared object file"), "cublas: cannot open"),
        (put("nvrtc/error", "nvrtcResult 7"), "nvrtcResult 7"),
    ],
    "versions.runner-cudnn": [
        (put("libraries/cudnn/version", 8907), "8.9.7"),
        (put("libraries/cudnn/error", "no such file"), "no such file"),
    ],
    "versions.runner-nccl": [
        (put("libraries/nccl/version", 21901), "2.19.1"),
        (put("libraries/nccl/error", "no such file"), "no such file"),
    ],
    "versions.actions-runner": [
        (put("actions_runner/present", False), "run.sh"),
        (put("actions_runner/version", "2.300.0"), "wanted 2.335.1"),
        (put("actions_runner/rc", 134), "exits 134"),
    ],
    "runtime.runner-init": [(put("process_1", "sleep infinity"), "wanted /usr/bin/tini")],
    "runtime.ccache": [
        (put("ccache/hits", 0), "0 hits"),
        (put("ccache/rc", [0, 1, 1]), "[0, 1, 1]"),
    ],
    "runtime.job-hooks": [
        (put(f"hooks/{STARTED}/path", ""), "JOB_STARTED is not set"),
        (put(f"hooks/{COMPLETED}/rc", 127), "exits 127"),
        (put(f"hooks/{COMPLETED}/out", ""), "prints nothing"),
    ],
    "compute.runner-nvrtc": [
        (put("ptxas/rc", 255), "ptxas exits 255"),
        (put("ptxas/cubin", False), "no program"),
    ],
    "compute.runner-nvcc": [
        (put("tools/nvcc/out", "release 12.4, V12.4.1"), "wanted release 12.1"),
        (put("nvcc/rc", 1), "nvcc exits 1"),
        (put("nvcc/program", False), "no program"),
    ],
}
