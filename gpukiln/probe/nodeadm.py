"""Gathers the state of nodeadm, which joins a machine of EKS's Amazon Linux to a cluster.

Its units, and their messages without a NodeConfig: awslabs/amazon-eks-ami, templates/al2023/runtime/rootfs
and nodeadm/internal/configprovider/mime.go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpukiln.probe.base import check_output, read, run, tail

UNIT = "nodeadm-config.service"  # it writes containerd's configuration and starts no unit


def nodeadm() -> dict[str, Any]:
    """The state of nodeadm: {installed, config, configured, error}.

    config: `none`, `given`, or `rehearsed`: gpukiln's own, for a cluster that does not exist. configured:
    whether nodeadm accepted it in this boot. error: its last message where it did not.
    """
    if not Path("/usr/bin/nodeadm").exists():
        return {"installed": False}
    said = read("/var/lib/cloud/instance/user-data.txt") or ""
    given = "rehearsed" if "name: gpukiln-rehearsal" in said else "given"
    show = check_output("systemctl", "show", "-p", "Result,ExecMainExitTimestampMonotonic", UNIT)
    unit = dict(row.partition("=")[::2] for row in show.splitlines())
    configured = unit["Result"] == "success" and unit["ExecMainExitTimestampMonotonic"] not in ("", "0")
    log = run("journalctl", "-b", "-u", UNIT, "-t", "nodeadm", "-o", "cat", "--no-pager", "-n", "1")
    return {
        "installed": True,
        "config": given if "node.eks.aws" in said else "none",
        "configured": configured,
        "error": "" if configured else tail(log["out"].strip(), 300),
    }
