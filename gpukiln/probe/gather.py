"""Gathers the facts of this machine and prints them as JSON. Runs on the machine that is verified, as root.

The rules for all modules of this package that run there: they are sent as text (packing.py) and run by the
machine's python3 (3.9 or newer), so that they import only the standard library and each other. They change
nothing, except for a container image that is removed again, and a model for a service that has none
(services.py). Every section is a function that returns a JSON value. Its exception becomes `{"_error":
text}`, or `{"_not_reached": text}` where a tool hangs or the time was up: the value is unknown then. No
secret is ever printed: keys are fingerprints, findings are paths and line numbers.
"""

# ruff: noqa: PTH110, PTH116, PTH119, PTH120, PTH123, PTH207
# os.path and glob are faster than pathlib on an emulated machine; temporary folders are only read.

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from gpukiln.probe.base import (
    NOT_REACHED,
    TIMED_OUT,
    HungError,
    check_output,
    init_started,
    mtime,
    read,
    read_evidence,
    require_driver_answers,
    run,
    run_unless_hung,
    tail,
    watch,
)
from gpukiln.probe.container import container, runtimes_after_join, runtimes_in
from gpukiln.probe.cuda import cuda
from gpukiln.probe.desktop import desktop
from gpukiln.probe.firmware import firmware
from gpukiln.probe.gpus import gpus
from gpukiln.probe.hygiene import build_files, identity, keys, secrets
from gpukiln.probe.libraries import libraries
from gpukiln.probe.loading import DRIVER_MODULE, loading, modules_in
from gpukiln.probe.monitoring import monitoring
from gpukiln.probe.nodeadm import nodeadm
from gpukiln.probe.nvml import name_gpus, nvlink_facts, nvml_facts
from gpukiln.probe.runner import runner, visible_gpus
from gpukiln.probe.scripts import SIGNATURE
from gpukiln.probe.sections import gather
from gpukiln.probe.services import services
from gpukiln.probe.simulated import gpus_to_ask, simulated
from gpukiln.probe.storage import storage
from gpukiln.probe.xids import JOURNAL_S

UNITS = (
    "nvidia-persistenced.service",
    "docker.service",
    "containerd.service",
    "gpukiln-bootstrap.service",
    "nvidia-cdi-refresh.service",
)
SYSTEMD = "/run/systemd/system"
GPU_TOOL, GPU_STATE = "/usr/local/bin/gpukiln-gpu", "/var/lib/gpukiln/gpus"
GPU_SOCKET = "/run/gpukiln/gpus.sock"
FOLDERS = ("/usr/local/bin", "/usr/bin")  # of compilers


def record() -> dict[str, Any]:
    """The image's record: {data, error}; exactly one of them is null."""
    text = read_evidence("/etc/gpukiln/image.json")
    if text is None:
        return {"data": None, "error": "/etc/gpukiln/image.json is missing"}
    try:
        data = json.loads(text)
    except ValueError as error:
        return {"data": None, "error": f"/etc/gpukiln/image.json is not JSON: {error}"}
    if not isinstance(data, dict):
        return {"data": None, "error": "/etc/gpukiln/image.json is not a JSON object"}
    return {"data": data, "error": None}


def expected() -> dict[str, Any]:
    """The expected state of the node's GPUs: {mig: enabled, disabled or any, bandwidth_share}; null: not set.

    The role gpu_bootstrap writes it.
    """
    text = read_evidence("/etc/gpukiln/expected.json")
    said = json.loads(text or "{}")
    return {key: said.get(key) for key in ("mig", "bandwidth_share")}


def os_release() -> dict[str, Any]:
    """{id, version, title, family}; family is debian or redhat."""
    values = dict(re.findall(r'(?m)^(\w+)="?(.*?)"?$', read("/etc/os-release") or ""))
    like = {values.get("ID", ""), *values.get("ID_LIKE", "").split()}
    family = (
        "debian" if like & {"debian", "ubuntu"} else "redhat" if like & {"rhel", "fedora", "amzn"} else ""
    )
    return {
        "id": values.get("ID", ""),
        "version": values.get("VERSION_ID", ""),
        "title": values.get("PRETTY_NAME", ""),
        "family": family,
    }


def kernel() -> dict[str, Any]:
    """{running, installed: kernels that have a module tree of their own, images: {kernel: its file or null}}.

    A folder of /lib/modules that has only headers or files of DKMS does not count.
    """
    installed = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob("/lib/modules/*/kernel"))
    return {
        "running": os.uname().release,
        "installed": installed,
        "images": {release: kernel_image(release) for release in installed},
    }


