"""Writes the commit of the checkout into a wheel, for `gpukiln --version` (hatchling's build hook)."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Of all that describes a commit only its digits and -dirty: no tag matches.
DESCRIBE = ("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


class CommitHook(BuildHookInterface[Any]):
    """Adds gpukiln/_commit; a source that is no checkout, as an sdist, has none."""

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        try:
            done = subprocess.run(DESCRIBE, cwd=self.root, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # no git
            return
        if done.returncode == 0:
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "_commit"
            file.write_text(done.stdout, encoding="utf-8")
            build_data["force_include"][str(file)] = "gpukiln/_commit"

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        if folder := getattr(self, "_folder", None):
            folder.cleanup()
