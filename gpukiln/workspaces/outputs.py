"""What a workspace answers, from its tags alone."""

from __future__ import annotations

from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds.base import Cloud
from gpukiln.workspaces import lifecycle
from gpukiln.workspaces.contract import Outputs, Provenance, VolumeMount
from gpukiln.workspaces.lifecycle import Found

# Of the machine, where there is one.
VARIABLES = {"instance": "GPUKILN_WORKSPACE_INSTANCE", "host": "GPUKILN_WORKSPACE_HOST"}

# Those of the machine among the variables below; the others are known before there is one.
VARIABLES = {"instance": "GPUKILN_WORKSPACE_INSTANCE", "host": "GPUKILN_WORKSPACE_HOST"}


def outputs(cloud: Cloud, found: Found) -> Outputs:
    """What a workspace with a machine answers.

    Raises:
        UnavailableError: It has no machine.
    """
    machine = lifecycle.only(found)
    type_ = instance_types().get(machine.instance_type)
    has_gpus = type_ is not None and (cloud.has_gpus or machine.simulated)
    return Outputs(
        agent_endpoint=machine.address,
        runtime_env=environment(found),
        volume_mounts=tuple(
            VolumeMount(one.volume_id, f"/home/{machine.user}", one.size_gib, persistent=True)
            for one in found.homes
            if one.instance_id == machine.instance_id
        ),
        metadata=Provenance(
            image_id=machine.image_id,
            image_digest=machine.image_digest,
            verdict=machine.image_verdict,
            plan=machine.plan,
            usd_hour=machine.usd_hour or None,
            launched_at=machine.created_at,
        ),
        instance_id=machine.instance_id,
        instance_type=machine.instance_type,
        gpu_type=gpu(type_.gpu).name if type_ and has_gpus else "",
        gpu_count=type_.gpus if type_ and has_gpus else 0,
        zone=machine.zone,
        driver_version=machine.driver,
        health=machine.health or "unknown: nobody looked",
    )


def environment(found: Found) -> dict[str, str]:
    """Variables by which programs find a workspace and its machine."""
    machine = lifecycle.only(found)
    told = {VARIABLES["instance"]: machine.instance_id, VARIABLES["host"]: machine.ssh_address}
    return {**lasting(found.name, found.owner, found.region, machine.user), **told}


def lasting(name: str, owner: str, region: str, user: str) -> dict[str, str]:
    """Those that are known before there is a machine."""
    return {
        "GPUKILN_WORKSPACE": name,
        "GPUKILN_WORKSPACE_OWNER": owner,
        "GPUKILN_WORKSPACE_REGION": region,
        "GPUKILN_WORKSPACE_USER": user,
        "GPUKILN_WORKSPACE_HOME": f"/home/{user}",
    }
