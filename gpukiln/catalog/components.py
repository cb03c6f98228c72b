"""components.yaml: the one place of versions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from gpukiln.catalog import drivers
from gpukiln.catalog.load import ROOT, read_yaml, record, unknown, validate
from gpukiln.errors import UsageError


@record
class Repository:
    """A package repository of a component's own.

    Args:
        url: Its address; $(ARCH) stands for the package manager's name of the architecture.
        suite: The suite, "/" for a flat repository.
        key_url: Where its signing key is.
        key_fingerprint: The fingerprint that the key must have, 40 hexadecimal digits.
    """

    url: str
    suite: str
    key_url: str
    key_fingerprint: str


@record
class Component:
    """Something with a version that goes into an image.

    Args:
        source: Where it comes from, in words.
        reason: Why this version.
        review: The day by which somebody looks at the pin again.
        version: What is wanted, or None with `distribution`.
        distribution: Whether the version is whatever the base's distribution ships.
        from_base: Whether it comes only with the base image, so that nothing installs it.
        part_of: The component that brings it along where the base image has that one.
        branch: The branch of the driver.
        modules: The kind of the driver's kernel modules.
        packages: For each distribution the package whose version is the component's version; {branch} in it
            stands for the driver branch.
        open_packages: The same for open kernel modules, where they are other packages.
        repository: The repository, when it has one of its own.
    """

    source: str
    reason: str
    review: date
    version: str | None = None
    distribution: bool = False
    from_base: bool = False
    part_of: str | None = None
    branch: int | None = None
    modules: Literal["proprietary", "open"] | None = None
    packages: Mapping[str, str] | None = None
    open_packages: Mapping[str, str] | None = None
    repository: Repository | None = None


SETTABLE = ("version", "branch", "modules")  # beside those of the repository
Components = Mapping[str, Component]


def load_components(path: Path = ROOT / "components.yaml") -> dict[str, Component]:
    """Read components.yaml.

    Args:
        path: Another file of the same form.

    Returns:
        The components by name.

    Raises:
        UsageError: The file is missing or does not fit.
    """
    document = read_yaml(path)
    if set(document) != {"components"}:
        raise UsageError(f"{path.name} has the keys {sorted(document)}; wanted: components")
    components = validate(dict[str, Component], document["components"], where=path.name)
    for name, component in components.items():
        if (component.version is None) != component.distribution:
            raise UsageError(f"{path.name}: {name} needs either a version or `distribution: true`")
    if driver := components.get("nvidia_driver"):
        _check_driver(driver, path.name)
    return components


def _check_driver(driver: Component, where: str) -> None:
    if driver.branch is None or driver.modules is None or driver.version is None:
        raise UsageError(f"{where}: nvidia_driver needs a version, a branch and the kind of its modules")
    drivers.branch(driver.branch)
    if driver.version.partition(".")[0] != str(driver.branch):
        raise UsageError(f"{where}: driver version {driver.version} is not of branch {driver.branch}")


def apply_overrides(components: Components, overrides: Iterable[str]) -> dict[str, Component]:
    """Change components for one build.

    A driver branch without a version means the last release of that branch that the catalogue knows;
    a driver version without a branch means its own branch.

    Args:
        components: What components.yaml says.
        overrides: For example `["nvidia_driver.branch=580"]`.

    Returns:
        A changed copy.

    Raises:
        UsageError: An override has another form, names what is not there, or its value does not fit.
    """
    result = dict(components)
    given: dict[str, str] = {}
    for override in overrides:
        path, equals, value = override.partition("=")
        name, dot, key = path.partition(".")
        if not equals or not dot or not value:
            raise UsageError(f"can't read --set {override!r}", hint="wanted: --set component.key=value")
        if name not in result:
            raise unknown("component", name, result)
        result[name] = _changed(name, result[name], key, value)
        given[path] = value
    if "nvidia_driver" in result and any(path.startswith("nvidia_driver.") for path in given):
        result["nvidia_driver"] = _agreeing_driver(result["nvidia_driver"], given)
    return result


def _changed(name: str, component: Component, key: str, value: str) -> Component:
    plain: dict[str, Any] = asdict(component)
    target, leaf, keys = (
        plain,
        key,
        [name for name in SETTABLE if plain[name] is not None or name == "version"],
    )
    if key.startswith("repository.") and component.repository:
        target, leaf = plain["repository"], key.removeprefix("repository.")
        keys = [field.name for field in fields(Repository)]
    if leaf not in keys:
        own = keys + [f"repository.{field.name}" for field in fields(Repository) if component.repository]
        raise unknown(f"key of {name}", key, own)
    if leaf == "version" and component.distribution:
        raise UsageError(
            f"--set {name}.version={value}: {name} comes in the version of the distribution",
            hint="another base image brings another one: --base",
        )
    if re.match(r"\w+://[^/]*@", value):
        raise UsageError(
            f"--set {name}.{key} holds credentials, which would be written into the record and the image",
            hint="let the machine's own proxy or mirror ask for them",
        )
    target[leaf] = value
    return validate(Component, plain, where=f"--set {name}.{key}={value}")


def _agreeing_driver(after: Component, given: Mapping[str, str]) -> Component:
    """Make version and branch of a changed driver agree."""
    if "nvidia_driver.branch" in given and "nvidia_driver.version" not in given and after.branch:
        latest = drivers.branch(after.branch).latest
        if latest is None:
            raise UsageError(
                f"no release of driver branch {after.branch} is known",
                hint="name one: --set nvidia_driver.version=...",
            )
        after = replace(after, version=latest)
    elif "nvidia_driver.branch" not in given and after.version:
        head = after.version.partition(".")[0]
        after = replace(after, branch=int(head) if head.isdigit() else after.branch)
    _check_driver(after, "--set")
    return after


def as_plain(components: Components) -> dict[str, Any]:
    """The components as plain data, for the variables of Ansible and Packer.

    Args:
        components: What `load_components` or `apply_overrides` returned.

    Returns:
        The same form as components.yaml, ready for JSON.
    """
    plain: dict[str, Any] = TypeAdapter(dict[str, Component]).dump_python(dict(components), mode="json")
    return {name: {k: v for k, v in body.items() if v is not None} for name, body in plain.items()}