def kernel_image(release: str) -> str | None:
    """The kernel file that a boot loader starts; None where none is in the usual places.

    Debian, Ubuntu and RHEL have it in /boot, RHEL in the tree too, kernel-install(8) below the machine's id.
    """
    places = (
        *("/boot/vmlinu[xz]-{}", "/boot/Image-{}", "/lib/modules/{}/vmlinu[xz]"),
        *("/boot/*/{}/linux", "/efi/*/{}/linux", "/boot/efi/*/{}/linux"),
    )
    images = [path for place in places for path in sorted(glob.glob(place.format(glob.escape(release))))]
    return next(iter(images), None)


def packages() -> dict[str, Any]:
    """{installed: {name: version}, holds: [name]}."""
    if run("dpkg", "--version")["rc"] == 0:
        rows = check_output("dpkg-query", "-W", "-f", "${db:Status-Status}\t${Package}\t${Version}\n")
        cells = [r.split("\t") for r in rows.splitlines()]
        holds = check_output("apt-mark", "showhold").split()
        return {
            "installed": {n: v for s, n, v in cells if s == "installed"},
            "holds": sorted(h.partition(":")[0] for h in holds),
        }
    # rpm lists several versions of a kernel package, and signing keys as packages (gpg-pubkey).
    versions: dict[str, set[str]] = {}
    for row in check_output("rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n").splitlines():
        name, version = row.split("\t")
        versions.setdefault(name, set()).add(version)
    # The plugin may be missing; then there are no holds.
    locks = run("dnf", "versionlock", "list")
    names = [re.sub(r"-[^-]*-[^-]*$", "", line.strip()) for line in locks["out"].splitlines()]
    installed = {name: ", ".join(sorted(several)) for name, several in versions.items()}
    return {"installed": installed, "holds": sorted(filter(None, names))}


def driver() -> dict[str, Any]:
    """Versions of the driver's user space: {nvidia_smi, libraries, library_files, persistenced}.

    libraries: {name: [version]} of the driver's own; library_files: every copy that the linker finds, see
    `libraries.libraries`. `nvidia-smi -h` works with neither module nor GPU; its first line ends in the
    version. The value of a tool that hangs is {_not_reached: why}.
    """
    # -h does not open the driver, so that it works without a GPU and without the module.
    smi = run_unless_hung("nvidia-smi", "-h", timeout=20)
    if NOT_REACHED not in smi:
        first = smi["out"].splitlines()[0] if smi["out"].strip() else ""
        smi = {"rc": smi["rc"], "first_line": first or smi["err"], "version": driver_version(first)}
    files = libraries()
    daemon = run_unless_hung("nvidia-persistenced", "--version", timeout=20)
    return {
        "nvidia_smi": smi,
        "libraries": {
            name: sorted({copy["version"] for copy in copies if copy["version"] and not copy["stands_in"]})
            for name, copies in files.items()
        },
        "library_files": files,
        "persistenced": daemon if NOT_REACHED in daemon else driver_version(daemon["out"]),
    }


def driver_version(text: str) -> str | None:
    """The driver version in a text such as `NVIDIA System Management Interface -- v535.309.01`.

    >>> driver_version("NVIDIA System Management Interface -- v535.309.01")
    '535.309.01'
    >>> driver_version("CUDA Version: 12.2") is None
    True
    """
    match = re.search(r"(?<![\d.])(\d{3}\.\d+(?:\.\d+)?)(?![\d.])", text)
    return match.group(1) if match else None


def modules() -> dict[str, Any]:
    """{kernel: {nvidia, nvidia_uvm, nvidia_modeset: {file, version, vermagic, firmware} or null}}.

    version is null where the module names none. firmware: the files that the module names, see
    `firmware.firmware`. Debian names the modules nvidia-current*, other distributions nvidia*.
    """
    by_kernel: dict[str, Any] = {}
    for release in kernel()["installed"]:
        by_kernel[release] = {}
        for key, names in (
            ("nvidia", ("nvidia-current", "nvidia")),
            ("nvidia_uvm", ("nvidia-current-uvm", "nvidia-uvm")),
            ("nvidia_modeset", ("nvidia-current-modeset", "nvidia-modeset")),
        ):
            by_kernel[release][key] = next(filter(None, (_modinfo(release, n) for n in names)), None)
    return by_kernel


