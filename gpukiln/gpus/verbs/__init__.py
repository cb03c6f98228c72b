"""The verbs, in the order in which they are listed, by the module that has each."""

from __future__ import annotations

import importlib

from gpukiln.gpus.verb import Verb

MODULES = {
    "devices": ("list", "show", "memory", "processes", "topology"),
    "lease": ("lease", "run", "release", "renew", "leases"),
    "watch": ("watch", "insights"),
    "usage": ("usage",),
    "health": ("health",),
    "containers": ("args",),
    "cuda": ("cuda",),
    "env": ("env", "compute"),
    "reset": ("reset",),
    "mig": ("mig",),
}


def verbs(name: str = "") -> dict[str, Verb]:
    """The verbs of the module that has one, or all where none has it: the others need no reading then."""
    only = [module for module, names in MODULES.items() if name in names]
    by_name: dict[str, Verb] = {}
    for module in only or MODULES:
        for verb in importlib.import_module(f"gpukiln.gpus.verbs.{module}").VERBS:
            by_name[verb.name] = verb
    return by_name
