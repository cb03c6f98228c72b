"""Machine images: their disks as files for machines without EC2, and disks of others as images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.ami import COMMON
from gpukiln.commands.cli import command, print_document, results, say, words
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.exports.run import ExportPlan


@command(
    help={
        **{name: COMMON[name] for name in ("profile", "json")},
        "image": "build id, `last`, or AMI id (with --region and --cloud when another machine built it)",
        "output": "the file to write",
        "to": "qcow2, raw, raw.zst, vmdk, vhd, netboot or installer; default: what the file's ending says",
        "url": "http address of the netboot folder, or of the raw.zst that an installer fetches",
        "datasource": "what cloud-init asks on a machine without EC2's metadata: nocloud or none; default: "
        "as it is",
        "ssh_key": "file with public keys that may log in, where no metadata brings any",
        "size": "let the disk grow to this size, for example 64GiB; default: as it is",
        "unproven": "export an image that was not proven",
        "force": "replace the file where it is there",
        "region": "where the image is, when this machine has no record of it",
        "cloud": "where the image is; default: as its record says",
        "dry_run": "say what would be written",
    }
)
def export(
    _: Any,
    image: str,
    output: str,
    to: str = "",
    datasource: str = "",
    ssh_key: str = "",
    size: str = "",
    url: str = "",
    unproven: bool = False,
    force: bool = False,
    region: str = "",
    cloud: str = "",
    profile: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Write the disk of a proven image to a file, with digest and papers beside it; nothing is launched."""
    from pathlib import Path

    from gpukiln.errors import UsageError
    from gpukiln.exports import run
    from gpukiln.images.builds import Builds
    from gpukiln.progress import Progress
    from gpukiln.release.find import find
    from gpukiln.state import state_home
    from gpukiln.units import Memory

    found = find(image, Builds(state_home()), cloud=cloud, region=region, profile=profile)
    if not found.image_id:
        raise UsageError(f"build {image} has no image", hint="`invoke ami.list` shows others")
    options = run.ExportOptions(
        output=Path(output),
        to=to,
        unproven=unproven,
        force=force,
        datasource=datasource,
        ssh_keys=tuple(Path(ssh_key).read_text().splitlines()) if ssh_key else (),
        size_gib=Memory.parse(size, "--size").gib if size else None,
        url=url,
    )
    if dry_run:
        planned = run.plan(options, found.cloud, found.image_id, found.build)
        if json:
            print_document("ami.export.plan/1", dump(planned))
        else:
            _show(planned)
        say("dry run: nothing was written")
        return 0
    done = run.export(options, found.cloud, found.image_id, found.build, Progress())
    if json:
        print_document("ami.export/1", dump(done))
    shown = results(json=json)
    shown.tell(
        f"{done.output}: {done.to}, {Memory(done.bytes).shown}, a disk of {Memory(done.virtual_bytes).shown}"
    )
    shown.tell(f"SHA-256 {done.sha256}")
    if boots := done.boots_on:
        shown.tell(
            f"boots by {', '.join(boots.firmware) or 'nothing'} from {', '.join(boots.disks) or 'nothing'}:"
            f" kernel {boots.kernel or 'none'}, network cards {', '.join(boots.networks) or 'none'}"
        )
    else:
        shown.tell(f"what it boots on is not known: {done.boots_on_unknown}")
    for file in done.files:
        shown.tell(f"beside it: {file.name}")
    for line in _missing(done.missing):
        shown.tell(f"not there: {line}")
    if not done.proven:
        shown.tell("it was not proven")
    return 0


def _show(planned: ExportPlan) -> None:
    from gpukiln.units import Memory

    shown = results()
    holds = "" if planned.data_bytes is None else f", {Memory(planned.data_bytes).shown} of it data"
    shown.tell(f"{planned.image_id} -> {planned.output} ({planned.to})")
    shown.tell(f"a disk of {Memory(planned.disk_bytes).shown}{holds}")
    shown.tell("proven" if planned.proven else f"not proven: {planned.why_unproven}")
    for line in _missing(planned.missing):
        shown.tell(f"will not be there: {line}")
    for device in planned.others:
        shown.tell(f"not exported: the image's disk {device}, which is not its root")


def _missing(missing: dict[str, str]) -> list[str]:
    """One line a reason."""
    reasons: dict[str, list[str]] = {}
    for what, why in missing.items():
        reasons.setdefault(why, []).append(what)
    return [f"{', '.join(names)}: {why}" for why, names in reasons.items()]


@command(
    name="import",
    help={
        **{name: COMMON[name] for name in ("region", "cloud", "profile", "json")},
        "file": "a raw or qcow2 disk",
        "image": "a folder of ami/, whose profile judges it; default: eks-gpu, or as FILE.json says",
        "base": "what it is built on, see ami.bases: it says who logs in; default: as FILE.json says",
        "driver": "the version of its NVIDIA driver; default: as FILE.json says",
        "modules": "the kind of its kernel modules, open or proprietary; default: as FILE.json says",
        "instance_types": "GPU machines it is for, separated by commas; default: as FILE.json says, or "
        "those of the image",
        "trust": "let the embedded cloud start it, and images that are made of it, as containers with this "
        "computer's kernel; without, they are virtual machines",
        "dry_run": "look at the disk and say what would be made",
    },
)
def import_(
    _: Any,
    file: str,
    region: str = "",
    cloud: str = "embedded",
    profile: str = "",
    image: str = "",
    base: str = "",
    driver: str = "",
    modules: str = "",
    instance_types: str = "",
    trust: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Make an AMI of a disk; nobody says that it was proven before ami.verify does."""
    from pathlib import Path

    from gpukiln.clouds.select import make_cloud
    from gpukiln.errors import UsageError
    from gpukiln.exports import import_disk
    from gpukiln.progress import Progress

    where, progress = make_cloud(cloud, region, profile=profile or None), Progress()
    says = import_disk.Says(image, base, driver, modules, tuple(words(instance_types)), trust=trust)
    if trust and cloud != "embedded":
        raise UsageError(
            "--trust is for the embedded cloud: machines of EC2 share no kernel with this computer",
            hint="leave it out, or --cloud embedded",
        )
    disk = import_disk.look(Path(file), says, progress)
    if dry_run:
        if json:
            print_document("ami.import.plan/1", dump(disk), size_gib=disk.size_gib, name=disk.name)
        else:
            results().tell(f"{file}: {disk.form}, {disk.size_gib} GiB -> {disk.name} in {where.region}")
        say("dry run: nothing was written")
        return 0
    made = import_disk.import_image(disk, where, progress)
    if json:
        print_document("ami.import/1", dump(made))
    shown = results(json=json)
    shown.tell(f"{made.image_id} {made.name}{' (was there)' if made.found else ''}")
    shown.tell(f"{made.architecture}, {made.boot_mode}, {made.size_gib} GiB, {made.snapshot_id}")
    which = f"{made.image_id} --region {made.region} --cloud {made.cloud}"
    shown.tell(f"not proven: `invoke ami.verify {which}` judges it")
    return 0
