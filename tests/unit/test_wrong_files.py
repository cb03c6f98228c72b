"""Files that a person edits, with what a person gets wrong: each mistake is told, and none is a traceback."""

import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpukiln.catalog import bases
from gpukiln.catalog.components import load_components
from gpukiln.catalog.images import load_image
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.docker.plan import ContainerProbes, make_container_plan
from gpukiln.errors import GpukilnError, UsageError
from gpukiln.images.channels import load_channels
from gpukiln.images.plan import make_plan
from gpukiln.sources.decisions import Probes

READ_BASES = bases.load_bases
PASSED = "the rules let it pass"
ROUNDS = 100  # of each file
SECONDS = 60
SCALARS = (
    "",
    "~",
    "[]",
    "{}",
    "''",
    "-1",
    "1e400",
    "0x_",
    "99999999999999999999999",
    "true",
    "2026-13-45",
    "!!int abc",
    "!!int ''",
    "!!float x",
    "!!bool maybe",
    "!!timestamp x",
    "!!binary '='",
    "!!set {a, a}",
    "!!python/object:os.system x",
    "!unknown x",
    "*nowhere",
    "&a [*a]",
    "{a: 1, a: 2}",
    "{<<: 3}",
    "'{'",
    "'{0}'",
    "'{branch!x}'",
    "'{nobody}'",
    "'{arch.x}'",
    "XYZ",
    "m5.xlrge",
    "'a\\0b'",
    "[" * 10_000,
    "http://[",
    "ftp://a",
    "{version: 1}",
    "[[[]]]",
    "\t",
    "- a",
    "? [a]",
    "é\u2028",
    "\x07",
)


class NoCloud:
    name, region, default_base, strict_sources = "embedded", "us-west-2", "debian-12", False

    def client(self, _service: str) -> Any:
        raise UsageError(PASSED)


def plan(tree: Path) -> None:
    versions = dict.fromkeys(("nvidia-kernel-dkms", "nvtop", "docker.io", "containerd", "git", "ccache"), "1")
    probes = Probes(lambda _: "no", lambda _: versions, lambda _: None)
    make_plan("eks-gpu", NoCloud(), probes=probes, root=tree)  # type: ignore[arg-type]


def plan_container(tree: Path) -> None:
    everything = ContainerProbes(lambda _: None, lambda names: dict.fromkeys(names, "1-1"))
    make_container_plan("runner-gpu", probes=everything, root=tree)


