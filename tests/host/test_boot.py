"""The machine booted completely: no unit failed, no file system is full."""

from typing import Any

import pytest

from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts

ALL = ("image", "node", "eks-node", "workspace")
MIB, GIB = 1 << 20, 1 << 30
# A file system is too full below the smaller of both: 5 % of a small one, 512 MiB of a large one.
LITTLE_SHARE, LITTLE = 0.05, 512 * MIB
FEW_SHARE, FEW = 0.02, 10_000  # inodes
# ext4's own tables and journal take a part of the partition (mke2fs.conf(5): inode_size over inode_ratio is
# 1.6 %). A larger gap between file system and partition means that the file system was not grown.
GROWN_SHARE, GROWN = 0.1, GIB
# `enabled-runtime` is a link in /run, `alias` another name of an enabled unit (systemctl(1), is-enabled).
ENABLED = ("enabled", "enabled-runtime", "alias")
# Units of EKS's Amazon Linux that fail where there is no cluster to join.
OF_A_CLUSTER = {"nodeadm-config.service", "nodeadm-run.service", "kubelet.service"}


def cluster_only_failures(facts: Facts) -> str:
    """The reason where only units failed that need a cluster; empty where another unit failed."""
    failed, node = facts["boot"]["failed"], facts["nodeadm"]
    if not failed or not set(failed) <= OF_A_CLUSTER:
        return ""
    # On a node of a cluster, and with a NodeConfig of its user, these units must work.
    if facts.profile == "eks-node" or not node["installed"] or node["config"] == "given":
        return ""
    what = {"none": "has no NodeConfig", "rehearsed": "has a rehearsed NodeConfig"}[node["config"]]
    return f"the machine is in no cluster and {what}: {', '.join(failed)} failed, and no other unit"


def expected_units(facts: Facts) -> list[str]:
    """Units that must start at boot on this machine."""
    units = ["nvidia-persistenced.service"]
    # Only engines that the record or the packages name: an image may have one of them.
    units += [f"{name}.service" for name in ("docker", "containerd") if facts.expects(name)]
    if facts.record:
        units.append("gpukiln-bootstrap.service")
    return units


@check(
    id="boot.state",
    title="systemd reports the state running, not degraded",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=(
        "a unit failed",
        "the boot has not ended: a job still waits",
    ),
    fix="Run `systemctl --failed` and `systemctl list-jobs` on the machine: they list failed and pending "
    "units.",
)
def test_state(facts):
    state = facts["boot"]["state"]
    # A single failed unit makes systemd degraded: both checks skip for the same reason.
    if state == "degraded" and (reason := cluster_only_failures(facts)):
        pytest.skip(reason)
    assert state == "running", f"`systemctl is-system-running` says {state!r}, wanted 'running'"


@check(
    id="boot.failed-units",
    title="No unit failed",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=(
        "its configuration is wrong",
        "something that it waits for is missing on this machine",
    ),
    fix="Run `systemctl status UNIT` and `journalctl -b -u UNIT` on the machine: they show the reason.",
)
def test_failed_units(facts):
    units = facts["boot"]["failed"]
    if reason := cluster_only_failures(facts):
        pytest.skip(reason)
    assert not units, f"failed: {', '.join(units)}; wanted no failed unit"


@check(
    id="boot.units-enabled",
    title="The units of a GPU node start at boot",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=(
        "the role did not finish",
        "a preset or an administrator disabled it",
    ),
    fix="`systemctl enable UNIT` in the role's install tasks: enable at build, start at boot.",
)
def test_units_enabled(facts):
    # systemctl prints an empty UnitFileState for a unit that does not exist.
    states = {unit: facts["boot"]["units"][unit]["UnitFileState"] for unit in expected_units(facts)}
    wrong = [f"{unit} is {state or 'missing'}" for unit, state in states.items() if state not in ENABLED]
    assert not wrong, f"{', '.join(wrong)}; wanted enabled"


@check(
    id="boot.bootstrap",
    title="The node's bootstrap ran and succeeded",
    layer="boot",
    profiles=ALL,
    needs=("systemd", "record"),
    causes=(
        "the driver was not ready before the unit's timeout",
        "user data describes another kind of node",
    ),
    fix="`journalctl -b -u gpukiln-bootstrap` on the machine shows the step that failed.",
)
def test_bootstrap(facts):
    unit = facts["boot"]["units"]["gpukiln-bootstrap.service"]
    assert unit["LoadState"] == "loaded", f"gpukiln-bootstrap.service is {unit['LoadState']}, wanted loaded"
    # A unit whose condition failed ends with the result `success`, so that the condition is checked first.
    assert unit["ConditionResult"] == "yes", "gpukiln-bootstrap.service was not started in this boot"
    assert unit["Result"] == "success", (
        f"gpukiln-bootstrap.service ended with {unit['Result']!r}, wanted success"
    )