def _modinfo(release: str, name: str) -> dict[str, Any] | None:
    info = run("modinfo", "-k", release, name)
    if info["rc"] != 0:
        return None
    values = dict(re.findall(r"(?m)^(\w+):\s*(.*?)\s*$", info["out"]))
    return {
        "file": values.get("filename", ""),
        "version": values.get("version") or None,
        "vermagic": values.get("vermagic", "").split(" ")[0],
        "firmware": firmware(release, re.findall(r"(?m)^firmware:\s*(\S+)", info["out"])),
    }


def signatures() -> dict[str, Any]:
    """{kernel: {rc, out}}: whether the kernel would load the driver's module, by scripts/bootstrap.

    Only kernels that have the module; Debian names it nvidia-current.
    """
    answers = {}
    for release in kernel()["installed"]:
        for name in ("nvidia-current", "nvidia"):
            if _modinfo(release, name):
                asked = ("env", f"GPUKILN_KERNEL={release}", "bash", "-s", name)
                said = run(*asked, data=SIGNATURE.encode())
                answers[release] = {"rc": said["rc"], "out": tail((said["out"] or said["err"]).strip(), 500)}
                break
    return answers


def nouveau() -> dict[str, Any]:
    """{loaded, blacklisted, files: modprobe files that say so, initramfs: {kernel: {path, ...}}}.

    Of an initramfs driver is {file: version} of NVIDIA's modules in it.
    """
    config = check_output("modprobe", "--showconfig")
    files = []
    for path in sorted(glob.glob("/etc/modprobe.d/*.conf") + glob.glob("/lib/modprobe.d/*.conf")):
        if re.search(r"(?m)^\s*blacklist\s+nouveau\b", read(path) or ""):
            files.append(path)
    images: dict[str, Any] = {}
    for release in kernel()["installed"]:
        paths = [f"/boot/initrd.img-{release}", f"/boot/initramfs-{release}.img"]
        path = next(filter(os.path.exists, paths), "")
        if not path:
            images[release] = {"path": None, "rc": 1, "error": "no initramfs in /boot"}
            continue
        # Debian and Ubuntu have initramfs-tools, RHEL and Amazon Linux dracut.
        tool = "lsinitramfs" if "initrd.img" in path else "lsinitrd"
        listing = run(tool, path, timeout=240)
        names = [os.path.basename(line.split(" ")[-1]) for line in listing["out"].splitlines()]
        images[release] = {
            "path": path,
            "rc": listing["rc"],
            "error": tail(listing["err"], 300),
            "mtime": mtime(path),
            "files": [f for f in files if os.path.basename(f) in names],
            "module": any(n.startswith("nouveau.ko") for n in names),
            "driver": _driver_in(path) if any(map(DRIVER_MODULE.fullmatch, names)) else {},
        }
    return {
        "loaded": os.path.exists("/sys/module/nouveau"),
        "blacklisted": re.search(r"(?m)^blacklist nouveau$", config) is not None,
        "files": {f: mtime(f) for f in files},
        "initramfs": images,
    }


def _driver_in(image: str) -> dict[str, str | None]:
    """The driver's modules in an initramfs; empty where it can't be read."""
    try:
        return modules_in(image)
    except (OSError, ValueError):
        return {}


def dkms() -> dict[str, Any]:
    """{installed, rows: [{module, version, kernel, state}], trees: [remaining build directories], tools}.

    tools are those that build modules: {compilers: paths, make: its path or None}.
    """
    status = run("dkms", "status")
    rows = []
    for line in status["out"].splitlines():
        match = re.match(r"([^/,]+)[/,]\s*([^,:]+)(?:,\s*([^,]+),\s*([^:]+))?:\s*(.*)", line.strip())
        if match:
            module, version, release, _arch, state = match.groups()
            rows.append({"module": module, "version": version, "kernel": release, "state": state})
    return {
        "installed": status["rc"] != 127,
        "rows": rows,
        "rc": status["rc"],
        "error": status["err"],
        "trees": sorted(glob.glob("/var/lib/dkms/*/*/build")),
        "tools": {"compilers": compilers(), "make": shutil.which("make")},
    }


def compilers() -> list[str]:
    """Paths of C and C++ compilers in the usual folders, under whatever name."""
    name = re.compile(r"(\w+-linux-gnu-)?(gcc|g\+\+|cc|c\+\+|clang(\+\+)?|tcc)(-[\d.]+)?")
    files = [file for folder in FOLDERS for file in glob.glob(f"{folder}/*")]
    return sorted(file for file in files if name.fullmatch(os.path.basename(file)) and os.path.exists(file))


