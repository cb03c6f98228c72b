"""Settings from what was written into files and typed as options: the later goes before the earlier."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpukiln.catalog import offerings
from gpukiln.catalog.load import read_yaml
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
    """What somebody chose.

    Args:
        files: In the form of `Settings`, the later goes before the earlier.
        plain: Options that are fields of `Settings`; empty ones were not typed.
        teams: NAME=GPUS, or NAME=FLAVOR:GPUS,FLAVOR:GPUS where there are several flavors.
        flavors: As `queue.flavor` reads them.
        shared: As `sharing.parse` reads them, or NAME=HOW for nodes with the label of that name.
        runners: Options that are fields of `Runners`; empty ones were not typed.

    Raises:
        UsageError: A file or an option does not fit.
    """
    document: dict[str, Any] = {}
    names = []
    for file in files:
        document = _merge(document, read_yaml(file))
        names.append(str(file))
    where = ", ".join(names) or "options"
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
    document["flavors"] = _by_name(document.get("flavors", ()), [dump(flavor) for flavor in kinds])
    known = load(Settings, document, where=where).flavors
    typed_teams = [_team(text, known) for text in teams]
    document["teams"] = _by_name(document.get("teams", ()), typed_teams)
    settings = load(Settings, document, where=where)
    if settings.region not in offerings.regions():
        from gpukiln.catalog.regions import check_region  # noqa: PLC0415 - botocore's, slow to import

        check_region(settings.region)
    return settings


def _merge(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of both, down to the last; a list is replaced as a whole."""
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
    hint = "--team vision=4, or --team vision=t4:4,h100:2 where there are several flavors"
    name, equals, quotas = text.partition("=")
    if not equals or not name or not quotas:
        raise UsageError(f"can't read --team {text!r}", hint=hint)
    if is_whole(quotas):
        if len(flavors) > 1:
            kinds = ", ".join(flavor.name for flavor in flavors)
            raise UsageError(
                f"--team {text}: of which flavor? There are {kinds}",
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
