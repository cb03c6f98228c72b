"""What the tests of roles share: their filters as modules, and a playbook run on this machine."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from gpukiln.catalog.load import ROOT


def load_filters(role: str, name: str) -> ModuleType:
    path = ROOT / "roles" / role / "filter_plugins" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{role}_{name}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(
    folder: Path, playbook: str, variables: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a playbook with real Ansible.

    Args:
        folder: Where it is written; its `bin` is first on PATH, and it is the home.
        playbook: Its text.
        variables: Extra variables of the play.
        environment: Added to Ansible's environment.
    """
    (folder / "site.yml").write_text(playbook)
    programs = Path(sys.executable).parent
    return subprocess.run(
        [programs / "ansible-playbook", folder / "site.yml", "-e", json.dumps(variables)],
        env={
            "PATH": f"{folder / 'bin'}:{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