READERS: Mapping[str, tuple[Callable[[Path], Any], ...]] = {
    "components.yaml": (lambda tree: load_components(tree / "components.yaml"), plan, plan_container),
    "ami/bases.yaml": (lambda _: bases.load_bases(), plan),
    "ami/channels.yaml": (load_channels,),
    "ami/eks-gpu/image.yaml": (plan,),
    "docker/runner-gpu/image.yaml": (plan_container,),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in READERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("python.lock", "cuda.lock", "apt-packages", "Dockerfile"):
        shutil.copy(ROOT / "docker/runner-gpu" / name, tmp_path / "docker/runner-gpu")
    for name in ("scripts", "ansible", "roles", "ami/eks-gpu/eks-gpu.pkr.hcl"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(bases, "load_bases", lambda: READ_BASES(tmp_path / "ami/bases.yaml"))
    READ_BASES.cache_clear()
    yield tmp_path
    READ_BASES.cache_clear()


def change(text: str, chance: random.Random) -> str:
    """One of the things that happen to a file: a value, a line, a key, an indentation, a byte."""
    lines = text.splitlines()
    at = chance.randrange(len(lines))
    kind = chance.randrange(7)
    if kind <= 2:
        values = [(n, m) for n, line in enumerate(lines) if (m := re.match(r"( *[\w.-]+: )[^#&|>]+$", line))]
        at, found = chance.choice(values)
        lines[at] = found[1] + chance.choice(SCALARS)
    elif kind == 3:
        lines.insert(at, chance.choice(lines))
    elif kind == 4:
        del lines[at : at + chance.randint(1, 5)]
    elif kind == 5:
        lines[at] = " " * chance.randint(0, 12) + lines[at].strip()
    else:
        place = chance.randrange(len(text))
        return text[:place] + chance.choice(":{}[]'\"&*!%@`\t\n#-,\0") + text[place + chance.randint(0, 3) :]
    return "\n".join(lines) + "\n"


def read(tree: Path, name: str) -> None:
    for reader in READERS[name]:
        reader(tree)


@pytest.mark.parametrize("name", READERS)
def test_whatever_is_in_a_file_is_read_or_told(tree: Path, name: str) -> None:
    chance = random.Random(name)  # noqa: S311 - the same mistakes each time
    text, told, began = (tree / name).read_text(), [], time.monotonic()
    for number in range(ROUNDS):
        wrong = text
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            wrong = change(wrong, chance)
        (tree / name).write_text(wrong)
        for work in READERS[name]:
            READ_BASES.cache_clear()
            try:
                work(tree)
            except GpukilnError as error:
                told.append(error.message)
            except Exception as error:
                error.add_note(f"round {number}: {wrong}")
                raise
    assert len([message for message in told if message != PASSED]) > ROUNDS / 2
    assert max(map(len, told)) < 1000
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "components.yaml",
            "review: 2026-12-15",
            "review: 2026-13-45",
            r"line \d+: '2026-13-45' is no timestamp: month must be in 1..12",
        ),
        ("components.yaml", "branch: 535", "branch: !!int abc", r"line \d+: 'abc' is no int"),
        ("components.yaml", "branch: 535", "branch: " + "[" * 100_000, "nested deeper than 50"),
        (
            "components.yaml",
            'version: "1.19.1"',
            'version: "1.19.1"\n    version: "1.17.0"',
            r"line \d+: the key 'version' stands there twice",
        ),
        ("components.yaml", "  cudnn:", "  nccl:", "the key 'nccl' stands there twice"),
        (
            "components.yaml",
            "C95B321B61E88C1809C4F759DDCAE044F796ECB0",
            "XYZ",
            r"key_fingerprint: .*wanted: 40 digits of 0 to 9A to F",
        ),
        (
            "components.yaml",
            "https://nvidia.github.io/libnvidia-container/gpgkey",
            "htps://x",
            "key_url: .*wanted: an http, https or file address",
        ),
        (
            "components.yaml",
            "nvidia-dkms-{branch}-server",
            "nvidia-dkms-{brnch}-server",
            r"packages.ubuntu.*it may have \{branch\}",
        ),
        (
            "ami/bases.yaml",
            "    ssh_user: ubuntu",
            "    ssh_user: ubuntu\n    ssh_user: root",
            "'ssh_user' stands there twice",
        ),
        (
            "ami/bases.yaml",
            "eks/22.04/{kubernetes}",
            "eks/22.04/{kubernets}",
            r"it may have \{kubernetes\}, \{arch\}",
        ),
        ("ami/channels.yaml", "  stable:", "  candidate:", "the key 'candidate' stands there twice"),
        ("ami/eks-gpu/image.yaml", "m5.xlarge", "m5.xlrge", "unknown builder_instance_type .*'m5.xlrge'"),
        ("ami/eks-gpu/image.yaml", "  - nvtop", "  - nvtop\n  - cuda", "cuda goes into containers only"),
        ("ami/eks-gpu/image.yaml", "  - nvtop", "  - nvtpo", "unknown component in ami/eks-gpu/image.yaml"),
        ("docker/runner-gpu/image.yaml", "size_budget_gib: 14", "size_budget_gib: -1", "greater than 0"),
        (
            "docker/runner-gpu/image.yaml",
            "user: runner",
            "user: runner\nuser: root",
            "'user' stands there twice",
        ),
    ],
)
def test_a_mistake_is_named(tree: Path, name: str, old: str, new: str, message: str) -> None:
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as caught:
        read(tree, name)
    if "unknown" in message:
        assert caught.value.hint.startswith("did you mean ")


def test_a_builder_is_any_machine_of_ec2(tree: Path) -> None:
    path = tree / "ami/eks-gpu/image.yaml"
    path.write_text(path.read_text().replace("m5.xlarge", "c7i.8xlarge"))
    assert load_image("eks-gpu", tree).builder_instance_type == "c7i.8xlarge"


def test_what_is_merged_may_be_overridden(tmp_path: Path) -> None:
    (path := tmp_path / "a.yaml").write_text("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\ne: {<<: *x, c: 1}\n")
    assert read_yaml(path)["d"] == {"b": 3, "c": 2}
    assert read_yaml(path)["e"] == {"b": 1, "c": 1}


def test_what_no_role_installs_is_in_containers_only() -> None:
    playbook = (ROOT / "ansible/image.yml").read_text()
    for name, component in load_components().items():
        on_nodes = f"'{name}'" in playbook or component.from_base
        assert component.container_only is not on_nodes, name


def test_ansible_refuses_equal_keys(tmp_path: Path) -> None:
    (path := tmp_path / "hosts.yml").write_text("all: {vars: {a: 1, a: 2}}\n")
    done = subprocess.run(
        ["ansible-inventory", "-i", str(path), "--list"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,  # Ansible refuses one that does not block, as some runners give
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search("duplicate.*'a'", done.stderr, flags=re.IGNORECASE), done.stderr
