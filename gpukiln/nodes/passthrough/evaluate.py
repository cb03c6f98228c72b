"""Whether a GPU can be given to a VM, and what would be written: a function of what was looked at.

What is asked for is Proxmox's own advice where it gives some: pve-docs qm-pci-passthrough.adoc (groups, q35,
OVMF, PCIe, vfio-pci, kernel arguments), qemu-server PVE/API2/Qemu.pm (who may set what), pve-guest-common
PVE/Mapping/PCI.pm (assert_valid: what a mapping must say of the device).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpukiln.catalog.gpus import gpus
from gpukiln.errors import UsageError
from gpukiln.nodes.passthrough.facts import Guest, PveFacts
from gpukiln.nodes.passthrough.model import (
    ConfigChange,
    Function,
    PassthroughCheck,
    PassthroughVm,
    busy,
    impossible,
    not_seen,
    passed,
    refused,
    warned,
)
from gpukiln.nodes.passthrough.values import (
    ADDRESS,
    NAME,
    SLOTS,
    HostPci,
    args_addresses,
    canonical_address,
    device_of,
    hostpci_entries,
    memory_mib,
    parse_hostpci,
    parse_properties,
)

# PCI vendor id of NVIDIA, and the base class of bridges, which stay with the host in a group.
NVIDIA, BRIDGE = "0x10de", "0x06"
# PCI base class and subclass: pci.ids, section C
KINDS = {
    "0x0300": "GPU",
    "0x0302": "GPU",
    "0x0380": "GPU",
    "0x0403": "audio",
    "0x0c03": "USB",
    "0x0c80": "USB-C",
}
# None: Proxmox VE binds a function without a driver to vfio-pci itself when the VM starts.
PASSTHROUGH_DRIVERS = ("vfio-pci", None)
ROLE = "the role pve_host binds it to vfio-pci: `invoke node.apply --pve`, then a reboot"


@dataclass(frozen=True)
class PassthroughRequest:
    """What was asked for.

    Args:
        address: Of the GPU, or empty.
        mapping: Of a resource mapping, or empty.
        primary: Whether it is to be the VM's first display (x-vga).
        hide_rom: Whether its ROM is to be hidden from the VM (rombar).
        slot: N of hostpciN; None: where it is already, else the first that is free.
    """

    address: str = ""
    mapping: str = ""
    primary: bool = False
    hide_rom: bool = False
    slot: int | None = None

    @property
    def text(self) -> str:
        return f"mapping:{self.mapping}" if self.mapping else self.address


@dataclass(frozen=True)
class Evaluation:
    """What came of it.

    Args:
        value: What hostpciN is to be.
        change: What would be written, None where nothing can be.
        as_is: Whether it stands there already.
    """

    functions: tuple[Function, ...]
    checks: tuple[PassthroughCheck, ...]
    value: str
    change: ConfigChange | None
    as_is: bool


def parse_request(
    gpu: str, *, primary: bool = False, hide_rom: bool = False, slot: int | None = None
) -> PassthroughRequest:
    """Read `--gpu`.

    Raises:
        UsageError: It is neither an address nor mapping:NAME.

    >>> parse_request("01:00").address
    '0000:01:00'
    >>> parse_request("mapping:gpu0").mapping
    'gpu0'
    """
    if slot is not None and slot >= SLOTS:
        raise UsageError(f"--slot {slot}: Proxmox VE has hostpci0 to hostpci{SLOTS - 1}")
    if gpu.startswith("mapping:"):
        name = gpu.removeprefix("mapping:")
        if not NAME.fullmatch(name):
            raise UsageError(f"--gpu {gpu!r}: {name!r} is no name of a mapping")
        return PassthroughRequest(mapping=name, primary=primary, hide_rom=hide_rom, slot=slot)
    if not ADDRESS.fullmatch(gpu):
        raise UsageError(f"--gpu {gpu!r}: wanted a PCI address such as 0000:01:00, or mapping:NAME")
    return PassthroughRequest(address=canonical_address(gpu), primary=primary, hide_rom=hide_rom, slot=slot)


def evaluate(
    facts: PveFacts, request: PassthroughRequest, vm: Guest | None, *, memory: int = 0
) -> Evaluation:
    """Examine a GPU, and the VM that is to get it.

    Args:
        vm: None: one that is to be made, which is as it should be.
        memory: Of a VM that is to be made, in MiB.

    Raises:
        UsageError: What was named is no GPU of the node, or there is no such mapping.
    """
    # One address, or several where a mapping lists alternatives.
    places = _hostpci_addresses(facts, request)
    functions = _functions(facts, places)
    # A device may also have audio and USB functions; one of its functions must be the GPU.
    if not any(function.kind == "GPU" for function in functions):
        what = functions[0]
        raise UsageError(
            f"{what.address} of {facts.node} is no GPU: {what.name} ({what.kind})",
            hint=f"it has {list_gpus(facts)}",
        )
    addresses = [function.address for function in functions]
    checks = [
        *(_mapping_checks(facts, request, addresses) if request.mapping else []),
        *_iommu_checks(facts, functions),
        *_driver_checks(facts, functions),
        _lease_check(facts, addresses),
        *_other_vm_checks(facts, functions),
        *_privilege_checks(facts, request, vm, functions),
    ]
    change, as_is = None, False
    # Counted for every VM: the memory is pinned as soon as one PCI device is passed through.
    checks += _memory_checks(facts, vm, memory_mib(vm.config) if vm else memory)
    if vm is not None:
        checks += _vm_checks(vm, request)
        checks += _args_checks(vm, addresses)
        change, as_is, slot = _config_change(facts, request, places, vm)
        checks.append(slot)
    return Evaluation(functions, tuple(checks), str(_value(request, places)), change, as_is)


def describe_vm(vm: Guest) -> PassthroughVm:
    """A VM as it is printed."""
    bios = str(vm.config.get("bios", "seabios"))
    return PassthroughVm(vm.id, vm.name, vm.status, str(vm.config.get("machine", "")), bios)


def _value(request: PassthroughRequest, places: list[str]) -> HostPci:
    """What `hostpciN` is to be; pcie=1 as q35 has PCI Express."""
    # Without it the guest sees a conventional PCI device.
    options = {"pcie": "1"}
    if request.primary:
        options["x-vga"] = "1"
    if request.hide_rom:
        options["rombar"] = "0"
    return (
        HostPci(mapping=request.mapping, options=options)
        if request.mapping
        else HostPci((places[0],), "", options)
    )


def list_gpus(facts: PveFacts) -> str:
    """The node's GPUs, for people."""
    labels = [
        f"{address} {_name(device)}"
        for address, device in sorted(facts.devices.items())
        if _kind(device) == "GPU"
    ]
    return ", ".join(labels) or "no GPU"


