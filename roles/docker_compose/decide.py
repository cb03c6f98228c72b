"""Whether Compose is to be installed."""

from ..plan import Looks, Node, Plan, Role, missing


def look(role: Role) -> Looks:
    return {"packages": [_package(role)]} if _package(role) else {}


def decide(role: Role, node: Node) -> Plan:
    """`do`: `left_out` is a reason."""
    plan = Plan()
    if not _package(role):
        # Amazon Linux has no package of it, and EL9's archive neither.
        plan.do["left_out"] = (
            f"Compose is left out: found no package of it for {role.system.distribution}"
            f" {role.system.version}. Services of workspaces need it."
        )
        return plan
    plan.install(missing(node, [_package(role)]))
    return plan


def _package(role: Role) -> str:
    return role["packages"].get(role.system.distribution.lower()) or ""
