"""The facts of a machine without a fault."""

import copy
from typing import Any

from gpukiln.probe.simulated import NOTE, UNIT
from tests.doubles.nvml_machine import made_up_machine, nvlinks_later

KERNEL = "6.1.0-44-cloud-amd64"
DRIVER = "535.309.01"
DEBIAN = f"{DRIVER}-0+deb12u1"
TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
GPU_TOOL = "5e" * 32  # the digest of a gpukiln-gpu
BOOT = 1_760_000_000.0
Data = dict[str, Any]


def simulated_machine(*, gpus: int = 2) -> Data:
    """Facts of a machine of the embedded cloud with simulated GPUs: none is on a bus, nothing computes."""
    # Simulated GPUs answer through NVML and nvidia-smi only; everything else is a machine without a GPU.
    data, real = machine(gpus=0), machine(gpus=gpus)
    data["simulated"] = {"machine": True, "disk": [NOTE, f"/etc/systemd/system/{UNIT}"]}
    data["nvml"], data["nvlinks"] = real["nvml"], real["nvlinks"]
    data["gpus"] |= {key: real["gpus"][key] for key in ("smi", "rows", "xids", "cdi")} | {"module": None}
    return data


def service(name: str, computes: str) -> Data:
    """A service of a workspace that runs and answers, as gpukiln/probe/services.py finds it."""
    declared = {"port": 11434, "answers": "/api", "computes": computes, "model": "small", "start_s": 60}
    state = {"state": "running", "exit_code": 0, "error": "", "health": "healthy"}
    return {
        "wanted": declared,
        "container": {"id": f"{name}-1", **state, "gpus": bool(computes)},
        "http": answer({}),
    }


def answer(said: Any, status: int = 200) -> Data:
    return {"status": status, "json": said, "text": str(said)}


def ollama() -> Data:
    loaded = {"name": "small", "size": 600 << 20, "size_vram": 600 << 20}
    answers = {"model": "small", "generate": answer({"done": True}), "ps": answer({"models": [loaded]})}
    return {**service("ollama", "ollama"), "ollama": answers, "log": []}


def serve_by_vllm(data: Data) -> None:
    """Have a service vLLM whose process is on the first GPU."""
    answers = {"models": answer({"data": [{"id": "qwen"}]}), "pids": [51, 52]}
    data["services"] = {"vllm": {**service("vllm", "vllm"), "vllm": answers}}
    data["nvml"]["gpus"][0]["processes"] = [
        {"pid": 52, "name": "VLLM::EngineCore", "kind": "compute", "memory": 13000}
    ]


def library(
    name: str, folder: str = "/usr/lib/x86_64-linux-gnu", version: str | None = DRIVER, **more: Any
) -> Data:
    """A copy of one of the driver's libraries, as gpukiln/probe/libraries.py finds it."""
    file = f"{folder}/{name}.{version}" if version else f"{folder}/{name}"
    copy = {"path": f"{folder}/{name}.1", "file": file, "version": version}
    return {**copy, "stands_in": None, "named_in": [], **more}


def gsp(name: str, **more: Any) -> Data:
    """A firmware file that the driver's module names, as gpukiln/probe/firmware.py finds it."""
    file = f"nvidia/{DRIVER}/{name}.bin"
    entry = {"path": f"/lib/firmware/{file}", "size": 30_000_000, "version": DRIVER, "others": [DRIVER]}
    return {"name": file, **entry, **more}


def loads(*files: str, command: str = "", error: str | None = None) -> Data:
    """What modprobe would do for a name, as gpukiln/probe/loading.py finds it."""
    return {"files": [*files], "commands": [command] if command else [], "error": error}


