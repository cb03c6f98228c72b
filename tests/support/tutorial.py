"""Types a tutorial: the commands of its ```console blocks, in one shell, compared with what the page shows.

A line `$ COMMAND` is typed, `> ` continues it, `# exit N` at its end is the exit code that is expected.
Every other line is what the command prints, standard output and errors together: `...` stands for any text,
and a line of `...` alone for any lines.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT = re.compile(r"\s+# exit (\d+)$")
LIMIT_S = 1800


@dataclass(frozen=True)
class Step:
    """A command of a page.

    Attributes:
        command: As it is typed, continuation lines included.
        exit_code: What it exits with.
        output: What it prints, with `...`.
    """

    command: str
    exit_code: int
    output: str


def steps(page: str) -> Iterator[Step]:
    r"""The commands of a page, in order.

    >>> list(steps("```console\n$ false # exit 1\nno ...\n```\n"))
    [Step(command='false', exit_code=1, output='no ...\n')]
    """
    for block in BLOCK.findall(page):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = text.splitlines()
            typed = [lines.pop(0)]
            while lines and lines[0].startswith("> "):
                typed.append(lines.pop(0).removeprefix("> "))
            code = EXIT.search(typed[0])
            typed[0] = EXIT.sub("", typed[0])
            yield Step("\n".join(typed), int(code[1]) if code else 0, "".join(f"{line}\n" for line in lines))


def agrees(expected: str, printed: str) -> bool:
    r"""Whether a command printed what the page shows.

    >>> agrees("...\nready in ... s\n", "a\nb\nready in 3 s\n")
    True
    >>> agrees("ready\n", "ready\nand more\n")
    False
    """
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "..." else ".*".join(map(re.escape, line.split("..."))) + r"[ ]*\n"
        for line in expected.splitlines()
    )
    return (
        re.fullmatch(pattern, printed if printed.endswith("\n") or not printed else f"{printed}\n")
        is not None
    )


def type_page(page: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Type every command of a page.

    Args:
        folder: Where the first one is typed.
        environment: Of the shell; what a command exports or sets is there for the next.
    """
    state = folder / ".shell"
    state.write_text(f"cd {folder}\n")
    for step in steps(page):
        # The shell of each command goes on where the one before ended: its folder, its variables, its $1.
        script = (
            f"source {state}\n{step.command}\ncode=$?\n"
            f'{{ export -p; printf "cd %q\\n" "$PWD"; printf "set --"; printf " %q" "$@"; echo; }} '
            f"> {state}\nexit $code\n"
        )
        done = subprocess.run(
            ["bash", "-c", script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        shown = f"$ {step.command}\n{done.stdout}(exit {done.returncode})"
        assert done.returncode == step.exit_code, f"{shown}, the page has {step.exit_code}"
        assert agrees(step.output, done.stdout), f"{shown}\nthe page has:\n{step.output}"
