"""Changes MIG layouts by NVML in child processes, and restores the old layouts when a step fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpukiln.errors import BusyError, CheckFailedError, GpukilnError, IncompatibleError, PartialError
from gpukiln.gpus import reset
from gpukiln.gpus.collect import collect
from gpukiln.gpus.mig import PROFILE, MigLayout, current_layout, layout_difference
from gpukiln.probe.child import call

LIMIT_S = 120.0  # for all instances of one GPU
RESET_REQUIRED, IN_USE = 16, 19  # nvmlReturn_t
# INVALID_ARGUMENT: NVML has no such profile; NOT_SUPPORTED: this GPU has none; NOT_FOUND: not next to the
# instances that exist.
UNSUPPORTED_PROFILE = (2, 3, 6)


@dataclass(frozen=True)
class MigProfile:
    """A profile of GPU instances.

    Args:
        id: NVML's number, valid for this GPU.
        slices: Its compute slices.
        most: The largest number of instances on one GPU.
        places: Possible placements in NVML's order: first slice and number of memory slices.
    """

    name: str
    id: int
    slices: int
    most: int
    places: tuple[tuple[int, int], ...]


def apply(cuts: Mapping[str, MigLayout], before: Mapping[str, MigLayout]) -> list[str]:
    """Change the layouts of GPUs; when a step fails, the old layouts are restored.

    Args:
        cuts: The new layouts by UUID.
        before: The layouts of every GPU that may change; the caller has them leased
            (`reset.exclusive_lease`).

    Returns:
        The steps that were done.

    Raises:
        IncompatibleError: A GPU does not support its layout; the old layouts are restored.
        BusyError: A program has a GPU open; the old layouts are restored.
        CheckFailedError: A step failed; the old layouts are restored.
        PartialError: A step failed, and so did the restoration.
    """
    # Every GPU that may be reset is brought to a layout: a reset removes the MIG devices of its peers too.
    steps: list[str] = []
    try:
        _apply_layouts({**before, **cuts}, steps)
    except (GpukilnError, RuntimeError) as error:
        try:
            _apply_layouts(before, [])
        except (GpukilnError, RuntimeError) as worse:
            raise PartialError(
                f"{_text(error)}; the old layout could not be restored: {_text(worse)}",
                details=tuple(steps),
                hint="`gpukiln-gpu mig export` prints the current layout; reboot if the driver hangs",
            ) from error
        # The exit code stays that of the first error; the text says that the old layout is back.
        kind = type(error) if isinstance(error, (IncompatibleError, BusyError)) else CheckFailedError
        hint = getattr(error, "hint", "")
        raise kind(f"{_text(error)}; the old layout is restored", details=tuple(steps), hint=hint) from error
    return steps


def _text(error: BaseException) -> str:
    return getattr(error, "message", "") or str(error)


def _apply_layouts(cuts: Mapping[str, MigLayout], steps: list[str]) -> None:
    """Bring GPUs to their layouts, from any layout."""
    snapshot = collect()
    waiting = []
    for gpu in snapshot.devices:
        cut = cuts.get(gpu.uuid or "") if gpu.kind == "gpu" else None
        if cut is None or gpu.uuid is None or not layout_difference(snapshot, gpu, cut):
            continue
        # NVML refuses to change the mode, or to create other instances, while instances exist.
        if gpu.mig_enabled and current_layout(snapshot, gpu).devices:
            _in_child(destroy_instances, gpu.uuid)
            steps.append(f"{gpu.uuid}: its MIG devices are removed")
        # Ampere changes the mode with a reset, later architectures at once (NVIDIA, MIG User Guide).
        if (gpu.mig_enabled, gpu.mig_pending) != (cut.enabled, cut.enabled):
            if _in_child(set_mode, gpu.uuid, cut.enabled)["reset"]:
                waiting.append(gpu)
            steps.append(f"{gpu.uuid}: MIG is {'on' if cut.enabled else 'off'}")
    if waiting:
        gpus = (*waiting, *reset.reset_peers(snapshot, waiting))
        reset.reset_gpus(gpus)
        steps.append(f"reset: {', '.join(gpu.uuid or '' for gpu in gpus)}")
    snapshot = collect()
    for gpu in snapshot.devices:
        cut = cuts.get(gpu.uuid or "") if gpu.kind == "gpu" else None
        if (
            cut is not None
            and gpu.uuid is not None
            and cut.devices
            and current_layout(snapshot, gpu).devices != cut.devices
        ):
            if not gpu.mig_enabled:
                raise CheckFailedError(
                    f"{gpu.uuid}: MIG is still off", hint="reboot the machine, then try again"
                )
            _in_child(create, gpu.uuid, dict(cut.devices))
            steps.append(f"{gpu.uuid}: {cut}")


def _in_child(work: Callable[..., dict[str, Any]], uuid: str, *args: Any) -> dict[str, Any]:
    """Call NVML in a child process, with a GPU's handle; an error ends the change."""
    # Not through the collector, which turns every error into a value.

    def ask() -> dict[str, Any]:
        import pynvml  # noqa: PLC0415 - only where there is a GPU

        pynvml.nvmlInit()
        try:
            return work(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid), *args)
        except pynvml.NVMLError as error:
            return {"error": f"{work.__name__}: {error}", "busy": error.value == IN_USE}
        except IncompatibleError as error:
            return {"error": error.message, "never": True, "hint": error.hint}
        finally:
            pynvml.nvmlShutdown()

    # The name is in the error of a child that hangs.
    ask.__name__ = f"{work.__name__} {uuid}"
    answer = call(ask, LIMIT_S)
    if text := answer.get("error"):
        if answer.get("never"):
            raise IncompatibleError(f"{uuid}: {text}", hint=answer["hint"])
        if answer.get("busy"):
            raise BusyError(
                f"{uuid}: {text}", hint="a program such as DCGM has it open: stop it, then try again"
            )
        raise CheckFailedError(f"{uuid}: {text}", hint="`dmesg` has the driver's messages")
    return answer


