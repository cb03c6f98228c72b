"""A project: a folder with what is its own, and the defaults that its commands have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from gpukiln.commands import settings
from gpukiln.commands.cli import Command, Json, print_document, results, say
from gpukiln.errors import RefusedError
from gpukiln.options import option


@dataclass(frozen=True)
class ProjectInit(Command):
    """Make a project: a folder with gpukiln.toml, whose settings are the defaults of commands typed there."""

    folder: str = option("which is made where it is missing", first=True, required=True)

    def run(self) -> None:
        from gpukiln.files import write_whole

        file = Path(self.folder).expanduser() / settings.FILE
        if file.exists():
            raise RefusedError(f"{file} is there", hint="`invoke project.config` shows it")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = ["# Defaults of gpukiln in this folder and below; an option or a variable GPUKILN_NAME wins."]
        for name, (about, default) in settings.SETTINGS.items():
            lines += ["", f"# {about}", f'# {name} = "{default}"']
        lines += ["", "# Fields of components.yaml that images and nodes get instead, as --set has them."]
        lines += [f"# [{settings.COMPONENTS}.nvidia_driver]", '# branch = "580"', ""]
        write_whole(file, "\n".join(lines).encode(), mode=0o644)
        say(f"{file}: take the # away from what differs")


@dataclass(frozen=True)
class ProjectConfig(Json):
    """Show each setting that commands have here, and where it comes from."""

    def run(self) -> None:
        from gpukiln.reports.tables import Rows

        found = settings.values()
        if self.json:
            print_document("project.config/1", settings=[asdict(one) for one in found])
            return
        table = Rows("setting", "value", "from", first=3)
        for one in found:
            table.add(one.name, one.value or "-", one.source)
        results().print(table)
