"""Sets a GPU and undoes it: an undo file first, then the value with the digest, then a check."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln.errors import (
    BusyError,
    CheckFailedError,
    GpukilnError,
    PartialError,
    RefusedError,
    UnavailableError,
    UsageError,
)
from gpukiln.files import write_atomic
from gpukiln.nodes.passthrough.api import Pve, UnansweredError
from gpukiln.nodes.passthrough.facts import Guest, read_guest
from gpukiln.nodes.passthrough.model import UNDO, ConfigChange, Undo
from gpukiln.nodes.passthrough.values import parse_hostpci
from gpukiln.parsing import parse_json
from gpukiln.typed import dump, load


def set_gpu(pve: Pve, node: str, vm: Guest, change: ConfigChange, folder: Path) -> Path:
    """Set a VM's `hostpciN`.

    Args:
        vm: As it was looked at; where it is another now, Proxmox VE refuses.
        folder: Where the undo file is written.

    Returns:
        The undo file.

    Raises:
        BusyError: Another user changed or locked the VM; nothing was written.
        CheckFailedError: The configuration has another value than was written.
        PartialError: It is not known whether it was written.
    """
    undo = Undo(
        pve=pve.target.pve,
        fingerprint=pve.target.fingerprint,
        ca=pve.target.ca,
        node=node,
        vm=vm.id,
        key=change.key,
        before=change.before,
        after=change.after,
        command=manual_command(vm.id, change.key, change.before),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    file = folder / f"{undo.at[:19].replace(':', '')}-vm{vm.id}-{change.key}-{secrets.token_hex(3)}.json"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Before the write: a command that is killed in it leaves the file that undoes it.
    write_atomic(file, json.dumps(dump(undo), indent=2) + "\n")
    try:
        # With the digest that was read: Proxmox VE refuses the write if the configuration has changed since.
        _write(pve, node, vm, change.key, change.after, change.digest)
    # It may have been written: the undo file stays.
    except PartialError:
        raise
    except BaseException:  # nothing was written: there is nothing to take back
        file.unlink()
        raise
    back = f"`invoke node.passthrough --undo {file} --apply`"
    try:
        _compare(pve, node, vm, change.key, change.after, back)
    except KeyboardInterrupt as error:
        raise PartialError(
            f"interrupted: {change.key} of VM {vm.id} was written, and was not read back",
            hint=f"{back} takes it back",
        ) from error
    return file


def read_undo(file: Path) -> Undo:
    """Read an undo file.

    Raises:
        UsageError: It is none.
    """
    try:
        document = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--undo {file} can't be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != UNDO:
        raise UsageError(f"--undo {file} is no undo file of node.passthrough")
    return load(Undo, document, where=str(file))


def check_undo(pve: Pve, undo: Undo) -> Guest | None:
    """The VM as it is now; None where it stands already as it was before.

    Raises:
        RefusedError: Somebody changed it since, or the VM is running.
        BusyError: It is locked.
    """
    vm = read_guest(pve, undo.node, undo.vm)
    # Compared first: an undo that is run twice must not undo what somebody set after it.
    now = vm.config.get(undo.key)
    if _is_same_value(now, undo.before):
        return None
    if not _is_same_value(now, undo.after):
        raise RefusedError(
            f"{undo.key} of VM {undo.vm} is {now or 'not there'}, and {undo.after} was written",
            hint="another user changed it since: look at it in Proxmox VE",
        )
    if lock := vm.config.get("lock"):
        raise BusyError(f"VM {undo.vm} is locked ({lock})", hint="wait for that task")
    if vm.status != "stopped":
        raise RefusedError(f"VM {undo.vm} is {vm.status}", hint=f"`qm shutdown {undo.vm}`, then again")
    return vm


def undo_change(pve: Pve, undo: Undo, vm: Guest) -> None:
    """Set what was there before, as `set_gpu` sets."""
    _write(pve, undo.node, vm, undo.key, undo.before, vm.digest)
    _compare(pve, undo.node, vm, undo.key, undo.before, f"`{undo.command}` on the host")


def manual_command(vm: int, key: str, value: str | None) -> str:
    """The same on the host."""
    return f"qm set {vm} --delete {key}" if value is None else f"qm set {vm} --{key} '{value}'"


def _write(pve: Pve, node: str, vm: Guest, key: str, value: str | None, digest: str) -> None:
    # Proxmox VE removes a key by naming it in `delete`; an empty value would be refused.
    values = {"delete": key} if value is None else {key: value}
    try:
        pve.put(f"nodes/{node}/qemu/{vm.id}/config", digest=digest, **values)
    except (UnansweredError, KeyboardInterrupt) as lost:
        # PUT has no task to ask about: only the configuration shows whether it took effect.
        try:
            now = read_guest(pve, node, vm.id).config.get(key)
        except GpukilnError as error:
            raise PartialError(
                f"it is not known whether {key} of VM {vm.id} was written: {_error_text(lost)}; "
                f"then {error.message}",
                hint=f"`qm config {vm.id}` shows it; "
                f"`{manual_command(vm.id, key, _config_value(vm, key))}` undoes it",
            ) from lost
        if not _is_same_value(now, value):
            raise
        if isinstance(lost, KeyboardInterrupt):
            raise PartialError(
                f"interrupted, and {key} of VM {vm.id} was written",
                hint=f"by hand: `{manual_command(vm.id, key, _config_value(vm, key))}` takes it back",
            ) from lost


def _error_text(error: BaseException) -> str:
    return error.message if isinstance(error, GpukilnError) else "interrupted"


def _config_value(vm: Guest, key: str) -> str | None:
    return None if vm.config.get(key) is None else str(vm.config[key])


def _is_same_value(current: Any, other: str | None) -> bool:
    if current is None or other is None:
        return current is None and other is None
    with contextlib.suppress(UsageError):
        return parse_hostpci(str(current)).is_equivalent(parse_hostpci(other))
    return str(current) == other


def _compare(pve: Pve, node: str, vm: Guest, key: str, value: str | None, back: str) -> None:
    """Read back: the key is as written, and nothing else has changed."""
    try:
        now: Mapping[str, Any] = read_guest(pve, node, vm.id).config
    except UnavailableError as error:
        raise PartialError(
            f"{key} of VM {vm.id} was written, and can't be read back: {error.message}",
            hint=f"{back} takes it back",
        ) from error
    wrong = [] if _is_same_value(now.get(key), value) else [f"{key}: found {now.get(key)}, wanted {value}"]
    # Everything else, too: a hook or another user may change the VM at the same moment.
    for name in sorted({*now, *vm.config} - {key}):
        if now.get(name) != vm.config.get(name):
            wrong.append(f"{name}: it was {vm.config.get(name)}, and is {now.get(name)}")
    if wrong:
        raise CheckFailedError(
            f"VM {vm.id} is not as it was written", details=tuple(wrong), hint=f"{back} takes {key} back"
        )
