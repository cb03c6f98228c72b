"""Every check of tests/host passes on a good machine and fails on one with its fault."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from gpukiln.probe.simulated import NOTE
from gpukiln.verify.checks import LAYERS
from tests.support.host_evaluate import CHECKS, evaluate_check, remedy
from tests.support.host_gpu_faults import GPU_FAULTS
from tests.support.host_machine import (
    BOOT,
    DRIVER,
    KERNEL,
    TOOLKIT,
    Data,
    answer,
    gsp,
    library,
    loads,
    machine,
    serve_by_vllm,
)
from tests.support.host_pod_faults import POD_FAULTS, pod
from tests.support.host_runner_faults import RUNNER_FAULTS, container


def put(path: str, value: Any) -> Callable[[Data], None]:
    """A fault: set the value at a path such as `kernel/running`."""

    def inject(data: Data) -> None:
        *parents, last = path.split("/")
        for key in parents:
            data = data[key]
        data[last] = value

    return inject


def module(name: str, key: str, value: Any) -> Callable[[Data], None]:
    def inject(data: Data) -> None:
        if key:
            data["modules"][KERNEL][name][key] = value
        else:
            data["modules"][KERNEL][name] = value

    return inject


def loaded(**values: Any) -> Callable[[Data], None]:
    """A fault of what Ollama's /api/ps says of its one model."""
    return lambda data: data["services"]["ollama"]["ollama"]["ps"]["json"]["models"][0].update(values)


def unit(name: str, **values: str) -> Callable[[Data], None]:
    return lambda data: data["boot"]["units"][f"{name}.service"].update(values)


def disk(number: int = 0, **values: int) -> Callable[[Data], None]:
    """A fault of one file system."""
    return lambda data: data["storage"]["file_systems"][number].update(values)


def initramfs(**values: Any) -> Callable[[Data], None]:
    return lambda data: data["nouveau"]["initramfs"][KERNEL].update(values)


def asked(name: str, answer_: Data) -> Callable[[Data], None]:
    """A fault of what modprobe would load for a name."""
    return lambda data: data["loading"]["kernels"][KERNEL].update({name: answer_})


def installed(name: str, version: str) -> Callable[[Data], None]:
    """A fault: a package beside the others."""
    return lambda data: data["packages"]["installed"].update({name: version})


def no_driver(data: Data) -> None:
    """Nothing of it, as on a fresh machine."""
    data["driver"].update(nvidia_smi={"rc": 127, "first_line": "", "version": None}, persistenced=None)
    data["driver"]["libraries"] = {"libnvidia-ml.so": [], "libcuda.so": []}
    data["gpus"]["module"] = None
    data["modules"] = {kernel: dict.fromkeys(found) for kernel, found in data["modules"].items()}


def stands_in(copy: Data) -> Callable[[Data], None]:
    """A fault: a copy of a library that is not the driver's comes first in the linker's path."""

    def inject(data: Data) -> None:
        name = copy["path"].rpartition("/")[2].removesuffix(".1")
        data["driver"]["library_files"][name].insert(0, copy)

    return inject


STUBS, COMPAT = "/usr/local/cuda-12.4/lib64/stubs", "/usr/local/cuda-12.4/compat"
CUDA_CONF, PROFILE = "/etc/ld.so.conf.d/cuda.conf", "/etc/profile.d/cuda.sh"
OTHER = "6.1.0-99-amd64"


def another_kernel(
    *, image: str | None = f"/boot/vmlinuz-{OTHER}", running: bool = False
) -> Callable[[Data], None]:
    """A fault: a second kernel, for which nothing of the driver was built."""

    def inject(data: Data) -> None:
        data["kernel"]["installed"].append(OTHER)
        data["kernel"]["images"][OTHER] = image
        data["modules"][OTHER] = dict.fromkeys(data["modules"][KERNEL])
        if running:
            data["kernel"]["running"] = OTHER

    return inject


HANGS = {"tool": "nvidia-smi", "command": "nvidia-smi -h", "reason": "no answer in 20 s; process 3 is D"}
NO_RECORD = put("record", {"data": None, "error": "/etc/gpukiln/image.json is missing"})
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key"