@check(
    id="boot.persistenced",
    title="nvidia-persistenced runs on a machine with a GPU, and is skipped on a machine without one",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=(
        "the drop-in with its condition is missing",
        "the driver does not load",
    ),
    fix="Add a condition on an NVIDIA PCI device to the unit (role nvidia_persistence). On a machine with a "
    "GPU `journalctl -b -u nvidia-persistenced` shows why it does not run.",
)
def test_persistenced(facts):
    unit = facts["boot"]["units"]["nvidia-persistenced.service"]
    state = f"{unit['ActiveState']}/{unit['SubState']}, condition {unit['ConditionResult']}"
    # Images are built for machines with and without GPUs; without one the daemon would fail and make the boot
    # degraded.
    if facts["gpus"]["pci"]:
        assert unit["ActiveState"] == "active", f"found {state}, wanted active: there is a GPU"
        return
    assert unit["LoadState"] == "loaded", f"nvidia-persistenced.service is {unit['LoadState']}, wanted loaded"
    assert unit["ActiveState"] == "inactive", f"found {state}, wanted inactive: there is no GPU"
    assert unit["ConditionResult"] == "no", f"found {state}, wanted a condition that keeps it from starting"


@check(
    id="boot.journal",
    title="The journal has no error of the units of a GPU node",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=("a unit runs, but a part of it fails",),
    fix="Run `journalctl -b -p err` on the machine: it shows the messages with their context.",
)
def test_journal(facts):
    # The journal of large machines may take too long to read; then the check is not reached.
    errors = [f"{e['unit']}: {e['message']}" for e in require_reached(facts["boot"]["journal"])]
    assert not errors, f"{len(errors)} errors: {'; '.join(errors[:5])}"


@check(
    id="boot.time",
    title="The boot finished, and systemd measured its duration",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=("a unit waits for something that never comes",),
    fix="`systemctl list-jobs` names what still starts; `systemd-analyze critical-chain` shows what took "
    "long.",
)
def test_time(facts):
    boot = facts["boot"]
    # systemd-analyze has no time until the last job of the boot has ended.
    assert boot["startup_s"] is not None, f"systemd-analyze says: {boot['startup']}"
    facts.note(f"booted in {boot['startup_s']:.1f} s")


def missing_space(row: dict[str, Any]) -> list[str]:
    """The shortage of bytes and of inodes on a file system; empty where there is none."""
    missing = []
    least = min(LITTLE, int(row["size"] * LITTLE_SHARE))
    if row["free"] < least:
        missing.append(
            f"{row['free'] // MIB} of {row['size'] // MIB} MiB free, wanted {max(least // MIB, 1)} or more"
        )
    # btrfs and FAT have no fixed number of inodes and report 0, which passes.
    least = min(FEW, int(row["inodes"] * FEW_SHARE))
    if row["inodes_free"] < least:
        missing.append(f"{row['inodes_free']} of {row['inodes']} inodes free, wanted {least} or more")
    return missing


@check(
    id="boot.disk-space",
    title="No file system that a node writes to is full, in bytes or in inodes",
    layer="boot",
    profiles=ALL,
    causes=(
        "logs, container images, caches or core dumps have filled it",
        "old kernels fill /boot, and no initramfs can be written any more",
        "a deleted file is still open",
        "many small files use all inodes",
    ),
    fix="Find what uses the space: `du -xh --max-depth=2 PATH | sort -h | tail` for bytes, `du -x --inodes` "
    "for inodes, `docker system df` for Docker, `lsof +L1` for deleted files that are open. Remove what is "
    "not needed, or make the disk larger.",
)
def test_disk_space(facts):
    rows = facts["storage"]["file_systems"]
    full = []
    for row in rows:
        holds = f" (with {', '.join(row['holds'])})" if row["holds"] else ""
        full += [f"{row['path']}{holds} has {lack}" for lack in missing_space(row)]
    # Without this the check would pass where nothing was gathered.
    assert rows, "no file system was looked at, wanted at least that of /"
    assert not full, "; ".join(full)
    facts.note(", ".join(f"{row['path']} {row['free'] // MIB} MiB free" for row in rows))


@check(
    id="boot.root-grown",
    title="The root file system fills its partition, and the partition fills the disk",
    layer="boot",
    profiles=ALL,
    needs=("own-kernel",),
    causes=(
        "growpart (cloud-guest-utils, cloud-utils-growpart) is missing, or cloud-init's module did not run",
        "the disk was made larger while the machine ran",
    ),
    fix="Run `growpart DISK NUMBER`, then `resize2fs PARTITION` or `xfs_growfs /`; both work on a mounted "
    "file "
    "system. `journalctl -b -u cloud-init` shows what growpart and resizefs did.",
)
def test_root_grown(facts):
    """On bare metal the owner chooses the partitions, so that space after the root partition is no fault."""
    root = facts["storage"]["root"]
    if root is None:
        pytest.skip("the root file system is on no partition of a disk")
    # growpart grows the partition, resizefs the file system: either step may have failed.
    lost = root["partition"] - root["size"]
    assert lost < max(GROWN, root["partition"] * GROWN_SHARE), (
        f"the root file system has {root['size'] / GIB:.1f} GiB of its partition's "
        f"{root['partition'] / GIB:.1f} GiB, wanted all"
    )
    unused, whole = root["after"], root["after"] + root["partition"]
    assert facts.profile == "node" or unused < max(GROWN, whole * GROWN_SHARE), (
        f"{unused / GIB:.1f} GiB of the disk after the root partition are unused, wanted none: "
        "the partition did not grow"
    )
    facts.note(f"{root['size'] / GIB:.1f} GiB")
