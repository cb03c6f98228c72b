"""The bootstrap's script, its settings and its unit."""

import json
import re
from typing import Any

from ..gpu_presence import decide as gpu_presence
from ..plan import Looks, Node, Plan, Role, runs, shared, together

SCRIPTS = {
    "/usr/local/sbin/eks-gpu-bootstrap": "eks-gpu-bootstrap.sh",
    "/usr/local/sbin/nvidia-device-nodes": "nvidia-device-nodes.sh",
}
FOLDER = "/etc/gpukiln"
SETTINGS, EXPECTED = f"{FOLDER}/bootstrap.env", f"{FOLDER}/expected.json"
UNIT = "gpukiln-bootstrap.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
READY = "Prepare the node again"
# What the kubelet takes as the name and the value of a label.
LABEL_NAME = r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?"


def look(_role: Role) -> Looks:
    own = {"files": [*SCRIPTS, SETTINGS, EXPECTED, UNIT_FILE], "folders": [FOLDER], "units": [UNIT]}
    return together(gpu_presence.LOOKS, own)


def decide(role: Role, node: Node) -> Plan:
    plan = Plan()
    if reason := _refusal(role):
        return plan.refuse(reason)
    gpu_presence.have(plan, node)
    ready = READY if runs(node, UNIT) else ""
    for path, name in SCRIPTS.items():
        text = shared(f"scripts/bootstrap/{name}")
        plan.write(node, path, text, mode="0755", notify=ready)
    if not node["folders"][FOLDER]:
        plan.folders[FOLDER] = "0755"
    labels = ",".join(f"{name}={value}" for name, value in sorted(role["node_labels"].items()))
    settings = role.template("bootstrap.env.j2", wait_s=role["wait_s"], labels=labels)
    plan.write(node, SETTINGS, settings, notify=ready)
    expected = {"bandwidth_share": float(role["bandwidth_share"]), "mig": role["mig"]}
    plan.write(node, EXPECTED, json.dumps(expected, indent=4) + "\n")
    plan.write(node, UNIT_FILE, role.file("gpukiln-bootstrap.service"), notify=ready)
    plan.enable_unit(node, UNIT)
    return plan


def look_runtime(role: Role) -> Looks:
    return look(role)


def decide_runtime(_role: Role, node: Node) -> Plan:
    plan = Plan()
    # In a first run in check mode the unit is not there yet.
    if node["units"][UNIT]["there"]:
        plan.start_unit(node, UNIT)
    return plan


def _refusal(role: Role) -> str:
    for name, value in role["node_labels"].items():
        if not _is_label(name, value):
            return (
                f"Found the node label {name}={value}, with which no kubelet starts. Wanted at most"
                " 63 letters, digits, dashes, dots and underscores, and no name below kubernetes.io or k8s.io"
                " but node.kubernetes.io/ and kubelet.kubernetes.io/. Correct gpu_bootstrap_node_labels."
            )
    share = role["bandwidth_share"]
    if not 0 < float(share) <= 1:
        return (
            f"Found gpu_bootstrap_bandwidth_share {share}, wanted above 0 and at most 1."
            " It is a share of the link's theoretical rate."
        )
    return ""


def _is_label(name: str, value: Any) -> bool:
    own = re.search(r"(^|\.)(kubernetes|k8s)\.io/", name)
    allowed = not own or re.search(r"(^|\.)(kubelet|node)\.kubernetes\.io/", name)
    return bool(re.fullmatch(LABEL_NAME, name) and allowed and re.fullmatch(LABEL_VALUE, str(value)))