# Check id -> its faults: (what breaks, words that the failure must say).
FAULTS: dict[str, list[tuple[Callable[[Data], Any], str]]] = {
    "hygiene.host-keys": [
        (put("identity/host_keys", {HOST_KEY: BOOT - 600}), "none older than this boot"),
        (put("identity/host_keys", {}), "found no /etc/ssh"),
        (
            # Second boot: cloud-init saw the instance first yesterday, the key is older still.
            lambda d: d["identity"].update(born=BOOT - 86400, host_keys={HOST_KEY: BOOT - 90000}),
            "this instance's first boot",
        ),
    ],
    "hygiene.identities": [
        (
            put("identity/owned", {"/etc/iscsi/initiatorname.iscsi": BOOT - 600}),
            "initiatorname.iscsi of 2025",
        ),
        (put("identity/owned", {"/var/lib/docker/engine-id": BOOT - 600}), "engine-id of 2025"),
    ],
    "hygiene.machine-id": [
        (put("identity/machine_id/mtime", BOOT - 600), "baked in"),
        (put("identity/machine_id/length", 0), "0 characters"),
        (put("identity/machine_id/dbus_agrees", False), "dbus"),
    ],
    "hygiene.cloud-init": [
        (put("identity/cloud_init/status", "running"), "'running'"),
        (put("identity/cloud_init/errors", ["module failed"]), "module failed"),
        (put("identity/cloud_init/installed", False), "not installed"),
    ],
    "hygiene.package-cache": [(put("build_files/package_cache", ["/var/cache/apt/archives/a.deb"]), "a.deb")],
    "hygiene.authorized-keys": [(put("keys/injected", ["SHA256:other"]), "SHA256:launch")],
    "hygiene.history": [(put("build_files/history", ["/root/.bash_history"]), "/root/.bash_history")],
    "hygiene.credentials": [
        (put("secrets/found", [{"path": "/root/k", "line": 3, "kind": "private key"}]), "/root/k:3"),
        (put("secrets/complete", False), "stopped at its limit"),
    ],
    "hygiene.dkms-trees": [(put("dkms/trees", ["/var/lib/dkms/nvidia-current/1/build"]), "build")],
    "hygiene.build-tools": [(put("build_files/build_tools", ["/usr/sbin/policy-rc.d"]), "policy-rc.d")],
    "hygiene.simulated": [
        (put("simulated/disk", [NOTE]), f"found {NOTE}, wanted no file of simulated GPUs"),
        (put("simulated", {"machine": True, "disk": [NOTE]}), "without `--simulated`"),
        (put("simulated/disk", ["/usr/lib64/libnvidia-ml.so.1"]), "/usr/lib64/libnvidia-ml.so.1"),
    ],
    "versions.record": [
        (NO_RECORD, "missing"),
        (put("record/data/schema", 2), "schema 2"),
        (lambda d: d["record"]["data"].pop("kernels"), "kernels"),
        (put("record/data/components/docker/status", "install"), "docker"),
    ],
    "versions.packages": [
        (put("packages/installed/nvidia-smi", "535.309.02-1"), "nvidia-smi 535.309.02-1"),
        (lambda d: d["packages"]["installed"].pop("libcuda1"), "missing: libcuda1"),
        (put("record/data/packages", {}), "names no package"),
    ],
    "versions.answers": [
        (put("hung/tools", [HANGS]), "nvidia-smi hangs: `nvidia-smi -h`: no answer in 20 s"),
        (
            put("hung", {"tools": [HANGS], "kernel": ["NVRM: Xid: 119, timeout"]}),
            "last kernel messages: NVRM: Xid: 119",
        ),
    ],
    "versions.driver-installed": [(no_driver, "no driver is installed: nvidia-smi")],
    "versions.driver-branch": [
        (put("driver/nvidia_smi/version", "580.178.04"), "580.178.04"),
        (module("nvidia", "version", "580.178.04"), "580.178.04"),
    ],
    "versions.driver-agrees": [
        (
            put("driver/library_files/libcuda.so", [library("libcuda.so", version="535.309.02")]),
            "libcuda.so (/usr/lib/x86_64-linux-gnu/libcuda.so.1): 535.309.02",
        ),
        (
            lambda d: d["driver"]["library_files"]["libcuda.so"].append(
                library("libcuda.so", "/usr/local/lib", "550.1.1")
            ),
            "found libcuda.so (/usr/local/lib/libcuda.so.1): 550.1.1; wanted 535.309.01",
        ),
        (module("nvidia", "version", "535.261.03"), "535.261.03"),
        (put("gpus/module", "535.261.03"), "loaded module"),
    ],
    "versions.driver-complete": [
        (
            put("driver/library_files/libnvidia-ml.so", []),
            "missing: libnvidia-ml.so.1; wanted them in version",
        ),
        (put("driver/nvidia_smi/version", None), "missing: nvidia-smi"),
        (
            put("driver/library_files/libcuda.so", [library("libcuda.so", STUBS, None, stands_in="stub")]),
            "missing: libcuda.so.1",
        ),
    ],
    "versions.library-path": [
        (
            stands_in(library("libcuda.so", STUBS, None, stands_in="stub", named_in=[CUDA_CONF])),
            f"{STUBS}/libcuda.so.1 -> {STUBS}/libcuda.so (a stub library, version unknown, by {CUDA_CONF})",
        ),
        (
            stands_in(library("libcuda.so", COMPAT, "550.54.15", stands_in="compat", named_in=[PROFILE])),
            f"{COMPAT}/libcuda.so.550.54.15 (a compat library, version 550.54.15, by {PROFILE})",
        ),
        (
            stands_in(library("libnvidia-ml.so", STUBS, None, stands_in="stub", named_in=[])),
            f"{STUBS}/libnvidia-ml.so.1",
        ),
    ],
    "versions.persistenced": [
        (put("driver/persistenced", None), "missing"),
        (put("driver/persistenced", "525.1.1"), "525.1.1"),
    ],
    "versions.companions": [
        (installed("nvidia-fabricmanager-535", "535.104.05-1"), f"535 535.104.05-1, wanted {DRIVER}"),
        (installed("libnvidia-nscq-535", "535.104.05-1"), "libnvidia-nscq-535 535.104.05-1"),
        (installed("nvidia-imex-535", "535.104.05-1"), "nvidia-imex-535 535.104.05-1"),
        (installed("libnvsdm-535", "535.104.05-1"), "libnvsdm-535 535.104.05-1"),
        (installed("nvidia-fabric-manager", "3:535.104.05-1.el9"), "nvidia-fabric-manager 3:535.104.05"),
        (installed("firmware-nvidia-gsp", "535.261.03-1~deb12u1"), f"wanted the firmware of {DRIVER}"),
        (installed("nvidia-firmware-535-server-535.104.05", "535.104.05-0ubuntu1"), "535-server-535.104.05"),
        (
            installed("linux-modules-nvidia-470-server-5.15.0-100-generic", "5.15.0-100.110+1"),
            "linux-modules-nvidia-470-server-5.15.0-100-generic, wanted branch 535",
        ),
        (no_driver, "no part of the driver has a version"),
    ],
    "versions.toolkit": [
        (lambda d: d["packages"]["installed"].pop(TOOLKIT[2]), TOOLKIT[2]),
        (put("packages/installed/libnvidia-container1", "1.18.0-1"), "one version"),
        (lambda d: d["packages"]["installed"].update(dict.fromkeys(TOOLKIT, "1.9.9-1")), "1.19.1 or newer"),
    ],
    "versions.holds": [
        (put("packages/holds", []), "nvidia-kernel-dkms"),
        (lambda d: d["packages"]["holds"].remove(f"linux-image-{KERNEL}"), f"linux-image-{KERNEL}"),
        (installed("nvidia-fabricmanager-535", "535.104.05-1"), "not on hold: nvidia-fabricmanager-535"),
        (installed("nvidia-imex", f"{DRIVER}-1"), "not on hold: nvidia-imex"),
        (installed("nvlsm", "2025.03.1-1"), "not on hold: nvlsm"),
    ],
    "versions.nvidia-docker2": [(put("packages/installed/nvidia-docker2", "2.13.0-1"), "nvidia-docker2")],
    "modules.running-kernel": [(put("kernel/running", "6.1.0-43-cloud-amd64"), "6.1.0-43")],
    "modules.installed-kernels": [(put("kernel/installed", [KERNEL, "6.1.0-45-cloud-amd64"]), "6.1.0-45")],
    "modules.present": [
        (module("nvidia_uvm", "", None), f"nvidia_uvm for {KERNEL}; wanted three"),
        (put("modules", {}), "found no kernel in /lib/modules"),
        (another_kernel(), f"missing: nvidia for {OTHER}, nvidia_uvm for {OTHER}, nvidia_modeset for"),
        (another_kernel(image=None), f"nvidia_modeset for {OTHER} (no image of this kernel was found"),
    ],
    "modules.version": [(module("nvidia_uvm", "version", "535.261.03"), "535.261.03")],
    "modules.loads": [
        (
            asked("nvidia", loads(command="/bin/false")),
            f"nvidia for {KERNEL}: `/bin/false` is run instead of loading it",
        ),
        (asked("nvidia_uvm", loads(command="exit 1")), "nvidia_uvm for"),
        (asked("nvidia", loads()), "loads nothing and reports success, as after `alias ... off`"),
        (
            asked("nvidia", loads(f"/lib/modules/{KERNEL}/extra/nvidia.ko")),
            f"modprobe loads /lib/modules/{KERNEL}/extra/nvidia.ko, wanted /lib/modules/{KERNEL}/nvidia.ko",
        ),
        (
            asked(
                "nvidia_modeset", loads(error="modprobe: FATAL: Module nvidia-modeset not found in directory")
            ),
            "FATAL: Module nvidia-modeset not found",
        ),
        (
            put("loading/boot_options", {"/proc/cmdline": {"module_blacklist": ["nouveau", "nvidia"]}}),
            "/proc/cmdline has module_blacklist=nvidia: the kernel refuses it",
        ),
        (
            put("loading/boot_options", {"/boot/grub/grub.cfg": {"modprobe.blacklist": ["nvidia_uvm"]}}),
            "/boot/grub/grub.cfg has modprobe.blacklist=nvidia_uvm",
        ),
        (
            lambda d: (d["loading"].update(blacklist=["nouveau", "nvidia"]), d["gpus"].update(module=None)),
            "blacklist nvidia: it is not loaded",
        ),
        (put("modules", {}), "found no kernel in /lib/modules"),
    ],
    "modules.firmware": [
        (
            module(
                "nvidia",
                "firmware",
                [gsp("gsp_ga10x", path=None, size=None, version=None, others=["535.261.03"])],
            ),
            f"nvidia/{DRIVER}/gsp_ga10x.bin, which the module of {KERNEL} needs, is missing (there is one "
            "for 535.261",
        ),
        (
            module("nvidia", "firmware", [gsp("gsp_tu10x", size=0, version=None)]),
            "is empty: /lib/firmware/nvidia/",
        ),
        (
            module("nvidia", "firmware", [gsp("gsp_tu10x"), gsp("gsp_ga10x", version="535.261.03")]),
            f"is of version 535.261.03, wanted {DRIVER}: /lib/firmware/nvidia/{DRIVER}/gsp_ga10x.bin",
        ),
    ],
    "modules.rivals": [
        (
            asked("gpu", loads(f"/lib/modules/{KERNEL}/kernel/drivers/gpu/nova-core/nova_core.ko.xz")),
            f"{KERNEL} would load nova_core for a GPU",
        ),
        (asked("gpu", loads("/lib/modules/6.1/nvidiafb.ko")), "would load nvidiafb"),
        (put("loading/nova", True), "nova_core is loaded"),
        (put("loading/vfio_ids", ["10de:10f8", "10de:20b0"]), "gives 10de:20b0, 0000:00:1e.0, to vfio-pci"),
        (
            put("loading/boot_options", {"/proc/cmdline": {"vfio-pci.ids": ["10DE:20B0"]}}),
            "/proc/cmdline gives 10de:20b0",
        ),
        (
            put("loading/softdeps", ["nvidia pre: vfio-pci"]),
            "`softdep nvidia pre: vfio-pci` loads vfio-pci first",
        ),
        (put("loading/softdeps", ["nvidia_uvm pre: drm nouveau post: x"]), "loads nouveau first"),
    ],
    "modules.copies": [
        (
            put(
                f"loading/copies/{KERNEL}",
                {
                    "nvidia": [
                        {"file": "/lib/modules/k/extra/nvidia.ko", "version": "535.261.03"},
                        {"file": "/lib/modules/k/updates/nvidia.ko", "version": DRIVER},
                    ]
                },
            ),
            f"extra/nvidia.ko 535.261.03 and /lib/modules/k/updates/nvidia.ko {DRIVER}",
        )
    ],
    "modules.initramfs": [
        (
            initramfs(driver={"lib/modules/k/nvidia.ko": "535.261.03", "lib/modules/k/nvidia-drm.ko": None}),
            f"carries lib/modules/k/nvidia.ko of version 535.261.03, wanted {DRIVER}, the version for",
        )
    ],
    "modules.vermagic": [(module("nvidia", "vermagic", "6.1.0-43-cloud-amd64"), "6.1.0-43")],
    "modules.signature": [
        (put(f"signatures/{KERNEL}", {"rc": 1, "out": "Found no signature on nvidia"}), "no signature"),
        (put("signatures", {}), f"on {KERNEL}"),
        (put("signatures", {"6.1.0-1": {"rc": 0, "out": ""}}), f"on {KERNEL}"),
    ],
    "modules.dkms": [
        (put("dkms/rows", []), "no nvidia module"),
        (lambda d: d["dkms"]["rows"][0].update(state="built"), "built"),
        (lambda d: d["dkms"]["rows"][0].update(state="installed (WARNING! Diff)"), "WARNING"),
        (put("dkms/rc", 1), "exits 1"),
    ],
    "modules.build-tools": [
        (put("dkms/tools/compilers", []), "found no compiler"),
        (put("dkms/tools/make", None), "found no make"),
        (put("record/data/components/nvidia_driver/keep_build_tools", False), "found /usr/bin/gcc-12"),
    ],
    "modules.nouveau-blocked": [
        (put("nouveau/blacklisted", False), "modprobe"),
        (put("nouveau/loaded", True), "loaded"),
    ],
    "modules.nouveau-initramfs": [
        (initramfs(files=[]), "has no modprobe.d file"),
        (initramfs(rc=1, error="corrupt"), "corrupt"),
        (initramfs(mtime=BOOT - 9999), "older"),
        (put("nouveau/initramfs", {}), "found no kernel in /lib/modules"),
    ],
    "boot.state": [(put("boot/state", "degraded"), "degraded")],
    "boot.failed-units": [(put("boot/failed", ["nvidia-persistenced.service"]), "nvidia-persistenced")],
    "boot.units-enabled": [
        (unit("docker", UnitFileState="disabled"), "docker.service is disabled"),
        (unit("gpukiln-bootstrap", UnitFileState=""), "gpukiln-bootstrap.service is missing"),
    ],
    "boot.bootstrap": [
        (unit("gpukiln-bootstrap", Result="exit-code"), "exit-code"),
        (unit("gpukiln-bootstrap", ConditionResult="no"), "not started"),
        (unit("gpukiln-bootstrap", LoadState="not-found"), "not-found"),
    ],
    "boot.persistenced": [
        (unit("nvidia-persistenced", ActiveState="failed"), "failed"),
        (put("gpus/pci", []), "wanted inactive"),
    ],
    "boot.journal": [(put("boot/journal", [{"unit": "docker.service", "message": "no space"}]), "no space")],
    "boot.time": [
        (lambda d: d["boot"].update(startup_s=None, startup="not yet finished"), "not yet finished")
    ],
    "boot.disk-space": [
        (disk(free=0), "/ (with /boot, /var, /var/lib/docker) has 0 of 61440 MiB free, wanted 512 or more"),
        (
            disk(inodes_free=9),
            "has 9 of 3900000 inodes free, wanted 10000 or more",
        ),
        (disk(1, free=1 << 20), "/boot/efi has 1 of 124 MiB free, wanted 6 or more"),
        (put("storage/file_systems", []), "no file system was looked at"),
    ],
    "boot.root-grown": [
        (put("storage/root/size", 7 << 30), "has 7.0 GiB of its partition's 61.0 GiB"),
        (put("storage/root/after", 40 << 30), "40.0 GiB of the disk after the root partition are unused"),
    ],
    "hardware.gpus": [(put("gpus/pci", []), "0 GPUs on the PCI bus, at least 1 expected")],
    "runtime.docker": [
        (unit("docker", ActiveState="failed"), "failed"),
        (put("docker/info/rc", 1), "exits 1"),
        (put("docker/info/version", None), "server version"),
        (put("docker/info/errors", ["refused"]), "refused"),
        (put("docker", {"installed": False}), "not found"),
    ],
    "runtime.gpu-tools": [
        (put("gpu_tools/sha256", None), "gpukiln-gpu is missing"),
        (put("gpu_tools/rc", 1), "--version exits 1"),
        (put("gpu_tools/sha256", "00" * 32), "the image's record has 5e5e"),
        (put("gpu_tools/state", None), "is missing, wanted"),
        (put("gpu_tools/state/mode", "0755"), "0755"),
        (put("gpu_tools/state/mode", "2770"), "wanted"),
        (put("gpu_tools/state/user", "ann"), "ann"),
        (put("gpu_tools/socket", None), "gpus.sock is missing"),
        (put("gpu_tools/socket/mode", "0666"), "0666"),
    ],
    "runtime.daemon-json": [
        (put("docker/daemon_json/problem", "not JSON: line 1"), "line 1"),
        (put("docker/validate", {"rc": 1, "error": "unknown key"}), "unknown key"),
        (put("docker/daemon_json/age_s", 3.0), "another configuration"),
        (unit("docker", ActiveState="failed"), "does not run with"),
    ],
    "runtime.containerd": [
        (unit("containerd", ActiveState="inactive"), "inactive"),
        (put("containerd/rc", 1), "exits 1"),
    ],
    "runtime.docker-nvidia": [
        (put("docker/info/runtimes", ["runc"]), "runc"),
        (put("docker/info/default_runtime", "runc"), "default runtime is runc"),
    ],
    "runtime.cdi": [
        (put("gpus/cdi", {}), "no specification"),
        (put("gpus/cdi/a", {"drivers": ["535.261.03"], "nodes": []}), "a names driver 535.261.03"),
        (put("gpus/cdi/a", {"drivers": [DRIVER], "nodes": ["/dev/nvidiactl"]}), "a has no /dev/nvidia-uvm"),
    ],
    "services.running": [
        (put("services/ollama/container", None), "ollama has no container"),
        (
            put("services/ollama/container", {"state": "exited", "exit_code": 1, "error": "no nvidia"}),
            "ollama is exited, exit 1 (no nvidia)",
        ),
        (put("services/ollama/container/state", "restarting"), "ollama is restarting"),
    ],
    "services.answers": [
        (put("services/ollama/http", {"error": "no answer in 10 s"}), "ollama, port 11434/api: no answer"),
        (put("services/ollama/http", answer(None, 503)), "503"),
        (put("services/ollama/http", answer({"error": "loading"})), "loading (its engine says healthy)"),
    ],
    "services.ollama": [
        (loaded(size_vram=0), "wholly on the processor: 0 of 600 MiB of small are in GPU memory"),
        (loaded(size_vram=200 << 20), "partly on the processor: 200 of 600 MiB"),
        (loaded(size_vram=0), "its log says nothing about GPUs"),
        (loaded(size=100 << 30, size_vram=40 << 30), "40957 MiB of a GPU's memory were free"),
        (loaded(size=0), "reports no size"),
        (
            lambda d: (loaded(size_vram=0)(d), d["services"]["ollama"].update(log=["no compatible GPUs"])),
            "because: no compatible GPUs",
        ),
        (
            lambda d: (loaded(size_vram=0)(d), d["services"]["ollama"]["container"].update(gpus=False)),
            "because: its container was given no GPU",
        ),
        (put("services/ollama/ollama/ps", answer({"models": []})), "/api/ps does not list it"),
        (put("services/ollama/ollama/ps", {"error": "refused"}), "its loaded models: refused"),
        (put("services/ollama/ollama/generate", {"error": "no answer in 180 s"}), "no answer in 180 s"),
        (put("services/ollama/ollama/generate", answer({"error": "CUDA error"}, 500)), "500 CUDA error"),
    ],
    "services.vllm": [
        (put("services/vllm/vllm/models", answer({"data": []})), "serves no model, wanted small"),
        (put("services/vllm/vllm/models", answer(None, 500)), "does not list its models: 500"),
        (put("services/vllm/vllm/pids", [7]), "none of vllm's processes is on a GPU"),
    ],
    **GPU_FAULTS,
    **RUNNER_FAULTS,
    **POD_FAULTS,
}
INSIDE = {*RUNNER_FAULTS, *POD_FAULTS}  # of containers, not of machines


