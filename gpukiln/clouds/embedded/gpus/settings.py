"""Settings and scenarios that change simulated GPUs while programs use them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpukiln.clouds.embedded.gpus.state import Rows, add_event, count_energy, gpu_count, remove
from gpukiln.errors import UsageError
from gpukiln.parsing import parse_yaml, read_text
from gpukiln.typed import unknown
from gpukiln.units import is_whole

# NVML's numbers (nvml.h: nvmlReturn_t, nvmlEventType*, nvmlClocksEventReason*)
DRIVER_NOT_LOADED, GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN_ERROR = 9, 15, 18, 999
LARGEST = 1 << 20  # bytes of a scenario's file
XID, DOUBLE_BIT_ERROR = 8, 2
IDLE, SW_THERMAL, HW_SLOWDOWN, HW_THERMAL = 0x1, 0x20, 0x8, 0x40
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
Change = Callable[[Rows, int, Any], None]


@dataclass(frozen=True)
class Setting:
    """A value of a GPU that can be set.

    Args:
        text: Its description, with the unit.
        read: Parses the value; raises ValueError.
        change: Changes the rows of one GPU.
    """

    text: str
    read: Callable[[str], Any]
    change: Change


def _parse_bool(text: str) -> bool:
    """Parse a boolean setting.

    >>> _parse_bool("Yes"), _parse_bool("0")
    (True, False)
    """
    if text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    raise ValueError(", true or false")


def _whole_number(least: int, most: int) -> Callable[[str], int]:
    """A parser for whole numbers in a range.

    >>> _whole_number(0, 100)("42")
    42
    >>> _whole_number(0, 100)("101")
    Traceback (most recent call last):
    ValueError: , 0 to 100
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ValueError(f", {least} to {most}")
        return value

    return read


