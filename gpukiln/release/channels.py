"""ami/channels.yaml, and whether an image has shown what a channel asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.catalog.images import image_names, load_image
from gpukiln.catalog.load import ROOT, read_yaml, record, unknown, validate
from gpukiln.errors import RefusedError, UsageError
from gpukiln.images.builds import Record
from gpukiln.images.plan import check_region
from gpukiln.verify.checks import LAYERS
from gpukiln.verify.verdict import CheckResult


@record
class Channel:
    """A channel; the fields are explained in ami/channels.yaml."""

    title: str
    image_layers: bool
    layers: tuple[str, ...]
    excused_without_gpus: tuple[str, ...]
    keep: int
    deprecate_after_days: int
    regions: tuple[str, ...]


def load_channels(root: Path = ROOT) -> dict[str, Channel]:
    """Read every channel.

    Args:
        root: The checkout.

    Returns:
        The channels by name.

    Raises:
        UsageError: The file does not fit.
    """
    where = "ami/channels.yaml"
    channels = validate(
        dict[str, Channel], read_yaml(root / "ami" / "channels.yaml").get("channels"), where=where
    )
    for name, channel in channels.items():
        for layer in channel.layers:
            if layer not in LAYERS:
                raise unknown(f"layer of channel {name}", layer, LAYERS)
        for region in channel.regions:
            check_region(region)
        if channel.keep < 1 or channel.deprecate_after_days < 0:
            raise UsageError(f"{where}: {name}: keep is at least 1, deprecate_after_days at least 0")
    return channels


def load_channel(name: str, root: Path = ROOT) -> Channel:
    """Read one channel.

    Args:
        name: For example stable.
        root: The checkout.

    Raises:
        UsageError: There is no such channel.
    """
    channels = load_channels(root)
    if name not in channels:
        raise unknown("channel", name, channels)
    return channels[name]


@dataclass(frozen=True)
class Proof:
    """What is known of how an image was judged.

    Args:
        image_id: The AMI.
        region: Where it is.
        image: Name of the image, a folder of ami/.
        kubernetes: The Kubernetes version it is for.
        build: Its build.
        passed: Whether something passed and nothing failed.
        digest: Of the verdict, or an empty string when there is none.
        required_layers: The image's own required layers.
        not_run: The checks that were not run; None: how many is known, which is not.
        not_run_count: How many were not run.
    """

    image_id: str
    region: str
    image: str
    kubernetes: str
    build: str
    passed: bool
    digest: str
    required_layers: tuple[str, ...]
    not_run: tuple[CheckResult, ...] | None
    not_run_count: int


def proof_from_record(found: Record) -> Proof:
    """What the record of a build of this machine says.

    Args:
        found: The record.

    Raises:
        UsageError: The build has no image.
    """
    if found.bake is None:
        raise UsageError(
            f"build {found.build_id} has no image: it is {found.state}",
            hint="`invoke ami.list` shows others",
        )
    verdict, plan = found.verdict, found.plan
    return Proof(
        image_id=found.bake.image_id,
        region=found.bake.region,
        image=plan.image,
        kubernetes=plan.kubernetes,
        build=found.build_id,
        passed=bool(verdict and verdict.passed and verdict.profile == plan.profile),
        digest=verdict.digest if verdict else "",
        required_layers=plan.required_layers,
        not_run=verdict.not_run if verdict else (),
        not_run_count=len(verdict.not_run) if verdict else 0,
    )


def proof_from_tags(image_id: str, region: str, tags: Mapping[str, str]) -> Proof:
    """What an image that another machine built says of itself.

    Args:
        image_id: The AMI.
        region: Where it is.
        tags: Its tags.

    Raises:
        UsageError: It is none of gpukiln's, or too old to say what it is for.
    """
    wanted = ("gpukiln:image", "gpukiln:kubernetes", "gpukiln:build-id")
    if missing := [name for name in wanted if not tags.get(name)]:
        raise UsageError(
            f"{image_id} in {region} has no tag {' or '.join(missing)}: it can't be released by its id alone",
            hint="release it on the machine that built it",
        )
    image = tags["gpukiln:image"]
    definition = load_image(image) if image in image_names() else None
    counts = dict(word.split("=", 1) for word in tags.get("gpukiln:verdict-counts", "").split())
    profile_fits = definition is None or tags.get("gpukiln:verdict-profile") == definition.profile
    return Proof(
        image_id=image_id,
        region=region,
        image=image,
        kubernetes=tags["gpukiln:kubernetes"],
        build=tags["gpukiln:build-id"],
        passed=tags.get("gpukiln:verdict") == "passed" and profile_fits,
        digest=tags.get("gpukiln:verdict-digest", ""),
        required_layers=definition.required_layers if definition else tuple(LAYERS),
        not_run=() if counts.get("not_run") == "0" else None,
        not_run_count=int(counts.get("not_run", -1)),
    )


def require_proven(name: str, channel: Channel, proof: Proof, *, has_gpus: bool) -> tuple[CheckResult, ...]:
    """Refuse an image that has not shown what a channel asks for.

    Args:
        name: The channel's name.
        channel: The channel.
        proof: How the image was judged.
        has_gpus: Whether the cloud it was judged on has GPUs.

    Returns:
        The checks that were excused, of the layers that the channel asks for.

    Raises:
        RefusedError: It has not; the details name each check.
    """
    again = f"`invoke ami.verify {proof.build}` judges it again"
    if not proof.passed:
        found = "its verdict is not `passed`" if proof.digest else "it was never verified"
        raise RefusedError(f"channel {name} takes no {proof.image_id}: {found}", hint=again)
    layers = {*channel.layers, *(proof.required_layers if channel.image_layers else ())}
    if not layers:
        return ()
    if proof.not_run is None:
        raise RefusedError(
            f"channel {name} takes no {proof.image_id}: {proof.not_run_count} checks were not run, and "
            "its tags don't say which",
            hint="release it on the machine that has its record, or judge it there again until all run",
        )
    missing = tuple(check for check in proof.not_run if check.layer in layers)
    excuses = () if has_gpus else channel.excused_without_gpus
    excused = tuple(check for check in missing if check.reason in excuses)
    if refused := [check for check in missing if check not in excused]:
        raise RefusedError(
            f"channel {name} takes no {proof.image_id}: {len(refused)} checks that it asks for were not run",
            details=tuple(f"{check.id}: {check.reason}" for check in refused),
            hint=f"remove the reasons, then {again}; `--channel candidate` asks for less",
        )
    return excused


def require_same_verdict(proof: Proof, tags: Mapping[str, str]) -> None:
    """Refuse an image whose tags tell of another verdict than its record.

    Args:
        proof: What the record says.
        tags: The image's tags.

    Raises:
        RefusedError: They differ.
    """
    if tags.get("gpukiln:verdict") != "passed" or tags.get("gpukiln:verdict-digest") != proof.digest:
        raise RefusedError(
            f"the tags of {proof.image_id} tell of another verdict than the record of build {proof.build}",
            details=(
                f"record: passed, digest {proof.digest[:16]}",
                f"tags: {tags.get('gpukiln:verdict', 'no verdict')}, digest "
                f"{tags.get('gpukiln:verdict-digest', 'none')[:16]}",
            ),
            hint=f"`invoke ami.verify {proof.build}` judges it again and writes both",
        )


def not_run_tag(checks: tuple[CheckResult, ...] | None, count: int) -> str:
    """Say in a tag what was not run.

    Args:
        checks: The checks, or None where only their number is known.
        count: Their number.

    Returns:
        For example `runtime=1 gpu=4`, or `none`.
    """
    if not count:
        return "none"
    per_layer: Any = Counter(check.layer for check in checks or ())
    return " ".join(f"{layer}={n}" for layer, n in per_layer.items()) or f"unknown={count}"
