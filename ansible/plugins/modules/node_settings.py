#!/usr/bin/python
"""Writes a plan's files and has systemd follow, in one round trip. Python 3.9, the standard library.

As node_facts it has nothing of Ansible's library, which takes longer to load than the work.
"""

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
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile

# JSON in a raw string, as it has backslashes; it never has three quotes in a row.
ARGUMENTS = r"""<<INCLUDE_ANSIBLE_MODULE_JSON_ARGS>>"""
# systemd has to reread its units after a change below these
UNIT_FOLDERS = ("/etc/systemd/", "/usr/lib/systemd/", "/lib/systemd/")
COMMAND_SECONDS = 600  # a unit may take minutes to start


class SettingsError(Exception):
    """Why the settings could not be written, for the user."""


class Settings:
    """The work, and what came of it.

    Args:
        check: Whether nothing may be changed.
    """

    def __init__(self, check):
        self.check = check
        self.written, self.diffs, self.changed = [], [], False

    def folder(self, path, mode):
        if os.path.isdir(path) and owned(os.stat(path), mode):
            return
        self.changed = True
        self.diffs.append({"prepared": f"+{path}/\n"})
        if not self.check:
            os.makedirs(path, exist_ok=True)
            os.chown(path, 0, 0)
            os.chmod(path, int(mode, 8))

    def file(self, path, text, mode="0644", secret=False, validate=()):
        content, before, there = text.encode(), b"", False
        with contextlib.suppress(OSError), open(path, "rb") as file:
            # One open file for text and owner: it may be replaced meanwhile.
            before, there = file.read(), owned(os.fstat(file.fileno()), mode)
        # a link is replaced by the file: its target may belong to another package
        if there and before == content and not os.path.islink(path):
            return
        self.changed = True
        self.written.append(path)
        diff = {"before_header": path, "after_header": path, "before": before.decode("utf-8", "replace")}
        self.diffs.append({"prepared": f"+{path}\n"} if secret else {**diff, "after": text})
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
        said = failure(command) if command else ""
        if said:
            raise SettingsError(
                f"Found that {command[0]} does not accept what {path} would be, wanted one that it does; "
                f"the file is as it was: {said}"
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
        said = "" if self.check else failure(["systemctl", *arguments])
        if said:
            raise SettingsError("Found that `systemctl {}` failed: {}".format(" ".join(arguments), said))


def owned(state, mode):
    """Whether it is root's, with this mode."""
    return (f"{stat.S_IMODE(state.st_mode):04o}", state.st_uid, state.st_gid) == (mode, 0, 0)


def failure(command):
    """Run a program; returns what it says where it fails, empty where it does not."""
    # sudo's PATH often lacks sbin
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    try:
        done = subprocess.run(
            command,
            # a program that asks must fail, not wait
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            env={**os.environ, "LC_ALL": "C", "PATH": path},
            check=False,
        )
    except FileNotFoundError:
        return f"found no program {command[0]}"
    except subprocess.TimeoutExpired:
        return f"no answer in {COMMAND_SECONDS} s"
    said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
    return (said or f"exit status {done.returncode}") if done.returncode else ""


def _label(part, path):
    """SELinux's label of the place, which a renamed file would not take on."""
    if os.path.exists("/sys/fs/selinux/enforce") and shutil.which("matchpathcon"):
        # rename(2) keeps the label of the temporary file.
        label = subprocess.run(["matchpathcon", "-n", path], capture_output=True, text=True, check=False)
        subprocess.run(["chcon", label.stdout.strip(), part], check=False, capture_output=True)


def settings(work, folders=None, files=(), absent=(), enable=(), start=()):
    """Do what DOCUMENTATION calls the options, in that order."""
    for path, mode in (folders or {}).items():
        work.folder(path, mode)
    for file in files:
        # `before` of a plan is for people.
        given = {name: value for name, value in file.items() if name != "before"}
        require_known(given, Settings.file)
        work.file(**given)
    for path in absent:
        work.remove(path)
    # Before enable and start, which would use the old unit.
    if any(path.startswith(UNIT_FOLDERS) for path in work.written):
        work.systemctl("daemon-reload")
    for verb, units in (("enable", enable), ("start", start)):
        for unit in units:
            work.systemctl(verb, unit)


def require_known(given, function):
    """Refuse names that a function does not take."""
    code = function.__code__
    unknown = sorted(set(given) - set(code.co_varnames[: code.co_argcount]))
    if unknown:
        raise SettingsError(
            f"Found the arguments {', '.join(unknown)}, wanted those that `ansible-doc node_settings` shows."
        )


def main():
    """Ansible's entry point."""
    asked = json.loads(ARGUMENTS)
    work = Settings(asked["_ansible_check_mode"])
    arguments = {name: value for name, value in asked.items() if name[0] != "_"}
    try:
        require_known(arguments, settings)
        settings(work, **arguments)
    except (SettingsError, OSError) as error:
        print(json.dumps({"failed": True, "changed": work.changed, "msg": str(error)}))
        sys.exit(1)
    print(json.dumps({"changed": work.changed, "written": work.written, "diff": work.diffs}))


if __name__ == "__main__":
    main()
