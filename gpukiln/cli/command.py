"""The base of all commands: option groups, output, and errors as a message and an exit code.

Here and at the top of a command's module only light modules are imported: completion in a shell and
`invoke --list` import every command, and must be quick.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from gpukiln import recipes
from gpukiln.cli import streams
from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.files import FULL, reader_has_ended
from gpukiln.options import option
from gpukiln.programs import SPACE_HINT

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpukiln.clouds.base import Cloud
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.progress import PlainConsole
    from gpukiln.verify.target import Target

P = ParamSpec("P")
INTERRUPTED = 130  # of a shell for a program that SIGINT ended: 128 + 2 (bash(1), EXIT STATUS)
_OS_HINTS = {
    **dict.fromkeys(FULL, SPACE_HINT),
    # Root keeps its state in /var/lib/gpukiln, which others can't write (gpukiln/state.py).
    errno.EACCES: "run as root, or let $GPUKILN_HOME name a folder of your own",
    errno.EROFS: "let $GPUKILN_HOME name a folder that can be written to",
}
EXTRAS = {
    # Names as they are imported, which differ from those on PyPI: pytest-testinfra is testinfra,
    # packageurl-python is packageurl.
    "image": (
        *("_pytest", "ansible-core", "ansible_runner", "cryptography", "cyclonedx", "jinja2", "packageurl"),
        *("packaging", "pytest", "securesystemslib", "testinfra", "tomlkit", "univers"),
    ),
    "embedded": ("flask", "moto", "werkzeug"),
    "k8s": ("cryptography", "cyclonedx", "jinja2", "packageurl", "securesystemslib"),
    "proxmox": ("proxmoxer", "requests", "requests_toolbelt"),
}
"""The modules that an extra of pyproject.toml installs; tests/unit/test_installed.py compares them."""
DEFAULT_REGION = "us-west-2"
REGION_DEFAULT = f"default: that of AWS's own settings, else {DEFAULT_REGION}"
CLOUD = option("embedded (this machine) or aws (your account)", "embedded", setting="cloud")
SIGNERS = "a private key as PEM file, awskms:KEY of AWS KMS, or sigstore: as the identity of this CI job"


@dataclass(frozen=True)
class Command:
    """A command: its fields are its options, its docstring is its help, `run` carries it out.

    A class with `run` is a command, named by its class: `AmiBuild` is ami.build, and so is `AmiBuildCommand`,
    where the first name is taken. One without is a group of options that several commands share.
    """

    def run(self) -> int | None:
        """Carry the command out; returns the exit code, None for 0."""
        raise NotImplementedError

    def pick(self, *names: str) -> dict[str, Any]:
        """Values of options by name, for a call whose arguments have the same names."""
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class JsonOptions(Command):
    """A command that prints a document."""

    json: bool = option("print one JSON document to standard output", False)

    def show(self, *parts: RenderableType) -> None:
        """Print a result for people: on standard output, or with --json on standard error."""
        results(json=self.json).show(*parts)

    def report(
        self, document: Any = None, parts: Iterable[RenderableType] = (), *, schema: str = "", **fields: Any
    ) -> None:
        """Print a result: with --json the document, else its parts for people.

        Args:
            document: A dataclass or plain data.
            parts: Texts and tables; none for a command that calls `show` while it works.
            schema: The document's name in `gpukiln.cli.schemas`; empty: its field `schema`.
            fields: Further fields of the document.
        """
        # Standard output has one document and nothing else, so that a program can parse all of it.
        if self.json:
            print_document(schema or document.schema, document, **fields)
        else:
            self.show(*parts)


@dataclass(frozen=True)
class RemovalOptions(Command):
    """A command that removes only with --yes."""

    yes: bool = option("remove it; without --yes nothing is removed", False)
    dry_run: bool = option("only show it, the default", False)

    @property
    def removes(self) -> bool:
        """Whether the command removes what it shows."""
        # Of two options that contradict each other the safer one counts.
        return self.yes and not self.dry_run


@dataclass(frozen=True)
class ProfileOptions(Command):
    """A command that may use AWS."""

    profile: str = option("AWS profile (aws only)", setting="profile")

    def connect_to(self, cloud: str, region: str) -> Cloud:
        """A cloud in a region, with the profile of the options."""
        from gpukiln.clouds.select import make_cloud

        return make_cloud(cloud, region, profile=self.profile or None)


@dataclass(frozen=True)
class PlaceOptions(ProfileOptions, JsonOptions):
    """A command that uses one region of one cloud."""

    cloud: str = CLOUD
    # Each command has both spellings, whether it takes one region or several: nobody has to remember which.
    region: str = option("AWS region, for example us-west-2", also="regions", setting="region")

    def connect(self) -> Cloud:
        """The cloud, in this region."""
        return self.connect_to(self.cloud, self.region)


@dataclass(frozen=True)
class HostOptions(JsonOptions):
    """A command that works on named machines."""

    hosts: str = option("ssh://[USER@]HOST[:PORT], local:// or ansible://PATTERN, separated by commas")
    inventory: str = option("Ansible inventory: a file or a folder")
    limit: str = option("only these hosts of the inventory, an Ansible pattern")

    def targets(self) -> list[Target]:
        """The machines.

        Raises:
            UsageError: No machine is named, or a name has another form.
        """
        from gpukiln.nodes.hosts import find_targets

        # Ansible runs in another folder, where a relative path would name another file.
        inventory = Path(self.inventory).expanduser().absolute() if self.inventory else None
        return find_targets(self.hosts, inventory, self.limit)


@dataclass(frozen=True)
class KubernetesOptions(JsonOptions):
    """A command that works on a cluster."""

    context: str = option("context of the kubeconfig; default: its current one")
    kubeconfig: str = option("default: $KUBECONFIG, then ~/.kube/config")
    namespace: str = option("default: the context's")

    def api(self) -> Cluster:
        """The cluster's API server."""
        from gpukiln.kubernetes.cluster import Cluster

        return Cluster(self.context, self.kubeconfig)


