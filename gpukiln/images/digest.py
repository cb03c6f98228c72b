"""One digest over everything that can change an image, and words for what changed."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from gpukiln import recipes
from gpukiln.catalog.components import Components, to_plain_data
from gpukiln.catalog.images import ImageDefinition
from gpukiln.catalog.load import SafeLoader
from gpukiln.gpus import zipapp
from gpukiln.images.bases import ResolvedBase
from gpukiln.parsing import check_yaml
from gpukiln.project import ORDERS, ROLES, OwnRoles
from gpukiln.recipes import PROJECT_FILE
from gpukiln.sources.decisions import Decision

TEXT_FIELDS = {"source", "reason", "review"}  # fields of a component that people read; they change no image
PROGRAM = f"program {zipapp.PROGRAM}"  # which the role gpu_tools makes of this checkout
# Words for `explain_change`; other inputs are named as they are.
INPUT_TITLES = {
    "component": "available version of {}",
    "tool": "version of {}",
    "base": "base image",
    "kernel": "available version of the kernel",
}
IGNORED_FOLDERS = {"docs", "tests", "molecule", "__pycache__", "inventory", "callback"}
IGNORED_FILES = {"image.yaml", "node.yml", "drift.yml", "runtime.yml", "argument_specs.yml"}
"""Their content is in the inputs by value, runs only on live nodes, or only checks a role's arguments."""


class _AnyTag(SafeLoader):
    """Reads Ansible's YAML, whose tags (!unsafe, !vault) the plain loader refuses."""


