"""What `node.passthrough` does: give a GPU to a VM, take a change back, create the VM of an image.

Each function shows what was examined before it changes something, and returns the document of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpukiln.nodes.passthrough import create
from gpukiln.nodes.passthrough.api import PveTarget, connect
from gpukiln.nodes.passthrough.apply import check_undo, read_undo, set_gpu, undo_change
from gpukiln.nodes.passthrough.evaluate import Evaluation, PassthroughRequest, describe_vm, evaluate
from gpukiln.nodes.passthrough.facts import PveFacts, find_node, find_vm, gather_facts
from gpukiln.nodes.passthrough.model import Passthrough, PassthroughVm, UndoResult, VmCreation, exit_code
from gpukiln.nodes.passthrough.view import outcome_line, refusal, render, render_created, render_undone
from gpukiln.progress import Progress
from gpukiln.state import state_home
from gpukiln.units import Memory

Show = Callable[..., None]


@dataclass(frozen=True)
class PassthroughRun:
    """How a command is carried out.

    Args:
        apply: Whether it changes something.
        accept_unseen: Whether it does so though a check could not be made.
        ssh: Where drivers and leases are read when the API is asked with a token; empty: nowhere.
        show: Gets what people read.
    """

    apply: bool
    accept_unseen: bool
    ssh: str
    show: Show

    def exit_code(self, result: Evaluation) -> int:
        return exit_code(result.checks, all_seen=self.apply and not self.accept_unseen)


def give_gpu(way: PveTarget, number: int, request: PassthroughRequest, run: PassthroughRun) -> Passthrough:
    """Examine a GPU and a VM, and give the GPU to the VM."""
    progress, pve = Progress(), connect(way)
    with progress.step(f"look at VM {number} and {request.text}"):
        # VM numbers are unique in a cluster, so that the node need not be named.
        node, vm = find_vm(pve, number)
        facts = gather_facts(pve, node, mapping=request.mapping, vm=number, ssh=run.ssh)
        result = evaluate(facts, request, vm)
    document = _document(way, facts, request, result, run.exit_code(result), vm=describe_vm(vm))
    # Before the change: what was examined is on the screen also where setting it fails.
    run.show(render(document))
    # Without a change the VM has the GPU already, and there is nothing to take back.
    if run.apply and document.done == "looked" and document.change:
        with progress.step(f"set {document.change.key} of VM {number}"):
            file = set_gpu(pve, node, vm, document.change, state_home() / "passthrough")
        document = replace(document, done="set", undo=str(file))
    run.show(outcome_line(document))
    return document


def _document(
    way: PveTarget,
    facts: PveFacts,
    request: PassthroughRequest,
    result: Evaluation,
    code: int,
    *,
    vm: PassthroughVm | None,
) -> Passthrough:
    return Passthrough(
        pve=way.pve,
        version=facts.version,
        node=facts.node,
        gpu=request.text,
        vm=vm,
        functions=result.functions,
        checks=result.checks,
        change=result.change,
        done="refused" if code else "as-is" if result.as_is else "looked",
        undo=None,
        exit_code=code,
    )


UNDONE_LINES = {
    "as-is": "nothing was changed: the VM has the earlier value already",
    "looked": "nothing was changed: --apply takes it back",
    "undone": "taken back, and read back",
}


def undo(name: str, token_file: str, *, apply: bool, show: Show) -> UndoResult:
    """Take back the change that an undo file describes."""
    change = read_undo(Path(name).expanduser())
    pve = connect(PveTarget(change.pve, change.fingerprint, change.ca, token_file))
    # The VM may have changed since: only the value that this tool wrote is taken back.
    vm = check_undo(pve, change)
    document = UndoResult(name, change, "as-is" if vm is None else "undone" if apply else "looked", 0)
    show(render_undone(document))
    if apply and vm is not None:
        undo_change(pve, change, vm)
    show(UNDONE_LINES[document.done])
    return document


def create_vm(
    way: PveTarget,
    number: int,
    node: str,
    order: create.VmOptions,
    request: PassthroughRequest | None,
    run: PassthroughRun,
) -> VmCreation:
    """Verify an exported image, and create its VM.

    Args:
        number: Of the VM; 0: the next free one.
        node: Of the cluster; empty: its only one.
        request: The GPU that the VM gets; None: none.
    """
    # Before the host is asked and the image is read, because it depends on --pve alone.
    create.require_uploadable(way)
    progress, image = Progress(), create.read_image(order.image)
    pve = connect(way)
    with progress.step(f"look at {way.pve}"):
        node = find_node(pve, node)
        gpu, value = None, ""
        if request is not None:
            facts = gather_facts(pve, node, mapping=request.mapping, vm=None, ssh=run.ssh)
            memory_mib = Memory.parse(order.memory, "--memory").mib
            result = evaluate(facts, request, None, memory=memory_mib)
            value = result.value
            gpu = _document(way, facts, request, result, exit_code(result.checks), vm=None)
        plan = create.plan_vm(pve, order, image, node, number, value)
        version = str(pve.get("version")["version"])
    # After the host was asked, which takes a moment and can refuse the rest.
    with progress.step("verify the image"):
        # An empty file is no disk; the percentage must not divide by its size.
        size = max(1, image.path.stat().st_size)
        check = create.check_checksum(image, lambda done: progress.say(f"{100 * done // size} %"))
    checks = (check, *plan.checks)
    every = (*checks, *(gpu.checks if gpu else ()))
    code = exit_code(every, all_seen=run.apply and not run.accept_unseen)
    document = VmCreation(
        pve=way.pve,
        version=version,
        node=node,
        vm=plan.vm,
        image=str(image.path),
        sha256=image.sha256,
        config=plan.public_config,
        gpu=gpu,
        checks=checks,
        done="refused" if code else "looked",
        exit_code=code,
    )
    run.show(render_created(document))
    if run.apply and not code:
        with progress.step(f"create VM {plan.vm}"):
            create.create_vm(pve, order, plan, progress.say)
        document = replace(document, done="made")
    lines = {
        "refused": f"nothing was created: {refusal(every)}",
        "looked": "nothing was created: --apply creates it",
        "made": f"created, and read back: `qm start {plan.vm}`, `qm terminal {plan.vm}`",
    }
    run.show(lines[document.done])
    return document
