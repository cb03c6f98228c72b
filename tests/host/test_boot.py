"""The machine came up whole."""

from typing import Any

import pytest

from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts

ALL = ("image", "node", "eks-node", "workspace")
MIB, GIB = 1 << 20, 1 << 30
# Less than both is too little: of a small file system the share counts, of a large one the amount.
LITTLE_SHARE, LITTLE = 0.05, 512 * MIB
FEW_SHARE, FEW = 0.02, 10_000  # inodes
# What ext4's own tables and journal take of a partition: mke2fs.conf(5), inode_size over inode_ratio, is
# 1.6 %;
# what is missing beyond this was never given to the file system.
GROWN_SHARE, GROWN = 0.1, GIB
ENABLED = ("enabled", "enabled-runtime", "alias")
# Of EKS's Amazon Linux: none of them can do its work where there is no cluster.
OF_A_CLUSTER = {"nodeadm-config.service", "nodeadm-run.service", "kubelet.service"}


def not_verified(facts: Facts) -> str:
    """Why failed units say nothing of the image: they need a cluster. Empty where others failed."""
    failed, node = facts["boot"]["failed"], facts["nodeadm"]
    if not failed or not set(failed) <= OF_A_CLUSTER:
        return ""
    if facts.profile == "eks-node" or not node["installed"] or node["config"] == "given":
        return ""
    what = {"none": "has no NodeConfig", "rehearsed": "has a rehearsed NodeConfig"}[node["config"]]
    return f"the machine is in no cluster and {what}: {', '.join(failed)} failed, and no other unit"


def expected_units(facts: Facts) -> list[str]:
    """Units that must start at boot on this machine."""
    units = ["nvidia-persistenced.service"]
    units += [f"{name}.service" for name in ("docker", "containerd") if facts.expects(name)]
    if facts.record:
        units.append("gpukiln-bootstrap.service")
    return units


@check(
    id="boot.state",
    title="systemd calls the system running, not degraded",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=(
        "a unit failed",
        "the boot had not ended: a job still waits",
    ),
    fix="`systemctl --failed` and `systemctl list-jobs` on the machine name what failed or still starts.",
)
def test_state(facts):
    state = facts["boot"]["state"]
    if state == "degraded" and (reason := not_verified(facts)):
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
        "what it waits for is missing on this machine",
    ),
    fix="`systemctl status UNIT` and `journalctl -b -u UNIT` on the machine show why.",
)
def test_failed_units(facts):
    units = facts["boot"]["failed"]
    if reason := not_verified(facts):
        pytest.skip(reason)
    assert not units, f"failed: {', '.join(units)}; wanted no failed unit"


@check(
    id="boot.units-enabled",
    title="The units of a GPU node start at boot",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=(
        "the role did not run to its end",
        "a preset or somebody disabled it",
    ),
    fix="`systemctl enable UNIT` in the role's install tasks: enable at build, start at boot.",
)
def test_units_enabled(facts):
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
        "the driver was not ready within the unit's time",
        "the node is not what user data says it is",
    ),
    fix="`journalctl -b -u gpukiln-bootstrap` on the machine shows the step that failed.",
)
def test_bootstrap(facts):
    unit = facts["boot"]["units"]["gpukiln-bootstrap.service"]
    assert unit["LoadState"] == "loaded", f"gpukiln-bootstrap.service is {unit['LoadState']}, wanted loaded"
    assert unit["ConditionResult"] == "yes", "gpukiln-bootstrap.service was not started in this boot"
    assert unit["Result"] == "success", (
        f"gpukiln-bootstrap.service ended with {unit['Result']!r}, wanted success"
    )


@check(
    id="boot.persistenced",
    title="nvidia-persistenced runs where there is a GPU, and is not tried where there is none",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=(
        "the drop-in with its condition is missing",
        "the driver does not load",
    ),
    fix="Condition the unit on an NVIDIA PCI device (role nvidia_persistence). With a GPU, "
    "`journalctl -b -u nvidia-persistenced` shows why it does not run.",
)
def test_persistenced(facts):
    unit = facts["boot"]["units"]["nvidia-persistenced.service"]
    state = f"{unit['ActiveState']}/{unit['SubState']}, condition {unit['ConditionResult']}"
    if facts["gpus"]["pci"]:
        assert unit["ActiveState"] == "active", f"found {state}, wanted active: there is a GPU"
        return
    assert unit["LoadState"] == "loaded", f"nvidia-persistenced.service is {unit['LoadState']}, wanted loaded"
    assert unit["ActiveState"] == "inactive", f"found {state}, wanted inactive: there is no GPU"
    assert unit["ConditionResult"] == "no", f"found {state}, wanted a condition that keeps it from starting"


