#!/usr/bin/python
"""Reads a node's kernels and what of a driver they have, in one round trip."""

from __future__ import annotations

DOCUMENTATION = """
module: driver_facts
short_description: Reads a node's kernels and what of a driver they have
description:
  - Reads the kernels that can boot, their modules, what DKMS built, and what is loaded. Changes nothing.
  - Never asks C(uname -r), since an image is made on a machine that runs another kernel than the image will.
options:
  version: {description: "The driver's version, for its source.", type: str, required: true}
  modules: {description: Kernel modules to ask for., type: list, elements: str, default: [nvidia]}
author: [The authors of gpukiln (!UNKNOWN)]
"""

EXAMPLES = """
- name: Look at the kernels and their modules
  driver_facts:
    version: "535.309.01"
    modules: [nvidia, nvidia-current]
"""

RETURN = """
kernels:
  description: "Per kernel in /boot {initramfs: when it was written, or null; headers: whether something
    can be built for it; modules: per module {filename, version, sig_key}, without those it lacks}."
  returned: always
  type: dict
dkms: {description: "Rows of DKMS: [{module, version, kernel, state}].", returned: always, type: list}
sources:
  description: "The driver's sources in /usr/src, by their module's name: whether DKMS knows them."
  returned: always
  type: dict
loaded:
  description: "Loaded modules of nvidia and nouveau: name to version, which nouveau has none of."
  returned: always
  type: dict
compilers:
  description: Installed packages that compile, where the packages are Debian's.
  returned: always
  type: list
"""

import os
import re

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.look import matches, read, run, uses_dpkg

KERNEL = re.compile(r"/boot/vmlinuz-(\d+\.\d.*)")  # a rescue kernel, vmlinuz-0-rescue-..., is none
# names of Debian and of dracut's distributions
INITRAMFS = ("/boot/initrd.img-{}", "/boot/initramfs-{}.img")
FIELD = re.compile(r"(?m)^(filename|version|sig_key):\s+(.*)$")
# `nvidia/535.309.01, 6.1.0-18-amd64, x86_64: installed` (dkms(8), status)
DKMS_ROW = re.compile(r"(?m)^([^/,\s]+)/([^,\s]+), ([^,]+), [^:]*: (\w+)")
COMPILES = re.compile(r"(binutils|build-essential|dpkg-dev)$")
STAND_IN = "gpukiln-no-compiler"


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


def main():
    """Ansible's entry point."""
    spec = {
        "version": {"type": "str", "required": True},
        "modules": {"type": "list", "elements": "str", "default": ["nvidia"]},
    }
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    asked = module.params
    files = [path for path in matches("/boot/vmlinuz-*") if not os.path.islink(path)]
    releases = [match.group(1) for match in map(KERNEL.match, files) if match]
    module.exit_json(
        changed=False,
        kernels={release: kernel_facts(release, asked["modules"]) for release in releases},
        dkms=dkms_rows(),
        sources=source_facts(asked["version"]),
        loaded=loaded_modules(),
        compilers=compilers(),
    )


if __name__ == "__main__":
    main()
