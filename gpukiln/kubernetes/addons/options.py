"""Settings from files and options; a later one takes precedence over an earlier one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpukiln.catalog import offerings
from gpukiln.catalog.load import read_yaml
from gpukiln.catalog.regions import check_region
from gpukiln.errors import UsageError
from gpukiln.kubernetes.addons import queue, sharing
from gpukiln.kubernetes.addons.settings import Flavor, Settings
from gpukiln.typed import dump, load
from gpukiln.units import is_whole


def load_settings(
    files: Iterable[Path],
    *,
    plain: Mapping[str, str],
    teams: Iterable[str] = (),
    flavors: Iterable[str] = (),
    shared: Iterable[str] = (),
    runners: Mapping[str, str] | None = None,
) -> Settings:
    """Read and check the settings.

    Args:
        files: In the form of `Settings`; a later file takes precedence over an earlier one.
        plain: Options that are fields of `Settings`; an empty one was not given.
        teams: NAME=GPUS, or NAME=FLAVOR:GPUS,FLAVOR:GPUS if there are several flavors.
        flavors: As `queue.parse_flavor` reads them.
        shared: As `sharing.parse` reads them, or NAME=SHARING for nodes whose label has this value.
        runners: Options that are fields of `Runners`; an empty one was not given.

    Raises:
        UsageError: A file or an option is not valid.
    """
    document: dict[str, Any] = {}
    names = []
    for file in files:
        document = _merge(document, read_yaml(file))
        names.append(str(file))
    where = ", ".join(names) or "options"
    # Checked first without options, so that an error names the file.
    load(Settings, {key: value for key, value in document.items() if key != "runners"}, where=where)
    document |= {key: value for key, value in plain.items() if value}
    if typed := {key: value for key, value in (runners or {}).items() if value}:
        written = document.get("runners") or {}
        document["runners"] = {**written, **typed} if isinstance(written, dict) else written
        for needed, option in (("url", "--runners"), ("image", "--image")):
            if isinstance(written, dict) and needed not in document["runners"]:
                raise UsageError(
                    f"runners need {option}", hint="--runners https://github.com/ORG/REPOSITORY --image REF"
                )
    for text in shared:
        name, equals, how = text.rpartition("=")
        if equals:
            others = {**document.get("named_sharing", {}), name: dump(sharing.parse(how))}
            document["named_sharing"] = others
        else:
            document["sharing"] = dump(sharing.parse(how))
    base = load(Settings, document, where=where)
    kinds = [queue.parse_flavor(text, base.provider) for text in flavors]
    # An option replaces the entry of the same name in a file, and adds others.
    document["flavors"] = _by_name(document.get("flavors", ()), [dump(flavor) for flavor in kinds])
    known = load(Settings, document, where=where).flavors
    typed_teams = [_team(text, known) for text in teams]
    document["teams"] = _by_name(document.get("teams", ()), typed_teams)
    settings = load(Settings, document, where=where)
    if settings.region not in offerings.regions():
        check_region(settings.region)
    return settings


def _merge(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both mappings at all levels; a list is replaced as a whole."""
    merged = dict(base)
    for key, value in other.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]  # both are
    return merged


def _by_name(rows: Iterable[Any], typed: list[Any]) -> list[Any]:
    names = [row["name"] for row in typed]
    kept = [row for row in rows if not (isinstance(row, dict) and row.get("name") in names)]
    return [*kept, *typed]


def _team(text: str, flavors: tuple[Flavor, ...]) -> dict[str, Any]:
    hint = "--team vision=4, or --team vision=t4:4,h100:2 with several flavors"
    name, equals, quotas = text.partition("=")
    if not equals or not name or not quotas:
        raise UsageError(f"can't read --team {text!r}", hint=hint)
    if is_whole(quotas):
        if len(flavors) > 1:
            kinds = ", ".join(flavor.name for flavor in flavors)
            raise UsageError(
                f"--team {text} names no flavor, and there are several: {kinds}",
                hint=f"--team {name}={flavors[0].name}:{quotas}",
            )
        [kind] = flavors or (queue.ANY_GPU,)
        return {"name": name, "gpus": {kind.name: int(quotas)}}
    gpus = {}
    for part in quotas.split(","):
        match = re.fullmatch(r"\s*([^:\s]+):(\d{1,9})\s*", part)
        if not match:
            raise UsageError(f"can't read {part!r} of --team {text}", hint=hint)
        if match[1] in gpus:
            raise UsageError(f"--team {text} names {match[1]} twice", hint=hint)
        gpus[match[1]] = int(match[2])
    return {"name": name, "gpus": gpus}
