"""Docker and containerd: which packages bring them, and the configuration that both read."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..plan import Looks, Node, Plan, Role, System, runs, upstream
from . import containerd
from .containerd import BrokenFileError

DAEMON_JSON = "/etc/docker/daemon.json"
# every file that config.toml may import
TOML = "/etc/containerd/**/*.toml"
NODEADM, BOOTSTRAP = "/usr/bin/nodeadm", "/etc/eks/bootstrap.sh"
"""EKS's own programs, which configure containerd when a node joins. nodeadm on Amazon Linux: at every boot,
with the nvidia runtime as soon as the toolkit is there. bootstrap.sh on Ubuntu: when user data calls it, from
templates in /usr/local/share/eks (Canonical's script says so, and canonical/ubuntu-cloud-docs#389)."""
DROPINS = "/etc/systemd/system/containerd.service.d"
AFTER_NODEADM = f"{DROPINS}/gpukiln-nodeadm.conf"
ADDS_RUNTIME = f"{DROPINS}/gpukiln.conf"
ADDER = "/usr/local/sbin/gpukiln-containerd-runtime"
# names of the role's handlers
RESTART = {"containerd": "Restart containerd", "docker": "Restart Docker"}
NO_BRIDGE = {"bridge": "none", "bip": None}
"""docker0 would take 172.17.0.0/16 from the cluster, so EKS's images have none (bootstrap.sh has
--enable-docker-bridge to enable it). With bip in addition Docker does not start
(moby/moby:daemon/daemon.go)."""


@dataclass(frozen=True)
class Platform:
    """Engine to the packages that the platform has, and to all that bring it, of any vendor.

    Who has another vendor's engine keeps it: the platform's would replace it, and end its containers.
    """

    packages: Mapping[str, list[str]]
    providers: Mapping[str, list[str]]


# docker.io needs containerd and runc, and brings them.
APT = Platform(
    {"containerd": ["containerd"], "docker": ["docker.io", "iptables"]},
    {
        "containerd": ["containerd", "containerd.io", "moby-containerd"],
        "docker": ["docker.io", "docker-ce", "moby-engine"],
    },
)
AMAZON = Platform(
    {"containerd": ["containerd"], "docker": ["docker"]},
    {"containerd": ["containerd", "containerd.io"], "docker": ["docker", "docker-ce"]},
)
# Of Docker's own repository: the distribution has neither.
RED_HAT = Platform(
    {"containerd": ["containerd.io"], "docker": ["docker-ce"]},
    {
        "containerd": ["containerd.io", "containerd", "moby-containerd"],
        "docker": ["docker-ce", "docker", "moby-engine"],
    },
)


@dataclass(frozen=True)
class Runtime:
    """The OCI runtime that is registered in addition to the engine's own, or none.

    Args:
        dropin: Name of containerd's drop-in.
        runtimes: Name to binary.
        default: The default of containerd's Kubernetes plug-in; empty: what the site says, or runc.
        keys: Set in daemon.json.
        without: Taken out of daemon.json where they have this value.
        preferences: For a daemon.json that says nothing of the matter.
    """

    dropin: str
    runtimes: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] = field(default_factory=dict)
    preferences: Iterable[Mapping[str, Any]] = ()


def look(role: Role) -> Looks:
    providers = _platform(role.system).providers
    return {
        "packages": [name for names in providers.values() for name in names],
        "files": [DAEMON_JSON, TOML, AFTER_NODEADM, ADDS_RUNTIME, ADDER],
        "globs": [NODEADM, BOOTSTRAP],
        "units": [_unit(engine) for engine in providers],
    }


def decide(role: Role, node: Node) -> Plan:
    """What is missing, and how the engines that are there have to be configured.

    `do`: `repository` says whether the packages come from Docker's own.
    """
    there, platform = versions(role.system, node), _platform(role.system)
    preferences = [*role["docker_defaults"], *([NO_BRIDGE] if _joins(node) else [])]
    plan = _configured(
        role, node, Runtime("10-gpukiln.toml", keys=role["docker_config"], preferences=preferences)
    )
    for engine in role["engines"]:
        if engine in there:
            # Packages of Debian enable their units themselves, others do not.
            plan.enable_unit(node, _unit(engine))
        else:
            plan.install(platform.packages[engine])
    distributions = role["repository"].get("rpm", {}).get("distributions", [])
    plan.do["repository"] = role.system.distribution.lower() in distributions
    return plan


def look_register(role: Role) -> Looks:
    return look(role)


def decide_register(role: Role, node: Node) -> Plan:
    """Make another OCI runtime known to the engines."""
    asked = role["runtime"]
    name, path = asked["name"], asked["path"]
    # Docker's default for containers without --runtime
    default = {"default-runtime": name}
    # The bare name, as nvidia-ctk writes it: Docker finds it on PATH.
    keys: dict[str, Any] = {"runtimes": {name: {"path": path.rpartition("/")[2], "args": []}}}
    runtime = Runtime(
        f"99-{name}.toml",
        {name: path},
        default=name if asked["containerd_default"] else "",
        keys=keys | (default if asked["docker_default"] else {}),
        without={} if asked["docker_default"] else default,
    )
    return _configured(role, node, runtime)


def look_runtime(role: Role) -> Looks:
    return {"units": [_unit(engine) for engine in role["engines"]]}


