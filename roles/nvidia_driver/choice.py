"""Which packages bring the driver: what can be had, what apt or dnf would do, what is put off meanwhile."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..packages.failure import package_failure
from ..plan import MANAGED, File, Node, Plan, Role, upstream
from . import kernels, packages
from .case import (
    DKMS_SIGNING,
    INSTALLER_NEEDS,
    KERNEL_RPMS,
    MODPROBE,
    NO_COMPILER,
    Case,
    libraries_of,
)
from .origin import precompiled_prefix

DRACUT = "/etc/dracut.conf.d/gpukiln-nvidia.conf"
DRACUT_TEXT = 'omit_drivers+=" nouveau "\ninstall_items+=" /etc/modprobe.d/gpukiln-nvidia.conf "\n'
"""A generic initramfs of dracut takes every graphics driver and no file of this machine's."""
NO_NOUVEAU = f"""\
# {MANAGED}
# nouveau must not take the GPU before the NVIDIA driver, in the initramfs either.
blacklist nouveau
options nouveau modeset=0
"""
DEBIANS_MODULE = "nvidia-current"
NO_GPU = f"""\
# Debian has nvidia-drm loaded at every boot. Without a GPU that fails, and systemd-modules-load.service fails
# with it: there is nothing to load then. Of two such rules the one of the first file is taken.
install nvidia-drm grep -qs 0x10de /sys/bus/pci/devices/*/vendor || exit 0; \
modprobe nvidia-modeset; modprobe -i {DEBIANS_MODULE}-drm $CMDLINE_OPTS
"""
PREFERENCES = "/etc/apt/preferences.d/gpukiln-nvidia-driver"
RELEASE_VARIABLE = "/etc/dnf/vars/releasever"
INITRAMFS_SETTINGS = "/etc/initramfs-tools/update-initramfs.conf"
NO_AUTOINSTALL = "/etc/dkms/no-autoinstall"
"""DKMS's maintainer scripts build nothing while it is there."""
MARK = "# put off by gpukiln"
"""Marks settings that are changed during a transaction, so that the next run restores them after a kill."""
APT_INSTALL = (
    "apt-get",
    "install",
    "--no-install-recommends",
    "--allow-downgrades",
    # the role itself holds the driver's packages
    "--allow-change-held-packages",
    "--option=DPkg::Options::=--force-confdef",
    "--option=DPkg::Options::=--force-confold",
    # unattended-upgrades runs at the first boot and holds the lock for minutes
    "--option=DPkg::Lock::Timeout=600",
)
PREFERRING = """\
file=$(mktemp)
trap 'rm -f "$file"' EXIT
{ cat /etc/apt/preferences 2>/dev/null; printf '\\n%s' "$1"; } >"$file"
shift
"$@" --option=Dir::Etc::preferences="$file"
"""
"""Has apt rehearse with preferences that are not written yet."""
REPOQUERY = (
    "dnf",
    "--quiet",
    "repoquery",
    "--queryformat",
    "%{name} | %{epoch}:%{version}-%{release} | %{arch}",
)
"""In the form of `apt-cache madison`."""


def decide_packages(role: Role, node: Node) -> Plan:
    """Choose packages that can be had, and refuse before anything is changed.

    `do`: `said` are notes for people; `install` and `newer` are the arguments of apt or dnf, `transaction` a
    command of apt's that puts one branch into the place of another, `unlock` a command of dnf's; `drop` is a
    package that goes, `after` what is restored when all of it is there, `signing` what is missing of a pair.
    """
    case = Case.of(role, node)
    plan = Plan(do={"said": [], "install": [], "transaction": [], "unlock": [], "newer": [], "drop": ""})
    if not role["sources_known"]:
        plan.lines = [f"+NVIDIA driver {case.version}", f"+kernel modules for {', '.join(case.kernels)}"]
        write_settings(plan, case)
        return plan
    chosen_case: Case | Plan = case
    if case.candidates:
        chosen_case = _precompiled(plan, case)
    if isinstance(chosen_case, Plan):
        return chosen_case
    case = chosen_case
    chosen = _by_apt(plan, case) if case.apt else _by_dnf(plan, case)
    if chosen.ask or chosen.refusal:
        return chosen
    write_settings(plan, case)
    if case.signs:
        plan.do["signing"] = _signing(plan, case)
    if case.source == "runfile" and not _has_libraries(case):
        # Folders of the installer's archive, for --kernel-module-build-directory.
        kind = "kernel-open" if case.fit.modules == "open" else "kernel"
        plan.do["installer"] = {"kernel": case.kernels[-1], "modules": kind}
        plan.lines.append(f"+NVIDIA's installer {role['runfile']}")
    missing = packages.driver_packages(case.packages, case.version)
    if set(case.wanted) - set(missing) or plan.do.get("installer"):
        plan.lines.insert(0, f"+NVIDIA driver {case.version}")
    if case.origin.dkms and case.bad:
        plan.lines.append(f"+kernel modules for {', '.join(case.bad)}")
    if not role.check:
        _put_off(plan, case)
    return plan


