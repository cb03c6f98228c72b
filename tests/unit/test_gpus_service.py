"""Members of the group lease by the service, and none of them changes what is root's."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpukiln.errors import UnavailableError, UsageError
from gpukiln.gpus import service, zipapp
from gpukiln.gpus.client import MemberLeases
from gpukiln.gpus.config import Config
from gpukiln.gpus.leases import DETACHED, LeaseHolder, Leases
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore, read_lifeline
from gpukiln.gpus.text import printable
from tests.support import nvml_double
from tests.support.gpus import double, snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
ANN, BOB, EVE, GROUP = 61001, 61002, 61003, 61010  # three users, and the group of ann and bob
PYTHON = "/usr/bin/python3"


@dataclass
class Node:
    """A shared node: its state is root's, and members reach it by the service.

    Args:
        folder: That everybody may enter.
        environment: Of root's programs.
        service: Process of its service, once that runs.
    """

    folder: Path
    environment: dict[str, str]
    service: int = 0

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "gpus.sock"

    def member(self, uid: int, *words: str, code: str = "", group: int = GROUP, **more: str) -> Any:
        """Run `gpukiln-gpu`, or a program, as a user."""
        argv = [PYTHON, "-c", code, *words] if code else [*self.argv(), *words]
        return self._run(argv, **self.credentials(uid, group, **more))

    def shell(self, uid: int, command: str) -> Any:
        """Run a command of a shell as a user."""
        return self._run(["sh", "-c", command], **self.credentials(uid))

    def root(self, *words: str) -> Any:
        return self._run([*self.argv(), *words], env=self.environment, cwd="/")

    def argv(self) -> list[str]:
        """The program."""
        return [PYTHON, str(self.folder / "gpukiln-gpu")]

    def credentials(self, uid: int, group: int = GROUP, **more: str) -> dict[str, Any]:
        """What makes a process that of a user, as subprocess takes it."""
        hidden = ("GPUKILN_GPUS_STATE", "GPUKILN_GPUS_CONFIG", "PYTHONPATH")
        environment = {name: value for name, value in self.environment.items() if name not in hidden}
        environment |= {"GPUKILN_GPUS_SOCKET": str(self.socket), "HOME": "/", **more}
        return {"env": environment, "user": uid, "group": group, "extra_groups": [], "cwd": "/"}

    def _run(self, argv: list[str], **more: Any) -> Any:
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, **more)

    def leases(self) -> list[dict[str, Any]]:
        done = self.root("leases", "--json")
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)["nodes"][0]["leases"]
        return found


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with the program and the double, which other users may read."""
    folder = Path(tempfile.mkdtemp(prefix="gpukiln-shared-"))
    folder.chmod(0o755)
    # Unpacked and compiled once: Python compiles what it runs from a ZIP file at each of a hundred starts.
    zipapp.build(folder / "packed")
    with zipfile.ZipFile(folder / "packed") as archive:
        archive.extractall(folder / "gpukiln-gpu")
    subprocess.run([PYTHON, "-m", "compileall", "-q", folder / "gpukiln-gpu"], check=True)
    nvml_double.build(folder, branch=535)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def node(place: Path) -> Iterator[Node]:
    with made(place) as node:
        yield node


@contextlib.contextmanager
def made(place: Path) -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="gpukiln-node-"))
    folder.chmod(0o755)
    (folder / "gpukiln-gpu").symlink_to(place / "gpukiln-gpu")
    gpus = double(nvml_double.build(place, branch=535), folder, "p4d.24xlarge")
    (folder / "p4d.24xlarge.state").chmod(0o644)
    names = ("LD_LIBRARY_PATH", "GPUKILN_SIMULATED_GPUS", "PATH")
    environment = {name: gpus.environment[name] for name in names}
    environment |= {
        "GPUKILN_GPUS_STATE": str(folder / "state"),
        "GPUKILN_GPUS_CONFIG": str(folder / "gpus.toml"),
    }
    yield Node(folder, environment)
    shutil.rmtree(folder)


@pytest.fixture
def served(node: Node) -> Iterator[Node]:
    """The node, with its service."""
    with serving(node):
        yield node


@pytest.fixture(scope="module")
def unchanged(place: Path) -> Iterator[Node]:
    """A node with its service, for tests that change nothing there."""
    with made(place) as node, serving(node):
        yield node


