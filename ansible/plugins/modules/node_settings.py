#!/usr/bin/python
"""Writes a plan's files and has systemd follow, in one round trip."""

from __future__ import annotations

DOCUMENTATION = """
module: node_settings
short_description: Writes a plan's files and has systemd follow
description:
  - Makes folders, writes files whole or not at all, removes what must not be there, and then has systemd
    read, enable and start units. In one round trip; M(ansible.builtin.copy) needs two or three a file.
  - What is as it should be already is left alone.
options:
  folders: {description: "Folders to have, before the files: path to mode; root's.", type: dict, default: {}}
  files:
    description: "Files to have, of a plan: [{path, text, mode, secret: whether no difference may be shown,
      validate: a command that must accept the file, with %s for its path}]; root's. Folders above them are
      made with mode 0755."
    type: list
    elements: dict
    default: []
  absent: {description: "Files, links and folders to remove.", type: list, elements: str, default: []}
  enable: {description: Units to start at boot., type: list, elements: str, default: []}
  start: {description: Units to start now., type: list, elements: str, default: []}
author: [The authors of gpukiln (!UNKNOWN)]
"""

EXAMPLES = """
- name: Have a setting, and its unit start at boot
  node_settings:
    files:
      - path: /etc/systemd/system/example.service
        text: "{{ unit }}"
    enable: [example.service]
"""

RETURN = """
written: {description: Paths that were written or removed., returned: always, type: list}
"""

import contextlib
import os
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.look import file_facts, folder_facts, run

# systemd has to reread its units after a change below these
UNIT_FOLDERS = ("/etc/systemd/", "/usr/lib/systemd/", "/lib/systemd/")
LISTS = {"files": "dict", "absent": "str"}
VERBS = ("enable", "start")


class Settings:
    """The work, and what came of it.

    Args:
        module: Ansible's.
    """

    def __init__(self, module):
        self.module, self.check = module, module.check_mode
        self.written, self.diffs, self.changed = [], [], False

    def folder(self, path, mode):
        there = folder_facts(path)
        if there and (there["mode"], there["uid"], there["gid"]) == (mode, 0, 0):
            return
        self.changed = True
        self.diffs.append({"prepared": f"+{path}/\n"})
        if not self.check:
            os.makedirs(path, exist_ok=True)
            os.chown(path, 0, 0)
            os.chmod(path, int(mode, 8))

    def file(self, path, text, mode, secret, validate):
        there = file_facts(path)
        content = text.encode()
        if (
            there
            # a link is replaced by the file: its target may belong to another package
            and not os.path.islink(path)
            and (there["mode"], there["uid"], there["gid"]) == (mode, 0, 0)
            and there["text"] == text
        ):
            return
        self.changed = True
        self.written.append(path)
        diff = {"before_header": path, "after_header": path, "before": "", "after": text}
        if there and not secret:
            diff["before"] = there["text"]
        self.diffs.append({"prepared": f"+{path}\n"} if secret else diff)
        if self.check:
            return
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o755, exist_ok=True)
        # In the same folder: os.replace is atomic within a file system only.
        handle, part = tempfile.mkstemp(prefix=".gpukiln-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), int(mode, 8))
                # Mode and owner before the rename: the file is never visible with others.
                os.fchown(file.fileno(), 0, 0)
            self.accepted(path, [part if word == "%s" else word for word in validate])
            _label(part, path)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise

    def accepted(self, path, command):
        answer = run(command) if command else {"rc": 0}
        if answer["rc"] != 0:
            said = (answer["stderr"] or answer["stdout"]).strip()
            self.module.fail_json(
                msg=f"Found that {command[0]} does not accept what {path} would be, wanted one that it does; "
                f"the file is as it was: {said}",
                rc=answer["rc"],
            )

    def remove(self, path):
        if not os.path.lexists(path):
            return
        self.changed = True
        self.written.append(path)
        self.diffs.append({"prepared": f"-{path}\n"})
        if self.check:
            return
        # A link to a folder is unlinked, not followed.
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def systemctl(self, *arguments):
        self.changed = True
        if self.check:
            return
        # A unit may take minutes to start.
        answer = run(["systemctl", *arguments], seconds=600)
        if answer["rc"] != 0:
            said = (answer["stderr"] or answer["stdout"]).strip()
            self.module.fail_json(
                msg="Found that `systemctl {}` failed: {}".format(" ".join(arguments), said), rc=answer["rc"]
            )


def _label(part, path):
    """SELinux's label of the place, which a renamed file would not take on."""
    if os.path.exists("/sys/fs/selinux/enforce") and shutil.which("matchpathcon"):
        # rename(2) keeps the label of the temporary file.
        label = run(["matchpathcon", "-n", path])["stdout"].strip()
        run(["chcon", label, part])


def main():
    """Ansible's entry point."""
    spec = {name: {"type": "list", "elements": of, "default": []} for name, of in LISTS.items()}
    spec.update((name, {"type": "list", "elements": "str", "default": []}) for name in VERBS)
    spec["folders"] = {"type": "dict", "default": {}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    asked, work = module.params, Settings(module)
    for path, mode in asked["folders"].items():
        work.folder(path, mode)
    for file in asked["files"]:
        secret, validate = file.get("secret", False), file.get("validate", [])
        work.file(file["path"], file["text"], file.get("mode", "0644"), secret, validate)
    for path in asked["absent"]:
        work.remove(path)
    # Before enable and start, which would use the old unit.
    if any(path.startswith(UNIT_FOLDERS) for path in work.written):
        work.systemctl("daemon-reload")
    for verb in VERBS:
        for unit in asked[verb]:
            work.systemctl(verb, unit)
    module.exit_json(changed=work.changed, written=work.written, diff=work.diffs)


if __name__ == "__main__":
    main()