def _precompiled(plan: Plan, case: Case) -> Case | Plan:
    """Choose between Canonical's modules and DKMS.

    They are built of one driver version for one kernel, and both may lag: their packages want
    nvidia-kernel-common of exactly that version (Depends: >= VERSION, <= VERSION-1), and the newest kernel
    may have none yet. So a simulation of apt decides whether they can be installed with the driver, and for
    which kernels.
    """
    answers = case.node["answers"]
    if "archive" not in answers:
        return ask("archive", *_madison(case))
    known = {row[0] for row in packages.rows(answers["archive"]["stdout"])} | set(case.packages)
    preferred = next((name for name in case.candidates if name in known), "")
    if not preferred:
        return case.taking("")
    trial = case.taking(preferred)
    pins = packages.driver_pins(answers["archive"]["stdout"], trial.wanted, case.version, case.packages)[0]
    if "trial" not in answers:
        gone = [f"{name}-" for name in trial.others]
        asked = [*APT_INSTALL, *pins, preferred, *_kernel_pins(trial), *gone, "--simulate"]
        return ask("trial", *asked)
    updates = case.updates if case.role["purge_other_kernels"] else None
    prefix = precompiled_prefix(case.branch, case.fit.modules)
    lag = kernels.precompiled_lag(answers["trial"], case.kernels, prefix, case.packages, updates)
    if not lag:
        return trial
    plan.do["said"].append(
        f"{preferred} does not go with driver {case.version}: {lag}. DKMS compiles the modules."
    )
    return case.taking("")


def _madison(case: Case) -> list[str]:
    either = [name for trial in (case.taking(""), case.taking("any")) for name in trial.wanted]
    names = [*case.wanted, *either, *case.candidates, *case.headers, *case.modules_extra, *case.followers]
    return ["apt-cache", "madison", *dict.fromkeys(names)]


def _by_apt(plan: Plan, case: Case) -> Plan:
    answers, there = case.node["answers"], case.packages
    if "archive" not in answers:
        return ask("archive", *_madison(case))
    archive = answers["archive"]["stdout"]
    known = {row[0] for row in packages.rows(archive)} | set(there)
    headers = [name for name in case.headers if name in known]
    if case.source == "runfile":
        plan.do["install"] = _absent([*INSTALLER_NEEDS, *headers], case)
        return plan
    pins, missing = packages.driver_pins(archive, case.wanted, case.version, there)
    if missing:
        return _not_there(case, missing[0], packages.madison_versions(archive, missing[0]))
    install = [*pins, *_kernel_pins(case), *(case.origin.nvlink5 if case.nvlink5 else ())]
    install += [name for name in case.modules_extra if name in known]
    # Precompiled modules bring their kernel; DKMS needs the headers of each. A kernel whose headers have left
    # the archive is checked after the installation. Build tools that do not stay come when they are needed.
    if case.precompiled:
        install.append(case.precompiled)
    elif case.role["keep_build_tools"]:
        install += [*headers, *(("gcc", "dpkg-dev") if NO_COMPILER in there else ())]
        plan.do["drop"] = NO_COMPILER if NO_COMPILER in there else ""
    command = [*APT_INSTALL, *install, *(f"{name}-" for name in case.others)]
    rehearsed = set(case.wanted) - set(packages.driver_packages(there, case.version))
    if rehearsed and "rehearsal" not in answers:
        simulated = [*command, "--simulate"]
        if case.source == "nvidia":
            simulated = ["sh", "-c", PREFERRING, "sh", _preferences(case), *simulated]
        return ask("rehearsal", *simulated)
    if rehearsed and (refusal := _rehearsed(case, install)):
        return Plan(refusal=refusal)
    absent = packages.not_installed(install, there)
    plan.lines += [f"+{name}" for name in absent] + [f"-{name}" for name in case.others]
    if absent or plan.do["drop"]:
        plan.do["install"] = install
    # Both in one transaction, which ansible.builtin.apt has no words for. Left to itself, apt keeps packages
    # that are held or belong together, and gives up.
    if case.others:
        plan.do["transaction"] = [*command, "--yes"]
    return plan


