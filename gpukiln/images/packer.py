"""Runs Packer, 1.6.6 and newer, and turns its failures into errors."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from gpukiln import programs
from gpukiln.errors import CheckFailedError, GpukilnError, UnavailableError
from gpukiln.files import name_full_disk_error, open_private
from gpukiln.parsing import parse_json
from gpukiln.redact import LogRedactor

PLUGINS_SINCE = (1, 7)  # the first Packer that takes builders from plugins
INIT_RETRY_PAUSES_S = (5, 20)  # before `packer init` is repeated
CLEAN_UP_S = 180  # seconds that Packer and Ansible get to end after Ctrl-C
KILL_TIMEOUT_S = 5  # seconds that killed processes get to end
# Not shown: the builder `null` reports that it exports no image, which is as it should be.
HIDDEN_LINES = ("Provisioning", "Did not export anything", "Builds finished")


def packer_version() -> str:
    """The version of the Packer on PATH.

    Raises:
        UnavailableError: Packer is not installed.
    """
    if not shutil.which("packer"):
        raise UnavailableError(
            "packer is not installed",
            hint="apt-get install packer, or https://developer.hashicorp.com/packer",
        )
    # Debian's prints `Packer v1.6.6`, with a notice below when a newer one exists
    match = re.search(
        r"v?(\d+\.\d+\.\d+)",
        programs.run(["packer", "version"], limit_s=programs.QUICK_S).stdout.decode(errors="replace"),
    )
    if not match:
        raise UnavailableError("`packer version` printed no version")
    return match[1]


def prepare_template(source: Path, folder: Path) -> None:
    """Copy a template to the folder where it runs, with the plugins file only where Packer supports it.

    Args:
        source: The image's folder below ami/.
        folder: The folder of the copy.

    Raises:
        UnavailableError: Packer is missing, or its plugins can't be installed.
    """
    folder.mkdir()
    for file in source.glob("*.pkr.hcl"):
        with name_full_disk_error(folder):
            shutil.copy(file, folder)
    if tuple(map(int, packer_version().split(".")[:2])) < PLUGINS_SINCE:
        return
    # Packer before 1.7 refuses the block required_plugins.
    for file in (source / "plugins").glob("*.pkr.hcl"):
        with name_full_disk_error(folder):
            shutil.copy(file, folder)
    _install_plugins(folder)


def _install_plugins(folder: Path) -> None:
    """Run `packer init`, which fetches from GitHub the plugins that are not in Packer's folder yet."""
    # GitHub answers 60 calls an hour without a token from one address, which CI's runners share
    # (hashicorp/packer issues 11259 and 12179, which advise PACKER_GITHUB_API_TOKEN).
    for wait_s in (*INIT_RETRY_PAUSES_S, None):
        done = programs.run(
            ["packer", "init", str(folder)],
            limit_s=programs.NETWORK_S,
            environment={**os.environ, "CHECKPOINT_DISABLE": "1"},
        )
        if not done.returncode:
            return
        output = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        limited = any("rate limit" in line.lower() for line in output)
        if wait_s is None or limited:  # a rate limit lasts for minutes, so retries would fail too
            break
        time.sleep(wait_s)
    token = os.environ.get("PACKER_GITHUB_API_TOKEN")
    raise UnavailableError(
        "Packer's plugins can't be installed",
        hint="GitHub's rate limit is reached for this address: set PACKER_GITHUB_API_TOKEN to any token"
        if limited and not token
        else "check the network: packer init needs it once, and keeps the plugins that it has installed",
        details=tuple(output[-4:]),
    )


