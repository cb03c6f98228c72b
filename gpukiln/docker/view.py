"""Container images for people: the plan, the layers."""

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.catalog.cuda import needs
from gpukiln.docker.engine import ImageInfo
from gpukiln.docker.plan import ContainerPlan
from gpukiln.reports.tables import Rows
from gpukiln.units import Memory

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
        if layer.size >= SMALL:
            # The first layer is the base, whose instruction is a long ADD of its publisher.
            rows.add(Memory(layer.size).shown, " ".join(layer.created_by.split()) if number else "the base")
    small = [layer.size for layer in image.layers if layer.size < SMALL]
    rows.add(Memory(sum(small)).shown, f"{len(small)} small layers")
    rows.add(Memory(image.size).shown, "in all")
    return rows
