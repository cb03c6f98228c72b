"""A machine has control groups of its own where the kernel has them by controller, and leaves none."""

import os
import subprocess
from pathlib import Path

import pytest

from gpukiln.clouds.embedded import cgroups

NAME = "i-0123456789abcdef0"


def test_the_groups_of_this_process_are_found_by_controller(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "mounts").write_text(
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    )
    (tmp_path / "self/cgroup").write_text("5:name=systemd:/a\n4:cpu,cpuacct:/user.slice\n3:pids:/\n0::/b\n")
    assert cgroups.hierarchies(tmp_path) == {  # pids is mounted nowhere
        "name=systemd": Path("/sys/fs/cgroup/systemd/a"),
        "cpu,cpuacct": Path("/sys/fs/cgroup/cpu,cpuacct/user.slice"),
        "": Path("/sys/fs/cgroup/unified/b"),
    }


def test_one_hierarchy_alone_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "mounts").write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    (tmp_path / "self/cgroup").write_text("0::/\n")
    assert cgroups.hierarchies(tmp_path) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are made by root")
@pytest.mark.skipif(not cgroups.hierarchies(), reason="this kernel has one hierarchy for all controllers")
def test_a_program_starts_in_its_groups_and_none_is_left() -> None:
    begin = cgroups.make(NAME, owner=4711)
    assert cgroups.make(NAME, owner=4711) == begin  # again, after one that was killed
    for parent in cgroups.hierarchies().values():
        group = parent / f"gpukiln-{NAME}"
        assert {path.stat().st_uid for path in (group, group / "cgroup.procs")} == {4711}
        limits = [
            path for path in group.iterdir() if path.name.endswith((".limit_in_bytes", ".allow", ".max"))
        ]
        assert not [path for path in limits if path.stat().st_uid]  # what bounds it is not its own
    said = subprocess.run(
        [*begin, "cat", "/proc/self/cgroup"], capture_output=True, text=True, check=True
    ).stdout
    groups = dict(line.split(":", 2)[1:] for line in said.splitlines())
    for names in cgroups.hierarchies():
        assert groups[names].endswith(f"/gpukiln-{NAME}")
    inner = next(iter(cgroups.hierarchies().values())) / f"gpukiln-{NAME}" / "docker/abc"
    inner.mkdir(parents=True)
    cgroups.remove(NAME)
    assert not [one for one in cgroups.hierarchies().values() if (one / f"gpukiln-{NAME}").exists()]
    cgroups.remove(NAME)
