"""Defaults of a user or a project: the value of an option that is not typed.

The first of these counts: the option, the variable GPUKILN_NAME, gpukiln.toml of this folder or of one above
it. For a region AWS's own settings follow, unless the command is about the embedded cloud: AWS_REGION,
AWS_DEFAULT_REGION, the region of the AWS profile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln import recipes
from gpukiln.errors import UsageError
from gpukiln.options import Option

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


def values() -> list[Value]:
    """Every setting, then the fields of components that the project changes, then its roles."""
    settings = {setting.name: setting for setting in _values()}
    if settings["region"].source == DEFAULT:
        # Which commands take it depends on their --cloud, so the source says that it is for aws.
        region, source = aws_region(settings["profile"].value)
        if region:
            settings["region"] = Value("region", region, f"{source}, on aws")
    return [*settings.values()]


def _values() -> list[Value]:
    """As `values`, without a region of AWS's own configuration, which is slow to read."""
    from gpukiln import project  # help needs none of it

    current = project.current()
    folder, own = current or (None, project.ProjectFile())
    file = str(folder / recipes.PROJECT_FILE) if folder else ""
    settings = []
    for name, (_, default) in project.SETTINGS.items():
        variable = f"GPUKILN_{name.upper()}"
        # An empty variable is as none: `GPUKILN_REGION= gpukiln ...` takes the value of the file.
        if text := os.environ.get(variable):
            settings.append(Value(name, text, f"${variable}"))
        elif name in own.settings:
            settings.append(Value(name, own.settings[name], file))
        else:
            settings.append(Value(name, default, DEFAULT))
    settings += [Value(f"{project.COMPONENTS}.{name}", value, file) for name, value in own.components.items()]
    settings += [
        Value(f"{project.ROLES}.{name}", ", ".join(roles), file) for name, roles in own.roles.items()
    ]
    return settings


def complete(options: Iterable[Option], typed: Mapping[str, Any]) -> dict[str, Any]:
    """The typed options, completed with the settings of the others.

    AWS's own region counts unless the command is about the embedded cloud, or its option has a default.
    """
    options = list(options)
    by_setting = {option.setting: option for option in options if option.setting}
    # Before anything is read: a wrong gpukiln.toml stops only commands that take something of it.
    if not by_setting:
        return dict(typed)
    from gpukiln.project import COMPONENTS

    given = {setting.name: setting.value for setting in _values() if setting.source != DEFAULT}
    result = dict(typed)
    default = next((option.default for option in options if option.name == "cloud"), "")
    # First, because it decides which of the other settings count. gpukiln.toml's cloud is taken only by
    # commands whose --cloud is a setting.
    cloud = typed.get("cloud") or (given.get("cloud", "") if "cloud" in by_setting else "") or default
    for setting, option in by_setting.items():
        if setting == COMPONENTS:
            if changed := components(str(typed.get(option.name, ""))):
                result[option.name] = changed
        elif option.name not in typed and given.get(setting) and (setting not in OF_AWS or cloud == "aws"):
            result[option.name] = given[setting]
    region = by_setting.get("region")
    if region and cloud != "embedded" and region.name not in result and not region.default:
        # Only a command on aws uses the profile; the others take the region that any tool of AWS would.
        profile = str(result.get("profile", "")) if cloud == "aws" else ""
        name, _ = aws_region(profile)
        if name or cloud == "aws":
            result[region.name] = name
    return result


def components(typed: str = "") -> str:
    """Changes of components in the form of --set: the typed ones, and the project's of other fields."""
    from gpukiln import project

    # A typed field replaces the project's of the same name, and leaves its other fields as they are.
    names = {word.partition("=")[0].strip() for word in typed.split(",")}
    current = project.current()
    fields = current[1].components if current else {}
    kept = [f"{name}={value}" for name, value in fields.items() if name not in names]
    return ",".join([*kept, typed] if typed else kept)


def aws_region(profile: str) -> tuple[str, str]:
    """The region of AWS's own variables or of a profile, and where it is from; both empty: none.

    Args:
        profile: Empty: $AWS_PROFILE, else AWS's default profile.

    Raises:
        UsageError: There is no such profile.
    """
    # In the order of the AWS CLI: AWS_REGION takes precedence over AWS_DEFAULT_REGION, and that over the
    # profile (its user guide, "Configuring environment variables").
    if region := os.environ.get("AWS_REGION"):  # of the CLI and other SDKs; botocore does not read it
        return region, "$AWS_REGION"
    # Slow to import, and not needed with the variable.
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
