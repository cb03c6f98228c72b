"""What the look modules read of a machine. Python 3.9, the standard library, and nothing is changed."""

from __future__ import annotations

import glob
import hashlib
import os
import pwd
import re
import stat
import subprocess

PCI = "/sys/bus/pci/devices"
LOCKS = "/etc/dnf/plugins/versionlock.list"
UNIT_PROPERTIES = "Id,LoadState,UnitFileState,ActiveState,NeedDaemonReload"
GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller; audio and USB have others
SWITCH_CLASS = "0x0680"
# modinfo and rpm take seconds on a busy node; a hung NFS mount would take forever
COMMAND_SECONDS = 120


def run(argv, seconds=COMMAND_SECONDS):
    """Run a program that changes nothing.

    Returns:
        {rc, stdout, stderr}; rc 127 where it is not there, 124 where it did not end in time.
    """
    # Output is parsed, so no translation of it; sudo's PATH often lacks sbin.
    env = {**os.environ, "LC_ALL": "C"}
    env["PATH"] = env.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    try:
        done = subprocess.run(
            argv,
            # a program that asks must fail, not wait
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env=env,
            check=False,
        )
    # The codes of a shell and of timeout(1), so that callers check rc alone.
    except FileNotFoundError:
        return {"rc": 127, "stdout": "", "stderr": f"found no program {argv[0]}"}
    except subprocess.TimeoutExpired:
        return {"rc": 124, "stdout": "", "stderr": f"no answer in {seconds} s"}
    out, err = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    return {"rc": done.returncode, "stdout": out, "stderr": err}


def uses_dpkg():
    """Whether the packages of this machine are Debian's."""
    text = read("/etc/os-release") or ""
    # os-release(5): derivatives of Debian name it in ID_LIKE.
    return bool(re.search(r"(?m)^ID(_LIKE)?=.*debian", text))


def packages(patterns):
    """Read what is installed.

    Args:
        patterns: Names, with `*` for anything.

    Returns:
        Name to its installed versions: [{version: with epoch and release, arch, held}], sorted by name.
    """
    if not patterns:
        return {}
    installed = _dpkg(patterns) if uses_dpkg() else _rpm(patterns)
    return {name: installed[name] for name in sorted(installed)}


def _dpkg(patterns):
    # dpkg-query(1): want, status and error, for example `ii` or `hi` (held).
    form = "${db:Status-Abbrev}|${Package}|${Version}|${Architecture}\n"
    installed = {}
    for line in run(["dpkg-query", "--show", "--showformat", form, *patterns])["stdout"].splitlines():
        state, name, version, arch = line.split("|")
        # Removed packages with configuration files left are `rc`.
        if state[1:2] == "i":
            installed.setdefault(name, []).append({"version": version, "arch": arch, "held": state[0] == "h"})
    return installed


def _rpm(patterns):
    # EPOCHNUM is 0 where there is no epoch, and is cut again below.
    form = "%{NAME}|%{EPOCHNUM}:%{VERSION}-%{RELEASE}|%{ARCH}\n"
    # `!` excludes a version, which is no lock (dnf-versionlock).
    locked = {lock_name(line) for line in (read(LOCKS) or "").splitlines() if line[:1] not in ("", "#", "!")}
    installed = {}
    for line in run(["rpm", "-qa", "--queryformat", form, *patterns])["stdout"].splitlines():
        name, version, arch = line.split("|")
        version = version[2:] if version.startswith("0:") else version
        installed.setdefault(name, []).append({"version": version, "arch": arch, "held": name in locked})
    return installed


def lock_name(line):
    """The package of a line of versionlock.list, for example `dkms-0:3.2.1-1.el9.*`."""
    # Version and release have no dash, names may have.
    return re.sub(r"-[^-]+-[^-]+$", "", line.strip())


