"""The base image is built when it is first wanted; that its build works is shown in tests/e2e."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded.base import BaseImage, current_base
from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.errors import IncompatibleError, UnavailableError


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The base images that were built, each as an empty disk."""
    built: list[str] = []

    def build(layout: Layout, base: BaseImage, *, say: Callable[[str], None] = lambda _: None) -> Path:
        say("packing the disk")
        built.append(base.image_id)
        disk = layout.snapshot(base.snapshot_id)
        disk.touch()
        return disk

    monkeypatch.setattr(base_image, "build_base", build)
    return built


def test_a_build_has_its_base_image_made_once(layout: Layout, built: list[str]) -> None:
    cloud, base = EmbeddedCloud("us-west-2", layout=layout), current_base(layout)
    said: list[str] = []
    cloud.prepare("ami-0123456789abcdef0", said.append)
    assert (built, said) == ([], [])
    for _ in range(2):
        cloud.prepare(base.image_id, said.append)
    assert (built, said) == ([base.image_id], ["packing the disk"])


def test_another_layout_of_its_disk_makes_another_base_image(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = current_base(layout).key
    monkeypatch.setattr(base_image, "LAYOUT", (*base_image.LAYOUT, "fat"))
    assert current_base(layout).key != before


@pytest.mark.parametrize("is_base", [True, False])
def test_a_machine_of_the_base_image_has_it_made_before_its_disk(
    layout: Layout, built: list[str], *, is_base: bool
) -> None:
    layout.create()
    base = current_base(layout)
    volume = SimpleNamespace(
        id="vol-1", snapshot_id=base.snapshot_id if is_base else "snap-of-another", size=8
    )
    instance = SimpleNamespace(
        id="i-1",
        root_device_name="/dev/xvda",
        get_block_device_mapping=[("/dev/xvda", SimpleNamespace(volume_id=volume.id))],
        ec2_backend=SimpleNamespace(volumes={volume.id: volume}),
    )
    with pytest.raises(IncompatibleError if is_base else UnavailableError):  # an empty disk; none
        Machines(layout).create(instance)
    assert built == ([base.image_id] if is_base else [])
