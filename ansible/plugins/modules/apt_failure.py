#!/usr/bin/python
"""Says which package source apt can't read and which file names it: Ansible's module gives no reason."""

from __future__ import annotations

DOCUMENTATION = """
module: apt_failure
short_description: Says which package source apt can't read, why, and which file names it
description:
  - Runs C(apt-get update) once more and takes its own words of what failed.
  - For the rescue of a task of M(ansible.builtin.apt) that could not fetch the package lists.
options:
  sources:
    description: Patterns of the files that name sources.
    type: list
    elements: str
    default: [/etc/apt/sources.list, /etc/apt/sources.list.d/*.list, /etc/apt/sources.list.d/*.sources]
author: [The authors of gpukiln (!UNKNOWN)]
"""

EXAMPLES = """
- name: Fetch the package lists
  block:
    - name: Fetch them
      ansible.builtin.apt: {update_cache: true}
  rescue:
    - name: Ask apt which source fails
      apt_failure:
      register: failure
"""

RETURN = """
words:
  description: "One line each: what failed, why, and the file that names it."
  returned: always
  type: list
"""

import glob
import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

SOURCES = (
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d/*.list",
    "/etc/apt/sources.list.d/*.sources",
)
SECONDS = 300
# `Err:2 http://deb.example/debian bookworm InRelease`, and on lines that begin with spaces the reason
FAILED = re.compile(r"^Err:\d+ (?P<address>\S+)(?P<what>.*)\n(?P<why>(?:[ \t]+\S.*\n?)*)", re.MULTILINE)
ERROR = re.compile(r"^E: .*$", re.MULTILINE)
SCHEME = re.compile(r"^[a-z+]+:/*")


def failures(said, errors, sources):
    """What apt-get said of sources that failed.

    Args:
        said: Its standard output.
        errors: Its standard error.
        sources: Text of each file that names sources, by path.
    """
    causes = []
    for match in FAILED.finditer(said):
        # An address in a file may have a scheme or a password that apt does not show
        address = SCHEME.sub("", match["address"]).rstrip("/")
        files = [path for path, text in sources.items() if address in text]
        named = ", ".join(files) or "a file that does not name it in these words"
        why = " ".join(match["why"].split()) or "no reason given"
        causes.append("{}{}: {} (named in {})".format(match["address"], match["what"].rstrip(), why, named))
    return causes + ERROR.findall(errors)


def main():
    """Ansible's entry point."""
    spec = {"sources": {"type": "list", "elements": "str", "default": list(SOURCES)}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    update = ["timeout", str(SECONDS), "apt-get", "update", "-q", "-o", "Acquire::Retries=0"]
    status, said, errors = module.run_command(update, environ_update={"LC_ALL": "C"})
    files = [Path(path) for pattern in module.params["sources"] for path in sorted(glob.glob(pattern))]
    sources = {str(file): file.read_text(errors="replace") for file in files if file.is_file()}
    words = failures(said, errors, sources)
    if not words and status != 0:
        words = [f"`{' '.join(update)}` ended with {status}: {errors.strip()[-500:]}"]
    module.exit_json(
        changed=False, words=words or ["`apt-get update` succeeded a moment later: run this again"]
    )


if __name__ == "__main__":
    main()
