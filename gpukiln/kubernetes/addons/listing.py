"""What `k8s.addons --json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from gpukiln.kubernetes.addons.rendered import ADD_ONS
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.folder import Written

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
class File:
    """A file of the rendering.

    Args:
        path: In its folder.
        text: What is in it.
        change: Against what the folder had before; null where nothing was written.
    """

    path: str
    text: str
    change: Literal["new", "changed", "same"] | None


@dataclass(frozen=True)
class AddOns:
    """The add-ons of a cluster.

    Args:
        settings: What was chosen, with every default.
        add_ons: In the order in which they are installed.
        others: Files of the folder that this rendering has not.
    """

    schema: str
    settings: Settings
    add_ons: tuple[RenderedAddOn, ...]
    files: tuple[File, ...]
    others: tuple[str, ...]


def listing(
    settings: Settings, names: Iterable[str], files: Mapping[str, str], written: Iterable[Written]
) -> AddOns:
    """The document.

    Args:
        written: None of them where nothing was written.
    """
    change = {one.path: one.change for one in written}
    return AddOns(
        ADDONS,
        settings,
        tuple(RenderedAddOn(name, ADD_ONS[name].title, ADD_ONS[name].install(settings)) for name in names),
        tuple(File(path, text, change.get(path)) for path, text in files.items()),  # type: ignore[arg-type]
        tuple(path for path, how in change.items() if how == "other"),
    )
