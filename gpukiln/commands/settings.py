"""Defaults that a user or a project has: what an option is where it is not typed.

In this order: the option, a variable GPUKILN_NAME, gpukiln.toml of this folder or of one above it, and for a
region on aws AWS's own variables and profile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln import recipes
from gpukiln.errors import UsageError
from gpukiln.options import Option

OF_AWS = ("profile", "subnet_id", "ssh_cidr")
NOWHERE = "default"


@dataclass(frozen=True)
class Value:
    """What a setting is.

    Args:
        source: The variable or file that says it, or `default`.
    """

    name: str
    value: str
    source: str


def values() -> list[Value]:
    """Every setting, then the fields of components that the project changes, then its roles."""
    from gpukiln import project  # help needs none of it

    current = project.current()
    folder, own = current or (None, project.ProjectFile())
    file = str(folder / recipes.PROJECT_FILE) if folder else ""
    rows = []
    for name, (_, default) in project.SETTINGS.items():
        variable = f"GPUKILN_{name.upper()}"
        if typed := os.environ.get(variable):
            rows.append(Value(name, typed, f"${variable}"))
        elif name in own.settings:
            rows.append(Value(name, own.settings[name], file))
        else:
            rows.append(Value(name, default, NOWHERE))
    rows += [Value(f"{project.COMPONENTS}.{name}", value, file) for name, value in own.components.items()]
    return rows + [
        Value(f"{project.ROLES}.{name}", ", ".join(names), file) for name, names in own.roles.items()
    ]


def complete(options: Iterable[Option], typed: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed, and the settings of the options that were not."""
    by_setting = {one.setting: one for one in options if one.setting}
    if not by_setting:
        return dict(typed)
    from gpukiln.project import COMPONENTS

    said = [one for one in values() if one.source != NOWHERE]
    given = {one.name: one.value for one in said if "." not in one.name}
    result = dict(typed)
    cloud = typed.get("cloud") or (given.get("cloud", "") if "cloud" in by_setting else "")
    for setting, one in by_setting.items():
        if setting == COMPONENTS:
            if changed := components(str(typed.get(one.name, ""))):
                result[one.name] = changed
        elif one.name not in typed and given.get(setting) and (setting not in OF_AWS or cloud == "aws"):
            result[one.name] = given[setting]
    region = by_setting.get("region")
    if region and cloud == "aws" and region.name not in result and not region.default:
        result[region.name] = region_of_aws(str(result.get("profile", "")))
    return result


def components(typed: str = "") -> str:
    """The project's changes of components, and those that were typed, which win; as --set has them."""
    from gpukiln import project

    names = {word.partition("=")[0].strip() for word in typed.split(",")}
    current = project.current()
    fields = current[1].components if current else {}
    kept = [f"{name}={value}" for name, value in fields.items() if name not in names]
    return ",".join([*kept, typed] if typed else kept)


def region_of_aws(profile: str) -> str:
    """The region that AWS's own variables or a profile name; empty: none."""
    if named := os.environ.get("AWS_REGION"):
        return named
    from botocore.exceptions import ProfileNotFound
    from botocore.session import Session

    try:
        return str(Session(profile=profile or None).get_config_variable("region") or "")
    except ProfileNotFound as error:
        raise UsageError(str(error), hint="`aws configure list-profiles` lists them") from error
