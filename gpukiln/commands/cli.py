"""What every command shares: errors become a message and an exit code, JSON goes to standard output alone.

Nothing heavy is imported here or at the top of a command's module: `invoke --list` must be quick.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from gpukiln import recipes
from gpukiln.commands import streams
from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.files import FULL
from gpukiln.options import option
from gpukiln.programs import SPACE_HINT

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.progress import PlainConsole
    from gpukiln.verify.target import Target

P = ParamSpec("P")
INTERRUPTED = 130
_OS_HINTS = {
    **dict.fromkeys(FULL, SPACE_HINT),
    errno.EACCES: "run as root, or let $GPUKILN_HOME name a folder of your own",
    errno.EROFS: "let $GPUKILN_HOME name a folder that can be written to",
}
EXTRAS = {
    "image": (
        *("_pytest", "ansible-core", "ansible_runner", "cryptography", "cyclonedx", "jinja2", "packageurl"),
        *("packaging", "pytest", "securesystemslib", "testinfra", "tomlkit", "univers"),
    ),
    "embedded": ("flask", "moto", "werkzeug"),
    "k8s": ("cryptography", "cyclonedx", "jinja2", "packageurl", "securesystemslib"),
    "proxmox": ("proxmoxer", "requests", "requests_toolbelt"),
}
"""The modules that an extra brings."""
SIGNERS = "a private key as PEM file, awskms:KEY of AWS KMS, or sigstore: as the identity of this CI job"


@dataclass(frozen=True)
class Command:
    """A command: its fields are its options, its docstring is its help, `run` does it.

    A class with `run` is a command, named by its class: `AmiBuild` is ami.build, and so is `AmiBuildCommand`,
    where the other name is taken. One without is a group of options that several commands have.
    """

    def run(self) -> int | None:
        """Do it; returns the exit code, None for 0."""
        raise NotImplementedError

    def pick(self, *names: str) -> dict[str, Any]:
        """Options by name, for a call whose arguments have the same names."""
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class JsonOptions(Command):
    """What prints a document."""

    json: bool = option("print one JSON document to standard output", False)


@dataclass(frozen=True)
class RemovalOptions(Command):
    """What removes only when that is said."""

    yes: bool = option("remove it; without it nothing is removed", False)
    dry_run: bool = option("only show it, the default", False)

    @property
    def removes(self) -> bool:
        """Whether it is to be removed."""
        return self.yes and not self.dry_run


@dataclass(frozen=True)
class ProfileOptions(Command):
    """What may ask AWS."""

    profile: str = option("AWS profile (aws only)", setting="profile")


@dataclass(frozen=True)
class PlaceOptions(ProfileOptions, JsonOptions):
    """What is asked of one cloud."""

    cloud: str = option("embedded (this machine) or aws (your account)", "embedded", setting="cloud")
    region: str = option("AWS region, for example us-west-2", also="regions", setting="region")

    def where(self) -> Cloud:
        """The cloud, in this region."""
        from gpukiln.clouds.select import make_cloud

        return make_cloud(self.cloud, self.region, profile=self.profile or None)


@dataclass(frozen=True)
class HostOptions(JsonOptions):
    """Machines that are named."""

    hosts: str = option("ssh://[USER@]HOST[:PORT], local:// or ansible://PATTERN, separated by commas")
    inventory: str = option("Ansible inventory: a file or a folder")
    limit: str = option("only these hosts of the inventory, an Ansible pattern")

    def targets(self) -> list[Target]:
        """The machines.

        Raises:
            UsageError: None is named, or one can't be understood.
        """
        from gpukiln.nodes.hosts import find_targets

        inventory = Path(self.inventory).expanduser().absolute() if self.inventory else None
        return find_targets(self.hosts, inventory, self.limit)


@dataclass(frozen=True)
class KubernetesOptions(JsonOptions):
    """A cluster."""

    context: str = option("of the kubeconfig; default: its current one")
    kubeconfig: str = option("default: $KUBECONFIG, then ~/.kube/config")
    namespace: str = option("default: the context's")

    def api(self) -> Cluster:
        """The cluster's API server."""
        from gpukiln.kubernetes.cluster import Cluster

        return Cluster(self.context, self.kubeconfig)


@dataclass(frozen=True)
class MachineOptions(Command):
    """Machines of AWS that bake and verify."""

    subnet_id: str = option("subnet of the machines that bake and verify (aws only)", setting="subnet_id")
    ssh_cidr: str = option(
        "who may reach SSH of those machines, for example 203.0.113.7/32; default: this machine's public "
        "address (aws only)",
        setting="ssh_cidr",
    )


@dataclass(frozen=True)
class MadeImageOptions(ProfileOptions, JsonOptions):
    """An image that is there."""

    region: str = option("where the image is, when this machine has no record of it", also="regions")
    cloud: str = option("where the image is; default: as its record says")


def end(work: Callable[P, int | None], *args: P.args, **kwargs: P.kwargs) -> int:
    """Do the work; its errors become a message, and the exit code that is returned."""
    try:
        with streams.output_named():
            return work(*args, **kwargs) or 0
    except GpukilnError as error:
        print_error(error)
        if isinstance(error, streams.OutputError):
            streams.forget_output()
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        for note in getattr(interrupt, "__notes__", ()):
            print(note, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`: who reads has enough
        streams.forget_output()
        return 0
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print_error(UnavailableError(what, hint=_os_hint(error)))
        return UnavailableError.exit_code


def missing(error: ModuleNotFoundError, noun: str) -> Exception:
    """What to install for a module that is not there; the error itself where nothing installs it.

    Args:
        noun: Of the command; the extra of this name is named where several bring the module.
    """
    module = str(error.name).partition(".")[0]
    extras = [extra for extra, modules in EXTRAS.items() if module in modules]
    if not extras:
        return error
    extra = noun if noun in extras else extras[0]
    how = "scripts/run installs it" if recipes.is_checkout() else f"pip install 'gpukiln[{extra}]'"
    return UnavailableError(f"this command needs {module}, which is not installed", hint=how)


def _os_hint(error: OSError) -> str:
    file = Path(str(error.filename or "."))
    if error.errno == errno.ENOENT and recipes.is_checkout() and file.is_relative_to(recipes.root()):
        return f"`git checkout -- {file.relative_to(recipes.root())}` brings a file of the repository back"
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
    """Write a notice for people, on standard error; results go to `results`.

    Args:
        text: The line.
    """
    print(text, file=sys.stderr)


def results(*, json: bool = False) -> PlainConsole:
    """Where people read results: on standard output, unless `--json` promises one document there.

    Args:
        json: Whether it does.
    """
    from gpukiln.progress import PlainConsole

    console = PlainConsole(stderr=json)
    if not json:
        output: Any = streams.Results(sys.stdout)
        console.file = output
    return console


def words(text: str) -> list[str]:
    """Read what was typed as a list.

    Args:
        text: Words separated by commas.
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def print_json(document: Any) -> None:
    """Write one JSON document to standard output.

    Args:
        document: Plain data; what says no `schema` is of a form of others, as an IAM policy is.
    """
    print(json.dumps(document, indent=2))


def print_document(schema: str, document: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
    """Write a document of gpukiln to standard output.

    Args:
        schema: Its name in `gpukiln.commands.schemas`; a record's own version gives way to it.
        document: Plain data whose fields it has.
        fields: Its other fields, plain data.
    """
    print_json({"schema": schema} | dict(document or {}) | fields | {"schema": schema})