def startup_s(text: str) -> float | None:
    """Seconds in `systemd-analyze time`: the total, or the only part; None before the boot has ended.

    >>> startup_s("Startup finished in 2.1s (kernel) + 1min 3.5s (userspace) = 1min 5.6s")
    65.6
    >>> startup_s("Bootup is not yet finished.") is None
    True
    """
    match = re.search(r"(?m)^Startup finished in (?:.*= )?((?:\d+min )?(?:[\d.]+s|\d+ms))", text)
    if not match:
        return None
    units = {"min": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(n) * units[u] for n, u in re.findall(r"([\d.]+)(min|ms|s)", match.group(1)))


def boot() -> dict[str, Any]:
    """How the boot went: {booted, boot_time, state, failed, units, startup_s, journal}.

    booted: whether systemd runs (sd_booted(3)); in a container without systemd there are no other facts.
    """
    virtualization = run("systemd-detect-virt")["out"].strip()
    if not os.path.exists(SYSTEMD):
        return {"booted": False, "virtualization": virtualization}
    units = {}
    for unit in UNITS:
        keys = "LoadState,UnitFileState,ActiveState,SubState,Result,ConditionResult"
        # Compared with the age of daemon.json: did Docker start before or after it was written?
        keys += ",ActiveEnterTimestampMonotonic"
        shown = dict(
            r.partition("=")[::2] for r in check_output("systemctl", "show", "-p", keys, unit).splitlines()
        )
        units[unit] = {k: shown.get(k, "") for k in keys.split(",")}
    analyze = run("systemd-analyze", "time")
    failed = check_output(
        "systemctl", "list-units", "--failed", "--plain", "--no-legend", "--full"
    ).splitlines()
    selected = [a for u in UNITS for a in ("-u", u)]
    # Only units of a GPU node: other services log errors in normal operation.
    journal = errors_of(selected)
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    return {
        "booted": True,
        "boot_time": init_started(),
        "uptime_s": uptime,
        "state": run("systemctl", "is-system-running")["out"].strip(),
        "virtualization": virtualization,
        "failed": [line.split()[0] for line in failed if line.strip()],
        "units": units,
        "startup_s": startup_s(analyze["out"]),
        "startup": (analyze["out"] or analyze["err"]).strip(),
        "journal": journal,
    }


def errors_of(selected: list[str]) -> Any:
    """[{unit, message}]: errors in the journal of this boot; a large journal may take too long."""
    asked = ("journalctl", "-b", "-p", "err", "-o", "json", "--no-pager", "-n", "200", *selected)
    said = run(*asked, timeout=JOURNAL_S, waits=True)
    if said["rc"] == TIMED_OUT:
        return {NOT_REACHED: f"the journal gave no answer in {JOURNAL_S:.0f} s"}
    if said["rc"] != 0:
        raise RuntimeError(f"{' '.join(asked)}: exit {said['rc']}: {tail(said['err'] or said['out'], 500)}")
    entries = [json.loads(line) for line in said["out"].splitlines() if line.startswith("{")]
    return [
        {
            "unit": str(e.get("UNIT") or e.get("_SYSTEMD_UNIT") or ""),
            "message": tail(str(e.get("MESSAGE", "")), 300),
        }
        for e in entries
    ]


