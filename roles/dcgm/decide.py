"""DCGM and its exporter: packages, NVIDIA's CUDA repository, their units, and whether they see the GPUs."""

import re
from urllib.parse import urlsplit

from ..gpu_presence import decide as gpu_presence
from ..package_repository.decide import Repository
from ..plan import Looks, Node, Plan, Role, missing, runs, together, unheld

EXPORTER = "datacenter-gpu-manager-exporter"
CONFLICTS = (
    "datacenter-gpu-manager",
    "datacenter-gpu-manager-config",
    "cuda-keyring",
    "/etc/apt/sources.list.d/cuda-*.list",
    "/etc/apt/preferences.d/cuda-repository-pin-*",
    "/etc/yum.repos.d/cuda-*.repo",
)
"""Version 3, whose files are the same, and what NVIDIA's own installation steps leave: the same repository
under another name."""
ENGINE_UNIT, EXPORTER_UNIT = "nvidia-dcgm.service", "nvidia-dcgm-exporter.service"
PREFERENCES = "/etc/apt/preferences.d/gpukiln-dcgm"
COUNTERS = "/etc/dcgm-exporter/gpukiln-counters.csv"
PACKAGES_COUNTERS = "/etc/dcgm-exporter/default-counters.csv"
RESTART = "Restart DCGM"
# an IPv6 address in brackets, or a name, an IPv4 address or nothing, then the port
ADDRESS = r"(\[[0-9a-fA-F:]*\]|[0-9A-Za-z.-]*):[0-9]+"
# lists the GPUs that DCGM's engine sees
DISCOVERY = ["dcgmi", "discovery", "-l"]


def look(role: Role) -> Looks:
    own = {
        "packages": [*_packages(role), EXPORTER, *(name for name in CONFLICTS if name[0] != "/")],
        "files": [*map(_dropin, _units(role)), PREFERENCES, COUNTERS],
        "globs": [name for name in CONFLICTS if name[0] == "/"],
        "units": _units(role),
    }
    return together(gpu_presence.LOOKS, _repository(role).looks, own)


def decide(role: Role, node: Node) -> Plan:
    """`do`: `repository` says whether something of it is missing or in its way, `fetch` whether it is needed.

    `rpm` is the repository for dnf, `replaces` what it takes the place of; `engine` and `exporter` are
    packages to install or to hold.
    """
    plan, address = Plan(), role["exporter_address"]
    if not re.fullmatch(ADDRESS, address):
        return plan.refuse(
            f"Found dcgm_exporter_address {address}, wanted HOST:PORT, for example 127.0.0.1:9400. Correct"
            " it."
        )
    asked = _repository(role)
    repository = asked.have(node)
    if repository.refusal:
        return repository
    gpu_presence.have(plan, node)
    restart = RESTART if any(runs(node, unit) for unit in _units(role)) else ""
    # Before the packages, which may start their services: the condition keeps those off a machine without
    # a GPU.
    for unit in _units(role):
        counters = COUNTERS if role["exporter_counters"] else PACKAGES_COUNTERS
        text = role.template(f"{unit}.conf.j2", address=address, counters=counters)
        plan.write(node, _dropin(unit), text, notify=restart)
    if role["exporter"] and role["exporter_counters"]:
        plan.write(node, COUNTERS, role["counters_text"], notify=restart)
    # Before the repository: from its first moment on nothing else comes from there.
    if role.system.apt and _alone(role):
        host = urlsplit(asked.url).hostname or ""  # a folder's
        plan.write(node, PREFERENCES, role.template("preferences.j2", host=host))
    elif node["files"][PREFERENCES]:
        plan.remove([PREFERENCES])
    names, version = _packages(role), role["version"]
    absent = {ENGINE_UNIT: missing(node, names, version)}
    plan.install(absent[ENGINE_UNIT], version)
    if role["exporter"]:
        absent[EXPORTER_UNIT] = missing(node, [EXPORTER], role["exporter_version"])
        plan.install(absent[EXPORTER_UNIT], role["exporter_version"])
    # Held: another version comes by components.yaml.
    free = unheld(
        node, [name for name in (*names, *[EXPORTER] * role["exporter"]) if name not in plan.packages]
    )
    plan.packages += free
    plan.lines += [f"hold {name}" for name in free]
    for unit, commands in absent.items():
        # Enabling also has systemd read a unit that a package brings.
        if commands:
            plan.enable.append(unit)
            plan.notify = [restart] * bool(restart)
        else:
            plan.enable_unit(node, unit)
    in_its_way = [name for name in CONFLICTS if node["globs"].get(name) or name in node["packages"]]
    plan.do = {
        "repository": repository.acts or bool(in_its_way or any(absent.values())),
        "fetch": any(absent.values()),
        "rpm": _given(role).get("rpm", {}),
        "replaces": list(CONFLICTS),
        "engine": names if set(names) & set(plan.packages) else [],
        "exporter": [EXPORTER] if EXPORTER in plan.packages else [],
    }
    return plan


