"""`gpukiln` as its wheel installs it: in an environment of its own, without a checkout."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpukiln.catalog.load import ROOT
from tests.support import documents
from tests.support.harness import start


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, without a network, in a folder that has none."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


class Installed:
    """An environment with the wheel; its programs are those that the installation made.

    Args:
        folder: For the environment; it must be empty.
        wheel: What is installed, by default a wheel of this checkout.
        environment: Variables that its programs get, by default those of this process.
    """

    def __init__(
        self, folder: Path, wheel: Path | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        self.python, self.program = venv / "bin/python", venv / "bin/gpukiln"
        # This environment's pip: to install another one into each environment takes longer than all the rest.
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        install = [*pip, "install", "--no-deps", "--no-index", str(wheel or build_wheel(folder))]
        subprocess.run(install, check=True, capture_output=True)
        [self.packages] = venv.glob("lib/python*/site-packages")
        # The dependencies of this environment, without another download; no checkout is among them.
        (self.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        for name in ("ansible", "ansible-playbook"):
            script = venv / "bin" / name
            _, _, code = Path(sys.executable).with_name(name).read_text().partition("\n")
            script.write_text(f"#!{self.python}\n{code}")
            script.chmod(0o755)
        self.empty = folder / "empty"
        self.empty.mkdir()

    def run(
        self, *words: str, cwd: Path | None = None, program: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with whichever exit code.

        Args:
            words: Of `gpukiln`.
            cwd: Where it is typed, by default an empty folder.
            program: Instead of `gpukiln`.
        """
        return subprocess.run(
            [program or self.program, *words],
            cwd=cwd or self.empty,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, *words: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command as `Here.start` does."""
        return start([self.program, *words], cwd=cwd, environment=self.environment)

    def document(self, *words: str, cwd: Path | None = None) -> dict[str, Any]:
        """The document that a command prints, which must succeed."""
        done = self.run(*words, "--json", cwd=cwd)
        said = f"{words}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, said
        return documents.read(done.stdout)