@dataclass(frozen=True)
class MachineOptions(Command):
    """A command that starts machines on AWS to bake or verify."""

    subnet_id: str = option("subnet of the machines that bake and verify (aws only)", setting="subnet_id")
    ssh_cidr: str = option(
        "network that reaches SSH of those machines, for example 203.0.113.7/32; default: this machine's "
        "public address (aws only)",
        setting="ssh_cidr",
    )


@dataclass(frozen=True)
class ExistingImageOptions(ProfileOptions, JsonOptions):
    """A command that uses an existing image."""

    region: str = option("where the image is, when this machine has no record of it", also="regions")
    cloud: str = option("where the image is; default: as its record says")


def exit_code_of(work: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    """Call a function; an error becomes a message, and the exit code that is returned."""
    try:
        with streams.output_named():
            return work(*args, **kwargs) or 0
    except GpukilnError as error:
        print_error(error)
        # What could not be written is still in the buffer.
        if isinstance(error, streams.OutputError):
            streams.forget_output()
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        # Notes name machines that still run and cost money, and removals that failed.
        for note in getattr(interrupt, "__notes__", ()):
            print(note, file=sys.stderr)
        return INTERRUPTED
    # What no package has turned into an error of its own, such as a full disk or a folder without permission,
    # is for the user to fix: a message, no traceback.
    except OSError as error:
        # `| head` has read enough: no failure. A broken pipe to a program or a connection is one.
        if isinstance(error, BrokenPipeError) and reader_has_ended(sys.stdout):
            streams.forget_output()
            return 0
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print_error(UnavailableError(what, hint=_os_hint(error)))
        return UnavailableError.exit_code


def missing_extra(error: ModuleNotFoundError, noun: str) -> Exception:
    """An error that names the extra with a missing module; the error itself where no extra has it.

    Args:
        noun: Of the command; the extra of this name is preferred where several have the module.
    """
    # The error names what was imported, `moto.core`; EXTRAS has the module at the top.
    module = str(error.name).partition(".")[0]
    extras = [extra for extra, modules in EXTRAS.items() if module in modules]
    if not extras:
        # A module that no extra has is a defect of gpukiln, and keeps its traceback.
        return error
    extra = noun if noun in extras else extras[0]
    how = "scripts/run installs it" if recipes.is_checkout() else f"pip install 'gpukiln[{extra}]'"
    return UnavailableError(f"this command needs {module}, which is not installed", hint=how)


def _os_hint(error: OSError) -> str:
    file = Path(str(error.filename or "."))
    # A file of the checkout that was removed; of an installed package only a new installation has it.
    if error.errno == errno.ENOENT and recipes.is_checkout() and file.is_relative_to(recipes.root()):
        return f"`git checkout -- {file.relative_to(recipes.root())}` restores a file of the repository"
    return _OS_HINTS.get(error.errno or 0, "")


def print_error(error: GpukilnError) -> None:
    """Write an error for people."""
    print(f"error: {error.message}", file=sys.stderr)
    for line in error.details:
        print(f"  {line}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"also: {note}", file=sys.stderr)
    if error.hint:
        print(f"next: {error.hint}", file=sys.stderr)


def say(text: str) -> None:
    """Write a notice for people to standard error; results go to `results`."""
    print(text, file=sys.stderr)


def results(*, json: bool = False) -> PlainConsole:
    """The console of results for people: standard output, or with `--json` standard error."""
    from gpukiln.progress import PlainConsole

    console = PlainConsole(stderr=json)
    if not json:
        # At each call: sys.stdout is replaced while a command runs (streams.output_named), and by tests.
        output: Any = streams.Results(sys.stdout)
        console.file = output
    return console


def print_files(files: Mapping[str, str]) -> None:
    """Write rendered files to standard output as they are, each after its name where there are several."""
    for path, text in files.items():
        print(f"# {path}\n{text}" if len(files) > 1 else text, end="")


def words(text: str) -> list[str]:
    """The words of a list that is typed with commas.

    >>> words("us-west-2, eu-west-1,")
    ['us-west-2', 'eu-west-1']
    >>> words("")
    []
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def print_json(document: Any) -> None:
    """Write one JSON document to standard output.

    Args:
        document: Plain data; one without `schema` has a form of others, such as an IAM policy.
    """
    print(streams.as_typed(json.dumps(document, indent=2)))  # hints name commands as they are typed


def print_document(schema: str, document: Any = None, /, **fields: Any) -> None:
    """Write a document of gpukiln to standard output.

    Args:
        schema: Its name in `gpukiln.cli.schemas`; replaces the version that a record has as its `schema`.
        document: A dataclass or plain data with the fields of the document.
        fields: Further fields, plain data or dataclasses.
    """
    # `schema` stands first for readers, and again last because a record may have a field of this name.
    print_json({"schema": schema} | (_plain(document) or {}) | _plain(fields) | {"schema": schema})


def _plain(value: Any) -> Any:
    """A value with plain data instead of dataclasses."""
    if is_dataclass(value):
        from gpukiln.typed import dump

        return dump(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
