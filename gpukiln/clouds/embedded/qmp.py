"""QEMU's control socket: one question, one answer (QEMU, docs/interop/qmp-spec)."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any, Self

from gpukiln.errors import UnavailableError
from gpukiln.parsing import parse_json

ANSWER_S = 10  # seconds that QEMU gets for one answer


class Qmp:
    """A session with a QEMU, which serves one at a time; whatever goes wrong is an UnavailableError.

    Args:
        path: The socket.
    """

    def __init__(self, path: Path) -> None:
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(ANSWER_S)
                control.connect(str(path))
                self._stream = control.makefile("rw")  # keeps the connection until it is closed
        except OSError as error:
            raise UnavailableError(f"QEMU can't be reached: {error}") from error
        try:
            self._read("its greeting")
            self.execute("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session; QEMU serves the next one."""
        with contextlib.suppress(OSError):  # what was not sent any more
            self._stream.close()

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run a command.

        Raises:
            UnavailableError: QEMU refused it, said nothing in time or ended.
        """
        try:
            self._stream.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
            self._stream.flush()
        except OSError as error:
            raise UnavailableError(f"QEMU ended before {command}: {error}") from error
        while "return" not in (answer := self._read(command)):
            if "error" in answer:
                raise UnavailableError(f"QEMU refused {command}: {answer['error'].get('desc', answer)}")
        return answer["return"]

    def _read(self, waited_for: str) -> dict[str, Any]:
        try:
            line = self._stream.readline()
        except OSError as error:
            raise UnavailableError(f"QEMU did not answer {waited_for}: {error}") from error
        if not line.endswith("\n"):  # the end of the stream, perhaps in the middle of a line
            raise UnavailableError(f"QEMU ended while {waited_for} was waited for")
        try:
            answer = parse_json(line)
        except ValueError as error:
            raise UnavailableError(f"QEMU answered {waited_for} with {line[:80]!r}") from error
        if not isinstance(answer, dict):
            raise UnavailableError(f"QEMU answered {waited_for} with {line[:80]!r}")
        return answer
