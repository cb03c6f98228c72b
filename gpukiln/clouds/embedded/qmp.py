"""QEMU's control socket: a command and its answer (QEMU, docs/interop/qmp-spec)."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any, Self

from gpukiln.errors import UnavailableError
from gpukiln.parsing import parse_json

ANSWER_S = 10  # seconds for one answer


class Qmp:
    """A session with QEMU, which serves one at a time; every failure is an UnavailableError.

    Args:
        path: The socket.
    """

    def __init__(self, path: Path) -> None:
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(ANSWER_S)
                control.connect(str(path))
                self._stream = control.makefile("rw")  # keeps the connection open
        except OSError as error:
            raise UnavailableError(f"QEMU can't be reached: {error}") from error
        try:
            self._read("its greeting")
            # QEMU refuses other commands before this one (capabilities negotiation).
            self.execute("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the session, so that QEMU serves the next one."""
        with contextlib.suppress(OSError):  # a flush to a QEMU that has ended
            self._stream.close()

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run a command.

        Raises:
            UnavailableError: QEMU refused it, did not answer in time or ended.
        """
        try:
            self._stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
            self._stream.flush()
        except OSError as error:
            raise UnavailableError(f"QEMU ended before {command}: {error}") from error
        # Events arrive between answers and are skipped.
        while "return" not in (answer := self._read(command)):
            if "error" in answer:
                raise UnavailableError(f"QEMU refused {command}: {answer['error'].get('desc', answer)}")
        return answer["return"]

    def _read(self, expected: str) -> dict[str, Any]:
        try:
            line = self._stream.readline()
        except OSError as error:
            raise UnavailableError(f"QEMU did not answer {expected}: {error}") from error
        if not line.endswith("\n"):  # end of the stream, possibly within a line
            raise UnavailableError(f"QEMU ended before it answered {expected}")
        try:
            answer = parse_json(line)
        except ValueError as error:
            raise UnavailableError(f"QEMU answered {expected} with {line[:80]!r}") from error
        if not isinstance(answer, dict):
            raise UnavailableError(f"QEMU answered {expected} with {line[:80]!r}")
        return answer
