"""The verbs, in the order in which they are listed."""

from __future__ import annotations

from gpukiln.gpus.verb import Verb
from gpukiln.gpus.verbs import lease, look, watch

VERBS: dict[str, Verb] = {verb.name: verb for verb in (*look.VERBS, *lease.VERBS, *watch.VERBS)}
