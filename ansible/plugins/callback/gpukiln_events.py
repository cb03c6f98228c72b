"""Appends what a play does to a file, one JSON object a line, for whoever shows its progress.

Enabled with ANSIBLE_CALLBACKS_ENABLED=gpukiln_events; does nothing unless GPUKILN_EVENTS names a file.

    {"event": "task_start", "time": 1.0, "play": "Bake", "task": "nvidia_driver : Install",
     "action": "ansible.builtin.apt"}
    {"event": "task_end", "time": 2.0, "play": ..., "task": ..., "host": "m", "status": "failed",
     "duration_s": 1.0, "msg": "what went wrong, with the last lines of standard error"}
    {"event": "stats", "time": 3.0, "hosts": {"m": {"ok": 1, "changed": 0, "failed": 1, ...}}}

status is ok, changed, failed, ignored, skipped or unreachable. A loop is one task; its message names its
items.
"""

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: gpukiln_events
    type: aggregate
    short_description: Writes events of a play as JSON lines
    description: Writes what a play does to the file named by GPUKILN_EVENTS, one JSON object a line.
    requirements: [enable in configuration]
"""

# characters
MESSAGE_LIMIT = 4000
# the end of an output has the error
TAIL_LINES = 15
CENSORED = "the output is hidden because the task handles secrets (no_log)"


def _redactor() -> Any:
    """The project's one redactor, by its path: nothing else of the checkout need be importable here."""
    recipes = Path(__file__).resolve().parents[3]
    checkout = recipes / "gpukiln"
    package = checkout if checkout.is_dir() else recipes.parent  # of a wheel, which has the recipes in it
    path = package / "redact.py"
    spec = importlib.util.spec_from_file_location("gpukiln_redact", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.redact


redact = _redactor()


def _end_of(text: str) -> str:
    return text if len(text) <= MESSAGE_LIMIT else "..." + text[-MESSAGE_LIMIT:]


def failure_message(result: Mapping[str, Any]) -> str:
    """Say why a task failed.

    Args:
        result: The task's result: msg, and rc, stderr, stdout of a command, results of a loop.

    Returns:
        The message, the last lines of standard error (of standard output where that is empty), and for a
        loop the items that failed.
    """
    # Ansible's own mark, and the task's keyword of a result that was not censored yet.
    if result.get("censored") or result.get("_ansible_no_log"):
        return CENSORED
    items = [item for item in result.get("results") or [] if isinstance(item, Mapping)]
    failed = [item for item in items if item.get("failed") or item.get("unreachable")]
    if failed:
        label = "_ansible_item_label"
        # Items may hold a token, such as a repository's address.
        names = [redact(str(item.get(label, item.get("item", "item")))) for item in failed]
        parts = [f"{name}: {failure_message(item)}" for name, item in zip(names, failed, strict=True)]
        return _end_of("\n".join(parts))
    # Redacted before it is cut: what is left of a private key would not be recognised.
    lines = [redact(str(result.get("msg") or result.get("reason") or "").strip())]
    # module_stderr: a module that crashed, without a result of its own.
    said = str(result.get("stderr") or result.get("module_stderr") or "").strip()
    said = said or str(result.get("stdout") or result.get("module_stdout") or "").strip()
    ending = redact(said).splitlines()
    if len(ending) > TAIL_LINES:
        ending = [f"... {len(ending) - TAIL_LINES} lines left out", *ending[-TAIL_LINES:]]
    tail = "\n".join(ending)
    if result.get("rc") not in (None, 0):
        lines.append(f"exit code {result['rc']}")
    if tail and tail not in lines[0]:
        lines.append(tail)
    return _end_of("\n".join(line for line in lines if line) or "no message")


class CallbackModule(CallbackBase):
    """The callback; Ansible calls its methods."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpukiln_events"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._path = os.environ.get("GPUKILN_EVENTS", "")
        self._play = ""
        self._started: dict[str, float] = {}
        if not self._path:
            self.disabled = True

    def _write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields}, default=str)
        # One write a line: a reader that follows the file never sees half of one but at its end.
        with open(self._path, "a", encoding="utf-8") as file:  # noqa: PTH123 - as Ansible's own callbacks do
            file.write(line + "\n")

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Remember the play's name."""
        self._play = play.get_name().strip()

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:  # noqa: ARG002
        # By the task's id: names repeat in a play.
        self._started[task._uuid] = time.monotonic()
        self._write("task_start", play=self._play, task=task.get_name().strip(), action=task.action)

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self.v2_playbook_on_task_start(task, False)

    def _end(self, result: Any, status: str, message: str = "") -> None:
        # Older versions of Ansible have both with an underscore only.
        task = getattr(result, "task", None) or result._task
        host = getattr(result, "host", None) or result._host
        started, fields = self._started.get(task._uuid, time.monotonic()), _fields(result)
        self._write(
            "task_end",
            play=self._play,
            task=task.get_name().strip(),
            host=host.get_name(),
            status=status,
            duration_s=round(time.monotonic() - started, 3),
            msg=message,
            # of `decide`, which need not have looked
            **{name: fields[name] for name in ("looks",) if name in fields},
        )

    def v2_runner_on_ok(self, result: Any) -> None:
        """A task succeeded."""
        self._end(result, "changed" if _fields(result).get("changed") else "ok")

    def v2_runner_on_skipped(self, result: Any) -> None:
        """A task was not needed."""
        self._end(result, "skipped")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A task failed."""
        self._end(result, "ignored" if ignore_errors else "failed", failure_message(_fields(result)))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """A host was lost."""
        self._end(result, "unreachable", failure_message(_fields(result)))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The playbook ended."""
        hosts = {host: stats.summarize(host) for host in sorted(stats.processed)}
        self._write("stats", hosts=hosts)


def _fields(result: Any) -> Mapping[str, Any]:
    fields = getattr(result, "result", None)
    return fields if isinstance(fields, Mapping) else result._result
