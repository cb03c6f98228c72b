"""A whole plan, against an EC2 in this process and a network that answers as told."""

import io
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpukiln.catalog.bases import base, default_base
from gpukiln.catalog.components import load_components
from gpukiln.catalog.driver_bases import base_rows, check_published
from gpukiln.catalog.load import ROOT
from gpukiln.catalog.regions import check_region
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.images.bake import ansible_variables, image_tags
from gpukiln.images.builds import Build
from gpukiln.images.commit import git_commit
from gpukiln.images.plan import ImagePlan, make_plan
from gpukiln.images.plan_view import plan_table
from gpukiln.sources.decisions import Probes
from gpukiln.sources.rpm import RpmMetadata
from gpukiln.typed import dump, load
from tests.support.plans import OFFLINE, MotoCloud, plan

ONLINE = Probes(lambda _: None, OFFLINE.candidates, lambda _: None)


def test_a_plan_on_the_embedded_cloud(debian: str) -> None:
    made = plan(tools={"packer": "1.6.6"})
    assert (made.base.name, made.base.id, made.base.ssh_user) == ("debian-12", debian, "admin")
    assert made.component("nvidia_driver").package_version == "535.309.01-0+deb12u1"
    assert made.component("nvidia_container_toolkit").status == "left_out"
    [warning] = made.warnings
    assert warning.id == "driver-end-of-life"
    assert "--set nvidia_driver.branch=580 --cloud aws --base eks-ubuntu-22.04 or " in warning.remedy
    assert made.instance_types == ("g4dn.xlarge", "g5.xlarge")
    assert made.created_at == "2026-11-21T06:00:00+00:00"
    assert made.inputs["tool packer"] == "1.6.6"
    with pytest.raises(UsageError, match="unknown component of eks-gpu 'cuda'"):
        made.component("cuda")


@pytest.mark.usefixtures("debian")
def test_a_plan_survives_json() -> None:
    made = plan(overrides=["cuda.version=12.2"])
    assert made.overrides == ("cuda.version=12.2",)
    assert load(ImagePlan, json.loads(json.dumps(dump(made))), where="plan") == made
    with pytest.raises(UsageError, match="plan: "):
        load(ImagePlan, {"image": "x"}, where="plan")