def _hostpci_addresses(facts: PveFacts, request: PassthroughRequest) -> list[str]:
    """The devices that are named, as hostpci names them: all functions of one where they belong together."""
    if not request.mapping:
        return [_hostpci_address(facts, request.address)]
    if facts.mapping is None:
        names = ", ".join(sorted(facts.mappings)) or "none"
        raise UsageError(
            f"there is no resource mapping {request.mapping!r} that {facts.user} may see",
            hint=f"there are: {names}",
        )
    entries = list(mapping_entries(facts.mapping, facts.node))
    if not entries:
        there = sorted({parse_properties(str(text)).get("node", "") for text in facts.mapping.get("map", [])})
        raise UsageError(
            f"the mapping {request.mapping} has no device of {facts.node}, only of {', '.join(there)}",
            hint=f"add one: `pvesh set /cluster/mapping/pci/{request.mapping} --map ...`, or name another VM",
        )
    return [canonical_address(address) for entry in entries for address in entry["path"].split(";")]


def mapping_entries(mapping: dict[str, Any], node: str) -> Iterator[dict[str, str]]:
    """The entries of a resource mapping that are for a node."""
    for text in mapping.get("map", []):
        entry = parse_properties(str(text))
        if entry.get("node") == node and entry.get("path"):
            yield entry


