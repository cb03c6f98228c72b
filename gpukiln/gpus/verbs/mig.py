"""The verb mig: assert, export and apply MIG layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.errors import IncompatibleError, PartialError, UsageError
from gpukiln.gpus import mig, mig_change, reset
from gpukiln.gpus.lease_overlay import snapshot
from gpukiln.gpus.leases import check_usable
from gpukiln.gpus.model import Device, Snapshot
from gpukiln.gpus.reset import Blocker
from gpukiln.gpus.verb import Options, Verb
from gpukiln.gpus.verbs.reset import CHECK_FAILED, REFUSED, show_blockers
from gpukiln.options import Option
from gpukiln.probe.base import NotReachedError, run_unrecorded

# Named as the commands of nvidia-mig-parted.
ACTIONS = ("assert", "export", "apply")
NOT_NOW = 75
# The path of nvidia-cdi-refresh.service, and of the roles gpu_bootstrap and nvidia_container_toolkit.
CDI = "/var/run/cdi/nvidia.yaml"
CDI_LIMIT_S = 120.0


@dataclass(frozen=True)
class MigReport:
    """MIG layouts: the current and the desired ones.

    Args:
        action: assert, export or apply.
        select: Name of the configuration in the file.
        differences: A sentence for each GPU that differs from its desired layout; after apply the remaining
            ones.
        steps: What was done, or would be done with --yes.
        blockers: Everything that blocks apply.
        changed: Whether a GPU was changed.
        config: For export, the current layouts in mig-parted's format.
    """

    node: str
    action: str
    select: str
    differences: tuple[str, ...]
    steps: tuple[str, ...]
    blockers: tuple[Blocker, ...]
    notes: tuple[str, ...]
    changed: bool
    config: dict[str, Any] | None
    exit_code: int


def _mig(options: Options) -> MigReport:
    if options.action not in ACTIONS:
        raise UsageError(f"mig has no action {options.action!r}", hint=f"wanted: mig {' | '.join(ACTIONS)}")
    if options.action != "export" and not options.config:
        raise UsageError(f"mig {options.action} lacks --config", hint="pass a file in mig-parted's format")
    entries = mig.read_config(Path(options.config), options.select) if options.action != "export" else ()
    snap = snapshot()
    check_usable(snap)
    gpus = [device for device in snap.devices if device.kind == "gpu" and device.vendor == "nvidia"]
    if not gpus:
        raise IncompatibleError("mig does not support AMD's GPUs yet", hint="run `amd-smi partition`")
    # Neither `assert` nor `apply` can be right about a GPU whose layout is unknown.
    if lost := [gpu for gpu in gpus if not gpu.readable]:
        raise PartialError(
            f"{len(lost)} of {len(gpus)} GPUs can't be read, so their layout is not known",
            details=tuple(f"{gpu.title}: {gpu.error}" for gpu in lost),
            hint="`gpukiln-gpu reset` prints the next step for each",
        )
    if options.action == "export":
        config = mig.export_config(snap, gpus, options.select or "current")
        return _report(snap, options, config=config)
    if options.action == "apply":
        return _apply(snap, gpus, entries, options)
    differences = _differences(snap, gpus, entries, every=True)
    return _report(snap, options, differences=differences, exit_code=CHECK_FAILED if differences else 0)


def _differences(
    snap: Snapshot, gpus: list[Device], entries: tuple[mig.MigConfigEntry, ...], *, every: bool
) -> list[str]:
    """A sentence for each GPU that differs from its desired layout.

    Args:
        every: Whether a GPU without an entry counts as a difference, as for mig-parted's assert.
    """
    lines = []
    for gpu in gpus:
        cut = mig.desired_layout(entries, gpu)
        if cut is not None:
            lines.append(mig.layout_difference(snap, gpu, cut))
        elif every:
            lines.append(f"GPU {gpu.index} {gpu.title}: it has no entry")
    return [line for line in lines if line]


def _apply(
    snap: Snapshot, gpus: list[Device], entries: tuple[mig.MigConfigEntry, ...], options: Options
) -> MigReport:
    layouts = {gpu.uuid or "": mig.desired_layout(entries, gpu) for gpu in gpus}
    cuts = {
        uuid: cut
        for gpu in gpus
        if (uuid := gpu.uuid or "") and (cut := layouts[uuid]) and mig.layout_difference(snap, gpu, cut)
    }
    # Null: NVML answers NOT_SUPPORTED on a board without MIG.
    if unable := [gpu for gpu in gpus if gpu.uuid in cuts and gpu.mig_enabled is None]:
        raise IncompatibleError(
            f"{len(unable)} of the GPUs do not support MIG",
            details=tuple(f"{gpu.index} {gpu.title} {gpu.name}" for gpu in unable),
            hint="leave them out with devices or device-filter",
        )
    if not cuts:
        return _report(snap, options, notes=["every GPU has its desired layout"])
    touched, switches = _affected_gpus(snap, gpus, cuts)
    steps = _differences(snap, gpus, entries, every=False)
    steps += [
        f"GPU {gpu.index} {gpu.title}: is reset with the others, and gets its current layout again"
        for gpu in touched
        if gpu.uuid not in cuts
    ]
    rows, notes = reset.blockers(snap, touched, held_open=switches)
    if rows or not options.yes:
        # A plan without blockers is a success; leases and jobs end by themselves, so that a timer may try
        # again.
        code = 0 if not rows else NOT_NOW if all(row.passes for row in rows) else REFUSED
        return _report(snap, options, steps=steps, blockers=rows, notes=notes, exit_code=code)
    with reset.exclusive_lease(touched, "gpukiln-gpu mig apply") as granted:
        snap = snapshot()  # a job may have started before the lease
        touched = [device for device in snap.devices if device.kind == "gpu" and device.uuid in granted.uuids]
        rows, notes = reset.blockers(snap, touched, own=granted.lease.id, held_open=switches)
        if rows:
            code = NOT_NOW if all(row.passes for row in rows) else REFUSED
            return _report(snap, options, steps=steps, blockers=rows, notes=notes, exit_code=code)
        # Under the lease: nobody can change the layout between this reading and `apply`.
        before = {gpu.uuid or "": mig.current_layout(snap, gpu) for gpu in touched}
        steps = mig_change.apply(cuts, before)
        note, problem = _write_cdi()
        after = snapshot()
    now = [device for device in after.devices if device.kind == "gpu" and device.vendor == "nvidia"]
    differences = _differences(after, now, entries, every=False)
    if problem:
        differences.append(problem)
    return _report(
        after,
        options,
        steps=steps,
        notes=[*notes, *([note] if note else [])],
        differences=differences,
        changed=True,
        exit_code=CHECK_FAILED if differences else 0,
    )


def _affected_gpus(
    snap: Snapshot, gpus: list[Device], cuts: dict[str, mig.MigLayout]
) -> tuple[list[Device], bool]:
    """The GPUs that change or must be reset together; and whether the change includes a reset."""
    switched = [
        gpu
        for gpu in gpus
        if gpu.uuid in cuts and (gpu.mig_enabled, gpu.mig_pending) != (cuts[gpu.uuid].enabled,) * 2
    ]
    # Only a change of the mode resets a GPU; other instances need none.
    more = reset.reset_peers(snap, switched)
    needs = any(gpu.architecture in (*reset.RESET_WITH_PEERS, *reset.WITH_FABRIC_MANAGER) for gpu in switched)
    return [gpu for gpu in gpus if gpu.uuid in cuts or gpu in more], needs


def _write_cdi() -> tuple[str, str]:
    """Update the CDI specification, which names MIG devices; returns a note and an error, empty for none."""
    try:
        done = run_unrecorded("nvidia-ctk", "cdi", "generate", f"--output={CDI}", timeout=CDI_LIMIT_S)
    except NotReachedError as error:
        return "", f"{CDI} is not updated: {error}"
    # `ask` returns 127 for a missing program, as shells do.
    if done["rc"] == 127:
        return "nvidia-ctk is missing: container engines can't use the MIG devices by CDI", ""
    if done["rc"] != 0:
        return "", f"{CDI} is not updated: nvidia-ctk exits with {done['rc']}: {done['err'][-300:]}"
    return f"{CDI} is updated", ""


def _report(
    snap: Snapshot,
    options: Options,
    *,
    differences: list[str] | None = None,
    steps: list[str] | None = None,
    blockers: list[Blocker] | None = None,
    notes: list[str] | None = None,
    changed: bool = False,
    config: dict[str, Any] | None = None,
    exit_code: int = 0,
) -> MigReport:
    return MigReport(
        node=snap.node,
        action=options.action,
        select=options.select,
        differences=tuple(differences or ()),
        steps=tuple(steps or ()),
        blockers=tuple(blockers or ()),
        notes=tuple(notes or ()),
        changed=changed,
        config=config,
        exit_code=exit_code,
    )


def _show(node: dict[str, Any], _: Options, print: Callable[[str], None]) -> None:
    if node["config"] is not None:
        print(mig.config_yaml(node["config"]))
        return
    for step in node["steps"]:
        print(step)
    show_blockers(node, print)
    for line in node["differences"]:
        print(f"differs: {line}")
    for note in node["notes"]:
        print(f"note: {note}")
    if node["action"] == "assert" and not node["differences"]:
        print("every GPU has its desired layout")
    if node["blockers"]:
        print("nothing was changed")
    elif node["steps"] and not node["changed"]:
        print("nothing blocks the change; --yes carries it out")


VERBS = (
    Verb(
        "mig",
        "Compare, export or change MIG layouts, in mig-parted's format.",
        (
            Option("action", "assert, export or apply", first=True, value="ACTION"),
            Option("config", "the file with the configurations, YAML or JSON", value="FILE"),
            Option("select", "the name of a configuration in the file", value="NAME"),
            Option("yes", "with apply: change the GPUs; without --yes print the plan", default=False),
        ),
        _mig,
        _show,
        changes=True,
        examples=("export", "assert --config mig.yaml --select all-1g.5gb"),
    ),
)
