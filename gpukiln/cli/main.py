"""The program: `gpukiln NOUN VERB` where it is installed; in a checkout Invoke, with `noun.verb`."""

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
from gpukiln.cli.command import Command, exit_code_of, missing_extra
from gpukiln.errors import UsageError
from gpukiln.options import columns, options_of, read, suggestions, usage

NOUNS = {
    "ami": (
        "machine images: plan, build, verify, release",
        ("ami", "ami_attest", "ami_diff", "ami_export", "ami_verify", "release"),
    ),
    "cloud": (
        "the EC2 on this machine, and what AWS needs",
        ("cloud", "cloud_cluster", "cloud_gpus", "cloud_policy"),
    ),
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
"""The help of each noun, and the modules of its commands; they are imported when they are needed."""

INVOKE, GPUKILN = "invoke", "gpukiln"
COMMIT_DIGITS = 12  # what the Linux kernel's documents ask for in a reference to a commit
HELP = ("-h", "--help")
OPTIONS = (
    ("-h, --help", "show this, or the options of a command"),
    ("-l, --list [NOUN]", "list the commands, all or those of one noun"),
    ("-V, --version", "show the version and its commit"),
)


@cache
def commands(noun: str) -> dict[str, type[Command]]:
    """The commands of a noun, by verb."""
    # By name: a module that imports a command of another for its options has that class, too.
    by_verb: dict[str, type[Command]] = {}
    for module in NOUNS[noun][1]:
        for kind in vars(importlib.import_module(f"gpukiln.commands.{module}")).values():
            # In its own namespace: groups of options inherit `run` of the base, and are no commands.
            if isinstance(kind, type) and issubclass(kind, Command) and "run" in vars(kind):
                words = re.findall("[A-Z][a-z0-9]*", kind.__name__.removesuffix("Command"))
                if len(words) > 1 and words[0].lower() == noun:
                    by_verb["-".join(words[1:]).lower()] = kind
    return dict(sorted(by_verb.items()))


def names(noun: str = "") -> list[str]:
    """The commands as `noun.verb`, all or those of one noun."""
    return [
        f"{of_noun}.{verb}" for of_noun in ([noun] if noun else sorted(NOUNS)) for verb in commands(of_noun)
    ]


def command(name: str) -> type[Command]:
    """The class of a command by its name, `noun.verb`."""
    noun, _, verb = name.partition(".")
    return commands(noun)[verb]


def main(argv: Sequence[str] | None = None, program: str = GPUKILN) -> int:
    """Run the command that was typed; returns the exit code.

    Args:
        argv: The words after the program's name.
        program: The name by which hints and help show commands.
    """
    # `timeout` and systemd end a program by SIGTERM: it removes machines then as after Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    # Outside of exit_code_of, which writes errors with hints to standard error.
    with streams.errors_anywhere(), streams.program(program):
        return exit_code_of(_dispatch, list(sys.argv[1:] if argv is None else argv), program)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _dispatch(words: list[str], program: str) -> int | None:
    if words[:1] == ["--complete"]:
        _say(*completion.complete(words[2:], program))
        return None
    # Help may stand anywhere, but not among the words for another program.
    at = words.index("--") if "--" in words else len(words)
    typed_words = [word for word in words[:at] if word not in HELP]
    wants_help = len(typed_words) < at
    # `gpukiln init` and `gpukiln config` have no noun, as in git and cargo.
    if program == GPUKILN and typed_words[:1] in (["init"], ["config"]):
        typed_words.insert(0, "project")
    first = typed_words[0] if typed_words else ""
    if program == GPUKILN and first in NOUNS and (wants_help or len(typed_words) > 1):
        # `gpukiln ami -h`: the commands of the noun.
        if len(typed_words) == 1:
            typed_words.insert(0, "--list")
        else:
            typed_words[:2] = [".".join(typed_words[:2])]
        first = typed_words[0]
    if not typed_words:
        _say(*_about(program))
    elif first in ("-V", "--version"):
        _say(_version())
    elif first in ("-l", "--list"):
        _say(_list("".join(typed_words[1:2]), program))
    elif first in ("completion", "--print-completion-script"):  # the second is Invoke's own spelling
        _say(completion.script("".join(typed_words[1:2]), program))
    elif first.startswith("-"):
        raise _unknown_option(first, program)
    else:
        kind, typed = _find(first, program), typed_as(first, program)
        options = options_of(kind)
        if not wants_help:
            # Help does not come here: it must not fail for a wrong gpukiln.toml, or wait for AWS's settings.
            values = read(typed, options, typed_words[1:] + words[at:], settings.complete)
            return _run(kind(**values), first)
        _say(f"Usage: {usage(typed, options)}\n", f"{(kind.__doc__ or '').strip()}\n")
        _say(columns([(option.shown, option.described) for option in options if not option.rest]))
    return None


def _run(typed: Command, name: str) -> int | None:
    try:
        return typed.run()
    # Only what `run` imports can be missing: what the modules of commands import at their top is installed
    # without any extra.
    except ModuleNotFoundError as error:
        raise missing_extra(error, name.partition(".")[0]) from error


def _say(*lines: str) -> None:
    for line in lines:
        print(line)


def _version() -> str:
    from gpukiln.images.commit import source_commit

    commit = source_commit()
    # `-dirty` is kept: the commit alone would name another source than the one that runs.
    digits, dash, dirty = commit.partition("-")
    return (
        f"gpukiln {__version__}, commit {digits[:COMMIT_DIGITS]}{dash}{dirty}"
        if commit
        else f"gpukiln {__version__}"
    )


def _unknown_option(word: str, program: str) -> UsageError:
    flags = ["--help", "--list", "--version"]
    meant = suggestions(word, flags)
    return UsageError(
        f"unknown option {word!r}; valid: {', '.join(flags)}",
        hint=f"did you mean {meant[0]}?" if meant else f"`{program} --help` shows them",
    )


def _find(name: str, program: str) -> type[Command]:
    noun, _, verb = name.partition(".")
    if noun in NOUNS and verb in commands(noun):
        return command(name)
    valid = names(noun) if noun in NOUNS else names()
    shown = [typed_as(valid_name, program).partition(" ")[2] for valid_name in valid]
    wrong = typed_as(name, program).partition(" ")[2] if "." in name else name
    # A noun has few enough commands to name them all in the error.
    if noun in NOUNS and not verb:
        raise UsageError(
            f"unknown command {wrong!r}; valid: {', '.join(shown)}",
            hint=f"`{program} --list {noun}` shows what each does",
        )
    meant = suggestions(wrong, shown)
    raise UsageError(
        f"unknown command {wrong!r}",
        hint=f"did you mean {' or '.join(meant)}?" if meant else f"`{program} --list` lists them",
    )


def typed_as(name: str, program: str) -> str:
    """A command as it is typed.

    >>> typed_as("ami.build", INVOKE)
    'invoke ami.build'
    >>> typed_as("ami.build", GPUKILN)
    'gpukiln ami build'
    """
    return f"{program} {name if program == INVOKE else name.replace('.', ' ', 1)}"


def _about(program: str) -> Iterator[str]:
    """The help of the program."""
    if program == INVOKE:
        yield f"Usage: invoke COMMAND [ARGUMENT...] [--OPTION...]\n\n{_list('', program)}"
    else:
        yield "Usage: gpukiln NOUN VERB [ARGUMENT...] [--OPTION...]\n"
        nouns = [(noun, about) for noun, (about, _) in NOUNS.items()]
        yield columns([*nouns, ("completion SHELL", "print the completion for bash, zsh or fish")])
    yield f"Options:\n\n{columns(OPTIONS)}"
    if program == INVOKE:
        yield "`invoke COMMAND -h` shows the options of a command."
    else:
        yield "`gpukiln NOUN -h` lists commands, `gpukiln NOUN VERB -h` shows the options of one."


def _list(noun: str, program: str) -> str:
    if noun and noun not in NOUNS:
        raise UsageError(f"no command begins with {noun!r}", hint=f"`{program} --list` lists them")
    shown = [(typed_as(name, program).partition(" ")[2], command(name).__doc__ or "") for name in names(noun)]
    return columns([(name, about.strip().partition("\n")[0]) for name, about in shown])


if __name__ == "__main__":
    sys.exit(main())
