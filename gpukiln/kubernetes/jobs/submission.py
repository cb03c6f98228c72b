"""What this computer keeps of a Job that it submits, until its end was seen: a killed run is continued."""

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
    """A Job on its way to a cluster.

    Args:
        file: Holds the mark that the Job bears; its name stands for cluster, namespace and Job.
        digest: Of the manifest: another one is another Job.
    """

    file: Path
    digest: str

    def is_of(self, job: Manifest) -> bool:
        """Whether a Job on the cluster is the one that an earlier run of the same command submitted."""
        mark = job["metadata"].get("annotations", {}).get(MARK, "")
        try:
            return bool(mark) and self.file.read_text() == self._content(mark)
        except (OSError, UnicodeDecodeError):
            return False

    def begin(self, say: Callable[[str], None]) -> str:
        """Write a new mark down, before the Job that bears it is sent; without a disk it is sent, too."""
        mark = secrets.token_hex(8)
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_partial_of(self.file)
            write_atomic(self.file, self._content(mark))
        except OSError as error:
            say(f"{self.file} can't be written, so a run that is killed can't be continued: {error}")
        return mark

    def end(self) -> None:
        """Forget the mark: what became of the Job was reported."""
        with suppress(OSError):  # it could not be written either
            self.file.unlink(missing_ok=True)

    def _content(self, mark: str) -> str:
        return f"{mark} {self.digest}\n"


def submission(cluster: Cluster, namespace: str, job: Manifest) -> Submission:
    """The submission of a Job, as it was rendered."""
    where = f"{cluster.server} {namespace} {job['metadata']['name']}"
    file = state_home() / "kubernetes/jobs" / hashlib.sha256(where.encode()).hexdigest()[:16]
    return Submission(file, hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest())