def _hostpci_address(facts: PveFacts, address: str) -> str:
    """A function alone where the others of its device are in groups of their own, else the whole device.

    A virtual function (SR-IOV) is one that is alone.
    """
    if address not in facts.devices and not _device_functions(facts, address):
        raise UsageError(f"{facts.node} has no PCI device {address}", hint=f"it has {list_gpus(facts)}")
    # Without a function it names the whole device already.
    if "." not in address:
        return address
    group = _group(facts.devices[address])
    others = [
        function_address
        for function_address in _device_functions(facts, device_of(address))
        if function_address != address
    ]
    # Functions of one IOMMU group can only go together; GPU and audio usually share one.
    together = [
        function_address
        for function_address in others
        if group is None or _group(facts.devices[function_address]) == group
    ]
    return device_of(address) if together else address


def _device_functions(facts: PveFacts, device: str) -> list[str]:
    return sorted(address for address in facts.devices if address == device or device_of(address) == device)


def _functions(facts: PveFacts, places: list[str]) -> tuple[Function, ...]:
    functions = []
    # An alternative that the node lacks would make the VM fail only at its start.
    for place in places:
        for address in [place] if "." in place else _device_functions(facts, place):
            if address not in facts.devices:
                raise UsageError(
                    f"the mapping names {address}, which {facts.node} does not have: hardware was changed",
                    hint=f"it has {list_gpus(facts)}",
                )
            device = facts.devices[address]
            seen = facts.host.devices.get(address) if facts.host else None
            ids = f"{device['vendor']}:{device['device']}".replace("0x", "")
            driver = seen["driver"] if seen else None
            functions.append(Function(address, _kind(device), ids, _name(device), driver, _group(device)))
        if "." not in place and not _device_functions(facts, place):
            raise UsageError(
                f"the mapping names {place}, which {facts.node} does not have: hardware was changed",
                hint=f"it has {list_gpus(facts)}",
            )
    return tuple(functions)


def _kind(device: dict[str, Any]) -> str:
    kind = str(device["class"])
    return KINDS.get(kind[:6], "bridge" if kind.startswith(BRIDGE) else f"class {kind}")


def _name(device: dict[str, Any]) -> str:
    # The host's pci.ids may be older than the GPU.
    number = str(device["device"]).removeprefix("0x").lower()
    if device["vendor"] == NVIDIA and _kind(device) == "GPU":
        # Several boards may have one device id.
        known = [gpu.name for gpu in gpus().values() if number in {id.lower() for id in gpu.pci_ids}]
        if known:
            return " or ".join(known)
    return str(device.get("device_name") or f"{device['vendor']}:{device['device']}")


def _group(device: dict[str, Any]) -> int | None:
    group = int(device.get("iommugroup", -1))
    return None if group < 0 else group


def _mapping_checks(
    facts: PveFacts, request: PassthroughRequest, addresses: list[str]
) -> Iterator[PassthroughCheck]:
    """What Proxmox VE compares when the VM starts, and refuses then."""
    assert facts.mapping is not None  # noqa: S101 - _places has seen it
    # A mapping for mediated devices gives a VM a vGPU, which needs NVIDIA's host driver on the node.
    if int(facts.mapping.get("mdev") or 0):
        yield impossible(
            "mapping.kind",
            f"{request.mapping} is for mediated devices, of which a VM gets a part",
            "name the GPU's own mapping",
        )
    wrong = []
    for entry in mapping_entries(facts.mapping, facts.node):
        first = canonical_address(entry["path"].split(";")[0])
        device = facts.devices[first if "." in first else _device_functions(facts, first)[0]]
        wrong += [f"{first} {mismatch}" for mismatch in _mapping_mismatches(entry, device)]
    fix = f"`pvesh set /cluster/mapping/pci/{request.mapping} --map {_mapping_entry(facts, addresses[0])}`"
    devices = sorted({device_of(address) for address in addresses})
    yield (
        refused("mapping.match", "; ".join(wrong), f"the VM would not start: {fix}")
        if wrong
        else passed("mapping.match", f"{request.mapping} is {', '.join(devices)}")
    )


