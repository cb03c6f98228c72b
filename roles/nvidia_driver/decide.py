"""Which driver a node gets, and what has to be done for it, step by step.

`decide` checks the request and chooses what to do: remove the driver, install it, or keep an installed one as
it should be. An installation decides again when the sources are there (`decide_packages` in
choice.py), when the packages are (`decide_modules`), and when the modules are (`decide_finish`). What comes
from where, under which names, is in origin.py; what request and node mean together in case.py.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..gpu_presence import decide as gpu_presence
from ..plan import MANAGED, Looks, Node, Plan, Role, shared, together
from . import gpus, packages
from .case import (
    DKMS_SIGNING,
    HELPERS,
    INSTALLER_NEEDS,
    KERNEL_RPMS,
    MODPROBE,
    NO_COMPILER,
    STREAM_FILE,
    UMAD,
    Case,
    libraries_of,
)
from .choice import (
    DRACUT,
    INITRAMFS_SETTINGS,
    NO_AUTOINSTALL,
    PREFERENCES,
    RELEASE_VARIABLE,
    allow_again,
    ask,
    decide_packages,
    decide_stream,
    decide_tools,
    held,
    locking,
    write_settings,
)

__all__ = ["decide_packages", "decide_stream", "decide_tools"]  # steps, which the action finds here

FABRIC = "nvidia-fabricmanager.service"
FABRIC_DROPIN = f"/etc/systemd/system/{FABRIC}.d/gpukiln.conf"
UNINSTALLER = "/usr/bin/nvidia-uninstall"
REPLACES = (
    "cuda-keyring",
    "/etc/apt/sources.list.d/cuda-*.list",
    "/etc/apt/preferences.d/cuda-repository-pin-*",
    "/etc/yum.repos.d/cuda-*.repo",
)
"""What NVIDIA's own installation steps leave: the same repository, under another name or key."""
VERSIONLOCK = "python3-dnf-plugin-versionlock"
NAMES = (
    "*nvidia*",
    "*cuda*",
    "*nvcuvid*",
    "*nvoptix*",
    "libnv*",
    "linux-*",
    "kernel*",
    "gpg",
    "system-release",
)
CACHE_ENTRY = "/var/tmp/{}.tar.gz"  # noqa: S108 - of a name that nobody guesses; /tmp may be memory


def look(role: Role) -> Looks:
    case = Case(role, {})
    settings = [
        MODPROBE,
        DRACUT,
        PREFERENCES,
        FABRIC_DROPIN,
        DKMS_SIGNING,
        INITRAMFS_SETTINGS,
        NO_AUTOINSTALL,
    ]
    names = [*NAMES, *INSTALLER_NEEDS, "dpkg-dev", NO_COMPILER, VERSIONLOCK, *case.signing_packages]
    names += ["nvlsm", "infiniband-diags", *role["extra_packages"]]
    serial = ["openssl", "x509", "-inform", "DER", "-noout", "-serial", "-in", case.certificate]
    own: dict[str, Any] = {
        "packages": names,
        "files": [*settings, STREAM_FILE, RELEASE_VARIABLE],
        "secrets": [case.private_key, case.certificate] if case.signs else [],
        "globs": [UNINSTALLER, *libraries_of(case.version)],
        "units": [FABRIC],
        "commands": {"serial": serial} if case.signs else {},
        "driver": {"version": case.version, "modules": ["nvidia", "nvidia-current", UMAD]},
    }
    repositories = [repository.looks for repository in case.repositories]
    return together(gpu_presence.LOOKS, own, *repositories)


look_stream = look_packages = look_tools = look_modules = look_finish = look
look_hold = look_signed = look_removed = look_runtime = look


def decide(role: Role, node: Node) -> Plan:
    """Refuse what can't work, and say which `way` it goes: remove, install, keep or none."""
    if reason := next(_wrong_request(role), ""):
        return Plan(refusal=reason)
    case = Case.of(role, node)
    if _replaces_loaded(case) and "users" not in node["answers"]:
        return ask("users", "bash", "-c", shared("scripts/bootstrap/nvidia-gpu-processes.sh"))
    if reason := next(_unfit(case), ""):
        return Plan(refusal=reason)
    if role["state"] == "absent":
        return _removal(case)
    if case.source == "preinstalled":
        return Plan(do={"way": "none"})
    return _keeping(case) if case.settled else _installation(case)


