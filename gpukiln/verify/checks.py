"""The declaration of a check, the layers in their order, and the profiles.

`gpukiln.verify.plugin` refuses a test in tests/host that is not declared with `check`. This module imports
nothing slow: the suite, the catalogue of checks and the tests share it.
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

# An attribute, so that the decorated test stays a plain function that pytest collects.
ATTRIBUTE = "__gpukiln_check__"

# From the hardware up, so that the first failure in a report explains those after it.
# Order in which layers run.
LAYERS: dict[str, str] = {
    "hardware": "the machine has the GPUs that it should have",
    "hygiene": "the image has no files of the build",
    "versions": "packages, libraries and kernel module agree with each other and with the image's record",
    "modules": "every installed kernel has the driver's modules, and nouveau is blocked",
    "boot": "the machine booted completely, with no failed unit",
    "runtime": "container engines start with their configuration; job hooks and caches work",
    "cluster": "the cluster assigns each of its GPUs to one pod",
    "gpu": "the driver works with every GPU, and no GPU reports damage",
    "compute": "CUDA compiles, every GPU computes correctly and copies at its link's speed",
    "container": "a container sees the GPU",
    "multi-gpu": "several GPUs reach each other",
    "services": "the services of a workspace run, answer, and compute on the GPU",
    "desktop": "the browser desktop starts, and listens on loopback only",
    "monitoring": "the monitoring tools of the GPUs work",
}


@dataclass(frozen=True)
class Profile:
    """A kind of machine that can be verified.

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
        Profile("workspace", "a machine on which a user works, launched from an image", 1, False),
        Profile("runner", "a container for GPU jobs, verified from inside as its own user", 0, True),
        Profile("pod", "a pod that a cluster granted a GPU, and what the cluster's API reports", 1, False),
    )
}

_ID = re.compile(r"^(?P<layer>[a-z-]+)\.[a-z0-9-]+$")


@dataclass(frozen=True)
class Check:
    """The declaration of one check.

    Args:
        id: `<layer>.<name>`, unique; users quote it, and reports are compared by it.
        title: What is true when the check passes.
        layer: A key of `LAYERS`.
        profiles: Keys of `PROFILES` where the check applies.
        fix: What to do when it fails.
        needs: Keys of `NEEDS`, or `component:<name>`, without which the check is not run.
        causes: Usual causes of a failure, the likeliest first.
        after: Ids of checks that must pass first: this one is not reached where one of them failed, or was
            not reached.
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
            raise ValueError(
                f"check {self.id}: layer {self.layer!r} does not exist, wanted one of {', '.join(LAYERS)}"
            )
        if match is None or match["layer"] != self.layer:
            raise ValueError(f"check id {self.id!r} does not have the form {self.layer}.<name>")
        if not self.profiles:
            raise ValueError(f"check {self.id} has no profile")
        for profile in self.profiles:
            if profile not in PROFILES:
                raise ValueError(
                    f"check {self.id}: profile {profile!r} does not exist, wanted one of "
                    f"{', '.join(PROFILES)}"
                )
        for need in self.needs:
            if not is_need(need):
                raise ValueError(
                    f"check {self.id}: need {need!r} does not exist, wanted one of {', '.join(NEEDS)}, "
                    "component:<name>"
                )
        if not self.title or not self.fix:
            raise ValueError(f"check {self.id} has no title or no fix, wanted both")


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
        needs: What the machine must have for the check to be run.
        causes: Usual causes of a failure, the likeliest first.
        after: Ids of checks that must pass first.

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
    """Evaluate a rule that `gpukiln-gpu health` evaluates on the nodes too (`gpukiln.gpus.rules`).

    Args:
        rule: Takes the facts and further arguments; returns what it measured.
        more: The further arguments.
    """
    # `python -m gpukiln.verify.catalog` lists the checks where pytest is not installed.
    import pytest  # noqa: PLC0415 - the catalogue of checks needs none

    try:
        facts.note(rule(facts, *more))
    except NotReportedError as error:
        pytest.skip(str(error))  # no GPU reports the value: the check is not run, with this reason
