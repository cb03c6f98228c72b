"""Plans and base images for people."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpukiln.images.plan import ImagePlan
from gpukiln.reports.tables import Rows
from gpukiln.sources.apt import strip_credentials
from gpukiln.sources.decisions import Decision

STYLES = {"install": "green", "preinstalled": "cyan", "left_out": "yellow"}


def plan_table(plan: ImagePlan) -> RenderableType:
    """A plan as tables.

    Returns:
        Something that a rich console prints.
    """
    parts: list[RenderableType] = [_head(plan), Text(), _components(plan)]
    for warning in plan.warnings:
        line = Text.assemble(("warning  ", "yellow"), warning.message)
        if warning.remedy:
            line.append(f"\n         {warning.remedy}", style="dim")
        parts.append(line)
    return Group(*parts)


def _head(plan: ImagePlan) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    # Ids are wrapped, never cut: people copy them.
    table.add_column(overflow="fold")
    base = plan.base
    rows = {
        "image": f"{plan.image} ({plan.architecture})",
        "cloud": f"{plan.cloud}, {plan.region}",
        "base": f"{base.name}  {base.id}",
        "": f"{base.image_name}, by {base.resolved_by}",
        "runs on": ", ".join(plan.instance_types),
        "built on": f"{plan.builder_instance_type}, {plan.volume_size_gib} GiB",
        **{f"roles {order}": ", ".join(names) for order, names in asdict(plan.own_roles).items() if names},
        "commit": plan.git_commit or "none",
        "digest": plan.digest,
    }
    for key, value in rows.items():
        table.add_row(key, Text(value, style="dim" if not key else ""))
    return table


def _components(plan: ImagePlan) -> Rows:
    rows = Rows("component", "version", "status", "from, or why not", first=3, folds=True)
    for decision in plan.components:
        words = decision.status.replace("_", " ")
        status = Text(words, style=STYLES[decision.status])
        # The source of what is installed may contain a mirror's credentials.
        why = decision.source if decision.status == "install" else decision.reason
        rows.add(decision.name, _version(decision), status, strip_credentials(why))
    return rows


def _version(decision: Decision) -> str:
    if decision.status == "left_out":
        # A left out component's version in brackets: it is not in the image.
        return f"({decision.version})" if decision.version else "-"
    return decision.package_version or decision.version or "at build time"


def bases_table(rows: Sequence[dict[str, Any]]) -> Rows:
    """One row for each base image.

    Args:
        rows: As `catalog.driver_bases.base_rows` returns them.
    """
    table = Rows("base", "driver", "Kubernetes", "default on", "", first=1, folds=True)
    for row in rows:
        table.add(
            row["base"],
            row["driver"] + (", or --set nvidia_driver.branch" if row["any_branch"] else ""),
            " to ".join(row["kubernetes"] or ()),
            ", ".join(row["default_on"]),
            "; ".join([row["title"], *([f"driver: {row['why']}"] if row["why"] else [])]),
        )
    return table
