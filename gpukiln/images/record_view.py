"""Builds for people: the list of them, and the record of one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from gpukiln.images.builds import Build, Builds, Record
from gpukiln.images.cost import cost_lines
from gpukiln.images.modules import module_line
from gpukiln.images.orphans import killed_builds
from gpukiln.images.plan_view import plan_table
from gpukiln.images.stages import stage_line
from gpukiln.reports.tables import Rows
from gpukiln.units import Duration
from gpukiln.verify.report import render
from gpukiln.verify.verdict import counts_text


def builds_parts(builds: Builds) -> Iterator[RenderableType]:
    """One row for each build, the newest first."""
    # A record can't say that its build was killed: nobody was left to write it.
    killed = {build.id for build in killed_builds(builds)}
    rows = Rows("build", "AMI", "cloud", "driver", "state", "checks", "took", first=2)
    for record in (build.read() for build in builds.all()):
        checks = counts_text(record.verdict.checks) if record.verdict and record.verdict.checks else "-"
        # Marked in the list, too, because such a verdict does not count for a release.
        simulated = " (simulated)" if record.verdict and record.verdict.simulated else ""
        rows.add(
            record.build_id,
            record.bake.image_id if record.bake else "-",
            f"{record.plan.cloud} {record.plan.region}",
            record.plan.component("nvidia_driver").version or "-",
            "killed" if record.build_id in killed else record.state,
            checks + simulated * (checks != "-"),
            Duration(sum(record.durations_s.values())).shown,
        )
    yield rows


def record_parts(build: Build, record: Record) -> Iterator[RenderableType]:
    """All that the record of a build says."""
    yield plan_table(record.plan)
    if record.bake:
        yield f"\n{record.bake.image_id}  {record.bake.name}"
        yield f"kernel {record.bake.kernel}, {len(record.bake.packages)} packages\n"
        if record.bake.stage:
            yield f"{stage_line(record.bake.stage)}\n"
        for use in record.bake.modules:
            yield f"{module_line(use)}\n"
    if record.verdict:
        yield render(record.verdict)
        for name, verdict in record.newest_verdicts.items():
            outcome = "passed" if verdict.passed else "FAILED"
            yield (
                f"{name}: {outcome} on {verdict.started_at}, {counts_text(verdict.checks)}, "
                f"suite {verdict.suite_version[:12]}"
            )
        if record.simulated:
            yield f"on simulated GPUs, which does not count: {', '.join(record.simulated)}"
        yield f"{len(record.verdicts)} verdicts, reports: {build.report_folder(1).parent}\n"
    for step, seconds in record.durations_s.items():
        yield f"{step:24} {Duration(seconds).shown:>12}"
    # cost_lines takes no cost for a build on the embedded cloud: a record of AWS without one must not be
    # shown as free.
    if record.cost or record.plan.cloud == "embedded":
        yield "\n" + "\n".join(cost_lines(record.cost))
    yield f"\nstate {record.state}{': ' + record.error if record.error else ''}\nfolder {build.folder}"
