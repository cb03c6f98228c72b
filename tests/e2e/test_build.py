"""The main command, for real: a Debian 12 GPU node baked, booted with its own kernel, judged, recorded."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile

import pytest

from gpukiln.disks.mount import mounted_root
from gpukiln.images import modules
from tests.support.faults import FAULTS, LAST
from tests.support.harness import ROOT, SIMULATED, Node, copy_checkout
from tests.support.same import differences

pytestmark = pytest.mark.e2e

DRIVER = "535.309.01"
SECRETS = re.compile(rb"PRIVATE KEY-----|AKIA[0-9A-Z]{16}|aws_secret_access_key", re.IGNORECASE)


@pytest.fixture(scope="module")
def image(here, built):
    image_id = built[0]["bake"]["image_id"]
    return here.aws("ec2", "describe-images", "--image-ids", image_id)["Images"][0]


@pytest.fixture(scope="module")
def root(here, image):
    """The image's root file system, as it was captured."""
    snapshot = image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    with mounted_root(here.home / f"cloud/snapshots/{snapshot}.raw") as folder:
        yield folder


def test_the_verdict_counts_what_was_not_run_apart(built):
    [verdict] = built[0]["verdicts"]
    assert verdict["passed"] is True
    assert verdict["counts"]["failed"] == 0
    assert verdict["counts"]["passed"] >= 25
    assert verdict["counts"]["not_run"] >= 5
    for check in verdict["checks"]:
        assert check["outcome"] in ("passed", "not_run")
        if check["outcome"] == "not_run":
            assert check["reason"]
        if check["layer"] in ("gpu", "container"):
            assert check["outcome"] == "not_run"


def test_progress_can_be_followed(built):
    text = built[1]
    for step in ("plan", "base image", "bake", "boot from the image", "verify"):
        assert f"ok {step}" in text


