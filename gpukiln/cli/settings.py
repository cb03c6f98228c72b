"""Defaults of a user or a project: the value of an option that is not typed.

The first of these counts: the option, the variable GPUKILN_NAME, gpukiln.toml of this folder or of one above
it. For a region AWS's own settings follow, unless the command is about the embedded cloud: AWS_REGION,
AWS_DEFAULT_REGION, the region of the AWS profile.
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
    "ssh_cidr": ("the network that reaches SSH of those machines, on aws", ""),
}
"""By name: its meaning, and its default; `Option.setting` names one."""
COMPONENTS = "components"
"""A table of gpukiln.toml: fields of components.yaml that the project changes, as --set does."""
# Of a project for AWS; a build on the embedded cloud there would be refused for --profile.
OF_AWS = ("profile", "subnet_id", "ssh_cidr")
DEFAULT = "default"


@dataclass(frozen=True)
class Value:
    """The value of a setting.

    Args:
        source: The variable or file that has it, or `default`.
    """

    name: str
    value: str
    source: str


def read_project(file: Path) -> dict[str, str]:
    """The settings of a file; a component's field is `components.NAME.FIELD`.

    Raises:
        UsageError: It can't be read, or has an unknown setting.
    """
    import tomllib

    from gpukiln.typed import unknown

    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}", hint="wanted: TOML, such as region = 'us-west-2'") from error
    project_settings = dict(_flat(document, ""))
    for name in project_settings:
        if name not in SETTINGS and not (name.startswith(f"{COMPONENTS}.") and name.count(".") > 1):
            raise unknown(f"setting of {file}:", name, [*SETTINGS, f"{COMPONENTS}.NAME.FIELD"])
    return project_settings


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
    settings = {setting.name: setting for setting in _values()}
    if settings["region"].source == DEFAULT:
        region, source = aws_region(settings["profile"].value)
        if region:
            settings["region"] = Value("region", region, f"{source}, on aws")
    return [*settings.values()]


def _values() -> list[Value]:
    """As `values`, without a region of AWS's own configuration, which is slow to read."""
    folder = recipes.project()
    file = folder / recipes.PROJECT_FILE if folder else None
    project = read_project(file) if file else {}
    settings = []
    for name, (_, default) in SETTINGS.items():
        variable = f"GPUKILN_{name.upper()}"
        if text := os.environ.get(variable):
            settings.append(Value(name, text, f"${variable}"))
        elif name in project:
            settings.append(Value(name, project[name], str(file)))
        else:
            settings.append(Value(name, default, DEFAULT))
    return [*settings, *(Value(name, value, str(file)) for name, value in project.items() if "." in name)]


def complete(options: Iterable[Option], typed: Mapping[str, Any]) -> dict[str, Any]:
    """The typed options, completed with the settings of the others.

    AWS's own region counts unless the command is about the embedded cloud, or its option has a default.
    """
    options = list(options)
    by_setting = {option.setting: option for option in options if option.setting}
    if not by_setting:
        return dict(typed)
    given = {setting.name: setting.value for setting in _values() if setting.source != DEFAULT}
    result = dict(typed)
    default = next((option.default for option in options if option.name == "cloud"), "")
    cloud = typed.get("cloud") or (given.get("cloud", "") if "cloud" in by_setting else "") or default
    for setting, option in by_setting.items():
        if setting == COMPONENTS:
            if changed := components(str(typed.get(option.name, ""))):
                result[option.name] = changed
        elif option.name not in typed and given.get(setting) and (setting not in OF_AWS or cloud == "aws"):
            result[option.name] = given[setting]
    region = by_setting.get("region")
    if region and cloud != "embedded" and region.name not in result and not region.default:
        profile = str(result.get("profile", "")) if cloud == "aws" else ""
        name, _ = aws_region(profile)
        if name or cloud == "aws":
            result[region.name] = name
    return result


def components(typed: str = "") -> str:
    """Changes of components in the form of --set: the typed ones, and the project's of other fields."""
    names = {word.partition("=")[0].strip() for word in typed.split(",")}
    prefix = f"{COMPONENTS}."
    fields = {field.name.removeprefix(prefix): field.value for field in _values() if "." in field.name}
    kept = [f"{name}={value}" for name, value in fields.items() if name not in names]
    return ",".join([*kept, typed] if typed else kept)


def aws_region(profile: str) -> tuple[str, str]:
    """The region of AWS's own variables or of a profile, and where it is from; both empty: none.

    Args:
        profile: Empty: $AWS_PROFILE, else AWS's default profile.

    Raises:
        UsageError: There is no such profile.
    """
    if region := os.environ.get("AWS_REGION"):  # of the CLI and other SDKs; botocore does not read it
        return region, "$AWS_REGION"
    from botocore.exceptions import ProfileNotFound
    from botocore.session import Session

    session = Session(profile=profile or None)
    try:
        region = str(session.get_config_variable("region") or "")
    except ProfileNotFound as error:
        raise UsageError(str(error), hint="`aws configure list-profiles` lists them") from error
    if not region:
        return "", ""
    if os.environ.get("AWS_DEFAULT_REGION") == region:
        return region, "$AWS_DEFAULT_REGION"
    return region, f"AWS profile {session.profile or 'default'}"
