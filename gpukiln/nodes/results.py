"""What a playbook did on each host, put together from Ansible's events."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from gpukiln.redact import redact_value

State = Literal["ok", "changed", "failed", "unreachable", "not_reached"]
# Ansible Runner's names of the events that end a task on a host
ENDINGS = {
    "runner_on_ok": "ok",
    "runner_on_skipped": "skipped",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_item_on_ok": "item",
    "runner_item_on_failed": "item",
}
MESSAGE_LINES = 12
ERRORS = 5  # the first ones of a compiler: what follows comes of them
ERROR = re.compile(r"(?<![\w-])(?:fatal )?error: ", re.IGNORECASE)
LOCKED = re.compile(r"Could not get lock|Failed to lock apt|dpkg frontend lock")
# What apt and dpkg say, and what to do.
STEPS = (
    (
        re.compile(r"dpkg was interrupted"),
        "on the host: `dpkg --configure -a` ends what was interrupted, then run this again",
    ),
    (
        re.compile(r"Failed to update apt cache after \d+ retries:\s*$", re.MULTILINE),
        "apt gave no reason: `apt-get update` on the host names the source that does not answer",
    ),
    (
        LOCKED,
        "on the host: `fuser -v /var/lib/dpkg/lock-frontend /var/lib/apt/lists/lock` names the process that"
        " holds the lock",
    ),
)
# Ansible calls a host unreachable where it could not make its temporary folder there, though the host
# answered (ansible-core, plugins/action/__init__.py, _make_tmp_path); ssh that reached nobody exits 255.
NO_FOLDER = re.compile(r"Failed to create temporary directory\b.* exited with result (?!255\b)\d+", re.DOTALL)
# errno(3): what no file can be written because of, and what to do first.
UNWRITABLE = {
    "No space left on device": "a file system is full, in bytes (`df -h`) or in inodes (`df -i`)",
    "Disk quota exceeded": "the user's quota is used up (`quota`)",
    "Read-only file system": "a file system is read-only; `dmesg | grep -i remount` says why",
}


@dataclass(frozen=True)
class TaskChange:
    """A task that changed something, or would in check mode.

    Args:
        task: Its name, with the role's.
        diff: What differs, as a unified diff; empty where the module reports none.
    """

    task: str
    diff: str = ""


@dataclass
class HostResult:
    """What happened on one host.

    Args:
        name: The inventory's name.
        state: `not_reached`: the run ended before it came to this host, or in the middle of it.
        tasks: Tasks that ran and were not skipped.
        changes: Tasks that changed something.
        failure: The failing task and its message.
        seconds: Time that its tasks took.
        slowest: The task that took longest, and its seconds.
    """

    name: str
    state: State = "not_reached"
    tasks: int = 0
    changes: list[TaskChange] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0
    slowest: tuple[str, float] = ("", 0.0)


@dataclass
class RunResult:
    """What happened on all of them.

    Args:
        hosts: By name, in the inventory's order.
        task_seconds: By task, the longest time that it took on a host.
        stopped: Whether it was interrupted.
    """

    hosts: dict[str, HostResult]
    task_seconds: dict[str, float] = field(default_factory=dict)
    stopped: bool = False

    @property
    def unfinished(self) -> list[str]:
        """Hosts that a resumed run has to do again."""
        return [host.name for host in self.hosts.values() if host.state not in ("ok", "changed")]


class Collector:
    """Takes Ansible's events one by one.

    Args:
        hosts: The hosts that the run is for.
    """

    def __init__(self, hosts: list[str]) -> None:
        self.result = RunResult({name: HostResult(name) for name in hosts})
        self._diffs: dict[tuple[str, str], str] = {}

    def take(self, event: dict[str, Any]) -> tuple[str, str] | None:
        """Take one event of Ansible Runner.

        Args:
            event: With `event` and `event_data`.

        Returns:
            The host and what to say about it, when there is something to say.
        """
        kind, data = event.get("event", ""), event.get("event_data", {})
        if kind == "playbook_on_stats":
            self._finish(data)
            return None
        # None for an event without a host, or of one outside the run.
        host = self.result.hosts.get(data.get("host", ""))
        ending = ENDINGS.get(kind, "skipped")
        if host is None or ending == "skipped":
            return None
        task, answer = task_name(data), data.get("res") or {}
        if ending == "item":
            # the diffs of a loop come with its items
            before = self._diffs.get((host.name, task), "")
            self._diffs[host.name, task] = before + _diff(redact_value(answer))
            return None
        self._count(host, task, float(data.get("duration") or 0))
        said = None
        if ending == "ok" and answer.get("changed"):
            diff = self._diffs.pop((host.name, task), "") or _diff(redact_value(answer))
            host.changes.append(TaskChange(task, diff))
            said = host.name, f"changed: {task}"
        elif ending != "ok" and not data.get("ignore_errors"):
            message = _message(redact_value(answer))
            why = _unwritable(message) if ending == "unreachable" else ""
            host.state = "unreachable" if ending == "unreachable" and not why else "failed"
            host.failure = f"{task}: {why}{message}"
            said = host.name, f"{host.state}: {task}"
        return said

    def _count(self, host: HostResult, task: str, seconds: float) -> None:
        host.tasks += 1
        host.seconds += seconds
        if seconds > host.slowest[1]:
            host.slowest = (task, seconds)
        longest = self.result.task_seconds.get(task, 0.0)
        self.result.task_seconds[task] = max(longest, seconds)

    def _finish(self, stats: dict[str, Any]) -> None:
        """Set each host's state from the statistics: a rescued failure is none, a host in mid-run is not."""
        for host in self.result.hosts.values():
            # Ansible's name for unreachable hosts
            if host.name in stats.get("dark", {}):
                # `failed`: it answered, and could not take what Ansible sends.
                host.state = "failed" if host.state == "failed" else "unreachable"
            elif host.name in stats.get("failures", {}):
                host.state = "failed"
            elif host.name in stats.get("processed", {}):
                host.state, host.failure = "changed" if host.changes else "ok", ""