def decide_runtime(role: Role, node: Node) -> Plan:
    plan = Plan()
    for engine in role["engines"]:
        # In a first run in check mode they are not there yet.
        if node["units"][_unit(engine)]["there"] or not role.check:
            plan.start_unit(node, _unit(engine))
    return plan


def versions(system: System, node: Node) -> dict[str, str]:
    """Version of each engine that is there, without epoch and release."""
    packages = node["packages"]
    return {
        engine: upstream(packages[name][-1]["version"])
        for engine, names in _platform(system).providers.items()
        # The first name in the list wins, where two packages are installed.
        for name in reversed(names)
        if name in packages
    }


def _configured(role: Role, node: Node, runtime: Runtime) -> Plan:
    plan = Plan()
    try:
        if "containerd" in role["engines"]:
            _configure_containerd(plan, role, node, runtime)
        if "docker" in role["engines"]:
            _configure_docker(plan, node, runtime)
    except BrokenFileError as broken:
        return plan.refuse(str(broken))
    return plan


def _configure_containerd(plan: Plan, role: Role, node: Node, runtime: Runtime) -> None:
    joins, managed, restart = _joins(node), role["containerd_managed"], _restart("containerd", node)
    if joins == NODEADM:
        # It starts containerd when it has written its configuration, and does nothing where it runs already
        # (awslabs/amazon-eks-ami:nodeadm/internal/containerd/daemon.go): one that starts at boot must wait.
        plan.write(node, AFTER_NODEADM, "[Unit]\nAfter=nodeadm-config.service\n")
    if managed and not joins:
        there = versions(role.system, node).get("containerd", "")
        texts = {
            path: facts["text"]
            for path, facts in node["files"].items()
            if facts and path.startswith("/etc/containerd/")
        }
        settings = containerd.Settings(
            cni_bin_dir=role["cni_bin_dir"],
            cni_conf_dir=role["cni_conf_dir"],
            sandbox_image=role["sandbox_image"],
            default_runtime=runtime.default,
            runtimes=runtime.runtimes,
        )
        # containerd itself checks the file before it replaces the old one; before its installation it can't.
        validate = ["containerd", "--config", "%s", "config", "dump"] if there else []
        for path, text in containerd.files(texts, there, runtime.dropin, settings).items():
            plan.write(node, path, text, notify=restart, validate=validate)
    # bootstrap.sh replaces the configuration at the join: a drop-in of the unit adds the runtime to it.
    if managed and joins == BOOTSTRAP and runtime.runtimes:
        unit = role.template(
            "containerd.service.conf.j2", runtimes=runtime.runtimes, default=runtime.default, adder=ADDER
        )
        plan.write(node, ADDER, role.file("containerd-runtime.sh"), mode="0755", notify=restart)
        plan.write(node, ADDS_RUNTIME, unit, notify=restart)


def _configure_docker(plan: Plan, node: Node, runtime: Runtime) -> None:
    text = (node["files"][DAEMON_JSON] or {}).get("text", "")
    settings = daemon_json(text, runtime.keys, runtime.without, runtime.preferences)
    # Compared by the parsed content: other tools write the same keys in another layout.
    if settings != _parsed(text):
        plan.write(
            node,
            DAEMON_JSON,
            f"{json.dumps(settings, indent=4, sort_keys=True)}\n",
            notify=_restart("docker", node),
        )


def daemon_json(
    text: str,
    keys: Mapping[str, Any],
    without: Mapping[str, Any],
    preferences: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Merge our keys into daemon.json.

    Args:
        text: The file; empty when there is none.
        keys: The role's: tables are merged, lists get missing entries, everything else is set. Of options
            `name=value` in a list there is one of a name.
        without: Keys that go where they have this value.
        preferences: For a file that says nothing of the matter: each is taken where the file has none of its
            keys. One that is None counts, and is not written.

    Raises:
        BrokenFileError: It is no JSON object.
    """
    kept = {key: value for key, value in _parsed(text).items() if key not in without or value != without[key]}
    merged = _merged(kept, keys)
    for preference in preferences:
        # A file with any of the keys has decided the matter: its author knows better.
        if not set(preference) & set(merged):
            merged |= {key: value for key, value in preference.items() if value is not None}
    return merged


def _parsed(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text) if text.strip() else {}
        why = f"its top is a {type(document).__name__}"
    except ValueError as error:
        document, why = None, str(error)
    if not isinstance(document, dict):
        raise BrokenFileError(
            f"Found {DAEMON_JSON} that is no JSON object: {why}. Wanted one, to merge our keys into it"
            f" without losing yours. Fix the file (`python3 -m json.tool {DAEMON_JSON}` on the node names"
            " the place) or remove it; Docker does not start with it either."
        )
    return document


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        before = result.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            result[key] = _merged(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            # `name=value` options: a second value of the same name would be refused by Docker.
            names = {_option(item) for item in value}
            result[key] = [item for item in before if _option(item) not in names] + list(value)
        else:
            result[key] = value
    return result


def _option(item: Any) -> str:
    return str(item).partition("=")[0]


def _joins(node: Node) -> str:
    """What joins the machine to a cluster, and configures containerd then; empty where nothing does."""
    return next((path for path in (NODEADM, BOOTSTRAP) if node["globs"][path]), "")


def _platform(system: System) -> Platform:
    if system.apt:
        return APT
    return AMAZON if system.distribution == "Amazon" else RED_HAT


def _restart(engine: str, node: Node) -> str:
    return RESTART[engine] if runs(node, _unit(engine)) else ""


def _unit(engine: str) -> str:
    return f"{engine}.service"
