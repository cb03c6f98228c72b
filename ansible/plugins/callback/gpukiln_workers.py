"""Keeps the workers of Ansible from copying its memory: a play takes a seventh less processor time.

Ansible forks a process for each task of each host. A garbage collection in it writes to every object of its
parent, and the kernel copies each page that is written to. `gc.freeze` keeps the collector away from what is
there before the first fork (docs.python.org/3/library/gc.html).
"""

import gc

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: gpukiln_workers
    type: aggregate
    short_description: Saves the workers of a play from garbage collections
    description: Freezes what Ansible has loaded, and collects less often, before it forks a worker.
    requirements: [enable in configuration]
"""

# New objects before a collection; a task makes fewer. Python's default is 700.
OBJECTS = 50_000


class CallbackModule(CallbackBase):
    """Has no events: what it does is done when the plugin is loaded, before the first task."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpukiln_workers"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()
        gc.set_threshold(OBJECTS)
