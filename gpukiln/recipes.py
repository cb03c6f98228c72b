"""Where the recipes are: roles, playbooks, image recipes, components.yaml, services and the suite of checks.

In a checkout they stand at its top. A wheel has them below the package, with the same names (force-include in
pyproject.toml). scripts/first-contact imports it on machines: Python 3.9.
"""

from __future__ import annotations

from pathlib import Path

PROJECT_FILE = "gpukiln.toml"
PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = PACKAGE.parent
_INSTALLED = PACKAGE / "_recipes"


def is_checkout() -> bool:
    """Whether this is a checkout, not an installed package."""
    return not _INSTALLED.is_dir()


def root() -> Path:
    """The folder that has components.yaml, roles/, ami/ and the others."""
    return _CHECKOUT if is_checkout() else _INSTALLED


def file(name: str, folder: Path | None = None) -> Path:
    """A file of this repository, where it is.

    Args:
        name: As in a checkout: `roles/...`, or `gpukiln/...` for one of the package.
        folder: A checkout; None: this one, or what was installed.
    """
    folder = folder or root()
    return (
        folder.parent.parent / name if name.startswith("gpukiln/") and folder == _INSTALLED else folder / name
    )


def project(folder: Path | None = None) -> Path | None:
    """The project that a folder is in: the nearest one, from it upwards, with gpukiln.toml; None: none.

    Args:
        folder: None: where the user stands.
    """
    start = (folder or Path.cwd()).absolute()
    return next((parent for parent in (start, *start.parents) if (parent / PROJECT_FILE).is_file()), None)


def images(folder: Path | None = None) -> dict[str, Path]:
    """The folder of each image that can be built: a project's own, then those of here.

    Args:
        folder: A checkout; None: this one, or what was installed.
    """
    places = [folder or root(), *filter(None, [project()])]
    return {file.parent.name: file.parent for place in places for file in place.glob("ami/*/image.yaml")}
