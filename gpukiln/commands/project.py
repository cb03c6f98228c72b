"""A project: a folder with what is its own, and the defaults that its commands have."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from gpukiln import recipes
from gpukiln.cli import settings
from gpukiln.cli.command import Command, JsonOptions, print_document, results, say
from gpukiln.errors import RefusedError, UsageError
from gpukiln.options import option

BEGINS_AS = "eks-gpu"


@dataclass(frozen=True)
class ProjectInit(Command):
    """Make a project: a folder with gpukiln.toml, whose settings are the defaults of commands typed there."""

    folder: str = option("which is made where it is missing", first=True, required=True)
    image: str = option("also make ami/NAME in it, an image of its own that begins as eks-gpu")

    def run(self) -> None:
        from gpukiln.files import write_atomic

        file = Path(self.folder).expanduser() / recipes.PROJECT_FILE
        if file.exists() and not self.image:
            raise RefusedError(f"{file} is there", hint="`invoke project.config` shows it")
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.image:
            _copy_image(self.image, file.parent / "ami" / self.image)
        if file.exists():
            return
        lines = ["# Defaults of gpukiln in this folder and below; an option or a variable GPUKILN_NAME wins."]
        for name, (about, default) in settings.SETTINGS.items():
            lines += ["", f"# {about}", f'# {name} = "{default}"']
        lines += ["", "# Fields of components.yaml that images and nodes get instead, as --set has them."]
        lines += [f"# [{settings.COMPONENTS}.nvidia_driver]", '# branch = "580"', ""]
        write_atomic(file, "\n".join(lines).encode(), mode=0o644)
        say(f"{file}: take the # away from what differs")


@dataclass(frozen=True)
class ProjectConfig(JsonOptions):
    """Show each setting that commands have here, and where it comes from."""

    def run(self) -> None:
        from gpukiln.reports.tables import Rows

        values = settings.values()
        if self.json:
            print_document("project.config/1", settings=[asdict(value) for value in values])
            return
        table = Rows("setting", "value", "from", first=3)
        for value in values:
            table.add(value.name, value.value or "-", value.source)
        results().print(table)


def _copy_image(name: str, folder: Path) -> None:
    """Begin an image with what eks-gpu is: its definition and its template, under another name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name):
        raise UsageError(f"--image {name!r} can't be a name", hint="small letters, digits and `-`")
    if folder.exists():
        raise RefusedError(f"{folder} is there", hint="another name")
    shutil.copytree(recipes.images()[BEGINS_AS], folder)
    file = folder / "image.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(f"name: {BEGINS_AS}\n", f"name: {name}\n", 1), encoding="utf-8")
    say(f"{file}: what the image is; `invoke ami.plan --image {name}` says what a build would do")