def suitable(check_id: str) -> Data:
    """A good machine, or container, on which the check can be run."""
    if check_id in POD_FAULTS:
        return pod()
    if check_id in RUNNER_FAULTS:
        return container()
    data = machine(gpus=2 if "several-gpus" in CHECKS[check_id][0].needs else 1)
    if check_id == "services.vllm":
        serve_by_vllm(data)
    return data


def test_every_check_has_its_fault() -> None:
    assert set(FAULTS) == set(CHECKS), "a check without a fault, or a fault without a check"
    assert all(FAULTS.values())


@pytest.mark.parametrize("check_id", CHECKS)
def test_a_good_gpu_node_passes(check_id: str) -> None:
    outcome, reason = evaluate_check(check_id, suitable(check_id))
    assert outcome == "passed", reason


@pytest.mark.parametrize("check_id", CHECKS)
def test_a_machine_without_gpu_and_toolkit_passes_or_is_not_run(check_id: str) -> None:
    data = suitable(check_id) if check_id in INSIDE else machine(gpus=0, toolkit=False)
    outcome, reason = evaluate_check(check_id, data, expect_gpus=None)
    needs = CHECKS[check_id][0].needs
    if "gpu" in needs:
        assert (outcome, reason) == ("not_run", "no GPU")
    elif "component:nvidia_container_toolkit" in needs:
        assert outcome == "not_run"
        assert reason == "nvidia_container_toolkit left out: its repository can't be reached"
    else:
        assert outcome == "passed", reason


