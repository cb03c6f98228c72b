"""Machine images: what they can be built from."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.commands.cli import JsonOptions, print_document, results


@dataclass(frozen=True)
class AmiBases(JsonOptions):
    """List the base images of --base: the driver, and the Kubernetes versions that each was seen for."""

    def run(self) -> None:
        from gpukiln.catalog.components import load_components
        from gpukiln.catalog.driver_bases import base_rows
        from gpukiln.reports.tables import Rows

        rows = base_rows(load_components())
        if self.json:
            print_document("ami.bases/1", bases=rows)
            return
        table = Rows("base", "driver", "Kubernetes", "default on", "", first=1, folds=True)
        for row in rows:
            seen, notes = (
                row["kubernetes"],
                [row["title"], *([f"driver: {row['why']}"] if row["why"] else [])],
            )
            table.add(
                row["base"],
                row["driver"] + (", or --set nvidia_driver.branch" if row["any_branch"] else ""),
                " to ".join(seen) if seen else "",
                ", ".join(row["default_on"]),
                "; ".join(notes),
            )
        results().print(table)
