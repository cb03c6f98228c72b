"""Stages of a bake: what their keys cover, and which ones are found, kept and removed."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import EC2Backend, ec2_backends
from rich.console import Console

from gpukiln.errors import BusyError, GpukilnError, UnavailableError, UsageError
from gpukiln.gpus import zipapp
from gpukiln.images.bake import BakeResources
from gpukiln.images.builds import Bake, Build, Builds, StageUse
from gpukiln.images.digest import PROGRAM
from gpukiln.images.stages import (
    KEPT,
    STAGES,
    UNSTAGED,
    StageKeeper,
    Stages,
    stage_keys,
    stage_variables,
    stages_enabled,
    waiting_task,
)
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.instances.tags import remove_image
from gpukiln.pipeline import steps
from gpukiln.progress import Progress
from gpukiln.verify.verdict import Verdict
from tests.support.plans import BAKE, CHECK, VERDICT, plan

ROOT = Path(__file__).resolve().parents[2]
INPUTS = {
    "base": "debian-12 ami-1",
    "kernel": "6.1.1",
    "component nvidia_driver": "install 535",
    "component docker": "install 20.10",
    "recipe nvtop": "{}",
    "tool packer": "1.6.6",
    "file ansible/image.yml": "a",
    "file scripts/bootstrap/eks-gpu-bootstrap.sh": "b",
    "file roles/packages/tasks/main.yml": "c",
    "file roles/nvidia_driver/tasks/main.yml": "d",
    "file roles/container_runtime/tasks/main.yml": "e",
    "file roles/nvtop/tasks/main.yml": "f",
    "file roles/image_hygiene/files/image-hygiene.sh": "g",
}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("base", []),
        ("kernel", []),
        ("tool packer", []),
        ("component nvidia_driver", []),
        ("file ansible/image.yml", []),
        ("file roles/packages/tasks/main.yml", []),
        ("file roles/nvidia_driver/tasks/main.yml", []),
        ("file roles/container_runtime/tasks/main.yml", ["driver"]),
        ("component docker", ["driver"]),
        ("file roles/nvtop/tasks/main.yml", list(STAGES)),
        ("recipe nvtop", list(STAGES)),
        ("file scripts/bootstrap/eks-gpu-bootstrap.sh", list(STAGES)),
        ("file roles/image_hygiene/files/image-hygiene.sh", list(STAGES)),
    ],
)
def test_a_change_leaves_the_stages_before_it(name: str, kept: list[str]) -> None:
    before, after = stage_keys(INPUTS), stage_keys({**INPUTS, name: "changed"})
    assert [stage for stage in STAGES if before[stage] == after[stage]] == kept


OWN = {
    "roles before": "site_proxy",
    "roles after": "site_agent, site_users",
    "file roles/site_proxy/tasks/main.yml": "h",
    "file roles/site_agent/tasks/main.yml": "i",
    "file roles/site_library/tasks/main.yml": "j",
}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("roles before", []),
        ("roles after", list(STAGES)),
        ("file roles/site_proxy/tasks/main.yml", []),
        ("file roles/site_agent/tasks/main.yml", list(STAGES)),
        ("file roles/site_library/tasks/main.yml", []),  # any role may include it
    ],
)
def test_roles_of_a_project_that_run_last_are_in_no_stage(name: str, kept: list[str]) -> None:
    changed = ", ".join(reversed(OWN[name].split(", "))) + "x" * ("," not in OWN[name])
    before, after = stage_keys({**INPUTS, **OWN}), stage_keys({**INPUTS, **OWN, name: changed})
    assert [stage for stage in STAGES if before[stage] == after[stage]] == kept


def test_the_playbook_runs_a_projects_roles_around_the_shipped_ones() -> None:
    [play] = yaml.safe_load((ROOT / "ansible/image.yml").read_text())
    loops = [str(task.get("loop", "")).strip("{} ") for task in play["tasks"]]
    names = [task["name"] for task in play["tasks"]]
    first, last = loops.index("gpukiln_roles_before"), loops.index("gpukiln_roles_after")
    assert first < names.index("Include nvidia_driver")
    assert play["tasks"][first]["when"] == "'driver' not in gpukiln_stages_done", "a stage has them already"
    assert names.index("Include gpu_tools") < last < names.index("Include image_record")
    assert "when" not in play["tasks"][last]


def roles_of_the_playbook() -> dict[str, str]:
    """Per role of ansible/image.yml its stage, in the order in which they run; empty: in none."""
    [play] = yaml.safe_load((ROOT / "ansible/image.yml").read_text())
    found = {}
    for task in play["tasks"]:
        role = task.get("ansible.builtin.include_role", {}).get("name")
        if role and "{{" not in role:  # those of a project have a test of their own
            found[role] = "".join(
                re.findall(r"'(\w+)' not in gpukiln_stages_done", str(task.get("when", "")))
            )
    return found


def included_by(role: str) -> set[str]:
    texts = [
        file.read_text() for file in (ROOT / "roles" / role).rglob("*.yml") if "molecule" not in file.parts
    ]
    names = {name for text in texts for name in re.findall(r"(?:include|import)_role:\s+name: (\w+)", text)}
    meta = ROOT / "roles" / role / "meta/main.yml"
    names |= {str(one["role"]) for one in yaml.safe_load(meta.read_text()).get("dependencies") or []}
    for name in names - {role}:
        names = names | included_by(name)
    return names


def stage_of_role(role: str) -> str:
    first = next(iter(STAGES))
    return next((stage for stage, owned in STAGES.items() if f"role {role}" in owned), first)


def test_the_playbook_runs_each_role_in_the_stage_whose_key_covers_it() -> None:
    stages = list(STAGES)
    roles = roles_of_the_playbook()
    assert len(roles) > 7
    for role, stage in roles.items():
        if not stage:
            assert f"role {role}" in UNSTAGED, f"no stage's key covers {role}, and every bake must run it"
            continue
        assert stage_of_role(role) == stage
        for other in included_by(role):
            assert stages.index(stage_of_role(other)) <= stages.index(stage), f"{role} runs {other}"
    ordered = [stages.index(stage) if stage else len(stages) for stage in roles.values()]
    assert ordered == sorted(ordered)


def test_every_name_of_a_stage_is_there() -> None:
    for owned in (*STAGES.values(), UNSTAGED):
        for name in owned:
            kind, _, what = name.partition(" ")
            if kind == "role":
                assert (ROOT / "roles" / what).is_dir(), name
            elif kind == "file":
                assert (ROOT / what).exists(), name
            elif name == PROGRAM:
                assert what == zipapp.PROGRAM
            else:
                assert what in yaml.safe_load((ROOT / "components.yaml").read_text())["components"], name


@dataclass
class OneRegion:
    """A cloud of moto's."""

    keeps_stages: bool = True
    name: str = "aws"
    region: str = "us-west-2"
    ssh_cidr: str = "192.0.2.1/32"

    clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = boto3.client(service, region_name="us-west-2")
        return self.clients[service]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    create_image = EC2Backend.create_image

    def of_images(self: Any, *args: str, tag_specifications: list[dict[str, Any]]) -> Any:
        """Moto's own refuses tags of the snapshot, which the embedded cloud gives."""
        images = [one for one in tag_specifications if one["ResourceType"] == "image"]
        return create_image(self, *args, tag_specifications=images)

    monkeypatch.setattr(EC2Backend, "create_image", of_images)
    with mock_aws():
        yield OneRegion()


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


