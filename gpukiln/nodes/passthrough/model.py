"""What `node.passthrough` finds and does, as it is printed and kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpukiln.errors import BusyError, IncompatibleError, RefusedError
from gpukiln.findings import CheckedItem

# Schemas of the documents; the undo file's stays readable for files that users kept.
LOOK, CREATE = "node.passthrough/1", "node.passthrough.create/1"
UNDO, UNDONE = "node.passthrough.undo/1", "node.passthrough.undone/1"


@dataclass(frozen=True)
class PassthroughCheck(CheckedItem):
    """One thing that was examined, for example iommu.group.

    Args:
        exit_code: Of the command, where this fails as an error: 3 it can't work, 6 refused by a safety rule,
            75 not now; else 0.
    """

    # Each check has its own, so that the command can end with the gravest.
    exit_code: int = 0


# The helpers below name the exit codes once; a check that fails must have one.
def passed(id: str, message: str) -> PassthroughCheck:
    return PassthroughCheck(id, "info", message, outcome="passed")


def not_seen(id: str, message: str, remedy: str) -> PassthroughCheck:
    """Nobody could look."""
    return PassthroughCheck(id, "info", message, remedy=remedy, outcome="not_run")


def warned(id: str, message: str, remedy: str = "") -> PassthroughCheck:
    return PassthroughCheck(id, "warning", message, remedy=remedy)


def busy(id: str, message: str, remedy: str) -> PassthroughCheck:
    return PassthroughCheck(id, "error", message, remedy=remedy, exit_code=BusyError.exit_code)


def refused(id: str, message: str, remedy: str) -> PassthroughCheck:
    return PassthroughCheck(id, "error", message, remedy=remedy, exit_code=RefusedError.exit_code)


def impossible(id: str, message: str, remedy: str) -> PassthroughCheck:
    return PassthroughCheck(id, "error", message, remedy=remedy, exit_code=IncompatibleError.exit_code)


@dataclass(frozen=True)
class Function:
    """One function of the GPU's device.

    Args:
        address: For example 0000:01:00.1.
        kind: GPU, audio, USB, USB-C or another.
        id: VENDOR:DEVICE.
        name: As the catalogue calls a GPU, or as Proxmox VE calls it.
        driver: What the host has bound to it; null where nothing is, or it could not be read.
        iommu_group: Null where there is none.
    """

    address: str
    kind: str
    id: str
    name: str
    driver: str | None
    iommu_group: int | None


@dataclass(frozen=True)
class ConfigChange:
    """What is to be written, and what is there.

    Args:
        key: For example hostpci0.
        before: The value that is there, null where there is none.
        after: The value wanted.
        digest: Of the configuration that was looked at; another one is refused by Proxmox VE.
    """

    key: str
    before: str | None
    # As Proxmox VE would print it, so that both values can be compared.
    after: str
    digest: str


@dataclass(frozen=True)
class PassthroughVm:
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
    """A GPU and a VM, examined; and what was done.

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
    vm: PassthroughVm | None
    functions: tuple[Function, ...]
    checks: tuple[PassthroughCheck, ...]
    change: ConfigChange | None
    # as-is is a success: the same command may be typed again.
    done: Literal["looked", "set", "as-is", "refused"]
    undo: str | None
    exit_code: int
    schema: str = LOOK


# Read back from users' disks: fields may be added, and none may be renamed.
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
    # For a user whose gpukiln is gone: the file alone is enough to undo by hand.
    command: str
    at: str
    schema: str = UNDO


@dataclass(frozen=True)
class UndoResult:
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
class VmCreation:
    """A VM of an exported image, planned or made.

    Args:
        image: The file of its disk, with its SHA-256.
        config: The settings that Proxmox VE gets, without the keys of people.
        gpu: The GPU examined, null where none was asked for.
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
    checks: tuple[PassthroughCheck, ...]
    done: Literal["looked", "made", "refused"]
    exit_code: int
    schema: str = CREATE


def exit_code(checks: Iterable[PassthroughCheck], *, all_seen: bool = False) -> int:
    """The command's: what can't work (3) counts before what is refused (6), and that before busy (75).

    Args:
        all_seen: Whether checks that could not run are refused.
    """
    all_checks = list(checks)
    unseen = (
        RefusedError.exit_code if all_seen and any(check.outcome == "not_run" for check in all_checks) else 0
    )
    # The smallest code is the gravest: 3 can never work, 6 is refused, 75 may work later.
    return min((check.exit_code for check in all_checks if check.exit_code), default=unseen)
