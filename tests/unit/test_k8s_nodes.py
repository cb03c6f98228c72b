"""k8s.nodes: the examples are its output, what it refuses, and what a node does with its user data."""

import json
import os
import shlex
import subprocess
from datetime import date

import kubernetes_validate
import pytest
import yaml

from gpukiln.catalog.load import ROOT
from gpukiln.kubernetes import gpu_job
from gpukiln.kubernetes.check.evaluate import apply_rules
from gpukiln.kubernetes.check.reading import read
from gpukiln.kubernetes.check.rules import Context
from gpukiln.kubernetes.manifest import dump
from gpukiln.kubernetes.nodes import userdata
from gpukiln.kubernetes.nodes.group import types_of
from gpukiln.kubernetes.nodes.hours import parse
from tests.support import documents
from tests.support.hcl import module

LINES = [
    shlex.split(line)[2:]
    for line in (ROOT / "docs/k8s-nodes.md").read_text().splitlines()
    if line.startswith("    invoke k8s.nodes") and "--output" in line
]
BASE = ["--cluster", "main", "--provider"]
KARPENTER = [*BASE, "karpenter", "--instance-type", "g4dn.xlarge"]
MANAGED = [*BASE, "managed", "--instance-type", "g4dn.xlarge"]
ASG = [*BASE, "asg", "--instance-type", "g4dn.xlarge"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[-1])
def test_the_examples_are_what_is_rendered(nodes, line, tmp_path):
    where = ROOT / line[-1]
    write = os.environ.get("GPUKILN_GOLDEN") == "write"
    code, *_ = nodes(*line[:-1], str(where if write else tmp_path))
    assert code == 0
    if not write:
        made = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert made == {path.name: path.read_text() for path in where.iterdir()}


def test_every_example_has_its_line():
    folders = {
        str(path.parent.relative_to(ROOT))
        for folder in ("karpenter", "managed-node-group", "auto-scaling-group")
        for path in (ROOT / "examples" / folder).rglob("*.*")
    }
    assert folders == {line[-1] for line in LINES}


