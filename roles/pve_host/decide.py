"""What a Proxmox VE host needs to give GPUs away: vfio-pci has them before their drivers, and an IOMMU.

Sources: Proxmox VE's manual (pve-docs qm-pci-passthrough.adoc: modules, softdep, ids; system-booting.adoc:
where the kernel's arguments are, for GRUB and for systemd-boot), modprobe.d(5) (install, softdep), the
kernel's Documentation/ABI/testing/sysfs-bus-pci (driver_override).
"""

import hashlib
import json
import re
from typing import Any

from ..plan import MANAGED, File, Looks, Node, Plan, Role, shared

OPTIONS = "/etc/modprobe.d/gpukiln-vfio.conf"
MODULES = "/etc/modules-load.d/gpukiln-vfio.conf"
GRUB = "/etc/default/grub.d/gpukiln-iommu.cfg"
CMDLINE = "/etc/kernel/cmdline"  # systemd-boot's, where proxmox-boot-tool writes it from
BOOT_TOOL = "/etc/kernel/proxmox-boot-uuids"
GRUB_DEFAULTS = "/etc/default/grub"
STAMP = "/etc/gpukiln/pve-host.json"
LOADED = ("vfio", "vfio_iommu_type1", "vfio_pci")
# What would else take a function of a GPU first, at boot.
AFTER = ("nouveau", "nvidia", "nvidiafb", "snd_hda_intel", "xhci_pci", "i2c_nvidia_gpu", "amdgpu")
# PCI classes: VGA, 3D and other display controllers
DISPLAY = ("0x0300", "0x0302", "0x0380")
# domain:bus:device, with or without a function, as lspci -D prints it
ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(\.[0-7])?"
ID = r"[0-9a-f]{4}:[0-9a-f]{4}"
INTEL_BEFORE = (6, 8)  # from there its IOMMU is on by itself


def look(_role: Role) -> Looks:
    # The same probe as node.passthrough's, so both agree on what a host has.
    host = ["python3", "-c", shared("gpukiln/probe/passthrough.py"), "/"]
    return {
        "files": [OPTIONS, MODULES, GRUB, CMDLINE, BOOT_TOOL, GRUB_DEFAULTS, STAMP],
        "commands": {
            "version": ["pveversion"],
            "host": host,
            "cpu": ["grep", "-m1", "vendor_id", "/proc/cpuinfo"],
            "guests": ["sh", "-c", "qm list; pct list"],
        },
    }


def decide(role: Role, node: Node) -> Plan:
    """`do`: `commands` that make the next boot know, `stamp` that they did, `reboot` why one is needed."""
    plan = Plan()
    if node["answers"]["version"]["rc"]:
        return plan.refuse(
            f"Found no Proxmox VE on {role.host or 'this host'} (pveversion), wanted one."
            " GPU nodes without it are converged by ansible/node.yml."
        )
    host = json.loads(node["answers"]["host"]["stdout"])
    # YAML reads 10 as a number, and sysfs writes addresses in lower case.
    given = [str(gpu).lower() for gpu in role["gpus"]]
    ids = [str(pci_id).lower() for pci_id in role["ids"]]
    if reason := _refusal(host, given, ids):
        return plan.refuse(reason)
    functions = [address for gpu in given for address in _functions(host, gpu)]
    addresses = {*functions, *(address for address, device in host["devices"].items() if _id(device) in ids)}
    arguments = [*role["kernel_arguments"], *_intel(node, host, role["kernel_arguments"])]
    texts = {
        OPTIONS: _options(functions, ids, role["blacklist"]),
        MODULES: "\n".join((f"# {MANAGED}", *LOADED, "")),
    }
    for path, text in texts.items():
        plan.write(node, path, text)
    commands = [["update-initramfs", "-u", "-k", "all"], *_boot(plan, node, arguments)]
    # The stamp says that initramfs and boot loader were rebuilt with these very settings.
    digest = hashlib.sha256(json.dumps([texts, arguments], sort_keys=True).encode()).hexdigest()
    stamp = json.dumps({"sha256": digest}) + "\n"
    there = node["files"].get(STAMP)
    plan.do = {"commands": [], "stamp": [], "reboot": ""}
    # A run that was killed between both writes no stamp, and the next one rebuilds.
    if plan.files or not there or there["text"] != stamp:
        plan.do["commands"] = commands
        plan.do["stamp"] = [File(STAMP, stamp)]
        plan.lines += [f"+{' '.join(command)}" for command in commands]
    plan.do["reboot"] = _reboot(role, host, sorted(addresses), arguments, pending=bool(plan.do["commands"]))
    # Checked before anything is written: a refused run changes nothing.
    if plan.do["reboot"] and role["reboot"] and (running := _running(node)):
        return plan.refuse(
            f"Found that {', '.join(running)} run, and pve_host_reboot is set. Wanted none:"
            " migrate or stop them, or leave pve_host_reboot out and reboot when it suits."
        )
    return plan


