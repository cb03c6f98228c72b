"""Durations of each step of the last builds, next to each other."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.images.builds import Record
from gpukiln.reports.tables import Rows
from gpukiln.units import Duration


def modules_of(record: Record) -> str:
    """Origin of the kernel modules of a build: a stage, cache, compiled, or - when it is unknown.

    Args:
        record: The build's record.
    """
    if record.bake and record.bake.stage:
        return f"stage {record.bake.stage.stage}"
    uses = record.bake.modules if record.bake else ()
    return ", ".join(sorted({"cache" if use.cached else "compiled" for use in uses})) or "-"


def timings(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Durations of builds as plain data.

    Args:
        records: Builds that ended, newest first.

    Returns:
        One entry a build: its id, state, modules, seconds of each step and of all of them.
    """
    return [
        {
            "build_id": record.build_id,
            "image": record.plan.image,
            "cloud": record.plan.cloud,
            "state": record.state,
            "modules": modules_of(record),
            "durations_s": record.durations_s,
            "total_s": round(sum(record.durations_s.values()), 1),
        }
        for record in records
    ]


def timings_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """The same as tables: the builds, then a step a row, and how the newest compares with the one before.

    Args:
        rows: What `timings` returned.
    """
    # Builds are numbered, for a build's id is too wide for the head of a column.
    builds = Rows("", "build", "state", "modules", first=3)
    numbers = [str(number) for number in range(1, len(rows) + 1)]
    for number, row in zip(numbers, rows, strict=True):
        builds.add(number, row["build_id"], row["state"], row["modules"])
    steps = Rows("step", *numbers, "1 / 2", first=1, right=(*numbers, "1 / 2"))
    # Steps of all builds in the order of the newest: a build from a stage has fewer.
    for step in dict.fromkeys(step for row in rows for step in row["durations_s"]):
        steps.add(step, *_cells([row["durations_s"].get(step) for row in rows]))
    steps.add("all", *_cells([row["total_s"] for row in rows]), style="bold")
    return Group(builds, Text(), steps)


def _cells(seconds: list[float | None]) -> list[str]:
    # of one build the second value is missing
    newest, before = (*seconds, None, None)[:2]
    ratio = f"{newest / before:.2f}" if newest is not None and before else ""
    return [*("-" if value is None else Duration(value).shown for value in seconds), ratio]