def _mapping_mismatches(entry: dict[str, str], device: dict[str, Any]) -> Iterator[str]:
    expected = {
        "id": f"{device['vendor']}:{device['device']}",
        "iommugroup": None if _group(device) is None else str(_group(device)),
        "subsystem-id": f"{device['subsystem_vendor']}:{device['subsystem_device']}"
        if device.get("subsystem_vendor") and device.get("subsystem_device")
        else None,
    }
    # Proxmox VE writes ids with and without 0x.
    for name, seen in expected.items():
        there, said = ((text or "").replace("0x", "").lower() for text in (seen, entry.get(name)))
        if there != said:
            yield f"has the {name} {there or 'none'}, and the mapping says {said or 'nothing'}"


def _mapping_entry(facts: PveFacts, address: str) -> str:
    """An entry of a mapping as it would have to be."""
    device = facts.devices[address]
    parts = [
        f"node={facts.node}",
        f"path={_hostpci_address(facts, address)}",
        f"id={device['vendor']}:{device['device']}",
    ]
    if device.get("subsystem_vendor"):
        parts.append(f"subsystem-id={device['subsystem_vendor']}:{device['subsystem_device']}")
    if _group(device) is not None:
        parts.append(f"iommugroup={_group(device)}")
    return ",".join(parts).replace("0x", "")


def _iommu_checks(facts: PveFacts, functions: tuple[Function, ...]) -> Iterator[PassthroughCheck]:
    # Shown with the result: most findings about the IOMMU are about these arguments.
    arguments = facts.host.cmdline.split() if facts.host else []
    iommu_arguments = [
        argument for argument in arguments if "iommu" in argument or argument.startswith("pcie_acs_override")
    ]
    said = f", kernel arguments: {' '.join(iommu_arguments)}" if iommu_arguments else ""
    if any(function.iommu_group is None for function in functions):
        kernel = f" (kernel {facts.host.kernel})" if facts.host else ""
        yield refused(
            "iommu.on",
            f"{functions[0].address} is in no IOMMU group: the IOMMU is off{kernel}{said}",
            "turn VT-d or AMD-Vi on in the firmware; on Intel before kernel 6.8 it needs the argument"
            " intel_iommu=on too, which the role pve_host writes",
        )
        return
    yield passed("iommu.on", f"on{said}")
    own = {function.address for function in functions}
    for group in sorted({function.iommu_group for function in functions if function.iommu_group is not None}):
        foreign = [
            f"{address} {_name(device)}"
            for address, device in sorted(facts.devices.items())
            if _group(device) == group and address not in own and not str(device["class"]).startswith(BRIDGE)
        ]
        if foreign:
            yield refused(
                "iommu.group",
                f"group {group} has {', '.join(foreign)} too, which the VM would get with it",
                "another slot of the board, or a board that separates them: the VM could reach that device's"
                " memory",
            )
        else:
            yield passed("iommu.group", f"group {group} has nothing but the device and bridges")
    # The patch splits groups that the hardware does not isolate, so the passed checks above mean less.
    if any(argument.startswith("pcie_acs_override") for argument in arguments):
        yield warned(
            "iommu.override",
            "pcie_acs_override makes groups up that the hardware does not keep apart",
            "a VM may reach other devices' memory: use it with guests that are trusted alone",
        )


