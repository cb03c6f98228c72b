"""Gathers files that a build can leave in an image, and identities that a machine must generate itself.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`.
"""

# ruff: noqa: PTH112, PTH113, PTH114, PTH118, PTH123, PTH202, PTH207, S108
# See gpukiln/probe/gather.py.

from __future__ import annotations

import base64
import glob
import hashlib
import json
import os
import pwd
import re
from collections.abc import Iterator
from typing import Any

from gpukiln.probe.base import init_started, mtime, read, run
from gpukiln.probe.scripts import CREDENTIALS, IDENTITIES, SETTINGS
from gpukiln.redact import FORMS, holds_secret

SECRET_DIRS = ("/root", "/home", "/etc/gpukiln", "/var/log")
SECRET_PATTERNS = {
    "AWS access key id": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "private key": rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "AWS secret access key": rb"(?i)aws_secret_access_key\s*[=:]\s*[\"']?[A-Za-z0-9/+]{40}\b",
    "token": FORMS.pattern.encode(),
}
# Lower-case text without which a file has none of a kind: found a hundred times as fast as the pattern.
SECRET_TEXTS = {
    "AWS access key id": (b"akia", b"asia"),
    "AWS secret access key": (b"aws_secret_access_key",),
}
# The search must end in seconds on a machine with large logs; `complete` says where it did not.
SCAN_FILES, SCAN_BYTES, SCAN_FILE_BYTES = 3000, 64 << 20, 4 << 20


def identity() -> dict[str, Any]:
    """This machine's own identities: {host_keys: {path: mtime}, owned, machine_id, born, cloud_init}.

    owned: as host_keys, of the files that `IDENTITIES` lists. born is when cloud-init first ran on this
    instance, by the oldest of its once-per-instance marks.
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
        "owned": {p: mtime(p) for p in _identity_files()},
        "machine_id": {
            "length": len((read(path) or "").strip()),
            "mtime": mtime(path) if read(path) else 0,
            "dbus_agrees": read(bus) in (None, read(path)),
        },
        "born": min(marks) if marks else None,
        "cloud_init": {
            "installed": status["rc"] != 127,
            "status": cloud.get("status"),
            "detail": str(cloud.get("detail", ""))[:300],
            "errors": cloud.get("errors", []),
        },
    }


def _identity_files() -> list[str]:
    """Existing files of `IDENTITIES`, without an iSCSI name that will be generated at the next start."""
    paths = (path for pattern in IDENTITIES for path in glob.glob(pattern))
    return sorted(p for p in paths if not re.search(r"(?m)^GenerateName=yes", _head(p)))


def _head(path: str) -> str:
    """The beginning of a file, in Latin-1; empty for a folder."""
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="latin-1") as file:
        return file.read(4096)


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
    # The form of ssh-keygen -l: padding is left out there.
    digest = hashlib.sha256(base64.b64decode(blob + "=" * (-len(blob) % 4))).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def keys() -> dict[str, Any]:
    """{authorized: [{user, path, fingerprint, comment}], injected: [fingerprint]} from cloud-init's data."""
    injected: set[str] = set()
    for path in ("/run/cloud-init/instance-data-sensitive.json", "/run/cloud-init/instance-data.json"):
        known = json.loads(read(path) or "{}")
        # without `merged_cfg`: it has keys that were baked into /etc/cloud, which this launch did not inject
        for text in _strings([known.get(name) for name in ("ds", "v1", "userdata")]):
            injected.update(_fingerprint(blob) for blob, _comment in _KEY.findall(text))
    authorized = []
    for user, home in _homes().items():
        for path in (f"{home}/.ssh/authorized_keys", f"{home}/.ssh/authorized_keys2"):
            for line in (read(path) or "").splitlines():
                key = None if line.lstrip().startswith("#") else _KEY.search(line)
                if key:
                    authorized.append(
                        {
                            "user": user,
                            "path": path,
                            "fingerprint": _fingerprint(key.group(1)),
                            "comment": key.group(2) or "",
                        }
                    )
    return {"authorized": authorized, "injected": sorted(injected)}


