"""What a check is: its declaration, and the fixed order of layers and the profiles it may name.

Args of `check` are the whole declaration; a test in tests/host without one is refused by
`gpukiln.verify.plugin`. This module imports nothing heavy: the suite, the catalogue and the tests share it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gpukiln.probe.base import NotReportedError
from gpukiln.verify.facts import Facts
from gpukiln.verify.needs import NEEDS, is_need

Function = TypeVar("Function", bound=Callable[..., Any])

ATTRIBUTE = "__gpukiln_check__"

# Order in which layers run.
LAYERS: dict[str, str] = {
    "hardware": "the machine has the GPUs that it should have",
    "hygiene": "nothing of the build is left in the image",
    "versions": "packages, libraries and kernel module agree with each other and with the image's record",
    "modules": "every installed kernel has the driver's modules, and nouveau is blocked",
    "boot": "the machine came up with no failed unit",
    "runtime": "container engines start with their configuration; job hooks and caches work",
    "cluster": "the cluster hands its GPUs out, each to one pod",
    "gpu": "the driver drives every GPU, and none reports damage",
    "compute": "CUDA compiles, every GPU computes right and moves data at its link's speed",
    "container": "a container sees the GPU",
    "multi-gpu": "several GPUs reach each other",
    "services": "the services of a workspace run, answer, and compute on the GPU",
    "desktop": "the desktop for the browser starts, and nobody else reaches it",
    "monitoring": "the tools that watch the GPUs work",
}


@dataclass(frozen=True)
class Profile:
    """A kind of machine that can be judged.

    Args:
        name: What `--profile` takes.
        title: What it stands for.
        min_gpus: GPUs that such a machine is expected to have, unless `--expect-gpus` says otherwise.
        needs_record: Whether such a machine must carry /etc/gpukiln/image.json.
    """

    name: str
    title: str
    min_gpus: int
    needs_record: bool


PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile("image", "a machine on its first boot from a baked image", 0, True),
        Profile("node", "a bare-metal node", 1, False),
        Profile("eks-node", "a node of an EKS cluster, booted from a baked image", 1, True),
        Profile("workspace", "a machine on which somebody works, launched from an image", 1, False),
        Profile("runner", "a container for GPU jobs, judged from inside as its own user", 0, True),
        Profile("pod", "a pod that a cluster granted a GPU, and what that cluster says of it", 1, False),
    )
}

_ID = re.compile(r"^(?P<layer>[a-z-]+)\.[a-z0-9-]+$")


@dataclass(frozen=True)
class Check:
    """The declaration of one check.

    Args:
        id: `<layer>.<name>`, unique; what people quote and what reports are compared by.
        title: What is true when the check passes.
        layer: A key of `LAYERS`.
        profiles: Keys of `PROFILES` where the check applies.
        fix: What to do when it fails.
        needs: Keys of `NEEDS`, or `component:<name>`, without which the check is not run.
        causes: What usually is behind a failure, the likeliest first.
        after: Ids of checks without whose pass this one means nothing: it is not reached where one of them
            failed, or was itself not reached.
    """

    id: str
    title: str
    layer: str
    profiles: tuple[str, ...]
    fix: str
    needs: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        match = _ID.match(self.id)
        if self.layer not in LAYERS:
            raise ValueError(f"check {self.id}: layer {self.layer!r} is none of {', '.join(LAYERS)}")
        if match is None or match["layer"] != self.layer:
            raise ValueError(f"check id {self.id!r} is not of the form {self.layer}.<name>")
        if not self.profiles:
            raise ValueError(f"check {self.id} declares no profile where it applies")
        for profile in self.profiles:
            if profile not in PROFILES:
                raise ValueError(f"check {self.id}: profile {profile!r} is none of {', '.join(PROFILES)}")
        for need in self.needs:
            if not is_need(need):
                raise ValueError(
                    f"check {self.id}: need {need!r} is none of {', '.join(NEEDS)}, component:<name>"
                )
        if not self.title or not self.fix:
            raise ValueError(f"check {self.id} needs a title and a fix")


def check(
    *,
    id: str,
    title: str,
    layer: str,
    profiles: tuple[str, ...],
    fix: str,
    needs: tuple[str, ...] = (),
    causes: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Declare a test function of tests/host as a check.

    Args:
        id: `<layer>.<name>`, unique in the suite.
        title: What is true when the check passes.
        layer: A key of `LAYERS`.
        profiles: Keys of `PROFILES` where the check applies.
        fix: What to do when it fails.
        needs: What must be there for the check to be run at all.
        causes: What usually is behind a failure.
        after: Checks without whose pass this one means nothing.

    Returns:
        A decorator that leaves the function as it is, with its declaration attached.

    Raises:
        ValueError: The declaration names an unknown layer, profile or need, or lacks one.
    """
    declared = Check(
        id=id,
        title=title,
        layer=layer,
        profiles=tuple(profiles),
        fix=inspect.cleandoc(fix),
        needs=tuple(needs),
        causes=tuple(causes),
        after=tuple(after),
    )

    def attach(function: Function) -> Function:
        setattr(function, ATTRIBUTE, declared)
        return function

    return attach


def declaration(function: object) -> Check | None:
    """Return the declaration attached to a function by `check`, or None."""
    declared = getattr(function, ATTRIBUTE, None)
    return declared if isinstance(declared, Check) else None


def evaluate(facts: Facts, rule: Callable[..., str], *more: Any) -> None:
    """Judge by a rule that the nodes judge themselves by too (`gpukiln.gpus.rules`).

    Args:
        rule: Given the facts and what else it asks for; returns what it measured.
    """
    import pytest  # noqa: PLC0415 - the catalogue of checks needs none

    try:
        facts.note(rule(facts, *more))
    except NotReportedError as error:
        pytest.skip(str(error))  # no GPU reports it: not run, with this reason