def _wrong_request(role: Role) -> Iterator[str]:
    """What is wrong with what was asked for."""
    system, source = role.system, role["source"]
    if system.family not in ("Debian", "RedHat") or (source == "distribution" and not system.apt):
        yield (
            f"Found {system.distribution} {system.version} and nvidia_driver_source {source}; wanted Debian"
            " or Ubuntu (distribution, nvidia), or Amazon Linux 2023 or RHEL 9 and its kin (nvidia). A .run"
            " file (runfile) and preinstalled go on all."
        )
    known = [row["branch"] for row in gpus.catalogue()["driver_branches"]]
    branch, version = int(role["branch"]), Case(role, {}).version
    if branch not in known:
        yield f"Found nvidia_driver_branch {branch}, wanted one of {', '.join(map(str, known))}."
    if version.partition(".")[0] != str(branch):
        yield (
            f"Found nvidia_driver_version '{version}' and nvidia_driver_branch {branch}; wanted a version of"
            " the branch. Leave it out for the last one known."
        )
    file, digest = role["runfile"], role["runfile_sha256"]
    if source == "runfile" and not (file and re.fullmatch("[0-9a-fA-F]{64}", digest)):
        yield (
            f"Found nvidia_driver_runfile '{file}' with SHA-256 '{digest}'; wanted the installer's address or"
            " path, and 64 hexadecimal digits."
        )
    if not role["keep_build_tools"] and not (system.apt and source in ("distribution", "nvidia")):
        yield (
            f"Found nvidia_driver_keep_build_tools false on {system.distribution} with nvidia_driver_source"
            f" {source}; wanted Debian or Ubuntu with distribution or nvidia, or true. DKMS's rpm can't be"
            " installed without a compiler, and the other sources' build tools are not the role's."
        )
    key, certificate = role["signing_key"], role["signing_certificate"]
    if bool(key) != bool(certificate):
        yield (
            f"Found nvidia_driver_signing_key '{key}' and nvidia_driver_signing_certificate '{certificate}';"
            " wanted both, or neither for a generated pair."
        )


def _replaces_loaded(case: Case) -> bool:
    """Whether a loaded driver would go. Under a running process that breaks it: old module, new libraries."""
    loaded = case.node["loaded"].get("nvidia")
    return loaded is not None and (case.role["state"] == "absent" or loaded != case.version)


def _unfit(case: Case) -> Iterator[str]:
    """Why nothing can be done on this node."""
    node, removes = case.node, case.role["state"] == "absent"
    users = node["answers"].get("users", {"stdout": ""})["stdout"].splitlines()
    if users:
        yield (
            f"Found driver {node['loaded']['nvidia']} in use by {', '.join(users)}; wanted to"
            f" {'remove it' if removes else f'install {case.version}'}. Drain the node first (kubectl drain,"
            " or stop these processes), and run this again."
        )
    if not case.kernels:
        yield "Found no kernel in /boot, wanted at least one that this machine's image can boot."
    if removes:
        return
    if case.fit.problems:
        yield f"Found {'; '.join(case.fit.problems)}."
    if case.source == "preinstalled":
        yield from _other_than_preinstalled(case)
        return
    here = f"from the source '{case.source}' on {case.role.system.distribution}"
    if case.fabric and not case.origin.fabric:
        yield (
            f"Found NVSwitch, and no fabric manager {here}; wanted one of the driver's version. NVIDIA's"
            " repository has it: nvidia_driver_source: nvidia."
        )
    if case.nvlink5 and not case.origin.nvlink5:
        yield (
            f"Found a GPU of HGX B200 or B300, and no package of NVLink's subnet manager (NVLSM) {here};"
            " wanted nvlsm, without which no fabric manager starts there. NVIDIA's repository has it:"
            " nvidia_driver_source: nvidia."
        )
    branches = packages.driver_branches(case.packages)
    if case.source == "runfile" and branches:
        # The installer's driver and a packaged one overwrite each other's files.
        yield (
            f"Found the driver installed as packages ({', '.join(branches)}), wanted none next to NVIDIA's"
            " installer. Remove them first, with nvidia_driver_state: absent."
        )


