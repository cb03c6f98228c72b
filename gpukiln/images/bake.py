"""Bake: Packer starts a machine from the base, Ansible configures it, Packer captures its disk."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from gpukiln.catalog.instance_types import gpus_of
from gpukiln.catalog.load import ROOT
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import GpukilnError
from gpukiln.images.builds import Bake, Build, StageUse
from gpukiln.images.module_store import Store
from gpukiln.images.modules import MODULES, ModuleCache, ModuleUse, SigningPair
from gpukiln.images.packer import Packer, packer_version, prepare_template
from gpukiln.images.plan import Plan
from gpukiln.images.stages import StageKeeper, Stages, stage_line, stage_variables
from gpukiln.images.subject import BASE_TAG, DESKTOP_TAG, KUBERNETES_TAG, subject_of, subject_tags
from gpukiln.instances.access import SshAccess, ssh_access
from gpukiln.instances.deadline import shutdown_user_data
from gpukiln.instances.tags import BUILD_TAG, PRIVILEGED, PURPOSE_TAG, build_tags, tag_list
from gpukiln.parsing import parse_json
from gpukiln.progress import Progress
from gpukiln.sources.available import Decision


def tool_versions() -> dict[str, str]:
    """Versions of the tools that build, for the plan's digest.

    Raises:
        UnavailableError: One is missing.
    """
    from importlib.metadata import version  # noqa: PLC0415 - slow to import

    return {"packer": packer_version(), "ansible-core": version("ansible-core")}


@dataclass(frozen=True)
class Saved:
    """What a build may take from earlier ones, and keeps for later ones.

    Args:
        modules: Keeps compiled kernel modules, or None.
        stages: Snapshots of earlier bakes; None: every role runs.
        signing: What kernel modules are signed with, or None.
    """

    modules: Store | None = None
    stages: Stages | None = None
    signing: SigningPair | None = None


def bake(
    plan: Plan,
    cloud: Cloud,
    build: Build,
    progress: Progress,
    saved: Saved,
    stage: StageUse | None = None,
    *,
    made: Callable[[Bake], None] = lambda _: None,
) -> Bake:
    """Make the image.

    Args:
        plan: What to make.
        build: Its folder; gets the logs and the image's own record.
        saved: What it may take from earlier builds.
        stage: What it goes on from; None: from the base.
        made: Told the image as soon as it is there, before anything else can fail.

    Returns:
        The image.

    Raises:
        CheckFailedError: A task of a role failed.
        UnavailableError: The cloud or a tool failed.
    """
    with progress.step("base image"):
        if stage is None:
            cloud.prepare(plan.base.id, progress.say)
    cache = None if stage else module_cache(plan, build, saved)
    with progress.step("bake"):
        if stage:
            progress.show(Text(stage_line(stage)))
        if cache:
            cache.offer(lambda line: progress.show(Text(line)))
        packer_folder = build.folder / "packer"
        prepare_template(ROOT / "ami" / plan.image, packer_folder)
        extra_vars = build.folder / "extra-vars.json"
        keeper = None
        if saved.stages:
            keeper = StageKeeper(saved.stages, build, {BUILD_TAG: build.id, PURPOSE_TAG: "bake"}, progress)
        variables = {
            **ansible_variables(plan, build, cache, saved.signing),
            **stage_variables(keeper, stage),
        }
        extra_vars.write_text(json.dumps(variables, indent=2))
        events = build.folder / "events.jsonl"
        manifest = build.folder / "manifest.json"
        tell = lambda text: progress.show(Text(text))  # noqa: E731 - one line of one call
        with ssh_access(cloud, build.id, purpose="bake", say=tell) as access:
            with collected(cache, build, progress) as uses:
                Packer(
                    packer_folder,
                    packer_variables(
                        plan,
                        cloud,
                        build,
                        access,
                        stage.image_id if stage else plan.base.id,
                        extra_vars=extra_vars,
                        manifest=manifest,
                    ),
                    environment={
                        **cloud.environment(),
                        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                        "GPUKILN_EVENTS": str(events),
                        "ANSIBLE_CALLBACKS_ENABLED": "gpukiln_events",
                    },
                    log=build.folder / "packer.log",
                    events=events,
                    say=progress.say,
                    doing=progress.doing,
                    on_task=keeper.on_task if keeper else None,
                ).build()
            installed = parse_json((build.folder / "image.json").read_text())
            baked = Bake(
                image_id=parse_json(manifest.read_text())["builds"][-1]["artifact_id"].split(":")[-1],
                name=image_name(plan, build),
                region=plan.region,
                kernel=installed["kernel"],
                components=installed["components"],
                packages=installed["packages"],
                modules=tuple(uses),
                stage=stage,
            )
            made(baked)
    return baked


def module_cache(plan: Plan, build: Build, saved: Saved) -> ModuleCache | None:
    """The cache of kernel modules for a build.

    Args:
        build: The build, whose folder gets what is offered to its machine.
        saved: Where they are kept, and what they are signed with.

    Returns:
        The cache; None where there is none, or nothing to compile.
    """
    driver = plan.component("nvidia_driver")
    if saved.modules is None or driver.status != "install" or not driver.version:
        return None
    certificate = saved.signing.certificate if saved.signing else None
    return ModuleCache(saved.modules, build.folder / MODULES, driver.version, certificate)


@contextmanager
def collected(cache: ModuleCache | None, build: Build, progress: Progress) -> Iterator[list[ModuleUse]]:
    """Keep the modules that are compiled meanwhile, of a failed build too.

    Args:
        progress: Told where the modules came from.

    Yields:
        A list that gets where they came from.
    """
    uses: list[ModuleUse] = []
    try:
        yield uses
    finally:
        if cache:
            try:
                uses += cache.collect(build.id, lambda line: progress.show(Text(line)))
            except (OSError, KeyError, GpukilnError) as error:  # the next build compiles them again
                progress.show(Text(f"the compiled modules were not kept: {error}"))


def finish(cloud: Cloud, plan: Plan, baked: Bake) -> None:
    """Give an image what Packer 1.6.6 has no option for; a second time changes nothing.

    Packer would give the description before the tags, and the policy of `cloud.policy` lets only what
    is tagged be changed.

    Raises:
        UnavailableError: The cloud refused.
    """
    with explain_aws_errors("finish the AMI"):
        ec2 = cloud.client("ec2")
        # machines from this AMI take IMDSv2 only
        ec2.modify_image_attribute(ImageId=baked.image_id, ImdsSupport={"Value": "v2.0"})
        driver = plan.component("nvidia_driver").version
        described = f"{plan.image} with NVIDIA {driver} on {plan.base.name}"
        ec2.modify_image_attribute(ImageId=baked.image_id, Description={"Value": described})
        ec2.create_tags(Resources=[baked.image_id], Tags=tag_list({"gpukiln:kernel": baked.kernel}))


def image_name(plan: Plan, build: Build) -> str:
    """Name of the AMI: unique, and sorted by time."""
    driver = plan.component("nvidia_driver").version
    return f"gpukiln-{plan.image}-{driver}-{build.id}"


def image_tags(plan: Plan, build: Build) -> dict[str, str]:
    """Tags by which an image is found and explained; a verdict adds those of `gpukiln.proof.tags`."""
    decided = {decision.name: decision for decision in plan.components}
    toolkit = decided.get("nvidia_container_toolkit")
    desktop = decided.get("kasmvnc")
    return {
        **subject_tags(subject_of(plan, "", build.id)),
        KUBERNETES_TAG: plan.kubernetes,
        "gpukiln:digest": plan.digest,
        "gpukiln:toolkit": _tag_of(toolkit),
        BASE_TAG: f"{plan.base.name} {plan.base.id}",
        "gpukiln:commit": plan.git_commit or "none",
        **({DESKTOP_TAG: desktop.version or ""} if desktop and desktop.status == "install" else {}),
    }


def _tag_of(decision: Decision | None) -> str:
    if decision is None:
        return "none"
    return decision.version or "" if decision.status == "install" else decision.status


def packer_variables(
    plan: Plan,
    cloud: Cloud,
    build: Build,
    access: SshAccess,
    source_ami: str,
    *,
    extra_vars: Path,
    manifest: Path,
) -> dict[str, Any]:
    """Values of the template's variables.

    Args:
        access: How Packer logs in.
        source_ami: What the machine is started from: the base, or a stage.
        extra_vars: JSON file for Ansible.
        manifest: File for the result.
    """
    name = image_name(plan, build)
    return {
        "region": plan.region,
        "source_ami": source_ami,
        "ami_name": name,
        "instance_type": plan.builder_instance_type,
        "ssh_username": plan.base.ssh_user,
        "ssh_keypair_name": access.key_name,
        "ssh_private_key_file": str(access.private_key),
        "security_group_id": access.group_id,
        "subnet_id": cloud.subnet_id or "",
        "root_device": plan.base.root_device,
        "volume_size_gib": plan.volume_size_gib,
        "tags": {"Name": name, **image_tags(plan, build)},
        "run_tags": {**build_tags(build.id, "bake", access.deadline), **PRIVILEGED},
        "user_data": shutdown_user_data(access.deadline),
        "playbook": str(ROOT / "ansible" / "image.yml"),
        "extra_vars_file": str(extra_vars),
        "manifest": str(manifest),
        **cloud.packer_variables(),
    }


def ansible_variables(
    plan: Plan, build: Build, cache: ModuleCache | None = None, signing: SigningPair | None = None
) -> dict[str, Any]:
    """What Ansible gets: the components with the plan's overrides, and the plan's decisions.

    Args:
        cache: Of kernel modules, or None.
        signing: What they are signed with, or None.
    """
    gpus, switched = gpus_of(plan.instance_types)
    return {
        "components": plan.resolved,
        "gpukiln_fetch_dir": str(build.folder),
        **({"nvidia_driver_module_cache_dir": str(cache.folder)} if cache else {}),
        **(
            {
                "nvidia_driver_sign": True,
                "nvidia_driver_signing_key": str(signing.key),
                "nvidia_driver_signing_certificate": str(signing.certificate),
                # in memory: what a snapshot has once held can be read from it after it was deleted
                "nvidia_driver_private_key": "/run/gpukiln-signing/module.key",
            }
            if signing
            else {}
        ),
        "gpukiln_image": {
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