def _rehearsed(case: Case, names: Sequence[str]) -> str:
    """Why what apt would do is refused."""
    answer, system = case.node["answers"]["rehearsal"], case.role.system
    if answer["rc"] != 0:
        return package_failure({"msg": answer["stdout"], "stderr": answer["stderr"]}, names)
    # On newer releases the branch's names are transitional packages, and bring another branch.
    foreign = packages.simulated_strangers(answer["stdout"], case.branch)
    if not foreign:
        return ""
    return (
        f"Found that apt would install {', '.join(foreign)} for branch {case.branch}: on"
        f" {system.distribution} {system.version} its packages lead to another branch. Wanted"
        f" {case.version}. Ask for the other branch, or take nvidia_driver_source: nvidia."
    )


def _by_dnf(plan: Plan, case: Case) -> Plan:
    answers, there, upgrades = case.node["answers"], case.packages, case.role["upgrade_kernel"]
    parts = ["kernel*-devel", *(["kernel*-modules-extra"] if case.nvlink5 else [])]
    names_of_driver = [] if case.source == "runfile" else case.wanted
    if "archive" not in answers:
        return ask("archive", *REPOQUERY, "--showduplicates", *names_of_driver, *parts)
    series = [name for name in there if name.startswith("kernel") and KERNEL_RPMS.fullmatch(name)]
    series = [name for name in series if "-" not in name]  # Amazon Linux has several: kernel, kernel6.12, ...
    updated = [f"{name}{part}" for name in series for part in ("", "-devel")]
    if upgrades and "newer" not in answers:
        return ask("newer", *REPOQUERY, "--disableplugin=versionlock", "--upgrades", *updated)
    archive = answers["archive"]["stdout"]
    pins, missing = packages.driver_pins(archive, names_of_driver, case.version, there)
    if missing:
        return _not_there(case, missing[0], packages.madison_versions(archive, missing[0]))
    names = [pin.replace("=", "-") for pin in pins]
    if case.source == "runfile":
        names = list(INSTALLER_NEEDS)
    if case.nvlink5:
        names += [*case.origin.nvlink5, *kernels.kernel_parts(archive, there, case.kernels, "modules-extra")]
    names += kernels.kernel_parts(archive, there, case.kernels, "devel")
    whole = {f"{name}-{version['version']}" for name, versions in there.items() for version in versions}
    whole |= {
        f"{name}-{version['version']}.{version['arch']}"
        for name, versions in there.items()
        for version in versions
    }
    absent = [name for name in names if name not in there and name not in whole]
    plan.lines += [f"+{name}" for name in absent]
    plan.do["install"] = names if absent else []
    if upgrades:
        _update_by_dnf(plan, case, updated)
    # A lock hides every other version from dnf.
    in_step = packages.driver_packages(there, case.version)
    moving = [name for name in packages.driver_branches(there) if name not in in_step]
    moving += [name for name in there if plan.do["newer"] and KERNEL_RPMS.fullmatch(name)]
    if locked := held(case, moving):
        plan.do["unlock"] = locking(case, locked, hold=False)
    return plan


