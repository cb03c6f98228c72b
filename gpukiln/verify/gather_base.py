"""Asks one thing of this machine; and gathers what a build can leave behind in an image.

Runs on the judged machine beside `gpukiln.verify.gather`, and obeys the same rules.
"""

# ruff: noqa: PTH112, PTH113, PTH114, PTH116, PTH118, PTH119, PTH123, PTH202, PTH207, S108
# See gpukiln/verify/gather.py.

from __future__ import annotations

import base64
import glob
import hashlib
import json
import os
import pwd
import re
import subprocess
from typing import Any

PCI = "/sys/bus/pci/devices"
SECRET_DIRS = ("/root", "/home", "/etc/gpukiln", "/var/log")
SECRET_PATTERNS = {
    "AWS access key id": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "private key": rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "AWS secret access key": rb"(?i)aws_secret_access_key\s*[=:]\s*[\"']?[A-Za-z0-9/+]{40}\b",
}
# What a command's output or a file may hold that is nobody else's business: kept as evidence without it.
PRIVATE = (
    (
        re.compile(r"(?s)-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|$)"),
        "(private key)",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "(access key)"),
    (re.compile(r"(://)[^/\s:@]+:[^/\s@]+@"), r"\1(user):(password)@"),
    (
        re.compile(
            r"(?i)\b(\w*(?:password|passwd|secret|token|api_?key|authorization)\w{0,40}[\"']?\s*[=:]\s*)"
            r"(?!\(left out\))(?:\"[^\"\n]*\"|'[^'\n]*'|(?:bearer |basic )?[^\s,;}]+)"
        ),
        r"\1(left out)",
    ),
)
EVIDENCE_CHARS = 4000  # of each output, from its beginning
REDACT_CHARS = 30000  # of which secrets are looked for: none is cut in two before it is recognised
SCAN_FILES, SCAN_BYTES, SCAN_FILE_BYTES = 3000, 64 << 20, 4 << 20


evidence: list[dict[str, Any]] = []  # what was asked since a section began


def redact(text: str) -> str:
    """A text without passwords, keys and tokens."""
    for pattern, instead in PRIVATE:
        text = pattern.sub(instead, text)
    return text


def _shorten(text: str) -> str:
    more = len(text) - EVIDENCE_CHARS
    return redact(text[:REDACT_CHARS])[:EVIDENCE_CHARS] + (
        f"\n... and {more} more characters" if more > 0 else ""
    )


def run(*argv: str, timeout: float = 60, data: bytes | None = None) -> dict[str, Any]:
    """Run a command and keep what it said as evidence; see `ask`."""
    said = ask(*argv, timeout=timeout, data=data)
    evidence.append(
        {
            "command": " ".join(argv),
            "rc": said["rc"],
            "out": _shorten(said["out"]),
            "err": redact(said["err"]),
        }
    )
    return said


