"""What says keep or remove, and where, is seen at every width; what is piped is whole."""

import io

import pytest
from rich.console import Console

from gpukiln.images.pointer import Pointer
from gpukiln.progress import PlainConsole
from gpukiln.release.overview import ChannelRow
from gpukiln.release.prune import PrunedImage, PruneResult
from gpukiln.release.view import channels_table, prune_table

REGION = "ap-southeast-2"
NAME = "gpukiln-eks-gpu-1.35-580.95.05-20261122-" + "x" * 80
REASON = "90 days old; no channel needs it and no resource uses it"
IMAGES = {f"ami-{number:017x}": action for number, action in enumerate(("keep", "remove", "failed"))}


def pruned():
    items = [
        PrunedImage(name, NAME, "2026-08-01T00:00", (), action, REASON) for name, action in IMAGES.items()
    ]
    return [PruneResult(REGION, tuple(items), {"snap-00000000000000009": "remove"})]


@pytest.mark.parametrize("width", [60, 80, 120, 400])
def test_a_terminal_of_any_width_shows_what_is_to_be_done_and_where(width):
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system=None, width=width).print(prune_table(pruned()))
    lines = shown.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    for image_id, action in {**IMAGES, "snap-00000000000000009": "remove"}.items():
        [line] = [line for line in lines if image_id in line]
        assert line.split()[:3] == [action, REGION, image_id]
    assert "".join(shown.getvalue().split()).count("".join(REASON.split())) == len(IMAGES)


def test_what_is_piped_is_one_whole_line_for_each(capsys):
    PlainConsole().print(prune_table(pruned()), crop=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(IMAGES) + 1
    for image_id, action in IMAGES.items():
        [line] = [line for line in lines if image_id in line]
        assert line.split()[:3] == [action, REGION, image_id]
        assert REASON in line
        assert NAME in line


def test_a_channel_with_a_problem_is_seen_on_eighty_columns():
    row = ChannelRow(
        pointer=Pointer("eks-gpu", "1.35", "stable"),
        region=REGION,
        image_id="ami-00000000000000001",
        build="20261122-000000-eks-gpu-abcd",
        since="2026-11-22T00:00:00",
        by="somebody",
        previous="ami-00000000000000002",
        problems=("it is deprecated",),
    )
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, color_system=None, width=80).print(channels_table([row]))
    for text in ("stable", REGION, "ami-00000000000000001", "it is deprecated", "before: ami-0"):
        assert text in shown.getvalue()