def gpu_tools() -> dict[str, Any]:
    """{sha256 of gpukiln-gpu, rc and out of its --version, state and socket: {user, group, mode}}.

    sha256, state (the folder of the leases) and socket (where members of the group lease) are null where they
    are missing.
    """
    try:
        with open(GPU_TOOL, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except FileNotFoundError:
        return {"sha256": None, "rc": None, "out": "", "state": None, "socket": None}
    said = run_unless_hung(GPU_TOOL, "--version", timeout=60)
    facts = {"sha256": digest, "state": _ownership(GPU_STATE), "socket": _ownership(GPU_SOCKET)}
    if NOT_REACHED in said:
        return {**facts, "rc": said, "out": ""}
    return {**facts, "rc": said["rc"], "out": tail(said["out"] + said["err"], 500)}


def _ownership(path: str) -> dict[str, str] | None:
    """A file's user, group and mode; None where it is missing."""
    if not os.path.exists(path):
        return None
    status = os.stat(path)
    group = check_output("getent", "group", str(status.st_gid)).partition(":")[0]
    user = check_output("getent", "passwd", str(status.st_uid)).partition(":")[0]
    return {"user": user, "group": group, "mode": f"{status.st_mode & 0o7777:04o}"}


def docker() -> dict[str, Any]:
    """{installed, info, daemon_json, validate}: the daemon's answer, and its configuration file."""
    if run("dockerd", "--version")["rc"] == 127:
        return {"installed": False}
    info = run("docker", "info", "--format", "{{json .}}", timeout=120)
    try:
        said = json.loads(info["out"])
    except ValueError:
        said = {}
    path = "/etc/docker/daemon.json"
    text = read_evidence(path)
    problem = None
    try:
        if text is not None and not isinstance(json.loads(text), dict):
            problem = "not a JSON object"
    except ValueError as error:
        problem = f"not JSON: {error}"
    # --validate came with Docker 23; older daemons answer "unknown flag".
    check = run("dockerd", "--validate", "--config-file", path) if text is not None else None
    if check and "unknown flag" in check["err"]:
        check = None
    return {
        "installed": True,
        "info": {
            "rc": info["rc"],
            "error": tail(info["err"], 500),
            "version": said.get("ServerVersion"),
            "errors": said.get("ServerErrors") or [],
            "default_runtime": said.get("DefaultRuntime"),
            "runtimes": sorted(said.get("Runtimes") or {}),
        },
        "daemon_json": {
            "present": text is not None,
            "problem": problem,
            "age_s": time.time() - mtime(path) if text is not None else None,
        },
        "validate": check and {"rc": check["rc"], "error": tail(check["err"] or check["out"], 500)},
    }


def containerd() -> dict[str, Any]:
    """{installed, rc, error, runtimes: names in the effective configuration, joined: see the function}."""
    dump = run("containerd", "config", "dump", timeout=120)
    return {
        "installed": dump["rc"] != 127,
        "rc": dump["rc"],
        "error": tail(dump["err"], 500),
        "runtimes": runtimes_in(dump),
        "joined": runtimes_after_join(),
    }


def nvml() -> dict[str, Any]:
    """NVML's facts of the GPUs, and the time of the query, in seconds; see nvml.py."""
    return _query_nvml(nvml_facts)


def nvlinks() -> dict[str, Any]:
    """NVML's facts of the NVLinks after the computation, and the time of the query.

    A check compares the growth of counters, because totals since the driver's load are no sign of a fault.
    """
    return _query_nvml(nvlink_facts)


def _query_nvml(facts: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    require_driver_answers()
    try:
        return {**facts(gpus_to_ask()), "at": round(time.monotonic(), 1)}
    except HungError as error:
        watch.hung["NVML"] = {"tool": "NVML", "command": "every call about the GPUs", "reason": str(error)}
        raise


SECTIONS = (
    record,
    expected,
    os_release,
    kernel,
    packages,
    driver,
    modules,
    signatures,
    nouveau,
    loading,
    dkms,
    identity,
    keys,
    build_files,
    secrets,
    simulated,
    gpu_tools,
    docker,
    containerd,
    nodeadm,
    gpus,
    nvml,
    cuda,
    container,
    services,
    desktop,
    monitoring,
    nvlinks,
    storage,
    boot,
)
# Of a container, which did not boot: log and driver are the host's.
RUNNER_SECTIONS = {
    "record": record,
    "expected": expected,
    "os": os_release,
    "simulated": simulated,
    "runner": runner,
    "gpus": visible_gpus,
    "nvml": nvml,
    "cuda": cuda,
}
# Of a pod, with any image.
POD_SECTIONS = {name: section for name, section in RUNNER_SECTIONS.items() if name != "runner"}
# Sections that only read and need no root, for scripts/first-contact.
CONTACT_SECTIONS = {"simulated": simulated, "gpus": gpus, "nvml": nvml, "cuda": cuda}
PROFILE_SECTIONS = {"runner": RUNNER_SECTIONS, "pod": POD_SECTIONS, "contact": CONTACT_SECTIONS}


def main() -> None:
    """Wait for the boot to end, gather every section and print the facts.

    Arguments: the profile, or `-`; a random mark, printed on a line before and a line after the facts, to
        separate them from output of the login shell; and the seconds that gathering may take, or `-`.
    """
    profile, mark, seconds = sys.argv[1:]
    watch.start(None if seconds == "-" else float(seconds))
    every = {"os" if function is os_release else function.__name__: function for function in SECTIONS}
    facts = gather(PROFILE_SECTIONS.get(profile, every), boot=profile not in PROFILE_SECTIONS)
    if "nvml" in facts:
        # The bus has device ids only; reports show names.
        name_gpus(facts)
    sys.stdout.write(f"\n{mark}\n{json.dumps(facts)}\n{mark}\n")


if __name__ == "__main__":
    main()