def _other_than_preinstalled(case: Case) -> Iterator[str]:
    versions = [str(case.module(kernel).get("version") or "none") for kernel in case.kernels]
    if set(versions) != {case.version}:
        yield (
            f"Found driver {', '.join(versions)} for kernel {', '.join(case.kernels)}; wanted {case.version},"
            " and nvidia_driver_source is preinstalled. Take another base image, or set"
            " nvidia_driver_version to what it carries."
        )


def _keeping(case: Case) -> Plan:
    plan = decide_finish(case.role, case.node)
    plan.do["way"] = "keep"
    return plan


def _installation(case: Case) -> Plan:
    """`do`: what the sources need; which packages is decided when these are there."""
    return Plan(
        do={
            "way": "install",
            "components": list(case.origin.components),
            "dkms_repository": case.dkms_from_elsewhere,
            "dkms_missing": "dkms" not in case.packages,
            "replaces": list(REPLACES),
            "streams": not case.in_stream,
        }
    )


def _removal(case: Case) -> Plan:
    """All of the driver goes, whoever installed it.

    `do`: what is taken out of the kernel, `uninstaller`, commands that `release` what is held, `packages`,
    whether the `stream` is left, and the commands that rebuild each `initramfs`, where nouveau may be again.
    """
    plan, node = Plan(), case.node
    of_driver = [
        *packages.driver_branches(case.packages),
        *(name for name in HELPERS if name in case.packages),
    ]
    settings = (MODPROBE, PREFERENCES, DKMS_SIGNING, DRACUT, FABRIC_DROPIN)
    plan.remove(path for path in settings if node["files"][path])
    locked = [*of_driver, *(name for name in case.packages if KERNEL_RPMS.fullmatch(name))]
    # Holds go first: apt and dnf would refuse to remove a held package.
    kept = held(case, case.kernel_names if case.apt else locked)
    plan.do = {
        "way": "remove",
        "unload": "nvidia" in node["loaded"],
        "uninstaller": bool(node["globs"][UNINSTALLER]),
        "release": locking(case, kept, hold=False) if of_driver else [],
        "packages": of_driver,
        "stream": bool(node["files"][STREAM_FILE]),
        "initramfs": [_rebuild(case, kernel) for kernel in case.kernels] if plan.absent else [],
    }
    plan.lines = [f"-{name}" for name in of_driver]
    plan.lines += [f"-{UNINSTALLER}: all that it installed"] if plan.do["uninstaller"] else []
    plan.lines += [f"-module stream of {STREAM_FILE}"] if plan.do["stream"] else []
    return plan if plan.acts or case.role.check else decide_removed(case.role, node)


def decide_removed(_role: Role, node: Node) -> Plan:
    """Refuse where a module of the driver is left."""
    left = [
        kernel["modules"]["nvidia"]["filename"]
        for kernel in node["kernels"].values()
        if "nvidia" in kernel["modules"]
    ]
    if left:
        return Plan(
            refusal=f"Found {', '.join(left)} after the removal, wanted no module of the driver. Who"
            " installed it? Neither packages nor NVIDIA's installer."
        )
    return Plan(do={"way": "none"})


