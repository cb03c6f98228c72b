"""NVIDIA's container toolkit: packages, repository, the engines' runtime, and the CDI specification."""

from ..gpu_presence import decide as gpu_presence
from ..package_repository.decide import Repository
from ..plan import Looks, Node, Plan, Role, missing, together, unheld

PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
PREDECESSORS = (
    "nvidia-docker2",
    "nvidia-docker",
    "nvidia-container-runtime",
    "nvidia-container-runtime-hook",
    "docker-runtime-nvidia",
)
"""What NVIDIA gave up for it, and Amazon's package that makes the runtime known to Docker as a flag: with
that one Docker does not start when daemon.json knows the runtime as well."""
REPLACES = (
    "/etc/apt/sources.list.d/libnvidia-container*.list",
    "/etc/apt/sources.list.d/nvidia-container-runtime*.list",
    "/etc/apt/sources.list.d/nvidia-docker*.list",
    "/etc/yum.repos.d/libnvidia-container*.repo",
    "/etc/yum.repos.d/nvidia-container-runtime*.repo",
    "/etc/yum.repos.d/nvidia-docker*.repo",
    # The name that NVIDIA's own installation steps give it.
    "/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg",
)
DROPINS = tuple(
    f"/etc/systemd/system/nvidia-cdi-refresh.{kind}.d/gpukiln.conf" for kind in ("service", "path")
)
WRAPPER = "/usr/local/bin/nvidia-docker"
DAEMON_JSON = "/etc/docker/daemon.json"
# the loaded version, the library's version in the specification, and nvidia-uvm's node
DESCRIBES = r"^[0-9.]+$|libcuda\.so\.[0-9]+\.[0-9.]*[0-9]|/dev/nvidia-uvm$"


def look(role: Role) -> Looks:
    own = {
        "packages": [*PACKAGES, *PREDECESSORS],
        "files": [*DROPINS, WRAPPER],
        "secrets": [DAEMON_JSON],
        "globs": list(REPLACES),
    }
    return together(look_runtime(role), _repository(role).looks, own)


def decide(role: Role, node: Node) -> Plan:
    """`do`: `predecessors` go, `kept` says whether daemon.json is put aside meanwhile.

    `repository` says whether something of the repository is missing or in its way, `fetch` whether packages
    come from it; `names` and `replaces` are the packages and what the repository takes the place of.
    """
    plan, docker2 = Plan(), role["docker2"]
    if docker2 and "docker" not in role["engines"]:
        return plan.refuse(
            f"Found nvidia_docker2 asked for with the engines {', '.join(role['engines']) or 'none'}, wanted"
            " docker among them. Add it to nvidia_container_toolkit_engines, or leave nvidia_docker2 out:"
            " containerd and Kubernetes do not need it."
        )
    repository = _repository(role).have(node)
    if repository.refusal:
        return repository
    predecessors = [name for name in PREDECESSORS if name in node["packages"]]
    plan.lines += [f"-{name}" for name in predecessors]
    absent = missing(node, PACKAGES, role["version"])
    plan.install(absent, role["version"])
    # Held: engines start the toolkit's programs, and a new version comes by components.yaml.
    for name in unheld(node, set(PACKAGES) - set(absent)):
        plan.packages.append(name)
        plan.lines.append(f"hold {name}")
    plan.do = {
        "predecessors": predecessors,
        "kept": node["files"][DAEMON_JSON] is not None,
        "repository": repository.acts or bool(absent) or any(node["globs"][pattern] for pattern in REPLACES),
        "fetch": bool(absent),
        "names": list(PACKAGES),
        "replaces": list(REPLACES),
    }
    gpu_presence.have(plan, node)
    # The toolkit's own units fail on a machine without a GPU; the drop-in has a condition.
    for path in DROPINS:
        plan.write(node, path, role.file("nvidia-cdi-refresh.conf"))
    if docker2:
        plan.write(node, WRAPPER, role.file("nvidia-docker"), mode="0755")
    elif node["files"][WRAPPER]:
        plan.remove([WRAPPER])
    return plan


def look_runtime(role: Role) -> Looks:
    # The specification is long: what it says of the driver is enough.
    command = ["grep", "--only-matching", "--with-filename", "--extended-regexp", DESCRIBES]
    described = [*command, role["loaded_file"], role["cdi_file"]]
    return together(gpu_presence.LOOKS, {"commands": {"described": described}})


def decide_runtime(role: Role, node: Node) -> Plan:
    """`do`: `describe` says whether the CDI specification has to be made.

    It holds library paths of the driver that was there when it was written. It is made at boot by the
    toolkit's own unit and by gpu_bootstrap; a change of the driver without a boot leaves it out of date. What
    was made before nvidia-uvm was loaded has no node for it, without which CUDA does not start.
    """
    plan = Plan(do={"describe": False})
    if not gpu_presence.run(plan, node):
        return plan
    lines = [line.partition(":")[::2] for line in node["answers"]["described"]["stdout"].splitlines()]
    loaded = next((said for path, said in lines if path == role["loaded_file"]), "")
    described = {said.replace("libcuda.so.", "") for path, said in lines if path == role["cdi_file"]}
    # The same version in both, and nvidia-uvm: the specification is current.
    if described == {"/dev/nvidia-uvm", loaded}:
        return plan
    if not loaded and not role.check:
        return plan.refuse(
            "Found a GPU and no loaded driver, wanted one to describe for CDI. `modprobe nvidia` and"
            " `journalctl -k` on the node say why; the role nvidia_driver loads it."
        )
    plan.do["describe"] = True
    plan.lines.append(f"+{role['cdi_file']}: driver {loaded or 'that will be loaded'}")
    return plan


def _repository(role: Role) -> Repository:
    return Repository.of(role.system, "nvidia-container-toolkit", role["repository"])
