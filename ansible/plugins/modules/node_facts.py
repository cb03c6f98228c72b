#!/usr/bin/python
"""Reads what roles have to know of a node, in one round trip."""

from __future__ import annotations

DOCUMENTATION = """
module: node_facts
short_description: Reads what roles have to know of a node
description:
  - Reads packages, files, units, keyrings, accounts and GPUs in one round trip, and changes nothing.
  - The action C(decide) calls it with what the role's C(look) function asks for.
options:
  packages: {description: "Names, with * for anything.", type: list, elements: str, default: []}
  files: {description: "Files whose text is wanted; a pattern with * or ** stands for those that are there.",
          type: list, elements: str, default: []}
  secrets: {description: "Files of which the checksum is wanted and never the text.",
            type: list, elements: str, default: []}
  folders: {description: Folders., type: list, elements: str, default: []}
  globs: {description: "Patterns of paths.", type: list, elements: str, default: []}
  units: {description: Units of systemd., type: list, elements: str, default: []}
  keyrings: {description: "Keyrings whose fingerprints are wanted.", type: list, elements: str, default: []}
  accounts: {description: Users., type: list, elements: str, default: []}
  gpus: {description: "Whether to look for GPUs and NVSwitches on the PCI bus.", type: bool, default: false}
  commands: {description: "Commands that change nothing, by a name of the caller's: lists of arguments.",
             type: dict, default: {}}
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
globs: {description: "Per pattern the paths that are there.", returned: always, type: dict}
units:
  description: "Per unit {there, enabled: systemd's word, active: systemd's word, reload: whether the file is
    newer than what systemd knows}."
  returned: always
  type: dict
keyrings: {description: "Per path the fingerprints of its primary keys.", returned: always, type: dict}
accounts: {description: "Per user {uid, gid, home, shell, groups}, or null.", returned: always, type: dict}
pci: {description: "{gpus: [{address, id}], switches: [{address, id}]}.", returned: when asked, type: dict}
answers: {description: "Per command {rc, stdout, stderr}; rc 127: not there.", returned: always, type: dict}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.look import (
    account,
    file_facts,
    folder_facts,
    keyring,
    matches,
    named,
    packages,
    pci_devices,
    run,
    units,
)

LISTS = ("packages", "files", "secrets", "folders", "globs", "units", "keyrings", "accounts")


def main():
    """Ansible's entry point."""
    spec = {name: {"type": "list", "elements": "str", "default": []} for name in LISTS}
    spec["secrets"]["no_log"] = spec["keyrings"]["no_log"] = False  # paths
    spec["gpus"] = {"type": "bool", "default": False}
    spec["commands"] = {"type": "dict", "default": {}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    asked = module.params
    files = {path: file_facts(path) for pattern in asked["files"] for path in named(pattern)}
    files.update((path, file_facts(path, text=False)) for path in asked["secrets"])
    facts = {
        "packages": packages(asked["packages"]),
        "files": files,
        "folders": {path: folder_facts(path) for path in asked["folders"]},
        "globs": {pattern: matches(pattern) for pattern in asked["globs"]},
        "units": units(asked["units"]),
        "keyrings": {path: keyring(path) for path in asked["keyrings"]},
        "accounts": {name: account(name) for name in asked["accounts"]},
        "answers": {name: run(argv) for name, argv in asked["commands"].items()},
    }
    if asked["gpus"]:
        facts["pci"] = pci_devices()
    module.exit_json(changed=False, **facts)


if __name__ == "__main__":
    main()