def read(path):
    """A file's text; None where there is none, or where it is no file."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def file_facts(path, text=True):
    """Look at a file.

    Args:
        text: Whether its text is returned; a secret's is not.

    Returns:
        {mode: 0644, uid, gid, mtime, sha256, text}, or None where there is none.
    """
    try:
        with open(path, "rb") as file:
            # One open file for text and facts: it may be replaced meanwhile.
            content = file.read()
            state = os.fstat(file.fileno())
    except OSError:
        return None
    facts = {
        "mode": f"{stat.S_IMODE(state.st_mode):04o}",
        "uid": state.st_uid,
        "gid": state.st_gid,
        "mtime": state.st_mtime,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    if text:
        facts["text"] = content.decode("utf-8", "replace")
    return facts


def folder_facts(path):
    """{mode, uid, gid} of a folder, or None where there is none."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISDIR(state.st_mode):
        return None
    return {"mode": f"{stat.S_IMODE(state.st_mode):04o}", "uid": state.st_uid, "gid": state.st_gid}


def matches(pattern):
    """The paths that a pattern names, those of dangling links too."""
    # glob finds dangling links, os.path.exists would not.
    return sorted(glob.glob(pattern, recursive=True))


def named(path):
    """The files that a pattern names, or the path itself where it is none."""
    return [match for match in matches(path) if os.path.isfile(match)] if "*" in path else [path]


def units(names):
    """Read the state of systemd's units.

    Returns:
        Name to {there, enabled: systemd's word or empty, active: systemd's word, reload: whether the unit on
        the disk is newer than the one that systemd knows}.
    """
    if not names:
        return {}
    answer = run(["systemctl", "show", "--property=" + UNIT_PROPERTIES, "--", *names])
    # systemctl prints the units in the order of its arguments, an empty line between them.
    blocks = [block for block in answer["stdout"].split("\n\n") if block.strip()]
    states = {}
    for name, block in zip(names, blocks):
        fields = dict(line.split("=", 1) for line in block.strip().splitlines() if "=" in line)
        states[name] = {
            "there": fields.get("LoadState") not in ("not-found", None),
            "enabled": fields.get("UnitFileState", ""),
            "active": fields.get("ActiveState", ""),
            "reload": fields.get("NeedDaemonReload") == "yes",
        }
    return states


def keyring(path):
    """Fingerprints of the primary keys in a keyring; empty where there is none, or nothing that reads it."""
    # --no-autostart: no agent is left running on the node
    answer = run(["gpg", "--batch", "--no-autostart", "--show-keys", "--with-colons", path])
    return re.findall(r"(?m)^pub:.*\nfpr:+([0-9A-F]{40}):", answer["stdout"])


def account(name):
    """{uid, gid, home, shell, groups} of a user, or None where there is none."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    # id asks the name service too (LDAP, SSSD), /etc/group would not be enough.
    groups = run(["id", "--groups", "--name", name])["stdout"].split()
    return {
        "uid": entry.pw_uid,
        "gid": entry.pw_gid,
        "home": entry.pw_dir,
        "shell": entry.pw_shell,
        "groups": groups,
    }


def pci_devices():
    """NVIDIA's devices on the PCI bus, as scripts/bootstrap/nvidia-gpu-present.sh finds them.

    Returns:
        {gpus: [{address, id: 0x1eb8}], switches: the same of NVSwitches}.
    """
    devices = {"gpus": [], "switches": []}
    for folder in matches(PCI + "/*"):
        vendor, kind, number = (
            (read(f"{folder}/{name}") or "").strip() for name in ("vendor", "class", "device")
        )
        device = {"address": os.path.basename(folder), "id": number}
        if vendor == "0x10de" and kind.startswith(GPU_CLASSES):
            devices["gpus"].append(device)
        # Bridges of class 0680 are NVSwitches up to Hopper; later ones are no PCI devices.
        if vendor == "0x10de" and kind.startswith(SWITCH_CLASS):
            devices["switches"].append(device)
    return devices
