"""ami/channels.yaml: what each channel requires of an image, and whose signatures it trusts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gpukiln import recipes
from gpukiln.catalog.gpus import architectures, gpus
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.catalog.regions import check_region
from gpukiln.errors import UsageError
from gpukiln.images.keys import KMS, OidcIdentity, kms_key
from gpukiln.typed import load, strict, unknown
from gpukiln.verify.checks import LAYERS

FILE = "ami/channels.yaml"
# in `gpus` of a channel: the GPUs of the image's own instance types
DECLARED = "declared"
CLUSTER = "cluster"  # the layer that `ami.verify --cluster` runs
EXAMPLE_KEY = "ami/keys/release.pub"


@strict
class Channel:
    """A channel; the fields are explained in ami/channels.yaml."""

    title: str
    gpus: tuple[str, ...]
    image_layers: bool
    layers: tuple[str, ...]
    suite: Literal["current", "any"]
    attestation: Literal["none", "written", "signed"]
    excused_without_gpus: tuple[str, ...]
    keep: int
    deprecate_after_days: int
    regions: tuple[str, ...]
    trust: tuple[str | OidcIdentity, ...] = ()
    kubernetes: tuple[str, ...] = ()


def load_channels(root: Path = ROOT) -> dict[str, Channel]:
    """Read every channel: those of the file of `root`, and those of a project, which take precedence.

    Returns:
        The channels by name; the files that a project's channel trusts have their whole paths.

    Raises:
        UsageError: A file does not fit.
    """
    return _read(root) | project_channels()


def project_channels() -> dict[str, Channel]:
    """The channels of the project that the user is in, by name; none without a file of them."""
    project = recipes.project()
    if not project or not (project / FILE).is_file():
        return {}
    return {
        name: replace(channel, trust=tuple(_in_folder(entry, project) for entry in channel.trust))
        for name, channel in _read(project).items()
    }


def _in_folder(entry: str | OidcIdentity, folder: Path) -> str | OidcIdentity:
    """Name a key's file by its whole path: others look for it in this checkout."""
    if isinstance(entry, OidcIdentity):
        config = entry.trust_config
        return replace(entry, trust_config=str(folder / config)) if config else entry
    return entry if kms_key(entry) else str(folder / entry)


def _read(root: Path) -> dict[str, Channel]:
    where = FILE if root == ROOT else str(root / FILE)  # a project's file is named by its whole path
    channels = load(dict[str, Channel], read_yaml(root / FILE).get("channels"), where=where)
    for name, channel in channels.items():
        for layer in channel.layers:
            # Typos are errors here: a channel that requires an unknown layer would require nothing.
            if layer not in LAYERS:
                raise unknown(f"layer of channel {name}", layer, LAYERS)
        _check_cluster(f"{where}: {name}", channel)
        for word in channel.gpus:
            if word not in (DECLARED, *gpus(), *architectures()):
                raise unknown(f"GPU of channel {name}", word, [DECLARED, *gpus(), *architectures()])
        for region in channel.regions:
            check_region(region)
        # keep 0 would allow prune to remove the release that a rollback needs.
        if channel.keep < 1 or channel.deprecate_after_days < 0:
            raise UsageError(f"{where}: {name}: keep is at least 1, deprecate_after_days at least 0")
        _check_trust(f"{where}: {name}", channel, root)
    return channels


def _check_cluster(where: str, channel: Channel) -> None:
    """Check what a channel requires of an image as a node."""
    if channel.kubernetes and CLUSTER not in channel.layers:
        raise UsageError(
            f"{where}: kubernetes is for the layer {CLUSTER}, which layers does not have",
            hint=f"add {CLUSTER} to layers, or leave kubernetes out",
        )
    for version in channel.kubernetes:
        # As the version of a cluster is written, so that a typo does not require what no cluster has.
        if not re.fullmatch(r"1\.\d{2}", version):
            raise UsageError(
                f"{where}: kubernetes: {version!r}", hint='wanted: a minor version such as "1.34"'
            )


def _check_trust(where: str, channel: Channel, root: Path) -> None:
    """Check that every entry always means the same key."""
    # Whom a channel trusts is then changed by a review of the repository's files alone.
    if channel.attestation == "signed" and not channel.trust:
        raise UsageError(
            f"{where}: attestation: signed, and trust names no key: any signature would be accepted",
            hint=f"write `trust: [{EXAMPLE_KEY}]`, and the key there: "
            f"`openssl pkey -in sign.pem -pubout -out {EXAMPLE_KEY}`",
        )
    for entry in channel.trust:
        # The issuer must be https: its keys are fetched from there.
        if isinstance(entry, OidcIdentity):
            if not entry.identity or not entry.issuer.startswith("https://"):
                raise UsageError(
                    f"{where}: trust: {entry}: wanted: both identity and issuer, and the issuer as https://...",
                    hint="for GitHub Actions see docs/attestation.md#keyless",
                )
            if entry.trust_config and not (root / entry.trust_config).is_file():
                raise UsageError(f"{where}: trust: trust_config: {entry.trust_config!r} is no file of {root}")
        elif key := kms_key(entry):
            if not key.is_fixed:
                raise UsageError(
                    f"{where}: trust: {entry!r} is no ARN of a key: a role that may call kms:UpdateAlias "
                    "can point an alias at another key",
                    hint=f"write {KMS}ARN, which `aws kms describe-key --key-id {key.name}` shows, or name "
                    "the public key as a file",
                )
        elif not (root / entry).is_file():
            raise UsageError(
                f"{where}: trust: {entry!r} is no file of {root}; wanted: a public key as PEM",
                hint=f"for example {EXAMPLE_KEY}; a key of AWS KMS is {KMS}ARN",
            )


def load_channel(name: str, root: Path = ROOT) -> Channel:
    """Read one channel.

    Args:
        name: For example stable.

    Raises:
        UsageError: There is no such channel.
    """
    channels = load_channels(root)
    if name not in channels:
        raise unknown("channel", name, channels)
    return channels[name]