def decide_modules(role: Role, node: Node) -> Plan:
    """Leave one version, and have DKMS build for the kernels that have none.

    `do`: packages of other branches go by `remove`; DKMS's `module` is added where it is not `registered`,
    and built for `kernels`; `entries` are those of the cache, {kernel, id, key, file, there}.
    """
    case = Case.of(role, node)
    others = case.others
    plan = Plan(
        lines=[f"-{name}" for name in others],
        do={"remove": others, "registered": True, "kernels": [], "entries": []},
    )
    left = {name: versions for name, versions in case.packages.items() if name not in others}
    # Ubuntu's names of old branches are transitional packages, and bring another branch.
    if strangers := packages.driver_strangers(left, case.version):
        return plan.refuse(
            f"Found {', '.join(strangers)} installed; wanted {case.version} of everything that belongs to the"
            f" driver. Does a source of packages other than '{case.source}' bring it?"
        )
    if not case.origin.dkms or not node["sources"]:
        return plan
    # Packages of one version in two kinds conflict: there is one.
    module, registered = next(iter(node["sources"].items()))
    # A kernel whose headers can't be had any more is removed or refused at the end.
    build = [kernel for kernel in case.unbuilt if node["kernels"][kernel]["headers"]]
    plan.do |= {"module": module, "version": case.version, "registered": registered, "kernels": build}
    plan.lines += [] if registered else [f"+dkms {module}/{case.version}"]
    plan.lines += [f"+{module}/{case.version} for {kernel}" for kernel in build]
    # A pair that the node generates signs nothing that another one could use.
    cached = role["module_cache_dir"] and (not case.signs or role["signing_key"])
    if not (cached and build):
        return plan
    asked = {kernel: _key_command(case, kernel) for kernel in build}
    answers = node["answers"]
    if missing := {kernel: command for kernel, command in asked.items() if kernel not in answers}:
        return Plan(ask={"commands": missing})
    for kernel in build:
        if answers[kernel]["rc"] != 0:
            return plan.refuse(f"Found that modules have no key: {answers[kernel]['stderr'].strip()}")
        key = answers[kernel]["stdout"]
        name = hashlib.sha256(key.encode()).hexdigest()
        there = (Path(role["module_cache_dir"]) / f"{name}.tar.gz").is_file()
        entry = {"kernel": kernel, "id": name, "key": key, "file": CACHE_ENTRY.format(name), "there": there}
        plan.do["entries"].append(entry)
    return plan


def _key_command(case: Case, kernel: str) -> list[str]:
    """What the modules of a kernel are made of."""
    certificate = [case.certificate] if case.signs else []
    script = case.role.file("module-key.sh")
    return ["sh", "-c", script, "module-key", case.version, case.fit.modules, kernel, *certificate]


def decide_finish(role: Role, node: Node) -> Plan:
    """What is left when the modules are there, and what keeps a driver as it should be.

    `do`: commands that `sign` again, kernels that go by the package manager (`purge`), whether `compilers`
    go,
    and the commands that rebuild each `initramfs` and `hold` packages.
    """
    case = Case.of(role, node)
    bad, newest_is_good = case.bad, case.kernels[-1] not in case.bad
    # Never the newest kernel: it is the one that boots.
    purge = bad if role["purge_other_kernels"] and newest_is_good else []
    if bad and not purge:
        return Plan(refusal=_without_module(case))
    plan, left = Plan(), [kernel for kernel in case.kernels if kernel not in purge]
    images = [f"linux-{part}-{kernel}" for part in ("image", "headers", "modules") for kernel in purge]
    if purge and case.apt:
        if "purge" not in node["answers"]:
            there = [name for name in images if name in case.packages]
            return ask("purge", "apt-get", "purge", "--simulate", "--allow-change-held-packages", *there)
        if refusal := _takes_updates(case, purge):
            return Plan(refusal=refusal)
    if case.nvlink5 and (
        bare := [kernel for kernel in left if UMAD not in node["kernels"][kernel]["modules"]]
    ):
        return Plan(
            refusal=f"Found no module {UMAD} for kernel {', '.join(bare)}, wanted it: without it no fabric"
            " manager starts on HGX B200 and B300. linux-modules-extra-KERNEL has it on Ubuntu,"
            " kernel-modules-extra on Amazon Linux and RHEL."
        )
    write_settings(plan, case)
    allow_again(plan, case)
    if case.fabric:
        _fabric(plan, case)
    stale = case.stale(written=any(file.path in (MODPROBE, DRACUT) for file in plan.files))
    plan.do = {
        "sign": [_sign(case, kernel) for kernel in case.missigned if kernel in left],
        "purge": _purge(case, purge, images),
        "compilers": case.origin.dkms and not role["keep_build_tools"] and bool(node["compilers"]),
        "initramfs": [_rebuild(case, kernel) for kernel in stale if kernel in left],
        **_holding(case, gone=images),
    }
    plan.lines += [f"sign the module of {kernel}" for kernel in case.missigned if kernel in left]
    plan.lines += [f"-kernel {kernel}" for kernel in purge]
    plan.lines += [f"-{name}" for name in (node["compilers"] if plan.do["compilers"] else ())]
    plan.lines += [f"rebuild the initramfs of {kernel}" for kernel in stale if kernel in left]
    plan.lines += [f"hold {name}" for name in _unheld(case, images)]
    return plan


