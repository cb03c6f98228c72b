"""What `k8s.addons --json` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpukiln.kubernetes.addons.render import ADD_ONS
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.folder import RenderedFile, Rendering

ADDONS = "k8s.addons/1"


@dataclass(frozen=True)
class RenderedAddOn:
    """An add-on.

    Args:
        name: As `--only` takes it.
        title: What it is.
        install: The shell commands that install it, in the folder of the files.
    """

    name: str
    title: str
    install: tuple[str, ...]


@dataclass(frozen=True)
class AddOns:
    """The add-ons of a cluster.

    Args:
        settings: The user's choices, with every default.
        add_ons: In the order of installation.
        others: Other files in the output folder.
    """

    schema: str
    settings: Settings
    add_ons: tuple[RenderedAddOn, ...]
    files: tuple[RenderedFile, ...]
    others: tuple[str, ...]


def listing(settings: Settings, names: Iterable[str], rendering: Rendering) -> AddOns:
    return AddOns(
        ADDONS,
        settings,
        tuple(RenderedAddOn(name, ADD_ONS[name].title, ADD_ONS[name].install(settings)) for name in names),
        rendering.files,
        rendering.others,
    )
