"""Finds the recipes: roles, playbooks, image recipes, components.yaml, services and the suite of checks.

A checkout has them at its top. A wheel has them below the package, with the same names (force-include in
pyproject.toml). scripts/first-contact imports it on machines: Python 3.9.
"""

from __future__ import annotations

from pathlib import Path

PROJECT_FILE = "gpukiln.toml"
PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = PACKAGE.parent
# The folder of force-include in pyproject.toml.
_INSTALLED = PACKAGE / "_recipes"


def is_checkout() -> bool:
    """Whether gpukiln runs from a checkout, not from an installed package."""
    return not _INSTALLED.is_dir()


def root() -> Path:
    """The folder that has components.yaml, roles/, ami/ and the others."""
    return _CHECKOUT if is_checkout() else _INSTALLED


def file(name: str, folder: Path | None = None) -> Path:
    """Path of a file of this repository, in a checkout or an installed package.

    Args:
        name: Path in a checkout: `roles/...`, or `gpukiln/...` for a file of the package.
        folder: A checkout; None: this one, or the installed recipes.
    """
    folder = folder or root()
    return (
        # Two folders above _recipes is site-packages, where gpukiln/... has the same path as in a checkout.
        folder.parent.parent / name if name.startswith("gpukiln/") and folder == _INSTALLED else folder / name
    )


def project(folder: Path | None = None) -> Path | None:
    """The project of a folder: the nearest folder, from it upwards, that has gpukiln.toml; None: no project.

    Args:
        folder: None: the working folder.
    """
    start = (folder or Path.cwd()).absolute()
    return next((parent for parent in (start, *start.parents) if (parent / PROJECT_FILE).is_file()), None)


def images(folder: Path | None = None) -> dict[str, Path]:
    """Folders of the images that can be built, by name; a project's image replaces one of the same name.

    Args:
        folder: A checkout; None: this one, or the installed recipes.
    """
    places = [folder or root(), *filter(None, [project()])]
    return {file.parent.name: file.parent for place in places for file in place.glob("ami/*/image.yaml")}
