"""Builds the Ansible collection `gpukiln.node` from roles/ and ansible/plugins.

    python -m gpukiln.nodes.collection FOLDER

The roles stay where they are. What they need of the rest of the checkout is staged with them: the plugins,
files that they share with other parts, the values of components.yaml, and the packed gpukiln-gpu.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from gpukiln import __version__, programs
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.gpus import zipapp

NAMESPACE, NAME = "gpukiln", "node"
SHARED = (
    "scripts/bootstrap",
    "scripts/hooks",
    "gpukiln/catalog/data/nvidia_matrix.yaml",
    "gpukiln/probe/passthrough.py",
)
"""What roles read by its path in the checkout: `shared` and `ROOT` of roles/plan.py."""
PLUGINS = ("action", "modules")
DOCUMENTS = ("LICENSE", "docs/roles.md")
# image_record writes the plan of an image build, which a live node has not.
LEFT_OUT = ("image_record",)
"""Roles that mean nothing without the plan of an image."""
COMPONENTS = "gpukiln_components"
"""What the roles' defaults call `components` in a checkout, where a play reads components.yaml."""
LIBRARIES = ("tomlkit",)
"""What roles import where Ansible runs, and Ansible itself does not bring."""
# `components.yaml` in a comment is the file, not the variable.
REFERENCE = r"\bcomponents\.(?!yaml)"
ANSIBLE = ("2.16", "2.17", "2.18", "2.19")
"""Releases of ansible-core that pyproject.toml allows."""
# Bytecode of this checkout's Python would make the archive differ from build to build.
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
# Links out of the collection would be dead in it; docs/roles.md goes with it.
OTHER_DOCUMENT = re.compile(r"\[([^]]+)\]\(\.\./\.\./(?!docs/roles\.md)[^)]*\)")
GALAXY: dict[str, Any] = {
    "namespace": NAMESPACE,
    "name": NAME,
    "version": __version__,
    "readme": "README.md",
    "authors": ["gpukiln"],
    "description": "Roles that make a machine a GPU node: driver, engines, container toolkit, DCGM.",
    "license_file": "LICENSE",
    "tags": ["gpu", "nvidia", "cuda", "infrastructure"],
    "dependencies": {},
}
"""galaxy.yml; `repository`, which Galaxy asks for, is whoever publishes it to add."""


def stage(folder: Path) -> Path:
    """Write the collection's sources.

    Args:
        folder: That holds `ansible_collections`, as Ansible and ansible-test want it; made when missing.

    Returns:
        The collection's own folder in it.
    """
    own = folder / "ansible_collections" / NAMESPACE / NAME
    for kind in PLUGINS:
        shutil.copytree(ROOT / "ansible/plugins" / kind, own / "plugins" / kind, ignore=IGNORED)
    (own / "roles").mkdir()
    # Roles import it relatively, so that it must lie next to them.
    shutil.copy(ROOT / "roles/plan.py", own / "roles")
    for role in sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir()):
        if role.name not in (*LEFT_OUT, "__pycache__"):
            _stage_role(role, own / "roles" / role.name)
    _stage_components(own / "roles")
    for name in (*SHARED, *DOCUMENTS):
        target = own / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, target)
    _write_about(own)
    with tempfile.TemporaryDirectory() as scratch:
        # The role gpu_tools installs gpukiln-gpu from its own files: a node can't reach this checkout.
        shutil.copytree(zipapp.tree(Path(scratch)), own / "roles/gpu_tools/files/node")
    return own