def test_a_second_run_says_what_changed(nodes, tmp_path):
    where = ["--output", str(tmp_path / "pools")]
    assert "new " in nodes(*KARPENTER, *where)[1]
    assert "same " in nodes(*KARPENTER, *where)[1]
    (tmp_path / "pools/mine.yaml").write_text("a: 1\n")
    out = nodes(*KARPENTER, "--max", "8", *where)[1]
    assert "changed " in out
    assert "other " in out
    assert "mine.yaml" in out


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        ([], 2, "--provider"),
        (["--provider", "karpentr"], 2, "karpenter"),
        ([*BASE, "karpenter"], 2, "neither --gpu nor --instance-type"),
        ([*KARPENTER, "--gpu", "T4:1"], 2, "--gpu and --instance-type exclude each other"),
        (["--provider", "karpenter", "--instance-type", "g4dn.xlarge"], 2, "no --cluster"),
        ([*BASE, "karpenter", "--instance-type", "g4dn.xlrge"], 2, "g4dn.xlarge"),
        ([*BASE, "karpenter", "--instance-type", "p3.2xlarge"], 3, "is retired"),
        ([*BASE, "karpenter", "--instance-type", "g6f.large"], 3, "a part of a GPU"),
        ([*BASE, "karpenter", "--instance-type", "g4dn.xlarge,g5g.xlarge"], 3, "one architecture"),
        ([*BASE, "karpenter", "--gpu", "H100:16"], 3, "H100"),
        ([*BASE, "karpenter", "--instance-type", "g5g.xlarge"], 3, "an image for x86_64"),
        ([*KARPENTER, "--channel", "stabel"], 2, "stable"),
        ([*KARPENTER, "--image", "eks-gpuu"], 2, "eks-gpu"),
        ([*KARPENTER, "--kubernetes", "1.3"], 2, "such as 1.34"),
        ([*KARPENTER, "--region", "us-west-3"], 2, "us-west-2"),
        ([*KARPENTER, "--volume", "1"], 2, "--volume 100"),
        ([*KARPENTER, "--role", ""], 2, "--role eks-gpu-node"),
        ([*KARPENTER, "--ami", "stable"], 2, "no image id"),
        ([*KARPENTER, "--ami", "ami-xyz"], 2, "ami-0123456789abcdef0"),
        ([*KARPENTER, "--base", "debian-12"], 2, "no kubelet"),
        ([*KARPENTER, "--base", "eks-al2032"], 2, "eks-al2023"),
        ([*KARPENTER, "--base", "eks-ubuntu-24.04"], 2, "--dns-ip is missing"),
        ([*KARPENTER, "--base", "eks-ubuntu-24.04", "--dns-ip", "10.100.0.999"], 2, "is no address"),
        ([*KARPENTER, "--min", "1"], 2, "--keep N"),
        ([*KARPENTER, "--max", "0"], 2, "--max 1 or more"),
        ([*BASE, "karpenter", "--instance-type", "p4d.24xlarge", "--max", "4"], 2, "counts GPUs"),
        ([*KARPENTER, "--keep", "9"], 2, "raise --max"),
        ([*MANAGED, "--min", "5"], 2, "--min 5, --max 4"),
        ([*MANAGED, "--min", "2", "--keep", "1"], 2, "always runs"),
        ([*MANAGED, "--capacity", "spot,on-demand"], 2, "no fallback"),
        ([*KARPENTER, "--capacity", "sopt"], 2, "spot"),
        ([*KARPENTER, "--capacity", "reserved"], 2, "without --reservation"),
        ([*KARPENTER, "--reservation", "cr-0123456789abcdef0"], 2, "--capacity reserved"),
        ([*KARPENTER, "--capacity", "reserved", "--reservation", "x"], 2, "--reservation 'x'"),
        (
            [*KARPENTER, "--capacity", "capacity-block", "--reservation", "cr-01234567"],
            3,
            "no capacity blocks",
        ),
        ([*KARPENTER, "--zones", "us-west"], 2, "is no zone"),
        ([*KARPENTER, "--label", "team"], 2, "KEY=VALUE"),
        ([*KARPENTER, "--label", "te am=x"], 2, "no label of Kubernetes"),
        ([*KARPENTER, "--label", "nvidia.com/gpu.product=T4"], 2, "is set by gpukiln"),
        ([*KARPENTER, "--label", "karpenter.sh/foo=1"], 2, "rejects a NodePool"),
        ([*KARPENTER, "--label", "karpenter.k8s.aws/instance-family=g5"], 2, "rejects a NodePool"),
        ([*KARPENTER, "--label", "kubernetes.io/hostname=1"], 2, "does not start with this label"),
        ([*MANAGED, "--label", "node-role.kubernetes.io/gpu=1"], 2, "does not start with this label"),
        ([*KARPENTER, "--label", "a..b/c=1"], 2, "no label of Kubernetes"),
        ([*KARPENTER, "--label", "gr\u00f6\u00dfe=1"], 2, "no label of Kubernetes"),
        ([*MANAGED, "--label", "team="], 2, "1 to 63 characters"),
        ([*MANAGED, "--label", f"{'a' * 40}.example/{'b' * 20}=1"], 2, "1 to 63 characters"),
        ([*ASG, "--label", f"{'a' * 60}.example/{'b' * 20}=1"], 2, "longer than 128"),
        ([*KARPENTER, "--volume", "100000"], 2, "at most 16384 GiB"),
        ([*MANAGED, "--name", "g" * 37], 2, "at most 36 characters"),
        (["--cluster", "c" * 90, *ASG[2:], "--name", "g" * 20], 2, "at most 100 characters"),
        ([*BASE, "managed", "--gpu", "T4,L4,A10G,L40S:1"], 2, "at most 20"),
        ([*KARPENTER, "--name", "GPU"], 2, "--name 'GPU'"),
        ([*KARPENTER, "--hours", "mon-fri 8-18"], 2, "DAYS HH:MM-HH:MM"),
        ([*KARPENTER, "--hours", "mo-fri 08:00-18:00"], 2, "mon"),
        ([*KARPENTER, "--hours", "daily 22:00-06:00"], 2, "not before"),
        ([*KARPENTER, "--hours", "daily 06:00-22:00", "--time-zone", "Europe/Berln"], 2, "Europe/Berlin"),
        ([*KARPENTER, "--time-zone", "UTC"], 2, "without --hours"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_what_can_not_work_is_refused(nodes, argv, code, told):
    assert (nodes(*argv)[0], told in nodes(*argv)[2]) == (code, True), nodes(*argv)


def test_the_document(nodes):
    code, out, _ = nodes(*KARPENTER, "--json")
    assert code == 0
    document = json.loads(out)
    documents.check(document)
    [node] = document["nodes"]
    assert (node["cpu"], node["gpus"], node["memory"] // 2**20) == ("3.92", 1, 14481)
    assert node["labels"]["nvidia.com/gpu.product"] == "Tesla-T4"


@pytest.mark.parametrize("minor", ["1.34", "1.35", "1.36", "1.37"])
def test_what_keeps_nodes_waiting_fits_its_schema(nodes, minor):
    _, out, _ = nodes(*KARPENTER, "--keep", "2")
    objects = [one for one in yaml.safe_load_all(out) if not one["apiVersion"].startswith("karpenter")]
    assert [one["kind"] for one in objects] == ["PriorityClass", "CronJob"]
    for one in objects:
        kubernetes_validate.validate(one, minor, strict=True)


def test_waiting_pods_hold_a_whole_node_and_no_cron_scales_nodes(nodes):
    argv = [*BASE, "karpenter", "--instance-type", "g5.12xlarge", "--max", "16", "--keep", "2"]
    hours = ["--hours", "mon-fri 08:00-18:00", "--time-zone", "Asia/Tokyo"]
    *_, priority, cron = yaml.safe_load_all(nodes(*argv, *hours)[1])
    job = cron["spec"]["jobTemplate"]["spec"]
    assert (cron["spec"]["schedule"], cron["spec"]["timeZone"]) == ("0 8 * * 1-5", "Asia/Tokyo")
    assert (job["parallelism"], job["activeDeadlineSeconds"]) == (2, 10 * 3600)
    [container] = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "command" not in container
    assert priority["value"] < 0


@pytest.mark.parametrize(
    ("text", "zone", "own", "utc"),
    [
        ("mon-fri 08:00-18:00", "UTC", ("0 8 * * 1-5", "0 18 * * 1-5"), ("0 8 * * 1-5", 600)),
        ("mon-fri 08:00-18:00", "Europe/Berlin", ("0 8 * * 1-5", "0 18 * * 1-5"), ("0 6 * * 1-5", 660)),
        ("mon-fri 08:00-18:00", "Asia/Tokyo", ("0 8 * * 1-5", "0 18 * * 1-5"), ("0 23 * * 0-4", 600)),
        ("mon-fri 20:00-24:00", "America/New_York", ("0 20 * * 1-5", "0 0 * * 2-6"), ("0 0 * * 2-6", 300)),
        (
            "fri-mon 09:30-10:00",
            "Asia/Kolkata",
            ("30 9 * * 0,1,5,6", "0 10 * * 0,1,5,6"),
            ("0 4 * * 0,1,5,6", 30),
        ),
        ("daily 00:00-24:00", "Europe/Berlin", ("0 0 * * *", "0 0 * * *"), ("0 22 * * *", 1440)),
        ("sat,sun 10:00-12:00", "UTC", ("0 10 * * 0,6", "0 12 * * 0,6"), ("0 10 * * 0,6", 120)),
    ],
)
def test_hours(text, zone, own, utc):
    hours = parse(text, zone)
    assert ((hours.starts, hours.ends), hours.in_utc) == (own, utc)


def test_hours_are_told_as_they_were_typed():
    assert parse("mon-fri 8:00-18:00", "Europe/Berlin").text == "mon-fri 08:00-18:00 Europe/Berlin"
    assert parse("daily 06:00-22:00").text == "daily 06:00-22:00 UTC"


def test_types_of_a_request_have_the_fewest_gpus_that_do():
    how = {"named": (), "cpu": 0, "memory": "", "arch": "", "region": "us-west-2", "today": date(2026, 11, 1)}
    found = types_of(gpu="A10G:1..4", **how)
    assert "g5.xlarge" in found
    assert "g5.12xlarge" not in found
    assert types_of(gpu="A10G:4", **how)[0] == "g5.12xlarge"


def test_a_job_lands_on_the_pools_that_are_rendered(nodes, tmp_path):
    """What k8s.job renders and what k8s.nodes renders fit each other; a job for another GPU does not."""
    types = ["--instance-type", "g4dn.xlarge,g5.xlarge"]
    nodes(*BASE, "karpenter", *types, "--output", str(tmp_path))
    (tmp_path / "job.yaml").write_text(
        dump(*gpu_job(image="registry.example/a:1", gpu_model="T4", name="t4", command=["a"]).manifests())
    )

    def placed():
        reading = read([str(tmp_path)])
        return apply_rules(reading, Context(resources=tuple(reading.resources)))

    report = placed()
    assert report.findings == ()
    assert [one.on for one in report.placed] == [("g4dn.xlarge",)]
    (tmp_path / "job.yaml").write_text(
        dump(*gpu_job(image="registry.example/a:1", gpu_model="L4", name="l4", command=["a"]).manifests())
    )
    assert [one.id for one in placed().findings] == ["no-node-has-labels"]


def test_a_pool_for_each_gpu_the_first_choice_first(nodes):
    out = nodes(*BASE, "karpenter", "--instance-type", "g5.xlarge,g4dn.xlarge,g5.2xlarge")[1]
    pools = {
        one["metadata"]["name"]: one["spec"] for one in yaml.safe_load_all(out) if one["kind"] == "NodePool"
    }
    assert {name: spec["weight"] for name, spec in pools.items()} == {"gpu-a10g": 20, "gpu-t4": 10}
    labels = pools["gpu-a10g"]["template"]["metadata"]["labels"]
    assert labels == {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "NVIDIA-A10G"}


def test_a_label_that_a_reader_takes_for_something_else_is_in_quotes(nodes):
    code, out, _ = nodes(*KARPENTER, "--label", "rate=1e-4", "--label", "y=no")
    assert code == 0
    assert "rate: '1e-4'\n" in out
    assert "'y': 'no'\n" in out


def test_the_autoscaler_knows_a_group_without_nodes(nodes, tmp_path):
    nodes(*ASG, "--label", "team=vision", "--output", str(tmp_path))
    tags = module((tmp_path / "main.tf").read_text())["locals"]["autoscaler_tags"]
    prefix = "k8s.io/cluster-autoscaler/node-template"
    told = {key.strip('"').removeprefix(prefix): value.strip('"') for key, value in tags.items()}
    assert told["/label/team"] == "vision"
    assert told["/label/nvidia.com/gpu.product"] == "Tesla-T4"
    assert told["/label/k8s.amazonaws.com/accelerator"] == "nvidia-t4"
    assert told["/taint/nvidia.com/gpu"] == "true:NoSchedule"
    assert told["/resources/nvidia.com/gpu"] == "1"
    script = (tmp_path / "userdata.tftpl").read_text()
    for label in ("team=vision", "k8s.amazonaws.com/accelerator=nvidia-t4"):
        assert label in script


@pytest.mark.parametrize("provider", [MANAGED, ASG], ids=["managed", "asg"])
def test_working_hours_are_schedules_of_the_group(nodes, provider, tmp_path):
    hours = ["--keep", "2", "--hours", "mon-fri 08:00-18:00", "--time-zone", "Europe/Berlin"]
    nodes(*provider, *hours, "--output", str(tmp_path))
    blocks = module((tmp_path / "main.tf").read_text())
    begin, end = (blocks[f"aws_autoscaling_schedule.{name}"] for name in ("begin", "end"))
    assert (begin["recurrence"], begin["time_zone"], begin["min_size"]) == ("0 8 * * 1-5", "Europe/Berlin", 2)
    assert (end["recurrence"], end["min_size"]) == ("0 18 * * 1-5", 0)
    (tmp_path / "main.tf").unlink()
    nodes(*provider, "--output", str(tmp_path))
    assert not [one for one in module((tmp_path / "main.tf").read_text()) if "schedule" in one]


def test_notes_tell_what_surprises(nodes):
    mixed = nodes(*BASE, "managed", "--instance-type", "g4dn.xlarge,g5.xlarge")[2]
    assert "a group for each GPU" in mixed
    arm = ["--instance-type", "g5g.xlarge", "--ami", "ami-0123456789abcdef0"]
    assert "no local NVMe for a RAID 0" in nodes(*BASE, "karpenter", *arm)[2]
    assert (
        "eks-gpu is not verified on the GPUs of p5.48xlarge"
        in nodes(*BASE, "karpenter", "--instance-type", "g4dn.xlarge,p5.48xlarge", "--max", "8")[2]
    )
    assert "these nodes get no new releases" in nodes(*KARPENTER, "--ami", "ami-0123456789abcdef0")[2]
    unsigned = "note: /gpukiln/eks-gpu/1.34/stable/image_id: unsigned: trusts the tags of this account\n"
    assert nodes(*KARPENTER)[2] == unsigned


NODE = {
    "nvidia-ctk": 'echo "nvidia-ctk $*" >>"$LOG"',
    "systemctl": 'echo "systemctl $*" >>"$LOG"',
    "cat": 'if [ "$1" = /run/gpukiln/node-labels ]; then echo a=b,c=d; else command -p cat "$@"; fi',
    "lsblk": 'printf "$DISKS"',
    "mountpoint": "exit ${MOUNTED:-1}",
    "mdadm": 'echo "mdadm $*" >>"$LOG"',
    "blkid": "exit ${FORMATTED:-2}",
    "mkfs.ext4": 'echo "mkfs.ext4 $*" >>"$LOG"',
    "mount": 'echo "mount $*" >>"$LOG"',
    "mkdir": "exit 0",
    "cp": 'echo "cp $*" >>"$LOG"',
}
DISK = "/dev/nvme{}n1 Amazon EC2 NVMe Instance Storage\\n"
ROOT_DISK = "/dev/nvme0n1 Amazon Elastic Block Store\\n"


def joined(tmp_path, **environment):
    """Runs the script of an Ubuntu node with stand-ins for its tools; what they were asked."""
    tools, log, fstab = tmp_path / "tools", tmp_path / "log", tmp_path / "fstab"
    tools.mkdir(exist_ok=True)
    for name, body in NODE.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    log.write_text("")
    fstab.touch()
    script = userdata.ubuntu("main", "10.100.0.10", {"team": "a"}, "k=v:NoSchedule", local_storage=True)
    script = script.replace("/etc/eks/bootstrap.sh", 'printf "bootstrap %s\\n" >>"$LOG" "$*" ""')
    script = script.replace("/etc/fstab", str(fstab))
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tools}:/usr/bin:/bin", "LOG": str(log), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return log.read_text(), fstab.read_text()


def test_ubuntu_makes_one_raid_of_its_disks_and_joins(tmp_path):
    log, fstab = joined(tmp_path, DISKS=ROOT_DISK + DISK.format(1) + DISK.format(2))
    disks = "--raid-devices=2 /dev/nvme1n1 /dev/nvme2n1"
    assert f"mdadm --create /dev/md/k8s-disks --force --run --level=0 {disks}" in log
    assert "mkfs.ext4 -q -E nodiscard -L k8s-disks /dev/md/k8s-disks" in log
    assert fstab.count("/mnt/k8s-disks/0 ext4") == 1
    order = [log.index(word) for word in ("nvidia-ctk", "mkfs", "gpukiln-bootstrap", "bootstrap main")]
    assert order == sorted(order)
    assert "--node-labels=a=b,c=d,team=a --register-with-taints=k=v:NoSchedule" in log


def test_ubuntu_with_one_disk_makes_no_raid(tmp_path):
    log, _ = joined(tmp_path, DISKS=ROOT_DISK + DISK.format(1))
    assert "mdadm" not in log
    assert "mkfs.ext4 -q -E nodiscard -L k8s-disks /dev/nvme1n1" in log


def test_ubuntu_keeps_what_is_formatted_and_leaves_what_is_mounted(tmp_path):
    log, _ = joined(tmp_path, DISKS=DISK.format(1), FORMATTED="0")
    assert "mkfs" not in log
    assert "mount /mnt/k8s-disks/0" in log
    log, fstab = joined(tmp_path, DISKS=DISK.format(1), MOUNTED="0")
    assert "k8s-disks" not in log
    assert fstab.count("LABEL=k8s-disks") == 1


def test_ubuntu_without_local_disks_just_joins(tmp_path):
    log, fstab = joined(tmp_path, DISKS=ROOT_DISK)
    assert "k8s-disks" not in log
    assert (fstab, "bootstrap main" in log) == ("", True)