def _driver_checks(facts: PveFacts, functions: tuple[Function, ...]) -> Iterator[PassthroughCheck]:
    if facts.host is None:
        yield not_seen(
            "host.driver", facts.unseen, "--ssh ssh://root@HOST, or run it on the host: --pve local"
        )
        return
    # A GPU with a driver fails the check, an audio function only warns: its driver lets go of it.
    used: list[str] = []
    other: list[str] = []
    for function in functions:
        if function.driver not in PASSTHROUGH_DRIVERS:
            users = facts.host.users.get(function.address, [])
            usage = f"{function.address} has {function.driver}" + (
                f", used by {', '.join(users)}" if users else ""
            )
            (used if function.kind == "GPU" else other).append(usage)
    if used:
        yield refused("host.driver", "; ".join(used), f"end what uses it; {ROLE}")
    elif other:
        yield warned(
            "host.driver", "; ".join(other), f"Proxmox VE rebinds it when the VM starts; better {ROLE}"
        )
    else:
        names = sorted({function.driver or "none" for function in functions})
        yield passed("host.driver", f"{', '.join(names)} on all {len(functions)} functions")
    # boot_vga in sysfs: the firmware and the kernel's framebuffer use this GPU.
    if any(facts.host.devices.get(function.address, {}).get("boot_vga") for function in functions):
        yield warned(
            "host.console",
            "the host's own console is on this GPU",
            "the host has none while the VM runs; where the VM does not start, add the kernel argument"
            " initcall_blacklist=sysfb_init",
        )


def _lease_check(facts: PveFacts, addresses: list[str]) -> PassthroughCheck:
    if facts.host is None:
        return not_seen("host.lease", facts.unseen, "--ssh ssh://root@HOST, or --pve local")
    # Two results: a lease on this GPU, and a lease whose GPU can't be determined.
    held, lost = [], []
    for lease in facts.host.leases:
        for device in lease["devices"]:
            # Leases name GPUs by UUID; only NVIDIA's driver maps a UUID to an address.
            place = facts.host.gpus.get(device)
            lease_label = f"{lease['id']} of {lease['user']}"
            if place in addresses:
                held.append(lease_label)
            elif place is None and not (device.startswith("MIG-") and facts.host.gpus):
                # a MIG device is of a GPU that has its driver, and such a GPU is refused for that
                lost.append(f"{lease_label} has {device}")
    if held:
        return refused(
            "host.lease",
            f"leased: {', '.join(held)}",
            f"wait for its end, or `gpukiln-gpu release {held[0].split()[0]}`",
        )
    if lost:
        return refused(
            "host.lease",
            f"{'; '.join(lost)}, and no driver says which GPU that is",
            "end these leases first: `gpukiln-gpu leases` on the host",
        )
    return passed("host.lease", "not leased")


def _other_vm_checks(facts: PveFacts, functions: tuple[Function, ...]) -> Iterator[PassthroughCheck]:
    own = {function.address for function in functions}
    using = []
    # Configured counts, not only running: two VMs with one GPU fail when the second one starts.
    for guest in facts.guests:
        for key, there in hostpci_entries(guest.config).items():
            if own & set(_functions_of_entry(facts, there)):
                using.append(f"{guest.id} {guest.name} ({guest.status}) has it as {key}")
        if own & set(args_addresses(guest.config)):
            using.append(f"{guest.id} {guest.name} ({guest.status}) has it by its args, as -device vfio-pci")
    if using:
        yield refused(
            "gpu.free", f"VM {'; VM '.join(using)}", "take it from there first: only one VM can have it"
        )
    elif facts.sees_all:
        yield passed("gpu.free", f"none of the {len(facts.guests)} other VMs of {facts.node} has it")
    else:
        yield not_seen(
            "gpu.free",
            f"none of the {len(facts.guests)} VMs that {facts.user} sees has it, and it does not see all",
            "give the token VM.Audit on /vms: `pveum acl modify /vms --tokens 'USER@REALM!NAME' --roles"
            " PVEAuditor`",
        )


