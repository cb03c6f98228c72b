"""Asks gpukiln-gpu on other machines: many at once for their answers, one with this terminal as its own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gpukiln import programs
from gpukiln.errors import GpukilnError, PartialError, UnavailableError, UsageError
from gpukiln.gpus.cli import failure
from gpukiln.gpus.model import plain
from gpukiln.gpus.verb import Verb
from gpukiln.parsing import parse_json
from gpukiln.verify.gathering import run_command
from gpukiln.verify.target import InventoryTarget, SshTarget, Target

PROGRAM = "/usr/local/bin/gpukiln-gpu"  # the role gpu_tools puts it there
TIMEOUT_S = 300.0  # for a look: a machine that hangs gives its own up long before
# `programs.run` needs a limit; three years is none for a verb that waits for a lease.
NO_LIMIT_S = 10**8  # three years
DURATION_OPTIONS = {"wait", "duration"}  # options by which a verb lasts as long as it was asked to
NOT_FOUND, SSH_FAILED = 127, 255


@dataclass(frozen=True)
class GpuAnswer:
    """What came of one machine.

    Args:
        nodes: As in the document, one; empty where it has no answer.
        failed: As in the document, one or none.
    """

    nodes: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...]
    exit_code: int


def ask_all(
    targets: Sequence[Target], verb: Verb, argv: Sequence[str], *, sudo: bool, forks: int
) -> list[GpuAnswer]:
    """Ask machines, as many at a time as `forks`.

    Args:
        argv: What follows the verb, without --json.
        sudo: Whether to become root there.

    Returns:
        One answer a machine, in their order.
    """

    def one(target: Target) -> GpuAnswer:
        try:
            return _ask_target(target, verb, argv, sudo)
        except GpukilnError as error:
            return GpuAnswer((), (plain(failure(error, target.name)),), error.exit_code)

    with ThreadPoolExecutor(max_workers=forks) as pool:
        try:
            return list(pool.map(one, targets))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


def error_lines(failed: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Machines without an answer, for people."""
    for row in failed:
        named = row["message"].startswith(row["node"])
        yield f"error: {'' if named else row['node'] + ': '}{row['message']}"
        yield from (f"  {line}" for line in row["details"])
        if row["hint"]:
            yield f"next: {row['hint']}"


def exit_code(answers: Iterable[GpuAnswer]) -> int:
    """That of all machines, or that of a partial success where they differ."""
    codes = {answer.exit_code for answer in answers}
    return codes.pop() if len(codes) == 1 else PartialError.exit_code


def _ask_target(target: Target, verb: Verb, argv: Sequence[str], sudo: bool) -> GpuAnswer:
    words = [verb.name, "--json", *argv]
    if isinstance(target, InventoryTarget):
        import testinfra  # noqa: PLC0415 - slow, and only for inventories

        try:
            code, out, err = run_command(testinfra.get_host(target.hostspec), _command(words, sudo))
        except RuntimeError as error:
            raise UnavailableError(f"{target.name} can't be reached: {error}") from error
    else:
        lasts = verb.changes or DURATION_OPTIONS & {option.name for option in verb.options}
        # without standard input: ssh would read what is meant for the caller's next command
        try:
            done = programs.run(gpu_command(target, words, sudo), limit_s=NO_LIMIT_S if lasts else TIMEOUT_S)
        except programs.ProgramTimeoutError as late:
            raise UnavailableError(
                f"{target.name} gave no answer in {TIMEOUT_S:.0f} s", hint="log in and look what hangs"
            ) from late
        out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        code = done.returncode
    try:
        document = parse_json(out[out.index("{") :])
    except ValueError:
        raise _no_answer(target, code, err or out) from None
    if document.get("schema") != verb.schema:
        raise UnavailableError(
            f"{target.name} answers {document.get('schema')}, wanted {verb.schema}",
            hint="its gpukiln-gpu is of another version: `invoke node.apply` brings it up to date",
        )
    return GpuAnswer(tuple(document["nodes"]), tuple(document["failed"]), code)


def _no_answer(target: Target, code: int, said: str) -> UnavailableError:
    output = " ".join(said.split())[-300:]
    # Exit codes of a shell and of ssh(1): 127 the command was not found, 255 ssh itself failed.
    if code == NOT_FOUND or "not found" in output or "No such file" in output:
        return UnavailableError(
            f"{target.name} has no {PROGRAM}",
            hint="the role gpu_tools installs it: invoke node.apply, or bake the image again",
        )
    if code == SSH_FAILED:
        return UnavailableError(
            f"{target.name} can't be reached: {output}",
            hint="try `ssh` by hand; a jump host belongs into ~/.ssh/config",
        )
    return UnavailableError(f"{target.name}: gpukiln-gpu exits {code}: {output or 'without a word'}")


def run_interactive(
    target: Target, verb: Verb, argv: Sequence[str], command: Sequence[str], *, sudo: bool
) -> int:
    """Run a verb on a machine with this terminal as its own; returns its exit code.

    Raises:
        UsageError: Ansible reaches it, which passes no terminal on.
    """
    if isinstance(target, InventoryTarget):
        raise UsageError(
            f"{verb.name} needs a terminal, and Ansible passes none on to {target.name}",
            hint="name it as ssh://USER@HOST",
        )
    words = [verb.name, *argv, *(["--", *command] if command else [])]
    return programs.run_on_terminal(gpu_command(target, words, sudo, terminal=sys.stdin.isatty()))


def gpu_command(target: Target, words: Sequence[str], sudo: bool, *, terminal: bool = False) -> list[str]:
    """The command line that runs gpukiln-gpu on a machine."""
    if not isinstance(target, SshTarget):
        return [sys.executable, "-m", "gpukiln.gpus", *words]
    return target.ssh.command(_command(words, sudo), terminal=terminal)


def _command(words: Sequence[str], sudo: bool) -> str:
    """For the shell of the machine's user, which is what SSH gives it to: every word is quoted."""
    return shlex.join([*(["sudo", "-n"] if sudo else []), PROGRAM, *words])