@pytest.mark.parametrize(
    ("check_id", "fault", "words"),
    [(i, f, w) for i, faults in FAULTS.items() for f, w in faults],
    ids=[f"{i}-{n}" for i, faults in FAULTS.items() for n, _ in enumerate(faults)],
)
def test_fault_is_found(check_id: str, fault: Callable[[Data], Any], words: str) -> None:
    data = copy.deepcopy(suitable(check_id))
    fault(data)
    outcome, reason = evaluate_check(check_id, data)
    assert outcome == "failed", f"{check_id} did not notice: {reason}"
    assert words in reason


@pytest.mark.parametrize("section", [s for s in machine() if s != "record"])
def test_a_section_that_could_not_be_gathered_never_passes(section: str) -> None:
    """Whoever reads the section fails with the reason, and somebody reads each."""
    data = machine(gpus=2)
    data[section] = {"_error": "RuntimeError: tool is broken"}
    failed = [r for o, r in (evaluate_check(i, data) for i in CHECKS if i not in INSIDE) if o == "failed"]
    assert failed
    assert all(re.search("tool is broken", r) for r in failed)


@pytest.mark.parametrize("section", [s for s in machine() if s != "record"])
def test_a_section_that_was_not_reached_neither_passes_nor_fails(section: str) -> None:
    data = machine(gpus=2)
    data[section] = {"_not_reached": "kmod hangs"}
    found = {i: evaluate_check(i, data) for i in CHECKS if i not in INSIDE}
    assert "not_reached" in {outcome for outcome, _ in found.values()}
    assert {reason for outcome, reason in found.values() if outcome == "not_reached"} == {"kmod hangs"}
    assert "failed" not in {outcome for outcome, _ in found.values()}, found


