"""Makes an AMI of a disk file; the AMI counts as not verified until `ami.verify` has verified it.

Both clouds take the disk by the EBS direct APIs. The same content is the same image: a second import finds
it, and an interrupted import resumes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from gpukiln.catalog.bases import base as find_base
from gpukiln.catalog.images import load_image
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.ec2 import images
from gpukiln.clouds.tags import (
    BASE_TAG,
    BUILD_ID_TAG,
    CUDA_TAG,
    DRIVER_TAG,
    IMAGE_TAG,
    IMPORT_TAG,
    KUBERNETES_TAG,
    MODULES_TAG,
    NOT_VERIFIED,
    OWNER_TAG,
    RECIPE_TAG,
    TRUST_TAG,
    TRUSTED,
    TYPES_TAG,
)
from gpukiln.disks import identify, sparse
from gpukiln.disks.convert import convert
from gpukiln.disks.qcow2 import virtual_bytes
from gpukiln.errors import BusyError, IncompatibleError, RefusedError, UnavailableError, UsageError
from gpukiln.exports import ebs
from gpukiln.exports.sidecars import ABOUT, sidecar_path
from gpukiln.files import atomic_path, remove, remove_partial_of
from gpukiln.images.fit import refuse
from gpukiln.images.subject import machine_findings, subject_from_tags
from gpukiln.instances.tags import owner, snapshots_of, tag_specifications, tags_of
from gpukiln.locks import locked
from gpukiln.parsing import parse_json
from gpukiln.programs import require_space
from gpukiln.progress import Meter, Progress
from gpukiln.state import state_home

SCHEMA = 1
ROOT_DEVICE = "/dev/xvda"  # as Debian's and Amazon's AMIs have it
IMPORTED_TAGS = (KUBERNETES_TAG, RECIPE_TAG, TYPES_TAG, DRIVER_TAG, MODULES_TAG, CUDA_TAG, BASE_TAG)
"""Tags that are taken from an exported disk's FILE.json: no verdicts, for anybody could write them there."""


@dataclass(frozen=True)
class ImportOptions:
    """The description of a disk, by which `ami.verify` verifies it. Empty fields: as FILE.json has them.

    Args:
        image: A folder of ami/, whose profile it is verified by.
        base: One of ami/bases.yaml, which has the name of the login user.
        driver: The NVIDIA driver's version.
        modules: open or proprietary.
        instance_types: EC2's names of the machines that it is for.
        trust: Whether the embedded cloud may start it as a container, on this computer's kernel.
    """

    image: str = ""
    base: str = ""
    driver: str = ""
    modules: str = ""
    instance_types: tuple[str, ...] = ()
    cuda: str = ""
    trust: bool = False


@dataclass(frozen=True)
class DiskFile:
    """A file that may become an image.

    Args:
        form: raw or qcow2.
        sha256: The digest of the file.
        bytes: The size of the disk that is in the file.
        tags: The tags of the image.
    """

    file: Path
    form: str
    sha256: str
    bytes: int
    tags: dict[str, str]

    @property
    def size_gib(self) -> int:
        return -(-self.bytes >> 30)

    @property
    def trusted(self) -> bool:
        """Whether the embedded cloud may start it as a container."""
        return self.tags.get(TRUST_TAG) == TRUSTED

    @property
    def name(self) -> str:
        """The image's name, which is unique in a region."""
        # AMI names are 3 to 128 characters of a limited set (EC2 API reference, RegisterImage)
        stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in self.file.stem)
        return f"gpukiln-import-{stem[:80]}-{self.sha256[:12]}"


@dataclass(frozen=True)
class ImportResult:
    """An image that was made of a disk.

    Args:
        found: Whether it existed already.
        blocks_written: Blocks that this run wrote.
        blocks_kept: Blocks that an earlier, interrupted run wrote.
    """

    schema: int = field(default=SCHEMA, kw_only=True)
    image_id: str
    snapshot_id: str
    name: str
    region: str
    cloud: str
    architecture: str
    boot_mode: str
    size_gib: int
    sha256: str
    found: bool
    blocks_written: int
    blocks_kept: int
    durations_s: dict[str, float]


