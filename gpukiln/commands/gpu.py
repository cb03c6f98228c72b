"""GPUs of this machine and of others: `invoke gpu.VERB` is `gpukiln-gpu VERB`, on many machines at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpukiln.cli.command import HostOptions, results, say
from gpukiln.errors import GpukilnError, UsageError
from gpukiln.gpus.verb import Options, Verb, document
from gpukiln.gpus.verbs import verbs
from gpukiln.options import Option, option

if TYPE_CHECKING:
    from gpukiln.verify.target import Target


@dataclass(frozen=True)
class OnHosts(HostOptions):
    """A verb of gpukiln-gpu, on this machine or on hosts."""

    verb: ClassVar[Verb]
    sudo: bool = option("become root on the hosts, by sudo without a password", False)
    forks: int = option("hosts that are asked at the same time", 50)

    def perform(self) -> int:
        """Run the verb; returns the exit code."""
        from gpukiln.gpus import cli

        options = Options(**self.pick(*(declared.name for declared in self.verb.all_options)))
        targets = self.targets()
        if targets:
            return self._on_hosts(options, targets)
        try:
            return cli.run(self.verb, options)
        except GpukilnError as error:
            # A program that reads --json gets a document also of this failure, as it does of a host's.
            failed = [cli.failure(error)]
            self.report(document(self.verb, [], failed), schema=self.verb.schema)
            raise

    def targets(self) -> list[Target]:
        """The hosts that were named; none for this machine, in this process."""
        if not self.hosts and not self.inventory:
            if self.limit or self.sudo:
                raise UsageError(
                    "--limit and --sudo are about hosts, and none is named", hint="--hosts or --inventory"
                )
            return []
        return super().targets()

    def _on_hosts(self, options: Options, targets: list[Target]) -> int:
        from gpukiln.nodes.gpus import ask_all, error_lines, exit_code, run_interactive

        verb, argv = self.verb, words_of(self.verb, options)
        takes_terminal = verb.takes_over is not None and not self.json
        # One host's failure must not leave a change half done on others, and there is one terminal.
        if (verb.changes or takes_terminal) and len(targets) > 1:
            raise UsageError(
                f"gpu.{verb.name} works on one host, and {len(targets)} are named", hint="name one"
            )
        if takes_terminal:
            return run_interactive(targets[0], verb, argv, options.command, sudo=self.sudo)
        # --forks 0 would be a pool without a thread.
        answers = ask_all(targets, verb, argv, sudo=self.sudo, forks=self.forks or 1)
        nodes = [node for answer in answers for node in answer.nodes]
        failed = [failure for answer in answers for failure in answer.failed]
        self.report(document(verb, nodes, failed), schema=verb.schema)
        console = results()
        for number, node in enumerate(() if self.json else nodes):
            if number:
                console.print_text("")
            verb.show(node, options, console.print_text)
        for line in error_lines(failed):
            say(line)
        return exit_code(answers)


def words_of(verb: Verb, options: Options) -> list[str]:
    """The options as words for gpukiln-gpu on another machine; those with their default are left out."""
    argv: list[str] = []
    for declared in verb.options:
        value = getattr(options, declared.name)
        if value == declared.default:
            continue
        if declared.default is False:
            argv.append(declared.flag)
        elif isinstance(declared.default, tuple):
            # With `=`, as a value may begin with a dash.
            argv += [f"{declared.flag}={part}" for part in value]
        else:
            argv.append(f"{declared.flag}={value}")
    return argv


def make(verb: Verb) -> type[OnHosts]:
    """The command of a verb: its options, and those that name hosts."""
    return make_dataclass(
        f"Gpu{verb.name.capitalize()}",
        [
            (declared.name, type(declared.default), _field(declared))
            for declared in verb.all_options
            # HostOptions has it.
            if declared.name != "json"
        ],
        bases=(OnHosts,),
        namespace={"verb": verb, "run": OnHosts.perform, "__doc__": verb.help},
        frozen=True,
    )


def _field(declared: Option) -> Any:
    # `option` declares a field, whose name make_dataclass gets by itself.
    return option(**{name: value for name, value in asdict(declared).items() if name != "name"})


# `gpukiln.cli.main.commands` finds the classes of a module by their names.
for _verb in verbs().values():
    globals()[f"Gpu{_verb.name.capitalize()}"] = make(_verb)
