"""Defaults that a user or a project has: what an option is where it is not typed.

In this order: the option, a variable GPUKILN_NAME, gpukiln.toml of this folder or of one above it, and for a
region on aws AWS's own variables and profile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln import recipes
from gpukiln.errors import UsageError
from gpukiln.options import Option

SETTINGS = {
    "cloud": ("aws or embedded", "embedded"),
    "region": ("the AWS region, or several with commas where a command takes them", ""),
    "profile": ("the AWS profile, on aws", ""),
    "image": ("the image that is built and released, a folder of ami/", "eks-gpu"),
    "channel": ("the channel that is released to", ""),
    "subnet_id": ("the subnet of machines that bake and verify, on aws", ""),
    "ssh_cidr": ("who may reach SSH of those machines, on aws", ""),
}
"""By name: what it is, and what it is where nobody says; a field of `Option.setting` names one."""
COMPONENTS = "components"
"""A table of gpukiln.toml: fields of components.yaml that the project changes, as --set does."""
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


def read_project(file: Path) -> dict[str, str]:
    """The settings of a file; a component's field is `components.NAME.FIELD`.

    Raises:
        UsageError: It can't be read, or has something else.
    """
    import tomllib

    from gpukiln.typed import unknown

    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}", hint="wanted: TOML, such as region = 'us-west-2'") from error
    found = dict(_flat(document, ""))
    for name in found:
        if name not in SETTINGS and not (name.startswith(f"{COMPONENTS}.") and name.count(".") > 1):
            raise unknown(f"setting of {file}:", name, [*SETTINGS, f"{COMPONENTS}.NAME.FIELD"])
    return found


def _flat(table: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str | int) and not isinstance(value, bool):
            yield prefix + key, str(value)
        else:
            raise UsageError(
                f"{prefix}{key} in {recipes.PROJECT_FILE} is {value!r}", hint="wanted: a text or a number"
            )


def values() -> list[Value]:
    """Every setting, and the fields of components that the project changes."""
    folder = recipes.project()
    file = folder / recipes.PROJECT_FILE if folder else None
    project = read_project(file) if file else {}
    found = []
    for name, (_, default) in SETTINGS.items():
        variable = f"GPUKILN_{name.upper()}"
        if typed := os.environ.get(variable):
            found.append(Value(name, typed, f"${variable}"))
        elif name in project:
            found.append(Value(name, project[name], str(file)))
        else:
            found.append(Value(name, default, NOWHERE))
    return [*found, *(Value(name, value, str(file)) for name, value in project.items() if "." in name)]


def complete(options: Iterable[Option], typed: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed, and the settings of the options that were not."""
    by_setting = {one.setting: one for one in options if one.setting}
    if not by_setting:
        return dict(typed)
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
    names = {word.partition("=")[0].strip() for word in typed.split(",")}
    fields = {one.name.removeprefix(f"{COMPONENTS}."): one.value for one in values() if "." in one.name}
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
