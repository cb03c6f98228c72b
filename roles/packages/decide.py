"""What of the packages asked for has to be installed, moved or held."""

import re
from collections.abc import Sequence

from ..plan import Looks, Node, Plan, Role, missing, unheld, upstream
from .failure import package_failure

POLICY = "/usr/sbin/policy-rc.d"  # Debian's services start as soon as they are unpacked where it allows them


def look(role: Role) -> Looks:
    return {"packages": role["names"], "files": [POLICY] if role.system.apt else []}


def decide(role: Role, node: Node) -> Plan:
    """`do`: `install` is what apt or dnf is asked for, `hold` and `unlock` are names, `forbid` the policy."""
    plan = Plan()
    names, version = role["names"], role["version"]
    install = missing(node, names, version)
    plan.lines = [f"+{name} {version}".rstrip() for name in install]
    hold = unheld(node, names) if role["hold"] else []
    if install and version and not role.check and role.system.apt and "madison" not in node["answers"]:
        return Plan(ask={"commands": {"madison": ["apt-cache", "madison", *names]}})
    if install and not role.check:
        plan.do["install"] = _specifications(role, node)
        # A lock hides every other version from dnf.
        free = unheld(node, install)
        plan.do["unlock"] = [
            name for name in install if role["hold"] and name in node["packages"] and name not in free
        ]
    plan.do["hold"] = names if install and role["hold"] else hold
    plan.lines += [f"hold {name}" for name in hold if name not in install]
    plan.do["forbid"] = role.system.apt and not role["start_services"] and node["files"][POLICY] is None
    return plan


def look_failed(_role: Role) -> Looks:
    return {}


def decide_failed(role: Role, _node: Node) -> Plan:
    """Refuse, with the reason why the installation failed."""
    return Plan(refusal=package_failure(role["result"], role["names"], role["version"]))


def look_came(role: Role) -> Looks:
    return {"packages": role["names"]}


def decide_came(role: Role, node: Node) -> Plan:
    """Refuse where something did not come as it was asked for."""
    asked = role["version"]
    gone = missing(node, role["names"], asked)
    versions = [
        f"{name} {', '.join(upstream(row['version']) for row in node['packages'].get(name, [])) or 'none'}"
        for name in gone
    ]
    if gone:
        return Plan(
            refusal=f"Found {', '.join(versions)} after the installation, wanted version {asked or 'any'}."
            " `apt-cache policy` or `dnf list` on the node shows where it comes from."
        )
    return Plan()


def _specifications(role: Role, node: Node) -> list[str]:
    names, version = role["names"], role["version"]
    if not version:
        return list(names)
    if role.system.apt:
        return exact(node["answers"]["madison"]["stdout"], names, version)
    return [f"{name}-{version}" for name in names]


def exact(madison: str, names: Sequence[str], version: str) -> list[str]:
    """Name packages with the full version that apt asks for.

    apt knows patterns that end with anything, but not such as begin so: an epoch may stand before.

    Args:
        madison: What `apt-cache madison` says: a line a version, `name | version | source`, the newest first.
        version: The version that each must have, without epoch and revision.

    Returns:
        For each name `name=version` with epoch and revision, of the newest revision; without both where apt
        knows none, so that it says so itself.
    """
    known: dict[str, str] = {}
    for line in madison.splitlines():
        name, full = (part.strip() for part in line.split("|")[:2])
        if re.fullmatch(rf"(\d+:)?{re.escape(version)}(-[^-]*)?", full):
            known.setdefault(name, full)
    return [f"{name}={known.get(name, version)}" for name in names]
