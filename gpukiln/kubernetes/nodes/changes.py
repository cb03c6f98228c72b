"""What a rendering changes for a running pool: each difference, and what it does to the nodes that run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

from gpukiln.kubernetes.nodes.group import NodeGroup
from gpukiln.typed import strict

Effect = Literal["new-group", "every-node", "after-refresh", "some-nodes", "no-node"]
EFFECTS = {
    "new-group": "a new group replaces the old one",
    "every-node": "every node is replaced",
    "after-refresh": "running nodes stay until an instance refresh",
    "some-nodes": "nodes that do not fit it are removed or replaced",
    "no-node": "running nodes stay",
}
LONGEST = 60  # characters of a value in a line; --json has all of it


@strict
class PoolChange:
    """A field that the rendering changes.

    Args:
        object: Kind and name of the manifest, or the Terraform address of the block.
        field: Path in the manifest, or argument of the block; empty: all of it is new or gone.
        before: The value as JSON, or as text in HCL; empty: not there before.
        after: The same; empty: not there any more.
        effect: What becomes of the nodes that run.
    """

    object: str
    field: str
    before: str
    after: str
    effect: Effect


@strict
class PoolUpdate:
    """What a rendering changes for the running pool.

    Args:
        compared_with: The folder with the earlier rendering, or the context of the cluster.
        changes: Empty: the pool is what was rendered.
        nodes: Nodes that run; null: no cluster was asked.
        replaced: How many of them are certainly replaced; null: no cluster was asked.
        consequences: What happens to the nodes, and what to do for it, as sentences.
    """

    compared_with: str
    changes: tuple[PoolChange, ...]
    nodes: int | None
    replaced: int | None
    consequences: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The update for people."""
        number = len(self.changes)
        differences = {0: "nothing differs", 1: "1 field differs"}.get(number, f"{number} fields differ")
        yield f"compared with {self.compared_with}: {differences}"
        for change in self.changes:
            where = " ".join(filter(None, (change.object, change.field)))
            yield f"  {where}: {_shown(change)} ({EFFECTS[change.effect]})"
        yield from self.consequences


def worst(changes: tuple[PoolChange, ...]) -> Effect:
    """The effect that replaces most nodes."""
    effects = {change.effect for change in changes}
    return next((effect for effect in get_args(Effect) if effect in effects), "no-node")


def nothing(group: NodeGroup) -> str:
    """The sentence that no running node changes."""
    if group.follows_channel:
        return f"nothing changes for running nodes as long as {group.image} points at the same image"
    return "nothing changes for running nodes"


def as_text(value: Any) -> str:
    """A value of a manifest as JSON; empty: there is none."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _shown(change: PoolChange) -> str:
    if not change.before or not change.after:
        whole = change.before or change.after
        # Of a whole object the kind is the value, which its name has already.
        text = f" {whole}" if change.field and len(whole) <= LONGEST else ""
        return f"{'new' if change.after else 'removed'}{text}"
    if max(len(change.before), len(change.after)) > LONGEST:
        return "changed"
    return f"{change.before} -> {change.after}"