def bake(cloud: Any, folder: Path, number: int, said: io.StringIO, *stages: str, key: str = "k") -> Build:
    """Keep stages as a bake does, of a machine that runs."""
    build = Build(folder / f"20260101-00000{number}-eks-gpu-0000")
    build.folder.mkdir()
    keep(cloud, build, said, *stages, key=key)
    return build


def keep(cloud: Any, build: Build, said: io.StringIO, *stages: str, key: str = "k") -> None:
    ec2 = cloud.client("ec2")
    image = next(iter(ec2_backends[DEFAULT_ACCOUNT_ID]["us-west-2"].amis))
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "gpukiln:build", "Value": build.id}]}]
    ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, TagSpecifications=tags)
    keeper = StageKeeper(
        of(cloud, key),
        build,
        {"gpukiln:build": build.id},
        quiet(said),
    )
    keeper.on_task("nvtop : Install")
    for stage in stages:
        keeper.on_task(f"{waiting_task()}{stage}")


def of(cloud: Any, key: str) -> Stages:
    return Stages("eks-gpu", {stage: f"{key}-{stage}" for stage in STAGES}, cloud)


def quiet(said: io.StringIO) -> Progress:
    return Progress(console=Console(file=said, width=200))


def there(cloud: Any) -> list[str]:
    images = cloud.client("ec2").describe_images(Owners=["self"])["Images"]
    names = [image["Name"].removeprefix("gpukiln-stage-") for image in images]
    return sorted(name for name in names if name.partition("-")[0] in STAGES)


