"""The state of a machine's leases: one SQLite file, and files whose locks show that a job is alive.

    STATE/leases.db       the leases, the queue and the ledger
    STATE/alive/L-42      the lifeline of lease L-42: its job holds the lock (flock); the text is the lease
    again STATE/devices/UUID    the guard of a device: its job holds the lock, exclusive or shared

The job inherits the descriptor of its locks, so they last as long as any process of the job, whatever other
process is killed. Deadlines are times of the boot clock, which nobody can set; another boot ends every lease.

Only the owner can read the folder, on a node root: members of the group `gpu` ask `gpukiln.gpus.service`
(docs/gpus.md, "Who may do what").
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import grp
import json
import math
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.errors import BusyError, GpukilnError, RefusedError, UnavailableError
from gpukiln.gpus.processes import start_ticks

FOLDER = "/var/lib/gpukiln/gpus"
ENVIRONMENT = "GPUKILN_GPUS_STATE"  # another folder, for tests and for users without permission on this one
GROUP = "gpu"
MAX_DATABASE_BYTES = 256 << 20  # of a database that is copied; 64 MiB have a million rows of the ledger
VERSION = 1  # of TABLES, in SQLite's user_version
LEDGER = (
    "lease, user, project, device, model, share, started_at, ended_at, seconds, energy_joules, usd, price, "
    "ended_by"
)
LOCK_TIMEOUT_S = 20.0  # for which a transaction waits for other writers
# A new random UUID at each boot (random(4)).
BOOT_ID = "/proc/sys/kernel/random/boot_id"
REBUILD_HINT = "run `gpukiln-gpu leases --rebuild`: it replaces the file, with the leases of the locked files"
TABLES = """
create table leases (
    id integer primary key autoincrement, user text not null, uid integer not null, project text not null,
    mode text not null, kind text not null, memory_mib integer, pid integer not null, ticks integer,
    boot_id text not null, job_pid integer, job_ticks integer, command text not null, engine text,
    container text, machine_gpus integer not null, granted_at text not null, granted_boot real not null,
    expires_boot real, heartbeat_s real, beat_boot real
);
create table held (
    lease integer not null references leases(id) on delete cascade, device text not null,
    model text not null, parent text, memory_mib integer, share real not null, energy_joules real,
    primary key (lease, device)
);
create table tickets (
    id integer primary key autoincrement, user text not null, uid integer not null, pid integer not null,
    ticks integer, boot_id text not null, devices text not null, count integer not null,
    turn integer not null, at text not null
);
create table ledger (
    id integer primary key autoincrement, lease integer not null, user text not null,
    project text not null, device text not null, model text not null, share real not null,
    started_at text not null, ended_at text not null, seconds real not null, energy_joules real,
    usd real, price text, ended_by text not null
);
"""


@dataclass(frozen=True)
class LeasedDevice:
    """A device of a lease.

    Args:
        device: UUID.
        model: Its name.
        parent: Of a MIG device its GPU's UUID.
        memory_mib: Budget of a shared lease.
        share: The accounted share of the GPU, 1 for all of it.
        energy_joules: Its energy counter at the time of the grant.
    """

    device: str
    model: str
    parent: str | None
    memory_mib: int | None
    share: float
    energy_joules: float | None


@dataclass(frozen=True)
class Lease:
    """A lease of devices to a user.

    Args:
        number: Of its id, L-NUMBER.
        mode: exclusive or shared.
        kind: job: until the job ends; detached: until its deadline, or until it is not renewed; container:
            until its container ends.
        pid: Of the process that requested it.
        ticks: When that process started, in clock ticks since the boot.
        job_pid: Of the process that runs under it.
        engine: docker or podman, for a container.
        container: Id of a container that ran before its lease; other containers have the lease in a label.
        machine_gpus: Number of the machine's GPUs, by which its price is divided.
        granted_at: RFC 3339, UTC.
        granted_boot: The same on the boot clock, like every field that ends in _boot.
        expires_boot: The deadline.
        heartbeat_s: It ends when it is not renewed within these seconds.
        beat_boot: Time of the last renewal.
    """

    number: int
    user: str
    uid: int
    project: str
    mode: str
    kind: str
    memory_mib: int | None
    pid: int
    ticks: int | None
    boot_id: str
    job_pid: int | None
    job_ticks: int | None
    command: str
    engine: str | None
    container: str | None
    machine_gpus: int
    granted_at: str
    granted_boot: float
    expires_boot: float | None
    heartbeat_s: float | None
    beat_boot: float | None
    devices: tuple[LeasedDevice, ...] = ()

    @property
    def id(self) -> str:
        """Its id, L-NUMBER."""
        return f"L-{self.number}"

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of its devices."""
        return tuple(device.device for device in self.devices)

    @property
    def ends_boot(self) -> float | None:
        """When it ends without a renewal; None for no end."""
        beat = None
        if self.heartbeat_s is not None:
            beat = (self.beat_boot or self.granted_boot) + self.heartbeat_s
        ends = [end for end in (self.expires_boot, beat) if end is not None]
        return min(ends) if ends else None


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Device and inode of a path or a descriptor; None where there is no file."""
    try:
        seen = os.fstat(file) if isinstance(file, int) else file.lstat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path(BOOT_ID).read_text(encoding="ascii").strip()


def boot_clock() -> float:
    """Seconds since the machine's start, sleep included; nobody can set this clock (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def folder() -> Path:
    """The folder of the state."""
    return Path(os.environ.get(ENVIRONMENT) or FOLDER)