def set_mode(nvml: Any, gpu: Any, on: bool) -> dict[str, Any]:
    """Set the MIG mode; returns {reset: whether it needs a reset to take effect}."""
    status = nvml.nvmlDeviceSetMigMode(gpu, int(on))
    if status == RESET_REQUIRED:
        return {"reset": True}
    if status:
        raise nvml.NVMLError(status)
    return {"reset": False}


def destroy_instances(nvml: Any, gpu: Any) -> dict[str, Any]:
    """Destroy all GPU instances and compute instances of a GPU."""
    for profile in profiles(nvml, gpu, with_places=False):
        for instance in _list_instances(
            nvml.c_nvmlGpuInstance_t, profile.most, nvml.nvmlDeviceGetGpuInstances, gpu, profile.id
        ):
            for kind in _compute_profiles(nvml, instance):
                for part in _list_instances(
                    nvml.c_nvmlComputeInstance_t,
                    kind.instanceCount,
                    nvml.nvmlGpuInstanceGetComputeInstances,
                    instance,
                    kind.id,
                ):
                    nvml.nvmlComputeInstanceDestroy(part)
            nvml.nvmlGpuInstanceDestroy(instance)
    return {}


def _list_instances(kind: Any, most: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    rows, count = (kind * max(most, 1))(), ctypes.c_uint(most)
    function(*args, rows, ctypes.byref(count))
    return [rows[n] for n in range(count.value)]


def profiles(nvml: Any, gpu: Any, *, with_places: bool = True) -> list[MigProfile]:
    """The profiles of GPU instances that a GPU supports."""
    profiles_by_id: dict[int, MigProfile] = {}
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, number)
        except nvml.NVMLError as error:
            if error.value in UNSUPPORTED_PROFILE:
                continue
            raise
        places = _placements(nvml, gpu, info.id) if with_places else ()
        name = info.name.decode() if isinstance(info.name, bytes) else info.name
        profiles_by_id[info.id] = MigProfile(
            name.rpartition("MIG ")[2], info.id, info.sliceCount, info.instanceCount, places
        )
    return list(profiles_by_id.values())


def _placements(nvml: Any, gpu: Any, profile: int) -> tuple[tuple[int, int], ...]:
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, None, ctypes.byref(count))
    rows = (nvml.c_nvmlGpuInstancePlacement_t * max(count.value, 1))()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, rows, ctypes.byref(count))
    return tuple((rows[n].start, rows[n].size) for n in range(count.value))


