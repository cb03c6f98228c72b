"""Orphans of this machine's builds: resources that killed commands left, found, reported and removed.

A build holds a lock as long as its process lives. So a build whose lock is free has ended, whatever its
record says, and its resources are orphans before their deadline. Records are read after the lock is taken.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpukiln.clouds.base import Cloud
from gpukiln.errors import BusyError, GpukilnError, UsageError
from gpukiln.files import PARTIAL, remove_partial
from gpukiln.images.builds import Build, Builds, Record
from gpukiln.images.modules import MODULES
from gpukiln.instances.access import key_files, keys_folder
from gpukiln.instances.deadline import deadline_text
from gpukiln.instances.orphans import (
    Orphan,
    builds_with_orphans,
    find_orphans,
    remove_orphans,
    remove_unrecorded,
    sweep,
    unrecorded_images,
)
from gpukiln.instances.tags import owner
from gpukiln.records import build_started

UNFINISHED = ("running", "baked")  # states of a record whose build is running, or was killed
SCRATCH = "gpukiln-"  # the build's id follows
RECORD_GRACE = timedelta(minutes=1)  # the folder of a build exists before its lock and its record


@contextmanager
def scratch_folder(build: Build) -> Iterator[None]:
    """A folder for the temporary files of a build and of every tool that it runs.

    Packer, Ansible and the suite leave their files behind when they are killed.

    Args:
        build: The build, locked.

    Yields:
        Nothing.
    """
    # The path is short: Packer's plugins have their sockets there, and the path of a socket has at most 107
    # characters (unix(7)).
    folder = _scratch_path(build.id)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    before, settings = tempfile.tempdir, {"TMPDIR": str(folder), "ANSIBLE_LOCAL_TEMP": str(folder)}
    old = {name: os.environ.get(name) for name in settings}
    tempfile.tempdir = str(folder)
    os.environ.update(settings)
    try:
        yield
    finally:
        tempfile.tempdir = before
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _scratch_path(build_id: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{SCRATCH}{build_id}"


def has_ended(builds: Builds, build_id: str) -> bool:
    """Whether a build of this machine exists and no process holds its lock."""
    build = Build(builds.folder / build_id)
    if not build_id or not build.folder.is_dir():
        return False
    try:
        with build.locked():
            return True
    except BusyError:
        return False


def killed_builds(builds: Builds) -> list[Build]:
    """The builds that ended without their record saying so; no call to a cloud is made."""
    return [
        build
        for build in builds.all()
        if build.read().state in UNFINISHED
        and has_ended(builds, build.id)
        # read again: the build may have ended properly between the first read and the lock
        and build.read().state in UNFINISHED
    ]


def report_killed(builds: Builds, say: Callable[[str], None]) -> None:
    """Report which builds were killed, and the command that removes their orphans."""
    for build in killed_builds(builds):
        plan = build.read().plan
        say(
            f"build {build.id} was killed: "
            f"`invoke cloud.sweep --cloud {plan.cloud} --region {plan.region} --yes` removes its resources"
        )


def clean_up_killed_builds(
    cloud: Cloud, builds: Builds, say: Callable[[str], None], *, ask: bool = True
) -> list[str]:
    """Remove what commands of this machine left behind that were killed or could not clean up.

    A failure is reported and stops nothing: the next command tries again.

    Args:
        cloud: The cloud and region; orphans in another region wait for the next command there.
        say: Shows what is removed.
        ask: Whether the cloud is searched for orphans that no file here names. A command whose role may not
            list resources goes by the records and keys alone.

    Returns:
        The ids and paths that were removed.
    """
    unfinished = {build.id for build in builds.all() if build.read().state in UNFINISHED}
    local = {file.name.rpartition(".")[0] for file in keys_folder().glob("*")}
    local |= {file.name.removeprefix(SCRATCH) for file in _scratch_path("").parent.glob(f"{SCRATCH}*-*-*")}
    removed: list[str] = []
    there = builds_with_orphans(cloud) if ask else set()
    for build_id in sorted(unfinished | local | there):
        build = Build(builds.folder / build_id)
        if not build.folder.is_dir():
            continue  # a build of another machine, or of another state folder
        try:
            with build.locked():
                removed += _remove_of_build(build, cloud, say)
        except BusyError:
            continue
        except GpukilnError as error:
            say(f"build {build.id} has ended, and its resources could not all be removed: {error.message}")
    _remove_empty(builds)
    return removed


def _remove_empty(builds: Builds) -> None:
    """Remove the folders of builds that were killed before they had a record."""
    for folder in builds.folder.glob("*"):
        began = build_started(folder.name)
        if not began or datetime.now(UTC) - began < RECORD_GRACE:
            continue
        # A folder with other files stays: its record may have been lost, and the log may explain why.
        inside = list(folder.iterdir())
        if all(file.name == "lock" or file.match(PARTIAL) for file in inside):
            for file in inside:
                file.unlink()
            folder.rmdir()


def _remove_of_build(build: Build, cloud: Cloud, say: Callable[[str], None]) -> list[str]:
    """Remove the orphans of a locked build, and record the build as aborted when all are removed."""
    removed = [str(file) for file in key_files(build.id)]
    for file in key_files(build.id):
        file.unlink()
    for folder in (_scratch_path(build.id), build.folder / MODULES):
        shutil.rmtree(folder, ignore_errors=True)
    remove_partial(build.folder)
    record = _read_record(build)
    if record and (record.plan.cloud, record.plan.region) != (cloud.name, cloud.region):
        return removed
    killed = record is not None and record.state in UNFINISHED
    removed = [*sweep(cloud, build.id), *removed]
    if record and killed and record.bake is None:
        # after its machine, which could otherwise still become an image
        removed += remove_unrecorded(cloud, build.id)
    if record and killed:
        build.write(replace(record, state="aborted", error="its process was killed"))
    if removed or killed:
        had = "had been killed" if killed else "could not clean up"
        say(f"build {build.id} {had}; removed {', '.join(removed) or 'nothing: it had no resources'}")
    return removed


def _read_record(build: Build) -> Record | None:
    """The record of a build; None where it can't be read, which `builds.all` has warned of."""
    try:
        return build.read()
    except UsageError:
        return None


