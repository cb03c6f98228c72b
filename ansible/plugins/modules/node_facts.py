#!/usr/bin/python
"""Reads what roles have to know of a node: Python 3.9, the standard library, and nothing is changed.

Ansible writes the arguments into the text of this module (docs.ansible.com, "Ansible module architecture":
JSONARGS modules). A module that imports from module_utils comes with Ansible's library, whose sources a node
compiles at each call: 0.13 s of its processor.
"""

from __future__ import annotations

DOCUMENTATION = """
module: node_facts
short_description: Reads what roles have to know of a node
description:
  - Reads packages, files, units, keyrings, accounts, GPUs and the driver's state in one round trip, and
    changes nothing.
  - Never asks C(uname -r), since an image is made on a machine that runs another kernel than the image will.
  - The action C(decide) calls it with what the role's C(look) function asks for.
options:
  packages: {description: "Names, with * for anything.", type: list, elements: str, default: []}
  files: {description: "Files whose text is wanted; a pattern with * or ** stands for those that are
          there.", type: list, elements: str, default: []}
  secrets: {description: "Files of which the checksum is wanted and never the text.",
            type: list, elements: str, default: []}
  folders: {description: Folders., type: list, elements: str, default: []}
  ages: {description: Files and folders of which the age is wanted., type: list, elements: str, default: []}
  globs: {description: "Patterns of paths.", type: list, elements: str, default: []}
  units: {description: Units of systemd., type: list, elements: str, default: []}
  keyrings: {description: Keyrings whose fingerprints are wanted., type: list, elements: str, default: []}
  accounts: {description: Users., type: list, elements: str, default: []}
  gpus: {description: "Whether to look for GPUs and NVSwitches on PCI.", type: bool, default: false}
  commands: {description: "Commands that change nothing, by a name of the caller's: lists of arguments.",
             type: dict, default: {}}
  driver: {description: "{version: of the driver's source, modules: names of kernel modules}. With it
           kernels, their modules and what DKMS built are read.", type: dict}
author: [The authors of gpukiln (!UNKNOWN)]
"""

EXAMPLES = """
- name: Look at Docker and its settings
  node_facts:
    packages: [docker.io, docker-ce]
    files: [/etc/docker/daemon.json]
    units: [docker.service]
"""

RETURN = """
packages:
  description: "Per installed package its versions: [{version: epoch:version-release, arch, held}]."
  returned: always
  type: dict
files:
  description: "Per path {mode: 0644, uid, gid, mtime, sha256, text}, null where there is no such file.
    Secrets are among them, without a text."
  returned: always
  type: dict
folders: {description: "Per path {mode, uid, gid}, or null.", returned: always, type: dict}
ages: {description: "Per path the seconds since it was changed, or null.", returned: always, type: dict}
globs: {description: "Per pattern the paths that are there.", returned: always, type: dict}
units:
  description: "Per unit {there, enabled: systemd's word, active: systemd's word, reload: whether the file is
    newer than what systemd knows}."
  returned: always
  type: dict
keyrings: {description: "Per path the fingerprints of its primary keys.", returned: always, type: dict}
accounts: {description: "Per user {uid, gid, home, shell, groups}, or null.", returned: always, type: dict}
answers: {description: "Per command {rc, stdout, stderr}; rc 127: not there.", returned: always, type: dict}
pci: {description: "{gpus: [{address, id}], switches: [{address, id}]}.", returned: with gpus, type: dict}
kernels:
  description: "Per kernel in /boot {initramfs: when it was written, or null; headers: whether something
    can be built for it; modules: per module {filename, version, sig_key}, without those it lacks}."
  returned: with driver
  type: dict
dkms: {description: "Rows of DKMS: [{module, version, kernel, state}].", returned: with driver, type: list}
sources:
  description: "The driver's sources in /usr/src, by their module's name: whether DKMS knows them."
  returned: with driver
  type: dict
loaded:
  description: "Loaded modules of nvidia and nouveau: name to version, which nouveau has none of."
  returned: with driver
  type: dict
compilers:
  description: Installed packages that compile, where the packages are Debian's.
  returned: with driver
  type: list
"""

import glob
import hashlib
import json
import os
import pwd
import re
import stat
import subprocess
import sys
import time

# JSON in a raw string, as it has backslashes; it never has three quotes in a row.
ARGUMENTS = r"""<<INCLUDE_ANSIBLE_MODULE_JSON_ARGS>>"""
PCI = "/sys/bus/pci/devices"
LOCKS = "/etc/dnf/plugins/versionlock.list"
UNIT_PROPERTIES = "Id,LoadState,UnitFileState,ActiveState,NeedDaemonReload"
GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller; audio and USB have others
SWITCH_CLASS = "0x0680"
# modinfo and rpm take seconds on a busy node; a hung NFS mount would take forever
COMMAND_SECONDS = 120
KERNEL = re.compile(r"/boot/vmlinuz-(\d+\.\d.*)")  # a rescue kernel, vmlinuz-0-rescue-..., is none
# names of Debian and of dracut's distributions
INITRAMFS = ("/boot/initrd.img-{}", "/boot/initramfs-{}.img")
FIELD = re.compile(r"(?m)^(filename|version|sig_key):\s+(.*)$")
# `nvidia/535.309.01, 6.1.0-18-amd64, x86_64: installed` (dkms(8), status)
DKMS_ROW = re.compile(r"(?m)^([^/,\s]+)/([^,\s]+), ([^,]+), [^:]*: (\w+)")
COMPILES = re.compile(r"(binutils|build-essential|dpkg-dev)$")
STAND_IN = "gpukiln-no-compiler"


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


