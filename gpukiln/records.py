"""The folders of builds, each with a record: of a machine image or of a container image."""

import contextlib
import functools
import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpukiln.errors import BusyError, UsageError
from gpukiln.files import write_atomic
from gpukiln.locks import locked
from gpukiln.parsing import LimitError, parse_json, read_text
from gpukiln.typed import dump, load

log = logging.getLogger(__name__)
# Sorts by time as text.
STAMP = "%Y%m%d-%H%M%S"
SCHEMA = 1  # version of every record's form


R = TypeVar("R")


@dataclass(frozen=True)
class RecordFolder(ABC, Generic[R]):
    """The folder of one build.

    Args:
        folder: Holds record.json, the logs, and the reports of the verifications in verify/.
    """

    folder: Path

    @staticmethod
    @abstractmethod
    def kind() -> type[R]:
        """Class of the record."""

    @property
    def id(self) -> str:
        """The build's id: the folder's name."""
        return self.folder.name

    @property
    def record_file(self) -> Path:
        return self.folder / "record.json"

    def write(self, record: R) -> None:
        """Write the record atomically."""
        write_atomic(self.record_file, json.dumps(dump(record), indent=2) + "\n")

    def read(self) -> R:
        """Read the record.

        Raises:
            UsageError: It is damaged, or was written by another version of gpukiln.
        """
        return self.read_file(self.record_file, hint=f"remove {self.folder} if you don't need it")

    @classmethod
    def read_file(cls, path: Path, *, hint: str = "give the record.json of a build") -> R:
        """Read a record from any file.

        Args:
            hint: The next step where it can't be read.

        Raises:
            UsageError: It is damaged, or was written by another version of gpukiln.
        """
        where = f"{path} can't be read"
        try:
            document = parse_json(read_text(path))
        except OSError as error:
            raise UsageError(f"{where}: {error.strerror or error}", hint=hint) from error
        except LimitError as error:
            raise UsageError(f"{where}: it is {error}", hint=hint) from error
        except ValueError as error:
            raise UsageError(f"{where}: it is not JSON: {error}", hint=hint) from error
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise UsageError(f"{where}: it has schema {schema}, and this version reads {SCHEMA}", hint=hint)
        return load(cls.kind(), document, where=where, hint=hint)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the build; the lock is released when the process ends, even by a kill.

        Raises:
            BusyError: Another process holds the lock.
        """
        busy = BusyError(
            f"another process works on build {self.id}",
            hint="wait for it; `fuser` with the lock file prints the process",
        )
        with locked(self.folder / "lock", busy=busy):
            yield


F = TypeVar("F", bound=RecordFolder[Any])


class RecordFolders(Generic[F]):
    """All builds of one kind on this computer."""

    def __init__(self, folder: Path, kind: type[F]) -> None:
        self.folder, self._kind = folder, kind

    def create(self, name: str) -> F:
        """Create the folder of a new build.

        Args:
            name: Name of the image.
        """
        stamp = datetime.now(UTC).strftime(STAMP)
        # The stamp sorts builds by time; the random end separates two that start in one second.
        folder = self.folder / f"{stamp}-{name}-{secrets.token_hex(2)}"
        folder.mkdir(parents=True)
        self.folder.chmod(0o700)  # logs may have what a build printed
        return self._kind(folder)

    def folders(self) -> list[F]:
        """All builds with a record, the newest first; a record may be damaged."""
        if not self.folder.exists():
            return []
        builds = [self._kind(folder) for folder in sorted(self.folder.iterdir(), reverse=True)]
        return [build for build in builds if build.record_file.exists()]

    def _warn_about_lost(self) -> None:
        """Warn about each folder without a record: a build writes it first, so it was lost."""
        for folder in self.folder.iterdir() if self.folder.exists() else ():
            if folder.is_dir() and not (folder / "record.json").exists():
                _warn(f"{folder} has lost its record.json; remove the folder if you don't need it")

    def all(self) -> list[F]:
        """All builds with a readable record, the newest first; a warning names each other file."""
        readable = []
        self._warn_about_lost()
        for build in self.folders():
            try:
                build.read()
            except UsageError as error:
                _warn(error.message)
            else:
                readable.append(build)
        return readable


@functools.cache
def _warn(message: str) -> None:
    """Warn once (cached), because a command lists the builds several times."""
    log.warning("warning: %s", message)


def build_started(build_id: str) -> datetime | None:
    """When a build began, from its id.

    Args:
        build_id: Any text.

    Returns:
        The moment in UTC, or None where the text is not a build's id.

    >>> build_started("20261121-200000-eks-gpu-1a2b")
    datetime.datetime(2026, 11, 21, 20, 0, tzinfo=datetime.timezone.utc)
    >>> build_started("latest") is None
    True
    """
    try:
        return datetime.strptime(build_id[: len("20261121-200000")], STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None
