"""The folder of each run on nodes, with what is needed to look at it again and to resume it."""

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.files import write_whole
from gpukiln.nodes.playbook import Request
from gpukiln.nodes.results import RunResult
from gpukiln.records import dump


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        folder: Holds run.json, ansible.log and a log of each host.
    """

    folder: Path

    @property
    def id(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def file(self) -> Path:
        """What was asked for, and the result."""
        return self.folder / "run.json"

    def write(self, request: Request, result: RunResult) -> None:
        """Write it in one step.

        Args:
            request: What was asked for.
            result: What happened.
        """
        document = {
            "schema": 1,
            "id": self.id,
            "inventory": str(request.inventory),
            "limit": request.limit,
            "check": request.check,
            "unfinished": result.unfinished,
            **dump(result),
        }
        self.write_document(document)

    def write_document(self, document: dict[str, Any]) -> None:
        """Write what `read` gives back, in one step.

        Args:
            document: Plain data.
        """
        write_whole(self.file, json.dumps(document, indent=2) + "\n")

    def read(self) -> dict[str, Any]:
        """The document that was written."""
        document: dict[str, Any] = json.loads(self.file.read_text())
        return document


class Runs:
    """Every run that was made from this machine.

    Args:
        home: The state folder.
    """

    def __init__(self, home: Path) -> None:
        self.folder = home / "nodes"

    def create(self, purpose: str) -> Run:
        """Make the folder of a new run, which nobody else may read.

        Args:
            purpose: apply, drift, verify, doctor or test.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        folder = self.folder / f"{stamp}-{purpose}-{secrets.token_hex(2)}"
        folder.mkdir(parents=True)
        for private in (self.folder, folder):
            private.chmod(0o700)
        return Run(folder)

    def find(self, name: str) -> Run:
        """An earlier run that converged nodes.

        Args:
            name: Its id, or `last`.

        Raises:
            UsageError: There is no such run.
        """
        folders = sorted(self.folder.glob("*-apply-*"), reverse=True)
        runs = [run for folder in folders if (run := Run(folder)).file.exists()]
        for run in runs:
            if name in ("last", run.id):
                return run
        raise UsageError(
            f"there is no run {name!r} to resume",
            hint="give a run's id or `last`"
            if runs
            else "`invoke node.apply --inventory FILE` makes the first",
            details=tuple(run.id for run in runs[:5]),
        )

    def last_test_durations(self) -> dict[str, float]:
        """Seconds that each of Molecule's scenarios took when it last passed."""
        found: dict[str, float] = {}
        for run in map(Run, sorted(self.folder.glob("*-test-*"))):
            if run.file.exists():
                outcomes = run.read()["scenarios"]
                found |= {one["scenario"]: one["seconds"] for one in outcomes if one["state"] == "passed"}
        return found
