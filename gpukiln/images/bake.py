"""Bake: start a machine from the base, let Packer and Ansible configure it, make an image of its disk."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from gpukiln import project, recipes
from gpukiln.catalog.instance_types import gpus_of
from gpukiln.catalog.load import ROOT
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import (
    BASE_TAG,
    BUILD_TAG,
    COMMIT_TAG,
    DESKTOP_TAG,
    DIGEST_TAG,
    KERNEL_TAG,
    KUBERNETES_TAG,
    PURPOSE_TAG,
    TOOLKIT_TAG,
)
from gpukiln.errors import GpukilnError
from gpukiln.images.builds import Bake, Build, StageUse
from gpukiln.images.module_store import ModuleStore
from gpukiln.images.modules import MODULES, ModuleCache, ModuleUse, SigningPair
from gpukiln.images.packer import Packer, packer_version, prepare_template
from gpukiln.images.plan import ImagePlan
from gpukiln.images.stages import StageKeeper, Stages, stage_line, stage_variables
from gpukiln.images.subject import subject_of, subject_tags
from gpukiln.instances.access import machine_to_bake, ssh_access
from gpukiln.instances.tags import tag_specifications
from gpukiln.parsing import parse_json
from gpukiln.progress import Progress
from gpukiln.sources.decisions import Decision
from gpukiln.verify.target import SshTarget

POLL_S = 2  # botocore's waiters poll every 15 s, which a machine of the embedded cloud need not wait
STOP_TIMEOUT_S = 900
CAPTURE_TIMEOUT_S = 7200  # a snapshot takes longer the more was written


def tool_versions() -> dict[str, str]:
    """Versions of the tools that build, for the plan's digest.

    Raises:
        UnavailableError: A tool is missing.
    """
    from importlib.metadata import version  # noqa: PLC0415 - slow to import

    return {"packer": packer_version(), "ansible-core": version("ansible-core")}


@dataclass(frozen=True)
class BakeResources:
    """What a bake reuses of earlier builds and keeps for later ones, and its signing keys.

    Args:
        modules: The store of compiled kernel modules, or None.
        stages: Snapshots of earlier bakes; None: every role runs.
        signing: The key pair that signs kernel modules, or None.
    """

    modules: ModuleStore | None = None
    stages: Stages | None = None
    signing: SigningPair | None = None


def bake(
    plan: ImagePlan,
    cloud: Cloud,
    build: Build,
    progress: Progress,
    saved: BakeResources,
    stage: StageUse | None = None,
    *,
    on_image: Callable[[Bake], None] = lambda _: None,
) -> Bake:
    """Make the image.

    Args:
        build: Its folder; gets the logs and the image's own record.
        saved: Caches and signing keys.
        stage: The stage that it starts from; None: from the base.
        on_image: Called with the image as soon as it exists, before anything else can fail.

    Returns:
        The image.

    Raises:
        CheckFailedError: A task of a role failed.
        UnavailableError: The cloud or a tool failed.
    """
    with progress.step("base image"):
        if stage is None:
            cloud.prepare(plan.base.id, progress.say)
    # A stage has its modules: nothing is compiled after it.
    cache = None if stage else module_cache(plan, build, saved)
    with progress.step("bake"):
        if stage:
            progress.show(Text(stage_line(stage)))
        if cache:
            cache.offer(lambda line: progress.show(Text(line)))
        packer_folder = build.folder / "packer"
        prepare_template(recipes.images()[plan.image], packer_folder)
        extra_vars = build.folder / "extra-vars.json"
        keeper = None
        if saved.stages:
            keeper = StageKeeper(saved.stages, build, {BUILD_TAG: build.id, PURPOSE_TAG: "bake"}, progress)
        variables = {
            **ansible_variables(plan, build, cache, saved.signing),
            **stage_variables(keeper, stage),
        }
        # A file, for the command line of a process is visible to every user.
        extra_vars.write_text(json.dumps(variables, indent=2))
        events = build.folder / "events.jsonl"
        show = lambda text: progress.show(Text(text))  # noqa: E731 - one line of one call
        with ssh_access(cloud, build.id, purpose="bake", say=show) as access:
            target = machine_to_bake(
                cloud,
                access,
                stage.image_id if stage else plan.base.id,
                build_id=build.id,
                instance_type=plan.builder_instance_type,
                user=plan.base.ssh_user,
                # the disk of the builder becomes the image's, so it has the image's size and encryption
                root_volume=root_volume(plan),
                say=progress.say,
            )
            with collecting_modules(cache, build, progress) as uses:
                Packer(
                    packer_folder,
                    packer_variables(target, extra_vars),
                    environment={
                        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                        # ansible/plugins/callback/gpukiln_events.py writes one JSON object a line into it.
                        "GPUKILN_EVENTS": str(events),
                        "ANSIBLE_CALLBACKS_ENABLED": "gpukiln_events,gpukiln_workers",
                        **project.roles_path(plan.own_roles),
                    },
                    log=build.folder / "packer.log",
                    events=events,
                    say=progress.say,
                    doing=progress.show_activity,
                    on_task=keeper.on_task if keeper else None,
                ).build()
            # The role image_record fetches it from the machine at the end of the play.
            installed = parse_json((build.folder / "image.json").read_text())
            baked = Bake(
                image_id=capture(cloud, plan, build, target.name, installed["kernel"], progress.say),
                name=image_name(plan, build),
                region=plan.region,
                kernel=installed["kernel"],
                components=installed["components"],
                packages=installed["packages"],
                modules=tuple(uses),
                stage=stage,
            )
            on_image(baked)
    return baked


def module_cache(plan: ImagePlan, build: Build, saved: BakeResources) -> ModuleCache | None:
    """The cache of kernel modules for a build.

    Args:
        build: The build, whose folder gets the entries that its machine may use.
        saved: The store and the signing keys.

    Returns:
        The cache; None where there is none, or nothing to compile.
    """
    driver = plan.component("nvidia_driver")
    # A preinstalled driver has its modules, and without a version no key can match.
    if saved.modules is None or driver.status != "install" or not driver.version:
        return None
    certificate = saved.signing.certificate if saved.signing else None
    return ModuleCache(saved.modules, build.folder / MODULES, driver.version, certificate)


@contextmanager
def collecting_modules(
    cache: ModuleCache | None, build: Build, progress: Progress
) -> Iterator[list[ModuleUse]]:
    """Keep the modules that are compiled meanwhile, of a failed build too.

    Args:
        progress: Shows where the modules came from.

    Yields:
        A list that gets their origins.
    """
    uses: list[ModuleUse] = []
    try:
        yield uses
    finally:
        if cache:
            try:
                uses += cache.collect(build.id, lambda line: progress.show(Text(line)))
            # Without them the next build only takes longer: that fails no build.
            except (OSError, KeyError, GpukilnError) as error:
                progress.show(Text(f"the compiled modules were not kept: {error}"))


def root_volume(plan: ImagePlan) -> dict[str, Any]:
    """The disk of the machine that is baked, which is the image's: an element of BlockDeviceMappings."""
    ebs = {
        "VolumeType": "gp3",
        "VolumeSize": plan.volume_size_gib,
        "Iops": 3000,  # gp3's baseline, without a charge; throughput above 125 MiB/s is charged
        "Throughput": 250,
        "Encrypted": plan.encrypted,
        # also in the image: nodes that end leave no volume behind
        "DeleteOnTermination": True,
    }
    return {"DeviceName": plan.base.root_device, "Ebs": ebs}


