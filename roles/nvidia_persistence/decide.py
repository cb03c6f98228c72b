"""nvidia-persistenced: where it comes from, who runs it, and the drop-in that has persistence on."""

import re
from typing import Any

from ..gpu_presence import decide as gpu_presence
from ..plan import Looks, Node, Plan, Role, missing, runs, together, unheld

UNIT = "nvidia-persistenced.service"
DRIVERS_UNIT = f"/usr/lib/systemd/system/{UNIT}"
OWN_UNIT = f"/etc/systemd/system/{UNIT}"
DROPIN = f"{OWN_UNIT}.d/gpukiln.conf"
RESTART = "Restart nvidia-persistenced"
# one line a GPU: Enabled or Disabled
MODE = ["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"]


def look(role: Role) -> Looks:
    archive = _archive(role)
    own = {
        "packages": [archive["package"]] if archive else [],
        "files": [DRIVERS_UNIT, OWN_UNIT, DROPIN],
        "accounts": ["nvidia-persistenced"],
        "units": [UNIT],
    }
    return together(gpu_presence.LOOKS, own)


def decide(role: Role, node: Node) -> Plan:
    """`do`: `hold`, the archive's `components`, and `user` where one has to be made."""
    plan, archive = Plan(), _archive(role)
    by_installer = role["source"] == "runfile"
    there = node["files"][DRIVERS_UNIT]
    if not archive and not by_installer and not there and not role.check:
        return plan.refuse(
            f"Found no {DRIVERS_UNIT}, wanted the one that comes with a driver from {role['source']}."
            " Install the driver first (role nvidia_driver), or say in nvidia_driver_source where it really"
            " comes from."
        )
    # The package's user, else that of the driver's unit; the installer makes none.
    user = archive.get("user") or _user_of(there) or "nvidia-persistenced"
    gpu_presence.have(plan, node)
    restart = RESTART if runs(node, UNIT) else ""
    arguments = "".join(f" {argument}" for argument in role["arguments"])
    plan.write(node, DROPIN, role.template("gpukiln.conf.j2", user=user, arguments=arguments), notify=restart)
    # NVIDIA's installer brings the program and no unit.
    if by_installer:
        plan.write(node, OWN_UNIT, role.file(UNIT), notify=restart)
        if not node["accounts"][user]:
            plan.do["user"] = user
            plan.lines.append(f"+user {user}")
    if archive:
        plan.do |= {"hold": archive.get("hold", False), "components": archive.get("components", [])}
        install = missing(node, [archive["package"]])
        plan.install(install or (unheld(node, [archive["package"]]) if plan.do["hold"] else []))
    # In a first run in check mode the driver, and its unit, are not there yet.
    if node["units"][UNIT]["there"] or not role.check:
        plan.enable_unit(node, UNIT)
    return plan


def look_runtime(role: Role) -> Looks:
    return look(role)


def decide_runtime(role: Role, node: Node) -> Plan:
    """Have it run where there is a GPU, and refuse where persistence is not on after that."""
    plan = Plan()
    if not gpu_presence.run(plan, node):
        return plan
    # In a first run in check mode the unit is not there yet.
    if node["units"][UNIT]["there"]:
        plan.start_unit(node, UNIT)
    # Not running yet: what the mode is is asked after the start.
    if UNIT in plan.start or role.check:
        return plan
    asked = decide_on(role, node)
    return asked if asked.ask or asked.refusal else plan


def look_on(_role: Role) -> Looks:
    return {"commands": {"persistence": MODE}}


def decide_on(role: Role, node: Node) -> Plan:
    """Refuse where persistence is not on, on every GPU."""
    if "persistence" not in node["answers"]:
        return Plan(ask=look_on(role))
    # nvidia-smi prints its errors on standard output
    answer = node["answers"]["persistence"]
    said = answer["stdout"].strip()
    if answer["rc"] == 0 and {line.strip() for line in said.splitlines()} == {"Enabled"}:
        return Plan()
    return Plan(
        refusal=f"Found persistence {said or answer['stderr'].strip()} with nvidia-persistenced running,"
        " wanted Enabled on every GPU. `journalctl -b -u nvidia-persistenced` and"
        " `systemctl cat nvidia-persistenced` on the node show why."
    )


def _archive(role: Role) -> dict[str, Any]:
    """What has it as a package: the package, the archive's components, the user that it makes.

    Debian's has a version of its own and is held here; the others are the driver's, which its role holds.
    """
    system = role.system.distribution if role.system.apt else role.system.family
    archives: dict[tuple[str, str], dict[str, Any]] = {
        ("distribution", "Debian"): {
            "package": "nvidia-persistenced",
            "components": ["contrib", "non-free"],
            "user": "nvpd",
            "hold": True,
        },
        ("distribution", "Ubuntu"): {
            "package": f"nvidia-compute-utils-{role['branch']}-server",
            "components": ["restricted"],
            "user": "nvidia-persistenced",
        },
        ("nvidia", "RedHat"): {"package": "nvidia-persistenced", "user": "nvidia-persistenced"},
    }
    return archives.get((role["source"], system), {})


def _user_of(unit: dict[str, Any] | None) -> str:
    """Who the driver's unit runs it as; empty where it does not say."""
    match = re.search(r"(?m)^ExecStart=.*--user[ =](\S+)", unit["text"]) if unit and "text" in unit else None
    return match[1] if match else ""
