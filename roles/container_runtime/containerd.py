"""containerd's configuration files: merged by tomlkit, which keeps comments and order of the site's own."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

MAIN = "/etc/containerd/config.toml"
FOLDER = "/etc/containerd/conf.d"
DROP_INS = f"{FOLDER}/*.toml"
WRITTEN_BY_ROLE = ("10-gpukiln.toml", "99-nvidia.toml")
# the names of the plug-in in containerd 1.x, 2.x, and in lists without the prefix
KUBERNETES = (
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.runtime",
    "io.containerd.cri.v1.images",
    "cri",
)
MERGES_FROM = (2, 1)
"""Before this version a table in a drop-in replaces the whole plug-in's."""
# enable_cdi came with containerd 1.7
CDI_FROM = (1, 7)
HEADER = """\
# Written by Ansible (role container_runtime). Before containerd 2.1 a table here replaces the plug-in's own,
# so it repeats what the other files say of it.
"""
Table = dict[str, Any]


class BrokenFileError(Exception):
    """A configuration file that can't be read: found, wanted, next step."""


@dataclass(frozen=True)
class Settings:
    """What containerd is to run with.

    Args:
        sandbox_image: Empty for containerd's own.
        default_runtime: Empty: what the files say, or runc.
        runtimes: Name to binary, in addition to runc.
    """

    cni_bin_dir: str
    cni_conf_dir: str
    sandbox_image: str
    default_runtime: str
    runtimes: Mapping[str, str]


def files(there: Mapping[str, str], version: str, drop_in: str, settings: Settings) -> dict[str, str]:
    """Say how files must read so that containerd runs with our settings.

    Args:
        there: Path to text, what is in /etc/containerd.
        version: Containerd's; empty when it is not installed yet.
        drop_in: Name of the drop-in to write.

    Returns:
        Path to text: the drop-in, and then the main file, because that imports it. The main file's text is
        kept but for what lets it read drop-ins, and Kubernetes' plug-in switched on.

    Raises:
        BrokenFileError: A file is no TOML.
    """
    # 1.6, Debian 12's, where the version is not known yet.
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) or (1, 6)
    parsed = {path: _parsed(path, text).unwrap() for path, text in there.items()}
    # The main file's own schema, so that the drop-in has the same.
    schema = int(parsed.get(MAIN, {}).get("version", 3 if numbers >= (2, 0) else 2))
    site: Table = {}
    for path in _imported(parsed):
        site = _merged(site, {"plugins": _cri(parsed[path], schema)})
    own = _merged(
        _preferences(site, schema, settings.runtimes), _table(settings, schema, cdi=numbers >= CDI_FROM)
    )
    base = site if numbers < MERGES_FROM else {}
    text = HEADER + tomlkit.dumps({"version": schema, **_merged(base, own)})
    return {f"{FOLDER}/{drop_in}": text, MAIN: main_file(there.get(MAIN, ""), schema)}


def main_file(text: str, version: int) -> str:
    """Have containerd's main file read the drop-ins and Kubernetes' plug-in run, and change nothing else.

    Args:
        text: The file; empty when there is none.
        version: The schema for a new file: 2 for containerd 1.x, 3 for 2.x.
    """
    if not text.strip():
        return f'version = {version}\nimports = ["{DROP_INS}"]\n'
    document = _parsed(MAIN, text)
    # Only the drop-ins are added; imports of the site stay first and so are read first.
    if "imports" not in document:
        document["imports"] = [DROP_INS]
    elif DROP_INS not in document["imports"]:
        document["imports"].append(DROP_INS)
    # The packages of Docker's repository come with it switched off.
    disabled = document.get("disabled_plugins", [])
    for name in [name for name in disabled if name in KUBERNETES]:
        disabled.remove(name)
    return tomlkit.dumps(document)


def _parsed(path: str, text: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise BrokenFileError(
            f"Found {path} that is no TOML: {error}. Wanted a configuration that containerd can read. Fix or"
            " remove the file."
        ) from error


def _imported(parsed: Mapping[str, Table]) -> Iterator[str]:
    """The main file, and what it reads, in order; not what we write."""
    if MAIN not in parsed:
        return
    yield MAIN
    # In the order of the patterns, then by name, as containerd reads them.
    for pattern in parsed[MAIN].get("imports", []):
        for path in sorted(parsed):
            if path != MAIN and fnmatch(path, pattern) and path.rpartition("/")[2] not in WRITTEN_BY_ROLE:
                yield path


def _cri(table: Table, schema: int) -> Table:
    plugins = table.get("plugins", {})
    return {name: plugins[name] for name in _names(schema) if name in plugins}


def _names(schema: int) -> tuple[str, str]:
    """Kubernetes' plug-in: its table of runtimes, and its table of images."""
    # containerd 2 split the plug-in into runtime and images (config version 3).
    if schema >= 3:
        return "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"
    return ("io.containerd.grpc.v1.cri",) * 2


def _preferences(site: Table, schema: int, runtimes: Mapping[str, str]) -> Table:
    """The default runtime that a site's own files name, unless gpukiln configured it."""
    runtime = _names(schema)[0]
    said = site.get("plugins", {}).get(runtime, {}).get("containerd", {}).get("default_runtime_name")
    # A default of gpukiln's own from an earlier run must not become the site's.
    name = said if said and said not in runtimes else "runc"
    return {"plugins": {runtime: {"containerd": {"default_runtime_name": name}}}}


def _table(settings: Settings, schema: int, *, cdi: bool) -> Table:
    runtime, images = _names(schema)
    options: dict[str, Table] = {"runc": {}}
    options |= {name: {"BinaryName": path} for name, path in settings.runtimes.items()}
    table: Table = {
        "cni": {"bin_dir": settings.cni_bin_dir, "conf_dir": settings.cni_conf_dir},
        "containerd": {
            "runtimes": {
                # SystemdCgroup: the kubelet uses systemd's cgroup driver, and both must be the same.
                name: {"runtime_type": "io.containerd.runc.v2", "options": {**extra, "SystemdCgroup": True}}
                for name, extra in options.items()
            },
        },
    }
    if settings.default_runtime:
        table["containerd"]["default_runtime_name"] = settings.default_runtime
    if cdi:
        table["enable_cdi"] = True
    plugins: Table = {runtime: table}
    if image := settings.sandbox_image:
        # Renamed in schema 3; pinned images are not removed by the kubelet's image collection.
        new = {"pinned_images": {"sandbox": image}} if schema >= 3 else {"sandbox_image": image}
        plugins = _merged(plugins, {images: new})
    return {"plugins": plugins}


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> Table:
    result = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
