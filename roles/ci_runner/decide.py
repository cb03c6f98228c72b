"""CI runners: users and groups, the compiler cache, the job hooks, and the environment of each runner."""

import re
from collections.abc import Mapping
from typing import Any

from ..gpu_presence import decide as gpu_presence
from ..plan import ROOT, Looks, Node, Plan, Role, missing, together

HOOKS = "/usr/local/lib/gpukiln/hooks"
PROCESSES = "/usr/local/bin/nvidia-gpu-processes"
# useradd(8)'s default pattern of names
USER = r"[a-z_][a-z0-9_-]*"
UNIT = r"[\w:.@-]+\.service"
GPU = r"[0-9]+|(GPU|MIG)-[0-9A-Za-z-]+"  # an index, or a UUID
BEGIN, END = "# BEGIN ANSIBLE MANAGED BLOCK", "# END ANSIBLE MANAGED BLOCK"  # as blockinfile writes them
Runner = Mapping[str, Any]


def look(role: Role) -> Looks:
    folders = [runner["folder"] for runner in role["runners"] if runner.get("folder")]
    own = {
        "packages": role["ccache_packages"] if role["ccache"] else [],
        "accounts": sorted({*_users(role), *role["ccache_members"]}),
        "files": [
            *_scripts(),
            _settings(role),
            *map(_dropin, _units(role)),
            *map(_environment_file, folders),
        ],
        "folders": [role["ccache_dir"], *folders],
        "commands": {name: ["getent", "group", name] for name in ("docker", role["ccache_group"])},
    }
    return together(gpu_presence.LOOKS, own)


def decide(role: Role, node: Node) -> Plan:
    """`do`: `source` is where ccache comes from: `archive`, `spal` (Amazon's), or `epel`.

    `group` is to be made, `users` to be made or put into groups ({name, groups, shell: empty to leave it});
    `cache` says whether the folder of the cache has to be put right, `settings` is its text where that
    differs; `folders` are runners' ({path, user}), `environments` blocks of their files
    ({path, user, block}).
    """
    plan = Plan()
    if reason := _refusal(role, node):
        return plan.refuse(reason)
    plan.do["source"] = (
        "archive" if role.system.apt else "spal" if role.system.distribution == "Amazon" else "epel"
    )
    _have_cache(plan, role, node)
    _have_users(plan, role, node)
    gpu_presence.have(plan, node)
    for path, text in _scripts().items():
        plan.write(node, path, text, mode="0755")
    # A restart would end the job that runs: the environment comes with the runner's next start.
    plan.do |= {"folders": [], "environments": []}
    for runner in role["runners"]:
        environment = _environment(role, runner)
        if unit := runner.get("unit"):
            plan.write(node, _dropin(unit), role.template("runner.conf.j2", environment=environment))
        if folder := runner.get("folder"):
            _report_in_folder(plan, node, runner, folder, environment)
    return plan


def look_runtime(role: Role) -> Looks:
    return look(role)


def decide_runtime(_role: Role, node: Node) -> Plan:
    plan = Plan()
    gpu_presence.run(plan, node)
    return plan


def _refusal(role: Role, node: Node) -> str:
    for runner in role["runners"]:
        if not _is_runner(runner):
            return (
                f"Found the runner {dict(runner)}, wanted a user's name, an absolute folder or a unit"
                " (NAME.service) or both, and GPUs as indexes or UUIDs. Correct ci_runner_runners."
            )
    # A typo must not create an account.
    if nobody := [name for name in role["ccache_members"] if not node["accounts"][name]]:
        return (
            f"Found no users {', '.join(nobody)}, wanted them in the group of the compiler cache. Make them,"
            " or correct ci_runner_ccache_members."
        )
    # Without the group, usermod would fail in the middle of the role.
    if role["docker"] and node["answers"]["docker"]["rc"] != 0:
        return (
            f"Found no group docker, wanted it for {', '.join(_users(role))}. Install Docker first (role"
            " container_runtime), or set ci_runner_docker to false."
        )
    return ""


def _is_runner(runner: Runner) -> bool:
    folder, unit = runner.get("folder"), runner.get("unit")
    return bool(
        re.fullmatch(USER, str(runner.get("user", "")))
        and (folder or unit)
        # A relative folder would be of Ansible's working directory on the node.
        and (not folder or folder.startswith("/"))
        and (not unit or re.fullmatch(UNIT, unit))
        and all(re.fullmatch(GPU, str(gpu)) for gpu in runner.get("gpus") or [])
    )


