"""`gpukiln` as its wheel installs it, in a virtual environment without a checkout."""

import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpukiln.catalog.load import ROOT
from tests.support import documents


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, without a network, in a folder that has none."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


class Installed:
    """Runs the program that is installed.

    Args:
        folder: For the wheel and the environment.
        environment: Variables that the program gets.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
        venv = folder / "venv"
        self.program = venv / "bin/gpukiln"
        wheel = build_wheel(folder)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        install = [venv / "bin/pip", "install", "--no-deps", "--no-index", str(wheel)]
        subprocess.run(install, check=True, capture_output=True)
        # The dependencies of this environment, without another download; no checkout is among them.
        [packages] = venv.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        for name in ("ansible", "ansible-playbook"):
            script = venv / "bin" / name
            _, _, code = Path(sys.executable).with_name(name).read_text().partition("\n")
            script.write_text(f"#!{venv}/bin/python\n{code}")
            script.chmod(0o755)

    def start(self, *words: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command in a session of its own, which a signal to the process group ends."""
        return subprocess.Popen(
            [self.program, *words],
            cwd=cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, cwd: Path) -> str:
        """What a command prints to standard output, which must succeed."""
        process = self.start(*words, cwd=cwd)
        out, said = process.communicate()
        assert process.returncode == 0, f"{words}: {process.returncode}\n{out[-3000:]}\n{said[-6000:]}"
        return out

    def document(self, *words: str, cwd: Path) -> Any:
        return documents.read(self.run(*words, "--json", cwd=cwd))