def build_files() -> dict[str, list[str]]:
    """Paths of files of the build: {package_cache, history, build_tools}.

    Temporary files count only where they are older than this boot: the current ones may be Ansible's own.
    """
    homes = sorted(set(_homes().values()))
    history = [
        f"{h}/{n}" for h in homes for n in (".bash_history", ".zsh_history", ".python_history", ".lesshst")
    ]
    tools = [p for h in homes for p in glob.glob(f"{h}/.ansible") + glob.glob(f"{h}/.ansible_async")]
    for pattern in ("packer*", "ansible*", ".ansible*", "script_*.sh"):
        paths = glob.glob(f"/tmp/{pattern}") + glob.glob(f"/var/tmp/{pattern}")
        tools += [path for path in paths if os.lstat(path).st_mtime < init_started()]
    tools += [p for p in ("/usr/sbin/policy-rc.d", "/usr/local/sbin/policy-rc.d") if os.path.lexists(p)]
    caches = ("/var/cache/apt/archives/*.deb", "/var/cache/apt/archives/partial/*", "/var/cache/dnf/**/*.rpm")
    return {
        "package_cache": sorted(p for c in caches for p in glob.glob(c, recursive=True)),
        "history": sorted(p for p in set(history) if os.path.isfile(p) and os.path.getsize(p)),
        "build_tools": sorted(set(tools)),
    }


def secrets() -> dict[str, Any]:
    """{found: [{path, line, kind}], files: read, complete: false where a limit ended the search}.

    It has no text of a file. Files of `CREDENTIALS` are found by name, unless they are empty; in files of
    `SETTINGS` each line is examined; in `SECRET_DIRS` every text with the form of a secret.
    """
    compiled = {kind: re.compile(pattern) for kind, pattern in SECRET_PATTERNS.items()}
    matches: list[dict[str, Any]] = []
    seen: set[str] = set()
    total = 0
    complete = True
    for path, kind in _candidates():
        # A link may lead out of the searched folders, or to a device.
        if path in seen or not os.path.isfile(path) or os.path.islink(path):
            continue
        if len(seen) >= SCAN_FILES or total >= SCAN_BYTES:
            return {"found": matches, "files": len(seen), "complete": False}
        try:
            with open(path, "rb") as file:
                data = file.read(SCAN_FILE_BYTES)
        except FileNotFoundError:  # a log that was rotated meanwhile
            continue
        seen.add(path)
        total += len(data)
        complete = complete and len(data) < SCAN_FILE_BYTES
        if kind == "credentials":
            matches += [{"path": path, "line": 1, "kind": "file of credentials"}] if data.strip() else []
            continue
        hits: dict[int, str] = {}  # by line, one for each
        lower = data.lower()
        for name, pattern in compiled.items():
            texts = SECRET_TEXTS.get(name)
            hit = pattern.search(data) if texts is None or any(text in lower for text in texts) else None
            if hit:
                hits.setdefault(data[: hit.start()].count(b"\n") + 1, name)
        if kind == "settings":
            lines = data.decode("utf-8", "replace").splitlines()
            for number, line in enumerate(lines, 1):
                if holds_secret(line):
                    hits.setdefault(number, "password or token")
        matches += [{"path": path, "line": line, "kind": hits[line]} for line in sorted(hits)]
    return {"found": matches, "files": len(seen), "complete": complete}


def _candidates() -> Iterator[tuple[str, str]]:
    """Paths to read, with the kind: credentials, settings, or any. A path may occur several times."""
    homes = sorted(set(_homes().values()))
    for kind, patterns in (("credentials", CREDENTIALS), ("settings", SETTINGS)):
        for pattern in patterns:
            places = [home + pattern[1:] for home in homes] if pattern.startswith("~/") else [pattern]
            for path in sorted(path for place in places for path in glob.glob(place)):
                yield from ((file, kind) for file in _files_in(path))
    for top in SECRET_DIRS:
        yield from ((file, "any") for file in _files_in(top))


def _files_in(path: str) -> Iterator[str]:
    """A file itself, and all files below a folder; without the journal, which is binary."""
    if not os.path.isdir(path):
        yield path
    for directory, folders, names in os.walk(path):
        folders[:] = [f for f in folders if os.path.join(directory, f) != "/var/log/journal"]
        yield from (os.path.join(directory, name) for name in names)