def read_disk_file(file: Path, says: ImportOptions, progress: Progress) -> DiskFile:
    """Check a file that is to become an image.

    Raises:
        UsageError: It is no file, or its description is incomplete.
        IncompatibleError: It is no disk, or does not fit the instance types of its description.
    """
    if not file.is_file():
        raise UsageError(f"{file} is no file", hint="wanted: a raw or a qcow2 disk")
    form = identify.detect_format(file)
    # A qcow2 has the disk's size in its header, a raw file is the disk.
    size = identify.inspect_disk(file).bytes if form == "raw" else virtual_bytes(file)
    tags = _tags(file, says)
    before = file.stat()
    with progress.step("checksum"):
        digest = sparse.sha256(file, Meter(progress, before.st_size).add)
    if (after := file.stat()).st_mtime_ns != before.st_mtime_ns or after.st_size != before.st_size:
        raise UnavailableError(
            f"{file} changed while it was read", hint="import it when no process writes to it"
        )
    tags = {
        **tags,
        IMPORT_TAG: digest,
        # By the content: a second import is the same image.
        BUILD_ID_TAG: f"import-{digest[:12]}",
        IMAGE_TAG: NOT_VERIFIED,
        **({TRUST_TAG: TRUSTED} if says.trust else {}),
        "Name": file.name[:128],
    }
    disk = DiskFile(file, form, digest, size, tags)
    subject = subject_from_tags(file.name, tags)
    refuse(machine_findings(subject, subject.instance_types))
    return disk


def _tags(file: Path, says: ImportOptions) -> dict[str, str]:
    known = _tags_of_sidecar(file)
    given = {
        RECIPE_TAG: says.image,
        TYPES_TAG: " ".join(says.instance_types),
        DRIVER_TAG: says.driver,
        MODULES_TAG: says.modules,
        BASE_TAG: says.base,
        CUDA_TAG: says.cuda,
    }
    tags = {**known, **{name: value for name, value in given.items() if value}}
    # eks-gpu is the profile of gpukiln's own image; --image names another one.
    recipe = load_image(tags.setdefault(RECIPE_TAG, "eks-gpu"))
    tags.setdefault(TYPES_TAG, " ".join(recipe.instance_types))
    options = {BASE_TAG: "--base", DRIVER_TAG: "--driver", MODULES_TAG: "--modules"}
    if missing := [option for name, option in options.items() if not tags.get(name)]:
        raise UsageError(
            f"the description of {file.name} is incomplete, and there is no {sidecar_path(file, ABOUT).name} "
            f"next to it that has the rest: {', '.join(missing)}",
            hint="`ami.verify` needs the base, for the login user (see ami.bases), and the driver",
        )
    if (modules := tags[MODULES_TAG]) not in ("open", "proprietary"):
        raise UsageError(f"--modules {modules}: there is no such kind", hint="open or proprietary")
    find_base(tags[BASE_TAG].partition(" ")[0])
    return tags


def _tags_of_sidecar(file: Path) -> dict[str, str]:
    """The tags in FILE.json, which `ami.export` wrote."""
    about = sidecar_path(file, ABOUT)
    if not about.exists():
        return {}
    try:
        document: Any = parse_json(about.read_text())
        tags: Mapping[str, str] = dict(document["tags"])
        return {name: str(tags[name]) for name in IMPORTED_TAGS if tags.get(name)}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{about} can't be read: {error}", hint="export the disk again, or remove this file"
        ) from error


def import_image(disk: DiskFile, cloud: Cloud, progress: Progress) -> ImportResult:
    """Make an image of a disk, or find the one that was made of it before.

    Raises:
        IncompatibleError: The disk in the file does not boot.
        UnavailableError: The cloud refuses it, or there is no space to unpack it; an incomplete snapshot
            stays only where the same command can resume it.
    """
    home = state_home() / "imports"
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)  # a disk may hold secrets
    work = home / f"{disk.sha256[:16]}{'-trusted' if disk.trusted else ''}-{cloud.name}-{cloud.region}"
    raw, journal = work.with_suffix(".raw"), work.with_suffix(".journal")
    busy = BusyError(f"another process imports {disk.file}", hint="wait for it")
    with locked(work.with_suffix(".lock"), busy=busy):
        for file in (raw, journal):
            remove_partial_of(file)
        if imported := _find_image(cloud, disk):
            remove(raw)  # orphans of a run that was killed after it had registered the image
            remove(journal)
            return imported
        if disk.form == "qcow2" and not raw.exists():
            with progress.step("unpack the disk"), atomic_path(raw) as partial:
                require_space(home, disk.file.stat().st_size)
                convert(disk.file, partial, "qcow2", "raw", progress)
        source = raw if disk.form == "qcow2" else disk.file
        try:
            looked = identify.inspect_disk(source)
        except IncompatibleError:
            remove(raw)
            raise
        _require_architecture(disk, looked)
        with progress.step("write the snapshot"):
            snapshot_id, moved = _write_snapshot(cloud, disk, source, journal, progress)
        with progress.step("register the image"):
            imported = _register(cloud, disk, looked, snapshot_id)
        remove(raw)
        remove(journal)
    return replace(
        imported,
        found=False,
        blocks_written=moved.moved,
        blocks_kept=moved.kept,
        durations_s=dict(progress.durations),
    )


