"""What a role's decision is made of: the role as it was asked for, and the plan that comes of it.

The action `decide` (ansible/plugins/action/decide.py) makes a `Role`, has the node looked at, and calls the
functions `look` and `decide` of roles/ROLE/decide.py.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

# parents[1]: the folder above roles/, in a checkout, a wheel and a collection alike
ROOT = Path(__file__).resolve().parents[1]
"""The checkout, or the collection that was built of it (gpukiln/nodes/collection.py)."""
MANAGED = "Ansible managed"
Node = dict[str, Any]
"""What the module node_facts returned; ansible/plugins/modules/node_facts.py says what."""
Looks = dict[str, Any]
"""Arguments of node_facts: what is to be read of a node."""


@dataclass(frozen=True)
class System:
    """What a machine runs, from Ansible's facts.

    Args:
        distribution: `Debian`, `Ubuntu`, `Amazon`, `Rocky`, ...
        version: `12.8`, `22.04`, `2023`.
        release: Code name; empty where there is none.
        family: `Debian`, `RedHat`, as Ansible groups them.
        architecture: `x86_64` or `aarch64`.
    """

    distribution: str
    version: str
    release: str
    family: str
    architecture: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "System":
        """Read it from the facts of gather_subset min."""
        return cls(
            distribution=str(facts.get("distribution", "")),
            version=str(facts.get("distribution_version", "")),
            release=str(facts.get("distribution_release", "")),
            family=str(facts.get("os_family", "")),
            architecture=str(facts.get("architecture", "")),
        )

    @property
    def apt(self) -> bool:
        """Whether apt is its package manager; dnf where not."""
        return self.family == "Debian"

    @property
    def manager(self) -> str:
        return "apt" if self.apt else "dnf"

    @property
    def major(self) -> str:
        return self.version.partition(".")[0]


@dataclass(frozen=True)
class Role:
    """A role as it was asked for on one host.

    Args:
        variables: Its variables, without the role's name before theirs.
        system: What the host runs.
        check: Whether nothing may be changed.
        host: The inventory's name.
    """

    name: str
    variables: Mapping[str, Any]
    system: System
    check: bool = False
    host: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A variable that need not be set."""
        return self.variables.get(name, default)

    @cached_property
    def folder(self) -> Path:
        return ROOT / "roles" / self.name

    def file(self, name: str) -> str:
        """The text of one of the role's files."""
        return (self.folder / "files" / name).read_text(encoding="utf-8")

    def template(self, name: str, **values: Any) -> str:
        """The text that one of the role's templates makes of values."""
        environment = jinja2.Environment(  # noqa: S701 - no web page
            loader=jinja2.FileSystemLoader(self.folder / "templates"),
            # a misspelt value must fail, not become an empty text
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            # files of settings end with a newline
            keep_trailing_newline=True,
        )
        return environment.get_template(name).render(ansible_managed=MANAGED, **values)


