"""A project: a folder with what is its own, and the defaults that its commands have."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from gpukiln import __version__, project, recipes
from gpukiln.cli import settings
from gpukiln.cli.command import Command, JsonOptions, print_document, results, say
from gpukiln.errors import RefusedError, UsageError
from gpukiln.options import option

BEGINS_AS = "eks-gpu"
TEMPLATE = "examples/project"
CHANNELS = "ami/channels.yaml"
REQUIREMENTS = """\
# What the workflows install. Where no index has it: gpukiln[image] @ git+https://HOST/OWNER/gpukiln@COMMIT
gpukiln[image]=={version}
"""
TABLES = """\
# Fields of components.yaml that images and nodes get instead, as --set has them.
# [components.nvidia_driver]
# branch = "580"

# Roles of this project, folders of roles/: they run before the shipped roles, or after them. replace names
# shipped roles whose place a role of this project takes.
# [roles]
# before = ["site_proxy"]
# after = ["site_agent"]
# replace = []

# One image, instead of the lists above.
# [roles.eks-gpu]
# after = []
"""


@dataclass(frozen=True)
class ProjectInit(Command):
    """Make a project: a folder with gpukiln.toml, channels, CI workflows; own images and roles go into it."""

    folder: str = option("which is made where it is missing", first=True, required=True)
    image: str = option("also make ami/NAME in it, an image of its own that begins as eks-gpu")

    def run(self) -> None:
        folder = Path(self.folder).expanduser()
        file = folder / recipes.PROJECT_FILE
        if file.exists() and not self.image:
            raise RefusedError(f"{file} is there", hint="`invoke project.config` shows it")
        # An existing folder is usually a repository, whose files stay (see _write).
        folder.mkdir(parents=True, exist_ok=True)
        if self.image:
            _copy_image(self.image, folder / "ami" / self.image)
        if file.exists():
            return
        for name, text in _files().items():
            _write(folder / name, text)


def _own() -> list[settings.Value]:
    """The images and channels of the project, each read: what is wrong with one is said here too."""
    from gpukiln.catalog.images import load_image
    from gpukiln.images.channels import project_channels

    folder = recipes.project()
    if not folder:
        return []
    images = [name for name, place in recipes.images().items() if place.is_relative_to(folder)]
    for name in images:
        load_image(name)
    rows = {
        "images": (images, folder / "ami"),
        "channels": (project_channels(), folder / CHANNELS),
    }
    return [
        settings.Value(name, ", ".join(names), str(place)) for name, (names, place) in rows.items() if names
    ]


def _files() -> dict[str, str]:
    """The files of a project, by their names there."""
    files = {recipes.PROJECT_FILE: _settings()}
    for source in sorted(path for path in recipes.file(TEMPLATE).rglob("*") if path.is_file()):
        files[str(source.relative_to(recipes.file(TEMPLATE)))] = source.read_text(encoding="utf-8")
    files["requirements.txt"] = REQUIREMENTS.format(version=__version__)
    files[CHANNELS] = recipes.file(CHANNELS).read_text(encoding="utf-8")
    return files


def _settings() -> str:
    lines = ["# Defaults of gpukiln in this folder and below; an option or a variable GPUKILN_NAME wins."]
    for name, (about, default) in project.SETTINGS.items():
        lines += ["", f"# {about}", f'# {name} = "{default}"']
    return "\n".join([*lines, "", TABLES])


def _write(file: Path, text: str) -> None:
    """Write a file that is not there; in a repository of one's own some may be."""
    from gpukiln.files import write_atomic

    if file.exists():
        say(f"{file} is there and stays as it is")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # Files of a repository, and no secrets; the default of write_atomic is private.
    write_atomic(file, text.encode(), mode=0o644)
    say(str(file))


@dataclass(frozen=True)
class ProjectConfig(JsonOptions):
    """Show each setting, and the images, roles and channels of the project, with the place of each."""

    def run(self) -> None:
        from gpukiln.reports.tables import Rows

        values = [*settings.values(), *_own()]
        # Also here, not only before a build: people run this command to see whether their project is right.
        project.check_roles()
        if self.json:
            print_document("project.config/1", settings=[asdict(value) for value in values])
            return
        table = Rows("setting", "value", "from", first=3)
        for value in values:
            table.add(value.name, value.value or "-", value.source)
        results().print(table)


def _copy_image(name: str, folder: Path) -> None:
    """Begin an image with what eks-gpu is: its definition and its template, under another name."""
    # It becomes a part of an AMI's name and of a parameter's path, so that no other characters are accepted.
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name):
        raise UsageError(f"--image {name!r} can't be a name", hint="small letters, digits and `-`")
    if folder.exists():
        raise RefusedError(f"{folder} is there", hint="another name")
    shutil.copytree(recipes.images()[BEGINS_AS], folder)
    file = folder / "image.yaml"
    # As text, since a YAML writer would lose the comments of the file.
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(f"name: {BEGINS_AS}\n", f"name: {name}\n", 1), encoding="utf-8")
    say(f"{file}: what the image is; `invoke ami.plan --image {name}` says what a build would do")
