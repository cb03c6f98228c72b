"""The interface of each role, from its argument_specs and defaults.

`python -m gpukiln.catalog.roles > docs/roles.md` makes the reference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.catalog.load import ROOT, read_yaml

ROLES = ROOT / "roles"
# None is a default of its own: `null` in defaults/main.yml.
NO_DEFAULT = object()


@dataclass(frozen=True)
class Variable:
    """One variable of a role.

    Args:
        name: Its name, which begins with the role's.
        type: Ansible's type, with that of a list's elements.
        default: As in defaults/main.yml; `NO_DEFAULT` where that has none.
        specified: The default that argument_specs states; `NO_DEFAULT` where it states none.
        choices: The valid values; empty when any is.
        required: Whether it must be given.
        description: What it is for, a paragraph an item; empty when argument_specs does not know it.
        keys: What a dictionary may hold: name, whether it must be there, and what it is for.
    """

    name: str
    type: str
    default: Any
    specified: Any
    choices: tuple[Any, ...]
    required: bool
    description: tuple[str, ...]
    keys: tuple[tuple[str, bool, str], ...]


@dataclass(frozen=True)
class Role:
    """One role.

    Args:
        name: Its folder's name.
        title: Its short description.
        entry_points: The task files that `tasks_from` may name, in the order of argument_specs.
        variables: In the order of argument_specs; what only defaults/main.yml knows comes last.
    """

    name: str
    title: str
    entry_points: tuple[str, ...]
    variables: tuple[Variable, ...]


def load_roles(folder: Path = ROLES) -> list[Role]:
    """Read the interface of every role.

    Raises:
        UsageError: A role has no argument_specs or no defaults, or they are no YAML.
    """
    return [_role(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "__pycache__"]


def _role(folder: Path) -> Role:
    entries: dict[str, Any] = read_yaml(folder / "meta/argument_specs.yml")["argument_specs"]
    defaults = read_yaml(folder / "defaults/main.yml")
    # Several entry points of a role share its variables; the last description wins.
    options = {name: option for entry in entries.values() for name, option in entry["options"].items()}
    # Variables without a description come last, where `mistakes` names them.
    names = [*options, *(name for name in defaults if name not in options)]
    return Role(
        name=folder.name,
        title=str(next(iter(entries.values()))["short_description"]),
        entry_points=tuple(entries),
        variables=tuple(
            _variable(name, options.get(name, {}), defaults.get(name, NO_DEFAULT)) for name in names
        ),
    )


def _variable(name: str, option: dict[str, Any], default: Any) -> Variable:
    # ansible-doc allows a text or a list of paragraphs.
    described = option.get("description", [])
    kind = str(option.get("type", "str"))
    return Variable(
        name=name,
        type=f"{kind} of {option['elements']}" if "elements" in option else kind,
        default=default,
        specified=option.get("default", NO_DEFAULT),
        choices=tuple(option.get("choices", ())),
        required=bool(option.get("required", False)),
        description=tuple([described] if isinstance(described, str) else described),
        keys=tuple(
            (key, bool(of.get("required", False)), str(of["description"]))
            for key, of in option.get("options", {}).items()
        ),
    )


def mistakes(role: Role) -> Iterator[str]:
    """Where the two files of a role disagree, or break a rule of all roles.

    Yields:
        One line a mistake.
    """
    for variable in role.variables:
        if not variable.description:
            yield f"{variable.name}: argument_specs does not describe it"
        if variable.default is NO_DEFAULT and not variable.required:
            yield f"{variable.name}: it is not required, and defaults/main.yml does not have it"
        # Both files must agree: Ansible uses the default of defaults/main.yml, the document shows the other.
        if variable.specified not in (NO_DEFAULT, variable.default):
            here, there = variable.specified, variable.default
            yield f"{variable.name}: argument_specs says {here!r}, defaults {there!r}"
        # Variables of all roles share one name space in a play.
        if not variable.name.startswith(f"{role.name}_"):
            yield f"{variable.name}: its name does not begin with the role's"


def markdown() -> str:
    """The text of docs/roles.md."""
    roles = load_roles()
    lines = [
        "# Roles and their variables",
        "",
        "<!-- Generated: python -m gpukiln.catalog.roles > docs/roles.md -->",
        "",
        "What each role takes. Defaults stand in `roles/ROLE/defaults/main.yml`; wrong input fails at the",
        "role's start, by `roles/ROLE/meta/argument_specs.yml`. How a role works is in its README.",
        "",
        "| Role | What it does |",
        "|---|---|",
        *(f"| [{role.name}](#{role.name}) | {role.title} |" for role in roles),
    ]
    for role in roles:
        entries = ", ".join(f"`{entry}`" for entry in role.entry_points)
        lines += ["", f"## {role.name}", ""]
        lines += [f"{role.title}. [README](../roles/{role.name}/README.md). Entry points: {entries}.", ""]
        lines += ["| Variable | Type | Default | Meaning |", "|---|---|---|---|"]
        lines += [_row(variable) for variable in role.variables]
    return "\n".join(lines) + "\n"


def _row(variable: Variable) -> str:
    keys = [f"`{key}`{' (required)' if needed else ''}: {what}" for key, needed, what in variable.keys]
    choices = ", ".join(_code(choice) for choice in variable.choices)
    cells = (
        f"`{variable.name}`",
        f"{variable.type}: {choices}" if choices else variable.type,
        "required" if variable.default is NO_DEFAULT else _code(variable.default),
        " ".join((*variable.description, *(["Keys:"] if keys else []), *keys)),
    )
    # A pipe ends a cell in Markdown, also inside code.
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(value: Any) -> str:
    """A value as YAML has it, on one line."""
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value, ensure_ascii=False)}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
