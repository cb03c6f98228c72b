#!/usr/bin/python
"""Installs the signing key of a package repository, pinned by its fingerprint, in one round trip."""

from __future__ import annotations

DOCUMENTATION = """
module: repository_key
short_description: Installs the signing key of a package repository, pinned by its fingerprint
description:
  - Downloads a file with keys and writes a keyring that holds the one with the fingerprint and no other.
  - Where it can't be had, or has another fingerprint, nothing is written.
options:
  repository: {description: "Its name, for messages.", type: str, required: true}
  url: {description: Where the key is., type: str, required: true}
  keyring: {description: File to write., type: path, required: true}
  fingerprint: {description: "The primary key's, 40 hexadecimal digits.", type: str, required: true}
  armor: {description: "Whether the file is text, as rpm wants it.", type: bool, default: false}
author: [The authors of gpukiln (!UNKNOWN)]
"""

EXAMPLES = """
- name: Install the key of a repository
  repository_key:
    repository: cuda
    url: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/3bf863cc.pub
    keyring: /usr/share/keyrings/cuda.gpg
    fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
"""

RETURN = """
found: {description: Fingerprints of the keys in the file., returned: always, type: list}
"""

import os
import re
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import fetch_url

TRIES = 3
WAIT_S = 2


def download(module, url, path):
    """Have the file at the path.

    Returns:
        Why that was not possible; empty.
    """
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT_S)
        answer, info = fetch_url(module, url)
        if info["status"] == 200 or (answer is not None and url.startswith("file:")):
            with open(path, "wb") as file:
                file.write(answer.read())
            return ""
        said = info["msg"]
    return said


def main():
    """Ansible's entry point."""
    strings = {name: {"type": "str", "required": True} for name in ("repository", "url", "fingerprint")}
    paths = {"keyring": {"type": "path", "required": True}, "armor": {"type": "bool", "default": False}}
    module = AnsibleModule(argument_spec={**strings, **paths}, supports_check_mode=True)
    asked = module.params
    if module.check_mode:
        module.exit_json(changed=True, found=[])
    with tempfile.TemporaryDirectory(prefix="key-") as folder:
        key, ring = os.path.join(folder, "key"), os.path.join(folder, "ring")
        if said := download(module, asked["url"], key):
            module.fail_json(
                msg=f"Found no key for the repository {asked['repository']} at {asked['url']}: {said}."
                " Wanted one that this node can fetch. Check its network, name server and proxy (https_proxy"
                " in the task's environment), or name a mirror's address."
            )
        gpg = ["gpg", "--batch", "--yes", "--no-autostart", f"--homedir={folder}"]
        _, listed, _ = module.run_command([*gpg, "--show-keys", "--with-colons", key])
        fingerprints = re.findall(r"(?m)^pub:.*\nfpr:+([0-9A-F]{40}):", listed)
        if asked["fingerprint"] not in fingerprints:
            there = f"keys with the fingerprints {', '.join(fingerprints)}" if fingerprints else "no key"
            module.fail_json(
                found=fingerprints,
                msg=f"Found {there} at {asked['url']}, wanted {asked['fingerprint']}. Install nothing from"
                " this repository until its vendor has announced a new key; then write its fingerprint into"
                " components.yaml.",
            )
        # The file may hold more keys; only the one we trust gets through.
        form = ["--armor"] if asked["armor"] else []
        for command in (["--import", key], [*form, f"--output={ring}", "--export", asked["fingerprint"]]):
            status, _, said = module.run_command([*gpg, *command])
            if status != 0:
                module.fail_json(msg=f"Found that gpg fails: {said.strip()}", rc=status)
        os.chmod(ring, 0o644)
        module.atomic_move(ring, asked["keyring"])
    module.exit_json(changed=True, found=fingerprints)


if __name__ == "__main__":
    main()