def test_a_tool_that_hangs_is_not_called_missing() -> None:
    """What nvidia-smi would have told is not known, and nobody installed another driver."""
    data, hangs = machine(), {"_not_reached": "nvidia-smi hangs"}
    data["driver"].update(nvidia_smi=hangs, persistenced=hangs)
    data["gpus"].update(smi=hangs, rows=hangs, xids=hangs)
    for section in ("nvml", "cuda", "container"):
        data[section] = hangs
    data["monitoring"] = {"nvtop": hangs, "dcgm": hangs}
    data["hung"]["tools"] = [HANGS]
    found = {i: evaluate_check(i, data) for i in CHECKS if i not in INSIDE}
    assert [i for i, (outcome, _) in found.items() if outcome == "failed"] == ["versions.answers"]
    unknown = {i for i, (outcome, _) in found.items() if outcome == "not_reached"}
    assert unknown >= {
        "versions.driver-branch",
        "versions.driver-agrees",
        "versions.persistenced",
        "versions.holds",
        "gpu.driver-loaded",
        "gpu.nvidia-smi",
        "gpu.nvml",
        "gpu.xid",
        "compute.kernel",
        "container.docker-gpu",
        "monitoring.nvtop",
        "monitoring.dcgm",
    }
    assert found["versions.driver-installed"][0] == "passed"