def test_the_image_has_its_tags_and_is_encrypted(built, image):
    tags = {tag["Key"]: tag["Value"] for tag in image["Tags"]}
    assert tags["gpukiln:driver"] == DRIVER
    assert tags["gpukiln:digest"] == built[0]["plan"]["digest"]
    assert tags["gpukiln:toolkit"] == "left_out"
    assert tags["gpukiln:kernel"] == built[0]["bake"]["kernel"]
    assert tags["gpukiln:verdict"] == "passed"
    assert tags["gpukiln:image"] == "eks-gpu"
    [verdict] = built[0]["verdicts"]
    assert verdict["instance_type"] == "g4dn.xlarge"
    digest = hashlib.sha256(json.dumps(verdict, sort_keys=True).encode()).hexdigest()
    assert (
        f" suite={verdict['suite_version'][:16]} digest={digest[:16]} gpu=no "
        in (tags["gpukiln:verdict:g4dn.xlarge"])
    )
    assert tags["gpukiln:base"].startswith("debian-12 ami-")
    assert tags["gpukiln:commit"]
    assert image["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True


def test_the_module_is_built_for_the_images_own_kernel(built, root):
    kernel = built[0]["bake"]["kernel"]
    assert [folder.name for folder in (root / "lib/modules").iterdir()] == [kernel]
    assert kernel != os.uname().release
    for module in ("nvidia-current", "nvidia-current-uvm", "nvidia-current-modeset"):
        done = subprocess.run(
            ["modinfo", "-b", str(root), "-k", kernel, module], capture_output=True, text=True, check=True
        )
        fields = dict(re.findall(r"^(version|vermagic):\s+(\S+)", done.stdout, re.MULTILINE))
        assert fields["vermagic"] == kernel
        assert fields.get("version", DRIVER) == DRIVER
    version = subprocess.run(
        ["modinfo", "-b", str(root), "-k", kernel, "-F", "version", "nvidia-current"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == DRIVER


def test_the_images_own_record_says_what_is_in_it(built, root):
    own = json.loads((root / "etc/gpukiln/image.json").read_text())
    assert own["digest"] == built[0]["plan"]["digest"]
    assert own["components"]["nvidia_driver"]["status"] == "installed"
    assert own["components"]["nvidia_container_toolkit"]["status"] == "left_out"
    assert own["components"]["nvidia_container_toolkit"]["reason"]
    assert own["packages"]["nvidia-kernel-dkms"].startswith(DRIVER)
    assert own["packages"] == built[0]["bake"]["packages"]


def test_sbom_and_provenance_are_tied_to_the_image(built, here, image, root):
    folder = here.home / "builds" / built[0]["build_id"]
    tags = {tag["Key"]: tag["Value"] for tag in image["Tags"]}
    sbom, provenance = ((folder / name).read_bytes() for name in ("sbom.cdx.json", "provenance.intoto.json"))
    assert tags["gpukiln:sbom-digest"] == hashlib.sha256(sbom).hexdigest()
    assert tags["gpukiln:provenance-digest"] == hashlib.sha256(provenance).hexdigest()
    record = hashlib.sha256((root / "etc/gpukiln/image.json").read_bytes()).hexdigest()
    subjects = json.loads(provenance)["subject"]
    assert subjects[0]["digest"] == {"amiId": image["ImageId"]}
    assert subjects[-1] == {"name": "/etc/gpukiln/image.json", "digest": {"sha256": record}}
    packages = {row["name"]: row for row in json.loads(sbom)["components"] if "purl" in row}
    assert packages.keys() == built[0]["bake"]["packages"].keys()
    assert "upstream=glibc" in packages["libc6"]["purl"]
    assert packages["adduser"]["licenses"][0]["license"]["name"] == "GPL-2+"


def test_the_compiled_modules_are_kept_for_the_next_build(here, built, root):
    [use] = built[0]["bake"]["modules"]
    kernel = built[0]["bake"]["kernel"]
    assert (use["kernel"], use["cached"]) == (kernel, False)
    assert use["reason"] == "the cache had no entry; they are kept"
    assert f"modules nvidia-current/{DRIVER} for {kernel}: compiled" in built[1]
    [file] = (here.home / "modules" / DRIVER).glob("*.json")
    about = json.loads(file.read_text())
    assert modules.find_entry_fault(file.with_suffix(".tar.gz"), about["key"], about["sha256"]) == ""
    with tarfile.open(file.with_suffix(".tar.gz")) as tar:
        kept = {tar.extractfile(member).read() for member in tar.getmembers() if member.name.endswith(".ko")}
    installed = {file.read_bytes() for file in root.glob(f"lib/modules/{kernel}/updates/dkms/nvidia*.ko")}
    assert kept == installed
    assert len(installed) == 5


def test_nothing_of_the_build_is_in_the_image(root):
    assert (root / "etc/machine-id").read_text().strip() in ("", "uninitialized")
    for pattern in (
        "etc/ssh/ssh_host_*",
        "home/*/.ssh/authorized_keys",
        "root/.ssh/authorized_keys",
        "var/lib/cloud/instances/*",
        "var/cache/apt/archives/*.deb",
        "var/lib/apt/lists/*Packages*",
        "tmp/*",
        "usr/sbin/policy-rc.d",
        "var/lib/dkms/*/*/build",
    ):
        assert not list(root.glob(pattern)), pattern


def test_no_secret_is_in_a_log_a_record_or_the_image(here, root, built):
    folder = here.home / "builds" / built[0]["build_id"]
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 5
    for place in ("etc/gpukiln", "root", "home", "var/log"):
        files += [file for file in (root / place).rglob("*") if file.is_file() and not file.is_symlink()]
    assert not [str(file) for file in files if SECRETS.search(file.read_bytes())]


@pytest.fixture
def node(here, key, tmp_path, image):
    """A machine booted from the image, as a container: with this host's kernel."""
    with Node(here, key, tmp_path, image_id=image["ImageId"]) as machine:
        yield machine


def judge(node, *more, gpus=0):
    """The checks' results by id, each as a dict."""
    hosts = node.folder / "hosts.yml"
    hosts.write_text(json.dumps({"all": {"hosts": {"node": node.variables()}}}))
    options = ("--inventory", str(hosts), "--profile", "image", "--expect-gpus", str(gpus), "--json", *more)
    [one] = json.loads(node.here.invoke("node.verify", *options, ok=False).stdout)["hosts"]
    return {check["id"]: check for check in one["verdict"]["checks"]}


def test_a_node_is_compared_with_its_images_record(node):
    """What the image left out is not asked for, and a package that somebody removed is all that is found."""
    hosts = node.folder / "hosts.yml"
    hosts.write_text(json.dumps({"all": {"hosts": {"node": node.variables()}}}))
    node.read("sudo dpkg --remove --force-depends nvtop")
    done = node.here.invoke("node.drift", "--inventory", str(hosts), "--json", ok=False)
    assert done.returncode == 1, done.stderr[-3000:]
    changes = json.loads(done.stdout)["hosts"]["node"]["changes"]
    assert changes
    assert [change for change in changes if "nvtop" not in json.dumps(change)] == []


def test_the_suite_finds_what_is_broken_on_a_real_machine(node):
    before = judge(node)
    # the container has this host's kernel
    assert [i for i, check in before.items() if check["outcome"] == "failed"] == []
    for faults in (FAULTS, LAST):
        for command, _ in faults.values():
            node.read(f"sudo sh -c {shlex.quote(command)}")
        after = judge(node)
        for check_id, (_, words) in faults.items():
            assert before[check_id]["outcome"] == "passed", before[check_id]
            assert after[check_id]["outcome"] == "failed", after[check_id]
            assert words in after[check_id]["reason"], after[check_id]
            assert after[check_id]["evidence"]


def test_simulated_gpus_stand_where_the_driver_does_and_prove_nothing(here, key, tmp_path, image):
    """On a machine booted from the image, over the driver's own library; then an image of that machine."""
    # its services are those of a node: Docker's too
    tags = f"ResourceType=instance,Tags=[{SIMULATED},{{Key=gpukiln:machine,Value=privileged}}]"
    options = ("--instance-type", "g5.12xlarge", "--tag-specifications", tags)
    with Node(here, key, tmp_path, image["ImageId"], options) as machine:
        loaded = machine.read("readlink -f /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").strip()
        assert loaded.endswith(f".so.{DRIVER}")
        assert loaded in machine.read("cat /proc/self/mountinfo")
        assert (
            machine.read("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader").splitlines()
            == [f"NVIDIA A10G, {DRIVER}"] * 4
        )
        # the image's own nvtop, as it is; its screen is 4096 columns wide where nobody says how wide
        screen = machine.read(
            "(sleep 4; echo q) | TERM=xterm script -qec 'stty rows 60 cols 160; nvtop -C -p -d 5' /dev/null"
        )
        assert screen.count("NVIDIA A10G]") >= 4

        not_run = judge(machine)
        layers = ("gpu", "compute", "container", "multi-gpu")
        told = {check["outcome"]: check["reason"] for check in not_run.values() if check["layer"] in layers}
        assert told == {"not_run": "GPUs are simulated"}
        assert not_run["hygiene.simulated"]["outcome"] == "failed", "nobody asked for simulated GPUs"
        asked = judge(machine, "--simulated", gpus=4)
        assert [i for i, check in asked.items() if check["outcome"] == "failed"] == []
        assert asked["gpu.nvml"]["outcome"] == asked["multi-gpu.topology"]["outcome"] == "passed"
        assert asked["compute.kernel"]["outcome"] == "not_run"

        baked = machine.capture("simulated")
    with Node(here, key, tmp_path, baked) as machine:
        found = judge(machine)["hygiene.simulated"]
    here.aws("ec2", "deregister-image", "--image-id", baked)
    assert found["outcome"] == "failed"
    assert "/etc/gpukiln/simulated-gpus" in found["reason"]


@pytest.mark.usefixtures("built")
def test_nothing_is_left_running(here):
    left = here.leftovers()
    assert not any(left.values()), left


def test_a_second_build_of_the_same_plan_is_a_no_op_that_says_why(here, built):
    done = here.invoke("ami.build", "--region", "us-west-2")
    verified = built[0]["verdicts"][0]["started_at"][:10]
    found = f"nothing to bake: {built[0]['bake']['image_id']} has this digest, verified on {verified}"
    assert found in done.stdout
    assert here.invoke("ami.plan", "--region", "us-west-2", "--exit-code").returncode == 0


def test_list_and_show(here, built):
    assert built[0]["bake"]["image_id"] in here.invoke("ami.list").stdout
    shown = here.invoke("ami.show", "last").stdout
    assert built[0]["bake"]["kernel"] in shown
    assert "compiled (the cache had no entry; they are kept)" in shown
    timings = json.loads(here.invoke("ami.timings", "--json").stdout)
    rows = {row["build_id"]: row for row in timings["builds"]}
    row = rows[built[0]["build_id"]]
    assert row["durations_s"] == built[0]["durations_s"]
    assert row["modules"] == "compiled"
    assert json.loads(here.invoke("ami.show", built[0]["build_id"], "--json").stdout)["state"] == "verified"


def test_a_release_gives_another_region_the_very_image(built, here, image):
    build, kubernetes = built[0]["build_id"], built[0]["plan"]["kubernetes"]
    regions = ("--regions", "us-west-2,us-east-1")
    document = json.loads(
        here.invoke("ami.release", build, "--channel", "candidate", *regions, "--json").stdout
    )
    there = {result["region"]: result["image_id"] for result in document["regions"]}
    assert there["us-west-2"] == image["ImageId"]
    elsewhere = ("--region", "us-east-1")
    name = f"/gpukiln/eks-gpu/{kubernetes}/candidate/image_id"
    parameter = here.aws("ssm", "get-parameter", "--name", name, *elsewhere)["Parameter"]
    assert parameter["Value"] == there["us-east-1"] != image["ImageId"]
    [copy] = here.aws("ec2", "describe-images", "--image-ids", parameter["Value"], *elsewhere)["Images"]
    snapshot = copy["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    with mounted_root(here.home / f"cloud/snapshots/{snapshot}.raw") as folder:
        own = json.loads((folder / "etc/gpukiln/image.json").read_text())
    assert own["digest"] == built[0]["plan"]["digest"]
    refused = here.invoke("ami.release", build, "--channel", "stable", ok=False)
    assert refused.returncode == 6
    assert "versions.toolkit: nvidia_container_toolkit left out" in refused.stderr


def bake_only(here, checkout):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/bake_only.py")],
        cwd=checkout,
        env={**here.environment, "PYTHONPATH": str(checkout)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_bake_from_a_stage_is_the_image_that_every_role_makes(here, built, root, tmp_path):
    """But for the script that was changed since: the first image is of every role."""
    script = "scripts/bootstrap/eks-gpu-bootstrap.sh"  # of a late role
    changed = copy_checkout(tmp_path / "checkout", {script: ("# Readies a GPU", "# Readies a changed GPU")})
    late = bake_only(here, changed)
    assert late["stage"]["stage"] == "runtime"
    assert late["stage"]["build_id"] == built[0]["build_id"]
    assert built[0]["bake"]["stage"] is None
    roles = {task.partition(" : ")[0] for task in late["tasks"] if " : " in task}
    assert {"gpu_bootstrap", "nvtop", "image_record", "image_hygiene"} <= roles
    assert not roles & {"nvidia_driver", "container_runtime"}
    [image] = here.aws("ec2", "describe-images", "--image-ids", late["image_id"])["Images"]
    disk = image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    with mounted_root(here.home / f"cloud/snapshots/{disk}.raw") as late_root:
        installed = "usr/local/sbin/eks-gpu-bootstrap"
        assert "a changed GPU" in (late_root / installed).read_text()
        assert [line.partition(": ")[0] for line in differences(root, late_root)] == [installed]
    here.aws("ec2", "deregister-image", "--image-id", image["ImageId"])  # no record knows it
    here.aws("ec2", "delete-snapshot", "--snapshot-id", disk)
