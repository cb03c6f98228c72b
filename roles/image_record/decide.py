"""What the record of an image says, and how a node's packages differ from it."""

import json
from typing import Any

from ..plan import Looks, Node, Plan, Role
from .record import image_record, installed, package_drift

GPU_TOOLS = "/usr/local/bin/gpukiln-gpu"
LIVE = "/etc/systemd/system/gpukiln-gpu-health.*"  # of gpu_tools, on live nodes alone
KERNELS = "/lib/modules/*/modules.dep"
MODULES = ("nvidia-current", "nvidia")  # Debian's name first, then everybody else's
SOURCES = [
    "dpkg-query",
    "--show",
    "--showformat",
    r"${Package}\t${source:Package}\t${source:Version}\t${Installed-Size}\t${Architecture}\n",
]
# Debian's machine-readable copyright files; a package without one has no licence in the record.
COPYRIGHT = [
    *("grep", "--dereference-recursive", "--no-messages", "--with-filename"),
    *("--include=copyright", "^License:", "/usr/share/doc"),
]
# grep, 1: no file names one. 2: a link in one of the folders leads nowhere. modinfo, 1: the kernel has no
# module of that name; the verification checks that.
FINE = {"sources": (0,), "copyright": (0, 1, 2), "modinfo": (0, 1)}


def look(role: Role) -> Looks:
    if not role["image"]:
        return {}
    return {
        "packages": ["*"],
        "files": [role["path"]],
        "secrets": [GPU_TOOLS],  # whose text is no text
        "folders": [_folder(role)],
        "globs": [KERNELS],
        "commands": {"sources": SOURCES, "copyright": COPYRIGHT} if role.system.apt else {},
    }


def decide(role: Role, node: Node) -> Plan:
    """Write what the plan decided and what was found; without a plan there is no record."""
    plan = Plan()
    if not role["image"]:
        return plan
    kernels = [path.split("/")[-2] for path in node["globs"][KERNELS]]
    asks = {
        f"modinfo {kernel} {name}": ["modinfo", "--set-version", kernel, "--field", "version", name]
        for kernel in kernels
        for name in MODULES
    }
    if not asks.keys() <= node["answers"].keys():
        return Plan(ask={"commands": asks})
    if reason := _unanswered(node["answers"]):
        return plan.refuse(reason)
    record = image_record(
        role["image"],
        role["components"],
        (role.system.distribution.lower(), role.system.family.lower()),
        _installed(role, node),
        {kernel: _module(node, kernel) for kernel in kernels},
        *(node["answers"][name]["stdout"] if role.system.apt else "" for name in ("sources", "copyright")),
    )
    if tools := node["files"][GPU_TOOLS]:
        record["gpu_tools"] = {"sha256": tools["sha256"]}
    gone = [name for name, said in record["components"].items() if said["status"] == "install"]
    if gone and not role.check:
        return plan.refuse(
            f"Found no package of {', '.join(gone)}, wanted {'them' if len(gone) > 1 else 'it'} installed as"
            " the plan decided."
        )
    if not node["folders"][_folder(role)]:
        plan.folders[_folder(role)] = "0755"
    plan.write(node, role["path"], f"{json.dumps(record, indent=4, sort_keys=True)}\n")
    return plan


def look_drift(role: Role) -> Looks:
    return {"packages": ["*"], "files": [role["path"]], "globs": [LIVE]}


def decide_drift(role: Role, node: Node) -> Plan:
    """Report which packages differ from the record; `do`: `left_out` has the components that it lacks.

    Where there is no record `left_out` is null. `live`: whether ansible/node.yml has been here, which puts on
    a node what an image has not.
    """
    plan, file = Plan(do={"left_out": None, "live": bool(node["globs"][LIVE])}), node["files"][role["path"]]
    if not file:
        return plan
    try:
        record = json.loads(file["text"])
        recorded, components = record["packages"], record["components"]
    except (ValueError, KeyError, TypeError) as error:
        return plan.refuse(
            f"Found {role['path']} that can't be read ({type(error).__name__}: {error}), wanted the record of"
            " the image that the node is of. Put back the one that `invoke ami.show` names, or remove it."
        )
    plan.lines = package_drift(recorded, _installed(role, node))
    plan.do["left_out"] = [name for name, said in components.items() if said["status"] == "left_out"]
    return plan


def _installed(role: Role, node: Node) -> dict[str, str]:
    return installed(node["packages"], role.system.architecture, apt=role.system.apt)


def _module(node: Node, kernel: str) -> str:
    """Version of a kernel's module; empty where it has none."""
    said = [node["answers"][f"modinfo {kernel} {name}"]["stdout"].strip() for name in MODULES]
    return next(filter(None, reversed(said)), "")


def _folder(role: Role) -> str:
    return str(role["path"].rpartition("/")[0])


def _unanswered(answers: dict[str, Any]) -> str:
    """What kept a command from answering; empty where all did."""
    for name, answer in answers.items():
        if answer["rc"] not in FINE[name.partition(" ")[0]]:
            said = answer["stderr"].strip() or "it says nothing"
            return (
                f"Found that {name} fails with {answer['rc']}: {said}. Wanted its answer for the record of"
                " the image. Run it on the machine."
            )
    return ""
