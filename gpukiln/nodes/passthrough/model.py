"""What `node.passthrough` finds and does, as it is printed and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LOOK, CREATE = "node.passthrough/1", "node.passthrough.create/1"
UNDO, UNDONE = "node.passthrough.undo/1", "node.passthrough.undone/1"
Word = Literal["ok", "warning", "not seen", "busy", "refused", "never"]
EXIT = {"never": 3, "refused": 6, "busy": 75}  # the worst decides, in this order


@dataclass(frozen=True)
class Check:
    """One thing that was examined.

    Args:
        name: For example iommu.group.
        verdict: never: it can't work; refused: by a safety rule; busy: not now; not seen: nobody could look.
        found: What there is.
        step: What to do about it, empty where nothing is to be done.
    """

    name: str
    verdict: Word
    found: str
    step: str = ""


@dataclass(frozen=True)
class Function:
    """One function of the GPU's device.

    Args:
        address: For example 0000:01:00.1.
        kind: GPU, audio, USB, USB-C or another.
        id: VENDOR:DEVICE.
        name: As the catalogue calls a GPU, or as Proxmox VE calls it.
        driver: What the host has bound to it; null where nothing is, or nobody could look.
        iommu_group: Null where there is none.
    """

    address: str
    kind: str
    id: str
    name: str
    driver: str | None
    iommu_group: int | None


@dataclass(frozen=True)
class Change:
    """What is to be written, and what is there.

    Args:
        key: For example hostpci0.
        before: The value that is there, null where there is none.
        after: The value wanted.
        digest: Of the configuration that was looked at; another one is refused by Proxmox VE.
    """

    key: str
    before: str | None
    after: str
    digest: str


@dataclass(frozen=True)
class Machine:
    """The virtual machine.

    Args:
        status: running or stopped.
        machine: Its chipset, empty: Proxmox VE's default, i440fx.
        bios: ovmf or seabios.
    """

    id: int
    name: str
    status: str
    machine: str
    bios: str


@dataclass(frozen=True)
class Passthrough:
    """A GPU and a VM, judged; and what was done.

    Args:
        pve: How the host was reached.
        version: Of Proxmox VE.
        node: The cluster's node that has both.
        gpu: What was asked for.
        vm: Null where one is to be made.
        functions: What goes to the VM together.
        change: Null where nothing can be set.
        done: looked: nothing was changed; set; as-is: it stands there already; refused.
        undo: The file that takes it back, null where nothing was set.
    """

    pve: str
    version: str
    node: str
    gpu: str
    vm: Machine | None
    functions: tuple[Function, ...]
    checks: tuple[Check, ...]
    change: Change | None
    done: Literal["looked", "set", "as-is", "refused"]
    undo: str | None
    exit_code: int
    schema: str = LOOK


@dataclass(frozen=True)
class Undo:
    """What takes a change back; the file of `--undo`.

    Args:
        pve: How the host was reached.
        fingerprint: Of its certificate, empty where a CA vouches for it.
        ca: File of that CA, empty for this computer's own.
        before: The value that was there, null where there was none.
        after: The value that was written.
        command: The same by hand, on the host.
        at: RFC 3339, UTC.
    """

    pve: str
    fingerprint: str
    ca: str
    node: str
    vm: int
    key: str
    before: str | None
    after: str
    command: str
    at: str
    schema: str = UNDO


@dataclass(frozen=True)
class Undone:
    """What an undo file did.

    Args:
        done: looked: it would be taken back; undone; as-is: it was already.
    """

    file: str
    undo: Undo
    done: Literal["looked", "undone", "as-is"]
    exit_code: int
    schema: str = UNDONE


@dataclass(frozen=True)
class Created:
    """A VM of an exported image, planned or made.

    Args:
        image: The file of its disk, with its SHA-256.
        config: What Proxmox VE is told, without the keys of people.
        gpu: The GPU judged, null where none was asked for.
        done: looked: nothing was made; made; refused.
    """

    pve: str
    version: str
    node: str
    vm: int
    image: str
    sha256: str
    config: dict[str, str]
    gpu: Passthrough | None
    checks: tuple[Check, ...]
    done: Literal["looked", "made", "refused"]
    exit_code: int
    schema: str = CREATE


def exit_code(checks: tuple[Check, ...]) -> int:
    """The code of the worst of them, 0 where nothing forbids it."""
    verdicts = {one.verdict for one in checks}
    return next((code for word, code in EXIT.items() if word in verdicts), 0)
