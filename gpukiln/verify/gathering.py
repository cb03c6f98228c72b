"""Gathers a machine's facts over testinfra's connection: SSH, Ansible, a container, or this computer."""

from __future__ import annotations

import re
import secrets
from typing import Any

from gpukiln.parsing import parse_json
from gpukiln.probe.packing import NO_PYTHON, facts_in, gather_command
from gpukiln.verify.facts import Facts
from gpukiln.verify.facts_backend import FactsBackend


def _unreachable(text: str) -> str:
    r"""Ansible's reason in testinfra's copy of its output, which escapes line ends and quotes.

    >>> _unreachable("UNREACHABLE! => {msg: 'no route\\n to host' unreachable: true}")
    'no route to host'
    >>> _unreachable("another error")
    'another error'
    """
    match = re.search(r"UNREACHABLE!.*?msg: (.*?)unreachable:", text, re.DOTALL)
    if match is None:
        # The end of the output has Ansible's error, its beginning warnings.
        return text[-1000:]
    return " ".join(match[1].replace("\\n", " ").replace("\\", "").split()).strip("' ")


def gather(host: Any, profile: str = "", max_seconds: float | None = None) -> Facts:
    """Gather the facts of a machine in one round trip.

    Args:
        host: testinfra's host.
        profile: Key of `PROFILES`.
        max_seconds: How long the machine may take; None for no limit.

    Raises:
        RuntimeError: The machine can't be reached, or printed no facts.
    """
    if isinstance(host.backend, FactsBackend):
        return Facts(host.backend.facts())
    # A login shell may print anything, also something that looks like facts; nobody can guess the mark.
    mark = secrets.token_hex(16)
    code, stdout, stderr = run_command(host, gather_command(profile, mark, max_seconds))
    # Over Ansible the shell module itself needs Python, so that the command never runs.
    if code == NO_PYTHON or "The module interpreter" in stderr:
        said = " ".join(stderr.split())[-300:]
        raise RuntimeError(f"found no python3 ({said}), wanted Python 3.9 or newer: install it")
    if code != 0:
        raise RuntimeError(f"gathering facts exits {code}: {(stderr or stdout).strip()[-1000:]}")
    try:
        return Facts(parse_json(facts_in(stdout, mark)))
    except ValueError as error:
        raise RuntimeError(f"the machine printed no facts ({error}): {stdout[:200]!r}") from error


def run_command(host: Any, command: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command; where ssh itself exits with 255, an exception."""
    backend = host.backend
    # run_ansible gives Ansible's own reason where the host is not reached, which host.run() does not.
    if getattr(backend, "force_ansible", False):
        try:
            said = backend.run_ansible("shell", module_args=command, check=False)
        except AssertionError as error:  # testinfra raises it where Ansible does not reach the host
            raise RuntimeError(_unreachable(str(error))) from error
        if "stdout" in said:
            return said["rc"], said["stdout"], said["stderr"]
        # Ansible's module itself failed, for example because the machine has no Python
        messages = "; ".join(str(said[key]).strip() for key in ("msg", "module_stderr") if said.get(key))
        return said.get("rc") or 1, str(said.get("module_stdout", "")), messages or str(said)
    done = host.run(command)
    return done.rc, done.stdout, done.stderr