def _have_cache(plan: Plan, role: Role, node: Node) -> None:
    plan.do |= {"group": "", "cache": False, "settings": ""}
    if not role["ccache"]:
        return
    plan.install(missing(node, role["ccache_packages"]))
    group, folder = role["ccache_group"], role["ccache_dir"]
    known = node["answers"][group]
    number = int(known["stdout"].split(":")[2]) if known["rc"] == 0 else None
    if number is None:
        plan.do["group"] = group
        plan.lines.append(f"+group {group}")
    # setgid: what is written belongs to the group. Sticky: nobody of the group can replace the settings.
    plan.do["cache"] = node["folders"][folder] != {"mode": "3770", "uid": 0, "gid": number}
    if plan.do["cache"]:
        plan.lines.append(f"+{folder}/")
    text = role.template("ccache.conf.j2", size=role["ccache_size"])
    there = node["files"][_settings(role)] or {}
    if (there.get("text"), there.get("mode"), there.get("uid"), there.get("gid")) != (
        text,
        "0640",
        0,
        number,
    ):
        plan.do["settings"] = text
        plan.lines.append(f"+{_settings(role)}")


def _have_users(plan: Plan, role: Role, node: Node) -> None:
    groups = [role["ccache_group"]] * bool(role["ccache"]) + ["docker"] * bool(role["docker"])
    plan.do["users"] = []
    for name in dict.fromkeys([*_users(role), *role["ccache_members"]]):
        account = node["accounts"][name]
        missing = [group for group in groups if group not in (account or {"groups": []})["groups"]]
        # What they have already stays.
        if not account or missing:
            # A new user gets a shell for its jobs; an existing one keeps its own.
            shell = "" if account else "/bin/bash"
            plan.do["users"].append({"name": name, "groups": missing, "shell": shell})
            plan.lines.append(f"+user {name}" if not account else f"+{name} in {', '.join(missing)}")


def _report_in_folder(
    plan: Plan, node: Node, runner: Runner, folder: str, environment: Mapping[str, Any]
) -> None:
    account, there = node["accounts"][runner["user"]], node["folders"][folder]
    owner = account["uid"] if account else None
    # The runner must own its folder; more rights for others are left as they are.
    if not there or there["uid"] != owner or int(there["mode"], 8) & 0o700 != 0o700:
        plan.do["folders"].append({"path": folder, "user": runner["user"]})
        plan.lines.append(f"+{folder}/: {runner['user']}'s")
    lines = [f"{name}={value}" for name, value in environment.items()]
    # The installation of a runner keeps what it finds there. Other keys may be secrets.
    path = _environment_file(folder)
    file = node["files"][path] or {}
    text = f"{file.get('text', '')}\n"
    if "\n".join([BEGIN, *lines, END, ""]) in text and (file["uid"], file["mode"]) == (owner, "0600"):
        return
    # blockinfile keeps what is around the block.
    plan.do["environments"].append({"path": path, "user": runner["user"], "block": "\n".join(lines)})
    said = text.splitlines()
    plan.lines += [f"+{path}: {line}" for line in lines if line not in said] or [f"+{path}"]


def _environment(role: Role, runner: Runner) -> dict[str, Any]:
    """What a runner has in its environment, and so each job."""
    values = {
        "ACTIONS_RUNNER_HOOK_JOB_STARTED": f"{HOOKS}/gpu-job-started.sh",
        "ACTIONS_RUNNER_HOOK_JOB_COMPLETED": f"{HOOKS}/gpu-job-completed.sh",
        "GPU_JOB_MAX_MEMORY_MIB": role["max_memory_mib"],
        "GPU_JOB_GRACE_S": role["grace_s"],
    }
    if role["ccache"]:
        values["CCACHE_DIR"] = role["ccache_dir"]
    if runner.get("gpus") is not None:
        # CUDA's own order is another than nvidia-smi's.
        values |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, runner["gpus"])),
        }
    return values


def _users(role: Role) -> list[str]:
    return list(dict.fromkeys(str(runner.get("user", "")) for runner in role["runners"]))


def _units(role: Role) -> list[str]:
    return [runner["unit"] for runner in role["runners"] if runner.get("unit")]


def _scripts() -> dict[str, str]:
    """The hooks, and what finds the users of a GPU: path to text."""
    hooks = {f"{HOOKS}/{file.name}": file for file in sorted((ROOT / "scripts/hooks").iterdir())}
    sources = {**hooks, PROCESSES: ROOT / "scripts/bootstrap/nvidia-gpu-processes.sh"}
    return {path: file.read_text(encoding="utf-8") for path, file in sources.items()}


def _settings(role: Role) -> str:
    return f"{role['ccache_dir']}/ccache.conf"


def _dropin(unit: str) -> str:
    return f"/etc/systemd/system/{unit}.d/gpukiln.conf"


def _environment_file(folder: str) -> str:
    # GitHub's runner reads it at its start.
    return f"{folder}/.env"
