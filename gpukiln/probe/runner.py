"""Gathers the facts of a container for GPU jobs. Runs inside it as its own user, see gpukiln/probe/gather.py.

No section here needs a GPU. Compiled files go into a temporary folder and into the compiler cache of the
container, which is deleted afterwards.
"""

# ruff: noqa: PTH110, PTH112, PTH113, PTH114, PTH116, PTH118, PTH120, PTH123, PTH207, S108
# See gpukiln/probe/gather.py.

from __future__ import annotations

import glob
import json
import os
import pwd
import re
import stat
import tempfile
from typing import Any

from gpukiln.probe.base import accessible_gpus, read, run, tail
from gpukiln.probe.hygiene import SECRET_PATTERNS

HOOKS = ("ACTIONS_RUNNER_HOOK_JOB_STARTED", "ACTIONS_RUNNER_HOOK_JOB_COMPLETED")
TOOLS = {
    "cmake": ("cmake", "--version"),
    "ninja": ("ninja", "--version"),
    "ccache": ("ccache", "--version"),
    "git": ("git", "--version"),
    "gcc": ("gcc", "--version"),
    "g++": ("g++", "--version"),
    "python3": ("python3", "--version"),
    "tini": ("tini", "--version"),
    "ptxas": ("ptxas", "--version"),
    "nvcc": ("nvcc", "--version"),
}
# Files with credentials of an account or a registration, which everybody with the image could use.
CREDENTIAL_FILES = (
    ".netrc",
    ".git-credentials",
    ".npmrc",
    ".pypirc",
    ".docker/config.json",
    ".aws/credentials",
    ".config/gh/hosts.yml",
    ".ssh/id_*",
    ".credentials",
    ".credentials_rsaparams",
    ".runner",
)
CACHES = (
    "/var/lib/apt/lists/*_*",
    "/var/cache/apt/*.bin",
    "/var/cache/apt/archives/*.deb",
    "/tmp/*",
    "/var/tmp/*",
    "/root/.cache/*",
    "/var/log/*.log",
    "/var/log/apt/*",
    "{home}/.cache/pip",
    "{home}/.cache/ccache/*",
    "{home}/.*_history",
)
IMPORTS = (
    "numpy",
    "yaml",
    "requests",
    "sympy",
    "jinja2",
    "networkx",
    "typing_extensions",
    "setuptools",
    "wheel",
    "pytest",
    "psutil",
    "pybind11",
)
SECRET_NAME = re.compile(r"(?i)token|secret|passw|api_?key|credential")
SCAN_BYTES = 1 << 20  # of each file; a key is at its beginning
PROGRAM = "int main(void) { return 0; }\n"
KERNEL = 'extern "C" __global__ void gpukiln(float *x) { x[threadIdx.x] *= 2.0f; }\n'
ARCHITECTURE = "70"  # Volta: the oldest that CUDA 12 and the newest runtimes both know
# Asks the libraries for their versions, and compiles with NVRTC. In a separate process, because it may crash.
LIBRARIES = r"""
import ctypes, json, sys
found = {}
def version(name, library, function, *, returns=False):
    try:
        loaded = ctypes.CDLL(library)
        value = ctypes.c_int()
        if returns:
            loaded[function].restype = ctypes.c_size_t
            value = ctypes.c_int(loaded[function]())
        elif (code := loaded[function](ctypes.byref(value))):
            raise OSError(f"{function} returns {code}")
        found[name] = {"version": value.value, "error": ""}
    except (OSError, AttributeError) as error:
        found[name] = {"version": None, "error": str(error)}
version("cudart", "libcudart.so.12", "cudaRuntimeGetVersion")
version("cudnn", "libcudnn.so.8", "cudnnGetVersion", returns=True)
version("nccl", "libnccl.so.2", "ncclGetVersion")
try:
    ctypes.CDLL("libcublas.so.12")
    found["cublas"] = {"version": None, "error": ""}
except OSError as error:
    found["cublas"] = {"version": None, "error": str(error)}
def compile(source, option):
    rtc = ctypes.CDLL("libnvrtc.so.12")
    major, minor = ctypes.c_int(), ctypes.c_int()
    rtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    program = ctypes.c_void_p()
    options = (ctypes.c_char_p * 1)(option.encode())
    code = rtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None)
    code = code or rtc.nvrtcCompileProgram(program, 1, options)
    size = ctypes.c_size_t()
    code = code or rtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    code = code or rtc.nvrtcGetPTX(program, text)
    error = f"nvrtcResult {code}" if code else ""
    return {"version": f"{major.value}.{minor.value}", "error": error, "ptx": text.value.decode()}
try:
    found["nvrtc"] = compile(sys.argv[1], sys.argv[2])
except OSError as error:
    found["nvrtc"] = {"version": None, "error": str(error), "ptx": ""}
print(json.dumps(found))
"""
IMPORTING = r"""
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        found[name] = None
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def run_in_image(*argv: str, timeout: float = 120, **variables: str) -> dict[str, Any]:
    """Run a command as a job of the image does, with the image's own PATH."""
    extra = [f"{name}={value}" for name, value in variables.items()]
    # `run` sets the probe's own PATH; a job has the image's.
    return run("env", f"PATH={os.environ.get('PATH', '')}", *extra, *argv, timeout=timeout)


