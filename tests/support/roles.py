"""What the tests of roles share: roles as asked for, nodes as seen, filters, and a playbook run here."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from gpukiln.catalog.load import ROOT
from gpukiln.nodes import collection
from roles.plan import Node, Role, System

PROGRAMS = Path(sys.executable).parent
SYSTEMS = {
    "debian-12": System("Debian", "12.8", "bookworm", "Debian", "x86_64"),
    "ubuntu-22.04": System("Ubuntu", "22.04", "jammy", "Debian", "x86_64"),
    "rocky-9": System("Rocky", "9.4", "Blue Onyx", "RedHat", "x86_64"),
    "amazon-2023": System("Amazon", "2023", "", "RedHat", "x86_64"),
}

LOADER = DataLoader()  # it reads each file once


def asked(name: str, system: str = "debian-12", /, *, check: bool = False, **given: Any) -> Role:
    """A role as a play has it that gives it some variables, and leaves the others as they are.

    Args:
        name: The role's.
        system: One of `SYSTEMS`.
        given: Without the role's name before them.
    """
    of = SYSTEMS[system]
    variables: dict[str, Any] = _load(ROOT / "components.yaml")
    variables["ansible_facts"] = {
        "distribution": of.distribution,
        "distribution_version": of.version,
        "distribution_major_version": of.major,
        "distribution_release": of.release,
        "os_family": of.family,
        "architecture": of.architecture,
    }
    folder = ROOT / "roles" / name
    for file in ("defaults/main.yml", "vars/main.yml"):
        if (folder / file).exists():
            variables |= _load(folder / file)
    variables |= {f"{name}_{key}": value for key, value in given.items()} | {"role_path": str(folder)}
    templar = Templar(loader=LOADER, variables=variables)
    own = {
        key.removeprefix(f"{name}_"): value for key, value in variables.items() if key.startswith(f"{name}_")
    }
    return Role(name, _Templated(templar, own), of, check)


def _load(path: Path) -> dict[str, Any]:
    return LOADER.load_from_file(str(path), trusted_as_template=True) or {}


class _Templated(dict[str, Any]):
    """Variables as a role has them: each is templated when it is asked for."""

    def __init__(self, templar: Templar, variables: Mapping[str, Any]) -> None:
        super().__init__(variables)
        self._templar = templar

    def __getitem__(self, name: str) -> Any:
        return json.loads(json.dumps(self._templar.template(super().__getitem__(name))))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - it would call itself


def node(packages: Mapping[str, str] = {}, files: Mapping[str, str] = {}, **more: Any) -> Node:
    """A node as node_facts tells of it; what is not named is not there.

    Args:
        packages: Name to version; a version that begins with `=` is held.
        files: Path to text; they are root's, with mode 0644.
    """
    there = {"mode": "0644", "uid": 0, "gid": 0, "mtime": 0.0, "sha256": ""}
    return {
        "packages": {
            name: [{"version": version.lstrip("="), "arch": "amd64", "held": version.startswith("=")}]
            for name, version in packages.items()
        },
        "files": Absent({path: {**there, "text": text} for path, text in files.items()}),
        "folders": Absent({}),
        "ages": Absent({}),
        "globs": Nothing({}),
        "units": Units({}),
        "keyrings": Nothing({}),
        "accounts": Absent({}),
        "answers": {},
        "pci": {"gpus": [], "switches": []},
        "kernels": {},
        "dkms": [],
        "sources": {},
        "loaded": {},
        "compilers": [],
        **more,
    }


class Absent(dict[str, Any]):
    """What was asked for and is not there."""

    def __missing__(self, name: str) -> None:
        return None


class Nothing(dict[str, Any]):
    """What was looked for by patterns; nothing was found for those that are not named."""

    def __missing__(self, name: str) -> list[str]:
        return []


class Units(dict[str, Any]):
    """Units; those that are not named are not there."""

    def __missing__(self, name: str) -> dict[str, Any]:
        return {"there": False, "enabled": "", "active": "", "reload": False}


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
    return subprocess.run(
        [PROGRAMS / "ansible-playbook", folder / "site.yml", "-e", json.dumps(variables)],
        env={
            "PATH": f"{folder / 'bin'}:{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def install_collection(folder: Path) -> Path:
    """Build the collection and install it; nothing is fetched.

    Args:
        folder: Outside of the checkout.

    Returns:
        The installed collection's folder.
    """
    command = [PROGRAMS / "ansible-galaxy", "collection", "install", "--offline"]
    subprocess.run(
        [*command, collection.build(folder / "built"), "-p", folder / "there"],
        env=outside(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        check=True,
    )
    return folder / "there/ansible_collections/gpukiln/node"


def outside(folder: Path, installed: Path | None = None) -> dict[str, str]:
    """The environment of who uses an installed collection: no ansible.cfg and no Python path of the checkout.

    Args:
        folder: The home; its `bin` is first on PATH.
        installed: What `install_collection` returned.
    """
    there = {"ANSIBLE_COLLECTIONS_PATH": str(installed.parents[2])} if installed else {}
    path = f"{folder / 'bin'}:{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": str(folder), "LC_ALL": "C.UTF-8", **there}
