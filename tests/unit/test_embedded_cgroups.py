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
    found = cgroups.hierarchies(tmp_path)
    assert found == {"cpu,cpuacct": Path("/sys/fs/cgroup/cpu,cpuacct/user.slice")}  # pids is mounted nowhere


def test_one_hierarchy_alone_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "mounts").write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    (tmp_path / "self/cgroup").write_text("0::/\n")
    assert cgroups.hierarchies(tmp_path) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups are made by root")
@pytest.mark.skipif(not cgroups.hierarchies(), reason="this kernel has one hierarchy for all controllers")
def test_a_program_starts_in_its_groups_and_none_is_left() -> None:
    begin = cgroups.make(NAME)
    assert cgroups.make(NAME) == begin  # again, after one that was killed
    said = subprocess.run(
        [*begin, "cat", "/proc/self/cgroup"], capture_output=True, text=True, check=True
    ).stdout
    for names in cgroups.hierarchies():
        assert f":{names}:" in said
        [line] = [one for one in said.splitlines() if f":{names}:" in one]
        assert line.endswith(f"/gpukiln-{NAME}")
    inner = next(iter(cgroups.hierarchies().values())) / f"gpukiln-{NAME}" / "docker/abc"
    inner.mkdir(parents=True)
    cgroups.remove(NAME)
    assert not [one for one in cgroups.hierarchies().values() if (one / f"gpukiln-{NAME}").exists()]
    cgroups.remove(NAME)
