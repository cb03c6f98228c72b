"""Bake: Packer starts a machine from the base, Ansible configures it, Packer captures its disk."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.catalog.components import as_plain
from gpukiln.catalog.instance_types import instance_type
from gpukiln.catalog.load import ROOT
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.images.builds import Bake, Build
from gpukiln.images.machines import SshAccess, build_tags, ssh_access, tag_list
from gpukiln.images.packer import Packer, packer_version, prepare_template
from gpukiln.images.plan import Plan, chosen_components
from gpukiln.images.sources import Decision
from gpukiln.progress import Progress


def tool_versions() -> dict[str, str]:
    """Versions of the tools that build, for the plan's digest.

    Raises:
        UnavailableError: One is missing.
    """
    from importlib.metadata import version  # noqa: PLC0415 - slow to import

    return {"packer": packer_version(), "ansible-core": version("ansible-core")}


def bake(plan: Plan, cloud: Cloud, build: Build, progress: Progress) -> Bake:
    """Make the image.

    Args:
        plan: What to make.
        cloud: Where.
        build: Its folder; gets the logs and the image's own record.
        progress: Told what is being done.

    Returns:
        The image.

    Raises:
        CheckFailedError: A task of a role failed.
        UnavailableError: The cloud or a tool failed.
    """
    with progress.step("base image"):
        cloud.prepare(plan.base.id, progress.say)
    with progress.step("bake"):
        packer_folder = build.folder / "packer"
        prepare_template(ROOT / "ami" / plan.image, packer_folder)
        extra_vars = build.folder / "extra-vars.json"
        extra_vars.write_text(json.dumps(ansible_variables(plan, build), indent=2))
        events = build.folder / "events.jsonl"
        manifest = build.folder / "manifest.json"
        with ssh_access(cloud, build.id, purpose="bake", folder=build.folder) as access:
            Packer(
                packer_folder,
                packer_variables(plan, cloud, build, access, extra_vars=extra_vars, manifest=manifest),
                environment={
                    **cloud.environment(),
                    "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                    "GPUKILN_EVENTS": str(events),
                    "ANSIBLE_CALLBACKS_ENABLED": "gpukiln_events",
                },
                log=build.folder / "packer.log",
                events=events,
                say=progress.say,
            ).build()
        image_id = json.loads(manifest.read_text())["builds"][-1]["artifact_id"].split(":")[-1]
        installed = json.loads((build.folder / "image.json").read_text())
        try:
            with explain_aws_errors("finish the AMI"):
                _finish(cloud, image_id, installed)
        except BaseException:
            remove_image(cloud, image_id)  # no record would know it
            raise
    return Bake(
        image_id=image_id,
        name=image_name(plan, build),
        region=plan.region,
        kernel=installed["kernel"],
        components=installed["components"],
        packages=installed["packages"],
    )


def _finish(cloud: Cloud, image_id: str, installed: dict[str, Any]) -> None:
    ec2 = cloud.client("ec2")
    # Packer 1.6.6 has no option for it: machines from this AMI take IMDSv2 only
    ec2.modify_image_attribute(ImageId=image_id, ImdsSupport={"Value": "v2.0"})
    ec2.create_tags(Resources=[image_id], Tags=tag_list({"gpukiln:kernel": installed["kernel"]}))


def remove_image(cloud: Cloud, image_id: str) -> None:
    """Remove an AMI with its snapshots.

    Args:
        cloud: Where it is.
        image_id: The AMI.
    """
    with explain_aws_errors(f"remove {image_id}"):
        ec2 = cloud.client("ec2")
        for image in ec2.describe_images(ImageIds=[image_id])["Images"]:
            ec2.deregister_image(ImageId=image_id)
            for device in image["BlockDeviceMappings"]:
                if snapshot := device.get("Ebs", {}).get("SnapshotId"):
                    ec2.delete_snapshot(SnapshotId=snapshot)


def image_name(plan: Plan, build: Build) -> str:
    """Name of the AMI: unique, and sorted by time.

    Args:
        plan: The plan.
        build: The build.
    """
    driver = plan.component("nvidia_driver").version
    return f"gpukiln-{plan.image}-{driver}-{build.id}"


def image_tags(plan: Plan) -> dict[str, str]:
    """Tags by which an image is found and explained.

    Args:
        plan: The plan.
    """
    decided = {decision.name: decision for decision in plan.components}
    toolkit = decided.get("nvidia_container_toolkit")
    return {
        "gpukiln:image": plan.image,
        "gpukiln:digest": plan.digest,
        "gpukiln:driver": plan.component("nvidia_driver").version or "",
        "gpukiln:toolkit": _tag_of(toolkit),
        "gpukiln:base": f"{plan.base.name} {plan.base.id}",
        "gpukiln:commit": plan.git_commit or "none",
    }


def _tag_of(decision: Decision | None) -> str:
    if decision is None:
        return "none"
    return decision.version or "" if decision.status == "install" else decision.status


def packer_variables(
    plan: Plan, cloud: Cloud, build: Build, access: SshAccess, *, extra_vars: Path, manifest: Path
) -> dict[str, Any]:
    """Values of the template's variables.

    Args:
        plan: The plan.
        cloud: Where.
        build: The build.
        access: How Packer logs in.
        extra_vars: JSON file for Ansible.
        manifest: File for the result.
    """
    name, driver = image_name(plan, build), plan.component("nvidia_driver").version
    return {
        "region": plan.region,
        "source_ami": plan.base.id,
        "ami_name": name,
        "ami_description": f"{plan.image} with NVIDIA {driver} on {plan.base.name}",
        "instance_type": plan.builder_instance_type,
        "ssh_username": plan.base.ssh_user,
        "ssh_keypair_name": access.key_name,
        "ssh_private_key_file": str(access.private_key),
        "security_group_id": access.group_id,
        "subnet_id": cloud.subnet_id or "",
        "root_device": plan.base.root_device,
        "volume_size_gib": plan.volume_size_gib,
        "tags": {"Name": name, **image_tags(plan)},
        "run_tags": build_tags(build.id, "bake"),
        "playbook": str(ROOT / "ansible" / "image.yml"),
        "extra_vars_file": str(extra_vars),
        "manifest": str(manifest),
        **cloud.packer_variables(),
    }


def ansible_variables(plan: Plan, build: Build) -> dict[str, Any]:
    """What Ansible gets: the components with the plan's overrides, and the plan's decisions.

    Args:
        plan: The plan.
        build: The build.
    """
    components = as_plain(chosen_components(ROOT / "components.yaml", plan.overrides, plan.instance_types))
    machines = [instance_type(name) for name in plan.instance_types]
    return {
        "components": components,
        "gpukiln_fetch_dir": str(build.folder),
        "gpukiln_image": {
            "schema": 1,
            "image": plan.image,
            "digest": plan.digest,
            "git_commit": plan.git_commit,
            "gpus": sorted({machine.gpu for machine in machines}),
            "nvswitch": any(machine.interconnect == "nvswitch" for machine in machines),
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
