"""Filters of the role container_runtime: containerd's configuration files, merged and not overwritten."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from ansible.errors import AnsibleFilterError

MAIN = "/etc/containerd/config.toml"
FOLDER = "/etc/containerd/conf.d"
DROP_INS = f"{FOLDER}/*.toml"
OURS = ("10-gpukiln.toml", "99-nvidia.toml")
MERGES_FROM = (2, 1)
"""Before this version a table in a drop-in replaces the whole plug-in's."""
CDI_FROM = (1, 7)
HEADER = """\
# Written by Ansible (role container_runtime). Before containerd 2.1 a table here replaces the plug-in's own,
# so it repeats what the other files say of it.
"""
Table = dict[str, Any]


def containerd_files(text: str) -> dict[str, str]:
    """Take files apart that grep printed in one go.

    Args:
        text: What `grep --recursive "" /etc/containerd` prints, `path:line`.

    Returns:
        Path to text.
    """
    files: dict[str, str] = {}
    for line in text.splitlines():
        path, _, rest = line.partition(":")
        files[path] = f"{files.get(path, '')}{rest}\n"
    return files


def containerd_changes(
    files: Mapping[str, str], version: str, drop_in: str, settings: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Say which files must change so that containerd runs with our settings.

    Args:
        files: Path to text, what is in /etc/containerd.
        version: Containerd's version; empty when it is not installed yet.
        drop_in: Name of the drop-in to write.
        settings: cni_bin_dir, cni_conf_dir, sandbox_image (may be empty), default_runtime (empty: what the
            files say, or runc), and runtimes, name to binary, beside runc.

    Returns:
        `{path, text}` of each file that differs from what it should be: the drop-in, then the main file. The
        main file's text is kept but for what lets it read drop-ins, and Kubernetes' plug-in switched on.

    Raises:
        AnsibleFilterError: A file is no TOML.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) or (1, 6)
    main = files.get(MAIN, "")
    parsed = {path: _parsed(path, text) for path, text in files.items()}
    schema = int(parsed.get(MAIN, {}).get("version", 3 if numbers >= (2, 0) else 2))
    site: Table = {}
    for path in _imported(parsed):
        site = _merged(site, {"plugins": _cri(parsed[path], schema)})
    ours = _merged(
        _preferences(site, schema, settings["runtimes"]), _settings(settings, schema, cdi=numbers >= CDI_FROM)
    )
    base = site if numbers < MERGES_FROM else {}
    text = HEADER + "\n".join(_toml({"version": schema, **_merged(base, ours)})) + "\n"
    wanted = {f"{FOLDER}/{drop_in}": text, MAIN: _with_plugin(containerd_with_imports(main, schema))}
    return [{"path": path, "text": text} for path, text in wanted.items() if files.get(path) != text]


def containerd_with_imports(text: str, version: int) -> str:
    """Make containerd's main file read the drop-in folder, and change nothing else.

    Args:
        text: The file; empty when there is none.
        version: The schema for a new file: 2 for containerd 1.x, 3 for 2.x.

    Returns:
        The file with an import of /etc/containerd/conf.d/*.toml.
    """
    if not text.strip():
        return f'version = {version}\nimports = ["{DROP_INS}"]\n'
    head, rest = _head(text)
    found = re.search(r"(?m)^imports[ \t]*=[ \t]*\[([^]]*)\]", head)
    if found is None:
        line = f'imports = ["{DROP_INS}"]\n'
        schema = re.search(r"(?m)^version[ \t]*=.*\n?", head)
        at = schema.end() if schema else 0
        gap = "" if not at or head[at - 1] == "\n" else "\n"
        return f"{head[:at]}{gap}{line}{head[at:]}{rest}"
    if f'"{DROP_INS}"' in found[1] or f"'{DROP_INS}'" in found[1]:
        return text
    items = found[1].rstrip().rstrip(",").rstrip()
    items = f'{items}, "{DROP_INS}"' if items.strip() else f'"{DROP_INS}"'
    return f"{head[: found.start(1)]}{items}{head[found.end(1) :]}{rest}"


