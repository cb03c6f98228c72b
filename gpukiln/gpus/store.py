"""Where a machine keeps who has which GPU: one SQLite file, and files whose locks say that a job lives.

    STATE/leases.db       the leases, the queue and the ledger
    STATE/alive/L-42      locked (flock) by whatever runs under lease L-42; its text is the lease once more
    STATE/devices/UUID    locked by whoever has the GPU: alone, or with others that share it

The lock's descriptor is inherited by the job, so it lasts as long as anything of the job does, whoever else
was killed. What changes is one transaction that begins with the write lock (BEGIN IMMEDIATE), so a process
that is killed in it has changed nothing. Times that decide are of the clock that counts from the machine's
start and never jumps; another boot ends every lease.

The folder is its owner's alone, root's on a node: members of the group `gpu` ask `gpukiln.gpus.service`
(docs/gpus.md, "Who may do what"). Every file is opened below a descriptor of its folder, follows no link,
and is used only where it is a plain file.
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
ENVIRONMENT = "GPUKILN_GPUS_STATE"  # another folder, for tests and for who has no rights on this one
GROUP = "gpu"
MAX_DATABASE_BYTES = 256 << 20  # of a database that is taken over; 64 MiB are a million rows of the ledger
VERSION = 1
LEDGER = (
    "lease, user, project, device, model, share, started_at, ended_at, seconds, energy_joules, usd, price, "
    "ended_by"
)
LOCK_TIMEOUT_S = 20.0  # for which a writer waits for others
BOOT_ID = "/proc/sys/kernel/random/boot_id"
REBUILD_HINT = "`gpukiln-gpu leases --rebuild` sets it aside and makes it anew from what holds the locks"
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
        memory_mib: What a shared lease may use of it.
        share: The part of the GPU that is accounted, 1 for all of it.
        energy_joules: What its counter said when it was granted.
    """

    device: str
    model: str
    parent: str | None
    memory_mib: int | None
    share: float
    energy_joules: float | None


@dataclass(frozen=True)
class Lease:
    """Who has which GPUs.

    Args:
        number: Of its id, L-NUMBER.
        mode: exclusive or shared.
        kind: job: as long as the job; detached: until its deadline, or until nobody renews it; container: as
            long as its container.
        pid: Of who asked.
        ticks: When that process started, in clock ticks since the boot.
        job_pid: Of what runs under it.
        engine: docker or podman, whose container it is.
        container: The engine's id of one that ran before there was a lease for it; others have a label.
        machine_gpus: How many the machine has, of whose price this is a part.
        granted_at: RFC 3339, UTC.
        granted_boot: The same in seconds since the machine's start, as all that ends in _boot.
        expires_boot: When it ends whatever happens.
        heartbeat_s: Within which it must be renewed again.
        beat_boot: When it was last.
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
        """How it is named."""
        return f"L-{self.number}"

    @property
    def uuids(self) -> tuple[str, ...]:
        """Its devices."""
        return tuple(device.device for device in self.devices)

    @property
    def ends_boot(self) -> float | None:
        """When it ends unless somebody renews it."""
        beat = None
        if self.heartbeat_s is not None:
            beat = (self.beat_boot or self.granted_boot) + self.heartbeat_s
        ends = [end for end in (self.expires_boot, beat) if end is not None]
        return min(ends) if ends else None


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Device and inode of a file, or of what a descriptor is of; None where there is none."""
    try:
        seen = os.fstat(file) if isinstance(file, int) else file.lstat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def boot_id() -> str:
    """Names this boot of the machine."""
    return Path(BOOT_ID).read_text(encoding="ascii").strip()


def boot_clock() -> float:
    """Seconds since the machine's start, sleep included; never set, never jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def folder() -> Path:
    """Where the state is."""
    return Path(os.environ.get(ENVIRONMENT) or FOLDER)


def number_of(lease: str) -> int | None:
    """The number in a lease's id."""
    digits = lease[2:] if lease.upper().startswith("L-") else lease
    return int(digits) if digits.isdecimal() else None


