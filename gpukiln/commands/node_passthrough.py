"""GPUs of a Proxmox VE host for its VMs, and VMs of exported images."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gpukiln.commands.cli import JsonOptions, print_document, results
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.nodes.passthrough.api import Pve, PveTarget
    from gpukiln.nodes.passthrough.create import VmOptions
    from gpukiln.nodes.passthrough.evaluate import Evaluation, PassthroughRequest
    from gpukiln.nodes.passthrough.facts import PveFacts
    from gpukiln.nodes.passthrough.model import Passthrough, PassthroughVm


@dataclass(frozen=True)
class NodePassthrough(JsonOptions):
    """Give a GPU of a Proxmox VE host to a VM; or make the VM of an exported image. Exit 6: refused."""

    pve: str = option(
        "the Proxmox VE: HOST[:PORT] with a token, ssh://root@HOST, or local on the host itself"
    )
    vm: int = option("the VM's number; with --create the next that is free where it is left out", 0)
    gpu: str = option("the GPU: its PCI address, 0000:01:00, or mapping:NAME")
    apply: bool = option("set it; without, nothing is changed and what would be is shown", False)
    undo: str = option("take a change back: the file that it wrote")
    node: str = option("the cluster's node, with --create")
    slot: str = option("N of hostpciN; left out the first that is free")
    primary: bool = option("the GPU is the VM's first display (x-vga); not for computing", False)
    hide_rom: bool = option("the VM does not see the GPU's ROM (rombar=0); some cards need that", False)
    ssh: str = option(
        "ssh://root@HOST, where drivers and leases are looked at when --pve is asked with a token"
    )
    accept_unseen: bool = option("set it although something could not be looked at", False)
    token_file: str = option("file with USER@REALM!NAME=VALUE; left out it is $PROXMOX_VE_API_TOKEN")
    ca: str = option("file of the CA that vouches for the host: its /etc/pve/pve-root-ca.pem")
    fingerprint: str = option("SHA-256 of the host's certificate, as `pvenode cert info` prints it")
    create: bool = option("make a VM of an exported image: --image, --name, --storage", False)
    image: str = option("with --create: the disk that ami.export wrote, qcow2 or raw")
    name: str = option("with --create: of the VM")
    storage: str = option("with --create: where its disks are to be")
    import_storage: str = option(
        "with --create over HTTPS: where the image is uploaded to (content import)", "local"
    )
    memory: str = option("with --create: such as 16GiB", "8GiB")
    cores: int = option("with --create: CPU cores", 4)
    disk_size: str = option("with --create: grow the disk to so much, such as 100GiB")
    bridge: str = option("with --create: of the network", "vmbr0")
    user: str = option("with --create: whom cloud-init makes", "gpukiln")
    ssh_keys: str = option("with --create: file of the public keys that may log in")
    ip: str = option("with --create: dhcp, or ADDRESS/BITS,gw=ADDRESS", "dhcp")
    unproven: bool = option("with --create: also an image whose record says that it was not proven", False)
    dry_run: bool = option("change nothing, the default", False)

    def run(self) -> int:
        from gpukiln.errors import UsageError
        from gpukiln.nodes.passthrough.api import PveTarget
        from gpukiln.nodes.passthrough.evaluate import parse_request
        from gpukiln.units import is_whole

        apply = self.apply and not self.dry_run
        if self.undo:
            if self.pve or self.vm or self.gpu or self.create:
                raise UsageError("--undo names its host, VM and device itself", hint="leave the others out")
            return _undo(self.undo, self.token_file, apply=apply, as_json=self.json)
        if not self.pve:
            raise UsageError(
                "--pve is missing", hint="HOST[:PORT], ssh://root@HOST, or local on the host itself"
            )
        if self.slot and not is_whole(self.slot):
            raise UsageError(f"--slot {self.slot!r} is no whole number", hint="N of hostpciN")
        target = PveTarget(self.pve, self.fingerprint, self.ca, self.token_file)
        slot = int(self.slot) if self.slot else None
        wanted = parse_request(**self.pick("gpu", "primary", "hide_rom"), slot=slot) if self.gpu else None
        if self.ssh and not target.https:
            raise UsageError(f"--ssh is for a host that is asked with a token, and --pve is {self.pve}")
        if not self.create:
            if wanted is None or not self.vm:
                raise UsageError(
                    "--vm and --gpu say which GPU which VM gets", hint="--vm 120 --gpu 0000:01:00"
                )
            return _give(
                target,
                self.vm,
                wanted,
                self.ssh,
                apply=apply,
                accept_unseen=self.accept_unseen,
                as_json=self.json,
            )
        from gpukiln.nodes.passthrough.create import VmOptions

        order = VmOptions(**self.pick(*(one.name for one in fields(VmOptions))))
        return _create(
            target,
            self.vm,
            self.node,
            order,
            wanted,
            self.ssh,
            apply=apply,
            accept_unseen=self.accept_unseen,
            as_json=self.json,
        )


def _give(
    target: PveTarget,
    number: int,
    wanted: PassthroughRequest,
    ssh: str,
    *,
    apply: bool,
    accept_unseen: bool,
    as_json: bool,
) -> int:
    from dataclasses import replace

    from gpukiln.nodes.passthrough.api import connect
    from gpukiln.nodes.passthrough.apply import set_gpu
    from gpukiln.nodes.passthrough.evaluate import describe_vm, evaluate
    from gpukiln.nodes.passthrough.facts import find_vm, gather_facts
    from gpukiln.nodes.passthrough.model import exit_code
    from gpukiln.nodes.passthrough.view import outcome_line, render
    from gpukiln.progress import Progress
    from gpukiln.state import state_home

    progress = Progress()
    pve: Pve = connect(target)
    with progress.step(f"look at VM {number} and {wanted.text}"):
        node, vm = find_vm(pve, number)
        facts = gather_facts(pve, node, mapping=wanted.mapping, vm=number, ssh=ssh)
        result = evaluate(facts, wanted, vm)
    code = exit_code(result.checks, all_seen=apply and not accept_unseen)
    found = _document(target, facts, wanted, result, code, vm=describe_vm(vm))
    shown = results(json=as_json)
    shown.print(render(found))
    if apply and found.done == "looked" and found.change:
        with progress.step(f"set {found.change.key} of VM {number}"):
            file = set_gpu(pve, node, vm, found.change, state_home() / "passthrough")
        found = replace(found, done="set", undo=str(file))
    shown.print_text(outcome_line(found))
    if as_json:
        print_document(found.schema, dump(found))
    return found.exit_code


def _document(
    target: PveTarget,
    facts: PveFacts,
    wanted: PassthroughRequest,
    result: Evaluation,
    code: int,
    *,
    vm: PassthroughVm | None,
) -> Passthrough:
    from gpukiln.nodes.passthrough.model import Passthrough

    return Passthrough(
        pve=target.pve,
        version=facts.version,
        node=facts.node,
        gpu=wanted.text,
        vm=vm,
        functions=result.functions,
        checks=result.checks,
        change=result.change,
        done="refused" if code else "as-is" if result.as_is else "looked",
        undo=None,
        exit_code=code,
    )


def _undo(name: str, token_file: str, *, apply: bool, as_json: bool) -> int:
    from pathlib import Path

    from gpukiln.nodes.passthrough.api import PveTarget, connect
    from gpukiln.nodes.passthrough.apply import check_undo, read_undo, undo_change
    from gpukiln.nodes.passthrough.model import UndoResult
    from gpukiln.nodes.passthrough.view import render_undone

    undo = read_undo(Path(name).expanduser())
    pve = connect(PveTarget(undo.pve, undo.fingerprint, undo.ca, token_file))
    vm = check_undo(pve, undo)
    found = UndoResult(name, undo, "as-is" if vm is None else "undone" if apply else "looked", 0)
    shown = results(json=as_json)
    shown.print(render_undone(found))
    if apply and vm is not None:
        undo_change(pve, undo, vm)
    shown.print_text(
        {
            "as-is": "nothing was changed: it stands there as it was already",
            "looked": "nothing was changed: --apply takes it back",
            "undone": "taken back, and read back",
        }[found.done]
    )
    if as_json:
        print_document(found.schema, dump(found))
    return 0


def _create(
    target: PveTarget,
    number: int,
    node: str,
    order: VmOptions,
    wanted: PassthroughRequest | None,
    ssh: str,
    *,
    apply: bool,
    accept_unseen: bool,
    as_json: bool,
) -> int:
    from dataclasses import replace

    from gpukiln.nodes.passthrough.api import connect
    from gpukiln.nodes.passthrough.create import (
        check_checksum,
        create_vm,
        plan_vm,
        read_image,
        require_uploadable,
    )
    from gpukiln.nodes.passthrough.evaluate import evaluate
    from gpukiln.nodes.passthrough.facts import find_node, gather_facts
    from gpukiln.nodes.passthrough.model import VmCreation, exit_code
    from gpukiln.nodes.passthrough.view import refusal, render_created
    from gpukiln.progress import Progress
    from gpukiln.units import Memory

    require_uploadable(target)
    progress, image = Progress(), read_image(order.image)
    pve = connect(target)
    with progress.step(f"look at {target.pve}"):
        node = find_node(pve, node)
        gpu, value = None, ""
        if wanted is not None:
            facts = gather_facts(pve, node, mapping=wanted.mapping, vm=None, ssh=ssh)
            result = evaluate(facts, wanted, None, memory=Memory.parse(order.memory, "--memory").mib)
            value = result.value
            gpu = _document(target, facts, wanted, result, exit_code(result.checks), vm=None)
        made = plan_vm(pve, order, image, node, number, value)
        version = str(pve.get("version")["version"])
    with progress.step("verify the image"):
        size = max(1, image.path.stat().st_size)
        checks = (check_checksum(image, lambda done: progress.say(f"{100 * done // size} %")), *made.checks)
    every = (*checks, *(gpu.checks if gpu else ()))
    code = exit_code(every, all_seen=apply and not accept_unseen)
    found = VmCreation(
        pve=target.pve,
        version=version,
        node=node,
        vm=made.vm,
        image=str(image.path),
        sha256=image.sha256,
        config=made.public_config,
        gpu=gpu,
        checks=checks,
        done="refused" if code else "looked",
        exit_code=code,
    )
    shown = results(json=as_json)
    shown.print(render_created(found))
    if apply and not code:
        with progress.step(f"make VM {made.vm}"):
            create_vm(pve, order, made, progress.say)
        found = replace(found, done="made")
    shown.print_text(
        {
            "refused": f"nothing was made: {refusal(every)}",
            "looked": "nothing was made: --apply makes it",
            "made": f"made, and read back: `qm start {made.vm}`, `qm terminal {made.vm}`",
        }[found.done]
    )
    if as_json:
        print_document(found.schema, dump(found))
    return code