def test_a_machine_without_a_service_is_not_judged_by_one() -> None:
    data = machine()
    data["services"] = {}
    found = {i: evaluate_check(i, data) for i in CHECKS if i.startswith("services.")}
    assert found == {
        "services.running": ("not_run", "no service"),
        "services.answers": ("not_run", "no service"),
        "services.ollama": ("not_run", "no ollama with a GPU"),
        "services.vllm": ("not_run", "no vllm with a GPU"),
    }


def test_without_a_model_nothing_is_said_of_where_ollama_computes() -> None:
    data = machine()
    data["services"]["ollama"]["ollama"] = {"not_run": "it has no model"}
    assert evaluate_check("services.ollama", data) == ("not_run", "ollama: it has no model")


def test_a_service_that_does_not_answer_is_one_failure() -> None:
    data = machine()
    data["services"]["ollama"].update(http={"error": "refused"})
    del data["services"]["ollama"]["ollama"]  # it was not asked
    assert evaluate_check("services.answers", data)[0] == "failed"
    assert evaluate_check("services.ollama", data) == ("not_run", "ollama does not answer")


def test_what_nvml_does_not_tell_of_processes_is_no_failure_of_vllm() -> None:
    data = machine()
    serve_by_vllm(data)
    data["nvml"]["gpus"][0]["processes"] = None
    assert evaluate_check("services.vllm", data)[0] == "not_run"