def _watts(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 10000:
        raise ValueError(", 0 to 10000")
    return value


def _set_row(key: str, *, own: bool = False) -> Change:
    """A change that sets a key, for the idle and the busy GPU.

    Args:
        own: Also where this GPU does not have the key.
    """

    def change(rows: Rows, gpu: int, value: Any) -> None:
        whole_key = f"gpus.{gpu}.{key}"
        if whole_key not in rows and not own:
            raise UsageError(
                f"GPU {gpu} does not have {key}, so it can't be set",
                hint="`invoke cloud.gpus all --list` lists the settings",
            )
        rows[whole_key] = str(int(value)) if isinstance(value, bool) else str(value)
        # A busy GPU would otherwise show its busy value.
        rows.pop(f"gpus.{gpu}.busy.{key}", None)

    return change


def _set_power(rows: Rows, gpu: int, watts: float) -> None:
    count_energy(rows, gpu)
    # Energy up to now counts with the old power.
    _set_row("power.draw")(rows, gpu, watts)
    count_energy(rows, gpu)


def _set_temperature(rows: Rows, gpu: int, degrees: int) -> None:
    """Set the temperature; above the slowdown threshold with the driver's clock event reasons."""
    key = f"gpus.{gpu}"
    _set_row("temperature.gpu")(rows, gpu, degrees)
    mask = int(rows.get(f"{key}.throttle.mask", 0)) & ~(SW_THERMAL | HW_THERMAL | HW_SLOWDOWN)
    slowdown = rows.get(f"{key}.temperature.slowdown")
    if slowdown and degrees >= int(float(slowdown)):
        mask |= SW_THERMAL | HW_THERMAL | HW_SLOWDOWN
    if limit := rows.get(f"{key}.temperature.gpu_limit"):
        rows[f"{key}.temperature.margin"] = str(int(limit) - degrees)
        if degrees >= int(limit):
            mask |= SW_THERMAL
    if f"{key}.throttle.mask" in rows:
        rows[f"{key}.throttle.mask"] = str(mask)


def _set_lost(rows: Rows, gpu: int, lost: bool) -> None:
    """NVML answers GPU_IS_LOST to every call for the GPU."""
    if lost:
        rows[f"gpus.{gpu}.error.code"] = str(GPU_IS_LOST)
        # Xid 79: the GPU has fallen off the bus.
        add_event(rows, gpu=gpu, kind=XID, data=79)
    else:
        remove(rows, f"gpus.{gpu}.error")


def _set_fallen_off_bus(rows: Rows, gpu: int, fallen: bool) -> None:
    """A GPU that fell off the bus: new programs get no handle, and nvidia-smi prints "Unknown Error"."""
    handle = [f"gpus.{gpu}.fail.nvmlDeviceGetHandleBy{by}" for by in ("Index_v2", "UUID", "PciBusId_v2")]
    _set_lost(rows, gpu, fallen)
    if fallen:
        remove(rows, f"gpus.{gpu}.error")
        rows.update(dict.fromkeys(handle, str(UNKNOWN_ERROR)))
    else:
        for key in handle:
            rows.pop(key, None)


def _add_xid(rows: Rows, gpu: int, number: int) -> None:
    add_event(rows, gpu=gpu, kind=XID, data=number)


def _set_uncorrected(rows: Rows, gpu: int, count: int) -> None:
    """Set uncorrected errors: new ones add to the aggregate count and raise an event and Xid 48."""
    key = f"gpus.{gpu}.ecc"
    before = int(float(rows.get(f"{key}.volatile_uncorrected", 0)))
    _set_row("ecc.volatile_uncorrected")(rows, gpu, count)
    if count > before:
        aggregate = int(float(rows.get(f"{key}.aggregate_uncorrected", 0)))
        rows[f"{key}.aggregate_uncorrected"] = str(aggregate + count - before)
        add_event(rows, gpu=gpu, kind=DOUBLE_BIT_ERROR)
        # Xid 48: double bit ECC error.
        add_event(rows, gpu=gpu, kind=XID, data=48)


def _set_hung(rows: Rows, gpu: int, hung: bool) -> None:
    if hung:
        rows[f"gpus.{gpu}.hung"] = "1"
    else:
        rows.pop(f"gpus.{gpu}.hung", None)


def _set_link_down(rows: Rows, gpu: int, link: int) -> None:
    key = f"gpus.{gpu}.nvlinks.{link}.state"
    if key not in rows:
        raise UsageError(f"GPU {gpu} has no NVLink {link}", hint="links count from 0")
    rows[key] = "0"


PERCENT, MIB = _whole_number(0, 100), _whole_number(0, 1 << 22)
SETTINGS: dict[str, Setting] = {
    "temperature": Setting("degrees Celsius", _whole_number(-40, 200), _set_temperature),
    "power": Setting("watts drawn", _watts, _set_power),
    "power_limit": Setting("watts", _watts, _set_row("power.limit")),
    "utilization": Setting("percent, in addition to processes", PERCENT, _set_row("utilization.gpu")),
    "memory_used": Setting("MiB, in addition to processes", MIB, _set_row("memory.used")),
    "sm_clock": Setting("MHz", _whole_number(0, 10000), _set_row("clocks.sm")),
    "memory_clock": Setting("MHz", _whole_number(0, 30000), _set_row("clocks.mem")),
    "fan": Setting("percent", PERCENT, _set_row("fan")),
    "pcie_gen": Setting("present generation of the link", _whole_number(1, 6), _set_row("pcie.gen")),
    "pcie_width": Setting("present lanes of the link", _whole_number(1, 16), _set_row("pcie.width")),
    "ecc_corrected": Setting("errors since the last reset", MIB, _set_row("ecc.volatile_corrected")),
    "ecc_uncorrected": Setting(
        "errors since the last reset; an increase raises Xid 48", MIB, _set_uncorrected
    ),
    "remap_pending": Setting("whether rows wait for a reset", _parse_bool, _set_row("remapped_rows.pending")),
    "remap_failed": Setting(
        "whether rows could not be remapped", _parse_bool, _set_row("remapped_rows.failed")
    ),
    "pages_pending": Setting(
        "whether pages wait for a reset", _parse_bool, _set_row("retired_pages_pending")
    ),
    "ecc_pending": Setting("whether ECC is on after the next reset", _parse_bool, _set_row("ecc.pending")),
    "mig_pending": Setting("whether MIG is on after the next reset", _parse_bool, _set_row("mig.pending")),
    "recovery_action": Setting(
        "NVML's number, 1: reset", _whole_number(0, 5), _set_row("recovery_action", own=True)
    ),
    "throttle": Setting(
        "mask of NVML's clock event reasons", _whole_number(0, 0x1FF), _set_row("throttle.mask")
    ),
    "persistence": Setting("whether it is on", _parse_bool, _set_row("persistence")),
    "compute_mode": Setting(
        "NVML's number, 3: exclusive process", _whole_number(0, 3), _set_row("compute_mode")
    ),
    # NVML_NVLINK_MAX_LINKS is 18.
    "nvlink_down": Setting("number of the link that goes down", _whole_number(0, 17), _set_link_down),
    "xid": Setting("number of an Xid, which becomes an event", _whole_number(1, 999), _add_xid),
    "lost": Setting("whether NVML reports it as lost", _parse_bool, _set_lost),
    "fallen_off_bus": Setting("whether it fell off the bus", _parse_bool, _set_fallen_off_bus),
    "hung": Setting("whether calls to it wait", _parse_bool, _set_hung),
}


def apply_setting(rows: Rows, text: str) -> None:
    """Apply a setting.

    Args:
        text: `GPU.NAME=VALUE`; GPU is an index, `*` for all, or `last`.

    Raises:
        UsageError: The GPU or the setting does not exist, or the value is invalid.

    >>> rows = {"gpus.count": "2", "gpus.1.fan": "30"}
    >>> apply_setting(rows, "last.fan=55")
    >>> rows["gpus.1.fan"]
    '55'
    """
    where, equals, value = text.partition("=")
    gpu, dot, name = where.partition(".")
    if not (equals and dot):
        raise UsageError(
            f"{text!r} is not GPU.NAME=VALUE", hint="for example --set 1.temperature=91, or *.hung=true"
        )
    setting = SETTINGS.get(name.strip().replace("-", "_"))
    if setting is None:
        raise unknown("setting of a GPU", name, SETTINGS)
    try:
        parsed = setting.read(value.strip())
    except ValueError as error:
        raise UsageError(
            f"{name}={value}: wanted {setting.text}{error}", hint=f"for example {gpu}.{name}=1"
        ) from None
    for index in _indices(rows, gpu.strip()):
        setting.change(rows, index, parsed)


def _indices(rows: Rows, text: str) -> Iterable[int]:
    count = gpu_count(rows)
    if text == "*":
        return range(count)
    if text == "last" and count:
        return [count - 1]
    if is_whole(text) and int(text) < count:
        return [int(text)]
    raise UsageError(
        f"no GPU {text!r}: the machine has {count} GPUs",
        hint=f"use 0 to {count - 1}, last, or * for all"
        if count
        else "add some: invoke cloud.gpus MACHINE --on",
    )


# ---- scenarios: faults of whole machines


def _machine_error(code: int) -> Callable[[Rows], None]:
    """NVML fails to initialize; programs that have initialized it continue."""

    def change(rows: Rows) -> None:
        rows["error.code"] = str(code)

    return change


def _start_takes(milliseconds: int) -> Callable[[Rows], None]:
    """NVML takes this long to initialize, as without persistence mode."""

    def change(rows: Rows) -> None:
        rows["start_ms"] = str(milliseconds)

    return change


def _apply_all(*texts: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        for text in texts:
            apply_setting(rows, text)

    return change


def _overheat(rows: Rows) -> None:
    """The last GPU reaches the board's slowdown threshold, or 95 degrees on boards that report margins."""
    gpu = gpu_count(rows) - 1
    slowdown = rows.get(f"gpus.{gpu}.temperature.slowdown")
    apply_setting(rows, f"last.temperature={int(float(slowdown)) + 1 if slowdown else 95}")


def _mig_mixed(rows: Rows) -> None:
    """MIG on the first GPU with the smallest profile, on the second with two of three slices."""
    able = [gpu for gpu in range(gpu_count(rows)) if f"gpus.{gpu}.mig.current" in rows]
    if not able:
        raise UsageError("no GPU of this machine has MIG", hint="p4d, p5 and newer instance types have it")
    for gpu, slices in zip(able[:2], (1, 3), strict=False):
        _partition(rows, gpu, slices)


def _partition(rows: Rows, gpu: int, slices: int) -> None:
    key = f"gpus.{gpu}.mig"
    rows.update({f"{key}.current": "1", f"{key}.pending": "1"})
    remove(rows, f"{key}.gi")
    for at in range(int(rows.get(f"{key}.profiles.count", 0))):
        profile = f"{key}.profiles.{at}"
        # A profile such as 1g.10gb+me has the media engines, so only one instance of it fits.
        if rows[f"{profile}.slices"] != str(slices) or "+" in rows[f"{profile}.name"]:
            continue
        size, most = int(rows[f"{profile}.size"]), int(rows[f"{profile}.instances"])
        for n in range(min(most, int(rows[f"{profile}.placements.count"]))):
            start = int(rows[f"{profile}.placements.{n}"])
            number = int(rows[f"{key}.memory_slices"]) // size - 1 + start // size  # nvml/mig.c, instance_id
            rows[f"{key}.gi.{number}.profile"] = rows[f"{profile}.id"]
            rows[f"{key}.gi.{number}.start"] = str(start)
            rows[f"{key}.gi.{number}.ci.0.slices"] = str(slices)
            rows[f"{key}.gi.{number}.ci.0.start"] = "0"
        return
    raise UsageError(
        f"GPU {gpu} has no MIG profile of {slices} slices", hint="nvidia-smi mig -lgip lists them"
    )


SCENARIOS: dict[str, tuple[str, Callable[[Rows], None]]] = {
    "lost": ("the last GPU is lost (NVML 15), with Xid 79", _apply_all("last.lost=true")),
    "fallen-off-bus": (
        "new programs get no handle of the last GPU (999)",
        _apply_all("last.fallen_off_bus=true"),
    ),
    "hot": ("the last GPU is at its slowdown temperature and reports it", _overheat),
    "ecc": (
        "the last GPU has two uncorrected memory errors, with Xid 48",
        _apply_all("last.ecc_uncorrected=2"),
    ),
    "remap-pending": (
        "rows of the last GPU wait for a reset, which the driver requests",
        _apply_all("last.remap_pending=true", "last.recovery_action=1", "last.xid=63"),
    ),
    "mismatch": ("the driver is of another version than NVML (18)", _machine_error(VERSION_MISMATCH)),
    "no-driver": ("the driver is not loaded (9)", _machine_error(DRIVER_NOT_LOADED)),
    "mig-mixed": ("MIG is on: the first GPU in the smallest parts, the second in two halves", _mig_mixed),
    "hung": ("calls to the last GPU wait in state D", _apply_all("last.hung=true")),
    "slow-start": ("the driver takes 15 s to start for each program", _start_takes(15000)),
}


def play_scenario(rows: Rows, name: str) -> None:
    """Apply a scenario.

    Args:
        name: A key of SCENARIOS; the command reads files itself, by `read_scenario`.

    Raises:
        UsageError: The scenario does not exist, or the machine can't have it.
    """
    if name in SCENARIOS:
        if not gpu_count(rows):
            raise UsageError(
                "the machine has no simulated GPU", hint="add some: invoke cloud.gpus MACHINE --on"
            )
        SCENARIOS[name][1](rows)
        return
    raise unknown("scenario", name, SCENARIOS)


def read_scenario(path: Path) -> list[str]:
    """The settings in a scenario's file.

    Raises:
        UsageError: It is not YAML of the form `set: [...]`.
    """
    try:
        document = parse_yaml(read_text(path, largest=LARGEST))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}", hint="a scenario is YAML: set: [1.temperature=91]") from None
    settings = document.get("set") if isinstance(document, dict) else None
    if not isinstance(settings, list) or not settings or not all(isinstance(text, str) for text in settings):
        raise UsageError(
            f"{path} has no list of settings", hint="a scenario is YAML: set: [1.temperature=91, 0.lost=true]"
        )
    return settings