def find_local_orphans(cloud: Cloud, builds: Builds) -> list[Orphan]:
    """Find resources past their deadline, whoever made them, and those of ended builds of this machine.

    Args:
        cloud: The cloud and region.

    Returns:
        The orphans, in the order in which they can be removed.
    """

    def ended(build_id: str) -> bool:
        return has_ended(builds, build_id)

    orphans = find_orphans(cloud, ended=ended)
    for build in killed_builds(builds):
        plan = (record := build.read()).plan
        if record.bake is None and (plan.cloud, plan.region) == (cloud.name, cloud.region):
            for image in unrecorded_images(cloud, build.id):
                orphans.append(
                    # a machine image has no deadline: only the missing record makes it an orphan
                    _local_orphan(
                        build.id, "image", image["ImageId"], "no record knows it, its build was killed"
                    )
                )
    for file in sorted(keys_folder().glob("*")):
        build_id = file.name.rpartition(".")[0]
        if ended(build_id):
            orphans.append(_local_orphan(build_id, "private key", str(file), "its build has ended"))
    return orphans


def remove_local_orphans(
    cloud: Cloud, builds: Builds, orphans: list[Orphan], say: Callable[[str], None]
) -> list[Orphan]:
    """Remove orphans, those of killed builds of this machine with everything of these builds.

    Returns:
        What was removed.
    """
    removed_ids = clean_up_killed_builds(cloud, builds, say)
    rest = [orphan for orphan in orphans if orphan.id not in removed_ids]
    removed = [orphan for orphan in orphans if orphan.id in removed_ids]
    return removed + remove_orphans(cloud, rest, say)


def _local_orphan(build_id: str, kind: str, id: str, reason: str) -> Orphan:
    return Orphan(kind, id, build_id, owner(), deadline_text(datetime.now(UTC)), reason)
