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
STAMP = "%Y%m%d-%H%M%S"
SCHEMA = 1  # of the form of every record


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
        """The record's class."""

    @property
    def id(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def record_file(self) -> Path:
        return self.folder / "record.json"

    def write(self, record: R) -> None:
        """Write the record in one step."""
        write_atomic(self.record_file, json.dumps(dump(record), indent=2) + "\n")

    def read(self) -> R:
        """Read the record.

        Raises:
            UsageError: It is damaged, or of another version of gpukiln.
        """
        return self.read_file(self.record_file, hint=f"remove {self.folder} when it is not needed")

    @classmethod
    def read_file(cls, path: Path, *, hint: str = "wanted: the record.json of a build") -> R:
        """Read a record from any file.

        Args:
            hint: What to do where it can't be read.

        Raises:
            UsageError: It is damaged, or of another version of gpukiln.
        """
        where = f"{path} can't be read"
        try:
            document = parse_json(read_text(path))
        except OSError as error:
            raise UsageError(f"{where}: {error.strerror or error}", hint=hint) from error
        except LimitError as error:
            raise UsageError(f"{where}: it is {error}", hint=hint) from error
        except ValueError as error:
            raise UsageError(f"{where}: it is no JSON: {error}", hint=hint) from error
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise UsageError(f"{where}: it has schema {schema}, and this version reads {SCHEMA}", hint=hint)
        return load(cls.kind(), document, where=where, hint=hint)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the build; the lock goes with the process, however it ends.

        Raises:
            BusyError: Another process works on it.
        """
        busy = BusyError(
            f"build {self.id} is being worked on by another process",
            hint="wait for it; `fuser` on its lock file names the process",
        )
        with locked(self.folder / "lock", busy=busy):
            yield


F = TypeVar("F", bound=RecordFolder[Any])


class RecordFolders(Generic[F]):
    """Every build of one kind on this machine."""

    def __init__(self, folder: Path, kind: type[F]) -> None:
        self.folder, self._kind = folder, kind

    def create(self, name: str) -> F:
        """Make the folder of a new build.

        Args:
            name: Of what is built.
        """
        stamp = datetime.now(UTC).strftime(STAMP)
        folder = self.folder / f"{stamp}-{name}-{secrets.token_hex(2)}"
        folder.mkdir(parents=True)
        self.folder.chmod(0o700)  # logs, and for a while a private key
        return self._kind(folder)

    def folders(self) -> list[F]:
        """Every build with a record, newest first; a record may be damaged."""
        if not self.folder.exists():
            return []
        builds = [self._kind(folder) for folder in sorted(self.folder.iterdir(), reverse=True)]
        return [build for build in builds if build.record_file.exists()]

    def _warn_about_lost(self) -> None:
        """A warning names each folder whose record is gone: a build's first act is to write it."""
        for folder in self.folder.iterdir() if self.folder.exists() else ():
            if folder.is_dir() and not (folder / "record.json").exists():
                _warn(f"{folder} has no record.json: it is lost; remove the folder when it is not needed")

    def all(self) -> list[F]:
        """Every build with a readable record, newest first; of the others a warning names the file."""
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
    """Once: a command looks at the builds more than once."""
    log.warning("warning: %s", message)


def build_started(build_id: str) -> datetime | None:
    """When a build began, by its id.

    Args:
        build_id: Any text.

    Returns:
        The moment in UTC, or None where the text is no build's id.
    """
    try:
        return datetime.strptime(build_id[: len("20261121-200000")], STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None