def look_runtime(role: Role) -> Looks:
    return look(role)


def decide_runtime(role: Role, node: Node) -> Plan:
    """`do`: `gpus` is how many there are for DCGM to see, `url` where the exporter's figures are."""
    plan = Plan()
    if gpu_presence.run(plan, node):
        for unit in _units(role):
            # In a first run in check mode they are not there yet.
            if node["units"][unit]["there"]:
                plan.start_unit(node, unit)
    # An address that means every interface is reached by loopback.
    local = re.sub(r"^(0\.0\.0\.0|\[::\])?:", "127.0.0.1:", role["exporter_address"])
    plan.do = {"gpus": len(node["pci"]["gpus"]), "url": f"http://{local}/metrics"}
    return plan


def look_sees(_role: Role) -> Looks:
    return {"gpus": True, "commands": {"discovery": DISCOVERY}}


def decide_sees(_role: Role, node: Node) -> Plan:
    """Refuse where DCGM does not see every GPU; `do`: `answered` says that asking again changes nothing."""
    answer, gpu_count = node["answers"]["discovery"], len(node["pci"]["gpus"])
    # dcgmi prints `8 GPUs found.`
    seen = sum(map(int, re.findall(r"(\d+) GPUs? found", answer["stdout"])))
    if answer["rc"] == 0 and seen == gpu_count:
        return Plan()
    said = (answer["stdout"].strip() or answer["stderr"].strip() or "it says nothing").splitlines()[0]
    return Plan().refuse(
        f"Found {seen} GPUs by DCGM ({said}), wanted the {gpu_count} on the PCI bus. `nvidia-smi` and"
        " `journalctl -b -u nvidia-dcgm` on the node show which one is missing, and why.",
        answered=answer["rc"] == 0,
    )


def _packages(role: Role) -> list[str]:
    """DCGM's; the proprietary ones have the profiling metrics and half of the diagnostics."""
    name, cuda = "datacenter-gpu-manager-4", f"cuda{role['cuda']}"
    return [f"{name}-core", f"{name}-{cuda}", f"{name}-proprietary", f"{name}-proprietary-{cuda}"]


def _units(role: Role) -> list[str]:
    return [ENGINE_UNIT] + [EXPORTER_UNIT] * bool(role["exporter"])


def _dropin(unit: str) -> str:
    return f"/etc/systemd/system/{unit}.d/gpukiln.conf"


def _alone(role: Role) -> bool:
    """Whether DCGM is all that may come from there.

    The repository has drivers and the container toolkit as well, under the names of the distribution's.
    """
    return bool(role["driver_source"] != "nvidia")


def _given(role: Role) -> dict[str, dict[str, object]]:
    given = dict(role["repository"])
    if _alone(role):
        given["rpm"] = {**given.get("rpm", {}), "includepkgs": ["datacenter-gpu-manager-*"]}
    return given


def _repository(role: Role) -> Repository:
    return Repository.of(role.system, "cuda", _given(role))
