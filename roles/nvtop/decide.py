"""Whether nvtop is to be installed, and where it comes from."""

from ..plan import Looks, Node, Plan, Role, missing

ARCHIVES = {"Debian": ["contrib"], "Ubuntu": ["universe"]}
"""Components of the archives that have it."""


def look(role: Role) -> Looks:
    return {"packages": role["packages"]} if _source(role) else {}


def decide(role: Role, node: Node) -> Plan:
    """`do`: `source` is `archive` or `repository`, `components` the archive's, `left_out` a reason."""
    plan = Plan()
    source = _source(role)
    if not source:
        # Amazon Linux has no package of it, and EPEL is not built for it.
        plan.do["left_out"] = (
            f"nvtop is left out: found no package of it for {role.system.distribution} {role.system.version}."
            " nvidia-smi shows the same figures."
        )
        return plan
    plan.do = {"source": source, "components": ARCHIVES.get(role.system.distribution, [])}
    plan.install(missing(node, role["packages"]))
    return plan


def _source(role: Role) -> str:
    if role.system.distribution in ARCHIVES:
        return "archive"
    repository = role["repository"].get("rpm", {})
    return "repository" if role.system.distribution.lower() in repository.get("distributions", []) else ""
