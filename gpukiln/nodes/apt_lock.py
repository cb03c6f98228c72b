"""Finds the process that holds the locks of apt and dpkg on hosts where a task of apt waits."""

import base64
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpukiln import programs
from gpukiln.errors import GpukilnError
from gpukiln.nodes.results import ENDINGS, LOCKED, task_name
from gpukiln.redact import redact

ACTIONS = ("apt", "ansible.builtin.apt", "ansible.legacy.apt")
FIRST_S, AGAIN_S = 15.0, 60.0  # a look is an SSH command; most tasks of apt are over before the first
POLL_S = 1.0
# Enough for the program and its first arguments in one line of progress.
COMMAND_CHARS = 200
FILES = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)
LINE_PREFIX = "gpukiln-lock"
# apt and dpkg lock by fcntl(2), which /proc/locks lists as POSIX with process and inode (proc_locks(5)). An
# inode is unique in its file system alone, so the process must have the file open. What Ansible started does
# not count: its modules, its `become`, and its shell of a pipelined module (plugins/shell/__init__.py).
SCRIPT = """
for file in FILES; do
  [ -e "$file" ] || continue
  inode=$(stat -c %i "$file")
  for pid in $(awk -v inode="$inode" '
    $2 == "POSIX" { n = split($6, at, ":"); if (at[n] == inode) print $5 }' LOCKS)
  do
    for open in /proc/"$pid"/fd/*; do
      [ "$(readlink "$open")" = "$file" ] || continue
      chain='' parent=$pid
      while [ "${parent:-0}" -gt 1 ]; do
        chain="$chain $(tr '\\0' ' ' < /proc/"$parent"/cmdline)"
        parent=$(awk '$1 == "PPid:" { print $2 }' /proc/"$parent"/status)
      done
      case $chain in
        *AnsiballZ*|*ansible-tmp-*|*BECOME-SUCCESS-*|*'&& sleep 0'*) ;;
        *) echo "MARK $file $pid $(tr '\\0' ' ' < /proc/"$pid"/cmdline)" ;;
      esac
      break
    done
  done
done 2> /dev/null
"""
HOST_LINE = re.compile(r"(?P<host>\S+) \| \w+ \| rc=\d+ >>")
HOLDER_LINE = re.compile(rf"{LINE_PREFIX} (?P<file>\S+) (?P<pid>\d+) (?P<command>.*)")


def script(files: tuple[str, ...] = FILES, locks: str = "/proc/locks") -> str:
    """The shell script that prints one line for each lock: MARK, file, process id, command."""
    return SCRIPT.replace("FILES", " ".join(files)).replace("LOCKS", locks).replace("MARK", LINE_PREFIX)


def find_lock_holders(inventory: str, hosts: list[str], environment: dict[str, str]) -> dict[str, str]:
    """Who holds a lock on each of some hosts, in words; hosts without a lock or an answer are left out.

    Args:
        environment: What ansible is run with.
    """
    # Ansible would take its braces and quotes for its own.
    text = base64.b64encode(script().encode()).decode()
    command = ["ansible", ",".join(hosts), "-i", inventory, "--become", "-m", "ansible.builtin.raw"]
    command += ["-a", f"echo {text} | base64 -d | sh"]
    try:
        done = programs.run(command, limit_s=programs.QUICK_S, environment={**os.environ, **environment})
    except GpukilnError:  # no answer in time: the task itself says more
        return {}
    return parse_lock_holders(done.stdout.decode(errors="replace"))


def parse_lock_holders(said: str) -> dict[str, str]:
    r"""By host, the first holder that `ansible` printed.

    >>> line = "gpukiln-lock /var/lib/dpkg/lock 812 /usr/bin/unattended-upgrade"
    >>> parse_lock_holders(f"node1 | CHANGED | rc=0 >>\n{line}")
    {'node1': 'process 812 (`/usr/bin/unattended-upgrade`), which has /var/lib/dpkg/lock'}
    >>> parse_lock_holders("node1 | CHANGED | rc=0 >>")
    {}
    """
    holders: dict[str, str] = {}
    host = ""
    for line in said.splitlines():
        if head := HOST_LINE.match(line):
            host = head["host"]
        elif (holder_match := HOLDER_LINE.match(line)) and host not in holders:
            command = redact(holder_match["command"].strip())[:COMMAND_CHARS]
            holders[host] = f"process {holder_match['pid']} (`{command}`), which has {holder_match['file']}"
    return holders


@dataclass
class AptTask:
    """A task of apt that runs on a host.

    Args:
        next_look: By the clock.
    """

    task: str
    next_look: float


class LockWatch:
    """Reports which process holds a lock while a task of apt runs long, and keeps it for the failure text.

    Args:
        look: Of some hosts, who holds a lock there.
        on_host: Called with a host and a message about it.
        clock: Seconds.
    """

    def __init__(
        self,
        look: Callable[[list[str]], dict[str, str]],
        on_host: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._on_host, self._clock = look, on_host, clock
        self._waiting: dict[str, AptTask] = {}
        self._holders: dict[str, str] = {}
        self._lock = threading.Lock()

    def take(self, event: dict[str, Any]) -> None:
        """Take one event of Ansible Runner."""
        kind, data = event.get("event", ""), event.get("event_data", {})
        host = str(data.get("host", ""))
        with self._lock:
            if kind == "runner_on_start":
                self._waiting.pop(host, None)
                self._holders.pop(host, None)
                if data.get("task_action") in ACTIONS:
                    self._waiting[host] = AptTask(task_name(data), self._clock() + FIRST_S)
            elif ENDINGS.get(kind, "item") != "item":
                self._waiting.pop(host, None)

    def check_due_hosts(self) -> None:
        """Look at the hosts whose task of apt runs for long, all of them at once."""
        now = self._clock()
        with self._lock:
            due = [host for host, apt_task in self._waiting.items() if apt_task.next_look <= now]
            for host in due:
                self._waiting[host].next_look = now + AGAIN_S
        # Without the lock, because a look takes seconds and `take` must not wait for it.
        for host, holder in (self._look(due) if due else {}).items():
            with self._lock:
                apt_task = self._waiting.get(host)
                new = apt_task is not None and self._holders.get(host) != holder
                if new:
                    self._holders[host] = holder
            if apt_task and new:
                self._on_host(host, f"{apt_task.task} waits for {holder}")

    def explain(self, host: str, failure: str) -> str:
        """A failure with who held the lock, where it is about one."""
        if not LOCKED.search(failure):
            return failure
        holder = self._holders.get(host) or self._look([host]).get(host, "")
        return f"{failure}\nthe lock is held by {holder}" if holder else failure

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look as long as the playbook runs."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(POLL_S):
                self.check_due_hosts()

        # A look that hangs in ssh must not keep the process alive.
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
