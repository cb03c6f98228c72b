"""Container images for people: the plan, the layers, the builds, the check of a node."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.catalog.cuda import needs
from gpukiln.catalog.gpus import gpu
from gpukiln.docker.build import is_build_running
from gpukiln.docker.builds import ContainerBuild, ContainerBuilds, ContainerRecord
from gpukiln.docker.check import ContainerCheck
from gpukiln.docker.engine import ImageInfo
from gpukiln.docker.plan import ContainerPlan
from gpukiln.reports.tables import Rows
from gpukiln.units import Duration, Memory
from gpukiln.verify.report import ending, render
from gpukiln.verify.verdict import Verdict, counts_text

SMALL = 100_000  # bytes: smaller layers are listed as one sum


def plan_table(plan: ContainerPlan) -> RenderableType:
    """The plan, one component a row."""
    rows = Rows("component", "version", "", "from", first=3, folds=True)
    for part in plan.components:
        out = part.status == "left_out"
        rows.add(
            part.name,
            part.version or "as the base has it",
            Text("left out", style="yellow") if out else "install",
            part.reason if out else part.source,
        )
    rows.add("packages", str(len(plan.packages)), "install", f"{plan.base.distribution} {plan.base.release}")
    needed = needs(plan.cuda)
    least, full = f">= {needed.first}", f"{needed.native} or later runs all of CUDA {plan.cuda}"
    rows.add("node's driver", least, "needs", full)
    head = f"{plan.image} for {plan.platform}, from {plan.base.title}\ndigest {plan.digest[:12]}"
    return Group(Text(head), rows)


def layer_table(image: ImageInfo) -> Rows:
    """The layers of an image with their sizes."""
    rows = Rows("size", "layer", first=1, folds=True, right=("size",))
    for number, layer in enumerate(image.layers):
        # A Dockerfile has tens of lines that only set a variable; a row for each would hide the large ones.
        if layer.size >= SMALL:
            # The first layer is the base, whose instruction is a long ADD of its publisher.
            rows.add(Memory(layer.size).shown, " ".join(layer.created_by.split()) if number else "the base")
    small = [layer.size for layer in image.layers if layer.size < SMALL]
    rows.add(Memory(sum(small)).shown, f"{len(small)} small layers")
    rows.add(Memory(image.size).shown, "in all")
    return rows


def built_parts(build: ContainerBuild, record: ContainerRecord) -> Iterator[RenderableType]:
    """What a build made."""
    if record.image:
        yield layer_table(record.image)
    took = Duration(sum(record.durations_s.values())).shown
    yield f"{record.reference}, also {record.plan.version}; built in {took}"
    yield f"record: {build.record_file}"


def reused_line(record: ContainerRecord) -> str:
    """Why nothing is built."""
    verified = "verified" if record.state == "verified" else "not verified"
    return (
        f"nothing to build: {record.reference} has this digest, built {record.plan.created_at}, {verified} "
        "(--force builds anyway)"
    )


def verdict_parts(build: ContainerBuild, verdict: Verdict) -> Iterator[RenderableType]:
    """A verdict, and where its report is."""
    yield ending(verdict)
    yield f"report: {build.folder / 'verify' / 'report.html'}"


def builds_table(builds: ContainerBuilds, records: Sequence[ContainerRecord]) -> Rows:
    """One row for each build."""
    running = "running" if is_build_running(builds) else "killed"
    table = Rows("build", "image", "base", "state", "size", "checks", "took", first=2)
    for record in records:
        table.add(
            record.build_id,
            # Without the registry's name; a build that failed early has no reference.
            record.reference.rpartition("/")[2] or record.plan.image,
            record.plan.base_name,
            running if record.state == "running" else record.state,
            Memory(record.image.size).shown if record.image else "-",
            counts_text(record.verdict.checks) if record.verdict else "-",
            Duration(sum(record.durations_s.values())).shown,
        )
    return table


def record_parts(build: ContainerBuild, record: ContainerRecord) -> Iterator[RenderableType]:
    """All that the record of a build says."""
    yield plan_table(record.plan)
    if record.image:
        yield f"\n{record.reference}  {record.image.id}\n"
        yield layer_table(record.image)
    if record.verdict:
        yield render(record.verdict)
    for step, seconds in record.durations_s.items():
        yield f"{step:40} {Duration(seconds).shown:>12}"
    yield f"\nstate {record.state}{': ' + record.error if record.error else ''}\nfolder {build.folder}"


def check_lines(check: ContainerCheck) -> Iterator[str]:
    """Whether an image runs on a node, and why."""
    names = ", ".join(gpu(key).name for key in check.node.gpus)
    yield f"image  {check.image}, CUDA {check.cuda}"
    yield f"node   {check.node.name}, GPUs: {names or 'not known (--gpu or --instance-types names them)'}"
    yield f"runs   {check.support.way}: {check.support.message}"
    if check.support.limits:
        yield f"       {check.support.limits}"
    yield f"       ({check.support.source})"
    for finding in check.findings:
        yield f"wrong  {finding.message} ({finding.source})"