def decide_hold(role: Role, node: Node) -> Plan:
    """`do`: the command that holds kernel and driver, and whether dnf's plug-in for it is missing."""
    return Plan(do=_holding(Case.of(role, node)))


def decide_signed(role: Role, node: Node) -> Plan:
    """Refuse what is still signed by another key."""
    case = Case.of(role, node)
    if not case.missigned:
        return Plan()
    signers = ", ".join(case.module(kernel)["sig_key"] or "none" for kernel in case.missigned)
    return Plan(
        refusal=f"Found the module {case.origin.module} of {', '.join(case.missigned)} signed by the key"
        f" {signers}, wanted {case.signer or 'one'} ({case.certificate}). What DKMS said is in"
        " /var/lib/dkms/*/*/RELEASE/*/log/make.log."
    )


def decide_runtime(role: Role, node: Node) -> Plan:
    """Load the driver where there is a GPU. `do`: `load`, `reboot`."""
    case, plan = Case.of(role, node), Plan(do={"load": False, "reboot": False})
    if not node["pci"]["gpus"] or role["state"] == "absent":
        return plan
    if not node["loaded"]:
        # Before the attempt: the kernel's own error names no way out.
        if not role.check and "signature" not in node["answers"]:
            script = shared("scripts/bootstrap/nvidia-module-signature.sh")
            return ask("signature", "bash", "-c", script, "bash", case.origin.module)
        if not role.check and node["answers"]["signature"]["rc"] != 0:
            answer = node["answers"]["signature"]
            return plan.refuse((answer["stdout"] or answer["stderr"]).strip())
        plan.do["load"] = True
        plan.lines.append("+module nvidia")
    elif not role.check:
        plan = decide_loaded(role, node)
    if case.fabric and not role.check and not plan.refusal:
        plan.start_unit(node, FABRIC)
    return plan


def look_loaded(_role: Role) -> Looks:
    return {"driver": {"version": "", "modules": []}}


def decide_loaded(role: Role, node: Node) -> Plan:
    """Reboot into the right driver where that is allowed, and refuse another one where not."""
    if node["loaded"].get("nvidia") == Case(role, node).version:
        return Plan(do={"load": False, "reboot": False})
    if role["reboot_allowed"]:
        return Plan(lines=["reboot"], do={"load": False, "reboot": True})
    return Plan(
        refusal=f"{_loaded_and_wanted(role, node)} Reboot the machine, or allow it with"
        " nvidia_driver_reboot_allowed."
    )


def look_rebooted(role: Role) -> Looks:
    return look_loaded(role)


def decide_rebooted(role: Role, node: Node) -> Plan:
    """Refuse another driver than the wanted one: what was read before the reboot says nothing."""
    if node["loaded"].get("nvidia") == Case(role, node).version:
        return Plan()
    return Plan(
        refusal=f"{_loaded_and_wanted(role, node)} The machine was allowed to reboot and another driver"
        " came up: which one do its initramfs and /lib/modules hold?"
    )


def _loaded_and_wanted(role: Role, node: Node) -> str:
    loaded = node["loaded"].get("nvidia") or "no NVIDIA driver"
    return f"Found {loaded} loaded, wanted {Case(role, node).version}."


def _without_module(case: Case) -> str:
    versions = [str(case.module(kernel).get("version") or "none") for kernel in case.bad]
    headers = "linux-headers" if case.apt else "kernel-devel"
    return (
        f"Kernel {', '.join(case.bad)}: found module {case.origin.module} in version {', '.join(versions)},"
        f" wanted {case.version}. Install the kernel's headers ({headers}-RELEASE) or remove the kernel; what"
        " DKMS said is in"
        " /var/lib/dkms/*/*/RELEASE/*/log/make.log."
    )