def ask(*argv: str, timeout: float = 60, data: bytes | None = None) -> dict[str, Any]:
    """Run a command; rc 127 when it is missing, 124 when it took longer than `timeout` seconds."""
    env = dict(os.environ, LC_ALL="C", PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    try:
        done = subprocess.run(
            argv, input=data, stdin=None if data else subprocess.DEVNULL, capture_output=True,
            timeout=timeout, env=env, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return {"rc": 127, "out": "", "err": f"{argv[0]}: not found"}
    except subprocess.TimeoutExpired:
        return {"rc": 124, "out": "", "err": f"{argv[0]}: no answer in {timeout:.0f} s"}
    err = redact(_text(done.stderr).strip()[-REDACT_CHARS:])[-2000:]
    return {"rc": done.returncode, "out": _text(done.stdout), "err": err}


def need(*argv: str, timeout: float = 60) -> str:
    """Output of a command that must succeed."""
    done = run(*argv, timeout=timeout)
    if done["rc"] != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit {done['rc']}: {(done['err'] or done['out'])[-500:]}")
    return str(done["out"])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def show(path: str) -> str | None:
    """Text of a file, kept as evidence; see `read`."""
    text = read(path)
    evidence.append({"file": path, "out": "(missing)" if text is None else _shorten(text)})
    return text


def read(path: str) -> str | None:
    """Text of a file, or None where it is missing."""
    try:
        with open(path, "rb") as file:
            return _text(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None


def mtime(path: str) -> float:
    """When a file was last written, seconds since the epoch."""
    return os.stat(path).st_mtime


def init_started() -> float:
    """When this system's init started: the kernel's boot time would be the host's in a container."""
    btime = re.search(r"(?m)^btime (\d+)$", read("/proc/stat") or "")
    fields = (read("/proc/1/stat") or "").rpartition(")")[2].split()
    if not btime or len(fields) < 20:
        raise RuntimeError("/proc/stat and /proc/1/stat do not tell when init started")
    return int(btime.group(1)) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def pci_gpus() -> list[dict[str, str]]:
    """NVIDIA's GPUs on the PCI bus: [{address, device}].

    PCI class 0x0300 is a VGA controller, 0x0302 a 3D controller.
    """
    found = []
    for path in sorted(glob.glob(f"{PCI}/*")):
        kind = read(f"{path}/class") or ""
        if (read(f"{path}/vendor") or "").strip() == "0x10de" and kind.startswith(("0x0300", "0x0302")):
            device = (read(f"{path}/device") or "").strip()
            found.append({"address": os.path.basename(path), "device": device})
    return found


def identity() -> dict[str, Any]:
    """What must be this machine's own: {host_keys: {path: mtime}, machine_id, born, cloud_init}.

    born is when cloud-init first saw this instance, the oldest of its once-per-instance marks.
    """
    marks = [mtime(p) for p in glob.glob("/var/lib/cloud/instance/sem/*")]
    status = run("cloud-init", "status", "--format", "json")
    try:
        cloud = json.loads(status["out"])
    except ValueError:
        cloud = {"status": None, "errors": [status["err"] or status["out"].strip()]}
    bus = "/var/lib/dbus/machine-id"
    path = "/etc/machine-id"
    return {
        "host_keys": {p: mtime(p) for p in sorted(glob.glob("/etc/ssh/ssh_host_*_key"))},
        "machine_id": {"length": len((read(path) or "").strip()), "mtime": mtime(path) if read(path) else 0,
                       "dbus_agrees": read(bus) in (None, read(path))},
        "born": min(marks) if marks else None,
        "cloud_init": {"installed": status["rc"] != 127, "status": cloud.get("status"),
                       "detail": str(cloud.get("detail", ""))[:300], "errors": cloud.get("errors", [])},
    }  # fmt: skip


def _homes() -> dict[str, str]:
    return {u.pw_name: u.pw_dir for u in pwd.getpwall() if os.path.isdir(u.pw_dir) and u.pw_dir != "/"}


_KEY = re.compile(r"\b(?:ssh-|ecdsa-|sk-)\S+ (AAAA[0-9A-Za-z+/=]+)(?: ([^\s\"\\]+))?")


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [s for v in value.values() for s in _strings(v)]
    if isinstance(value, list):
        return [s for v in value for s in _strings(v)]
    return [value] if isinstance(value, str) else []


def _fingerprint(blob: str) -> str:
    digest = hashlib.sha256(base64.b64decode(blob + "=" * (-len(blob) % 4))).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def keys() -> dict[str, Any]:
    """{authorized: [{user, path, fingerprint, comment}], injected: [fingerprint]} from cloud-init's data."""
    injected: set[str] = set()
    for path in ("/run/cloud-init/instance-data-sensitive.json", "/run/cloud-init/instance-data.json"):
        known = json.loads(read(path) or "{}")
        # not `merged_cfg`: a key that was baked into /etc/cloud is no key of this machine's launch
        for text in _strings([known.get(name) for name in ("ds", "v1", "userdata")]):
            injected.update(_fingerprint(blob) for blob, _comment in _KEY.findall(text))
    authorized = []
    for user, home in _homes().items():
        for path in (f"{home}/.ssh/authorized_keys", f"{home}/.ssh/authorized_keys2"):
            for line in (read(path) or "").splitlines():
                found = None if line.lstrip().startswith("#") else _KEY.search(line)
                if found:
                    authorized.append({"user": user, "path": path,
                                       "fingerprint": _fingerprint(found.group(1)),
                                       "comment": found.group(2) or ""})  # fmt: skip
    return {"authorized": authorized, "injected": sorted(injected)}


def leftovers() -> dict[str, list[str]]:
    """Paths that a build leaves behind: {package_cache, history, build_tools}.

    Temporary files are the build's when they are older than this boot: Ansible may be what asks now.
    """
    homes = sorted(set(_homes().values()))
    history = [
        f"{h}/{n}" for h in homes for n in (".bash_history", ".zsh_history", ".python_history", ".lesshst")
    ]
    tools = [p for h in homes for p in glob.glob(f"{h}/.ansible") + glob.glob(f"{h}/.ansible_async")]
    for pattern in ("packer*", "ansible*", ".ansible*", "script_*.sh"):
        found = glob.glob(f"/tmp/{pattern}") + glob.glob(f"/var/tmp/{pattern}")
        tools += [path for path in found if os.lstat(path).st_mtime < init_started()]
    tools += [p for p in ("/usr/sbin/policy-rc.d", "/usr/local/sbin/policy-rc.d") if os.path.lexists(p)]
    caches = ("/var/cache/apt/archives/*.deb", "/var/cache/apt/archives/partial/*", "/var/cache/dnf/**/*.rpm")
    return {
        "package_cache": sorted(p for c in caches for p in glob.glob(c, recursive=True)),
        "history": sorted(p for p in set(history) if os.path.isfile(p) and os.path.getsize(p)),
        "build_tools": sorted(set(tools)),
    }


def secrets() -> dict[str, Any]:
    """{found: [{path, line, kind}], files: scanned, complete: false when a limit ended the scan}."""
    compiled = {kind: re.compile(pattern) for kind, pattern in SECRET_PATTERNS.items()}
    found: list[dict[str, Any]] = []
    files = total = 0
    complete = True
    for top in SECRET_DIRS:
        for directory, folders, names in os.walk(top):
            folders[:] = [f for f in folders if os.path.join(directory, f) != "/var/log/journal"]
            for name in names:
                path = os.path.join(directory, name)
                if not os.path.isfile(path) or os.path.islink(path):
                    continue
                if files >= SCAN_FILES or total >= SCAN_BYTES:
                    return {"found": found, "files": files, "complete": False}
                try:
                    with open(path, "rb") as file:
                        data = file.read(SCAN_FILE_BYTES)
                except FileNotFoundError:  # a log that was rotated away meanwhile
                    continue
                files, total = files + 1, total + len(data)
                complete = complete and len(data) < SCAN_FILE_BYTES
                for kind, pattern in compiled.items():
                    hit = pattern.search(data)
                    if hit:
                        found.append(
                            {"path": path, "line": data[: hit.start()].count(b"\n") + 1, "kind": kind}
                        )
    return {"found": found, "files": files, "complete": complete}
