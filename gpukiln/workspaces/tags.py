"""The tags by which a workspace and what belongs to it are found: the cloud is the truth."""

from __future__ import annotations

from typing import Any

from gpukiln.clouds.tags import MANAGED, MANAGED_TAG, OWNER_TAG, PART_TAG, WORKSPACE_TAG
from gpukiln.workspaces.contract import Workspace


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