def task_name(data: dict[str, Any]) -> str:
    role, task = data.get("role"), str(data.get("task", ""))
    return f"{role} : {task}" if role else task


def _message(answer: dict[str, Any]) -> str:
    parts = [str(answer.get(key, "")).strip() for key in ("msg", "stderr", "module_stderr", "stdout")]
    failed_items = [item for item in answer.get("results") or () if item.get("failed")]
    if failed_items and not any(parts[1:]):
        parts = [str(item.get("msg", "")).strip() for item in failed_items]
    lines = [line for part in dict.fromkeys(filter(None, parts)) for line in part.splitlines()]
    before = lines[:-MESSAGE_LINES]
    errors = [line for line in before if ERROR.search(line)][:ERRORS]
    cut = [f"... {len(before) - len(errors)} lines left out"] if len(before) > len(errors) else []
    text = "\n".join([*errors, *cut, *lines[-MESSAGE_LINES:]]) or "no message"
    steps = [step for words, step in STEPS if words.search(text)]
    return "\n".join([text, *steps])


def _unwritable(message: str) -> str:
    r"""Why a host that Ansible calls unreachable took nothing, as a line; empty where it is unreachable.

    >>> _unwritable("OSError: [Errno 28] No space left on device")
    'the host answers, and a file system is full, in bytes (`df -h`) or in inodes (`df -i`)\n'
    >>> _unwritable("Connection timed out")
    ''
    """
    for errno, why in UNWRITABLE.items():
        if errno in message:
            return f"the host answers, and {why}\n"
    if NO_FOLDER.search(message):
        return (
            "the host answers, and Ansible can't make its temporary folder there: a full or read-only file "
            "system, "
            "or a home that its user can't write to\n"
        )
    return ""


def _diff(answer: dict[str, Any]) -> str:
    """Ansible's forms of a diff: before and after, or prepared text."""
    import difflib  # noqa: PLC0415 - only with changes

    given = answer.get("diff") or []
    if not given and isinstance(answer.get("msg"), list):  # `debug` that reports a change line by line
        return "".join(f"{line}\n" for line in answer["msg"])
    text = ""
    for diff in given if isinstance(given, list) else [given]:
        if "prepared" in diff:
            text += diff["prepared"]
            continue
        before, after = (_text(diff.get(side)) for side in ("before", "after"))
        old, new = (str(diff.get(f"{side}_header") or side) for side in ("before", "after"))
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm="", n=1)
        text += "".join(f"{line}\n" for line in lines)
    return text


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {value[key]}" for key in sorted(value))
    return "" if value is None else str(value)