def _memory_checks(facts: PveFacts, vm: Guest | None, memory_mib_wanted: int) -> Iterator[PassthroughCheck]:
    """All memory of a VM with a PCI device is pinned at its start: the device may write anywhere in it.

    So it can't be ballooned: QEMU inhibits the balloon while it has such a device (hw/vfio/common.c).
    """
    name = f"VM {vm.id}" if vm else "the VM"
    # 0 turns ballooning off, and a minimum that is not below the memory shrinks nothing.
    balloon = str(vm.config.get("balloon", "") if vm else "")
    if balloon.isdecimal() and 0 < int(balloon) < memory_mib_wanted:
        yield refused(
            "vm.balloon",
            f"{name} may shrink to {balloon} of its {memory_mib_wanted} MiB, and with a PCI device it can't",
            f"`qm set {vm.id if vm else 'VM'} --balloon 0`",
        )
    if facts.memory is None:
        yield not_seen(
            "vm.memory",
            f"{facts.user} does not see how much memory {facts.node} has",
            f"give the token Sys.Audit on /nodes/{facts.node}",
        )
        return
    pinned = {
        f"{guest.id} {guest.name}": memory_mib(guest.config)
        for guest in facts.guests
        if guest.status == "running" and (hostpci_entries(guest.config) or args_addresses(guest.config))
    }
    more = "".join(f", and VM {who} holds {held} MiB" for who, held in pinned.items())
    message = (
        f"{memory_mib_wanted} of the {facts.memory} MiB of {facts.node} are pinned while {name} runs{more}"
    )
    # Equal is too much as well: the host itself needs memory.
    if memory_mib_wanted + sum(pinned.values()) >= facts.memory:
        step = "less `--memory`" + ("" if vm is None else f": `qm set {vm.id} --memory MIB`")
        yield refused("vm.memory", message, f"{step}, or stop what holds the rest; the host needs some too")
    else:
        yield passed("vm.memory", message)


def _args_checks(vm: Guest, addresses: list[str]) -> Iterator[PassthroughCheck]:
    if set(addresses) & set(args_addresses(vm.config)):
        yield refused(
            "vm.args",
            f"the args of VM {vm.id} have it already: {vm.config['args']}",
            f"take it out of them: `qm set {vm.id} --args ...`, or `--delete args`; QEMU can't open it twice",
        )


def _functions_of_entry(facts: PveFacts, there: HostPci) -> list[str]:
    """The functions that another VM's setting names, alternatives too."""
    hosts = list(there.hosts)
    if there.mapping in facts.mappings:
        for entry in mapping_entries(facts.mappings[there.mapping], facts.node):
            hosts += [canonical_address(address) for address in entry["path"].split(";")]
    return [
        address for host in hosts for address in ([host] if "." in host else _device_functions(facts, host))
    ]


def _privilege_checks(
    facts: PveFacts, request: PassthroughRequest, vm: Guest | None, functions: tuple[Function, ...]
) -> Iterator[PassthroughCheck]:
    # root@pam may do everything.
    if facts.rights is None:
        return
    if not request.mapping:
        yield impossible(
            "rights.address",
            f"a token such as {facts.user} can't set an address: Proxmox VE takes that from root@pam alone",
            f"make a mapping once, as root on the host: `pvesh create /cluster/mapping/pci --id gpu0 --map"
            f" {_mapping_entry(facts, functions[0].address)}`, then --gpu mapping:gpu0; or --pve local",
        )
        return
    needs = {
        f"/mapping/pci/{request.mapping}": "Mapping.Use",
        **({f"/vms/{vm.id}": "VM.Config.HWType"} if vm else {}),
    }
    missing = [
        f"{right} on {path}"
        for path, right in needs.items()
        if right not in facts.rights.get(path, frozenset())
    ]
    if missing:
        yield refused(
            "rights.token",
            f"{facts.user} lacks {', '.join(missing)}",
            "`pveum acl modify PATH --tokens 'USER@REALM!NAME' --roles PVEMappingUser`, PVEVMAdmin on the VM",
        )
    else:
        yield passed("rights.token", f"{facts.user} has {', '.join(needs.values())}")