def _update_by_dnf(plan: Plan, case: Case, names: list[str]) -> None:
    """Bring the kernel up to date, with its headers: the archive keeps those of the newest one only.

    Amazon Linux has repositories of one release each, and a system asks those of the release that it was made
    of: they have no newer kernel (docs.aws.amazon.com/linux/al2023/ug/deterministic-upgrades-usage.html).
    """
    newer = [
        " ".join(row[:2]) for row in packages.rows(case.node["answers"]["newer"]["stdout"]) if len(row) == 3
    ]
    if newer:
        plan.do["newer"] = names
        plan.lines += [f"+{line}" for line in newer]
    held_at = ((case.node["files"][RELEASE_VARIABLE] or {"text": ""})["text"]).strip()
    if case.role.system.distribution == "Amazon" and held_at != "latest":
        release = held_at or upstream(case.packages["system-release"][0]["version"])
        plan.do["said"].append(
            f"The kernel stays: found Amazon Linux held at release {release}, whose repositories have no"
            " newer one. A newer base image brings a newer kernel; a node gets it with `latest` in"
            " /etc/dnf/vars/releasever."
        )


def decide_stream(role: Role, node: Node) -> Plan:
    """Take the branch's module stream of dnf. `do`: whether one is left for it, and its name."""
    case = Case.of(role, node)
    if "streams" not in node["answers"]:
        return ask("streams", "dnf", "--quiet", "module", "list", "nvidia-driver")
    rows = [line.split() for line in node["answers"]["streams"]["stdout"].splitlines()]
    offered = [row[1] for row in rows if row[:1] == ["nvidia-driver"]]
    if case.origin.stream not in offered:
        return Plan(
            refusal=f"Found the streams {', '.join(offered) or 'none'} of the module nvidia-driver in dnf's"
            f" repositories, wanted {case.origin.stream}. Ask for a branch that {role.system.distribution}"
            f" {role.system.version} has."
        )
    stream = f"nvidia-driver:{case.origin.stream}"
    return Plan(lines=[f"+stream {stream}"], do={"stream": stream})


def decide_tools(role: Role, node: Node) -> Plan:
    """What compiles, as long as it is needed, for new kernels too. `do`: `install`."""
    case = Case.of(role, node)
    if not case.unbuilt:
        return Plan(do={"install": []})
    if "headers" not in node["answers"]:
        return ask("headers", "apt-cache", "madison", *case.headers)
    offered = {row[0] for row in packages.rows(node["answers"]["headers"]["stdout"])}
    install = ["gcc", *(name for name in case.headers if name in offered)]
    return Plan(lines=[f"+{name}" for name in install], do={"install": install})


def write_settings(plan: Plan, case: Case) -> None:
    """What is read before the packages' own scripts run: nouveau is blocked, the module has its options."""
    options = " ".join(f"{name}={value}" for name, value in sorted(case.role["module_options"].items()))
    line = f"options {case.origin.module} {options}\n" if options else ""
    rule = NO_GPU if case.origin.module == DEBIANS_MODULE else ""
    plan.write(case.node, MODPROBE, f"{NO_NOUVEAU}{rule}{line}")
    if not case.apt:
        plan.write(case.node, DRACUT, DRACUT_TEXT)
    if case.apt and case.source == "nvidia":
        plan.write(case.node, PREFERENCES, _preferences(case))
    if case.signs:
        plan.write(case.node, DKMS_SIGNING, case.signing_text)


def _preferences(case: Case) -> str:
    """NVIDIA's metapackages take the newest release of what they bring; this makes it the wanted one."""
    names = "*nvidia* *cuda-drivers* libcuda1 libcudadebugger1 libnvcuvid1 libxnvctrl0"
    return f"# {MANAGED}\nPackage: {names}\nPin: version {case.version}-*\nPin-Priority: 1001\n"


