"""Container images for people: the plan, the layers."""

from rich.table import Table

from gpukiln.catalog.cuda import floor, released_with
from gpukiln.docker.engine import ImageInfo
from gpukiln.docker.plan import ContainerPlan

SMALL = 100_000  # bytes: a layer that is not listed by itself


def human_size(size: int) -> str:
    """A size for people.

    Args:
        size: Bytes.

    Returns:
        For example `2.31 GiB` or `12.0 MiB`.
    """
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def plan_table(plan: ContainerPlan) -> Table:
    """The plan, one component a row."""
    table = Table(
        title=f"{plan.image} for {plan.platform}, from {plan.base.title}\ndigest {plan.digest[:12]}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for title in ("component", "version", "", "from"):
        table.add_column(title, overflow="fold")
    for part in plan.components:
        out = part.status == "left_out"
        table.add_row(
            part.name,
            part.version or "as the base has it",
            "[yellow]left out[/]" if out else "install",
            part.reason if out else part.source,
        )
    table.add_row(
        "packages", str(len(plan.packages)), "install", f"{plan.base.distribution} {plan.base.release}"
    )
    first, native = floor(plan.cuda), released_with(plan.cuda)
    table.add_row("node's driver", f">= {first}", "needs", f"{native} or later runs all of CUDA {plan.cuda}")
    return table


def layer_table(image: ImageInfo) -> Table:
    """The layers of an image with their sizes."""
    table = Table(box=None, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True, min_width=len("1023.9 MiB"))
    table.add_column("layer", overflow="ellipsis", no_wrap=True)
    for number, layer in enumerate(image.layers):
        if layer.size >= SMALL:
            table.add_row(human_size(layer.size), layer.created_by if number else "the base")
    small = [layer.size for layer in image.layers if layer.size < SMALL]
    table.add_row(human_size(sum(small)), f"{len(small)} small layers")
    table.add_row(human_size(image.size), "in all")
    return table
