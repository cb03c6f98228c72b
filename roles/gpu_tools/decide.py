"""gpukiln-gpu on a node: the program, who may lease, its settings, and its units."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..plan import Looks, Node, Plan, Role

PACKED = Path(__file__).parent / "files/node"
"""A collection has the files of a node, as `zipapp.tree` made them when it was built."""
# its members may lease GPUs
GROUP = "gpu"
SETTINGS, MIG = "/etc/gpukiln/gpus.toml", "/etc/gpukiln/mig.yaml"
PROGRAM = "/usr/local/bin/gpukiln-gpu"
FOLDERS = ("/etc/gpukiln", "/var/lib/gpukiln")
STATE = "/var/lib/gpukiln/gpus"
UNITS = "/etc/systemd/system"
PLACES = (UNITS, *(f"{UNITS}/{target}.target.wants" for target in ("timers", "sockets", "multi-user")))
# Units and links of an earlier run whose option is off now.
EARLIER = tuple(f"{place}/gpukiln-gpu-*" for place in PLACES)
HEALTH, HEALTH_TIMER = "gpukiln-gpu-health.service", "gpukiln-gpu-health.timer"
CUT = "gpukiln-gpu-mig.service"
LEASES, LEASES_SOCKET = "gpukiln-gpu-leases.service", "gpukiln-gpu-leases.socket"
HEAD = "# Written by the role gpu_tools.\n"
# What the program itself says of its settings. A process of its own: Ansible lets no Python import from a
# ZIP file below a collection (_AnsibleCollectionFinder._ansible_collection_path_hook).
READ = """\
import pathlib, sys
program, file = sys.argv[1:]
sys.path.insert(0, program)
from gpukiln.errors import UsageError
from gpukiln.gpus.config import load
try:
    load(pathlib.Path(file))
except UsageError as error:
    sys.exit(f"{error.message}; {error.hint}")
"""


def look(role: Role) -> Looks:
    return {
        "files": [SETTINGS, MIG, *_manual(), *(f"{UNITS}/{name}" for name in _units(role))],
        "secrets": [PROGRAM],  # whose text is no text
        "folders": [*FOLDERS, STATE, *_parents()],
        "globs": list(EARLIER),
        "units": _started(role),
        "accounts": role["users"],
        "commands": {"group": ["getent", "group", GROUP]},
    }


def decide(role: Role, node: Node) -> Plan:
    """`do`: `group`, `users`, `state` have to be made, `take_over` is about the state, `stop` is units.

    `program` is the file to copy, empty where it is there, and `place` its folder where that has to be made.
    """
    plan = Plan()
    settings = settings_text(role["limits"], role["busy"], role["price"])
    # An empty configuration needs no check, and no process on the controller.
    if settings != HEAD and (reason := _refusal(settings)):
        return plan.refuse(reason)
    select, configs = role["mig_select"], role["mig_config"].get("mig-configs", {})
    # The program would fail at boot, when nobody looks.
    if select and select not in configs:
        return plan.refuse(
            f"Found gpu_tools_mig_select {select}, wanted a key of mig-configs in gpu_tools_mig_config:"
            f" {', '.join(configs) or 'it has none'}."
        )
    _add_group(plan, role, node)
    _add_program(plan, node)
    roots = {"mode": "0755", "uid": 0, "gid": 0}
    differ = [path for path in FOLDERS if node["folders"][path] != roots]
    # Only missing ones: /usr/local/bin and its kin belong to the system.
    differ += [path for path in _parents() if not node["folders"][path]]
    plan.folders = dict.fromkeys(differ, "0755")
    plan.write(node, SETTINGS, settings)
    if select:
        config = yaml.dump(role["mig_config"], indent=4, allow_unicode=True, default_flow_style=False)
        plan.write(node, MIG, config)
    _add_units(plan, role, node)
    return plan


def look_runtime(role: Role) -> Looks:
    return {"units": _started(role)}


def decide_runtime(role: Role, node: Node) -> Plan:
    plan = Plan()
    for name in _started(role):
        # In a first run in check mode they are not there yet.
        if node["units"][name]["there"]:
            plan.start_unit(node, name)
    return plan


def _add_group(plan: Plan, role: Role, node: Node) -> None:
    known = node["answers"]["group"]
    # getent prints name:password:gid:members (group(5)).
    number = known["stdout"].split(":")[2] if known["rc"] == 0 else None
    plan.do["group"] = number is None
    plan.do["users"] = [
        name for name in role["users"] if GROUP not in (node["accounts"][name] or {}).get("groups", [])
    ]
    state = node["folders"][STATE]
    # One that others could write into is taken over by the program, which trusts nothing in it.
    plan.do["state"] = state is None
    plan.do["take_over"] = state not in (None, {"mode": "0700", "uid": 0, "gid": 0})
    if plan.do["group"]:
        plan.lines.append(f"+group {GROUP}")
    plan.lines += [f"+{name} in the group {GROUP}" for name in plan.do["users"]]
    if plan.do["state"] or plan.do["take_over"]:
        plan.lines.append(f"+{STATE}/, root's alone")


def _add_program(plan: Plan, node: Node) -> None:
    """The program, which is too large for a plan, and what is read of it: its man page and its completion."""
    program = _files()[PROGRAM]
    there = node["files"][PROGRAM] or {}
    seen = (there.get("sha256"), there.get("mode"), there.get("uid"), there.get("gid"))
    plan.do |= {"program": "", "place": ""}
    # By checksum: the program is a ZIP file, whose text is not compared.
    if seen != (hashlib.sha256(program.read_bytes()).hexdigest(), "0755", 0, 0):
        plan.do["program"] = str(program)
        place = str(Path(PROGRAM).parent)
        plan.do["place"] = "" if node["folders"][place] else place
        plan.lines.append(f"+{PROGRAM}")
    for path in _manual():
        plan.write(node, path, _files()[path].read_text(encoding="utf-8"))


@cache
def _files() -> dict[str, Path]:
    """The program, its man page and its completion: path on the node to file here."""
    root = PACKED if PACKED.is_dir() else _packed_now()
    return {f"/{file.relative_to(root)}": file for file in sorted(root.rglob("*")) if file.is_file()}


def _packed_now() -> Path:
    from gpukiln.gpus import zipapp  # noqa: PLC0415 - a collection has what it makes, and needs no gpukiln
    from gpukiln.state import state_home  # noqa: PLC0415

    # In the state folder: a wheel's own folder may be read-only.
    return zipapp.tree(state_home() / "gpu-tools")


def _parents() -> list[str]:
    """Where the program's files are."""
    return sorted({str(Path(path).parent) for path in _files()})