def _refusal(host: dict[str, Any], given: list[str], ids: list[str]) -> str:
    listing = ", ".join(
        f"{address} ({_id(device)})"
        for address, device in sorted(host["devices"].items())
        if _display(device)
    )
    if not given and not ids:
        return (
            f"Found neither pve_host_gpus nor pve_host_ids, wanted the GPUs that are given away."
            f" This host has {listing or 'no GPU'}."
        )
    for names, form, what in ((given, ADDRESS, "pve_host_gpus"), (ids, ID, "pve_host_ids")):
        if wrong := [name for name in names if not re.fullmatch(form, name)]:
            example = "0000:01:00" if what == "pve_host_gpus" else "10de:2236"
            return (
                f"Found {wrong[0]!r} in {what}, wanted a value such as {example}."
                f" This host has {listing or 'no GPU'}."
            )
    there = {_id(device) for device in host["devices"].values()}
    missing = [gpu for gpu in given if not _functions(host, gpu)] + [
        pci_id for pci_id in ids if pci_id not in there
    ]
    if missing:
        return f"Found no device {missing[0]} on this host, wanted one that it has: {listing or 'no GPU'}."
    return ""


def _functions(host: dict[str, Any], address: str) -> list[str]:
    # Without a function all functions of the board are meant: its audio and USB go with it.
    if "." in address:
        return [address] if address in host["devices"] else []
    return sorted(function for function in host["devices"] if function.partition(".")[0] == address)


def _id(device: dict[str, Any]) -> str:
    return f"{device['vendor']}:{device['device']}".replace("0x", "").lower()


def _display(device: dict[str, Any]) -> bool:
    return bool(device["class"][:6] in DISPLAY)


def _options(functions: list[str], ids: list[str], blacklist: list[str]) -> str:
    # softdep: modprobe loads vfio-pci before these drivers (modprobe.d(5)).
    lines = [f"# {MANAGED}", *(f"softdep {name} pre: vfio-pci" for name in AFTER)]
    if ids:
        lines.append(f"options vfio-pci ids={','.join(ids)}")
    if functions:
        # Whoever loads vfio-pci, these are its own before: by the address, as boards of one kind have one id.
        override = (
            f"for a in {' '.join(functions)}; do d=/sys/bus/pci/devices/$a/driver_override;"
            " [ ! -e $d ] || echo vfio-pci >$d; done"
        )
        lines.append(f"install vfio-pci {override}; modprobe --ignore-install vfio-pci")
    return "\n".join((*lines, *(f"blacklist {name}" for name in blacklist), ""))


def _intel(node: Node, host: dict[str, Any], given: list[str]) -> list[str]:
    version = tuple(int(part) for part in re.findall(r"\d+", host["kernel"])[:2])
    intel = "GenuineIntel" in node["answers"]["cpu"]["stdout"]
    named = any(argument.startswith("intel_iommu=") for argument in given)
    return ["intel_iommu=on"] if intel and version < INTEL_BEFORE and not named else []


def _boot(plan: Plan, node: Node, arguments: list[str]) -> list[list[str]]:
    """Have the next boot's arguments; returns what has to run after."""
    files, commands = node["files"], []
    # A drop-in of GRUB's defaults: the administrator's file stays untouched.
    if files.get(GRUB_DEFAULTS):
        line = " ".join(["$GRUB_CMDLINE_LINUX_DEFAULT", *arguments])
        plan.write(node, GRUB, f'# {MANAGED}\nGRUB_CMDLINE_LINUX_DEFAULT="{line}"\n')
        commands.append(["update-grub"])
    if cmdline := files.get(CMDLINE):
        words = cmdline["text"].split()
        missing = [argument for argument in arguments if argument not in words]
        if missing:  # one line, and others' words stay
            plan.write(node, CMDLINE, " ".join([*words, *missing]) + "\n", mode=cmdline["mode"])
    if files.get(BOOT_TOOL):
        # Copies kernel and arguments to each EFI system partition.
        commands.append(["proxmox-boot-tool", "refresh"])
    return commands


def _reboot(
    role: Role, host: dict[str, Any], addresses: list[str], arguments: list[str], *, pending: bool
) -> str:
    running = host["cmdline"].split()
    why = [f"the kernel runs without {argument}" for argument in arguments if argument not in running]
    bound = {address: host["devices"][address]["driver"] for address in addresses}
    why += [
        f"{address} has {driver}" for address, driver in bound.items() if driver not in (None, "vfio-pci")
    ]
    if pending:
        why.append("vfio-pci's options are new")
    # Arguments are there and no IOMMU group exists: only the firmware can be the cause.
    if not why and not host["groups"]:
        return (
            "The IOMMU is off although the kernel has its arguments: turn VT-d or AMD-Vi on in the firmware,"
            " then reboot."
        )
    if not why:
        return ""
    after = "it follows" if role["reboot"] else "this role does not, unless pve_host_reboot is set"
    return f"A reboot is needed ({after}): {'; '.join(why)}."


def _running(node: Node) -> list[str]:
    return [
        line.split()[0] for line in node["answers"]["guests"]["stdout"].splitlines() if " running" in line
    ]