def number_of(lease: str) -> int | None:
    """The number in a lease's id; None where the text is not an id.

    >>> number_of("L-42"), number_of("42")
    (42, 42)
    >>> number_of("GPU-1")
    """
    digits = lease[2:] if lease.upper().startswith("L-") else lease
    return int(digits) if digits.isdecimal() else None


class LeaseStore:
    """The state of a machine's leases.

    Args:
        path: The folder; created where it is missing.

    Raises:
        RefusedError: This user has no permission.
        UnavailableError: It can't be read; the hint is the next step.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or folder()
        self.file = self.path / "leases.db"
        with self._translate_errors():
            self._folders = self._open_folders()
            with self._opening():
                before = _identity(self.file)
                # isolation_level None: the module begins no transactions of its own, `change` does.
                self.db = sqlite3.connect(self.file, timeout=LOCK_TIMEOUT_S, isolation_level=None)
                self.db.row_factory = sqlite3.Row
                version = self.db.execute("pragma user_version").fetchone()[0]
                # An older program could misread rows of a newer one and grant a GPU twice.
                if version > VERSION:
                    raise UnavailableError(
                        f"{self.file} has version {version}, this gpukiln knows {VERSION}: "
                        "a newer one wrote it",
                        hint="use the newer gpukiln-gpu",
                    )
                # In WAL mode this can lose the last commits in a power failure, never the database
                # (sqlite.org/pragma.html); another boot ends every lease anyway.
                self.db.execute("pragma synchronous = normal")
                self.db.execute("pragma foreign_keys = on")
                if version == 0:
                    self._make_tables()
        self._opened = before if before == _identity(self.file) else None

    def is_current(self) -> bool:
        """Whether the path still leads to the open files: `leases --rebuild` replaces them."""
        return (
            self._opened is not None
            and self._opened == _identity(self.file)
            and all(
                _identity(self.path / name) == _identity(number) for name, number in self._folders.items()
            )
        )

    def _open_folders(self) -> dict[str, int]:
        """Descriptors of the folder and of its subfolders, which are created where they are missing."""
        # sqlite3.connect() follows links and creates files: folders and files are checked before.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        top = _open_folder(self.path, None)
        folders = {"": top}
        try:
            taken_over = _restrict_to_owner(top, self.path)
            for name in ("alive", "devices"):
                _make_folder(top, name)
                folders[name] = _open_folder(Path(name), top)
                taken_over |= _restrict_to_owner(folders[name], self.path / name)
            if taken_over:
                _take_over(folders)
            for name in ("leases.db", "leases.db-wal", "leases.db-shm"):
                _check_plain(top, name, self.path)
        except BaseException:
            _close(folders.values())
            raise
        return folders

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Keep other processes from opening the database."""
        # SQLite does not use its timeout where waiting could deadlock: of two processes that change a new
        # database to WAL, or recover one from a process that was killed there, it refuses one at once
        # (sqlite.org/c3ref/busy_handler.html).
        if not _lock(self._folders[""], fcntl.LOCK_EX, LOCK_TIMEOUT_S):
            raise self._locked_error()
        try:
            yield
        finally:
            fcntl.flock(self._folders[""], fcntl.LOCK_UN)

    def _make_tables(self) -> None:
        # Readers do not wait for writers.
        self.db.execute("pragma journal_mode = wal")
        with self.change():
            for statement in TABLES.split(";"):
                self.db.execute(statement)
            self.db.execute(f"pragma user_version = {VERSION}")

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of SQLite and of files into errors with found, wanted and next step."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._database_error(error) from error
        except PermissionError as error:
            raise self._permission_error() from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._disk_full_error() from error
            raise UnavailableError(f"{error.filename or self.path}: {error.strerror}") from error

    def _database_error(self, error: sqlite3.Error) -> GpukilnError:
        text = str(error)
        if "locked" in text:
            return self._locked_error()
        if "full" in text or "disk I/O" in text:
            return self._disk_full_error()
        if "readonly" in text or "unable to open" in text:
            return self._permission_error()
        return UnavailableError(f"{self.file} can't be read: {text}", hint=REBUILD_HINT)

    def _locked_error(self) -> BusyError:
        return BusyError(
            f"other processes locked {self.file} for {LOCK_TIMEOUT_S:.0f} s",
            hint="try again; `fuser` lists the processes that have it open",
        )

    def _disk_full_error(self) -> UnavailableError:
        return UnavailableError(
            f"the file system of {self.path} is full: nothing was changed",
            hint="free space there (df), then try again",
        )

    def _permission_error(self) -> RefusedError:
        try:
            group = grp.getgrgid(self.path.stat().st_gid).gr_name
            hint = f"run `usermod -aG {group} USER` as root, then log in again"
            return RefusedError(
                f"only root and the group {group} have permission to lease this machine's GPUs", hint=hint
            )
        except (OSError, KeyError):
            return RefusedError(
                f"{self.path} is missing, and this user can't create it",
                hint="apply the role gpu_tools, or run the command as root once",
            )

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """A write transaction: all of its changes are stored, or none."""
        with self._translate_errors():
            # Takes the write lock before the first read: two grants can't read the same free GPU, and a
            # process that is killed here has changed nothing.
            self.db.execute("begin immediate")
            try:
                yield
                self.db.execute("commit")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # some errors have ended the transaction already
                    self.db.execute("rollback")
                raise

    def close(self) -> None:
        """Close the files."""
        self.db.close()
        _close(self._folders.values())
        self._folders = {}

    def leases(self) -> list[Lease]:
        """All stored leases, including ended ones that are not yet removed."""
        with self._translate_errors():
            rows = self.db.execute(
                "select leases.*, held.*, leases.memory_mib as budget from leases "
                "join held on held.lease = leases.id order by leases.id, held.rowid"
            ).fetchall()
        by_number: dict[int, Lease] = {}
        for row in rows:
            held = LeasedDevice(**{name: row[name] for name in _LEASED_DEVICE_FIELDS})
            before = by_number.get(row["id"])
            if before is None:
                values = {**{name: row[name] for name in _LEASE_FIELDS}, "memory_mib": row["budget"]}
                before = Lease(number=row["id"], **values)
            by_number[row["id"]] = dataclasses.replace(before, devices=(*before.devices, held))
        for lease in by_number.values():
            if wrong := wrong_field(lease):
                raise UnavailableError(f"{self.file}: {lease.id} has {wrong}", hint=REBUILD_HINT)
        return list(by_number.values())

    def add(self, lease: Lease) -> Lease:
        """Store a lease, within a transaction; returns it with its number, a new one for 0."""
        data = dataclasses.asdict(lease)
        data.pop("devices")
        number = data.pop("number")
        if number:
            data["id"] = number
        names = ", ".join(data)
        done = self.db.execute(
            f"insert into leases ({names}) values ({', '.join('?' * len(data))})",  # noqa: S608 - names of fields
            tuple(data.values()),
        )
        added = dataclasses.replace(lease, number=int(done.lastrowid or 0))
        for device in lease.devices:
            self.db.execute(
                "insert into held values (?, ?, ?, ?, ?, ?, ?)", (added.number, *dataclasses.astuple(device))
            )
        return added

    def update(self, number: int, **values: Any) -> None:
        """Change fields of a lease, within a transaction."""
        names = ", ".join(f"{name} = ?" for name in values)
        self.db.execute(f"update leases set {names} where id = ?", (*values.values(), number))  # noqa: S608

    def account(self, uses: Sequence[tuple[Any, ...]]) -> None:
        """Append to the ledger, within a transaction.

        Args:
            uses: Rows with the columns of LEDGER.
        """
        for use in uses:
            self.db.execute(
                f"insert into ledger ({LEDGER}) values ({', '.join('?' * len(use))})",  # noqa: S608 - names of columns
                use,
            )

    def remove(self, lease: Lease, uses: Sequence[tuple[Any, ...]]) -> None:
        """Remove a lease and append its uses to the ledger, within a transaction (see `account`)."""
        self.account(uses)
        self.db.execute("delete from held where lease = ?", (lease.number,))
        self.db.execute("delete from leases where id = ?", (lease.number,))

    def lifeline(self, lease: Lease) -> Path:
        """The file whose lock shows that a lease's job is alive."""
        return self.path / "alive" / lease.id

    def guard(self, device: str) -> Path:
        """The file whose lock protects a device."""
        return self.path / "devices" / device

    def open_locked(self, path: Path, how: int, *, patience_s: float = 0.0) -> int | None:
        """A descriptor that holds the lock of a file; None where another process has it.

        Args:
            how: fcntl.LOCK_EX or LOCK_SH.
            patience_s: How long to retry: `is_locked` of another process holds the lock for a moment.
        """
        number = self._open(path, os.O_RDWR | os.O_CREAT)
        locked = False
        try:
            locked = _lock(number, how, patience_s)
        finally:
            if not locked:
                os.close(number)
        return number if locked else None

    def is_locked(self, path: Path) -> bool:
        """Whether a process holds the lock of a file."""
        try:
            number = self._open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(number)
        return False

    def write(self, lease: Lease) -> None:
        """Write a lease into its lifeline, for `leases --rebuild`."""
        number = self._open(self.lifeline(lease), os.O_WRONLY | os.O_CREAT)
        # Truncated here, not with O_TRUNC: the file is checked to be regular before it changes.
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.truncate()
            file.write(lifeline_text(lease))

    def lifelines(self) -> list[Path]:
        """The paths of all lifelines."""
        return [self.path / "alive" / name for name in _names(self._folders["alive"])]

    def read(self, path: Path) -> str:
        """The text of a lifeline; OSError where it is not a regular file."""
        with os.fdopen(self._open(path, os.O_RDONLY), encoding="utf-8") as file:
            return file.read(1 << 20)

    def forget(self, path: Path) -> None:
        """Remove a lifeline."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=self._folders[path.parent.name])

    def _open(self, path: Path, flags: int) -> int:
        """A descriptor of a regular file of the state."""
        return _open_plain(self._folders[path.parent.name], path.name, flags)

    def end_reason(self, lease: Lease, *, proc: str = "/proc") -> str | None:
        """Why a lease has ended: reboot, expired or gone; None for an active lease.

        Of a container only its engine knows whether it runs (`gpukiln.gpus.engines`).
        """
        # PIDs, start times and the boot clock of another boot mean nothing in this one.
        if lease.boot_id != boot_id():
            return "reboot"
        ends = lease.ends_boot
        # A job or a container outlives its deadline until its signal ends it: its GPUs are not free before.
        if ends is not None and ends <= boot_clock() and lease.kind == "detached":
            return "expired"
        if lease.kind != "job" or self.is_locked(self.lifeline(lease)):
            return None
        # A job may close the descriptors that it inherited, as daemons do: its processes keep the lease too.
        for pid, ticks in ((lease.pid, lease.ticks), (lease.job_pid, lease.job_ticks)):
            if pid is not None and ticks is not None and start_ticks(pid, proc) == ticks:
                return None
        return "gone"

    def ledger(self) -> list[dict[str, Any]]:
        """The ended uses, the oldest first."""
        with self._translate_errors():
            return [dict(row) for row in self.db.execute("select * from ledger order by id")]


def _lock(number: int, how: int, patience_s: float) -> bool:
    """Lock an open file or folder; False where another process still has the lock after `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        try:
            # flock(2), not fcntl(2): the lock belongs to the open file, so a child that inherits the
            # descriptor keeps it.
            fcntl.flock(number, how | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() >= until:
            return False
        time.sleep(0.005)


def _open_folder(path: Path, above: int | None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)


def _make_folder(above: int, name: str) -> None:
    """Create a folder; anything else of that name is renamed."""
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            os.rename(name, f"{name}.strange-{time.time_ns()}", src_dir_fd=above, dst_dir_fd=above)
            os.mkdir(name, 0o700, dir_fd=above)


def _restrict_to_owner(number: int, path: Path) -> bool:
    """Restrict a folder to its owner; returns whether other users could write into it before.

    Raises:
        RefusedError: The folder belongs to another user.
    """
    seen = os.fstat(number)
    if seen.st_uid != os.geteuid():
        raise RefusedError(
            f"{path} belongs to the user {seen.st_uid}, wanted {os.geteuid()}",
            hint=f"move it away: mv {path} {path}.old",
        )
    if stat.S_IMODE(seen.st_mode) == 0o700 and seen.st_gid == os.getegid():
        return False
    os.fchown(number, -1, os.getegid())
    os.fchmod(number, 0o700)
    return bool(stat.S_IMODE(seen.st_mode) & 0o022)


def _take_over(folders: dict[str, int]) -> None:
    """Secure a folder that other users could write into, as the group could until version 0.2."""
    # Lock files stay, for jobs hold their locks. The database is copied: another user may still have it open.
    top = folders[""]
    for place, number in folders.items():
        for name in _names(number):
            if place == "" and name in folders:
                continue
            if not _is_plain(number, name):
                os.rename(name, f"{name}.strange-{time.time_ns()}", src_dir_fd=number, dst_dir_fd=number)
    with contextlib.suppress(FileNotFoundError):
        os.unlink("leases.db-shm", dir_fd=top)  # SQLite rebuilds it from the other two
    for name in ("leases.db", "leases.db-wal"):
        with contextlib.suppress(FileNotFoundError):
            with os.fdopen(_open_plain(top, name, os.O_RDONLY), "rb") as file:
                content = file.read(MAX_DATABASE_BYTES)
            fresh = f"{name}.new-{time.time_ns()}"
            with os.fdopen(_open_plain(top, fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(content)
            os.rename(fresh, name, src_dir_fd=top, dst_dir_fd=top)


def _names(folder: int) -> list[str]:
    return sorted(os.listdir(folder))


def _is_plain(folder: int, name: str) -> bool:
    seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1


def _check_plain(folder: int, name: str, path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not _is_plain(folder, name):
            raise UnavailableError(f"{path / name} is not a regular file", hint=REBUILD_HINT)


def _open_plain(folder: int, name: str, flags: int) -> int:
    """A descriptor of a regular file in a folder.

    Raises:
        OSError: It is a link, a FIFO, or another kind of file.
    """
    # Root opens what a user may have put there: NOFOLLOW refuses a link to any file of root's, NONBLOCK does
    # not wait for the other end of a FIFO, and a second hard link is refused below.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(name, flags, 0o600, dir_fd=folder)
    seen = os.fstat(number)
    if not stat.S_ISREG(seen.st_mode) or seen.st_nlink > 1:
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return number


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)


def set_aside(path: Path) -> list[Path]:
    """Rename the files of a database.

    Args:
        path: The folder of the state.

    Returns:
        The new paths.
    """
    moved = []
    for end in ("", "-wal", "-shm"):
        old = path / f"leases.db{end}"
        if os.path.lexists(old):
            new = old.with_name(f"{old.name}.broken-{int(time.time())}")
            old.rename(new)
            moved.append(new)
    return moved


_LEASED_DEVICE_FIELDS = tuple(field.name for field in dataclasses.fields(LeasedDevice))
_LEASE_FIELDS = tuple(
    field.name for field in dataclasses.fields(Lease) if field.name not in ("number", "devices")
)


def read_lifelines(path: Path) -> list[Lease]:
    """The leases in the lifelines of a state; changes nothing.

    Args:
        path: The folder of the state, whose database may be broken.
    """
    leases = []
    folders: list[int] = []
    try:
        folders.append(_open_folder(path, None))
        _restrict_to_owner(folders[0], path)
        folders.append(_open_folder(Path("alive"), folders[0]))
        for name in _names(folders[1]):
            with contextlib.suppress(ValueError, OSError):  # incomplete, of a grant that was killed
                with os.fdopen(_open_plain(folders[1], name, os.O_RDONLY), encoding="utf-8") as file:
                    owner = os.fstat(file.fileno()).st_uid
                    lease = read_lifeline(file.read(1 << 20))
                # A file that another user has put there must not become a lease.
                if lease.id == name and owner in (0, os.geteuid(), lease.uid):
                    leases.append(lease)
    except FileNotFoundError:
        pass  # no lease was ever granted
    finally:
        _close(folders)
    return leases


def read_ledger(path: Path) -> list[tuple[Any, ...]]:
    """The readable rows of the ledger of a database that may be broken; changes nothing."""
    with contextlib.suppress(sqlite3.Error, OSError):
        # Read-only: opening a broken database for writing could change it.
        db = sqlite3.connect(f"file:{path / 'leases.db'}?mode=ro", uri=True)
        with contextlib.closing(db):
            return db.execute(f"select {LEDGER} from ledger order by id").fetchall()  # noqa: S608 - names of columns
    return []


def lifeline_text(lease: Lease) -> str:
    """The text of a lease's lifeline."""
    return json.dumps(dataclasses.asdict(lease)) + "\n"


def read_lifeline(text: str) -> Lease:
    """The lease in the text of a lifeline.

    Raises:
        ValueError: The text is not a lease.
    """
    try:
        data = json.loads(text)
        devices = tuple(LeasedDevice(**device) for device in data.pop("devices"))
        lease = Lease(**data, devices=devices)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if wrong := wrong_field(lease):
        raise ValueError(wrong)
    return lease


def wrong_field(record: Lease | LeasedDevice) -> str:
    """The first field of a lease with a value of a wrong type; empty for none."""
    for field in dataclasses.fields(record):
        value, kind = getattr(record, field.name), str(field.type)
        if field.name == "devices":
            if wrong := next((text for part in value if (text := wrong_field(part))), ""):
                return wrong
            continue
        if value is None:
            fits = "None" in kind
        elif "str" in kind:
            fits = isinstance(value, str)
        elif "float" in kind:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        else:
            fits = isinstance(value, int) and not isinstance(value, bool)
        if not fits:
            return f"{field.name} {str(value)[:40]!r}"
    return ""
