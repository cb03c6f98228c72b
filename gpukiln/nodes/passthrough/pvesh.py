"""Proxmox VE's API by `pvesh`, on the host itself or over SSH: as root@pam, who may what no token may."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from typing import Any

from proxmoxer.backends.command_base import CommandBaseSession, Response

from gpukiln import programs
from gpukiln.errors import UnavailableError
from gpukiln.ssh import parse_ssh

# Exit codes of ssh(1) for its own errors, and of a POSIX shell for an unknown command.
SSH_FAILED, NOT_FOUND = 255, 127


class Pvesh(CommandBaseSession):  # type: ignore[misc]  # proxmoxer has no types
    """A session of proxmoxer whose commands run within limits.

    Args:
        ssh: `ssh://[USER@]HOST[:PORT]`, or empty for this machine.
        limit_s: For one command; what makes a VM takes as long as its disk's import.
    """

    def __init__(self, ssh: str, limit_s: float) -> None:
        super().__init__(service="PVE", timeout=limit_s)
        self._ssh = ssh

    def _exec(self, cmd: Sequence[str]) -> tuple[str, str, int]:
        if not self._ssh and not shutil.which(cmd[0]):
            raise UnavailableError(
                f"{cmd[0]} is not on this machine, which is no Proxmox VE then",
                hint="--pve local is for the host itself; name another as HOST or ssh://root@HOST",
            )
        # Quoted once more for the shell at the other end of ssh.
        words = parse_ssh(self._ssh).command(shlex.join(cmd), terminal=False) if self._ssh else [*cmd]
        done = programs.run(words, limit_s=self.timeout)
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if self._ssh and done.returncode == SSH_FAILED and not out:
            raise UnavailableError(
                f"{self._ssh} can't be reached: {' '.join(err.split())[-300:]}",
                hint="try `ssh` by hand; a jump host belongs into ~/.ssh/config",
            )
        if self._ssh and done.returncode == NOT_FOUND:
            raise UnavailableError(f"{self._ssh} has no {cmd[0]}, and is no Proxmox VE then")
        return out, err, done.returncode

    def request(
        self, method: str, url: str, data: Any = None, params: Any = None, headers: Any = None
    ) -> Response:
        """See proxmoxer, which takes any word on standard error for a failure, and silence for success."""
        answer = super().request(method, url, data, params, headers)
        if answer.exit_code == 0:
            answer.status_code = 200  # perl warns of locales there
        elif answer.status_code == 200:
            answer.status_code = 500
        return answer
