"""GPUs of a Proxmox VE host for its VMs, and VMs of exported images."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gpukiln.cli.command import JsonOptions
from gpukiln.errors import UsageError
from gpukiln.options import option


@dataclass(frozen=True)
class NodePassthrough(JsonOptions):
    """Give a GPU of a Proxmox VE host to a VM; or create the VM of an exported image. Exit 6: refused."""

    pve: str = option(
        "the Proxmox VE: HOST[:PORT] with a token, ssh://root@HOST, or local on the host itself"
    )
    # 0 is none: Proxmox VE's numbers begin at 100.
    vm: int = option("the VM's number; with --create default: the next free one", 0)
    gpu: str = option("the GPU: its PCI address, 0000:01:00, or mapping:NAME")
    apply: bool = option("set it; without --apply the change is only shown", False)
    undo: str = option("take a change back: the file that it wrote")
    node: str = option("with --create: the cluster's node")
    # A text, because 0 is a slot and no slot is the default.
    slot: str = option("N of hostpciN; default: the first that is free")
    primary: bool = option("the GPU is the VM's first display (x-vga); not for computing", False)
    hide_rom: bool = option("the VM does not see the GPU's ROM (rombar=0); some cards need that", False)
    ssh: str = option("ssh://root@HOST: reads drivers and leases there when --pve is asked with a token")
    accept_unseen: bool = option("set it although a check could not be made", False)
    token_file: str = option("file with USER@REALM!NAME=VALUE; default: $PROXMOX_VE_API_TOKEN")
    ca: str = option("file of the CA that signed the host's certificate: its /etc/pve/pve-root-ca.pem")
    fingerprint: str = option("SHA-256 of the host's certificate, as `pvenode cert info` prints it")
    create: bool = option("create the VM of an exported image: --image, --name, --storage", False)
    image: str = option("with --create: the disk that ami.export wrote, qcow2 or raw")
    name: str = option("with --create: name of the VM")
    storage: str = option("with --create: storage of its disks")
    import_storage: str = option(
        "with --create over HTTPS: where the image is uploaded to (content import)", "local"
    )
    memory: str = option("with --create: such as 16GiB", "8GiB")
    cores: int = option("with --create: CPU cores", 4)
    disk_size: str = option("with --create: grow the disk to this size, such as 100GiB")
    bridge: str = option("with --create: bridge of the network", "vmbr0")
    user: str = option("with --create: the user that cloud-init creates", "gpukiln")
    ssh_keys: str = option("with --create: file of the public keys that may log in")
    ip: str = option("with --create: dhcp, or ADDRESS/BITS,gw=ADDRESS", "dhcp")
    unproven: bool = option("with --create: also an image whose record says that it was not verified", False)
    dry_run: bool = option("change nothing, the default", False)

    def run(self) -> int:
        from gpukiln.nodes.passthrough.api import PveTarget
        from gpukiln.nodes.passthrough.create import VmOptions
        from gpukiln.nodes.passthrough.evaluate import parse_request
        from gpukiln.nodes.passthrough.run import PassthroughRun, create_vm, give_gpu, undo

        self._check_together()
        # Of two options that contradict each other the safer one counts.
        apply = self.apply and not self.dry_run
        # The file has host, VM and device, so that nothing else is parsed.
        if self.undo:
            undone = undo(self.undo, self.token_file, apply=apply, show=self.show)
            self.report(undone)
            return undone.exit_code
        way = PveTarget(self.pve, self.fingerprint, self.ca, self.token_file)
        slot = int(self.slot) if self.slot else None
        request = parse_request(**self.pick("gpu", "primary", "hide_rom"), slot=slot) if self.gpu else None
        # Over SSH or on the host itself, drivers and leases are read where --pve points.
        if self.ssh and not way.https:
            raise UsageError(f"--ssh is for a host that is asked with a token, and --pve is {self.pve}")
        run = PassthroughRun(apply, self.accept_unseen, self.ssh, self.show)
        if self.create:
            order = VmOptions(**self.pick(*(field.name for field in fields(VmOptions))))
            created = create_vm(way, self.vm, self.node, order, request, run)
            self.report(created)
            return created.exit_code
        if request is None or not self.vm:
            raise UsageError("--vm and --gpu say which GPU which VM gets", hint="--vm 120 --gpu 0000:01:00")
        given = give_gpu(way, self.vm, request, run)
        self.report(given)
        return given.exit_code

    def _check_together(self) -> None:
        from gpukiln.units import is_whole

        if self.undo:
            if self.pve or self.vm or self.gpu or self.create:
                raise UsageError("--undo names its host, VM and device itself", hint="leave the others out")
        elif not self.pve:
            raise UsageError(
                "--pve is missing", hint="HOST[:PORT], ssh://root@HOST, or local on the host itself"
            )
        elif self.slot and not is_whole(self.slot):
            raise UsageError(f"--slot {self.slot!r} is no whole number", hint="N of hostpciN")
