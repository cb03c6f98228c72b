"""What people see of a passthrough: the devices, the checks, the change."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.nodes.passthrough.model import EXIT, Check, Created, Function, Passthrough, Undone
from gpukiln.reports.tables import Rows

STYLES = {
    "ok": "green",
    "warning": "yellow",
    "not seen": "yellow",
    "busy": "red",
    "refused": "red",
    "never": "red",
}

UNSEEN = "nobody could look at {}; --accept-unseen takes it for good"


def render(found: Passthrough) -> RenderableType:
    """A GPU and a VM."""
    vm = f"VM {found.vm.id} {found.vm.name}".rstrip() if found.vm else "a new VM"
    parts: list[RenderableType] = [
        Text(f"{found.gpu} of {found.node} (Proxmox VE {found.version}) for {vm}"),
        _functions(found.functions),
        _checks(found.checks),
    ]
    if found.change:
        parts.append(Text(f"{found.change.key}  now: {found.change.before or '-'}"))
        parts.append(Text(f"{' ' * len(found.change.key)} then: {found.change.after}"))
    return Group(*parts)


def said(found: Passthrough) -> str:
    """What was done, in a line."""
    unseen = [one.name for one in found.checks if one.verdict == "not seen"]
    if found.done == "refused":
        worst = [one.name for one in found.checks if one.verdict in EXIT]
        if worst:
            return f"nothing was changed: {', '.join(worst)}"
        return f"nothing was changed: {UNSEEN.format(', '.join(unseen))}"
    if found.done == "as-is":
        return "nothing was changed: it stands there already"
    if found.done == "looked":
        return f"nothing was changed: --apply{' --accept-unseen' if unseen else ''} sets it"
    return f"set, and read back; `invoke node.passthrough --undo {found.undo} --apply` takes it back"


def render_undone(found: Undone) -> RenderableType:
    """An undo file."""
    undo = found.undo
    return Group(
        Text(f"VM {undo.vm} of {undo.node} ({undo.pve}), written {undo.at}"),
        Text(f"{undo.key}  now: {undo.before or '-' if found.done == 'as-is' else undo.after}"),
        Text(f"{' ' * len(undo.key)} then: {undo.before or '-'}"),
    )


def render_created(found: Created) -> RenderableType:
    """A VM that would be made, or was."""
    rows = Rows("SETTING", "VALUE", first=2, folds=True)
    for name, value in found.config.items():
        rows.add(name, value)
    parts: list[RenderableType] = [
        Text(f"VM {found.vm} on {found.node} (Proxmox VE {found.version}) of {found.image}"),
        rows,
        _checks(found.checks),
    ]
    if found.gpu:
        parts += [_functions(found.gpu.functions), _checks(found.gpu.checks)]
    return Group(*parts)


def _functions(functions: tuple[Function, ...]) -> Rows:
    rows = Rows("ADDRESS", "IS", "ID", "NAME", "DRIVER", "GROUP", first=2)
    for one in functions:
        group = "-" if one.iommu_group is None else str(one.iommu_group)
        rows.add(one.address, one.kind, one.id, one.name, one.driver or "-", group)
    return rows


def _checks(checks: tuple[Check, ...]) -> Rows:
    rows = Rows("CHECK", "RESULT", "FOUND", first=2, folds=True)
    for one in checks:
        rows.add(one.name, Text(one.verdict, STYLES[one.verdict]), one.found)
        if one.step:
            rows.add("", "", f"next: {one.step}")
    return rows
