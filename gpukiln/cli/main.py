"""The program: `gpukiln NOUN VERB` where it is installed, in a checkout Invoke, `noun.verb`."""

from __future__ import annotations

import importlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import FrameType

from gpukiln import __version__
from gpukiln.cli import completion, settings, streams
from gpukiln.cli.command import Command, end, missing
from gpukiln.errors import UsageError
from gpukiln.options import columns, near, options_of, read, usage

NOUNS = {
    "ami": (
        "machine images: plan, build, verify, release",
        ("ami", "ami_attest", "ami_diff", "ami_export", "ami_verify", "release"),
    ),
    "cloud": ("the EC2 on this machine, and what AWS needs", ("cloud", "cloud_gpus", "cloud_policy")),
    "docker": ("container images: plan, build, verify, push", ("docker", "docker_check", "docker_push")),
    "gpu": ("GPUs of this machine and of others: look, lease, run, watch, account", ("gpu",)),
    "k8s": (
        "clusters: nodes, add-ons, jobs, checks of manifests and of live clusters",
        ("k8s_addons", "k8s_check", "k8s_cluster", "k8s_job", "k8s_nodes"),
    ),
    "node": ("live GPU nodes: converge, compare, verify", ("node", "node_passthrough")),
    "offer": ("which machines satisfy a request, and what they cost", ("offer",)),
    "workspace": (
        "machines on which people work, from an offer to a session",
        ("workspace", "workspace_look"),
    ),
    "project": ("a folder with the defaults of its commands: init, config", ("project",)),
}
"""What each noun is about, and the modules that have its commands; a module is imported when it is asked."""

INVOKE, GPUKILN = "invoke", "gpukiln"
COMMIT_DIGITS = 12  # what the Linux kernel's documents ask for in a reference to a commit
HELP = ("-h", "--help")
OPTIONS = (
    ("-h, --help", "show this, or what a command takes"),
    ("-l, --list [NOUN]", "list the commands, all or those of one noun"),
    ("-V, --version", "show the version and its commit"),
)


@cache
def commands(noun: str) -> dict[str, type[Command]]:
    """The commands of a noun, by verb."""
    found: dict[str, type[Command]] = {}
    for module in NOUNS[noun][1]:
        for kind in vars(importlib.import_module(f"gpukiln.commands.{module}")).values():
            if isinstance(kind, type) and issubclass(kind, Command) and "run" in vars(kind):
                words = re.findall("[A-Z][a-z0-9]*", kind.__name__.removesuffix("Command"))
                if len(words) > 1 and words[0].lower() == noun:
                    found["-".join(words[1:]).lower()] = kind
    return dict(sorted(found.items()))


def names(noun: str = "") -> list[str]:
    """The commands as `noun.verb`, all or those of one noun."""
    return [f"{one}.{verb}" for one in ([noun] if noun else sorted(NOUNS)) for verb in commands(one)]


def command(name: str) -> type[Command]:
    """The command that is named `noun.verb`."""
    noun, _, verb = name.partition(".")
    return commands(noun)[verb]


