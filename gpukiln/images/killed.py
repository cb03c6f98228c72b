"""What commands of this machine left that were killed, or that could not clean up: found, told and removed.

A build holds a lock as long as its process lives. So a build that nobody holds has ended, whatever its record
says, and what it started needs no deadline to be a leftover. Everything here is read after the lock is taken.
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
from gpukiln.instances.leftovers import (
    Leftover,
    builds_with_leftovers,
    find_leftovers,
    remove_leftovers,
    remove_unrecorded,
    sweep,
    unrecorded_images,
)
from gpukiln.instances.tags import owner
from gpukiln.records import build_started

UNFINISHED = ("running", "baked")  # states of a record whose build goes on, or was killed
SCRATCH = "gpukiln-"  # and the build's id
NEW = timedelta(minutes=1)  # the folder of a build is there before its lock and its record


@contextmanager
def scratch(build: Build) -> Iterator[None]:
    """A folder for the temporary files of a build and of every tool that it runs.

    Packer, Ansible and the suite leave theirs when they are killed. Its path is short: Packer's plugins have
    their sockets there, and a socket's path has 107 characters at most (unix(7)).

    Args:
        build: The build, locked.

    Yields:
        Nothing.
    """
    folder = _scratch(build.id)
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


def _scratch(build_id: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{SCRATCH}{build_id}"


def has_ended(builds: Builds, build_id: str) -> bool:
    """Whether a build is one of this machine that nobody works on."""
    build = Build(builds.folder / build_id)
    if not build_id or not build.folder.is_dir():
        return False
    try:
        with build.locked():
            return True
    except BusyError:
        return False


def killed_builds(builds: Builds) -> list[Build]:
    """The builds that nobody works on, and whose record does not say so; no cloud is asked."""
    return [
        build
        for build in builds.all()
        if build.read().state in UNFINISHED
        and has_ended(builds, build.id)
        # it may have ended between the two
        and build.read().state in UNFINISHED
    ]


def tell_killed(builds: Builds, say: Callable[[str], None]) -> None:
    """Say which builds were killed, and what removes what they left."""
    for build in killed_builds(builds):
        plan = build.read().plan
        say(
            f"build {build.id} was killed: "
            f"`invoke cloud.sweep --cloud {plan.cloud} --region {plan.region} --yes` removes what it left"
        )


def clean_up_after_killed(
    cloud: Cloud, builds: Builds, say: Callable[[str], None], *, ask: bool = True
) -> list[str]:
    """Remove what commands of this machine left that were killed, or could not clean up.

    What can't be removed is told, and stops nothing: the next command tries again.

    Args:
        cloud: The cloud and region to look at; what is elsewhere waits for the next command there.
        say: Told what is removed.
        ask: Whether the cloud is asked for what no file here tells of: a command whose role may not ask goes
            by the records and keys alone.

    Returns:
        What was removed.
    """
    unfinished = {build.id for build in builds.all() if build.read().state in UNFINISHED}
    local = {file.name.rpartition(".")[0] for file in keys_folder().glob("*")}
    local |= {file.name.removeprefix(SCRATCH) for file in _scratch("").parent.glob(f"{SCRATCH}*-*-*")}
    removed: list[str] = []
    there = builds_with_leftovers(cloud) if ask else set()
    for build_id in sorted(unfinished | local | there):
        build = Build(builds.folder / build_id)
        if not build.folder.is_dir():
            continue  # another machine's, or another home's
        try:
            with build.locked():
                removed += _clean(build, cloud, say)
        except BusyError:
            continue
        except GpukilnError as error:
            say(f"build {build.id} has ended, and not all that it left could be removed: {error.message}")
    _remove_empty(builds)
    return removed


def _remove_empty(builds: Builds) -> None:
    """Remove the folders of builds that were killed before they had a record; one that holds more stays."""
    for folder in builds.folder.glob("*"):
        began = build_started(folder.name)
        if not began or datetime.now(UTC) - began < NEW:
            continue
        inside = list(folder.iterdir())
        if all(file.name == "lock" or file.match(PARTIAL) for file in inside):
            for file in inside:
                file.unlink()
            folder.rmdir()


def _clean(build: Build, cloud: Cloud, say: Callable[[str], None]) -> list[str]:
    """Remove what a locked build left; its record says so when all of it is gone."""
    removed = [str(file) for file in key_files(build.id)]
    for file in key_files(build.id):
        file.unlink()
    for folder in (_scratch(build.id), build.folder / MODULES):
        shutil.rmtree(folder, ignore_errors=True)
    remove_partial(build.folder)
    record = _read(build)
    if record and (record.plan.cloud, record.plan.region) != (cloud.name, cloud.region):
        return removed
    killed = record is not None and record.state in UNFINISHED
    removed = [*sweep(cloud, build.id), *removed]
    if record and killed and record.bake is None:
        removed += remove_unrecorded(cloud, build.id)  # after its machine: that can make none any more
    if record and killed:
        build.write(replace(record, state="aborted", error="its process was killed"))
    if removed or killed:
        had = "had been killed" if killed else "could not clean up"
        say(f"build {build.id} {had}; removed {', '.join(removed) or 'nothing, nothing was left'}")
    return removed


def _read(build: Build) -> Record | None:
    """Its record; None where it can't be read, which a warning of `builds.all` says."""
    try:
        return build.read()
    except UsageError:
        return None


def find_leftovers_here(cloud: Cloud, builds: Builds) -> list[Leftover]:
    """What nobody needs any more: past its deadline, whoever made it, and of ended builds of this machine.

    Args:
        cloud: The cloud and region.

    Returns:
        The leftovers, in the order in which they can be removed.
    """

    def ended(build_id: str) -> bool:
        return has_ended(builds, build_id)

    found = find_leftovers(cloud, ended=ended)
    for build in killed_builds(builds):
        plan = (record := build.read()).plan
        if record.bake is None and (plan.cloud, plan.region) == (cloud.name, cloud.region):
            for image in unrecorded_images(cloud, build.id):
                found.append(
                    _of(build.id, "image", image["ImageId"], "no record knows it, its build was killed")
                )
    for file in sorted(keys_folder().glob("*")):
        build_id = file.name.rpartition(".")[0]
        if ended(build_id):
            found.append(_of(build_id, "private key", str(file), "its build has ended"))
    return found


def remove_leftovers_here(
    cloud: Cloud, builds: Builds, leftovers: list[Leftover], say: Callable[[str], None]
) -> list[Leftover]:
    """Remove leftovers, those of killed builds of this machine with all that these left.

    Returns:
        What was removed.
    """
    removed_ids = clean_up_after_killed(cloud, builds, say)
    rest = [leftover for leftover in leftovers if leftover.id not in removed_ids]
    removed = [leftover for leftover in leftovers if leftover.id in removed_ids]
    return removed + remove_leftovers(cloud, rest, say)


def _of(build_id: str, kind: str, id: str, reason: str) -> Leftover:
    return Leftover(kind, id, build_id, owner(), deadline_text(datetime.now(UTC)), reason)