def _any_tag(loader: SafeConstructor, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {suffix: loader.construct_mapping(node, deep=True)}
    if isinstance(node, yaml.SequenceNode):
        return {suffix: loader.construct_sequence(node, deep=True)}
    return {suffix: loader.construct_scalar(node)} if isinstance(node, yaml.ScalarNode) else {suffix: None}


_AnyTag.add_multi_constructor("!", _any_tag)


def image_inputs(
    root: Path,
    image: ImageDefinition,
    base: ResolvedBase,
    decisions: Iterable[Decision],
    components: Components,
    tools: Mapping[str, str],
    own_roles: OwnRoles = OwnRoles(),  # noqa: B008 - frozen
) -> dict[str, str]:
    """Everything that can change the image, by name.

    Args:
        base: The base that was found.
        decisions: What happens to each component.
        components: How each is installed: packages, repository, kind of modules.
        tools: The versions of the tools that build, by name.
        own_roles: The roles of the project that the image gets.

    Returns:
        Name to value or hash.
    """
    inputs = {
        "image": image.name,
        "architecture": image.architecture,
        "volume size": f"{image.volume_size_gib} GiB",
        # Only where it is off, so that digests of before this option stay the same.
        **({} if image.encrypted else {"volume encryption": "off"}),
        "base": f"{base.name} {base.id}",
    }
    plain = to_plain_data(components)
    for decision in decisions:
        # The package's version if known: a rebuild of the same release is another image.
        version = decision.package_version or decision.version or "any version"
        inputs[f"component {decision.name}"] = f"{decision.status} {version}"
        if decision.status == "install":
            # How a component is installed counts as well as its version: repository, key, options.
            recipe = {k: v for k, v in plain[decision.name].items() if k not in TEXT_FIELDS}
            inputs[f"recipe {decision.name}"] = canonical(recipe)
    inputs |= {f"tool {name}": version for name, version in tools.items()}
    # The packed program, not its sources: what a node gets is compared.
    inputs[PROGRAM] = zipapp.digest()
    inputs |= {f"file {name}": hash_file(path) for name, path in _files(root, image.name)}
    if own_roles:
        inputs |= _own_inputs(own_roles, inputs)
    return inputs


def _own_inputs(own: OwnRoles, shipped: dict[str, str]) -> dict[str, str]:
    """The order of a project's roles, and every file of its folder of roles: each role can include any other.

    Args:
        shipped: The other inputs; files of replaced roles are taken out of it.
    """
    inputs = {f"roles {order}": ", ".join(names) for order in ORDERS if (names := getattr(own, order))}
    replaced = tuple(f"file {ROLES}/{name}/" for name in own.replace)
    for name in [name for name in shipped if name.startswith(replaced)] if replaced else ():
        del shipped[name]
    if project := recipes.project():
        folder = project / ROLES
        inputs |= {f"file {ROLES}/{name}": hash_file(path) for name, path in _own_files(folder)}
    return inputs


def _own_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a project's roles: what stands at the top of a role for readers and tests does not count.

    Below that every file counts, hidden ones too: a role may copy a whole folder into the image.
    """
    for role in sorted(path for path in folder.glob("*") if path.is_dir()):
        for path in sorted(role.rglob("*")):
            top, *below = path.relative_to(role).parts
            ignored = top in IGNORED_FOLDERS if below else top.endswith(".md") or top[0] == "."
            if path.is_file() and not ignored and path.suffix != ".pyc":
                yield f"{role.name}/{path.relative_to(role)}", path


def _files(root: Path, image: str) -> Iterator[tuple[str, Path]]:
    """The files that a build reads, each with its name in a checkout."""
    yield "ansible.cfg", root / "ansible.cfg"
    tops = {top: root / top for top in ("ansible", "roles", "scripts/bootstrap", "scripts/hooks")}
    for top, place in {f"ami/{image}": recipes.images(root)[image], **tops}.items():
        for folder, folders, names in os.walk(place):
            # In place, as os.walk wants it, so that ignored folders are not entered.
            folders[:] = sorted(name for name in folders if name not in IGNORED_FOLDERS and name[0] != ".")
            for name in sorted(names):
                path = Path(folder, name)
                ignored = name[0] == "." or name in IGNORED_FILES or name.endswith((".md", ".pyc", "~"))
                if path.is_file() and not ignored:
                    yield f"{top}/{path.relative_to(place)}", path


def hash_file(path: Path) -> str:
    """Hash what a file means to a build.

    A YAML file counts by its values, so that comments and layout do not; the description for Galaxy in a
    role's meta/main.yml does not count either. Whether a file can be executed does.

    Returns:
        The hash, with +x when the file is executable.
    """
    content = path.read_bytes()
    if path.suffix in (".yml", ".yaml"):
        content = _meaning(content, drop="galaxy_info" if path.parent.name == "meta" else None)
    mode = "+x" if path.stat().st_mode & 0o100 else ""
    return hashlib.sha256(content).hexdigest() + mode


def _meaning(content: bytes, *, drop: str | None) -> bytes:
    try:
        # Limits of depth and size first: libyaml's composer recurses.
        check_yaml(content)
        documents = list(yaml.load_all(content, Loader=_AnyTag))
        if drop and documents and isinstance(documents[0], dict):
            # Galaxy's description of a role is read by people only.
            documents[0].pop(drop, None)
        return canonical(documents).encode()
    except (yaml.YAMLError, TypeError, ValueError):
        return content  # a file that is no YAML counts by its bytes; the role that reads it reports the error


def canonical(value: object) -> str:
    """JSON that is the same text for the same value.

    >>> canonical({"b": 1, "a": [True, None]})
    '{"a":[true,null],"b":1}'
    >>> canonical({1: "x"})
    '{"1":"x"}'

    Args:
        value: Plain data.

    Returns:
        JSON with sorted keys and no spaces. Keys of dictionaries become text.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def digest(inputs: Mapping[str, str]) -> str:
    """The digest of an image.

    Args:
        inputs: What `image_inputs` returned.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(canonical(dict(inputs)).encode()).hexdigest()


def explain_change(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Say what changed between two builds.

    Args:
        old: The inputs of the earlier one.
        new: The inputs of the later one.

    Returns:
        One line a change; empty when nothing changed.
    """
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        kind, _, what = name.partition(" ")
        verb = "added" if before is None else "removed" if after is None else "changed"
        if kind in ("file", "program"):
            lines.append(f"{verb} {_place(what)}")
        elif kind == "recipe":
            lines.append(f"{verb}: how {what} is installed (components.yaml, {PROJECT_FILE} or --set)")
        else:
            words = INPUT_TITLES.get(kind, name).format(what)
            lines.append(f"{words}: {_status(before)} -> {_status(after)}")
    return lines


def _place(path: str) -> str:
    top, _, rest = path.partition("/")
    owner, _, inner = rest.partition("/")
    if top == "roles" and inner:
        return f"role {owner}: {inner}"
    return f"template of {owner}: {inner}" if top == "ami" and inner else path


def _status(value: str | None) -> str:
    return (value or "absent").removeprefix("install ").replace("left_out", "left out")