def _manual() -> list[str]:
    """Man page and completion."""
    return [path for path in _files() if path != PROGRAM]


def _add_units(plan: Plan, role: Role, node: Node) -> None:
    earlier = [Path(path) for pattern in EARLIER for path in node["globs"][pattern]]
    # Stopped before the file goes: systemd could not stop a unit that it no longer knows.
    unwanted = [path for path in earlier if path.name not in _units(role)]
    plan.do["stop"] = [path.name for path in unwanted if str(path.parent) == UNITS]
    plan.remove(map(str, unwanted))
    values = {
        "mig_select": role["mig_select"],
        "textfile": role["health_textfile"],
        "hook": role["health_hook"],
    }
    for name in _units(role):
        plan.write(node, f"{UNITS}/{name}", role.template(f"{name}.j2", **values))
    for name in _started(role):
        plan.enable_unit(node, name)


def _units(role: Role) -> list[str]:
    chosen = [HEALTH, HEALTH_TIMER] * bool(role["health"]) + [CUT] * bool(role["mig_select"])
    # Leases are always there; the others are options.
    return [LEASES, LEASES_SOCKET, *chosen]


def _started(role: Role) -> list[str]:
    """What starts at boot."""
    # Timer and socket start these two.
    return [name for name in _units(role) if name not in (HEALTH, LEASES)]


def settings_text(limits: Mapping[str, Any], busy: Mapping[str, Any], price: Mapping[str, Any]) -> str:
    """Text of /etc/gpukiln/gpus.toml.

    Args:
        limits: The role's gpu_tools_limits.
        busy: The role's gpu_tools_busy.
        price: The role's gpu_tools_price.
    """
    tables = (("limits", limits), ("busy", busy), ("price", price))
    return HEAD + "".join(line for name, values in tables for line in _table(name, values))


def _refusal(settings: str) -> str:
    """Why gpukiln-gpu would not understand its settings; empty where it does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gpus.toml")
        file.write_text(settings, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", READ, _files()[PROGRAM], file], capture_output=True, text=True, check=False
        )
        return done.stderr.strip().replace(str(file), "gpu_tools_limits, gpu_tools_busy or gpu_tools_price")


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A table of TOML and those in it; a string of JSON is one of TOML (TOML 1.0, String)."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if plain:
        yield f"\n[{name}]\n"
        yield from (f"{json.dumps(str(key))} = {json.dumps(value)}\n" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _table(f"{name}.{json.dumps(str(key))}", value)