def capture(
    cloud: Cloud, plan: ImagePlan, build: Build, instance_id: str, kernel: str, say: Callable[[str], None]
) -> str:
    """Stop a machine and make an image of its disk; the image has its tags from its creation on.

    Packer does not make it: Packer tags images after it made them (1.6.6 and packer-plugin-amazon 1.8.2,
    common/step_create_tags.go). A role that may do so may tag any image of the account, for IAM can't
    distinguish a new image without tags from another one.

    Args:
        instance_id: The machine.
        kernel: The kernel that the image boots.
        say: Shows what it waits for.

    Returns:
        The AMI, available.

    Raises:
        UnavailableError: The cloud refused, or did not finish it.
    """
    name = image_name(plan, build)
    tags = {"Name": name, **image_tags(plan, build), KERNEL_TAG: kernel}
    with explain_aws_errors("make the image"):
        ec2 = cloud.client("ec2")
        # Stopped, so that the file system is clean in the snapshot.
        say("stopping the machine")
        ec2.stop_instances(InstanceIds=[instance_id])
        ec2.get_waiter("instance_stopped").wait(
            InstanceIds=[instance_id], WaiterConfig=_waiter_config(STOP_TIMEOUT_S)
        )
        say(f"making {name} of its disk")
        image_id = ec2.create_image(
            InstanceId=instance_id,
            Name=name,
            Description=(
                f"{plan.image} with NVIDIA {plan.component('nvidia_driver').version} on {plan.base.name}"
            ),
            TagSpecifications=tag_specifications(tags, "image", "snapshot"),
        )["ImageId"]
        ec2.get_waiter("image_available").wait(
            ImageIds=[image_id], WaiterConfig=_waiter_config(CAPTURE_TIMEOUT_S)
        )
    return str(image_id)


