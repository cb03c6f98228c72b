"""Where the embedded cloud keeps what outlives its process."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path


def state_home() -> Path:
    """The folder for everything that outlives a command: disks, records, logs.

    Returns:
        `$GPUKILN_HOME`, or /var/lib/gpukiln for root, or ~/.local/state/gpukiln.
    """
    if home := os.environ.get("GPUKILN_HOME"):
        return Path(home).expanduser().absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/gpukiln")
    return Path.home() / ".local/state/gpukiln"


@dataclass(frozen=True)
class Layout:
    """The files of one embedded cloud.

    Args:
        home: The state folder, see `state_home`.
    """

    home: Path

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
        """Held by the server as long as it lives."""
        return self.root / "server.lock"

    @property
    def server_log(self) -> Path:
        """What the server logs."""
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
    def registry(self) -> Path:
        """Container images: blobs by their digest, uploads that are not finished."""
        return self.root / "registry"

    def snapshot(self, snapshot_id: str) -> Path:
        """The disk of a snapshot."""
        return self.snapshots / f"{snapshot_id}.raw"

    def volume(self, volume_id: str) -> Path:
        """The disk of a volume."""
        return self.volumes / f"{volume_id}.raw"

    @property
    def access_key(self) -> str:
        """The access key id that the server asks for; only who can read this folder knows it."""
        return (self.root / "access-key").read_text()

    def create(self) -> None:
        """Make every folder, readable by nobody else: disks hold whatever a user data script wrote."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        key = self.root / "access-key"
        if not key.exists():
            partial = key.with_suffix(f".{os.getpid()}")
            partial.write_text(f"embedded{secrets.token_hex(8)}")
            partial.replace(key)
        for folder in (self.regions, self.snapshots, self.volumes, self.machines, self.bases):
            folder.mkdir(parents=True, exist_ok=True)