def runner() -> dict[str, Any]:
    """The facts of the container; each key has a function below."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    return {
        "user": {
            "uid": os.getuid(),
            "name": pwd.getpwuid(os.getuid()).pw_name,
            "home": home,
            "root_without_password": run_in_image("sudo", "-n", "true")["rc"] == 0,
        },
        "process_1": (read("/proc/1/cmdline") or "").replace("\0", " ").strip(),
        # before the first compilation, which fills caches
        "build_files": sorted(p for pattern in CACHES for p in glob.glob(pattern.format(home=home))),
        "credentials": credentials(home),
        "writable": writable_paths(),
        "size": disk_use(),
        "tools": {name: first_line(argv) for name, argv in TOOLS.items()},
        "packages": python_packages(),
        "ccache": ccache(),
        "hooks": hooks(),
        "actions_runner": actions_runner(home),
        **cuda_libraries(),
    }


def visible_gpus() -> dict[str, Any]:
    """{pci: the GPUs that this container can open, container, module: loaded version}."""
    loaded = read("/sys/module/nvidia/version")
    return {"pci": accessible_gpus(), "container": True, "module": loaded.strip() if loaded else None}


def first_line(argv: tuple[str, ...]) -> dict[str, Any]:
    """{rc, out}: a tool's version line; nvcc and ptxas have it in their last line but one."""
    done = run_in_image(*argv)
    lines = [line for line in (done["out"] or done["err"]).splitlines() if line.strip()]
    release = [line for line in lines if "release" in line]
    return {"rc": done["rc"], "out": (release or lines or [""])[0][:200]}


def credentials(home: str) -> list[str]:
    """Credentials in the image: paths, and names of variables."""
    secrets = [path for name in CREDENTIAL_FILES for path in glob.glob(f"{home}/{name}")]
    secrets += glob.glob("/etc/apt/auth.conf") + glob.glob("/etc/apt/auth.conf.d/*")
    secrets += [f"${name}" for name, value in os.environ.items() if SECRET_NAME.search(name) and value]
    for path in ("/etc/pip.conf", f"{home}/.config/pip/pip.conf", *glob.glob("/etc/apt/sources.list.d/*")):
        if re.search(r"://[^/\s:@]+:[^/\s@]+@", read(path) or ""):
            secrets.append(path)
    patterns = [re.compile(pattern) for pattern in SECRET_PATTERNS.values()]
    for directory, folders, names in os.walk(home):
        # the runner's own programs and Node.js, whose test data has keys
        folders[:] = [f for f in folders if f not in ("externals", "bin", "node_modules")]
        for name in names:
            path = os.path.join(directory, name)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    data = file.read(SCAN_BYTES)
                secrets += [path] * any(pattern.search(data) for pattern in patterns)
    return sorted(set(secrets))


def writable_paths() -> list[str]:
    """Files and folders that a job can change but should not: hooks, programs, the record."""
    watched = ["/etc/gpukiln", "/opt/gpukiln", "/usr/local/bin", "/usr/local/cuda/"]
    watched += [os.path.dirname(os.environ.get(name, "")) for name in HOOKS]
    paths = [path for path in {*filter(None, watched)} if os.path.exists(path) and os.access(path, os.W_OK)]
    paths += [path for folder in watched for path in glob.glob(f"{folder}/*") if os.access(path, os.W_OK)]
    cache = os.environ.get("CCACHE_DIR", "")
    if cache and os.path.isdir(cache) and os.stat(cache).st_mode & stat.S_IWOTH:
        paths.append(f"{cache} (by everybody)")
    return sorted({os.path.normpath(path) for path in paths})


def disk_use() -> dict[str, int]:
    """{bytes} of all files of the container, {unseen}: folders that its user can't read."""
    total = 0
    unseen: list[OSError] = []
    seen: set[int] = set()
    root = os.stat("/").st_dev
    for directory, folders, names in os.walk("/", onerror=unseen.append):
        # Only the image's file system: mounted volumes and /proc are not part of it.
        folders[:] = [f for f in folders if os.lstat(os.path.join(directory, f)).st_dev == root]
        for name in names:
            status = os.lstat(os.path.join(directory, name))
            if status.st_dev == root and (status.st_nlink == 1 or status.st_ino not in seen):
                seen.add(status.st_ino)
                total += status.st_blocks * 512
    return {"bytes": total, "unseen": len(unseen)}


