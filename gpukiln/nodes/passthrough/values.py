"""How Proxmox VE writes devices: PCI addresses, `hostpciN`, the entries of a resource mapping.

Source: qemu-server src/PVE/QemuServer/PCI.pm ($hostpci_fmt), pve-guest-common src/PVE/Mapping/PCI.pm
($map_fmt).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpukiln.errors import UsageError

# [DOMAIN:]BUS:SLOT[.FUNCTION], as sysfs and Proxmox VE write it.
ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]+")
SLOTS = 16  # $MAX_HOSTPCI_DEVICES
# What PVE::JSONSchema accepts as a boolean; qm config shows what the user typed.
BOOLEANS = {"1": "1", "on": "1", "yes": "1", "true": "1", "0": "0", "off": "0", "no": "0", "false": "0"}
# Left out means the default, so that `pcie=0` and no `pcie` are the same setting.
DEFAULTS = {"rombar": "1", "pcie": "0", "x-vga": "0", "legacy-igd": "0"}


def canonical_address(address: str) -> str:
    """An address in sysfs's form, `0000:01:00.0`, or `0000:01:00` where it names a whole device.

    Raises:
        UsageError: It is none.

    >>> canonical_address("01:00")
    '0000:01:00'
    >>> canonical_address("0000:01:00.1")
    '0000:01:00.1'
    """
    address_match = ADDRESS.fullmatch(address.strip())
    if not address_match:
        raise UsageError(
            f"{address!r} is no PCI address", hint="such as 0000:01:00.0, or 01:00 for all functions of it"
        )
    domain, bus, slot, function = address_match.groups()
    return f"{domain or '0000'}:{bus}:{slot}{'' if function is None else f'.{function}'}".lower()


def device_of(address: str) -> str:
    """The device that a function is one of."""
    return address.partition(".")[0]


@dataclass(frozen=True)
class HostPci:
    """The value of a `hostpciN`.

    Args:
        hosts: Addresses; several are alternatives of which one is taken, or virtual functions.
        mapping: Name of a resource mapping, instead of addresses.
        options: The others, booleans as 0 and 1.
    """

    hosts: tuple[str, ...] = ()
    mapping: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        first = f"mapping={self.mapping}" if self.mapping else ";".join(self.hosts)
        return ",".join([first, *(f"{name}={value}" for name, value in self.options.items())])

    def is_equivalent(self, other: HostPci) -> bool:
        """Whether both mean the same: what is left out has its default."""
        return (sorted(self.hosts), self.mapping, {**DEFAULTS, **self.options}) == (
            sorted(other.hosts),
            other.mapping,
            {**DEFAULTS, **other.options},
        )


def parse_hostpci(text: str) -> HostPci:
    """Read a `hostpciN`.

    Raises:
        UsageError: It has no device.

    >>> str(parse_hostpci("01:00,pcie=on"))
    '0000:01:00,pcie=1'
    >>> parse_hostpci("01:00").is_equivalent(parse_hostpci("0000:01:00,pcie=0"))
    True
    """
    values = parse_properties(text, default="host")
    hosts = tuple(canonical_address(address) for address in values.pop("host", "").split(";") if address)
    # Proxmox VE refuses both together (PVE/QemuServer/PCI.pm).
    mapping = values.pop("mapping", "")
    if bool(hosts) == bool(mapping):
        raise UsageError(f"hostpci {text!r} names no device, or both an address and a mapping")
    options = {
        name: BOOLEANS.get(value, value) if name in DEFAULTS else value for name, value in values.items()
    }
    return HostPci(hosts, mapping, options)


def hostpci_entries(config: Mapping[str, object]) -> dict[str, HostPci]:
    """Every `hostpciN` of a VM's configuration."""
    return {
        name: parse_hostpci(str(value))
        for name, value in config.items()
        if re.fullmatch(r"hostpci\d+", name) and value
    }


# qemu(1), -device vfio-pci: host=ADDRESS or sysfsdev=PATH, also as JSON
_ARGS_ADDRESS = re.compile(
    r"(?:host|sysfsdev)[\"']?\s*[=:]\s*[\"']?(?:/sys/[^\s,\"']*/)?"
    r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])"
)


def args_addresses(config: Mapping[str, object]) -> list[str]:
    """The PCI functions that a VM's `args` hand to QEMU, past Proxmox VE's own `hostpciN`.

    >>> args_addresses({"args": "-device vfio-pci,host=01:00.0"})
    ['0000:01:00.0']
    >>> args_addresses({})
    []
    """
    return [canonical_address(address) for address in _ARGS_ADDRESS.findall(str(config.get("args") or ""))]


def memory_mib(config: Mapping[str, object]) -> int:
    """A VM's memory; Proxmox VE's default is 512 MiB (qemu-server, PVE/QemuServer/Memory.pm).

    >>> memory_mib({"memory": "4096"})
    4096
    >>> memory_mib({})
    512
    """
    said = parse_properties(str(config.get("memory") or "512"), default="current").get("current", "512")
    return int(said) if said.isdecimal() else 512


def parse_properties(text: str, *, default: str = "") -> dict[str, str]:
    """Read a property string, `VALUE,NAME=VALUE`.

    Args:
        default: The name of a value that has none.

    >>> parse_properties("local-lvm:1,size=4M", default="file")
    {'file': 'local-lvm:1', 'size': '4M'}
    >>> parse_properties("virtio,bridge=vmbr0")["bridge"]
    'vmbr0'
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        values[name.strip() if equals else default] = value.strip() if equals else part.strip()
    return values