def _compute_profiles(nvml: Any, instance: Any) -> list[Any]:
    """The profiles of compute instances that a GPU instance supports."""
    by_id: dict[int, Any] = {}
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0)
        except nvml.NVMLError as error:
            if error.value in UNSUPPORTED_PROFILE:
                continue
            raise
        by_id.setdefault(info.id, info)
    return list(by_id.values())


def create(nvml: Any, gpu: Any, devices: Mapping[str, int]) -> dict[str, Any]:
    """Create instances, the largest first.

    Raises:
        IncompatibleError: The GPU does not support the layout.
    """
    for profile, start, size, parts in arrange(profiles(nvml, gpu), devices):
        place = nvml.c_nvmlGpuInstancePlacement_t(start, size)
        instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile.id, ctypes.byref(place))
        # Several profiles may have the same number of slices: the first one is used.
        kinds = {kind.sliceCount: kind.id for kind in reversed(_compute_profiles(nvml, instance))}
        for slices in parts:
            if slices not in kinds:
                raise IncompatibleError(
                    f"{profile.name} has no compute instance of {slices} slices",
                    hint=f"it has {sorted(kinds)}",
                )
            nvml.nvmlGpuInstanceCreateComputeInstance(instance, kinds[slices])
    return {}


def arrange(
    offered: Sequence[MigProfile], devices: Mapping[str, int]
) -> list[tuple[MigProfile, int, int, tuple[int, ...]]]:
    """GPU instances with their placement and their compute instances, for MIG devices by profile.

    Compute instances such as 1c.3g.20gb share as few GPU instances as possible.

    Raises:
        IncompatibleError: The GPU has no such profile, or no space for all.
    """
    by_name = {profile.name: profile for profile in offered}
    instances: list[tuple[MigProfile, tuple[int, ...]]] = []
    shared: dict[str, list[int]] = {}
    for name, many in devices.items():
        match = PROFILE.fullmatch(name)
        profile = by_name.get(match["gpu"]) if match else None
        if match is None or profile is None:
            raise IncompatibleError(
                f"it has no profile {name}", hint=f"it has {', '.join(sorted(by_name)) or 'none'}"
            )
        slices = int(match["part"] or profile.slices)
        if slices == profile.slices:
            instances += [(profile, (slices,))] * many
        else:
            shared.setdefault(profile.name, []).extend([slices] * many)
    for name, sizes in shared.items():
        bins: list[list[int]] = []
        for size in sorted(sizes, reverse=True):
            bin_with_space = next(
                (sizes_in for sizes_in in bins if sum(sizes_in) + size <= by_name[name].slices), None
            )
            if bin_with_space is None:
                bins.append([size])
            else:
                bin_with_space.append(size)
        instances += [(by_name[name], tuple(sizes_in)) for sizes_in in bins]
    instances.sort(
        key=lambda row: (-max((size for _, size in row[0].places), default=0), -row[0].slices, row[0].id)
    )
    places = _find_placements(
        [profile for profile, _ in instances], max((profile.slices for profile in offered), default=0)
    )
    if places is None:
        text = ", ".join(f"{many} x {name}" for name, many in devices.items())
        raise IncompatibleError(
            f"it has no space for {text}", hint="`nvidia-smi mig -lgipp` lists the placements"
        )
    return [(profile, *place, parts) for (profile, parts), place in zip(instances, places)]


def _find_placements(instances: Sequence[MigProfile], slices: int) -> list[tuple[int, int]] | None:
    """A placement for each instance; None where there is no space for all. Tries every combination."""
    if sum(profile.slices for profile in instances) > slices:
        return None
    if any(sum(1 for other in instances if other is profile) > profile.most for profile in instances):
        return None
    # NVML places an instance at the first free slice, which can block a larger one: the places are chosen
    # before any is created.
    tried: set[tuple[int, int]] = set()

    def place(number: int, taken: int) -> list[tuple[int, int]] | None:
        if number == len(instances):
            return []
        if (number, taken) in tried:
            return None
        tried.add((number, taken))
        for start, size in instances[number].places:
            mask = ((1 << size) - 1) << start
            if not taken & mask:
                rest = place(number + 1, taken | mask)
                if rest is not None:
                    return [(start, size), *rest]
        return None

    return place(0, 0)