def _require_architecture(disk: DiskFile, looked: identify.Disk) -> None:
    recipe = load_image(disk.tags[RECIPE_TAG])
    if recipe.architecture != looked.architecture:
        raise IncompatibleError(
            f"{disk.file} is a disk for {looked.architecture}, and {recipe.name} is of {recipe.architecture}",
            hint="name another folder of ami/ with --image",
        )


def _write_snapshot(
    cloud: Cloud, disk: DiskFile, source: Path, journal: Path, progress: Progress
) -> tuple[str, ebs.BlockCounts]:
    meters: list[Meter] = []
    # Only images have IMAGE_TAG: the IAM policy of an import allows a snapshot the tags of an import alone.
    tags = {name: value for name, value in disk.tags.items() if name != IMAGE_TAG}
    try:
        return ebs.write_snapshot(
            (cloud.client("ebs", attempts=1), cloud.client("ec2")),
            source,
            journal,
            size_gib=disk.size_gib,
            tags={**tags, OWNER_TAG: owner()},
            description=f"gpukiln import of {disk.file.name}"[:255],
            token=f"gpukiln-import-{disk.sha256}{'-trusted' if disk.trusted else ''}",
            begin=lambda count: meters.append(Meter(progress, count)),
            moved=lambda count: meters[0].add(count),  # noqa: PLW0108 - `begin` appends it later
        )
    except KeyboardInterrupt:
        progress.show(Text(ebs.RESUME_NOTE))
        raise


def _find_image(cloud: Cloud, disk: DiskFile) -> ImportResult | None:
    """The image that was made of this disk before."""
    with explain_aws_errors("look for an image of this disk"):
        # By name, which has the digest; EC2 finds it without reading every image.
        there = images(cloud.client("ec2"), {"name": [disk.name]}, Owners=["self"])
    if not there:
        return None
    if tags_of(there[0]).get(IMPORT_TAG) != disk.sha256:
        raise UnavailableError(
            f"{there[0]['ImageId']} has the name {disk.name}, and was not made of {disk.file}",
            hint="rename the file, or deregister that image first",
        )
    if (tags_of(there[0]).get(TRUST_TAG) == TRUSTED) is not disk.trusted:
        image_id, before = there[0]["ImageId"], "without" if disk.trusted else "with"
        raise RefusedError(
            f"{image_id} was imported from {disk.file} {before} --trust, which can't be changed later",
            hint=f"use it as it is, {before} --trust; or remove it and import the disk again: "
            f"aws ec2 deregister-image --image-id {image_id}; "
            + "; ".join(f"aws ec2 delete-snapshot --snapshot-id {name}" for name in snapshots_of(there[0])),
        )
    return _import_result(cloud, disk, there[0])


def _register(cloud: Cloud, disk: DiskFile, looked: identify.Disk, snapshot_id: str) -> ImportResult:
    """Register the image; delete the snapshot where that is refused."""
    ec2 = cloud.client("ec2")
    tags = {**disk.tags, OWNER_TAG: owner()}
    try:
        with explain_aws_errors(f"register an image of {snapshot_id}"):
            ec2.register_image(
                Name=disk.name,
                Description=f"gpukiln import of {disk.file.name}"[:255],
                Architecture=looked.architecture,
                BootMode=looked.boot_mode,
                RootDeviceName=ROOT_DEVICE,
                BlockDeviceMappings=[
                    {
                        "DeviceName": ROOT_DEVICE,
                        "Ebs": {"SnapshotId": snapshot_id, "VolumeType": "gp3", "DeleteOnTermination": True},
                    }
                ],
                VirtualizationType="hvm",
                EnaSupport=True,  # every instance type with a GPU needs it
                ImdsSupport="v2.0",
                TagSpecifications=tag_specifications(tags, "image"),
            )
    except UnavailableError as error:
        imported = _find_image(cloud, disk)  # the answer may have been lost after EC2 registered it
        if imported is not None:
            return imported
        ebs.drop_snapshot(ec2, snapshot_id, error)
        raise
    imported = _find_image(cloud, disk)
    if imported is None:
        raise UnavailableError(
            f"the image {disk.name} was registered and can't be found", hint="run the same command again"
        )
    return imported


def _import_result(cloud: Cloud, disk: DiskFile, image: Mapping[str, Any]) -> ImportResult:
    root = image["BlockDeviceMappings"][0]["Ebs"]
    return ImportResult(
        image_id=image["ImageId"],
        snapshot_id=root["SnapshotId"],
        name=disk.name,
        region=cloud.region,
        cloud=cloud.name,
        architecture=image["Architecture"],
        boot_mode=image.get("BootMode", ""),
        size_gib=disk.size_gib,
        sha256=disk.sha256,
        found=True,
        blocks_written=0,
        blocks_kept=0,
        durations_s={},
    )
