"""Changes of simulated GPUs as they are typed, and as the server takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded.gpus.settings import SCENARIOS, read_scenario
from gpukiln.errors import UsageError
from gpukiln.parsing import parse_json
from gpukiln.typed import unknown
from gpukiln.units import is_whole


@dataclass(frozen=True)
class GpuChangeOptions:
    """What is changed about the GPUs of one machine; empty: nothing.

    Args:
        on: Give the machine simulated GPUs.
        off: Take them away.
        settings: Each GPU.NAME=VALUE.
        scenario: The name of a scenario, or a file with settings.
        reset: Indices of GPUs.
        load: GPU:PID:MIB[:PERCENT].
        recording: A file that was recorded on a real host.
        board: KEY[:COUNT] of the catalogue.
    """

    on: bool
    off: bool
    settings: Sequence[str]
    scenario: str
    healthy: bool
    reset: Sequence[str]
    load: str
    recording: str
    board: str

    def request(self) -> dict[str, Any]:
        """The fields of a request to the server.

        Raises:
            UsageError: Two options exclude each other, or a text has another form.
        """
        if self.recording and self.board:
            raise UsageError("--recording and --board", hint="one of them")
        if self.on and self.off:
            raise UsageError("--on and --off", hint="one of them")
        fields = {
            "switch": "on" if self.on else "off" if self.off else "",
            "healthy": self.healthy,
            "settings": [*self.settings],
            "reset": [*self.reset],
            "load": parse_load(self.load) if self.load else [],
            "board": self.board,
            **_scenario(self.scenario, self.settings),
            **({"recording": read_recording(Path(self.recording))} if self.recording else {}),
        }
        # Empty fields are left out, so that a request without a change is `{}`, which only reads.
        return {name: value for name, value in fields.items() if value}


def parse_load(text: str) -> list[str]:
    """The parts of a load on a GPU.

    >>> parse_load("0:1234:900")
    ['0', '1234', '900']
    >>> parse_load("last:1234:900:40")
    ['last', '1234', '900', '40']

    Raises:
        UsageError: The text has another form.
    """
    parts = text.split(":")
    # The first part is not checked here, as it may be `last`; isascii, because int() takes digits of every
    # script.
    if len(parts) not in (3, 4) or not all(part.isascii() and is_whole(part) for part in parts[1:]):
        raise UsageError(
            f"--load {text}: wanted GPU:PID:MIB[:PERCENT]", hint="for example --load 0:1234:900:40"
        )
    return parts


def _scenario(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """The server knows scenarios by their names; of one in a file it gets the settings.

    The settings of a file come first, so that typed ones replace them.
    """
    if not name or name in SCENARIOS:
        return {"scenario": name}
    # A known name first: a file of that name in the current folder does not change what it means.
    path = Path(name)
    if path.exists():
        return {"settings": [*read_scenario(path), *settings]}
    raise unknown("scenario", name, SCENARIOS)


def read_recording(path: Path) -> dict[str, Any]:
    """What NVML answered on a real host.

    Raises:
        UsageError: The file can't be read, or has something else.
    """
    try:
        nvml: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))["nvml"]
        # The server checks the rest; this much says whether it is a recording at all.
        if not isinstance(nvml["gpus"], list):
            raise TypeError("gpus is no list")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path} is no recording of a GPU host: {type(error).__name__}: {error}",
            hint="on the host: python -m gpukiln.probe.recording recording.json",
        ) from error
    return nvml
