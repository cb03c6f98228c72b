"""The paths of the embedded cloud's files."""

import re
import secrets
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.errors import UnavailableError
from gpukiln.files import write_atomic
from gpukiln.parsing import parse_json
from gpukiln.state import state_home

DAMAGED = ".damaged-"  # in the names of damaged files that were set aside
LOCK_PROBE_S = 0.2  # seconds; a probe of the lock takes a small part of it
# Of 127.0.0.0/8: away from 127.0.0.x, which programs of this computer use.
FIRST_NETWORK, NETWORKS = 64, 180
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

    def vpc_cidr(self, region: str) -> str:
        """The address range of a region's default VPC, in loopback; each cloud on this computer has others.

        Args:
            region: Name of the region.

        Returns:
            A /16 network.
        """
        return f"127.{FIRST_NETWORK + zlib.crc32(f'{self.home}:{region}'.encode()) % NETWORKS}.0.0/16"

    @property
    def endpoint(self) -> Path:
        """URL and port of the running server."""
        return self.root / "endpoint.json"

    @property
    def server_lock(self) -> Path:
        """The server holds it while it runs; a probe holds it for a moment: wait `LOCK_PROBE_S` for it."""
        return self.root / "server.lock"

    @property
    def server_log(self) -> Path:
        return self.root / "server.log"

    @property
    def regions(self) -> Path:
        """One JSON file for each region: images, snapshots, tags, parameters."""
        return self.root / "regions"

    @property
    def snapshots(self) -> Path:
        """One sparse raw disk for each snapshot."""
        return self.root / "snapshots"

    @property
    def volumes(self) -> Path:
        """One sparse raw disk for each volume, with its description as JSON."""
        return self.root / "volumes"

    @property
    def machines(self) -> Path:
        """One folder for each instance, while it exists."""
        return self.root / "machines"

    @property
    def bases(self) -> Path:
        """Logs, lock and generation of base images; their disks are snapshots."""
        return self.root / "bases"

    @property
    def scarcity(self) -> Path:
        """The scripted shortages of capacity; missing where there are none."""
        return self.root / "scarcity.json"

    @property
    def registry(self) -> Path:
        """Container images: blobs by digest, and unfinished uploads."""
        return self.root / "registry"

    @property
    def cluster(self) -> Path:
        """The files of the Kubernetes cluster of this computer, while it runs."""
        return self.root / "cluster"

    @property
    def kubernetes(self) -> Path:
        """Programs of Kubernetes that were downloaded."""
        return self.root / "kubernetes"

    @property
    def doubles(self) -> Path:
        """Compiled libraries and programs of simulated GPUs."""
        return self.root / "doubles"

    def snapshot(self, snapshot_id: str) -> Path:
        """The disk of a snapshot."""
        return self.snapshots / f"{snapshot_id}.raw"

    def unfinished_snapshot(self, snapshot_id: str) -> Path:
        """The disk of a snapshot that is being written; the next server removes files with such a name."""
        return self.snapshots / f".{snapshot_id}.raw.ebs.partial"

    def volume(self, volume_id: str) -> Path:
        """The disk of a volume."""
        return self.volumes / f"{volume_id}.raw"

    @property
    def key_file(self) -> Path:
        """The file with the access key."""
        return self.root / "access-key"

    @property
    def access_key(self) -> str:
        """The access key id that the server requires; only users who can read this folder have it.

        Raises:
            UnavailableError: Its file is damaged.
        """
        try:
            key = self.key_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            key = str(error)
        # An empty or truncated key must not become one that anybody can guess.
        if not ACCESS_KEY.fullmatch(key):
            raise UnavailableError(
                f"{self.key_file} has no access key",
                hint="a running server writes it again within seconds; else the next start creates a new key",
            )
        return key

    def identity(self) -> dict[str, int] | None:
        """Device and inode of this cloud's folder, by which a copy is another cloud. None: no folder."""
        try:
            status = self.root.stat()
        except OSError:
            return None
        return {"device": status.st_dev, "inode": status.st_ino}

    def create(self) -> None:
        """Create all folders, for the owner alone: disks have whatever a user data script wrote."""
        self.root.mkdir(parents=True, exist_ok=True)
        # Also for a folder that exists with other permissions.
        self.root.chmod(0o700)
        if not self.key_file.exists():
            self.new_access_key()
        for folder in (self.regions, self.snapshots, self.volumes, self.machines, self.bases):
            folder.mkdir(parents=True, exist_ok=True)

    def new_access_key(self) -> None:
        """Create a new access key; the old one is no longer valid."""
        write_atomic(self.key_file, f"embedded{secrets.token_hex(8)}")


def read_endpoint(layout: Layout) -> dict[str, Any]:
    """URL, port and folder of the last server, as it wrote them; empty where the file is unreadable."""
    try:
        document = parse_json(layout.endpoint.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) and isinstance(document.get("url"), str) else {}


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that a new one can have its name and the old one can be inspected."""
    aside = path.with_name(f"{path.name}{DAMAGED}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
    path.rename(aside)
    return aside


def write_in_place(path: Path, text: str) -> None:
    """Write a file atomically; an existing damaged one is set aside."""
    if path.is_symlink() or path.exists():
        set_aside(path)
    write_atomic(path, text)
