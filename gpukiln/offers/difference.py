"""What EC2 has and the shipped catalogue has not, as a patch for its file that keeps comments and form."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from gpukiln.catalog.gpu_names import keys_of
from gpukiln.catalog.gpus import gpus
from gpukiln.catalog.instance_types import InstanceType, excluded_families, instance_types
from gpukiln.catalog.load import DATA
from gpukiln.catalog.offerings import zone_ids
from gpukiln.offers.cache import TypeDescription, TypeList

FILE = DATA / "gpu_instances.yaml"
WIDTH = 110  # of .yamllint
# One type a row, as gpu_instances.yaml is formatted: edited as text, since a YAML dump would lose its
# comments.
ROW = re.compile(r"^  (?P<name>[\w.-]+): \{[^{}]*\}[^\n]*\n", re.MULTILINE)
# What both know; what both have as default is not written.
COMPARED = tuple(
    field.name for field in fields(TypeDescription) if field.name not in ("manufacturer", "accelerator")
)
DEFAULTS = {field.name: field.default for field in fields(InstanceType)}

Value = str | int | float | bool


@dataclass(frozen=True)
class FieldChange:
    """A field of a type that is not as the catalogue says."""

    instance_type: str
    field: str
    catalogue: Value
    described: Value


@dataclass(frozen=True)
class Difference:
    """What a region has and the catalogue has not.

    Args:
        new: Types that the catalogue neither knows nor leaves out.
        retired: Types that the region had and has no more.
        changed: What is not as the catalogue says of the others.
        notes: What the API does not say, and a person has to look up; a line each.
        patch: A unified diff for `git apply`; empty where there is no difference.
    """

    region: str
    new: tuple[str, ...]
    retired: tuple[str, ...]
    changed: tuple[FieldChange, ...]
    notes: tuple[str, ...]
    patch: str


def difference(
    types: TypeList,
    region: str,
    *,
    catalogue: Mapping[str, InstanceType] | None = None,
    text: str | None = None,
) -> Difference:
    """Compare what a region's API describes with the catalogue.

    A type that a region lacks is retired where the shipped offerings have it in that region: few have all.

    Args:
        types: What the region has; its day is the day of all that is said.
        catalogue: By name; None: the one that ships.
        text: That catalogue's file; None: the one that ships.
    """
    described = types.types
    known = instance_types() if catalogue is None else catalogue
    before = FILE.read_text(encoding="utf-8") if text is None else text
    left = {
        name: excluded_families()[_family(name)] for name in described if _family(name) in excluded_families()
    }
    unknown = set(described) - set(known) - set(left)
    new = tuple(sorted(unknown, key=lambda name: (_family(name), described[name].vcpu)))
    # Retired types stay in the catalogue, because users still name them; the plan then names alternatives.
    gone = [name for name, row in known.items() if row.status != "retired" and name not in described]
    retired = tuple(name for name in gone if zone_ids(name, region))
    changed = tuple(
        change for name in known if name in described for change in _changes(name, known, described)
    )
    after = before
    # Changed and retired rows first: new rows move the lines below them.
    for change in changed:
        after = _edited(after, change.instance_type, {change.field: change.described})
    for name in retired:
        since = f"by {types.as_of}, as the API of {region} says"
        after = _edited(after, name, {"status": "retired", "retired_since": since})
    rows = {name: _row(name, described[name], _key(described[name])) for name in new}
    after = _with_new(after, rows, f"  # DescribeInstanceTypes of {region} on {types.as_of}\n")
    notes = (
        *(note for name in new for note in _of_new(name, described[name], _key(described[name]))),
        *(f"{name} is left out: {why}" for name, why in left.items()),
        *(note for name in retired for note in _of_retired(name, known)),
        *(
            f"{change.instance_type} is offered again: remove its retired_since"
            for change in changed
            if change.field == "status"
        ),
    )
    if unsure := [name for name in gone if zone_ids(name, region) is None]:
        notes += (f"neither in {region} nor in the shipped offerings, so maybe retired: {', '.join(unsure)}",)
    return Difference(region, new, retired, changed, notes, _patch(before, after))


def _changes(
    name: str, known: Mapping[str, InstanceType], described: Mapping[str, TypeDescription]
) -> Iterator[FieldChange]:
    if known[name].status == "retired":
        yield FieldChange(name, "status", "retired", "current")
    for field in COMPARED:
        shipped, reported = getattr(known[name], field), getattr(described[name], field)
        if reported is not None and shipped != reported:
            yield FieldChange(name, field, shipped, reported)


def _of_new(name: str, row: TypeDescription, key: str) -> Iterator[str]:
    yield f"{name}: the API does not report its interconnect and its alternatives"
    if row.max_pods is None:
        yield f"{name}: max_pods is missing, for its network cards are not described"
    if key not in gpus():
        gpu = f"{row.manufacturer} {row.accelerator} of {row.gpu_memory_mib} MiB"
        yield f"{name}: its GPU ({gpu}) is not in nvidia_matrix.yaml; add it there as {key}"


def _of_retired(name: str, known: Mapping[str, InstanceType]) -> Iterator[str]:
    if not known[name].alternatives:
        yield f"{name}: add its alternatives"
    if users := [other for other, machine in known.items() if name in machine.alternatives]:
        yield f"{name}: it is listed as an alternative to {', '.join(users)}"


# --- GPUs -----------------------------------------------------------------------------------------------


def _key(row: TypeDescription) -> str:
    """The key of a GPU, or one made of its name where there is none; boards of one name differ in memory."""
    keys = [key for key in keys_of(row.accelerator) if gpus()[key].manufacturer == row.manufacturer]
    if len(keys) > 1:
        of = {
            machine.gpu
            for machine in instance_types().values()
            if machine.gpu_memory_mib == row.gpu_memory_mib
        }
        keys = [key for key in keys if key in of]
    return keys[0] if keys else re.sub(r"[^a-z0-9]+", "-", row.accelerator.lower()).strip("-") or "unknown"


# --- the file -------------------------------------------------------------------------------------------


def _row(name: str, row: TypeDescription, key: str) -> str:
    values: dict[str, Value | None] = {"gpu": key} | {field: getattr(row, field) for field in COMPARED}
    if row.gpu_fraction < 1:
        values["driver"] = "grid"  # a fraction is a vGPU: awslabs/amazon-eks-ami, nvidia-kmod-load.sh
    said = [f"{field}: {_yaml(value)}" for field, value in values.items() if _worth(field, value)]
    return _wrapped(f"  {name}: {{{', '.join(said)}}}\n")


def _worth(field: str, value: Value | None) -> bool:
    return value is not None and value != DEFAULTS[field]


def _edited(text: str, name: str, values: Mapping[str, Value]) -> str:
    """The file with other values in one row; the other rows and all comments stay as they are."""
    [row_match] = [match for match in ROW.finditer(text) if match["name"] == name]
    row = row_match[0]
    for field, value in values.items():
        written = f"{field}: {_yaml(value)}"
        if there := re.search(rf'\b{field}: ("[^"\n]*"|\[[^\]]*\]|[^,}}\n]+)', row):
            row = row[: there.start()] + written + row[there.end() :]
        else:
            head, tail = row.rsplit("}", 1)
            row = f"{head}, {written}}}{tail}"
    return text[: row_match.start()] + _wrapped(row) + text[row_match.end() :]


def _with_new(text: str, rows: Mapping[str, str], source: str) -> str:
    """The file with further rows, below the last one of their family or of all."""
    families: dict[str, list[str]] = {}
    for name, row in rows.items():
        families.setdefault(_family(name), []).append(row)
    for family, group in families.items():
        there = list(ROW.finditer(text))
        last = [match for match in there if _family(match["name"]) == family] or there
        end = last[-1].end()
        text = text[:end] + source + "".join(group) + text[end:]
    return text


def _wrapped(row: str) -> str:
    """A row whose lines fit, broken after commas and aligned below its first key."""
    indent = " " * (row.index("{") + 1)
    lines = []
    for line in row.splitlines():
        rest = line
        # Broken as .yamllint wants it, so that the patch passes the project's own linters.
        while len(rest) > WIDTH and (comma := rest.rfind(", ", len(indent), WIDTH)) > 0:
            lines.append(rest[: comma + 1])
            rest = indent + rest[comma + 2 :]
        lines.append(rest)
    return "\n".join(lines) + "\n"


def _patch(before: str, after: str) -> str:
    name = f"gpukiln/catalog/data/{FILE.name}"
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(lines)


def _family(name: str) -> str:
    return name.partition(".")[0]


def _yaml(value: Value | None) -> str:
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z][\w.-]*", value) else json.dumps(value)
    return json.dumps(value)