def _put_off(plan: Plan, case: Case) -> None:
    """Put off what the packages' triggers would do several times, or at the wrong moment.

    The initramfs is rebuilt once, at the end, being out of date. What compiles and what need not is known
    only after the transaction, and then it compiles for all kernels at once. An administrator's own settings
    stay.
    """
    node, after = case.node, Plan()
    settings, no_autoinstall = (node["files"][path] for path in (INITRAMFS_SETTINGS, NO_AUTOINSTALL))
    written = any(file.path == MODPROBE for file in plan.files)
    if settings and case.stale(written=written):
        text = settings["text"].replace("\nupdate_initramfs=yes\n", f"\nupdate_initramfs=no {MARK}\n")
        if text != settings["text"]:
            plan.files.append(File(INITRAMFS_SETTINGS, text, settings["mode"]))
            after.files.append(File(INITRAMFS_SETTINGS, settings["text"], settings["mode"]))
    tools = not case.role["keep_build_tools"]
    compiles = case.origin.dkms and (case.role["upgrade_kernel"] or tools or plan.do["install"])
    if case.apt and case.source != "runfile" and compiles and not no_autoinstall and plan.acts:
        plan.files.append(File(NO_AUTOINSTALL, f"{MARK}\n"))
        after.remove([NO_AUTOINSTALL])
    allow_again(after, case)
    plan.do["after"] = {"files": after.files, "absent": after.absent}
    plan.do["tools"] = case.apt and case.origin.dkms and tools


def allow_again(plan: Plan, case: Case) -> None:
    """What a run put off that was interrupted."""
    settings, no_autoinstall = (case.node["files"][path] for path in (INITRAMFS_SETTINGS, NO_AUTOINSTALL))
    if settings and f"update_initramfs=no {MARK}" in settings["text"]:
        text = settings["text"].replace(f"update_initramfs=no {MARK}", "update_initramfs=yes")
        plan.files.append(File(INITRAMFS_SETTINGS, text, settings["mode"], settings["text"]))
    if no_autoinstall and MARK in no_autoinstall["text"]:
        plan.remove([NO_AUTOINSTALL])


def _signing(plan: Plan, case: Case) -> dict[str, Any]:
    """What is missing of the pair that DKMS signs with."""
    node = case.node
    folders = sorted({str(Path(path).parent) for path in (case.private_key, case.certificate)})
    pair = {
        "packages": _absent(case.signing_packages, case),
        "folders": dict.fromkeys(folders, "0700"),
        "key": case.private_key,
        "certificate": case.certificate,
        "generate": not case.role["signing_key"] and not node["files"][case.certificate],
        "exported": case.exported,
        "missing": not case.has_pair,
    }
    if pair["missing"]:
        plan.lines.append(f"+{case.certificate}: signs the modules")
    return pair


def _kernel_pins(case: Case) -> list[str]:
    """With their versions: ansible.builtin.apt leaves alone what is installed and has none."""
    archive = case.node["answers"]["archive"]["stdout"]
    return packages.newest_of(archive, case.followers) if case.role["upgrade_kernel"] else []


def _not_there(case: Case, name: str, versions: Sequence[str]) -> Plan:
    return Plan(
        refusal=f"Found {name} in {', '.join(versions) or 'no version'} in the sources of"
        f" {case.role.system.manager}, wanted {case.version}. Ask for a version that is there (Debian has"
        " the last ones in its security suite), or for another nvidia_driver_source."
    )


def _absent(names: Iterable[str], case: Case) -> list[str]:
    return [name for name in names if name not in case.packages]


def _has_libraries(case: Case) -> bool:
    return any(case.node["globs"][pattern] for pattern in libraries_of(case.version))


def ask(name: str, *command: str) -> Plan:
    return Plan(ask={"commands": {name: list(command)}})


def held(case: Case, names: Iterable[str]) -> list[str]:
    """Those that are held; of an rpm system the kernels too, which its driver is locked with."""
    there = case.packages
    return [name for name in dict.fromkeys(names) if any(version["held"] for version in there.get(name, []))]


def locking(case: Case, names: Sequence[str], *, hold: bool) -> list[str]:
    """The command that holds packages, or lets them go. dpkg_selections takes one a call."""
    if not names:
        return []
    if case.apt:
        return ["apt-mark", "hold" if hold else "unhold", *names]
    return ["dnf", "--quiet", "versionlock", "add" if hold else "delete", *names]