def build(output: Path) -> Path:
    """Build the file that `ansible-galaxy collection install` takes.

    Args:
        output: The folder for it; made when missing. A file of the same version is replaced.

    Raises:
        UnavailableError: Ansible is not installed, or does not accept the collection.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        own = stage(Path(scratch))
        command = ["ansible-galaxy", "collection", "build", "--force", "--output-path", str(output), str(own)]
        done = programs.run(command, limit_s=programs.QUICK_S)
    if done.returncode:
        raise UnavailableError(
            "ansible-galaxy can't build the collection",
            details=tuple(done.stderr.decode(errors="replace").strip().splitlines()[-6:]),
        )
    return output / f"{NAMESPACE}-{NAME}-{__version__}.tar.gz"


def _stage_role(role: Path, target: Path) -> None:
    shutil.copytree(role, target, ignore=IGNORED)
    readme = target / "README.md"
    readme.write_text(OTHER_DOCUMENT.sub(r"\1", readme.read_text(encoding="utf-8")), encoding="utf-8")


def _stage_components(roles: Path) -> None:
    """Give roles the values of components.yaml that any of them takes: a play merges its roles' defaults."""
    texts = {
        file: file.read_text(encoding="utf-8")
        for name in ("defaults", "vars")
        for file in sorted(roles.glob(f"*/{name}/main.yml"))
    }
    used = {file: re.findall(REFERENCE + r"(\w+)", text) for file, text in texts.items()}
    known = read_yaml(ROOT / "components.yaml")["components"]
    values = {COMPONENTS: {name: known[name] for name in sorted(set().union(*used.values()))}}
    dumped = yaml.dump(values, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=100)
    for file, names in used.items():
        if names:
            file.write_text(re.sub(REFERENCE, f"{COMPONENTS}.", texts[file]), encoding="utf-8")
    # Ansible merges the defaults of all roles of a play, so every role that uses a value has its own copy.
    for role in {file.parents[1] for file, names in used.items() if names}:
        with (role / "defaults/main.yml").open("a", encoding="utf-8") as defaults:
            defaults.write(f"# Of gpukiln's components.yaml, when the collection was built.\n{dumped}")


class _Plain(yaml.SafeDumper):
    """Without anchors, which a value that stands in several places would get."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True


def _write_about(own: Path) -> None:
    texts = {
        "galaxy.yml": yaml.safe_dump(GALAXY, sort_keys=False),
        "meta/runtime.yml": yaml.safe_dump({"requires_ansible": f">={ANSIBLE[0]}.0"}),
        "meta/execution-environment.yml": yaml.safe_dump(
            {"version": 1, "dependencies": {"python": "requirements.txt"}}
        ),
        "requirements.txt": "".join(f"{name}\n" for name in LIBRARIES),
        "README.md": _readme(own),
        **{f"tests/sanity/ignore-{release}.txt": _ignored(own) for release in ANSIBLE},
    }
    for name, text in texts.items():
        file = own / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _ignored(own: Path) -> str:
    """What ansible-test's sanity tests need not say of this collection."""
    modules = (f"plugins/modules/{file.name}" for file in own.glob("plugins/modules/*.py"))
    # ansible-test asks modules for a GPL header (missing-gplv3-license); this collection is Apache-2.0.
    lines = [f"{name} validate-modules:missing-gplv3-license # it is Apache-2.0" for name in modules]
    for file in own.rglob("*.sh"):
        if file.read_text(encoding="utf-8").startswith("#!/bin/bash\n"):
            lines.append(f"{file.relative_to(own)} shebang!skip # it runs on nodes, which have it there")
    return "".join(f"{line}\n" for line in sorted(lines))


def _readme(own: Path) -> str:
    roles = sorted(path.parents[1] for path in own.glob("roles/*/meta/main.yml"))
    return (ROOT / "ansible/collection.md").read_text(encoding="utf-8") + "".join(
        f"| [{role.name}](roles/{role.name}/README.md) |"
        f" {read_yaml(role / 'meta/main.yml')['galaxy_info']['description']} |\n"
        for role in roles
    )


def main(argv: list[str]) -> int:
    """Build it into the folder that was named, and print the file."""
    if len(argv) != 1:
        raise UsageError("which folder is it to be built in?", hint="scripts/collection FOLDER")
    sys.stdout.write(f"{build(Path(argv[0]))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
