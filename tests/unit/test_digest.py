"""The digest changes with what changes the image, and with nothing else."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from gpukiln.catalog.components import Components, load_components
from gpukiln.catalog.images import load_image
from gpukiln.images.bases import ResolvedBase
from gpukiln.images.digest import digest, explain_change, image_inputs
from gpukiln.sources.decisions import Decision

BASE = ResolvedBase(
    name="debian-12",
    id="ami-1",
    resolved_by="parameter",
    ssh_user="admin",
    root_device="/dev/xvda",
    os_family="debian",
    distribution="debian",
    release="12",
    image_name="debian-12-amd64-1",
)
COMPONENTS = load_components()
NVTOP = Decision("nvtop", "install", "3.0.1", "3.0.1-1", None, "archive", "reason")
FILES = {
    "ami/eks-gpu/image.pkr.hcl": "source {}",
    "ami/eks-gpu/image.yaml": "name: eks-gpu",
    "ansible.cfg": "[defaults]",
    "ansible/image.yml": "- hosts: all  # every one\n  become: true\n",
    "ansible/node.yml": "- hosts: all\n",
    "roles/nvtop/tasks/install.yml": "- name: Install\n  when: !unsafe 'x'\n",
    "roles/nvtop/meta/main.yml": "dependencies: []\ngalaxy_info: {description: a}\n",
    "roles/nvtop/meta/argument_specs.yml": "a: 1",
    "roles/nvtop/README.md": "words",
    "roles/nvtop/molecule/default/converge.yml": "a: 1",
    "scripts/bootstrap/gpu.sh": "#!/bin/sh\n",
    "scripts/hooks/job.sh": "#!/bin/sh\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def inputs(
    root: Path,
    *,
    base: ResolvedBase = BASE,
    nvtop: Decision = NVTOP,
    packer: str = "1.6.6",
    gib: int = 30,
    components: Components | None = None,
) -> dict[str, str]:
    image = replace(load_image("eks-gpu"), volume_size_gib=gib)
    return image_inputs(root, image, base, [nvtop], components or COMPONENTS, {"packer": packer})


def test_the_inputs_are_named(root: Path) -> None:
    assert sorted(name for name in inputs(root) if name.startswith("file ")) == [
        "file ami/eks-gpu/image.pkr.hcl",
        "file ansible.cfg",
        "file ansible/image.yml",
        "file roles/nvtop/meta/main.yml",
        "file roles/nvtop/tasks/install.yml",
        "file scripts/bootstrap/gpu.sh",
        "file scripts/hooks/job.sh",
    ]
    assert inputs(root)["component nvtop"] == "install 3.0.1-1"
    assert inputs(root)["base"] == "debian-12 ami-1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("roles/nvtop/README.md", "other words"),
        ("ansible/image.yml", "# new comment\n- become: true\n  hosts:   all\n"),
        ("ansible/node.yml", "- hosts: gpu\n"),
        ("roles/nvtop/tasks/runtime.yml", "- name: Start\n"),
        ("ami/eks-gpu/image.yaml", "name: other"),
        ("roles/nvtop/meta/main.yml", "dependencies: []\ngalaxy_info: {description: b}\n"),
        ("roles/nvtop/meta/argument_specs.yml", "a: 2"),
        ("roles/nvtop/molecule/default/converge.yml", "a: 2"),
        ("roles/nvtop/tasks/.install.yml.swp", "x"),
        ("docs/a.md", "x"),
        ("tests/unit/test_a.py", "x"),
    ],
)
def test_what_can_not_change_the_image(root: Path, name: str, text: str) -> None:
    before = inputs(root)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    assert digest(inputs(root)) == digest(before)
    assert explain_change(before, inputs(root)) == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("roles/nvtop/tasks/install.yml", "- name: Other\n", "changed role nvtop: tasks/install.yml"),
        ("roles/nvtop/tasks/install.yml", "- name: [broken\n", "changed role nvtop: tasks/install.yml"),
        ("roles/nvtop/meta/main.yml", "dependencies: [docker]\n", "changed role nvtop: meta/main.yml"),
        ("roles/nvtop/files/a", "x", "added role nvtop: files/a"),
        ("roles/nvtop/templates/a.j2", "{{ a }}  # a comment", "added role nvtop: templates/a.j2"),
        ("ami/eks-gpu/image.pkr.hcl", "source {} ", "changed template of eks-gpu: image.pkr.hcl"),
        ("ansible/image.yml", "- hosts: gpu", "changed ansible/image.yml"),
    ],
)
def test_a_file_that_changes_the_image(root: Path, name: str, text: str, words: str) -> None:
    before = inputs(root)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    assert digest(inputs(root)) != digest(before)
    assert explain_change(before, inputs(root)) == [words]


def test_the_order_of_tasks_and_the_right_to_execute_count(root: Path) -> None:
    tasks = root / "roles/nvtop/tasks/install.yml"
    tasks.write_text("[a, b]")
    before = inputs(root)
    tasks.write_text("[b, a]")
    (root / "scripts/bootstrap/gpu.sh").chmod(0o755)
    assert explain_change(before, inputs(root)) == [
        "changed role nvtop: tasks/install.yml",
        "changed scripts/bootstrap/gpu.sh",
    ]


def test_a_removed_file_is_told(root: Path) -> None:
    before = inputs(root)
    (root / "scripts/bootstrap/gpu.sh").unlink()
    assert explain_change(before, inputs(root)) == ["removed scripts/bootstrap/gpu.sh"]


def test_values_are_told_in_words(root: Path) -> None:
    after = inputs(
        root,
        base=replace(BASE, id="ami-2"),
        nvtop=replace(NVTOP, package_version="3.1-1"),
        packer="1.11.2",
        gib=40,
    )
    assert explain_change(inputs(root), after) == [
        "base image: debian-12 ami-1 -> debian-12 ami-2",
        "available version of nvtop: 3.0.1-1 -> 3.1-1",
        "version of packer: 1.6.6 -> 1.11.2",
        "volume size: 30 GiB -> 40 GiB",
    ]


def test_how_a_component_is_installed_counts_and_why_does_not(root: Path) -> None:
    def digest_with(**changed: object) -> dict[str, str]:
        nvtop = replace(COMPONENTS["nvtop"], **changed)  # type: ignore[arg-type]  # fields by name
        return inputs(root, components={**COMPONENTS, "nvtop": nvtop})

    assert digest_with(packages={"debian": "nvtop-other"}) != inputs(root)
    assert digest_with(reason="another reason", review=date(2030, 1, 1)) == inputs(root)


def test_a_kernel_a_recipe_and_what_is_left_out_are_told_in_words() -> None:
    old = {"kernel": "6.1.1", "recipe nvtop": '{"a":1}', "component dcgm": "left_out 4.2"}
    new = {"kernel": "6.1.2", "recipe nvtop": '{"a":2}', "component dcgm": "install 4.2-1"}
    assert explain_change(old, new) == [
        "available version of dcgm: left out 4.2 -> 4.2-1",
        "available version of the kernel: 6.1.1 -> 6.1.2",
        "changed: how nvtop is installed (components.yaml, gpukiln.toml or --set)",
    ]