def test_a_second_boot_of_the_same_instance_is_fine() -> None:
    data = machine()
    data["identity"].update(born=BOOT - 86400, host_keys={HOST_KEY: BOOT - 86390})
    data["identity"]["machine_id"]["mtime"] = BOOT - 86420
    assert evaluate_check("hygiene.host-keys", data)[0] == "passed"
    assert evaluate_check("hygiene.machine-id", data)[0] == "passed"


def test_missing_hardware_is_a_failure_where_the_profile_expects_it() -> None:
    data = machine(gpus=0)
    assert evaluate_check("gpu.xid", data, profile="node", expect_gpus=None)[0] == "failed"
    assert evaluate_check("gpu.xid", data, profile="node", expect_gpus=0) == ("not_run", "no GPU")
    assert evaluate_check("gpu.xid", machine(), profile="image", expect_gpus=8) == (
        "failed",
        "1 GPUs on the PCI bus, at least 8 expected on this machine",
    )


def test_missing_record_is_a_failure_of_an_image_and_not_of_a_node() -> None:
    data = machine()
    NO_RECORD(data)
    assert evaluate_check("versions.packages", data, profile="image")[0] == "failed"
    assert evaluate_check("versions.packages", data, profile="node")[0] == "not_run"


@pytest.mark.parametrize(
    ("copy_", "step"),
    [
        (
            library("libcuda.so", STUBS, None, stands_in="stub", named_in=[CUDA_CONF]),
            f"Remove {STUBS} from {CUDA_CONF}",
        ),
        (
            library("libcuda.so", COMPAT, "550.54.15", stands_in="compat", named_in=[PROFILE]),
            f"Remove {COMPAT} from {PROFILE}",
        ),
        (library("libcuda.so", COMPAT, "550.54.15", stands_in="compat"), f"Move the library out of {COMPAT}"),
    ],
)
def test_a_stub_or_compat_library_is_no_reason_to_change_the_driver(copy_: Data, step: str) -> None:
    data = machine()
    stands_in(copy_)(data)
    assert evaluate_check("versions.driver-agrees", data)[0] == "passed"
    said = remedy("versions.library-path", data)
    assert (
        said == f"{step}{SYSTEM_FOLDER if not copy_['named_in'] else ''}; then run `ldconfig`. " + UNCHANGED
    )


SYSTEM_FOLDER = ", which the linker searches by default"
UNCHANGED = "Do not change the driver."


def test_an_unknown_version_of_a_library_is_not_compared() -> None:
    data = machine()
    data["driver"]["library_files"]["libcuda.so"].append(library("libcuda.so", "/opt/lib", None))
    assert evaluate_check("versions.driver-agrees", data) == ("passed", DRIVER)


def test_a_kernel_without_the_module_is_missing_it_and_does_not_differ() -> None:
    """`mkdir -p /lib/modules/6.1.0-99-amd64/kernel; depmod -a 6.1.0-99-amd64`, and a kernel with an image."""
    for image in (None, f"/boot/vmlinuz-{OTHER}"):
        data = machine()
        another_kernel(image=image)(data)
        assert evaluate_check("versions.driver-agrees", data) == ("passed", DRIVER)
        assert evaluate_check("modules.version", data)[0] == "passed"
        assert evaluate_check("modules.present", data)[0] == "failed"
        assert not re.search(r"reinstall|(?<!not )reboot", remedy("modules.present", data), re.IGNORECASE)


def test_the_remedy_for_a_missing_module_takes_no_node_into_a_kernel_without_a_driver() -> None:
    data = machine()
    another_kernel()(data)
    assert remedy("modules.present", data).startswith(f"Do not reboot into {OTHER}, which has no driver: ")
    data = machine()
    another_kernel(running=True)(data)
    assert remedy("modules.present", data).startswith(f"{OTHER} is running: install the headers of {OTHER}")
    assert "do not remove it" in remedy("modules.present", data)
    assert remedy("modules.installed-kernels", data).startswith(
        f"{OTHER} was added after the build and is running: do not remove it"
    )
    data["gpus"]["module"] = "535.261.03"
    said = remedy("versions.driver-agrees", data)
    assert said.startswith(f"Do not reboot yet: {OTHER} has no module of the driver")
    data = machine()
    data["gpus"]["module"] = "535.261.03"
    assert remedy("versions.driver-agrees", data).startswith(
        f"Everything on the disk is {DRIVER}: reboot when"
    )


def test_what_is_missing_is_no_other_version() -> None:
    data = machine()
    data["driver"]["nvidia_smi"].update(version=None, rc=127)
    data["driver"]["library_files"]["libnvidia-ml.so"] = []
    failed = [i for i in CHECKS if i not in INSIDE and evaluate_check(i, data)[0] == "failed"]
    assert failed == ["versions.driver-complete"]
    data = machine()
    del data["packages"]["installed"]["nvidia-smi"]
    assert evaluate_check("versions.packages", data)[1] == (
        "1 of 12 recorded packages missing, 0 of another version; missing: nvidia-smi"
    )


def test_a_module_that_names_no_version_is_not_compared() -> None:
    data = machine()
    data["modules"][KERNEL]["nvidia_uvm"]["version"] = None
    assert evaluate_check("modules.version", data) == ("passed", f"version unknown: nvidia_uvm for {KERNEL}")
    data["modules"][KERNEL]["nvidia"]["version"] = None
    assert evaluate_check("versions.driver-agrees", data)[0] == "passed"
    assert evaluate_check("versions.driver-branch", data)[0] == "passed"