@pytest.mark.usefixtures("debian")
def test_a_plan_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes in the checkout after the plan is in no image of that plan."""
    for name in ("ami", "ansible", "roles", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("ansible.cfg", "components.yaml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    made = plan(root=tmp_path, overrides=["nvidia_driver.modules=auto"])
    text = (tmp_path / "components.yaml").read_text()
    (tmp_path / "components.yaml").write_text(text.replace("EB693B3035CD5710E231", "0" * 20))
    monkeypatch.setattr("gpukiln.images.bake.ROOT", tmp_path)
    monkeypatch.setattr("gpukiln.images.plan.ROOT", tmp_path)
    monkeypatch.setattr("gpukiln.catalog.components.ROOT", tmp_path)
    told = ansible_variables(made, Build(tmp_path / "build"))["components"]
    driver = told["nvidia_driver"]
    assert driver["repository"]["apt"]["key_fingerprint"].startswith("EB693B3035CD5710E231")
    assert driver["modules"] == "proprietary"
    assert (
        ansible_variables(load(ImagePlan, dump(made), where="plan"), Build(tmp_path / "build"))["components"]
        == told
    )
    assert plan(root=tmp_path).digest != plan().digest


@pytest.mark.usefixtures("debian")
def test_a_base_without_kubernetes_is_for_no_version_of_it() -> None:
    assert plan().kubernetes == "none"
    assert image_tags(plan(), Build(Path("b1")))["gpukiln:kubernetes"] == "none"


@pytest.mark.usefixtures("debian")
def test_what_nobody_judged_can_not_be_selected() -> None:
    tags = image_tags(plan(), Build(Path("b1")))
    assert "gpukiln:image" not in tags
    assert (tags["gpukiln:recipe"], tags["gpukiln:build-id"]) == ("eks-gpu", "b1")


@pytest.mark.usefixtures("debian")
def test_the_same_twice_is_the_same_digest_and_a_component_makes_another() -> None:
    assert plan().digest == plan().digest
    assert plan().digest != plan(probes=ONLINE).digest


def test_the_table_says_what_matters(debian: str) -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(plan_table(plan()))
    text = console.export_text()
    for wanted in (
        debian,
        "535.309.01-0+deb12u1",
        "left out",
        "no route",
        "end of life on 2026-06-01",
        "580",
    ):
        assert wanted in text


@pytest.mark.usefixtures("debian")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"instance_types": ["p5en.48xlarge"]}, "does not know the H200"),
        ({"instance_types": ["p5.48xlarge"]}, "Debian packages no fabric manager"),
        ({"instance_types": ["g6f.xlarge", "g4ad.xlarge"]}, r"GRID driver can drive \(and 1 more\)"),
        ({"overrides": ["nvidia_container_toolkit.version=1.17.8"]}, "CVE-2026-24260"),
        ({"overrides": ["cuda.version=13.0"]}, "CUDA 13.0 needs driver 580"),
        ({"base": "eks-al2023-nvidia"}, "comes with driver 580; wanted: 535"),
        ({"base": "eks-ubuntu-22.04", "overrides": ["kubernetes.version=1.29"]}, "EKS ended Kubernetes 1.29"),
        ({"overrides": ["nvidia_driver.branch=580"]}, "mirror has nvidia-kernel-dkms 535"),
    ],
)
def test_what_can_never_work_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        plan(**more)


def test_amazon_linux_is_planned_by_what_nvidias_repository_has(debian: str) -> None:
    name = "amazon-eks-node-al2023-x86_64-standard-1.34-v20261101"
    cloud = MotoCloud("aws")
    image = cloud.client("ec2").register_image(Name=name)["ImageId"]
    assert image != debian
    streams = {"nvidia-driver": frozenset({"580-dkms", "580-open"})}
    versions = {
        "kmod-nvidia-latest-dkms": frozenset({"580.178.04-1.amzn2023"}),
        "nvidia-container-toolkit": frozenset({"1.19.1-1"}),
    }
    probes = Probes(ONLINE.unreachable, ONLINE.candidates, lambda _: RpmMetadata(versions, streams))
    made = plan(cloud, probes=probes, base="eks-al2023", overrides=["nvidia_driver.branch=580"])
    assert (made.base.id, made.base.ssh_user) == (image, "ec2-user")
    assert made.inputs["component nvidia_driver"] == "install 580.178.04-1.amzn2023"
    assert made.component("nvtop").status == "left_out"
    with pytest.raises(IncompatibleError, match="580-open of nvidia-driver; wanted: 535-dkms"):
        plan(cloud, probes=probes, base="eks-al2023")


def test_a_refusal_asks_nobody() -> None:
    class Silent(MotoCloud):
        def client(self, service: str) -> Any:
            raise AssertionError(service)

    with pytest.raises(IncompatibleError) as caught:
        plan(Silent(), instance_types=["g6f.xlarge", "p2.xlarge"])
    assert len(caught.value.details) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"instance_types": ["g4dn.xlage"]}, "unknown GPU instance type 'g4dn.xlage'"),
        ({"base": "debian12"}, "unknown base 'debian12'"),
        ({"overrides": ["nvidia_driver.brach=1"]}, "unknown key of nvidia_driver"),
    ],
)
def test_a_typo_is_a_usage_error(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**more)
    with pytest.raises(UsageError, match="unknown image 'eks-gup'"):
        make_plan("eks-gup", MotoCloud(), probes=OFFLINE)


NOBLE = "ubuntu-eks/k8s_1.34/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20261101"
JAMMY = "ubuntu-eks/k8s_1.34/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-20261101"


@pytest.mark.usefixtures("debian")
def test_on_aws_a_source_must_be_reachable() -> None:
    MotoCloud().client("ec2").register_image(Name=NOBLE)
    made = plan(MotoCloud("aws"), probes=ONLINE)
    assert made.component("kubernetes").status == "preinstalled"
    assert made.kubernetes == "1.34"
    with pytest.raises(UnavailableError, match="no route"):
        plan(MotoCloud("aws"))


@pytest.mark.usefixtures("debian")
def test_a_base_without_the_branch_gets_the_one_that_it_has() -> None:
    for name in (NOBLE, JAMMY):
        MotoCloud().client("ec2").register_image(Name=name)
    noble, jammy = (
        plan(MotoCloud("aws"), probes=ONLINE, base=f"eks-ubuntu-{release}") for release in ("24.04", "22.04")
    )
    driver = noble.component("nvidia_driver")
    assert (driver.version, driver.branch) == ("580.173.02", 580)
    assert "no 535 any more" in driver.reason
    assert noble.resolved["nvidia_driver"]["branch"] == 580
    assert jammy.component("nvidia_driver").branch == 535
    rules = {made.base.name: [warning.id for warning in made.warnings] for made in (noble, jammy)}
    assert rules["eks-ubuntu-24.04"] == ["kubernetes-ends-soon"]
    assert "kubernetes-not-seen" in rules["eks-ubuntu-22.04"]
    by_hand = plan(
        MotoCloud("aws"), probes=ONLINE, base="eks-ubuntu-24.04", overrides=["nvidia_driver.branch=535"]
    )
    assert by_hand.component("nvidia_driver").branch == 535


def test_the_default_on_aws_was_seen_for_the_kubernetes_that_is_built() -> None:
    assert (
        check_published("x", base(default_base("aws")), load_components()["kubernetes"].version or "") == []
    )
    assert check_published("x", base("eks-ubuntu-22.04"), "1.34")[0].remedy.startswith(
        "--base eks-ubuntu-24.04"
    )


def test_what_each_base_can_carry() -> None:
    rows = {row["base"]: row for row in base_rows(load_components())}
    assert rows["eks-ubuntu-24.04"]["driver"] == "580.173.02"
    assert rows["eks-al2023-nvidia"]["driver"] == "brings 580"
    assert (rows["debian-12"]["driver"], rows["debian-12"]["any_branch"]) == ("535.309.01", False)


def test_regions() -> None:
    assert check_region("us-west-2") == "us-west-2"
    assert check_region("us-gov-west-1") == "us-gov-west-1"
    with pytest.raises(UsageError) as caught:
        check_region("us-wset-2")
    assert "us-west-2" in caught.value.hint


def test_the_commit_says_when_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.test"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    assert git_commit(tmp_path / "nowhere") is None
    git("init")
    assert git_commit(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    commit = git_commit(tmp_path)
    assert commit
    assert len(commit) == 40
    (tmp_path / "a").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.usefixtures("debian")
def test_a_pin_that_nobody_looked_at_in_time_is_a_warning() -> None:
    late = make_plan("eks-gpu", MotoCloud(), probes=OFFLINE, now=datetime(2027, 6, 1, tzinfo=UTC))
    overdue = [warning.message for warning in late.warnings if warning.id == "review-overdue"]
    assert "nvidia_driver was to be reviewed by 2026-12-15" in overdue
    assert "kernel" in late.inputs
