"""Writes the folder of a first contact, without names of hosts and users and without ids of GPUs.

Runs on the machine that is examined, with Python 3.9 or newer.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gpukiln.files import write_atomic
from gpukiln.redact import REPLACEMENT, redact, redact_value

_UUID = re.compile(r"\b(?:(GPU|MIG)-)?(?:GPU-)?([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})\b")
# Lines of nvidia-smi that identify a board, chassis or process: serial numbers, ids and names.
_OWN = re.compile(
    r"(?im)^([ \t]*(?:[\w ]*serial[\w ]*|GPU PDI|[\w ]*GUID|Host ID|Process ID|Process Name|Name)[ \t]*:"
    r"[ \t]*)(?!N/A\b|Requested functionality)(\S[^\n]*)$"
)
# A row of nvidia-smi's table of processes: GPU, instances, process, kind, name.
_ROW = re.compile(
    r"(?m)^(\|\s+\d+\s+(?:N/A|\d+)\s+(?:N/A|\d+)\s+)\d+(\s+[A-Z+]+\s+)(?!\(left out\))\S.*?(\s+\S+\s+\|)$"
)
_PROCESS = re.compile(r"\b(pid|name)=(?!\(left out\))('[^']*'|[^\s,]+)")  # in the driver's messages
_HOME = re.compile(r"(/home/|/Users/)(?!\(left out\))[^/\s\"':]+")


class Folder:
    """Writes files, each completely or not at all.

    Args:
        path: The folder; created here.
        host: The machine's own name.
    """

    def __init__(self, path: Path, host: str) -> None:
        self.path = path
        self.uuids: dict[str, str] = {}
        names = sorted({host, host.partition(".")[0]}, key=len, reverse=True)
        self.host = re.compile("|".join(rf"\b{re.escape(n)}\b" for n in names if len(n) > 1) or r"\b\B")
        path.mkdir(parents=True, exist_ok=True)

    def shown(self, text: str) -> str:
        """A text without secrets, and without names and ids of this host."""
        text = _PROCESS.sub(rf"\1={REPLACEMENT}", _OWN.sub(rf"\1{REPLACEMENT}", redact(text)))
        text = _ROW.sub(rf"\g<1>0\g<2>{REPLACEMENT}\g<3>", text)
        text = _HOME.sub(rf"\1{REPLACEMENT}", _UUID.sub(self._uuid, text))
        return self.host.sub("host", text)

    def _uuid(self, match: re.Match[str]) -> str:
        kind, number = match.groups()
        if not number.startswith("00000000-0000-0000-0000-"):  # a recording has replaced ids already
            number = self.uuids.setdefault(number.lower(), f"00000000-0000-0000-0000-{len(self.uuids):012d}")
        return f"{kind}-{number}" if kind else number

    def text(self, name: str, text: str) -> None:
        """Write a text file."""
        write_atomic(self.path / name, self.shown(text))

    def data(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        write_atomic(self.path / name, json.dumps(self._values(redact_value(value)), indent=1) + "\n")

    def _values(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._values(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._values(inner) for inner in value]
        return self.shown(value) if isinstance(value, str) else value


def default_folder() -> Path:
    """The folder where none is given."""
    return Path(os.getcwd()) / "first-contact"  # noqa: PTH109 - as the shell shows it
