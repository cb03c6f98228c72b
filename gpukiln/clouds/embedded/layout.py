"""Where the embedded cloud keeps what outlives its process."""

import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.errors import UnavailableError
from gpukiln.files import write_whole
from gpukiln.parsing import parse_json
from gpukiln.state import state_home

DAMAGED = ".damaged-"  # in the name of what was set aside
ASKED_S = 0.2  # seconds, many times what a look at a lock takes
ACCESS_KEY = re.compile(r"embedded[0-9a-f]{16}")


@dataclass(frozen=True)
class Layout:
    """The files of one embedded cloud.

    Args:
        home: The state folder, see `gpukiln.state`.
    """

    home: Path = field(default_factory=state_home)

    @property
    def root(self) -> Path:
        """The cloud's own folder."""
        return self.home / "cloud"

    @property
    def endpoint(self) -> Path:
        """Address and process id of the running server."""
        return self.root / "endpoint.json"

    @property
    def server_lock(self) -> Path:
        """Held by the server as long as it lives; who asks holds it for a moment, so ask for `ASKED_S`."""
        return self.root / "server.lock"

    @property
    def server_log(self) -> Path:
        return self.root / "server.log"

    @property
    def regions(self) -> Path:
        """One JSON file a region: images, snapshots, tags, parameters."""
        return self.root / "regions"

    @property
    def snapshots(self) -> Path:
        """One sparse raw disk a snapshot."""
        return self.root / "snapshots"

    @property
    def volumes(self) -> Path:
        """One sparse raw disk a volume, beside it its description."""
        return self.root / "volumes"

    @property
    def machines(self) -> Path:
        """One folder an instance, for as long as it is there."""
        return self.root / "machines"

    @property
    def bases(self) -> Path:
        """One sparse raw disk a base image."""
        return self.root / "bases"

    @property
    def scarcity(self) -> Path:
        """Which launches find no capacity; not there where all do."""
        return self.root / "scarcity.json"

    @property
    def registry(self) -> Path:
        """Container images: blobs by their digest, uploads that are not finished."""
        return self.root / "registry"

    @property
    def doubles(self) -> Path:
        """What is compiled for simulated GPUs."""
        return self.root / "doubles"

    def snapshot(self, snapshot_id: str) -> Path:
        """The disk of a snapshot."""
        return self.snapshots / f"{snapshot_id}.raw"

    def unfinished_snapshot(self, snapshot_id: str) -> Path:
        """The disk of a snapshot that is being written; its name is one that goes with a killed server."""
        return self.snapshots / f".{snapshot_id}.raw.ebs.partial"

    def volume(self, volume_id: str) -> Path:
        """The disk of a volume."""
        return self.volumes / f"{volume_id}.raw"

    @property
    def key_file(self) -> Path:
        """Holds the access key."""
        return self.root / "access-key"

    @property
    def access_key(self) -> str:
        """The access key id that the server asks for; only who can read this folder knows it.

        Raises:
            UnavailableError: Its file is damaged: an empty key would let everybody in.
        """
        try:
            key = self.key_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            key = str(error)
        if not ACCESS_KEY.fullmatch(key):
            raise UnavailableError(
                f"{self.key_file} holds no access key",
                hint="a server that runs writes it again within seconds, the next start makes a new one",
            )
        return key

    def identity(self) -> dict[str, int] | None:
        """Which folder this cloud's is, whatever leads to it; a copy is another. None when there is none."""
        try:
            found = self.root.stat()
        except OSError:
            return None
        return {"device": found.st_dev, "inode": found.st_ino}

    def create(self) -> None:
        """Make every folder, readable by nobody else: disks hold whatever a user data script wrote."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        if not self.key_file.exists():
            self.new_access_key()
        for folder in (self.regions, self.snapshots, self.volumes, self.machines, self.bases):
            folder.mkdir(parents=True, exist_ok=True)

    def new_access_key(self) -> None:
        """Make another access key; nobody who knows the old one gets in."""
        write_whole(self.key_file, f"embedded{secrets.token_hex(8)}")


def read_endpoint(layout: Layout) -> dict[str, Any]:
    """What the last server wrote of itself: url, port, and the folder it served; empty where unreadable."""
    try:
        found = parse_json(layout.endpoint.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("url"), str) else {}


def set_aside(path: Path) -> Path:
    """Rename what is damaged, so that another can take its name and somebody can look at it."""
    aside = path.with_name(f"{path.name}{DAMAGED}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
    path.rename(aside)
    return aside


def write_in_place(path: Path, text: str) -> None:
    """Write a file whole where a damaged one may be; that one is set aside."""
    if path.is_symlink() or path.exists():
        set_aside(path)
    write_whole(path, text)
