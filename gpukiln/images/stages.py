"""Stages: snapshots of a machine while it is baked, from which a later bake with the same inputs starts.

A stage is a private AMI, made without a reboot when the roles of the stage have ended. Its key covers all
inputs of the stages up to it, so that a change in a late role starts from the last stage before that role.
The results that belong to one build (the record, the hygiene) are in no stage, nor are roles that run in
about the time that keeping a stage takes.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from rich.text import Text

from gpukiln.catalog.load import ROOT
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import (
    BAKED_STAGE_TAG,
    OLD_BAKED_STAGE_TAG,
    RECIPE_TAG,
    STAGE_BUILD_TAG,
    STAGE_KEY_TAG,
)
from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.images.builds import Build, StageUse
from gpukiln.images.digest import PROGRAM, canonical
from gpukiln.images.plan import ImagePlan
from gpukiln.instances.tags import remove_image, tag_specifications, tags_of
from gpukiln.progress import Progress
from gpukiln.project import ORDERS
from gpukiln.typed import unknown

STAGES: dict[str, tuple[str, ...]] = {
    "driver": (),
    "runtime": (
        *("role container_runtime", "role nvidia_container_toolkit"),
        *("component docker", "component containerd", "component nvidia_container_toolkit"),
    ),
}
"""In the order of ansible/image.yml, each with the inputs that only it and later stages need. Inputs that are
named nowhere (the base, the tools, the template, shared roles) belong to the first stage."""
UNSTAGED = (
    *(
        "role nvtop",
        "role docker_compose",
        "role dcgm",
        "role kasmvnc",
        "role gpu_bootstrap",
        "role gpu_tools",
        "role ci_runner",
        "role image_record",
    ),
    *("role image_hygiene", "component nvtop", "component dcgm", "component dcgm_exporter"),
    *("component docker_compose", "component kasmvnc"),
    *("file scripts/bootstrap", "file scripts/hooks", PROGRAM),
)
"""Roles that run after the last stage, in about the time that keeping another stage takes."""
FOLDER = "stages"
CHOICES = ("on", "off")
KEPT = 2  # of each stage of an image


def stage_keys(inputs: Mapping[str, str]) -> dict[str, str]:
    """Digests of the inputs of each stage and those before it.

    Args:
        inputs: Of a plan: everything that can change the image, by name.

    Returns:
        Per stage, in order, 64 hexadecimal digits.
    """
    first = next(iter(STAGES))
    owned: dict[str, dict[str, str]] = {stage: {} for stage in STAGES}
    # A project's roles that run after gpukiln's are in no stage; all others of its folder are in the first.
    before, after = (inputs.get(f"roles {order}", "").split(", ") for order in ORDERS)
    unstaged = {*UNSTAGED, "roles after", *(f"role {name}" for name in after if name not in before)}
    for name, value in inputs.items():
        what = _owner(name)
        # They run after the last stage, so their inputs invalidate none.
        if what in unstaged:
            continue
        stage = next((stage for stage, owners in STAGES.items() if what in owners), first)
        owned[stage][name] = value
    keys: dict[str, str] = {}
    key = ""
    for stage, own in owned.items():
        # Each key includes the one before, so an early change invalidates all later stages.
        key = hashlib.sha256(canonical([key, stage, own]).encode()).hexdigest()
        keys[stage] = key
    return keys


def _owner(name: str) -> str:
    """The role, component or folder that an input belongs to.

    >>> _owner("file roles/nvtop/tasks/main.yml")
    'role nvtop'
    >>> _owner("recipe dcgm")
    'component dcgm'
    """
    kind, _, what = name.partition(" ")
    if kind == "recipe":
        return f"component {what}"
    if kind == "file":
        top, _, rest = what.partition("/")
        second = rest.partition("/")[0]
        return f"role {second}" if top == "roles" else f"file {top}/{second}"
    return name


@dataclass(frozen=True)
class Stages:
    """The stages of one build.

    Args:
        image: The image's name.
        keys: What `stage_keys` gave.
        cloud: Where they are.
    """

    image: str
    keys: dict[str, str]
    cloud: Cloud

    def newest(self) -> StageUse | None:
        """The last existing stage with the same key; None where there is none.

        Raises:
            UnavailableError: The cloud did not answer.
        """
        image_by_key: dict[str, dict[str, Any]] = {}
        for image in self._list({"state": ["available"], f"tag:{STAGE_KEY_TAG}": list(self.keys.values())}):
            image_by_key[tags_of(image)[STAGE_KEY_TAG]] = image
        # The latest stage skips the most roles.
        for stage, key in reversed(self.keys.items()):
            if key in image_by_key:
                image = image_by_key[key]
                return StageUse(stage, image["ImageId"], tags_of(image)[STAGE_BUILD_TAG])
        return None

    def tidy(self) -> None:
        """Remove all but the newest of each stage of the image.

        Raises:
            UnavailableError: The cloud refused.
        """
        seen: Counter[str] = Counter()
        for image in reversed(self._list({})):
            # A pending stage counts: it becomes available.
            usable = image["State"] != "failed"
            tags = tags_of(image)
            # Stages of before the tag was renamed still exist and cost money.
            stage = tags.get(BAKED_STAGE_TAG) or tags[OLD_BAKED_STAGE_TAG]
            seen[stage] += usable
            if seen[stage] > KEPT or not usable:
                remove_image(self.cloud, image["ImageId"])

    def drop(self, build_id: str, used: StageUse | None) -> None:
        """Remove the stages that a build made and the one it started from: its image failed verification.

        Args:
            used: The stage that it started from.

        Raises:
            UnavailableError: The cloud refused.
        """
        for image in self._list({}):
            if tags_of(image)[STAGE_BUILD_TAG] == build_id or (used and image["ImageId"] == used.image_id):
                remove_image(self.cloud, image["ImageId"])

    def _list(self, filters: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        """Every stage of the image, the oldest first."""
        named = {f"tag:{RECIPE_TAG}": [self.image], "tag-key": [STAGE_KEY_TAG], **filters}
        with explain_aws_errors("look for stages"):
            images = calls.images(self.cloud.client("ec2"), named, Owners=["self"])
        # CreationDate has seconds; build ids begin with the time and differ within a second
        return sorted(images, key=lambda image: (str(image["CreationDate"]), tags_of(image)[STAGE_BUILD_TAG]))


def stages_enabled(cloud: Cloud, choice: str) -> bool:
    """Whether a build starts from stages, and keeps new ones.

    Args:
        choice: `on` or `off`, as typed; empty: the cloud's default.

    Raises:
        UsageError: The choice is another word.
    """
    if choice and choice not in CHOICES:
        raise unknown("choice of --stages", choice, CHOICES)
    return choice == "on" if choice else cloud.keeps_stages


def stages_of(plan: ImagePlan, cloud: Cloud) -> Stages:
    """The stages that a build of a plan may start from."""
    return Stages(plan.image, stage_keys(plan.inputs), cloud)


@cache
def waiting_task() -> str:
    """The beginning of the name of the task that waits until a stage is kept, from ansible/stage.yml."""
    tasks = yaml.safe_load((ROOT / "ansible" / "stage.yml").read_text(encoding="utf-8"))
    [name] = [task["name"] for task in tasks if "ansible.builtin.wait_for" in task]
    return str(name).partition("{{")[0]


class StageKeeper:
    """Keeps stages while Ansible runs, which waits for a file that this class writes when a stage is kept.

    Args:
        build: Its folder; the files go there.
        instance: Tags of the machine that is baked.
        progress: Shows which stages were not kept, and why.
    """

    def __init__(self, stages: Stages, build: Build, instance: Mapping[str, str], progress: Progress) -> None:
        self._stages, self._build, self._instance, self._progress = stages, build, instance, progress
        self.folder = build.folder / FOLDER
        self.folder.mkdir()

    def on_task(self, task: str) -> None:
        """Keep a stage when its task starts; a failure to keep one does not fail the build.

        Args:
            task: The name of the task that starts.
        """
        # Other tasks, and stages of a newer ansible/stage.yml, are ignored.
        stage = task.removeprefix(waiting_task())
        if stage == task or stage not in self._stages.keys:
            return
        try:
            with explain_aws_errors(f"keep the stage {stage}"):
                self._keep(stage)
        # Any error: without the file below Ansible would wait for its whole timeout.
        except Exception as error:
            message = error.message if isinstance(error, GpukilnError) else repr(error)
            self._progress.show(Text(f"{message}; the build goes on without it"))
        finally:
            with contextlib.suppress(OSError):  # Ansible's task then reports its timeout
                (self.folder / stage).touch()

    def _keep(self, stage: str) -> None:
        ec2 = self._stages.cloud.client("ec2")
        tagged = {f"tag:{name}": [value] for name, value in self._instance.items()}
        instances = calls.instances(ec2, {**tagged, "instance-state-name": ["running"]})
        machines = [machine["InstanceId"] for machine in instances]
        # More than one machine with the build's tags would make it unclear what is kept.
        if len(machines) != 1:
            raise UnavailableError(f"can't keep the stage {stage}: found {len(machines)} machines, wanted 1")
        tags = {
            RECIPE_TAG: self._stages.image,
            BAKED_STAGE_TAG: stage,
            STAGE_KEY_TAG: self._stages.keys[stage],
            STAGE_BUILD_TAG: self._build.id,
        }
        ec2.create_image(
            InstanceId=machines[0],
            Name=f"gpukiln-stage-{stage}-{self._build.id}",
            Description=f"{self._stages.image} while it was baked, after the stage {stage}",
            NoReboot=True,  # Ansible's connection stays; ansible/stage.yml has written all data to the disk
            TagSpecifications=tag_specifications(tags, "image", "snapshot"),
        )


def stage_variables(keeper: StageKeeper | None, stage: StageUse | None) -> dict[str, Any]:
    """Variables of Ansible: the folder of the files that it waits for, and the stages that are done.

    Args:
        keeper: Keeps stages, or None.
        stage: The stage that the bake starts from, or None.
    """
    if keeper is None:
        return {}
    names = list(STAGES)
    done = names[: names.index(stage.stage) + 1] if stage else []
    # The package lists in the stage may be older than the plan, whose versions they might lack.
    fresh = {"apt_sources_lists_valid_s": 0} if stage else {}
    return {"gpukiln_stages_dir": str(keeper.folder), "gpukiln_stages_done": done, **fresh}


def stage_line(use: StageUse) -> str:
    """The stage that a bake starts from, in words."""
    return f"starts from the stage {use.stage} of build {use.build_id} ({use.image_id})"