def main(argv: Sequence[str] | None = None, program: str = GPUKILN) -> int:
    """Do what was typed behind the program's name; returns the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    with streams.errors_anywhere(), streams.program(program):
        return end(_work, list(sys.argv[1:] if argv is None else argv), program)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _work(words: list[str], program: str) -> int | None:
    if words[:1] == ["--complete"]:
        _say(*completion.complete(words[2:], program))
        return None
    at = words.index("--") if "--" in words else len(words)
    asked = [word for word in words[:at] if word not in HELP]
    wants_help = len(asked) < at
    if program == GPUKILN and asked[:1] in (["init"], ["config"]):
        asked.insert(0, "project")
    first = asked[0] if asked else ""
    if program == GPUKILN and first in NOUNS and (wants_help or len(asked) > 1):
        if len(asked) == 1:
            asked.insert(0, "--list")
        else:
            asked[:2] = [".".join(asked[:2])]
        first = asked[0]
    if not asked:
        _say(*_about(program))
    elif first in ("-V", "--version"):
        _say(_version())
    elif first in ("-l", "--list"):
        _say(_list("".join(asked[1:2]), program))
    elif first in ("completion", "--print-completion-script"):
        _say(completion.script("".join(asked[1:2]), program))
    elif first.startswith("-"):
        raise _unknown_option(first, program)
    else:
        kind, typed = _find(first, program), typed_as(first, program)
        options = options_of(kind)
        if not wants_help:
            values = read(typed, options, asked[1:] + words[at:], settings.complete)
            return _run(kind(**values), first)
        _say(f"Usage: {usage(typed, options)}\n", f"{(kind.__doc__ or '').strip()}\n")
        _say(columns([(one.shown, one.described) for one in options if not one.rest]))
    return None


def _run(made: Command, name: str) -> int | None:
    try:
        return made.run()
    except ModuleNotFoundError as error:
        raise missing(error, name.partition(".")[0]) from error


def _say(*lines: str) -> None:
    for line in lines:
        print(line)


def _version() -> str:
    from gpukiln.images.commit import source_commit

    commit = source_commit()
    digits, dash, dirty = commit.partition("-")
    return (
        f"gpukiln {__version__}, commit {digits[:COMMIT_DIGITS]}{dash}{dirty}"
        if commit
        else f"gpukiln {__version__}"
    )


def _unknown_option(word: str, program: str) -> UsageError:
    flags = ["--help", "--list", "--version"]
    meant = near(word, flags)
    return UsageError(
        f"unknown option {word!r}; valid: {', '.join(flags)}",
        hint=f"did you mean {meant[0]}?" if meant else f"`{program} --help` shows them",
    )


def _find(name: str, program: str) -> type[Command]:
    noun, _, verb = name.partition(".")
    if noun in NOUNS and verb in commands(noun):
        return command(name)
    valid = names(noun) if noun in NOUNS else names()
    shown = [typed_as(one, program).partition(" ")[2] for one in valid]
    wrong = typed_as(name, program).partition(" ")[2] if "." in name else name
    if noun in NOUNS and not verb:
        raise UsageError(
            f"unknown command {wrong!r}; valid: {', '.join(shown)}",
            hint=f"`{program} --list {noun}` says what each does",
        )
    meant = near(wrong, shown)
    raise UsageError(
        f"unknown command {wrong!r}",
        hint=f"did you mean {' or '.join(meant)}?" if meant else f"`{program} --list` lists them",
    )


def typed_as(name: str, program: str) -> str:
    """A command as it is typed: `invoke ami.build`, or `gpukiln ami build`."""
    return f"{program} {name if program == INVOKE else name.replace('.', ' ', 1)}"


def _about(program: str) -> Iterator[str]:
    """What the program's help says."""
    if program == INVOKE:
        yield f"Usage: invoke COMMAND [ARGUMENT...] [--OPTION...]\n\n{_list('', program)}"
    else:
        yield "Usage: gpukiln NOUN VERB [ARGUMENT...] [--OPTION...]\n"
        nouns = [(noun, about) for noun, (about, _) in NOUNS.items()]
        yield columns([*nouns, ("completion SHELL", "print the completion for bash, zsh or fish")])
    yield f"Options:\n\n{columns(OPTIONS)}"
    if program == INVOKE:
        yield "`invoke COMMAND -h` says what a command takes."
    else:
        yield "`gpukiln NOUN -h` lists commands, `gpukiln NOUN VERB -h` says what one takes."


def _list(noun: str, program: str) -> str:
    if noun and noun not in NOUNS:
        raise UsageError(f"no command begins with {noun!r}", hint=f"`{program} --list` lists them")
    shown = [(typed_as(one, program).partition(" ")[2], command(one).__doc__ or "") for one in names(noun)]
    return columns([(name, about.strip().partition("\n")[0]) for name, about in shown])


if __name__ == "__main__":
    sys.exit(main())
