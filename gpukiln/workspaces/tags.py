"""The tags by which a workspace and what belongs to it are found: the cloud is the truth."""

from __future__ import annotations

from typing import Any

from gpukiln.instances.tags import OWNER_TAG
from gpukiln.workspaces.contract import Workspace

WORKSPACE_TAG = "gpukiln:workspace"
PART_TAG = "gpukiln:part"  # machine, home, network, rights, key
MANAGED_TAG, MANAGED = "gpukiln:managed-by", "gpukiln"
# What the machine says of itself; of all its tags it may write these alone.
STAGE_TAG, HEALTH_TAG, BUSY_TAG, DRIVER_TAG = (
    "gpukiln:stage",
    "gpukiln:health",
    "gpukiln:busy",
    "gpukiln:driver",
)
OWN_TAGS = (STAGE_TAG, HEALTH_TAG, BUSY_TAG, DRIVER_TAG)
# What `up` says of the machine.
HOME_TAG = "gpukiln:home"  # the volume's id, which the machine reads from its metadata
USER_TAG, SSH_USER_TAG = "gpukiln:user", "gpukiln:ssh-user"
REACH_TAG, BY_SESSION_MANAGER = "gpukiln:reach", "session-manager"
PLAN_TAG, PRICE_TAG = "gpukiln:plan", "gpukiln:usd-hour"
IMAGE_DIGEST_TAG, IMAGE_VERDICT_TAG = "gpukiln:image-digest", "gpukiln:image-verdict"
ASKED_TAG = "gpukiln:asked"  # which options the machine was started with, see differs.py
NO_GPUS = "gpu_support="  # an entry of it: no GPU was asked for
MACHINE_TAG = "gpukiln:machine"  # on the security group: the machine that it had last


def workspace_tags(wanted: Workspace, part: str) -> dict[str, str]:
    """Tags of one thing of a workspace.

    Args:
        part: machine, home, network, rights or key.
    """
    return {
        WORKSPACE_TAG: wanted.workspace_name,
        OWNER_TAG: wanted.owner,
        PART_TAG: part,
        MANAGED_TAG: MANAGED,
        "Name": f"{wanted.workspace_name} ({part})",
    }


def filters(part: str, name: str = "") -> list[dict[str, Any]]:
    """EC2's filters for the parts of workspaces of ours; of one workspace where its name is given."""
    wanted = {MANAGED_TAG: MANAGED, PART_TAG: part} | ({WORKSPACE_TAG: name} if name else {})
    return [{"Name": f"tag:{key}", "Values": [value]} for key, value in wanted.items()]