def installed_packages(patterns):
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


def age_s(path):
    """Seconds since a file or a folder was changed, by the node's clock; None where it is not there."""
    try:
        return time.time() - os.stat(path).st_mtime
    except OSError:
        return None


def matches(pattern):
    """The paths that a pattern names, those of dangling links too."""
    # glob finds dangling links, os.path.exists would not.
    return sorted(glob.glob(pattern, recursive=True))


def named(path):
    """The files that a pattern names, or the path itself where it is none."""
    return [match for match in matches(path) if os.path.isfile(match)] if "*" in path else [path]


def unit_states(names):
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


def kernel_facts(release, modules):
    return {
        "initramfs": initramfs_written(release),
        # DKMS needs the Makefile; the link alone may point to removed headers.
        "headers": os.path.exists("/lib/modules/" + release + "/build/Makefile"),
        "modules": {name: facts for name in modules for facts in [module_facts(release, name)] if facts},
    }


def initramfs_written(release):
    for pattern in INITRAMFS:
        try:
            return os.stat(pattern.format(release)).st_mtime
        except OSError:
            continue
    return None


def module_facts(release, name):
    """What a kernel would load; None where it has no such module."""
    answer = run(["modinfo", "--set-version", release, name])
    if answer["rc"] != 0:
        return None
    facts = {"filename": "", "version": "", "sig_key": ""}
    # Debian's alternatives answer with more than one module for one name.
    for field, value in reversed(FIELD.findall(answer["stdout"])):
        facts[field] = value.strip()
    return facts


def dkms_rows():
    names = ("module", "version", "kernel", "state")
    return [dict(zip(names, row)) for row in DKMS_ROW.findall(run(["dkms", "status"])["stdout"])]


def source_facts(version):
    sources = {}
    for folder in matches("/usr/src/nvidia*-" + version):
        name = os.path.basename(folder)[: -len(version) - 1]
        sources[name] = os.path.exists(f"/var/lib/dkms/{name}/{version}/source")
    return sources


def loaded_modules():
    names = [name for name in ("nvidia", "nouveau") if os.path.isdir("/sys/module/" + name)]
    return {name: (read("/sys/module/" + name + "/version") or "").strip() for name in names}


def compilers():
    if not uses_dpkg():
        return []
    form = "${db:Status-Abbrev}|${Package}|${Provides}\n"
    rows = [line.split("|") for line in run(["dpkg-query", "-W", "-f", form])["stdout"].splitlines()]
    return [
        name
        for state, name, provides in rows
        if state[1:2] == "i"
        and name != STAND_IN
        and (COMPILES.match(name) or re.search(r"(^|[ ,])c(\+\+)?-compiler", provides))
    ]


def driver_facts(version, modules):
    """Read what a node has of a driver: kernels, dkms, sources, loaded, compilers."""
    files = [path for path in matches("/boot/vmlinuz-*") if not os.path.islink(path)]
    releases = [match.group(1) for match in map(KERNEL.match, files) if match]
    return {
        "kernels": {release: kernel_facts(release, modules) for release in releases},
        "dkms": dkms_rows(),
        "sources": source_facts(version),
        "loaded": loaded_modules(),
        "compilers": compilers(),
    }


def node_facts(
    packages=(),
    files=(),
    secrets=(),
    folders=(),
    ages=(),
    globs=(),
    units=(),
    keyrings=(),
    accounts=(),
    gpus=False,
    commands=None,
    driver=None,
):
    """What RETURN says, of what DOCUMENTATION calls the options."""
    texts = {path: file_facts(path) for pattern in files for path in named(pattern)}
    return {
        "packages": installed_packages(packages),
        "files": {**texts, **{path: file_facts(path, text=False) for path in secrets}},
        "folders": {path: folder_facts(path) for path in folders},
        "ages": {path: age_s(path) for path in ages},
        "globs": {pattern: matches(pattern) for pattern in globs},
        "units": unit_states(units),
        "keyrings": {path: keyring(path) for path in keyrings},
        "accounts": {name: account(name) for name in accounts},
        "answers": {name: run(argv) for name, argv in (commands or {}).items()},
        **({"pci": pci_devices()} if gpus else {}),
        **(driver_facts(**driver) if driver else {}),
    }


def unknown_arguments(given, function):
    """Names among those given that a function does not take."""
    code = function.__code__
    return sorted(set(given) - set(code.co_varnames[: code.co_argcount]))


def main():
    """Ansible's entry point."""
    # Its own arguments begin with _; nothing is changed, in check mode or not.
    asked = {name: value for name, value in json.loads(ARGUMENTS).items() if name[0] != "_"}
    unknown = unknown_arguments(asked, node_facts)
    if unknown:
        msg = f"Found the arguments {', '.join(unknown)}, wanted those that `ansible-doc node_facts` shows."
        print(json.dumps({"failed": True, "msg": msg}))
        sys.exit(1)
    print(json.dumps({"changed": False, **node_facts(**asked)}))


if __name__ == "__main__":
    main()
