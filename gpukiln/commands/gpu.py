"""GPUs of this machine and of others: `invoke gpu.VERB` is `gpukiln-gpu VERB`, on many machines at once."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, say
from gpukiln.gpus.verb import Option, Options, Verb, document
from gpukiln.gpus.verbs import verbs

if TYPE_CHECKING:
    from gpukiln.verify.target import Target

HERE = (
    Option("hosts", "ssh://[USER@]HOST[:PORT], local:// or ansible://PATTERN, separated by commas"),
    Option("inventory", "Ansible inventory: a file or a folder"),
    Option("limit", "only these hosts of the inventory, an Ansible pattern"),
    Option("sudo", "become root on the hosts, by sudo without a password", default=False),
    Option("forks", "hosts that are asked at the same time", default=50),
    Option("json", "print one JSON document to standard output", default=False),
)


def make(verb: Verb) -> Any:
    """The Invoke task of a verb: its options, and those that name hosts."""
    options = (*verb.options, *HERE)

    def body(_: Any, **typed: Any) -> int:
        return perform(verb, typed)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(one.name, kind, default=None if isinstance(one.default, tuple) else one.default)
        for one in options
    ]
    if verb.takes_command:
        parameters.append(inspect.Parameter("command", kind, default=None))
    first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    body.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    body.__name__ = verb.name
    body.__doc__ = verb.help
    listed = [one.name for one in options if isinstance(one.default, tuple)]
    task = command(
        name=verb.name,
        help={one.name: one.help for one in options},
        iterable=[*listed, *(["command"] if verb.takes_command else [])],
    )(body)
    task.letters = {one.letter: one.name for one in options if one.letter}
    task.first = next((one.name for one in options if one.first), "")
    return task


def perform(verb: Verb, typed: dict[str, Any]) -> int:
    """Do what was typed, here or on hosts; returns the exit code."""
    from gpukiln.errors import GpukilnError
    from gpukiln.gpus import cli
    from gpukiln.gpus.model import plain

    rest = tuple(typed.pop("command", None) or ())
    where = {one.name: typed.pop(one.name) for one in HERE}
    values = {
        one.name: tuple(typed[one.name] or ()) if isinstance(one.default, tuple) else typed[one.name]
        for one in verb.options
    }
    options = Options(command=rest, json=where["json"], **values)
    targets = _targets(where)
    if not targets:
        try:
            return cli.run(verb, options)
        except GpukilnError as error:
            if options.json:
                print_document(verb.schema, document(verb, [], [plain(cli.failure(error))]))
            raise
    return _on_hosts(verb, options, targets, where)


def _targets(where: dict[str, Any]) -> list[Target]:
    """The hosts that were named; none for this machine, in this process."""
    from pathlib import Path

    from gpukiln.errors import UsageError
    from gpukiln.nodes.hosts import find_targets

    if not where["hosts"] and not where["inventory"]:
        if where["limit"] or where["sudo"]:
            raise UsageError(
                "--limit and --sudo are about hosts, and none is named", hint="--hosts or --inventory"
            )
        return []
    inventory = Path(where["inventory"]) if where["inventory"] else None
    return find_targets(where["hosts"], inventory, where["limit"])


def _on_hosts(verb: Verb, options: Options, targets: list[Target], where: dict[str, Any]) -> int:
    from gpukiln.errors import UsageError
    from gpukiln.nodes.gpus import ask_all, take_over

    argv = words_of(verb, options)
    alone = verb.changes or (verb.takes_over is not None and not where["json"])
    if alone and len(targets) > 1:
        raise UsageError(f"gpu.{verb.name} works on one host, and {len(targets)} are named", hint="name one")
    if verb.takes_over is not None and not where["json"]:
        return take_over(targets[0], verb, argv, options.command, sudo=where["sudo"])
    said = ask_all(targets, verb, argv, sudo=where["sudo"], forks=where["forks"] or 1)
    nodes = [node for one in said for node in one.nodes]
    failed = [one_failed for one in said for one_failed in one.failed]
    if where["json"]:
        print_document(verb.schema, document(verb, nodes, failed))
    console = results(json=where["json"])
    for number, node in enumerate(nodes if not where["json"] else ()):
        if number:
            console.tell("")
        verb.show(node, options, console.tell)
    for one in failed:
        named = one["message"].startswith(one["node"])
        say(f"error: {'' if named else one['node'] + ': '}{one['message']}")
        for line in one["details"]:
            say(f"  {line}")
        if one["hint"]:
            say(f"next: {one['hint']}")
    codes = {one.exit_code for one in said}
    return codes.pop() if len(codes) == 1 else 5


def words_of(verb: Verb, options: Options) -> list[str]:
    """What was typed, as gpukiln-gpu is told it on another machine."""
    argv: list[str] = []
    for one in verb.options:
        value = getattr(options, one.name)
        if value == one.default:
            continue
        if one.default is False:
            argv.append(one.flag)
        elif isinstance(one.default, tuple):
            argv += [f"{one.flag}={part}" for part in value]
        else:
            argv.append(f"{one.flag}={value}")
    return argv


for _verb in verbs().values():
    globals()[_verb.name] = make(_verb)