def test_the_last_stage_with_the_same_beginning_is_found(
    cloud: Any, tmp_path: Path, said: io.StringIO
) -> None:
    assert of(cloud, "k").newest() is None
    build = bake(cloud, tmp_path, 1, said, "driver", "runtime")
    found = of(cloud, "k").newest()
    assert found is not None
    assert (found.stage, found.build_id) == ("runtime", build.id)
    assert of(cloud, "other").newest() is None
    changed = Stages("eks-gpu", {**of(cloud, "k").keys, "runtime": "changed"}, cloud).newest()
    assert changed is not None
    assert changed.stage == "driver"
    assert Stages("other-image", of(cloud, "k").keys, cloud).newest() is None


def test_ansible_goes_on_when_a_stage_was_kept_and_when_it_could_not_be(
    cloud: Any, tmp_path: Path, said: io.StringIO
) -> None:
    build = bake(cloud, tmp_path, 1, said, "driver")
    assert [file.name for file in (build.folder / "stages").iterdir()] == ["driver"]
    [kept] = cloud.client("ec2").describe_images(ImageIds=[image_of(cloud, build)])["Images"]
    keys = {tag["Key"]: tag["Value"] for tag in kept["Tags"]}
    assert keys["gpukiln:recipe"] == "eks-gpu"
    assert keys["gpukiln:stage-name"] == "driver"
    assert "gpukiln:stage" not in keys  # of a workspace's machine
    assert "gpukiln:image" not in keys  # a selector would launch what was baked by half
    assert there(cloud) == [f"driver-{build.id}"]
    keeper = StageKeeper(
        of(cloud, "k"),
        Build(tmp_path),
        {"gpukiln:build": build.id},
        quiet(said),
    )
    keeper.on_task(f"{waiting_task()}runtime")  # the build's machine runs: kept
    assert len(there(cloud)) == 2
    [running] = cloud.client("ec2").describe_instances()["Reservations"]
    cloud.client("ec2").terminate_instances(InstanceIds=[running["Instances"][0]["InstanceId"]])
    keeper.on_task(f"{waiting_task()}driver")
    assert (tmp_path / "stages/driver").exists()
    assert len(there(cloud)) == 2
    assert "found 0 machines, wanted 1; the build goes on without it" in said.getvalue()


def test_the_newest_of_each_stage_stay(cloud: Any, tmp_path: Path, said: io.StringIO) -> None:
    builds = [bake(cloud, tmp_path, number, said, *STAGES, key=f"k{number}") for number in range(1, 5)]
    of(cloud, "k").tidy()
    kept = builds[-KEPT:]
    assert there(cloud) == sorted(f"{stage}-{build.id}" for build in kept for stage in STAGES)


def test_stages_with_the_tag_of_before_are_found_and_tidied(
    cloud: Any, tmp_path: Path, said: io.StringIO
) -> None:
    builds = [bake(cloud, tmp_path, number, said, "driver", key=f"k{number}") for number in range(1, 5)]
    ec2, old = cloud.client("ec2"), [image_of(cloud, build) for build in builds[:3]]
    ec2.delete_tags(Resources=old, Tags=[{"Key": "gpukiln:stage-name"}])
    ec2.create_tags(Resources=old, Tags=[{"Key": "gpukiln:stage", "Value": "driver"}])
    newest = of(cloud, "k3").newest()
    assert newest is not None
    assert newest.image_id == old[2]
    of(cloud, "k4").tidy()
    assert there(cloud) == [f"driver-{build.id}" for build in builds[-KEPT:]]


def test_a_stage_that_failed_goes_and_takes_no_good_ones_place(
    cloud: Any, tmp_path: Path, said: io.StringIO
) -> None:
    builds = [bake(cloud, tmp_path, number, said, "driver", key=f"k{number}") for number in range(1, 4)]
    ec2_backends[DEFAULT_ACCOUNT_ID]["us-west-2"].amis[image_of(cloud, builds[1])].state = "failed"
    of(cloud, "k").tidy()
    assert there(cloud) == [f"driver-{builds[0].id}", f"driver-{builds[2].id}"]


def image_of(cloud: Any, build: Build) -> str:
    images = cloud.client("ec2").describe_images(Owners=["self"])["Images"]
    return next(str(image["ImageId"]) for image in images if build.id in image["Name"])


def test_what_is_gone_already_is_no_error(cloud: Any, tmp_path: Path, said: io.StringIO) -> None:
    image_id = image_of(cloud, bake(cloud, tmp_path, 1, said, "driver"))
    for _ in range(2):
        remove_image(cloud, image_id)
        assert there(cloud) == []


FAILED = replace(VERDICT, checks=(replace(CHECK, outcome="failed"),))


