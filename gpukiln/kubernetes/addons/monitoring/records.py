"""Recording rules: which namespaces have GPUs, for how long and at what price; and constants for alerts.

The cost is the machine's on-demand price in the settings' region, divided by its GPUs: for spot and reserved
machines it is an upper bound. Pods that share a GPU are charged equal parts of it.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

from gpukiln.catalog.boards import boards
from gpukiln.catalog.drivers import branches
from gpukiln.catalog.instance_types import instance_type, instance_types
from gpukiln.errors import UsageError
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.offers.prices import on_demand

Rule = dict[str, Any]
MINUTES_OF_HOUR = 60  # the groups are evaluated every minute
# Span -> a range with one sample for each of its minutes: Prometheus before 3 includes both ends of a range,
# so a full hour would have 61 samples.
SPANS = {"1h": "59m30s", "1d": "23h59m30s"}

PRICE = "gpukiln:gpu_hour_usd"
SLOWDOWN = "gpukiln:gpu_slowdown_celsius"
DRIVER_END = "gpukiln:driver_end_of_life_seconds"
SHARE, GPUS, USD = "gpukiln:gpu_share", "gpukiln:namespace_gpus", "gpukiln:namespace_usd_per_hour"
UNPRICED = "gpukiln:gpus_without_price"

_HOLDER = "node, instance_type, UUID, GPU_I_ID, exported_namespace, exported_pod"
# Memory used is a metric of every GPU and of MIG devices; group gives 1 for each.
_POD_GPUS = f'group by ({_HOLDER}) (DCGM_FI_DEV_FB_USED{{exported_pod!=""}})'


def groups(settings: Settings) -> list[Rule]:
    return [
        {
            "name": "gpukiln-facts",
            "interval": "1m",
            "rules": [*prices(settings), *_slowdown(), *_driver_ends()],
        },
        {"name": "gpukiln-use", "interval": "1m", "rules": _usage_records()},
    ]


def prices(settings: Settings) -> list[Rule]:
    """The price of one GPU of each instance type for an hour; types without a known price are left out.

    Raises:
        UsageError: usd_per_hour has an unknown instance type, or a price that is not above 0.
    """
    today = datetime.now(UTC).date()
    for name, usd in settings.usd_per_hour.items():
        if not instance_type(name).gpus or usd <= 0:
            raise UsageError(f"usd_per_hour: {name} is {usd}", hint="wanted: USD an hour, above 0")
    priced = {
        name: (settings.usd_per_hour.get(name) or _list_price(name, settings, today), machine.gpus)
        for name, machine in instance_types().items()
    }
    return [
        _constant_record(PRICE, f"{price / gpus:.6f}", instance_type=name)
        for name, (price, gpus) in sorted(priced.items())
        if price and gpus
    ]


def _list_price(name: str, settings: Settings, today: date) -> Decimal | None:
    price = on_demand(name, settings.region, today)
    return price.value if price else None


def _slowdown() -> list[Rule]:
    return [
        _constant_record(SLOWDOWN, str(board.temperature.slowdown), modelName=board.name)
        for board in boards().values()
        if board.temperature.slowdown
    ]


def _driver_ends() -> list[Rule]:
    ends = {row.branch: row.eol for row in branches().values() if row.eol}
    return [
        _constant_record(
            DRIVER_END, str(int(datetime.combine(day, time(), UTC).timestamp())), branch=str(branch)
        )
        for branch, day in sorted(ends.items())
    ]


def _usage_records() -> list[Rule]:
    return [
        {
            "record": SHARE,
            # Pods that share a GPU divide it: together they are charged for one.
            "expr": f"{_POD_GPUS} / on (node, UUID) group_left () count by (node, UUID) ({_POD_GPUS})",
        },
        {"record": GPUS, "expr": f"sum by (exported_namespace) ({SHARE})"},
        {
            "record": USD,
            "expr": f"sum by (exported_namespace) ({SHARE} * on (instance_type) group_left () {PRICE})",
        },
        # Without it, GPUs of types without a price would just be missing in the costs.
        {"record": UNPRICED, "expr": f"sum by (instance_type) ({SHARE} unless on (instance_type) {PRICE})"},
        *(
            {
                "record": f"gpukiln:namespace_{what}:{span}",
                "expr": f"sum_over_time({of}[{minutes}]) / {MINUTES_OF_HOUR}",
            }
            for span, minutes in SPANS.items()
            for what, of in (("gpu_hours", GPUS), ("usd", USD))
        ),
    ]


def _constant_record(name: str, value: str, **labels: str) -> Rule:
    return {"record": name, "expr": f"vector({value})", "labels": labels}
