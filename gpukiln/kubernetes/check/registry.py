"""All rules. `python -m gpukiln.kubernetes.check.registry > docs/k8s-rules.md` makes their table."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from gpukiln.kubernetes.check import (
    rules_charts,
    rules_devices,
    rules_form,
    rules_images,
    rules_metrics,
    rules_running,
    rules_scaling,
    rules_scripts,
    rules_server,
)
from gpukiln.kubernetes.check.rules import Rule

# A module is a concern; what is a Rule in it counts.
MODULES: tuple[ModuleType, ...] = (
    rules_form,
    rules_server,
    rules_devices,
    rules_images,
    rules_running,
    rules_scaling,
    rules_charts,
    rules_scripts,
    rules_metrics,
)


@cache
def rules() -> tuple[Rule, ...]:
    """In the order of the modules, and as they stand there."""
    return tuple(one for module in MODULES for one in vars(module).values() if isinstance(one, Rule))
