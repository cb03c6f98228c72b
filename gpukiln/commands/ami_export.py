"""Machine images: their disks as files for machines without EC2, and disk files as images."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import ExistingImageOptions, PlaceOptions, say, words
from gpukiln.errors import UsageError
from gpukiln.options import option


@dataclass(frozen=True)
class AmiExport(ExistingImageOptions):
    """Write the disk of a verified image to a file, with digest and documents; nothing is launched."""

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
    unproven: bool = option("export an image that was not verified", False)
    force: bool = option("replace an existing file", False)
    dry_run: bool = option("say what would be written", False)

    def run(self) -> None:
        from pathlib import Path

        from gpukiln.exports import run, view
        from gpukiln.images.builds import Builds
        from gpukiln.progress import Progress
        from gpukiln.release.find import find
        from gpukiln.units import Memory

        # By its record here or by the AMI's tags: another machine may have built the image.
        image = find(self.image, Builds(), **self.pick("cloud", "region", "profile"))
        if not image.image_id:
            raise UsageError(f"build {self.image} has no image", hint="`invoke ami.list` shows others")
        options = run.ExportOptions(
            output=Path(self.output),
            **self.pick("to", "unproven", "force", "datasource", "url"),
            ssh_keys=tuple(Path(self.ssh_key).read_text().splitlines()) if self.ssh_key else (),
            size_gib=Memory.parse(self.size, "--size").gib if self.size else None,
        )
        if self.dry_run:
            plan = run.plan(options, image.cloud, image.image_id, image.build)
            self.report(plan, view.plan_lines(plan), schema="ami.export.plan/1")
            say("dry run: nothing was written")
            return
        export = run.export(options, image.cloud, image.image_id, image.build, Progress())
        self.report(export, schema="ami.export/1")
        # With --json these lines go to standard error, next to the document on standard output.
        self.show(*view.export_lines(export))


@dataclass(frozen=True)
class AmiImport(PlaceOptions):
    """Make an AMI of a disk file; the AMI counts as unverified until ami.verify passes."""

    file: str = option("a raw or qcow2 disk", first=True, required=True)
    image: str = option("a folder of ami/, whose profile verifies it; default: eks-gpu, or as FILE.json says")
    base: str = option("what it is built on, see ami.bases: it says who logs in; default: as FILE.json says")
    driver: str = option("the version of its NVIDIA driver; default: as FILE.json says")
    modules: str = option("the kind of its kernel modules, open or proprietary; default: as FILE.json says")
    instance_types: str = option(
        "GPU machines it is for, separated by commas; default: as FILE.json says, or those of the image"
    )
    trust: bool = option(
        "let the embedded cloud start it, and images that are made of it, as containers with this "
        "computer's kernel; without --trust they are virtual machines",
        False,
    )
    dry_run: bool = option("look at the disk and say what would be made", False)

    def run(self) -> None:
        from pathlib import Path

        from gpukiln.exports import import_disk, view
        from gpukiln.progress import Progress

        cloud, progress = self.connect(), Progress()
        claims = import_disk.ImportOptions(
            **self.pick("image", "base", "driver", "modules", "trust"),
            instance_types=tuple(words(self.instance_types)),
        )
        # Before the disk is read, whose checksum takes minutes.
        if self.trust and self.cloud != "embedded":
            raise UsageError(
                "--trust is for the embedded cloud: machines of EC2 share no kernel with this computer",
                hint="leave it out, or --cloud embedded",
            )
        disk = import_disk.read_disk_file(Path(self.file), claims, progress)
        if self.dry_run:
            line = view.import_plan_line(disk, cloud.region)
            self.report(disk, [line], schema="ami.import.plan/1", size_gib=disk.size_gib, name=disk.name)
            say("dry run: nothing was written")
            return
        image = import_disk.import_image(disk, cloud, progress)
        self.report(image, schema="ami.import/1")
        self.show(*view.import_lines(image))