def _head(text: str) -> tuple[str, str]:
    """Keys of the top level stand before the first table."""
    table = re.search(r"(?m)^[ \t]*\[{1,2}[A-Za-z\"'][^\n,]*\]{1,2}[ \t]*(#.*)?$", text)
    return (text[: table.start()], text[table.start() :]) if table else (text, "")


def _with_plugin(text: str) -> str:
    """Switch Kubernetes' plug-in on: the packages of Docker's repository come with it switched off."""
    head, rest = _head(text)
    names = r"io\.containerd\.grpc\.v1\.cri|io\.containerd\.cri\.v1\.(?:runtime|images)|cri"
    found = re.search(r"(?m)^disabled_plugins[ \t]*=[ \t]*\[([^]]*)\]", head)
    if found is None:
        return text
    kept = [
        item for item in re.findall(r"\"[^\"]*\"|'[^']*'", found[1]) if not re.fullmatch(names, item[1:-1])
    ]
    if len(kept) == len(re.findall(r"\"[^\"]*\"|'[^']*'", found[1])):
        return text
    return f"{head[: found.start(1)]}{', '.join(kept)}{head[found.end(1) :]}{rest}"


def _parsed(path: str, text: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AnsibleFilterError(
            f"Found {path} that is no TOML: {error}. Wanted a configuration that containerd can read. Mend "
            "or remove the file."
        ) from error


def _imported(parsed: Mapping[str, Table]) -> Iterator[str]:
    """The main file, and what it reads, in order; not what we write."""
    if MAIN not in parsed:
        return
    yield MAIN
    for pattern in parsed[MAIN].get("imports", []):
        for path in sorted(parsed):
            if path != MAIN and fnmatch(path, pattern) and path.rpartition("/")[2] not in OURS:
                yield path


def _cri(table: Table, schema: int) -> Table:
    plugins = table.get("plugins", {})
    return {name: plugins[name] for name in _names(schema) if name in plugins}


def _names(schema: int) -> tuple[str, str]:
    """Kubernetes' plug-in: its table of runtimes, and its table of images."""
    if schema >= 3:
        return "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"
    return ("io.containerd.grpc.v1.cri",) * 2


def _preferences(site: Table, schema: int, runtimes: Mapping[str, str]) -> Table:
    """The default runtime that a site's own files name, unless it is one of ours."""
    runtime, _ = _names(schema)
    said = site.get("plugins", {}).get(runtime, {}).get("containerd", {}).get("default_runtime_name")
    name = said if said and said not in runtimes else "runc"
    return {"plugins": {runtime: {"containerd": {"default_runtime_name": name}}}}


def _settings(settings: Mapping[str, Any], schema: int, *, cdi: bool) -> Table:
    runtime, images = _names(schema)
    options: dict[str, Table] = {"runc": {}}
    options |= {name: {"BinaryName": path} for name, path in settings["runtimes"].items()}
    table: Table = {
        "cni": {"bin_dir": settings["cni_bin_dir"], "conf_dir": settings["cni_conf_dir"]},
        "containerd": {
            "runtimes": {
                name: {"runtime_type": "io.containerd.runc.v2", "options": {**extra, "SystemdCgroup": True}}
                for name, extra in options.items()
            },
        },
    }
    if default := settings["default_runtime"]:
        table["containerd"]["default_runtime_name"] = default
    if cdi:
        table["enable_cdi"] = True
    plugins: Table = {runtime: table}
    if image := settings["sandbox_image"]:
        new = {"pinned_images": {"sandbox": image}} if schema >= 3 else {"sandbox_image": image}
        plugins = _merged(plugins, {images: new})
    return {"plugins": plugins}


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> Table:
    result = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _toml(table: Mapping[str, Any], path: Sequence[str] = ()) -> list[str]:
    """A table as TOML: its values, then its tables, each with its whole name."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    if path and (lines or not table):
        lines = ["", f"[{'.'.join(_key(part) for part in path)}]", *lines]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _toml(value, (*path, key))
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())}}}"
    # Its strings, numbers and booleans are TOML's as well.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float) else str(value)


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {"containerd_files": containerd_files, "containerd_changes": containerd_changes}