def python_packages() -> dict[str, Any]:
    """{check: pip's report, installed: {name: version}, imports: {module: error or null}}."""
    done = run_in_image("python3", "-m", "pip", "--disable-pip-version-check", "check")
    tried = run_in_image("python3", "-c", IMPORTING, *IMPORTS)
    listed = run_in_image("python3", "-m", "pip", "--disable-pip-version-check", "list", "--format=json")
    installed = json.loads(listed["out"]) if listed["rc"] == 0 else []
    return {
        "check": {"rc": done["rc"], "out": (done["out"] + done["err"])[:1000]},
        "installed": {package["name"].lower(): package["version"] for package in installed},
        "imports": json.loads(tried["out"]) if tried["rc"] == 0 else {"python3": tried["err"]},
    }


def ccache() -> dict[str, Any]:
    """A file compiled twice: {rc: of each, hits, misses, folder}, counted by ccache itself."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "a.c")
        with open(source, "w") as file:
            # A new source for each run: the cache must miss the first time.
            file.write(f"/* {os.getpid()} */\n{PROGRAM}")
        zero = run_in_image("ccache", "--zero-stats")
        codes = [run_in_image("ccache", "gcc", "-c", source, "-o", f"{folder}/{n}.o")["rc"] for n in (1, 2)]
        stats = dict(re.findall(r"(?m)^(\w+)\t(\d+)$", run_in_image("ccache", "--print-stats")["out"]))
    hits = int(stats.get("direct_cache_hit", 0)) + int(stats.get("preprocessed_cache_hit", 0))
    return {
        "rc": [zero["rc"], *codes],
        "hits": hits,
        "misses": int(stats.get("cache_miss", 0)),
        "folder": os.environ.get("CCACHE_DIR", ""),
    }


def hooks() -> dict[str, dict[str, Any]]:
    """Each job hook, run as the actions runner runs it: {variable: {path, rc, out}}."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in HOOKS:
            path = os.environ.get(name, "")
            done = run_in_image("bash", "-e", path, RUNNER_TEMP=folder)
            result[name] = {"path": path, "rc": done["rc"], "out": tail(done["out"] + done["err"], 500)}
    return result


def actions_runner(home: str) -> dict[str, Any]:
    """{present: whether run.sh is where the ARC chart starts it, version}."""
    present = os.access(f"{home}/run.sh", os.X_OK)
    done = run_in_image(f"{home}/bin/Runner.Listener", "--version")
    return {"present": present, "rc": done["rc"], "version": done["out"].strip()}


def cuda_libraries() -> dict[str, Any]:
    """The versions of CUDA's libraries, and the results of its compilers.

    {libraries: {name: {version, error}}, nvrtc: the same, ptxas: {rc, out, cubin}, nvcc: {rc, out, program}}.
    """
    done = run_in_image("python3", "-c", LIBRARIES, KERNEL, f"--gpu-architecture=compute_{ARCHITECTURE}")
    if done["rc"] != 0:
        raise RuntimeError(f"CUDA's libraries end their process with {done['rc']}: {tail(done['err'], 500)}")
    libraries = json.loads(done["out"])
    nvrtc = libraries.pop("nvrtc")
    with tempfile.TemporaryDirectory() as folder:
        source, assembled = f"{folder}/k.ptx", f"{folder}/k.cubin"
        with open(source, "w") as file:
            file.write(nvrtc.pop("ptx"))
        ptxas = run_in_image("ptxas", f"-arch=sm_{ARCHITECTURE}", source, "-o", assembled)
        cubin = b""
        if os.path.exists(assembled):
            with open(assembled, "rb") as binary:
                cubin = binary.read()
        with open(f"{folder}/k.cu", "w") as file:
            file.write(KERNEL + "int main() { gpukiln<<<1, 1>>>(nullptr); return 0; }\n")
        nvcc = run_in_image(
            "nvcc", f"-arch=sm_{ARCHITECTURE}", f"{folder}/k.cu", "-o", f"{folder}/k", timeout=300
        )
        linked = os.path.exists(f"{folder}/k")
    return {
        "libraries": libraries,
        "nvrtc": nvrtc,
        "ptxas": {
            "rc": ptxas["rc"],
            "out": (ptxas["out"] + ptxas["err"])[:500],
            "cubin": cubin[:4] == b"\x7fELF" and b"gpukiln" in cubin,
        },
        "nvcc": {"rc": nvcc["rc"], "out": (nvcc["out"] + nvcc["err"])[:500], "program": linked},
    }