@dataclass(frozen=True)
class File:
    """A file as it is to be.

    Args:
        text: Its whole text.
        before: The text that is there; empty where there is none, or none may be shown.
        secret: Whether no difference may be shown.
        validate: Command that must accept it before it is put into its place, with `%s` for its path.
    """

    path: str
    text: str
    mode: str = "0644"
    before: str = ""
    secret: bool = False
    validate: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """What is to be done on a node, and why.

    Args:
        refusal: Found, wanted, next step; then nothing is done.
        ask: What has to be looked at before it can be decided.
        files: To be written; those that are as they should be are not among them.
        folders: To be made, or to be put right: path to mode.
        absent: Paths to be removed.
        packages: To be installed by the role `packages`.
        enable: Units to start at boot.
        start: Units to start now.
        notify: Handlers.
        lines: Changes in addition to the files, for people: `+nvtop`, `-cuda-keyring`.
        do: Variables of the role's own tasks.
    """

    refusal: str = ""
    ask: Looks = field(default_factory=dict)
    files: list[File] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    enable: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    notify: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    do: dict[str, Any] = field(default_factory=dict)

    @property
    def acts(self) -> bool:
        """Whether there is anything to do."""
        # A plan with notes alone (`do`) changes nothing.
        return not self.refusal and bool(self.settings or self.packages or self.lines)

    @property
    def settings(self) -> bool:
        """Whether node_settings has anything to do."""
        return bool(self.files or self.folders or self.absent or self.enable or self.start)

    def refuse(self, reason: str, **do: Any) -> "Plan":
        """This plan as one that does nothing but say why; `do` for the task that asks again."""
        return Plan(refusal=reason, do=do)

    def write(
        self,
        node: Node,
        path: str,
        text: str,
        *,
        mode: str = "0644",
        notify: str = "",
        validate: Sequence[str] = (),
    ) -> bool:
        """Have a file, root's; one that is as it should be is left alone.

        Args:
            node: With the file among `files`.
            notify: Handler of who reads it; empty where that does not run.
            validate: As in `File`.

        Returns:
            Whether it has to be written.
        """
        there = node["files"].get(path)
        # Owner and mode count too: a file that everybody may write to is not as it should be.
        if there and there["text"] == text and (there["mode"], there["uid"], there["gid"]) == (mode, 0, 0):
            return False
        self.files.append(File(path, text, mode, there["text"] if there else "", validate=[*validate]))
        # Ansible runs a handler once, but reports each notification.
        if notify and notify not in self.notify:
            self.notify.append(notify)
        return True

    def remove(self, paths: Iterable[str]) -> None:
        """Have paths gone that were seen."""
        for path in paths:
            self.absent.append(path)

    def install(self, names: Iterable[str], version: str = "") -> None:
        """Have the role `packages` install or hold these."""
        for name in names:
            self.packages.append(name)
            self.lines.append(f"+{name} {version}".rstrip())

    def enable_unit(self, node: Node, name: str) -> None:
        """Have a unit start at boot; one that does is left alone."""
        # Also `static` and `disabled`: systemctl enable leaves a static unit as it is.
        if node["units"][name]["enabled"] != "enabled":
            self.enable.append(name)

    def start_unit(self, node: Node, name: str) -> None:
        """Have a unit run; one that does is left alone."""
        # `activating`: a slow unit must not be started twice.
        if node["units"][name]["active"] not in ("active", "activating"):
            self.start.append(name)

    def diffs(self) -> list[dict[str, str]]:
        """The plan in the form of Ansible's diffs."""
        # In check mode this is all that people see of a plan.
        words = {"enable": self.enable, "start": self.start}
        lines = [*self.lines, *(f"+{path}/" for path in self.folders), *(f"-{path}" for path in self.absent)]
        lines += [f"{word} {name}" for word, names in words.items() for name in names]
        shown = [{"prepared": "".join(f"{line}\n" for line in lines)}] if lines else []
        return shown + [{"prepared": _difference(file)} for file in self.files]


def _difference(file: File) -> str:
    if file.secret:
        return f"+{file.path}\n"
    changed = difflib.unified_diff(
        file.before.splitlines(), file.text.splitlines(), file.path, file.path, lineterm="", n=1
    )
    return "".join(f"{line}\n" for line in changed) or f"{file.path}: mode {file.mode}, root's\n"


def shared(name: str) -> str:
    """The text of a file that roles share with other parts of gpukiln.

    Args:
        name: Its path in the checkout; the collection has it at the same path (`SHARED` of its build).
    """
    # An installed package has the roles in gpukiln/_recipes, and its own files where it has them.
    path = ROOT / name if (ROOT / name).exists() else ROOT.parents[1] / name
    return path.read_text(encoding="utf-8")


def upstream(version: str) -> str:
    """Cut epoch and package release from a package's version: `3:580.178.04-1.el9` is `580.178.04`."""
    # Without a release, as in rpm's bare versions, the text is the version itself.
    return re.sub(r"^\d+:", "", version).rpartition("-")[0] or re.sub(r"^\d+:", "", version)


def together(*looks: Looks) -> Looks:
    """One look that asks for all that several ask for."""
    asked: Looks = {}
    for look in looks:
        for name, value in look.items():
            before = asked.get(name)
            # Order stays and duplicates go: roles ask for the same packages.
            if isinstance(value, list) and before:
                asked[name] = [*before, *(item for item in value if item not in before)]
            elif isinstance(value, dict) and before:
                asked[name] = {**before, **value}
            else:
                asked[name] = value
    return asked


def runs(node: Node, unit: str) -> bool:
    """Whether a unit runs, and has to be restarted for what it reads: in an image's build none does."""
    # `failed` counts as not running: a restart would fail again and end the play.
    return node["units"][unit]["active"] not in ("", "inactive", "failed")


def missing(node: Node, names: Iterable[str], version: str = "") -> list[str]:
    """Name the packages that have to be installed.

    Args:
        node: With them among `packages`.
        version: The version that each must have, without epoch and release; empty for any.
    """
    there = node["packages"]
    return [
        name
        for name in names
        # An installed version of another release or epoch counts as the same upstream version.
        if name not in there or version not in ("", *(upstream(row["version"]) for row in there[name]))
    ]


def unheld(node: Node, names: Iterable[str]) -> list[str]:
    """Name the installed packages that are not held."""
    return [name for name in names if not all(row["held"] for row in node["packages"].get(name, []))]