@check(
    id="boot.journal",
    title="The journal has no error of our units",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=("a unit works, but not all of it",),
    fix="`journalctl -b -p err` on the machine shows the messages with their context.",
)
def test_journal(facts):
    errors = [f"{e['unit']}: {e['message']}" for e in require_reached(facts["boot"]["journal"])]
    assert not errors, f"{len(errors)} errors: {'; '.join(errors[:5])}"


@check(
    id="boot.time",
    title="The boot came to its end, and its time was measured",
    layer="boot",
    profiles=ALL,
    needs=("systemd",),
    causes=("a unit waits for something that never comes",),
    fix="`systemctl list-jobs` names what still starts; `systemd-analyze critical-chain` what took long.",
)
def test_time(facts):
    boot = facts["boot"]
    assert boot["startup_s"] is not None, f"systemd-analyze says: {boot['startup']}"
    facts.note(f"booted in {boot['startup_s']:.1f} s")


def too_full(row: dict[str, Any]) -> list[str]:
    """What a file system lacks: bytes, inodes, or nothing."""
    missing = []
    least = min(LITTLE, int(row["size"] * LITTLE_SHARE))
    if row["free"] < least:
        missing.append(
            f"{row['free'] // MIB} of {row['size'] // MIB} MiB free, wanted {max(least // MIB, 1)} or more"
        )
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
        "many small files took all inodes",
    ),
    fix="`du -xh --max-depth=2 PATH | sort -h | tail` says what takes the space, `du -x --inodes` what "
    "takes the "
    "inodes, `docker system df` what Docker holds, `lsof +L1` which deleted files are open. Remove what "
    "nobody "
    "needs, or make the disk larger.",
)
def test_disk_space(facts):
    rows = facts["storage"]["file_systems"]
    full = []
    for row in rows:
        holds = f" (with {', '.join(row['holds'])})" if row["holds"] else ""
        full += [f"{row['path']}{holds} has {lack}" for lack in too_full(row)]
    assert rows, "no file system was looked at, wanted at least that of /"
    assert not full, "; ".join(full)
    facts.note(", ".join(f"{row['path']} {row['free'] // MIB} MiB free" for row in rows))


@check(
    id="boot.root-grown",
    title="The root file system has all of its partition, and the partition all of the disk",
    layer="boot",
    profiles=ALL,
    needs=("own-kernel",),
    causes=(
        "growpart (cloud-guest-utils, cloud-utils-growpart) is missing, or cloud-init's module did not run",
        "the disk was made larger while the machine ran",
    ),
    fix="`growpart DISK NUMBER`, then `resize2fs PARTITION` or `xfs_growfs /`; both work while it is "
    "mounted. "
    "`journalctl -b -u cloud-init` says what growpart and resizefs did.",
)
def test_root_grown(facts):
    """Bare metal is partitioned as its owner wants: there the root partition alone is compared."""
    root = facts["storage"]["root"]
    if root is None:
        pytest.skip("the root file system lies on no partition of a disk")
    lost = root["partition"] - root["size"]
    assert lost < max(GROWN, root["partition"] * GROWN_SHARE), (
        f"the root file system has {root['size'] / GIB:.1f} GiB of its partition's "
        f"{root['partition'] / GIB:.1f} GiB, wanted all"
    )
    unused, whole = root["after"], root["after"] + root["partition"]
    assert facts.profile == "node" or unused < max(GROWN, whole * GROWN_SHARE), (
        f"{unused / GIB:.1f} GiB of the disk after the root partition are unused, wanted none: the "
        f"partition did "
        "not grow"
    )
    facts.note(f"{root['size'] / GIB:.1f} GiB")