class LeaseStore:
    """The state of a machine's leases.

    Args:
        path: The folder; made where it is missing and this user may.

    Raises:
        RefusedError: This user may not use it.
        UnavailableError: It can't be read; says how to go on.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or folder()
        self.file = self.path / "leases.db"
        with self._translate_errors():
            self._folders = self._open_folders()
            before = _identity(self.file)
            self.db = sqlite3.connect(self.file, timeout=LOCK_TIMEOUT_S, isolation_level=None)
            self.db.row_factory = sqlite3.Row
            version = self.db.execute("pragma user_version").fetchone()[0]
            if version > VERSION:
                raise UnavailableError(
                    f"{self.file} has version {version}, this gpukiln knows {VERSION}: a newer one wrote it",
                    hint="use the newer gpukiln-gpu",
                )
            self.db.execute("pragma synchronous = normal")
            self.db.execute("pragma foreign_keys = on")
            if version == 0:
                self._make_tables()
        self._opened = before if before == _identity(self.file) else None

    def is_current(self) -> bool:
        """Whether its path still leads to the files that are open: `leases --rebuild` makes others."""
        return (
            self._opened is not None
            and self._opened == _identity(self.file)
            and all(
                _identity(self.path / name) == _identity(number) for name, number in self._folders.items()
            )
        )

    def _open_folders(self) -> dict[str, int]:
        """Descriptors of the folder and of those below it, made where they are missing."""
        # connect() follows a link and makes a file: it gets neither to see.
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

    def _make_tables(self) -> None:
        self.db.execute("pragma journal_mode = wal")
        with self.change():
            if self.db.execute("pragma user_version").fetchone()[0] == 0:
                for statement in TABLES.split(";"):
                    self.db.execute(statement)
                self.db.execute(f"pragma user_version = {VERSION}")

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """What goes wrong below, in words."""
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
            return BusyError(
                f"{self.file} was locked for {LOCK_TIMEOUT_S:.0f} s by others",
                hint="try again; `fuser` names who has it open",
            )
        if "full" in text or "disk I/O" in text:
            return self._disk_full_error()
        if "readonly" in text or "unable to open" in text:
            return self._permission_error()
        return UnavailableError(f"{self.file} can't be read: {text}", hint=REBUILD_HINT)

    def _disk_full_error(self) -> UnavailableError:
        return UnavailableError(
            f"{self.path} has no room left: nothing was changed", hint="make room there (df), then try again"
        )

    def _permission_error(self) -> RefusedError:
        try:
            group = grp.getgrgid(self.path.stat().st_gid).gr_name
            hint = f"become a member: `usermod -aG {group} USER` as root, then log in again"
            return RefusedError(f"only root and the group {group} may lease this machine's GPUs", hint=hint)
        except (OSError, KeyError):
            return RefusedError(
                f"{self.path} is missing, and this user can't make it",
                hint="the role gpu_tools makes it; or run as root once",
            )

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """A transaction that nobody else changes anything in; it is whole or it is not."""
        with self._translate_errors():
            self.db.execute("begin immediate")
            try:
                yield
                self.db.execute("commit")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # it ended by the error itself
                    self.db.execute("rollback")
                raise

    def close(self) -> None:
        """Close the files."""
        self.db.close()
        _close(self._folders.values())
        self._folders = {}

    def leases(self) -> list[Lease]:
        """All that are written down, those too that have ended and that nobody has found yet."""
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
        """Write a lease down, in a transaction; returns it with its number, if it had none."""
        data = dataclasses.asdict(lease)
        data.pop("devices")
        number = data.pop("number")
        if number:
            data["id"] = number
        names = ", ".join(data)
        done = self.db.execute(
            f"insert into leases ({names}) values ({', '.join('?' * len(data))})",  # noqa: S608 - our own names
            tuple(data.values()),
        )
        added = dataclasses.replace(lease, number=int(done.lastrowid or 0))
        for device in lease.devices:
            self.db.execute(
                "insert into held values (?, ?, ?, ?, ?, ?, ?)", (added.number, *dataclasses.astuple(device))
            )
        return added

    def update(self, number: int, **values: Any) -> None:
        """Change fields of a lease, in a transaction."""
        names = ", ".join(f"{name} = ?" for name in values)
        self.db.execute(f"update leases set {names} where id = ?", (*values.values(), number))  # noqa: S608

    def account(self, uses: Sequence[tuple[Any, ...]]) -> None:
        """Append to the ledger, in a transaction.

        Args:
            uses: Rows, in the order of LEDGER.
        """
        for use in uses:
            self.db.execute(
                f"insert into ledger ({LEDGER}) values ({', '.join('?' * len(use))})",  # noqa: S608 - our names
                use,
            )

    def remove(self, lease: Lease, uses: Sequence[tuple[Any, ...]]) -> None:
        """Take a lease out and append to the ledger, in a transaction; see `account`."""
        self.account(uses)
        self.db.execute("delete from held where lease = ?", (lease.number,))
        self.db.execute("delete from leases where id = ?", (lease.number,))

    def lifeline(self, lease: Lease) -> Path:
        """The file whose lock says that a lease's job lives."""
        return self.path / "alive" / lease.id

    def guard(self, device: str) -> Path:
        """The file whose lock has a device."""
        return self.path / "devices" / device

    def open_locked(self, path: Path, how: int, *, patience_s: float = 0.0) -> int | None:
        """A descriptor that holds the lock of a file, and is inherited; None where somebody else has it.

        Args:
            how: fcntl.LOCK_EX or LOCK_SH.
            patience_s: For how long to try again: `is_locked` holds a lock for a moment.
        """
        until = time.monotonic() + patience_s
        number = self._open(path, os.O_RDWR | os.O_CREAT)
        while True:
            try:
                fcntl.flock(number, how | fcntl.LOCK_NB)
                return number
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    os.close(number)
                    raise
            if time.monotonic() >= until:
                os.close(number)
                return None
            time.sleep(0.005)

    def is_locked(self, path: Path) -> bool:
        """Whether something holds the lock of a file."""
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
        """Write a lease into its lifeline, so that it is known without the database."""
        number = self._open(self.lifeline(lease), os.O_WRONLY | os.O_CREAT)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.truncate()
            file.write(lifeline_text(lease))

    def lifelines(self) -> list[Path]:
        """Every lifeline that there is, by its name."""
        return [self.path / "alive" / name for name in _names(self._folders["alive"])]

    def read(self, path: Path) -> str:
        """Text of a lifeline; OSError where it is none."""
        with os.fdopen(self._open(path, os.O_RDONLY), encoding="utf-8") as file:
            return file.read(1 << 20)

    def forget(self, path: Path) -> None:
        """Remove a lifeline."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=self._folders[path.parent.name])

    def _open(self, path: Path, flags: int) -> int:
        """A descriptor of a plain file of the state; waits for nothing, follows no link."""
        return _open_plain(self._folders[path.parent.name], path.name, flags)

    def end_reason(self, lease: Lease, *, proc: str = "/proc") -> str | None:
        """Why a lease has ended: reboot, expired, gone; None where it holds.

        A container's is never gone by this: its engine is asked (`gpukiln.gpus.engines`).
        """
        if lease.boot_id != boot_id():
            return "reboot"
        ends = lease.ends_boot
        if ends is not None and ends <= boot_clock() and lease.kind == "detached":
            return "expired"
        if lease.kind != "job" or self.is_locked(self.lifeline(lease)):
            return None
        for pid, ticks in ((lease.pid, lease.ticks), (lease.job_pid, lease.job_ticks)):
            if pid is not None and ticks is not None and start_ticks(pid, proc) == ticks:
                return None
        return "gone"

    def ledger(self) -> list[dict[str, Any]]:
        """Every use that has ended, the oldest first."""
        with self._translate_errors():
            return [dict(row) for row in self.db.execute("select * from ledger order by id")]


def _open_folder(path: Path, above: int | None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)


def _make_folder(above: int, name: str) -> None:
    """A folder of that name; what is there of another kind is moved out of the way."""
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            os.rename(name, f"{name}.strange-{time.time_ns()}", src_dir_fd=above, dst_dir_fd=above)
            os.mkdir(name, 0o700, dir_fd=above)


def _restrict_to_owner(number: int, path: Path) -> bool:
    """Have a folder for this user alone; whether others could change it before.

    Raises:
        RefusedError: It is somebody else's.
    """
    seen = os.fstat(number)
    if seen.st_uid != os.geteuid():
        raise RefusedError(
            f"{path} is of user {seen.st_uid}, wanted {os.geteuid()}",
            hint=f"move it away: mv {path} {path}.old",
        )
    if stat.S_IMODE(seen.st_mode) == 0o700 and seen.st_gid == os.getegid():
        return False
    os.fchown(number, -1, os.getegid())
    os.fchmod(number, 0o700)
    return bool(stat.S_IMODE(seen.st_mode) & 0o022)


def _take_over(folders: dict[str, int]) -> None:
    """Trust nothing that was left where others could write: until version 0.2 the group had the folder.

    Locks stay the same files, for jobs hold them. A database is copied, for somebody may have it open still.
    """
    top = folders[""]
    for place, number in folders.items():
        for name in _names(number):
            if place == "" and name in folders:
                continue
            if not _is_plain(number, name):
                os.rename(name, f"{name}.strange-{time.time_ns()}", src_dir_fd=number, dst_dir_fd=number)
    with contextlib.suppress(FileNotFoundError):
        os.unlink("leases.db-shm", dir_fd=top)  # sqlite makes it of the others
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
            raise UnavailableError(f"{path / name} is no plain file", hint=REBUILD_HINT)


def _open_plain(folder: int, name: str, flags: int) -> int:
    """A descriptor of a plain file in a folder.

    Raises:
        OSError: It is a link, a fifo, or something else that is no plain file.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(name, flags, 0o600, dir_fd=folder)
    seen = os.fstat(number)
    if not stat.S_ISREG(seen.st_mode) or seen.st_nlink > 1:
        os.close(number)
        raise OSError(errno.EINVAL, "no plain file", name)
    return number


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)