@pytest.fixture
def build_from_a_stage(
    cloud: Any,
    tmp_path: Path,
    said: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[[Verdict | GpukilnError], None]:
    """A build whose machine and verification stand in; its SBOM can't be written."""
    request.getfixturevalue("debian")
    bake(cloud, tmp_path, 1, said, "driver")
    stages = of(cloud, "k")
    used = stages.newest()

    def baked(_plan: Any, _cloud: Any, build: Build, *_: Any, on_image: Callable[[Bake], None]) -> Bake:
        keep(cloud, build, said, "runtime")
        on_image(replace(BAKE, stage=used))
        return replace(BAKE, stage=used)

    def unsigned(*_: Any) -> None:
        raise UnavailableError("no SBOM")

    def build(ending: Verdict | GpukilnError) -> None:
        def judged(*_: Any, **__: Any) -> Any:
            if isinstance(ending, GpukilnError):
                raise ending
            return ending, LaunchedMachine("i-1", "g4dn.xlarge", "us-west-2a", spot=False)

        monkeypatch.setattr(steps, "verify_image", judged)
        builds = Builds(tmp_path / "builds")
        steps.build_image(plan(), cloud, builds, quiet(said), BakeResources(stages=stages))

    monkeypatch.setattr(steps, "bake", baked)
    monkeypatch.setattr(steps, "finish", lambda *_: None)
    monkeypatch.setattr(steps, "write_verdict_tags", lambda *_: None)
    monkeypatch.setattr(steps, "attest", unsigned)
    return build


@pytest.mark.parametrize(
    ("ending", "raised", "left"),
    [
        (VERDICT, "no SBOM", ["driver", "runtime"]),
        (FAILED, "no SBOM", []),
        (UnavailableError("SSH does not answer"), "SSH does not answer", []),
        (BusyError("no capacity"), "no capacity", ["driver", "runtime"]),
    ],
    ids=["proven", "failed", "does not boot", "no machine to be had"],
)
def test_stages_end_with_an_image_that_they_may_have_broken(
    cloud: Any,
    build_from_a_stage: Callable[[Verdict | GpukilnError], None],
    ending: Verdict | GpukilnError,
    raised: str,
    left: list[str],
) -> None:
    with pytest.raises(GpukilnError, match=raised):
        build_from_a_stage(ending)
    assert [name.partition("-")[0] for name in there(cloud)] == left


@pytest.mark.parametrize(
    ("ending", "raised"), [(FAILED, "no SBOM"), (UnavailableError("SSH does not answer"), "SSH")]
)
def test_stages_that_can_not_be_removed_do_not_hide_what_failed(
    build_from_a_stage: Callable[[Verdict | GpukilnError], None],
    said: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    ending: Verdict | GpukilnError,
    raised: str,
) -> None:
    def refused(*_: Any) -> None:
        raise UnavailableError("no permission to remove ami-1")

    monkeypatch.setattr(Stages, "drop", refused)
    with pytest.raises(UnavailableError, match=raised):
        build_from_a_stage(ending)
    assert "no permission to remove ami-1; with `--stages off`" in said.getvalue()


def test_what_an_image_that_was_not_proven_came_from_goes(
    cloud: Any, tmp_path: Path, said: io.StringIO
) -> None:
    other = bake(cloud, tmp_path, 1, said, "driver", key="other")
    bake(cloud, tmp_path, 2, said, "driver")
    used = of(cloud, "k").newest()
    build = bake(cloud, tmp_path, 3, said, "runtime")
    of(cloud, "k").drop(build.id, used)
    assert there(cloud) == [f"driver-{other.id}"]


def test_ansible_is_told_what_is_done(cloud: Any, tmp_path: Path, said: io.StringIO) -> None:
    assert stage_variables(None, None) == {}
    keeper = StageKeeper(of(cloud, "k"), Build(tmp_path), {}, quiet(said))
    assert stage_variables(keeper, None)["gpukiln_stages_done"] == []
    told = stage_variables(keeper, StageUse("runtime", "ami-1", "b"))
    assert told["gpukiln_stages_done"] == ["driver", "runtime"]
    assert told["apt_sources_lists_valid_s"] == 0


def test_the_choice(cloud: Any) -> None:
    assert stages_enabled(cloud, "")
    assert not stages_enabled(cloud, "off")
    cloud.keeps_stages = False
    assert not stages_enabled(cloud, "")
    assert stages_enabled(cloud, "on")
    with pytest.raises(UsageError, match=r"yes.*on"):
        stages_enabled(cloud, "yes")
