"""A project: the folder with gpukiln.toml, and what it has of its own: settings, components, roles.

`read` reads the file; `roles` returns the roles of the project that an image or a node gets, and refuses what
does not fit. Images and channels of a project are found by `recipes.images` and `images/channels.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpukiln import recipes
from gpukiln.errors import UsageError
from gpukiln.typed import unknown

SETTINGS = {
    "cloud": ("aws or embedded", "embedded"),
    "region": ("the AWS region, or several with commas where a command takes them", ""),
    "profile": ("the AWS profile, on aws", ""),
    "image": ("the image that is built and released, a folder of ami/", "eks-gpu"),
    "channel": ("the channel that is released to", ""),
    "subnet_id": ("the subnet of machines that bake and verify, on aws", ""),
    "ssh_cidr": ("who may reach SSH of those machines, on aws", ""),
}
"""By name: what it is, and its default; a field of `Option.setting` names one."""
COMPONENTS = "components"
"""A table of gpukiln.toml: fields of components.yaml that the project changes, as --set does."""
ROLES = "roles"
"""A table of gpukiln.toml, and the folder of the project's own roles."""
ORDERS = ("before", "after")
REPLACE = "replace"
ENTRY = "main.yml"
ENTRY_POINTS = ("install.yml", "runtime.yml", "drift.yml")
"""Task files of roles that ansible/*.yml name in `tasks_from`."""


@dataclass(frozen=True)
class ProjectFile:
    """What gpukiln.toml says.

    Args:
        settings: Of `SETTINGS`, by name.
        components: Values by `NAME.FIELD`.
        roles: Names by `before`, `after`, `replace`, or `IMAGE.before` and `IMAGE.after`.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    components: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnRoles:
    """The roles of a project that an image or a node gets, in their order.

    Args:
        before: Run before the shipped roles.
        after: Run after them; in an image before its record is written.
        replace: Run where the shipped roles of these names would.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.before or self.after or self.replace)


def read(file: Path) -> ProjectFile:
    """Read a gpukiln.toml.

    Raises:
        UsageError: It can't be read, or has something else.
    """
    import tomllib  # noqa: PLC0415 - most commands read no project

    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}", hint="wanted: TOML, such as region = 'us-west-2'") from error
    # First, because what is left of the document are settings, which have no tables.
    tables = {name: document.pop(name, {}) for name in (COMPONENTS, ROLES)}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {name} is {table!r}", hint=f"wanted: a table, [{name}]")
    known = [*SETTINGS, f"{COMPONENTS}.NAME.FIELD", *(f"{ROLES}.{name}" for name in (*ORDERS, REPLACE))]
    settings = dict(_flat(document, ""))
    for name in settings:
        if name not in SETTINGS:
            raise unknown(f"setting of {file}:", name, known)
    components = dict(_flat(tables[COMPONENTS], f"{COMPONENTS}."))
    for name in components:
        if name.count(".") < 2:  # components.NAME.FIELD
            raise unknown(f"setting of {file}:", name, known)
    return ProjectFile(
        settings,
        {name.removeprefix(f"{COMPONENTS}."): value for name, value in components.items()},
        dict(_role_lists(tables[ROLES], file)),
    )


def _flat(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool):  # before int, whose subclass bool is
            yield prefix + key, str(value).lower()  # as --set has it
        elif isinstance(value, str | int):
            yield prefix + key, str(value)
        else:
            raise UsageError(
                f"{prefix}{key} in {recipes.PROJECT_FILE} is {value!r}",
                hint="wanted: a text, a whole number, true or false",
            )


def _role_lists(table: Mapping[str, Any], file: Path) -> Iterable[tuple[str, tuple[str, ...]]]:
    """The lists of [roles], and of [roles.IMAGE]."""
    for key, value in table.items():
        if isinstance(value, dict):
            if wrong := [name for name in value if name not in ORDERS]:
                raise unknown(f"setting of {file}:", f"{ROLES}.{key}.{wrong[0]}", [*ORDERS])
            yield from ((f"{key}.{name}", names) for name, names in _role_lists(value, file))
            continue
        if key not in (*ORDERS, REPLACE):
            raise unknown(f"setting of {file}:", f"{ROLES}.{key}", [*ORDERS, REPLACE, "IMAGE.before"])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise UsageError(
                f"{ROLES}.{key} in {file} is {value!r}",
                hint=f'wanted: a list of names, {key} = ["site_agent"]',
            )
        yield key, tuple(value)


def current() -> tuple[Path, ProjectFile] | None:
    """The project that the user is in: its folder, and what its file says; None: none.

    Raises:
        UsageError: Its file is wrong.
    """
    folder = recipes.project()
    return (folder, read(folder / recipes.PROJECT_FILE)) if folder else None


