"""What people see of a passthrough: the devices, the checks, the change."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.nodes.passthrough.model import Created, Function, Passthrough, PassthroughCheck, Undone
from gpukiln.reports.tables import Rows

STYLES = {"passed": "green", "warning": "yellow", "not run": "yellow", "error": "red"}


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
    if found.done == "refused":
        return f"nothing was changed: {refusal(found.checks)}"
    if found.done == "as-is":
        return "nothing was changed: it stands there already"
    if found.done == "looked":
        unseen = any(one.outcome == "not_run" for one in found.checks)
        return f"nothing was changed: --apply{' --accept-unseen' if unseen else ''} sets it"
    return f"set, and read back; `invoke node.passthrough --undo {found.undo} --apply` takes it back"


def refusal(checks: Iterable[PassthroughCheck]) -> str:
    """What forbids it: the checks that failed, else those that could not be made."""
    found = list(checks)
    if failed := [one.id for one in found if one.exit_code]:
        return ", ".join(failed)
    unseen = [one.id for one in found if one.outcome == "not_run"]
    return f"nobody could look at {', '.join(unseen)}; --accept-unseen accepts that"


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


def _checks(checks: tuple[PassthroughCheck, ...]) -> Rows:
    rows = Rows("CHECK", "RESULT", "FOUND", first=2, folds=True)
    for one in checks:
        word = one.severity if one.outcome == "failed" else one.outcome.replace("_", " ")
        rows.add(one.id, Text(word, STYLES[word]), one.message)
        if one.remedy:
            rows.add("", "", f"next: {one.remedy}")
    return rows
