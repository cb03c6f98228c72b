"""The record of a submitted Job on this computer, by which a killed command finds its Job again."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpukiln.files import remove_partial_of, write_atomic
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.state import state_home

MARK = "gpukiln.io/submission"


@dataclass(frozen=True)
class Submission:
    """The record of a Job.

    Args:
        file: Has the mark of the Job's annotation; its name is a hash of cluster, namespace and Job.
        digest: Of the manifest: a changed manifest is another Job.
    """

    file: Path
    digest: str

    def is_of(self, job: Manifest) -> bool:
        """Whether an earlier run of the same command submitted this Job."""
        mark = job["metadata"].get("annotations", {}).get(MARK, "")
        try:
            return bool(mark) and self.file.read_text() == self._content(mark)
        except (OSError, UnicodeDecodeError):
            return False

    def begin(self, say: Callable[[str], None]) -> str:
        """Write a new mark before the Job is sent; a failure is reported and does not stop the Job."""
        # Random: a Job that another computer submitted under the same name never has it.
        mark = secrets.token_hex(8)
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_partial_of(self.file)
            write_atomic(self.file, self._content(mark))
        except OSError as error:
            say(f"{self.file} can't be written, so a killed command could not find its Job again: {error}")
        return mark

    def end(self) -> None:
        """Delete the record: the end of the Job was reported."""
        with suppress(OSError):  # if it can't be deleted, it could not be written before either
            self.file.unlink(missing_ok=True)

    def _content(self, mark: str) -> str:
        return f"{mark} {self.digest}\n"


def submission(cluster: Cluster, namespace: str, job: Manifest) -> Submission:
    """The record for a rendered Job."""
    where = f"{cluster.server} {namespace} {job['metadata']['name']}"
    # A hash, because server URLs have characters that file names can't have.
    file = state_home() / "kubernetes/jobs" / hashlib.sha256(where.encode()).hexdigest()[:16]
    return Submission(file, hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest())
