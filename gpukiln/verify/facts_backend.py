"""A backend of testinfra for facts in a file, `facts://FILE`: a pod has ended when it is verified."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from testinfra.backend import base

from gpukiln.parsing import parse_json


class FactsBackend(base.BaseBackend):  # type: ignore[misc]  # testinfra has no types
    """Facts in a file; commands can't be run.

    Args:
        name: The file's path, quoted as one name of a URL.
    """

    NAME = "facts"

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.file = Path(unquote(name))
        super().__init__(name, *args, **kwargs)

    def facts(self) -> dict[str, Any]:
        document: dict[str, Any] = parse_json(self.file.read_text(encoding="utf-8"))
        return document

    def run(self, command: str, *_: str, **__: Any) -> base.CommandResult:
        """See testinfra; no check runs a command."""
        raise RuntimeError(f"{self.file} has facts only, the command can't be run: {command}")