class Packer:
    """One `packer build`.

    Args:
        folder: Folder of the prepared template.
        variables: Values of the template's variables.
        environment: Variables that are added to the process's environment; an empty value removes one.
        log: File for its whole output.
        events: File that Ansible's callback plugin writes, one JSON object a line.
        say: Shows what was done: Packer's steps, and tasks of Ansible that were not skipped.
        doing: Shows each task that starts; only its end says whether it was skipped.
        on_task: Called with the name of each task of Ansible that starts, one after the other.
    """

    def __init__(
        self,
        folder: Path,
        variables: dict[str, Any],
        *,
        environment: dict[str, str],
        log: Path,
        events: Path,
        say: Callable[[str], None],
        doing: Callable[[str], None],
        on_task: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._log, self._events = folder, log, events
        self._say, self._doing, self._on_task = say, doing, on_task
        self._variables = folder / "variables.pkrvars.json"
        # A file: other users can read the command line of a process.
        self._variables.write_text(json.dumps(variables, indent=2))
        self._environment = environment
        self._errors: list[str] = []
        self._log_error: OSError | None = None

    def _whole_environment(self) -> dict[str, str]:
        # CHECKPOINT_DISABLE: Packer otherwise asks HashiCorp for newer versions at each start.
        whole = {**os.environ, "CHECKPOINT_DISABLE": "1", "PATH": _path(), **self._environment}
        return {name: value for name, value in whole.items() if value or name not in self._environment}

    def build(self) -> None:
        """Run Packer to its end.

        Raises:
            CheckFailedError: A task of Ansible failed; the message is the task's.
            UnavailableError: Packer failed otherwise.
            KeyboardInterrupt: After Packer and Ansible have ended.
        """
        self._events.touch()
        following = threading.Event()
        # A thread: Packer's output and Ansible's events come at the same time.
        follower = threading.Thread(target=self._follow_events, args=(following,), daemon=True)
        follower.start()
        # Private: Ansible's output may contain what a failed task was given.
        log = open_private(self._log, "a")
        try:
            code = programs.stream(
                ["packer", "build", "-machine-readable", f"-var-file={self._variables}", str(self._folder)],
                self._reader(log),
                # SIGINT for Ansible too, as from a terminal: Packer waits for its end
                ends=((signal.SIGINT, CLEAN_UP_S), (signal.SIGKILL, KILL_TIMEOUT_S)),
                environment=self._whole_environment(),
                interrupted=lambda: self._say(
                    "stopping: Ansible ends first (Ctrl-C again leaves the clean-up to the next command)"
                ),
                dies_with_us=True,  # without this process no image is made of the machine
            )
        finally:
            with contextlib.suppress(OSError):  # `_log_error` has it already
                log.close()
            following.set()
            follower.join()
        # A full disk explains the failure better than the error that followed from it.
        if code and self._log_error:
            raise self._log_error
        if code:
            raise self._failure(code)

    def _reader(self, log: IO[str]) -> Callable[[str], None]:
        redacted = LogRedactor()

        def read(line: str) -> None:
            kind, text = _parse(line)
            # Before it is written anywhere: tokens in URLs appear in apt's errors.
            text = redacted(text)
            try:
                log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
                log.flush()
            except OSError as error:  # the build goes on; how it ends says whether that matters
                self._log_error = error
            if kind == "error":
                self._errors.append(text)
            elif kind == "say" and not any(words in text for words in HIDDEN_LINES):
                self._say(re.sub(r"^==> [\w.-]+: ", "", text).splitlines()[0])

        return read

    def _follow_events(self, ended: threading.Event) -> None:
        with self._events.open() as file:
            last_look, line = False, ""
            while True:
                line += file.readline()  # the last line may be half written: its other half comes later
                if line.endswith("\n"):
                    event, line = parse_json(line), ""
                    if event["event"] == "task_start":
                        self._doing(event["task"])
                        if self._on_task:
                            self._on_task(event["task"])
                    elif event["event"] == "task_end" and event["status"] != "skipped":
                        self._say(event["task"])
                elif last_look:
                    return
                else:
                    last_look = ended.wait(0.3)

    def _failure(self, code: int) -> GpukilnError:
        hint = f"full log: {self._log}"
        # Packer only says that ansible-playbook failed; the event has the task and its message.
        for event in _read_events(self._events):
            if event["event"] == "task_end" and event["status"] in ("failed", "unreachable"):
                lines = str(event.get("msg", "")).strip().splitlines()
                return CheckFailedError(
                    f"the task `{event['task']}` {event['status']}", hint=hint, details=tuple(lines[-12:])
                )
        lines = [line for error in self._errors for line in error.strip().splitlines()]
        return UnavailableError(
            f"Packer ended with exit code {code}", hint=hint, details=tuple(dict.fromkeys(lines[-6:]))
        )


def _read_events(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        yield parse_json(line)


def _parse(line: str) -> tuple[str, str]:
    r"""Parse a machine-readable line of Packer: timestamp,target,type,data.

    >>> _parse("1710000000,,ui,say,==> null.gpu: Provisioning%!(PACKER_COMMA) please wait")
    ('say', '==> null.gpu: Provisioning, please wait')
    >>> _parse("not machine-readable")
    ('text', 'not machine-readable')
    """
    # Commas and newlines in data are escaped (Packer documentation, "Machine-Readable Output").
    parts = line.rstrip("\n").split(",")
    # Warnings of plugins are plain text between the records.
    if len(parts) < 4 or not parts[0].isdigit():
        return "text", line.rstrip("\n")
    kind, data = parts[2], parts[3:]
    if kind == "ui":
        kind, data = data[0], data[1:]
    text = ",".join(data).replace("%!(PACKER_COMMA)", ",").replace("\\n", "\n").replace("\\r", "")
    return kind, text


def _path() -> str:
    """A PATH on which Packer finds this environment's ansible-playbook first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
