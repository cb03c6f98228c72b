"""The verbs of gpukiln-gpu by module, in the order of the help.

A module declares its verbs in VERBS: `verb.Verb` with the options, a function that answers and one that
prints.
"""

from __future__ import annotations

import importlib

from gpukiln.gpus.verb import Verb

# A table, not a search in the folder: `gpukiln-gpu VERB` then imports one module only.
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
    """The verbs of the module that has the verb `name`; all verbs where no module has it.

    Importing one module in place of ten makes the start of a zipapp faster.
    """
    only = [module for module, names in MODULES.items() if name in names]
    by_name: dict[str, Verb] = {}
    for module in only or MODULES:
        for verb in importlib.import_module(f"gpukiln.gpus.verbs.{module}").VERBS:
            by_name[verb.name] = verb
    return by_name
