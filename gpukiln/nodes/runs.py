"""The folder of each run on nodes, with what is needed to look at it again and to resume it."""

import contextlib
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from gpukiln import locks
from gpukiln.errors import BusyError, PartialError, UsageError
from gpukiln.files import write_atomic
from gpukiln.nodes.playbook import PlaybookRequest
from gpukiln.nodes.results import RunResult
from gpukiln.parsing import parse_json
from gpukiln.state import state_home
from gpukiln.typed import dump

PURPOSES = ("apply", "drift", "verify", "doctor", "test", "cluster")


@dataclass(frozen=True)
class NodeRun:
    """One run.

    Args:
        folder: Holds run.json, ansible.log and a log of each host.
        lock: Held where this process is at work in it, and given back with the process.
    """

    folder: Path
    # The kernel releases it when the process ends, however it ends.
    lock: FileLock | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def file(self) -> Path:
        """What was asked for, and the result."""
        return self.folder / "run.json"

    def write(self, request: PlaybookRequest, result: RunResult) -> None:
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
        write_atomic(self.file, json.dumps(document, indent=2) + "\n")

    def read(self) -> dict[str, Any]:
        """The document that was written."""
        document: dict[str, Any] = parse_json(self.file.read_text())
        return document


def hold(folder: Path) -> FileLock:
    """Keep the folder of a run from being removed, as long as the lock is referred to and the process lives.

    Raises:
        BusyError: Another process works in it.
    """
    return locks.hold(folder / "lock", busy=BusyError(f"a process works in {folder}"))


@dataclass(frozen=True)
class OldRun:
    """What a run left, and what is to become of it.

    Args:
        kind: One of PURPOSES; or image, for a verdict on an image of another machine.
        ended: When something was last written into its folder, UTC.
        action: keep, remove (in a dry run), removed or failed.
        reason: Why.
    """

    folder: Path
    kind: str
    ended: datetime
    mib: float
    action: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**vars(self), "folder": str(self.folder), "ended": self.ended.isoformat(timespec="seconds")}