@contextlib.contextmanager
def serving(node: Node) -> Iterator[None]:
    node.socket.parent.mkdir()
    os.chown(node.socket.parent, 0, GROUP)
    node.socket.parent.chmod(0o2755)
    job = subprocess.Popen(
        [PYTHON, str(node.folder / "gpukiln-gpu"), "serve", "--socket", str(node.socket)],
        env=node.environment,
    )
    node.service = job.pid
    until = time.monotonic() + 20
    while not node.socket.exists():
        assert job.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    yield
    job.terminate()
    job.wait(20)


# ---- what a member may


def test_a_member_leases_runs_and_releases_and_the_state_is_root_s(served: Node) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES; id -u"
    done = served.member(ANN, "run", "-n", "2", "--", "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    visible, uid = done.stdout.split()
    assert (len(visible.split(",")), uid) == (2, str(ANN))
    assert served.leases() == []
    done = served.member(ANN, "lease", "-n", "3", "--for", "1h", "--comment", "night")
    assert done.returncode == 0, done.stderr
    [lease] = served.leases()
    assert (lease["uid"], len(lease["devices"]), lease["kind"]) == (ANN, 3, "detached")
    assert "L-2" in served.member(BOB, "list").stdout
    assert served.member(ANN, "renew", "L-2", "--for", "2h").returncode == 0
    done = served.member(BOB, "release", "L-2")
    assert (done.returncode, f"L-2 belongs to {ANN}" in done.stderr) == (6, True)
    assert served.member(ANN, "run", "--lease", "L-2", "--", "true").returncode == 0
    assert served.member(BOB, "run", "--lease", "L-2", "--", "true").returncode == 6
    assert served.member(ANN, "release", "L-2").returncode == 0
    usage = json.loads(served.member(ANN, "usage", "--by", "user", "--json").stdout)["nodes"][0]
    assert [row["key"] for row in usage["rows"]] == [str(ANN)]
    for path in (served.state, served.state / "alive", served.state / "devices"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o700)


def test_a_job_keeps_its_gpus_though_the_service_and_its_wrapper_are_killed(served: Node) -> None:
    code = (
        "import subprocess, sys; null = subprocess.DEVNULL; "
        "subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=null, stderr=null)"
    )
    program = [PYTHON, str(served.folder / "gpukiln-gpu")]
    pid_file = served.folder / "pids"
    pid_file.touch()
    pid_file.chmod(0o666)
    words = ["run", "-n", "8", "--", "sh", "-c", f"echo $$ $PPID >{pid_file}; exec sleep 60"]
    assert served.member(ANN, *program, *words, code=code).returncode == 0
    until = time.monotonic() + 20
    while len(pid_file.read_text().split()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    job, wrapper = map(int, pid_file.read_text().split())
    os.kill(wrapper, signal.SIGKILL)
    done = served.member(BOB, "lease")
    assert (done.returncode, f"leased: L-1 of {ANN}" in done.stderr) == (75, True), done.stderr
    os.kill(job, signal.SIGKILL)
    until = time.monotonic() + 20
    while served.member(BOB, "lease").returncode != 0:
        assert time.monotonic() < until
    assert [one["uid"] for one in served.leases()] == [BOB]


def test_who_waits_is_served_and_one_who_left_waits_no_more(served: Node) -> None:
    assert served.member(ANN, "lease", "-n", "8").returncode == 0
    leases = MemberLeases(served.socket)
    with subprocess.Popen(
        [*served.argv(), "run", "-n", "8", "--wait", "5m", "--", "true"],
        **served.credentials(BOB),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as left:
        assert soon(lambda: [one["user"] for one in leases.queue()] == [str(BOB)])
        left.kill()
    assert soon(lambda: leases.queue() == []), "the service waits for one who is gone"
    waits = subprocess.Popen(
        [*served.argv(), "run", "-n", "8", "--wait", "30s", "--", "echo", "ran"],
        **served.credentials(EVE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert soon(lambda: [one["user"] for one in leases.queue()] == [str(EVE)])
    assert served.member(ANN, "release", "--mine").returncode == 0
    out, err = waits.communicate(timeout=30)
    assert (waits.returncode, out) == (0, "ran\n"), err
    assert "waiting: " in err


def children(pid: int) -> list[int]:
    """Processes that a process started: those of the service that are ready, while nobody calls."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_call_is_answered_though_the_processes_that_were_ready_are_killed(served: Node) -> None:
    assert soon(lambda: len(children(served.service)) == service.SPARE_PROCESSES)
    for pid in children(served.service):
        os.kill(pid, signal.SIGKILL)
    assert served.member(ANN, "lease").returncode == 0
    assert soon(lambda: len(children(served.service)) == service.SPARE_PROCESSES)


def test_what_was_ready_ends_with_the_service(served: Node) -> None:
    assert soon(lambda: len(children(served.service)) == service.SPARE_PROCESSES)
    ready = children(served.service)
    os.kill(served.service, signal.SIGKILL)
    assert soon(lambda: not [pid for pid in ready if Path(f"/proc/{pid}/exe").exists()])


def test_a_database_that_root_made_anew_is_the_one_that_a_call_is_answered_from(served: Node) -> None:
    """The processes that are ready have the old one open."""
    assert served.member(ANN, "lease", "-n", "2").returncode == 0
    assert soon(lambda: len(children(served.service)) == service.SPARE_PROCESSES)
    assert served.root("leases", "--rebuild").returncode == 0
    assert served.member(BOB, "lease", "-n", "6").returncode == 0
    assert served.member(BOB, "lease").returncode == 75
    assert sorted((one["uid"], len(one["devices"])) for one in served.leases()) == [(ANN, 2), (BOB, 6)]


def soon(holds: Callable[[], bool]) -> bool:
    """Whether something holds within some seconds."""
    until = time.monotonic() + 20
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_who_is_no_member_is_told_how_to_become_one(served: Node) -> None:
    done = served.member(EVE, "lease", group=EVE)
    assert (done.returncode, "only root and the group" in done.stderr) == (6, True)
    assert "usermod -aG" in done.stderr
    [listed] = json.loads(served.member(EVE, "list", "--json", group=EVE).stdout)["nodes"]
    assert (len(listed["devices"]), "only root and the group" in listed["leases"]) == (8, True)


def test_without_the_service_only_root_leases(node: Node) -> None:
    assert node.root("leases").returncode == 0
    done = node.member(ANN, "lease")
    assert (done.returncode, "gpukiln-gpu-leases.socket" in done.stderr) == (6, True)


# ---- attacks on what root reads and writes; with the folder of before (root:gpu 2770) each of them succeeded


def shared_folder(node: Node) -> None:
    """The state as it was made before: members may change what is in it."""
    leases = Leases(LeaseStore(node.state), take_snapshot=snapshot, config=Config(Path("none")))
    leases.acquire(DeviceRequest(count=1), LeaseHolder("root", 0), kind=DETACHED)
    leases.close()
    for path in (node.state, node.state / "alive", node.state / "devices"):
        os.chown(path, 0, GROUP)
        path.chmod(0o2770)
    for path in node.state.glob("leases.db*"):
        os.chown(path, 0, GROUP)
        path.chmod(0o660)


VICTIM = "root:x:0:0:root:/root:/bin/bash\n"


@pytest.fixture
def victim(node: Node) -> Path:
    """A file of root's that the attacker would like to change."""
    path = node.folder / "passwd"
    path.write_text(VICTIM)
    path.chmod(0o644)
    return path


def is_untouched(path: Path) -> bool:
    seen = path.stat()
    return (path.read_text(), stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid) == (VICTIM, 0o644, 0, 0)


LINKS = {
    "database": "rm -f leases.db*; ln -s {victim} leases.db",
    "log of the database": "rm -f leases.db-wal; ln -s {victim} leases.db-wal",
    "lifeline": "for n in 1 2 3 4 5; do rm -f alive/L-$n; ln -s {victim} alive/L-$n; done",
    "folder of lifelines": "mv alive old; mkdir -p {folder}/theirs; ln -s {folder} alive",
    "guard of a device": "for f in devices/*; do rm -f $f; ln -s {victim} $f; done",
    "hard link": "ln {folder}/hard leases.db-shm; mv leases.db-shm alive/L-2",
    "fifo for a lifeline": "rm -f alive/*; mkfifo alive/L-1 alive/L-2",
    "fifo for the database": "rm -f leases.db*; mkfifo leases.db",
    "folder for the database": "rm -f leases.db*; mkdir leases.db",
}


READS = (["health"], ["list"], ["leases"], ["usage"])


@pytest.mark.parametrize("attack", LINKS)
def test_what_a_member_left_in_the_folder_of_before_is_not_followed(
    node: Node, victim: Path, attack: str
) -> None:
    shared_folder(node)
    command = f"cd {node.state} && {LINKS[attack].format(victim=victim, folder=node.folder)}"
    node.shell(ANN, command)
    # each of them opens the same folder, and the first one has it to itself: attacks meet them in turn
    reads = READS[[*LINKS].index(attack) % len(READS)]
    for words in (reads, ["lease", "-n", "1"], ["run", "--", "true"]):
        assert node.root(*words).returncode in (0, 1, 4, 5), words
    assert is_untouched(victim)
    assert list(node.folder.glob("L-*")) == []
    for path in (node.state, node.state / "alive", node.state / "devices"):
        assert not path.is_symlink()
        assert (path.stat().st_uid, path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (0, 0, 0o700)
    # from now on nobody else gets in
    assert "Permission denied" in node.shell(ANN, f"ls {node.state}").stderr


def test_a_database_that_a_member_has_open_is_not_the_one_that_root_goes_on_with(node: Node) -> None:
    shared_folder(node)
    held = os.open(node.state / "leases.db", os.O_RDWR)
    assert node.root("leases").returncode == 0
    os.pwrite(held, b"\0" * 4096, 0)
    os.close(held)
    assert [one["id"] for one in node.leases()] == ["L-1"]


def test_a_folder_of_somebody_else_is_refused(node: Node) -> None:
    node.state.mkdir()
    os.chown(node.state, ANN, ANN)
    done = node.root("lease")
    assert (done.returncode, f"belongs to the user {ANN}" in done.stderr) == (6, True)


def test_a_lease_with_a_text_for_a_number_is_an_error_with_the_next_step(node: Node) -> None:
    assert node.root("lease").returncode == 0
    store = LeaseStore(node.state)
    store.db.execute("update leases set granted_boot = 'soon'")
    store.close()
    done = node.root("leases")
    assert (done.returncode, "L-1 has granted_boot 'soon'" in done.stderr) == (4, True)
    assert "--rebuild" in done.stderr
    assert "Traceback" not in node.root("health").stderr


def test_a_rebuild_reads_everything_before_it_moves_anything(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.root("run", "--", "true").returncode == 0
    assert node.root("lease", "-n", "2").returncode == 0
    done = node.root("leases", "--rebuild")
    assert done.returncode == 0, done.stderr
    assert [one["id"] for one in node.leases()] == ["L-2"]
    rows = json.loads(node.root("usage", "--by", "lease", "--json").stdout)["nodes"][0]["rows"]
    assert "L-1" in [row["key"] for row in rows], "the ledger is kept"
    from gpukiln.gpus import leases  # noqa: PLC0415 - one test

    monkeypatch.setenv("GPUKILN_GPUS_STATE", str(node.state))
    monkeypatch.setattr(leases, "read_ledger", lambda _: (_ for _ in ()).throw(UnavailableError("no")))
    with pytest.raises(UnavailableError):
        leases.rebuild_leases()
    assert (node.state / "leases.db").exists()


# ---- attacks on the service


def ask(node: Node, uid: int, *lines: str) -> list[dict[str, Any]]:
    """What the service answers a program of a user's own to each line, in a connection of its own."""
    code = (
        "import socket, sys\n"
        "for line in sys.argv[2:]:\n"
        "    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "    s.sendall(line.encode() + b'\\n'); print(s.makefile().readline(), end='')\n"
    )
    done = node.member(uid, str(node.socket), *lines, code=code)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_message_makes_somebody_else_of_who_asks(served: Node) -> None:
    call = {
        "call": "acquire",
        "request": {"count": 1},
        "kind": "detached",
        "user": "root",
        "uid": 0,
        "who": {"user": "root", "uid": 0},
    }
    began = json.dumps({"call": "began", "lease": 1, "pid": 1})
    leased, refused = ask(served, ANN, json.dumps(call), began)
    assert read_lifeline(leased["answer"]["lease"]).uid == ANN
    assert [one["uid"] for one in served.leases()] == [ANN]
    assert "belongs to another user" in refused["error"]["message"], "process 1 is root's"
    others = (json.dumps({"call": name, "lease": 1}) for name in ("renew", "share"))
    said = [one["error"] for one in ask(served, BOB, began, *others)]
    assert "belongs to another user" in said[0]["message"]
    assert {one["kind"] for one in said} == {"RefusedError"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[]",
        "[" * 40_000,
        '{"call": "nothing"}',
        '{"call": "acquire", "request": {"repair": true}}',
        '{"call": "acquire", "request": {"counts": []}}',
        '{"call": "acquire", "request": {"count": 1e999}}',
        '{"call": "acquire", "request": {"count": "one"}}',
        '{"call": "acquire", "request": {"count": 0}}',
        '{"call": "acquire", "request": {"devices": "GPU-1"}}',
        '{"call": "acquire", "request": {}, "kind": "job", "hours": NaN}',
        '{"call": "acquire", "request": {}, "kind": "job", "engine": "sh"}',
        '{"call": "acquire", "request": {}, "kind": "other"}',
        '{"call": "release", "lease": "../../etc/passwd"}',
        '{"call": "is_running", "lease": -1}',
        '{"call": "release", "lease": ' + "9" * 5000 + "}",
    ],
)
def test_what_is_no_call_is_refused_and_the_service_goes_on(unchanged: Node, line: str) -> None:
    refused, current = ask(unchanged, ANN, line, '{"call": "current"}')
    assert refused["error"]["kind"] in ("UsageError", "UnavailableError")
    assert current == {"answer": {"leases": []}}


def test_limits_are_the_service_s_whatever_a_member_sets(served: Node) -> None:
    (served.folder / "gpus.toml").write_text(
        "[limits]\ngpus = 1\n[limits.projects.training]\ngpus = 8\n"
        '[limits.projects.vision]\ngpus = 8\nmembers = ["61002"]\n'
    )
    theirs = served.folder / "theirs.toml"
    theirs.write_text("")
    theirs.chmod(0o644)
    for more in ({}, {"GPUKILN_GPUS_CONFIG": str(theirs)}, {"GPUKILN_GPUS_STATE": "/nowhere"}):
        done = served.member(ANN, "lease", "-n", "2", **more)
        assert (done.returncode, "the limit of everybody is 1" in done.stderr) == (6, True), done.stderr
    for project in ("training", "vision"):
        done = served.member(ANN, "lease", "-n", "2", "--project", project)
        assert done.returncode == 6, "whoever types a project's name is not of it"
    assert served.member(BOB, "lease", "-n", "2", "--project", "vision").returncode == 0


def test_what_is_printed_does_nothing_to_a_terminal(served: Node) -> None:
    comment = "\x1b]0;owned\x07\x1b[2J\nL-9 root exclusive\u202e"
    assert served.member(ANN, "lease", "--comment", comment).returncode == 0
    for words in (["leases"], ["list"], ["health"], ["lease", "-n", "8"]):
        done = served.root(*words)
        assert "\x1b" not in done.stdout + done.stderr
        assert "\u202e" not in done.stdout + done.stderr
        assert "\nL-9 root" not in done.stdout
    assert printable("a\x1b[31mb\u202ec\td") == "a\\x1b[31mb\\u202ec\td"


def test_a_member_can_not_use_up_what_answers_the_others(served: Node) -> None:
    assert service.MAX_CALLS_PER_USER * 3 < service.MAX_CALLS
    code = (
        "import socket, sys, time\n"
        "held = []\n"
        "for _ in range(60):\n"
        "    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); held.append(s)\n"
        "print(sum(1 for s in held[40:] if b'too many calls' in s.recv(4096)))\n"
    )
    done = served.member(ANN, str(served.socket), code=code)
    assert int(done.stdout) == 20, done.stderr
    assert served.member(BOB, "lease").returncode == 0


def test_a_fifo_or_a_link_of_root_s_own_is_no_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "leases.db")
    tmp_path.chmod(0o700)
    with pytest.raises(UnavailableError, match="not a regular file"):
        LeaseStore(tmp_path)


def test_a_request_goes_through_the_line_whole() -> None:
    from gpukiln.gpus.model import plain  # noqa: PLC0415 - one test

    request = DeviceRequest(
        count=2, memory_mib=8192, models=("A100",), capability=(8, 0), cuda=((">=", (12, 1)),), linked=True
    )
    assert service.request_of(json.loads(json.dumps(plain(request)))) == request
    with pytest.raises(UsageError):
        service.request_of({"strange": 1})
