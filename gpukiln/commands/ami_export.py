"""Machine images: their disks as files for machines without EC2, and disks of others as images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import MadeImageOptions, PlaceOptions, print_document, results, say, words
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.exports.run import ExportPlan


@dataclass(frozen=True)
class AmiExport(MadeImageOptions):
    """Write the disk of a proven image to a file, with digest and papers beside it; nothing is launched."""

    image: str = option(
        "build id, `last`, or AMI id (with --region and --cloud when another machine built it)",
        first=True,
        required=True,
    )
    output: str = option("the file to write", first=True, required=True)
    to: str = option(
        "qcow2, raw, raw.zst, vmdk, vhd, netboot or installer; default: what the file's ending says"
    )
    datasource: str = option(
        "what cloud-init asks on a machine without EC2's metadata: nocloud or none; default: as it is"
    )
    ssh_key: str = option("file with public keys that may log in, where no metadata brings any")
    size: str = option("let the disk grow to this size, for example 64GiB; default: as it is")
    url: str = option("http address of the netboot folder, or of the raw.zst that an installer fetches")
    unproven: bool = option("export an image that was not proven", False)
    force: bool = option("replace the file where it is there", False)
    dry_run: bool = option("say what would be written", False)

    def run(self) -> int:
        from pathlib import Path

        from gpukiln.errors import UsageError
        from gpukiln.exports import run
        from gpukiln.images.builds import Builds
        from gpukiln.progress import Progress
        from gpukiln.release.find import find
        from gpukiln.state import state_home
        from gpukiln.units import Memory

        found = find(self.image, Builds(state_home()), **self.pick("cloud", "region", "profile"))
        if not found.image_id:
            raise UsageError(f"build {self.image} has no image", hint="`invoke ami.list` shows others")
        options = run.ExportOptions(
            output=Path(self.output),
            **self.pick("to", "unproven", "force", "datasource", "url"),
            ssh_keys=tuple(Path(self.ssh_key).read_text().splitlines()) if self.ssh_key else (),
            size_gib=Memory.parse(self.size, "--size").gib if self.size else None,
        )
        if self.dry_run:
            planned = run.plan(options, found.cloud, found.image_id, found.build)
            if self.json:
                print_document("ami.export.plan/1", dump(planned))
            else:
                _show(planned)
            say("dry run: nothing was written")
            return 0
        done = run.export(options, found.cloud, found.image_id, found.build, Progress())
        if self.json:
            print_document("ami.export/1", dump(done))
        shown = results(json=self.json)
        size, disk = Memory(done.bytes).shown, Memory(done.virtual_bytes).shown
        shown.print_text(f"{done.output}: {done.to}, {size}, a disk of {disk}")
        shown.print_text(f"SHA-256 {done.sha256}")
        if boots := done.boots_on:
            shown.print_text(
                f"boots by {', '.join(boots.firmware) or 'nothing'} "
                f"from {', '.join(boots.disks) or 'nothing'}: kernel {boots.kernel or 'none'}, "
                f"network cards {', '.join(boots.networks) or 'none'}"
            )
        else:
            shown.print_text(f"what it boots on is not known: {done.boots_on_unknown}")
        for file in done.files:
            shown.print_text(f"beside it: {file.name}")
        for line in _missing(done.missing):
            shown.print_text(f"not there: {line}")
        if not done.verified:
            shown.print_text("it was not proven")
        return 0


def _show(planned: ExportPlan) -> None:
    from gpukiln.units import Memory

    shown = results()
    holds = "" if planned.data_bytes is None else f", {Memory(planned.data_bytes).shown} of it data"
    shown.print_text(f"{planned.image_id} -> {planned.output} ({planned.to})")
    shown.print_text(f"a disk of {Memory(planned.disk_bytes).shown}{holds}")
    shown.print_text("proven" if planned.verified else f"not proven: {planned.why_unverified}")
    for line in _missing(planned.missing):
        shown.print_text(f"will not be there: {line}")
    for device in planned.others:
        shown.print_text(f"not exported: the image's disk {device}, which is not its root")


def _missing(missing: dict[str, str]) -> list[str]:
    """One line a reason."""
    reasons: dict[str, list[str]] = {}
    for what, why in missing.items():
        reasons.setdefault(why, []).append(what)
    return [f"{', '.join(names)}: {why}" for why, names in reasons.items()]


@dataclass(frozen=True)
class AmiImport(PlaceOptions):
    """Make an AMI of a disk; nobody says that it was proven before ami.verify does."""

    file: str = option("a raw or qcow2 disk", first=True, required=True)
    image: str = option("a folder of ami/, whose profile judges it; default: eks-gpu, or as FILE.json says")
    base: str = option("what it is built on, see ami.bases: it says who logs in; default: as FILE.json says")
    driver: str = option("the version of its NVIDIA driver; default: as FILE.json says")
    modules: str = option("the kind of its kernel modules, open or proprietary; default: as FILE.json says")
    instance_types: str = option(
        "GPU machines it is for, separated by commas; default: as FILE.json says, or those of the image"
    )
    trust: bool = option(
        "let the embedded cloud start it, and images that are made of it, as containers with this "
        "computer's kernel; without, they are virtual machines",
        False,
    )
    dry_run: bool = option("look at the disk and say what would be made", False)

    def run(self) -> int:
        from pathlib import Path

        from gpukiln.errors import UsageError
        from gpukiln.exports import import_disk
        from gpukiln.progress import Progress

        where, progress = self.where(), Progress()
        says = import_disk.ImportOptions(
            **self.pick("image", "base", "driver", "modules", "trust"),
            instance_types=tuple(words(self.instance_types)),
        )
        if self.trust and self.cloud != "embedded":
            raise UsageError(
                "--trust is for the embedded cloud: machines of EC2 share no kernel with this computer",
                hint="leave it out, or --cloud embedded",
            )
        disk = import_disk.read_disk_file(Path(self.file), says, progress)
        if self.dry_run:
            if self.json:
                print_document("ami.import.plan/1", dump(disk), size_gib=disk.size_gib, name=disk.name)
            else:
                results().print_text(
                    f"{self.file}: {disk.form}, {disk.size_gib} GiB -> {disk.name} in {where.region}"
                )
            say("dry run: nothing was written")
            return 0
        made = import_disk.import_image(disk, where, progress)
        if self.json:
            print_document("ami.import/1", dump(made))
        shown = results(json=self.json)
        shown.print_text(f"{made.image_id} {made.name}{' (was there)' if made.found else ''}")
        shown.print_text(f"{made.architecture}, {made.boot_mode}, {made.size_gib} GiB, {made.snapshot_id}")
        which = f"{made.image_id} --region {made.region} --cloud {made.cloud}"
        shown.print_text(f"not proven: `invoke ami.verify {which}` judges it")
        return 0
