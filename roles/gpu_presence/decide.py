"""The probe and the unit by which units know whether there is a GPU: a part of other roles' plans."""

from ..plan import Looks, Node, Plan, Role, shared

PROBE = "/usr/local/sbin/nvidia-gpu-present"
UNIT = "nvidia-gpu-present.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
LOOKS: Looks = {"files": [PROBE, UNIT_FILE], "units": [UNIT], "gpus": True}


def have(plan: Plan, node: Node) -> None:
    """Add the probe and its unit to a plan whose look has `LOOKS`."""
    probe = shared("scripts/bootstrap/nvidia-gpu-present.sh")
    unit = shared("roles/gpu_presence/files/nvidia-gpu-present.service")
    plan.write(node, PROBE, probe, mode="0755")
    plan.write(node, UNIT_FILE, unit)
    plan.enable_unit(node, UNIT)


def run(plan: Plan, node: Node) -> bool:
    """Have it look now, and say whether there is a GPU."""
    if node["units"][UNIT]["there"]:
        plan.start_unit(node, UNIT)
    return bool(node["pci"]["gpus"])


def look(_role: Role) -> Looks:
    return LOOKS


def decide(_role: Role, node: Node) -> Plan:
    plan = Plan()
    have(plan, node)
    return plan


def look_runtime(_role: Role) -> Looks:
    return LOOKS


def decide_runtime(_role: Role, node: Node) -> Plan:
    plan = Plan()
    run(plan, node)
    return plan