def set_aside(path: Path) -> list[Path]:
    """Move a database out of the way.

    Args:
        path: The folder of the state.

    Returns:
        Where its files are now.
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
    """The leases that the lifelines of a state name; nothing is changed.

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
            with contextlib.suppress(ValueError, OSError):  # half written, by a grant that was killed
                with os.fdopen(_open_plain(folders[1], name, os.O_RDONLY), encoding="utf-8") as file:
                    owner = os.fstat(file.fileno()).st_uid
                    lease = read_lifeline(file.read(1 << 20))
                if lease.id == name and owner in (0, os.geteuid(), lease.uid):
                    leases.append(lease)
    except FileNotFoundError:
        pass  # nobody has leased anything yet
    finally:
        _close(folders)
    return leases


def read_ledger(path: Path) -> list[tuple[Any, ...]]:
    """What can be read of the ledger of a database that may be broken; nothing is changed."""
    with contextlib.suppress(sqlite3.Error, OSError):
        db = sqlite3.connect(f"file:{path / 'leases.db'}?mode=ro", uri=True)
        with contextlib.closing(db):
            return db.execute(f"select {LEDGER} from ledger order by id").fetchall()  # noqa: S608 - our names
    return []


def lifeline_text(lease: Lease) -> str:
    """A lease as the text of its lifeline."""
    return json.dumps(dataclasses.asdict(lease)) + "\n"


def read_lifeline(text: str) -> Lease:
    """The lease of such a text.

    Raises:
        ValueError: It is none.
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
    """The first field of a lease that has a value of another type; empty where none has."""
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