def old_runs(runs_by_kind: Iterable[tuple[str, Path]], *, keep: int, older_than_days: int) -> list[OldRun]:
    """What can go: of each kind neither one of the newest, nor a young one, nor one that is under way.

    Args:
        runs_by_kind: The kind and the folder of each run.
        keep: How many of each kind stay, the newest.
        older_than_days: Younger ones stay.

    Returns:
        One a run, by kind, the newest first.
    """
    runs = []
    for kind, folder in runs_by_kind:
        # Another command may remove runs at the same time.
        if not (stats := list(_stats(folder))):
            continue  # another command has removed it
        ended = datetime.fromtimestamp(max(stat.st_mtime for stat in stats), UTC)
        # st_blocks counts 512 bytes on Linux whatever the file system's block size (stat(2)).
        runs.append((kind, ended, folder, sum(stat.st_blocks * 512 for stat in stats) / (1 << 20)))
    decided, seen = [], Counter[str]()
    # By kind: many short drift runs must not push the last apply out of those that are kept.
    for kind, ended, folder, mib in sorted(runs, key=lambda run: (run[0], -run[1].timestamp())):
        seen[kind] += 1
        days = (datetime.now(UTC) - ended).days
        reason = ""
        if seen[kind] <= keep:
            reason = f"one of the {keep} newest"
        elif days < older_than_days:
            reason = f"{days} days old, less than {older_than_days}"
        # Asked last: it takes a lock, and young runs need none.
        elif is_held(folder):
            reason = "a process works in it"
        action = "keep" if reason else "remove"
        decided.append(OldRun(folder, kind, ended, round(mib, 1), action, reason or f"{days} days old"))
    return decided


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Of all in a folder but its lock; what a process that works in it removes meanwhile is passed over."""
    for top, _, names in os.walk(folder):
        for path in (Path(top), *(Path(top, name) for name in names if name != "lock")):
            with contextlib.suppress(FileNotFoundError):
                yield path.lstat()


def is_held(folder: Path) -> bool:
    """Whether a process works in the folder of a run."""
    # Without this, asking would create the file, and change when the folder was last written.
    if not (folder / "lock").exists():
        return False
    try:
        hold(folder).release()
    except BusyError:
        return True
    return False


def remove_run(run: OldRun) -> OldRun:
    """Remove the folder of a run, unless a process has begun to work in it."""
    try:
        lock = hold(run.folder)
    except BusyError:
        return replace(run, action="keep", reason="a process works in it")
    try:
        # Under its lock, so that no process begins to work in a folder that is being removed.
        shutil.rmtree(run.folder)
    except OSError as error:
        return replace(run, action="failed", reason=f"{error.filename}: {error.strerror}")
    finally:
        lock.release()
    return replace(run, action="removed")


def removal_notice(runs: Sequence[OldRun]) -> str:
    """What --yes would remove."""
    removable = sum(run.action == "remove" for run in runs)
    effect = f"--yes removes these {removable} of {len(runs)}" if removable else "all of them stay"
    return f"nothing was removed: {effect}"


def require_removed(runs: Sequence[OldRun]) -> None:
    """Raises PartialError where a run could not be removed."""
    if failed := [run for run in runs if run.action == "failed"]:
        raise PartialError(
            f"{len(failed)} of {len(runs)} runs could not be removed",
            details=tuple(f"{run.folder}: {run.reason}" for run in failed),
        )


class RunStore:
    """Every run that was made from this machine.

    Args:
        home: The state folder; None: that of this user.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.folder = (home or state_home()) / "nodes"

    def create(self, purpose: str) -> NodeRun:
        """Make the folder of a new run, readable by its owner only.

        Args:
            purpose: One of PURPOSES.
        """
        # Sorted by name the folders are in order of time; the random end keeps two runs of one second apart.
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        folder = self.folder / f"{stamp}-{purpose}-{secrets.token_hex(2)}"
        # Without exist_ok: a folder that exists is another run's.
        folder.mkdir(parents=True)
        for private in (self.folder, folder):
            private.chmod(0o700)
        return NodeRun(folder, hold(folder))

    def find(self, name: str) -> NodeRun:
        """An earlier run that converged nodes.

        Args:
            name: Its id, or `last`.

        Raises:
            UsageError: There is no such run.
        """
        folders = sorted(self.folder.glob("*-apply-*"), reverse=True)
        # A run that was killed has no result, and so no list of unfinished hosts.
        runs = [run for folder in folders if (run := NodeRun(folder)).file.exists()]
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

    def folders(self) -> list[tuple[str, Path]]:
        """The kind and the folder of every run."""
        folders = [folder for folder in self.folder.glob("*") if folder.is_dir()]
        return [(kind, folder) for folder in folders if (kind := _kind(folder))]

    def last_test_durations(self) -> dict[str, float]:
        """Seconds that each of Molecule's scenarios took when it last passed."""
        durations: dict[str, float] = {}
        for run in map(NodeRun, sorted(self.folder.glob("*-test-*"))):
            if run.file.exists():
                outcomes = run.read()["scenarios"]
                durations |= {
                    outcome["scenario"]: outcome["seconds"]
                    for outcome in outcomes
                    if outcome["state"] == "passed"
                }
        return durations


def _kind(folder: Path) -> str:
    """What a run was for, by its folder's name; an empty string where it is no run's.

    >>> _kind(Path("20261123-100000-apply-1a2b"))
    'apply'
    >>> _kind(Path("notes"))
    ''
    """
    # DATE-TIME-PURPOSE-RANDOM; folders of other names are not gpukiln's and are never removed.
    parts = folder.name.split("-")
    return parts[2] if len(parts) == 4 and parts[2] in PURPOSES else ""
