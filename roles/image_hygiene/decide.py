"""Whether a machine of this image will make its own host keys and let the launch's key in."""

import re

from ..plan import Looks, Node, Plan, Role

CLOUD_INIT, SETTINGS = "/usr/bin/cloud-init", "/etc/cloud/**/*.cfg"
KEEPS_KEYS = r"(?m)^\s*ssh_deletekeys:\s*(false|no|0|False|No)\b"


def look(_role: Role) -> Looks:
    return {"globs": [CLOUD_INIT], "files": [SETTINGS]}


def decide(_role: Role, node: Node) -> Plan:
    """Refuse where it would not; the script removes what it finds."""
    plan = Plan()
    keeps = [path for path, facts in node["files"].items() if re.search(KEEPS_KEYS, facts["text"])]
    cause = f"ssh_deletekeys switched off in {', '.join(keeps)}" if keeps else ""
    if not node["globs"][CLOUD_INIT]:
        cause = "no cloud-init"
    if cause:
        return plan.refuse(
            f"Found {cause}, wanted cloud-init to make host keys and to let the launch's key in: without it"
            " nobody can log in to a machine of this image."
        )
    return plan
