"""What people see of a passthrough: the devices, the checks, the change."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from gpukiln.nodes.passthrough.model import Function, Passthrough, PassthroughCheck, UndoResult, VmCreation
from gpukiln.reports.tables import Rows

# A check that was not run is as yellow as a warning: it needs a decision (--accept-unseen).
STYLES = {"passed": "green", "warning": "yellow", "not run": "yellow", "error": "red"}


def render(report: Passthrough) -> RenderableType:
    """A GPU and a VM."""
    vm = f"VM {report.vm.id} {report.vm.name}".rstrip() if report.vm else "a new VM"
    parts: list[RenderableType] = [
        Text(f"{report.gpu} of {report.node} (Proxmox VE {report.version}) for {vm}"),
        _functions(report.functions),
        _checks(report.checks),
    ]
    # Two lines of equal width, so that the eye sees what differs.
    if report.change:
        parts.append(Text(f"{report.change.key}  now: {report.change.before or '-'}"))
        parts.append(Text(f"{' ' * len(report.change.key)} then: {report.change.after}"))
    return Group(*parts)


def outcome_line(report: Passthrough) -> str:
    """What was done, in a line."""
    if report.done == "refused":
        return f"nothing was changed: {refusal(report.checks)}"
    if report.done == "as-is":
        return "nothing was changed: it stands there already"
    if report.done == "looked":
        unseen = any(check.outcome == "not_run" for check in report.checks)
        return f"nothing was changed: --apply{' --accept-unseen' if unseen else ''} sets it"
    return f"set, and read back; `invoke node.passthrough --undo {report.undo} --apply` takes it back"


def refusal(checks: Iterable[PassthroughCheck]) -> str:
    """What forbids it: the checks that failed, else those that could not be made."""
    all_checks = list(checks)
    # Failures first: accepting what is unseen would not help while one of them stands.
    if failed := [check.id for check in all_checks if check.exit_code]:
        return ", ".join(failed)
    unseen = [check.id for check in all_checks if check.outcome == "not_run"]
    return f"{', '.join(unseen)} could not be checked; --accept-unseen accepts that"


def render_undone(result: UndoResult) -> RenderableType:
    """An undo file."""
    undo = result.undo
    return Group(
        Text(f"VM {undo.vm} of {undo.node} ({undo.pve}), written {undo.at}"),
        Text(f"{undo.key}  now: {undo.before or '-' if result.done == 'as-is' else undo.after}"),
        Text(f"{' ' * len(undo.key)} then: {undo.before or '-'}"),
    )


def render_created(creation: VmCreation) -> RenderableType:
    """A VM that would be made, or was."""
    rows = Rows("SETTING", "VALUE", first=2, folds=True)
    for name, value in creation.config.items():
        rows.add(name, value)
    parts: list[RenderableType] = [
        Text(f"VM {creation.vm} on {creation.node} (Proxmox VE {creation.version}) of {creation.image}"),
        rows,
        _checks(creation.checks),
    ]
    if creation.gpu:
        parts += [_functions(creation.gpu.functions), _checks(creation.gpu.checks)]
    return Group(*parts)


def _functions(functions: tuple[Function, ...]) -> Rows:
    rows = Rows("ADDRESS", "IS", "ID", "NAME", "DRIVER", "GROUP", first=2)
    for function in functions:
        group = "-" if function.iommu_group is None else str(function.iommu_group)
        rows.add(function.address, function.kind, function.id, function.name, function.driver or "-", group)
    return rows


def _checks(checks: tuple[PassthroughCheck, ...]) -> Rows:
    rows = Rows("CHECK", "RESULT", "FOUND", first=2, folds=True)
    for check in checks:
        # passed, not run, or how grave the failure is.
        word = check.severity if check.outcome == "failed" else check.outcome.replace("_", " ")
        rows.add(check.id, Text(word, STYLES[word]), check.message)
        if check.remedy:
            rows.add("", "", f"next: {check.remedy}")
    return rows