def check_roles() -> None:
    """Refuse a project whose roles do not fit, whichever image they are for.

    Raises:
        UsageError: As `roles` says.
    """
    if project := current():
        # The empty name is the lists of [roles], which images without a table of their own get.
        for image in {name.rpartition(".")[0] for name in project[1].roles} | {""}:
            roles(image)


def roles(image: str = "") -> OwnRoles:
    """The project's roles of an image; of a node, or outside of a project: as [roles] says, or none.

    Args:
        image: Its name; its own table [roles.IMAGE] takes the place of the lists of [roles].

    Raises:
        UsageError: A role is missing, has no tasks, or has the name of a shipped one; a list is of no image.
    """
    project = current()
    if not project:
        return OwnRoles()
    folder, file = project
    lists = file.roles
    images = recipes.images()
    # a misspelled image would have the lists of [roles] without a word
    for name in lists:
        table, dot, _ = name.rpartition(".")
        if dot and table not in images:
            raise unknown(f"image of [{ROLES}.{table}] in {folder / recipes.PROJECT_FILE}:", table, images)
    before, after = (lists.get(f"{image}.{order}", lists.get(order, ())) for order in ORDERS)
    chosen = OwnRoles(before, after, lists.get(REPLACE, ()))
    # The roles of all images: a mistake in one is found by whichever command runs first.
    _check(folder / ROLES, {name for names in lists.values() for name in names}, chosen.replace)
    for order, names in (("before", chosen.before), ("after", chosen.after)):
        if shipped := [name for name in names if name in chosen.replace]:
            raise UsageError(
                f"{recipes.PROJECT_FILE}: {shipped[0]} is in replace and in {order}",
                hint="a role of replace runs where the shipped one would; remove it from one of them",
            )
    return chosen


def _check(folder: Path, names: Iterable[str], replaced: Iterable[str]) -> None:
    """Refuse what Ansible would refuse in the middle of a bake, or would run instead of something else."""
    own = sorted(path.name for path in folder.glob("*") if path.is_dir() and path.name[0] not in "._")
    for name in sorted(names):
        if name not in own:
            raise UsageError(
                f"{recipes.PROJECT_FILE} names the role {name!r}; {folder} has {', '.join(own) or 'none'}",
                hint=f"make {folder / name / 'tasks' / ENTRY}, or remove the name from the file",
            )
        if not (folder / name / "tasks" / ENTRY).is_file():
            raise UsageError(
                f"{folder / name} has no tasks/{ENTRY}; wanted: a role of Ansible",
                hint="https://docs.ansible.com/ansible/latest/playbook_guide/playbooks_reuse_roles.html",
            )
    # Folders that no list names too: roles_path has the project's folder first, so each of them would be
    # found where a playbook or another role names a shipped role.
    for name in own:
        shipped = recipes.root() / ROLES / name / "tasks"
        if not shipped.is_dir():
            if name in replaced:
                raise UsageError(
                    f"{recipes.PROJECT_FILE}: replace names {name!r}, and no shipped role has this name",
                    hint="name it in before or after",
                )
            continue
        if name not in replaced:
            raise UsageError(
                f"{folder / name} has the name of a shipped role, which it would replace",
                hint=f'another name; or say so: {REPLACE} = ["{name}"] below [{ROLES}] '
                f"of {recipes.PROJECT_FILE}",
            )
        # include_role fails where `tasks_from` names no file, and a bake would come to it after minutes
        for file in sorted(shipped.glob("*.yml")):
            if file.name in ENTRY_POINTS and not (folder / name / "tasks" / file.name).is_file():
                raise UsageError(
                    f"{folder / name} replaces a shipped role and has no tasks/{file.name}",
                    hint=f"make it: a playbook runs it; {shipped / file.name} is the shipped one",
                )


def role_variables(own: OwnRoles) -> dict[str, Any]:
    """What the playbooks get of the project's roles: names, and the task files that run."""
    folder = recipes.project()
    if not folder:
        return {}

    def tasks(name: str, step: str) -> str:
        return step if (folder / ROLES / name / "tasks" / f"{step}.yml").is_file() else ""

    return {
        f"gpukiln_roles_{order}": [
            {"name": name, "install": tasks(name, "install") or "main", "runtime": tasks(name, "runtime")}
            for name in names
        ]
        for order, names in (("before", own.before), ("after", own.after))
        if names
    }


def roles_path(own: OwnRoles) -> dict[str, str]:
    """The variable by which Ansible finds the project's roles, before the shipped ones; empty without any."""
    folder = recipes.project()
    # takes precedence over roles_path of ansible.cfg, which names the shipped roles alone
    return {"ANSIBLE_ROLES_PATH": f"{folder / ROLES}:{recipes.root() / ROLES}"} if folder and own else {}