def _takes_updates(case: Case, purge: Sequence[str]) -> str:
    """Why kernels can't be purged: linux-image-aws and linux-aws go with the one that they still follow.

    Where they are held, apt gives up.
    """
    answer = case.node["answers"]["purge"]
    taken = [name for name in packages.simulated_removals(answer["stdout"]) if name in case.updates]
    if answer["rc"] == 0 and not taken:
        return ""
    return (
        f"Found that kernel {', '.join(purge)}, which has no module, is not purged:"
        f" {', '.join(taken) or answer['stderr'].strip()} would go. Wanted to keep what the kernel's"
        " updates come by. nvidia_driver_upgrade_kernel: true brings them to the newest kernel first;"
        " nvidia_driver_purge_other_kernels: false keeps the kernel."
    )


def _purge(case: Case, purge: Sequence[str], images: list[str]) -> dict[str, Any]:
    if not purge:
        return {}
    if case.apt:
        return {"apt": images}
    # The module ansible.builtin.dnf can't lift the protection of the running kernel.
    lifted = ["dnf", "--assumeyes", "--setopt=protect_running_kernel=False", "remove"]
    return {"command": [*lifted, *(f"kernel*-{kernel}" for kernel in purge)]}


def _fabric(plan: Plan, case: Case) -> None:
    gpu_presence.have(plan, case.node)
    infiniband = "modprobe@mlx5_ib.service modprobe@ib_umad.service"
    # NVLSM and the fabric manager reach the NVSwitches through InfiniBand's management datagrams, and nothing
    # else loads the modules (NVIDIA/gpu-operator, issue 2781).
    modules = f"Wants={infiniband}\nAfter={infiniband}\n" if case.nvlink5 else ""
    plan.write(
        case.node,
        FABRIC_DROPIN,
        f"# {MANAGED}\n[Unit]\nAfter=nvidia-persistenced.service\n{modules}\n[Service]\n"
        "# An image may run on machines without NVSwitch, where it would fail. Exit code 1: skipped.\n"
        "ExecCondition=/usr/local/sbin/nvidia-gpu-present --nvswitch"
        f" --or-gpus {','.join(gpus.nvlink5_ids())}\n",
    )
    plan.enable_unit(case.node, FABRIC)


def _sign(case: Case, kernel: str) -> list[str]:
    """What was built before the pair was there, or with another one, is built again."""
    row = next(
        entry
        for entry in case.node["dkms"]
        if entry["module"].startswith("nvidia") and entry["version"] == case.version
    )
    name = f"{row['module']}/{row['version']}"
    return ["sh", "-ec", "dkms remove $1 -k $2 && dkms install $1 -k $2", "sh", name, kernel]


def _rebuild(case: Case, kernel: str) -> list[str]:
    if case.apt:
        there = case.node["kernels"][kernel]["initramfs"] is not None
        return ["update-initramfs", "-u" if there else "-c", "-k", kernel]
    return ["dracut", "--force", f"/boot/initramfs-{kernel}.img", kernel]


def _holding(case: Case, gone: Sequence[str] = ()) -> dict[str, Any]:
    names = _unheld(case, gone)
    no_versionlock = bool(names) and not case.apt and VERSIONLOCK not in case.packages
    return {"hold": locking(case, names, hold=True), "lacks_versionlock": no_versionlock}


def _unheld(case: Case, gone: Sequence[str]) -> list[str]:
    if not case.role["hold"]:
        return []
    there = case.packages
    names = packages.driver_packages(there, case.version)
    names += [name for name in there if name in packages.OWN_VERSION]
    if case.apt:
        kernels = {*case.kernel_names, case.precompiled} - {*gone}
        names += [name for name in there if name in kernels]
    else:
        names += [name for name in there if KERNEL_RPMS.fullmatch(name)]
    return [name for name in dict.fromkeys(names) if not all(version["held"] for version in there[name])]