def _waiter_config(longest_s: int) -> dict[str, int]:
    return {"Delay": POLL_S, "MaxAttempts": longest_s // POLL_S}


def finish(cloud: Cloud, image_id: str) -> None:
    """Set what CreateImage has no argument for; a second call changes nothing.

    Raises:
        UnavailableError: The cloud refused.
    """
    with explain_aws_errors("finish the AMI"):
        # machines from this AMI take IMDSv2 only
        cloud.client("ec2").modify_image_attribute(ImageId=image_id, ImdsSupport={"Value": "v2.0"})


def image_name(plan: ImagePlan, build: Build) -> str:
    """Name of the AMI: unique, and sorted by time."""
    # AMI names are unique in a region: the build's id makes it so, and sorts by time.
    driver = plan.component("nvidia_driver").version
    return f"gpukiln-{plan.image}-{driver}-{build.id}"


def image_tags(plan: ImagePlan, build: Build) -> dict[str, str]:
    """Tags by which an image is found and described; a verdict adds those of pipeline/verdict_tags.py."""
    decided = {decision.name: decision for decision in plan.components}
    # Tags are read where no record is: by other machines, and by people in AWS's console.
    toolkit = decided.get("nvidia_container_toolkit")
    desktop = decided.get("kasmvnc")
    return {
        **subject_tags(subject_of(plan, "", build.id)),
        KUBERNETES_TAG: plan.kubernetes,
        DIGEST_TAG: plan.digest,
        TOOLKIT_TAG: _tag_of(toolkit),
        BASE_TAG: f"{plan.base.name} {plan.base.id}",
        COMMIT_TAG: plan.git_commit or "none",
        **({DESKTOP_TAG: desktop.version or ""} if desktop and desktop.status == "install" else {}),
    }


def _tag_of(decision: Decision | None) -> str:
    if decision is None:
        return "none"
    # A component that is left out, or was in the base, has its status instead of a version.
    return decision.version or "" if decision.status == "install" else decision.status


def packer_variables(target: SshTarget, extra_vars: Path) -> dict[str, Any]:
    """Values of the template's variables.

    Args:
        target: The machine.
        extra_vars: JSON file for Ansible.
    """
    return {
        "ssh_host": target.ssh.host,
        "ssh_port": target.ssh.port,
        "ssh_username": target.ssh.user,
        "ssh_private_key_file": str(target.ssh.private_key),
        "playbook": str(ROOT / "ansible" / "image.yml"),
        "extra_vars_file": str(extra_vars),
    }


def ansible_variables(
    plan: ImagePlan, build: Build, cache: ModuleCache | None = None, signing: SigningPair | None = None
) -> dict[str, Any]:
    """The variables of Ansible: the components with the plan's overrides, and the plan's decisions.

    Args:
        cache: The cache of kernel modules, or None.
        signing: The key pair that signs them, or None.
    """
    gpus, switched = gpus_of(plan.instance_types)
    return {
        "components": plan.resolved,
        "gpukiln_fetch_dir": str(build.folder),
        **project.role_variables(plan.own_roles),
        **({"nvidia_driver_module_cache_dir": str(cache.folder)} if cache else {}),
        **(
            {
                "nvidia_driver_sign": True,
                "nvidia_driver_signing_key": str(signing.key),
                "nvidia_driver_signing_certificate": str(signing.certificate),
                # In memory: a deleted file's blocks can still be read from a snapshot of the disk.
                "nvidia_driver_private_key": "/run/gpukiln-signing/module.key",
            }
            if signing
            else {}
        ),
        "gpukiln_image": {
            # of /etc/gpukiln/image.json, which readers on nodes check
            "schema": 1,
            "image": plan.image,
            "digest": plan.digest,
            "git_commit": plan.git_commit,
            "gpus": gpus,
            "nvswitch": switched,
            "built_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "base": {
                "name": plan.base.name,
                "id": plan.base.id,
                "os_family": plan.base.os_family,
                "distribution": plan.base.distribution,
                "release": plan.base.release,
            },
            "components": {
                decision.name: {
                    "version": decision.version,
                    "branch": decision.branch,
                    "status": decision.status,
                    "source": decision.source,
                    "reason": decision.reason,
                }
                for decision in plan.components
            },
        },
    }