def _vm_checks(vm: Guest, request: PassthroughRequest) -> Iterator[PassthroughCheck]:
    name = f"VM {vm.id}"
    if vm.is_template:
        yield refused("vm.kind", f"{name} is a template", "clone it, and name the clone")
    if lock := vm.config.get("lock"):
        yield busy("vm.lock", f"{name} is locked ({lock})", "wait for that task; `qm unlock` where none runs")
    # Proxmox VE would accept the change as pending, and the VM would not have the GPU.
    if vm.status != "stopped":
        yield refused(
            "vm.stopped",
            f"{name} is {vm.status}",
            f"a VM gets PCI devices at its start: `qm shutdown {vm.id}`",
        )
    else:
        yield passed("vm.stopped", "stopped")
    # An empty value is Proxmox VE's default, i440fx.
    chipset = str(vm.config.get("machine", "")) or "i440fx, the default"
    if "q35" in chipset:
        yield passed("vm.machine", chipset)
    else:
        yield refused(
            "vm.machine",
            f"{chipset}, which has no PCI Express",
            f"`qm set {vm.id} --machine q35`; what is installed may name its network card anew",
        )
    yield _firmware_check(vm)
    if request.primary and vm.config.get("vga") not in (None, "none"):
        yield warned("vm.display", f"vga {vm.config['vga']} is ignored with --primary")


def _firmware_check(vm: Guest) -> PassthroughCheck:
    disk = str(vm.config.get("efidisk0", ""))
    if vm.config.get("bios") != "ovmf":
        return warned(
            "vm.firmware",
            "SeaBIOS; GPUs do best with OVMF",
            "a VM that was installed with UEFI boots with it alone: `qm set"
            f" {vm.id} --bios ovmf --efidisk0 STORAGE:1,efitype=4m,pre-enrolled-keys=0`",
        )
    if not disk:
        return warned(
            "vm.firmware",
            "OVMF without an EFI disk: its boot entries are lost at each stop",
            f"`qm set {vm.id} --efidisk0 STORAGE:1,efitype=4m,pre-enrolled-keys=0`",
        )
    # Microsoft's keys turn Secure Boot on in OVMF.
    if parse_properties(disk).get("pre-enrolled-keys") == "1":
        return warned(
            "vm.firmware",
            "OVMF with Secure Boot's keys: a driver that DKMS built is not loaded unless its key is enrolled",
            "an EFI disk with pre-enrolled-keys=0, or enroll the key (mokutil)",
        )
    return passed("vm.firmware", "OVMF with an EFI disk")


def _config_change(
    facts: PveFacts, request: PassthroughRequest, places: list[str], vm: Guest
) -> tuple[ConfigChange | None, bool, PassthroughCheck]:
    there = hostpci_entries(vm.config)
    own = {
        address
        for place in places
        for address in ([place] if "." in place else _device_functions(facts, place))
    }
    held = [key for key, entry in there.items() if own & set(_functions_of_entry(facts, entry))]
    # The lowest free slot, as the web interface takes it.
    free = [f"hostpci{n}" for n in range(SLOTS) if f"hostpci{n}" not in vm.config]
    asked = f"hostpci{request.slot}" if request.slot is not None else ""
    if held and asked not in ("", held[0]):
        return None, False, refused("vm.slot", f"it is {held[0]} of the VM already", f"--slot {held[0][7:]}")
    if asked and asked not in free and asked not in held:
        other = f"--slot {(free or ['-'])[0][7:]}"
        return None, False, refused("vm.slot", f"{asked} is {vm.config[asked]}", other)
    if not held and not free:
        return None, False, refused("vm.slot", f"all {SLOTS} of hostpci are taken", "take one away first")
    key = held[0] if held else asked or free[0]
    value, before = _value(request, places), vm.config.get(key)
    change = ConfigChange(key, None if before is None else str(before), str(value), vm.digest)
    as_is = before is not None and parse_hostpci(str(before)).is_equivalent(value)
    state = "as it is" if as_is else "to be changed" if before else "free"
    return change, as_is, passed("vm.slot", f"{key}, {state}")