def machine(*, gpus: int = 1, toolkit: bool = True) -> Data:
    """Facts of a machine without a fault, as gpukiln/probe/gather.py prints them."""
    packages = {
        "nvidia-kernel-dkms": DEBIAN,
        "nvidia-smi": DEBIAN,
        "libcuda1": DEBIAN,
        "docker.io": "20.10.24",
        "nvidia-persistenced": "535.171.04-1~deb12u1",
        "containerd": "1.6.20",
        "kasmvncserver": "1.5.0-1",
        f"linux-image-{KERNEL}": "6.1.170-1",
    }
    if toolkit:
        packages |= dict.fromkeys(TOOLKIT, "1.19.1-1")
    done = {"status": "installed"}
    components = {
        "nvidia_driver": {**done, "version": DEBIAN, "branch": 535, "keep_build_tools": True},
        "docker": done,
        "containerd": done,
        "nvtop": done,
        "dcgm": done,
        "kasmvnc": {**done, "version": "1.5.0"},
        "nvidia_container_toolkit": {**done, "version": "1.19.1"}
        if toolkit
        else {"status": "left_out", "reason": "its repository can't be reached"},
    }
    unit = {
        "LoadState": "loaded",
        "UnitFileState": "enabled",
        "ActiveState": "active",
        "SubState": "running",
        "Result": "success",
        "ConditionResult": "yes",
        "ActiveEnterTimestampMonotonic": "20000000",
    }
    names = ("nvidia-persistenced", "docker", "containerd", "gpukiln-bootstrap", "nvidia-cdi-refresh")
    units = {f"{n}.service": dict(unit) for n in names}
    # Without a GPU the condition of the unit keeps it from starting.
    if not gpus:
        units["nvidia-persistenced.service"] |= {"ActiveState": "inactive", "ConditionResult": "no"}
    modules = {
        m: {
            "file": f"/lib/modules/{KERNEL}/{m}.ko",
            "version": DRIVER,
            # modinfo prints more flags after the release; the probe keeps the first word.
            "vermagic": KERNEL,
            "firmware": [gsp(name) for name in ("gsp_ga10x", "gsp_tu10x") if m == "nvidia"],
        }
        for m in ("nvidia", "nvidia_uvm", "nvidia_modeset")
    }
    row = {
        "bus_id": "00000000:00:1E.0",
        "name": "Tesla T4",
        "uuid": "GPU-1",
        "driver": DRIVER,
        "persistence": "Enabled",
    }
    gpu = {
        "index": 0,
        "bus_id": "0000:00:1e.0",
        "name": "Tesla T4",
        "ok": True,
        "busy": False,
        "error": None,
        "elements": 1 << 24,
        "kernel_ms": 9.0,
        "h2d_gb_s": 12.3,
        "d2h_gb_s": 13.1,
        "pinned": True,
        "link": {
            "speed": "8.0 GT/s PCIe",
            "width": "16",
            "gb_s": 15.75,
            "max_speed": "8.0 GT/s PCIe",
            "max_width": "16",
            "max_gb_s": 15.75,
        },
    }
    reduced = {
        "tried": True,
        "reason": "",
        "ok": True,
        "error": None,
        "wrong": [],
        "elements": 1 << 20,
        "ms": 3.0,
        "direct": 2,
        "through_host": [],
    }
    blacklist = "/etc/modprobe.d/nvidia-blacklists-nouveau.conf"
    runtimes = ["nvidia", "runc"] if toolkit else ["runc"]
    nvml = {**made_up_machine(gpus), "at": 1000.0}
    return {
        "record": {
            "error": None,
            "data": {
                "schema": 1,
                "image": "eks-gpu",
                "digest": "d",
                "git_commit": "c",
                "built_at": "2025-10-09T08:00:00+00:00",
                "base": {},
                "components": components,
                "kernel": KERNEL,
                "kernels": [KERNEL],
                "packages": dict(packages),
                "gpu_tools": {"sha256": GPU_TOOL},
            },
        },
        "expected": {"mig": "disabled", "bandwidth_share": None},
        "os": {"id": "debian", "version": "12", "family": "debian"},
        "kernel": {"running": KERNEL, "installed": [KERNEL], "images": {KERNEL: f"/boot/vmlinuz-{KERNEL}"}},
        "packages": {
            "installed": dict(packages),
            "holds": [f"linux-image-{KERNEL}", "nvidia-kernel-dkms", "nvidia-smi", "libcuda1"],
        },
        "driver": {
            "nvidia_smi": {"rc": 0, "first_line": "", "version": DRIVER},
            "persistenced": "535.171.04",
            # Without stubs and compat libraries; faults add them to library_files.
            "libraries": {"libnvidia-ml.so": [DRIVER], "libcuda.so": [DRIVER]},
            "library_files": {name: [library(name)] for name in ("libnvidia-ml.so", "libcuda.so")},
        },
        "hung": {"tools": [], "kernel": []},
        "modules": {KERNEL: modules},
        "signatures": {KERNEL: {"rc": 0, "out": "Secure Boot is off and the kernel takes every module"}},
        "nouveau": {
            "loaded": False,
            "blacklisted": True,
            "files": {blacklist: BOOT - 9000},
            "initramfs": {
                KERNEL: {
                    "path": f"/boot/initrd.img-{KERNEL}",
                    "rc": 0,
                    "error": "",
                    "mtime": BOOT - 8000,
                    "files": [blacklist],
                    "module": False,
                    "driver": {},
                }
            },
        },
        "loading": {
            "modalias": "pci:v000010DEd000020B0sv000010DEsd0000134Fbc03sc02i00",
            "kernels": {
                KERNEL: {
                    **{name: loads(info["file"]) for name, info in modules.items()},
                    "gpu": loads(modules["nvidia"]["file"]),
                }
            },
            "copies": {KERNEL: {}},
            "blacklist": ["nouveau"],
            "softdeps": [],
            "vfio_ids": [],
            "boot_options": {},
            "gsp_off": False,
            "nova": False,
        },
        "dkms": {
            "installed": True,
            "rc": 0,
            "error": "",
            "trees": [],
            "tools": {"compilers": ["/usr/bin/gcc-12"], "make": "/usr/bin/make"},
            "rows": [{"module": "nvidia-current", "version": DRIVER, "kernel": KERNEL, "state": "installed"}],
        },
        "identity": {
            "host_keys": {"/etc/ssh/ssh_host_ed25519_key": BOOT + 15},
            "owned": {"/etc/nvme/hostnqn": BOOT + 9, "/var/lib/docker/engine-id": BOOT + 20},
            "born": BOOT + 12,
            "machine_id": {"length": 32, "mtime": BOOT + 1, "dbus_agrees": True},
            "cloud_init": {"installed": True, "status": "done", "detail": "DataSourceEc2", "errors": []},
        },
        "keys": {
            "injected": ["SHA256:launch"],
            "authorized": [
                {
                    "user": "admin",
                    "path": "/home/admin/.ssh/authorized_keys",
                    "fingerprint": "SHA256:launch",
                    "comment": "key",
                }
            ],
        },
        "build_files": {"package_cache": [], "history": [], "build_tools": []},
        "simulated": {"machine": False, "disk": []},
        "gpu_tools": {
            "sha256": GPU_TOOL,
            "rc": 0,
            "out": "gpukiln-gpu 0.2.0",
            "state": {"user": "root", "group": "root", "mode": "0700"},
            "socket": {"user": "root", "group": "gpu", "mode": "0660"},
        },
        "secrets": {"found": [], "files": 20, "complete": True},
        "docker": {
            "installed": True,
            "validate": None,
            "info": {
                "rc": 0,
                "error": "",
                "version": "20.10.24",
                "errors": [],
                "runtimes": runtimes,
                "default_runtime": "nvidia" if toolkit else "runc",
            },
            "daemon_json": {"present": True, "problem": None, "age_s": 9000.0},
        },
        "containerd": {"installed": True, "rc": 0, "error": "", "runtimes": runtimes, "joined": {}},
        "nodeadm": {"installed": False},
        "gpus": {
            "pci": [{"address": f"0000:00:{0x1E + n:x}.0", "device": "0x20b0"} for n in range(gpus)],
            "container": False,
            "log_gap": None,
            "log_lost": None,
            "module": DRIVER if gpus else None,
            "smi": {"rc": 0, "out": ""},
            "rows": [row] * gpus,
            "xids": [],
            "cdi": {
                "/var/run/cdi/nvidia.yaml": {
                    "drivers": [DRIVER],
                    "nodes": ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"],
                }
            },
        },
        "nvml": nvml,
        "nvlinks": nvlinks_later(nvml),
        "desktop": {
            "unit": True,
            "unit_of": "kasmvnc@admin.service",
            "port": 6800,
            "listens": ["127.0.0.1"],
            "http": {"status": 401, "body": ""},
            "log": "",
        },
        "monitoring": {
            "nvtop": {"rc": 0, "out": "nvtop version 3.0.1"},
            "dcgm": {
                "ran": bool(gpus),
                "rc": 0,
                "out": "",
                "problem": None,
                "tests": [{"name": "Denylist", "status": "Pass", "warning": ""}],
            },
        },
        "cuda": {
            "error": None,
            "mig": False,
            "xids": [],
            "log_gap": None,
            "pids": [4242],
            "all_reduce": reduced,
            "gpus": [
                {**copy.deepcopy(gpu), "index": n, "bus_id": f"0000:00:{0x1E + n:x}.0"} for n in range(gpus)
            ],
        },
        "container": {
            engine: {"rc": 0, "out": "GPU 0: Tesla T4 (UUID: GPU-1)\n" * gpus}
            for engine in ("docker", "containerd", "podman")
            if gpus
        },
        "services": {"ollama": ollama() if gpus else service("ollama", "")},
        "storage": {
            "file_systems": [
                {
                    "path": "/",
                    "holds": ["/boot", "/var", "/var/lib/docker"],
                    "size": 60 << 30,
                    "free": 40 << 30,
                    "inodes": 3_900_000,
                    "inodes_free": 3_600_000,
                },
                # FAT has no inodes
                {
                    "path": "/boot/efi",
                    "holds": [],
                    "size": 124 << 20,
                    "free": 110 << 20,
                    "inodes": 0,
                    "inodes_free": 0,
                },
            ],
            "root": {"size": 60 << 30, "partition": 61 << 30, "after": 0},
        },
        "boot": {
            "booted": True,
            "virtualization": "none",
            "boot_time": BOOT,
            "uptime_s": 60.0,
            "state": "running",
            "failed": [],
            "units": units,
            "startup_s": 37.2,
            "startup": "",
            "journal": [],
        },
    }
