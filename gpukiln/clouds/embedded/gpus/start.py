"""The state of a machine's GPUs at its start: the profile, and derived values of the double."""

import time
from typing import Any

from gpukiln.clouds.embedded.gpus.state import Rows, State, rows_of

BUSY_DEGREES = 30  # degrees that a busy GPU is warmer than an idle one; a choice of this project


def initial_rows(document: dict[str, Any], *, now: float | None = None) -> Rows:
    """The rows of a document.

    Args:
        document: A profile or a recording: a superset of the facts' section `nvml`.
        now: Seconds since 1970.
    """
    at = time.time() if now is None else now
    gpus = [gpu if gpu.get("error") else {**gpu, **_derived_values(gpu, at)} for gpu in document["gpus"]]
    return dict(rows_of({**document, "gpus": gpus}))


def write_initial_state(state: State, document: dict[str, Any]) -> None:
    """Write the state at a start; earlier processes are gone."""
    state.write(initial_rows(document))


def _derived_values(gpu: dict[str, Any], now: float) -> dict[str, Any]:
    """The values of the busy GPU, and its energy counter."""
    clocks, temperature = gpu.get("clocks") or {}, gpu.get("temperature") or {}
    power, pcie = gpu.get("power") or {}, gpu.get("pcie") or {}
    degrees = temperature.get("gpu")
    kept: dict[str, Any] = {
        "busy": {
            "clocks": {name: clocks.get(f"max_{name}") for name in ("graphics", "sm", "mem", "video")},
            "power": {"draw": power.get("limit")},
            "pcie": {"gen": pcie.get("max_gen")},
            "temperature": {"gpu": degrees + BUSY_DEGREES if isinstance(degrees, int) else None},
            "pstate": 0 if gpu.get("pstate") is not None else None,
        },
        "pcie": {"tx": 0, "rx": 0, "replays": 0, "rollovers": 0, **pcie},
    }
    if isinstance(power.get("draw"), int | float) and "energy" not in gpu:
        kept["energy"] = {"counted": 0, "watts": power["draw"], "since": round(now, 3)}
    return kept