def test_what_dkms_says_of_headers_without_a_kernel_is_no_fault() -> None:
    data = machine()
    data["dkms"]["rows"].append({**data["dkms"]["rows"][0], "kernel": "6.1.0-40-amd64", "state": "built"})
    assert evaluate_check("modules.dkms", data)[0] == "passed"


def test_what_healthy_nodes_configure_for_their_modules_is_no_fault() -> None:
    """Options of RHEL's installer for NVIDIA, a copy of the same version, and the driver in the initramfs."""
    data = machine()
    nouveau = {"modprobe.blacklist": ["nouveau", "nova_core"], "module_blacklist": ["nouveau", "nvidiafb"]}
    data["loading"].update(
        boot_options={"/proc/cmdline": nouveau, "/boot/grub2/grubenv": nouveau},
        blacklist=["nouveau", "nova_core", "nvidiafb"],
        softdeps=["nvidia post: nvidia-uvm nvidia-drm"],
        vfio_ids=["10de:1eb8", "8086:1572"],
    )
    twice = [
        {"file": f"/lib/modules/{KERNEL}/{folder}/nvidia.ko", "version": DRIVER} for folder in ("a", "b")
    ]
    data["loading"]["copies"][KERNEL] = {"nvidia": twice}
    data["nouveau"]["initramfs"][KERNEL]["driver"] = {"lib/modules/nvidia.ko": DRIVER}
    for check_id in ("modules.loads", "modules.rivals", "modules.copies", "modules.initramfs"):
        assert evaluate_check(check_id, data)[0] == "passed", check_id


def test_a_blacklist_of_a_driver_that_is_loaded_all_the_same_is_noted() -> None:
    """modprobe.d(5): a blacklist hides a module's aliases; who asks for it by name, such as "
    "nvidia-modprobe, gets it."""
    data = machine()
    data["loading"]["blacklist"] = ["nvidia"]
    outcome, note = evaluate_check("modules.loads", data)
    assert (outcome, "it is loaded now" in note) == ("passed", True)


def test_an_install_command_of_somebody_s_is_noted_and_not_judged() -> None:
    data = machine()
    asked("nvidia", loads(command="/usr/local/sbin/load-nvidia"))(data)
    assert evaluate_check("modules.loads", data) == (
        "passed",
        "an `install` command of its own, not examined further: /usr/local/sbin/load-nvidia",
    )


def test_companions_of_the_driver_s_version_are_no_fault() -> None:
    """Of Ubuntu's firmware and of RPM's packages several versions are installed at once."""
    data = machine()
    data["packages"]["installed"] |= {
        "nvidia-fabricmanager-535": f"{DRIVER}-1",
        "libnvidia-nscq-535": f"{DRIVER}-0ubuntu0.22.04.1",
        "nvidia-fabric-manager": f"3:{DRIVER}-1.el9",
        "nvlsm": "2025.03.1-1",
        "nvidia-firmware-535-server-535.261.03": "535.261.03-0ubuntu1",
        f"nvidia-firmware-535-server-{DRIVER}": f"{DRIVER}-0ubuntu1",
        "linux-modules-nvidia-535-server-open-5.15.0-100-generic": "5.15.0-100.110+1",
        "nvidia-settings": "535.171.04-1~deb12u1",
        "nvidia-modprobe": "535.161.07-1",
    }
    assert evaluate_check("versions.companions", data)[0] == "passed"


def test_firmware_that_says_no_version_is_not_compared_and_a_gsp_that_is_off_needs_none() -> None:
    data = machine()
    nvidia = data["modules"][KERNEL]["nvidia"]
    nvidia["firmware"] = [gsp("gsp_ga10x", path="/lib/firmware/gsp_ga10x.bin.zst", version=None)]
    assert evaluate_check("modules.firmware", data) == ("passed", "1 files")
    nvidia["firmware"] = []
    assert evaluate_check("modules.firmware", data) == ("passed", "the module names no firmware")
    nvidia["firmware"] = [gsp("gsp_ga10x", path=None)]
    data["loading"]["gsp_off"] = True
    assert evaluate_check("modules.firmware", data)[0] == "passed"


def test_a_missing_gpu_is_the_first_finding() -> None:
    """Not the CDI specification, of which a machine without a GPU has none."""
    assert next(iter(LAYERS)) == CHECKS["hardware.gpus"][0].layer
    assert [i for i, (check, _) in CHECKS.items() if check.layer == "hardware"] == ["hardware.gpus"]
    assert evaluate_check("hardware.gpus", machine(gpus=0), profile="node", expect_gpus=None)[0] == "failed"
    assert evaluate_check("hardware.gpus", machine(gpus=0), profile="node", expect_gpus=0) == (
        "not_run",
        "no GPU",
    )


def test_the_owner_of_bare_metal_partitions_its_disk() -> None:
    data = machine()
    data["storage"]["root"]["after"] = 400 << 30
    assert evaluate_check("boot.root-grown", data, profile="node") == ("passed", "60.0 GiB")
    data["storage"]["root"] = None
    assert evaluate_check("boot.root-grown", data)[0] == "not_run"
