"""What says which images there are: written whole, kept twice, made again; no reason to remove a disk."""

import json

import pytest

from gpukiln.clouds.embedded import regions
from gpukiln.clouds.embedded.clean import carry_out, plan_cleaning
from gpukiln.clouds.embedded.inventory import problems, stored_disks
from gpukiln.clouds.embedded.server import sweep
from gpukiln.errors import UnavailableError
from gpukiln.files import write_atomic
from tests.support.embedded_home import (
    CHANNEL,
    DAMAGES,
    HERE,
    THERE,
    damage,
    damage_meaning,
    disks,
    everything,
    image_id,
    make_home,
    snapshot_id,
)


@pytest.fixture
def layout(tmp_path):
    return make_home(tmp_path / "home")


def files_of(layout):
    return (
        regions.region_file(layout, HERE),
        regions.copy_file(layout, HERE),
        regions.description_file(layout, snapshot_id(1), HERE),
    )


def test_what_was_written_is_read(layout):
    before = everything(layout)
    assert set(before) == {HERE, THERE}
    assert set(before[HERE]["images"]) >= {image_id(1), image_id(2)}
    assert problems(layout) == []
    assert regions.repair_files(layout) == []
    assert regions.read_region(layout, "eu-west-1") == regions.empty_document()


def test_what_did_not_change_is_not_written_again(layout):
    times = [file.stat().st_mtime_ns for file in files_of(layout)]
    regions.write_region(layout, HERE, everything(layout)[HERE])
    assert [file.stat().st_mtime_ns for file in files_of(layout)] == times


@pytest.mark.parametrize("how", [*DAMAGES, "other meaning", "link to nothing"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_damaged_file_is_told_and_made_again_and_costs_nothing(layout, which, how):
    before, had = everything(layout), disks(layout)
    file = files_of(layout)[which]
    if how == "other meaning":
        damage_meaning(file)
    elif how == "link to nothing":
        file.unlink()
        file.symlink_to("nothing")
    else:
        damage(file, how)
    [told] = problems(layout)
    assert str(file) in told
    assert everything(layout) == before
    sweep(layout)
    assert disks(layout) == had
    assert regions.repair_files(layout) == [told]
    assert everything(layout) == before
    assert file.is_file()
    aside = list(file.parent.glob(f"{file.name}.damaged-*"))
    assert len(aside) == (how != "missing"), "what was damaged is kept for who wants to look"
    assert all("was set aside" in told for told in problems(layout))


def test_images_are_made_again_from_beside_their_disks_and_lost_channels_are_told(layout):
    before = everything(layout)[HERE]
    for file in files_of(layout)[:2]:
        file.unlink()
    [told] = regions.repair_files(layout)
    assert "parameters (the channels) and container images are lost" in told
    after = everything(layout)[HERE]
    assert (after["images"], after["snapshots"]) == (before["images"], before["snapshots"])
    assert not after["parameters"]


def test_a_newer_description_wins_over_an_older_copy(layout):
    """A server that was killed between the two wrote the descriptions first."""
    document = everything(layout)[HERE]
    del document["images"][image_id(2)]
    older = regions.copy_file(layout, HERE).read_text()
    regions.write_region(layout, HERE, document)
    regions.copy_file(layout, HERE).write_text(older)
    regions.region_file(layout, HERE).unlink()
    assert everything(layout)[HERE] == document


@pytest.mark.parametrize("how", [damage_ for damage_ in DAMAGES if damage_ != "missing"])
def test_what_can_not_be_made_again_is_refused_by_name_and_no_disk_is_touched(layout, how):
    had = disks(layout)
    file, copy, _ = files_of(layout)
    damage(file, "missing" if how == "empty" else how)
    damage(copy, how)
    for act in (
        lambda: regions.repair_files(layout),
        lambda: regions.read_region(layout, HERE),
        lambda: plan_cleaning(layout, images=True, base=True, released=False),
    ):
        with pytest.raises(UnavailableError, match=r"us-west-2\.json.*us-west-2\.json\.last") as caught:
            act()
        assert caught.value.exit_code == 4
        assert "no disk is touched" in caught.value.message
        assert "move both away" in caught.value.hint
    sweep(layout)
    assert disks(layout) == had
    assert everything_of_the_other(layout)
    for path in (file, copy):  # the way out that it names
        if path.exists():
            path.rename(path.with_name(f"{path.name}.mine"))
    assert image_id(1) in everything(layout)[HERE]["images"]


def everything_of_the_other(layout):
    return image_id(3) in regions.read_region(layout, THERE)["images"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_disk_is_told(layout, how):
    damage(layout.snapshot(snapshot_id(2)), how)
    [row] = [row for row in stored_disks(layout) if row["problem"]]
    assert row["snapshot"] == snapshot_id(2)
    assert str(layout.snapshot(snapshot_id(2))) in row["problem"]
    assert "image-2" in row["image"]
    assert regions.repair_files(layout) == []


def test_a_disk_that_no_region_knows_stays_until_somebody_says_otherwise(layout):
    stray = layout.snapshot(snapshot_id(9))
    stray.write_bytes(b"somebody's")
    sweep(layout)
    [row] = [row for row in stored_disks(layout) if row["problem"]]
    assert row["snapshot"] == stray.stem
    assert "cloud.clean --images --yes" in row["problem"]
    carry_out(layout, plan_cleaning(layout, images=False, base=True, released=False))
    assert stray.exists()
    cleaning = plan_cleaning(layout, images=True, base=False, released=False)
    assert stray in cleaning.files
    carry_out(layout, cleaning)
    assert not stray.exists()


def test_what_is_half_written_goes(layout):
    partial = layout.snapshots / f".{snapshot_id(8)}.raw.0a1b.partial"
    partial.touch()
    (layout.machines / "i-1").mkdir()
    sweep(layout)
    assert not partial.exists()
    assert not list(layout.machines.iterdir())


def test_a_write_that_fails_leaves_what_stood_there(tmp_path):
    file = tmp_path / "file"
    write_atomic(file, "old")
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "new \udcff")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_cleaning_keeps_what_a_channel_names_until_it_is_told_otherwise(layout):
    cleaning = plan_cleaning(layout, images=True, base=False, released=False)
    assert disks(layout), "a plan removes nothing"
    [told] = cleaning.kept
    assert image_id(1) in told
    assert CHANNEL in told
    assert "--released" in told
    carry_out(layout, cleaning)
    left = everything(layout)
    base = {name for name, image in left[HERE]["images"].items() if image["name"].startswith("debian-12")}
    assert set(left[HERE]["images"]) == {image_id(1), *base}
    assert set(left[THERE]["images"]) == base
    assert left[HERE]["parameters"][CHANNEL]
    assert not left[HERE]["repositories"]
    assert disks(layout) == {snapshot_id(1), *(name.replace("ami-", "snap-") for name in base)}
    assert not layout.registry.exists()
    assert problems(layout) == []
    assert not [row for row in stored_disks(layout) if row["problem"]]

    carry_out(layout, plan_cleaning(layout, images=True, base=True, released=True))
    assert not disks(layout)
    assert all(not document["images"] for document in everything(layout).values())
    assert not everything(layout)[HERE]["parameters"]
    assert not plan_cleaning(layout, images=True, base=True, released=True).lines


def test_bases_go_alone(layout):
    cleaning = plan_cleaning(layout, images=False, base=True, released=False)
    carry_out(layout, cleaning)
    assert disks(layout) == {snapshot_id(1), snapshot_id(2), snapshot_id(3)}
    assert set(everything(layout)[HERE]["images"]) == {image_id(1), image_id(2)}


def test_everything_goes_where_nothing_can_be_read_and_somebody_said_so(layout):
    for file in files_of(layout)[:2]:
        file.write_text("x")
    cleaning = plan_cleaning(layout, images=True, base=True, released=True)
    assert any("us-west-2.json is damaged" in line for line in cleaning.lines)
    carry_out(layout, cleaning)
    assert not disks(layout)
    assert all(not document["images"] for document in everything(layout).values())


def test_an_older_form_is_told_as_such(layout):
    document = everything(layout)[HERE]
    for file in files_of(layout)[:2]:
        file.write_text(json.dumps(document))
    with pytest.raises(UnavailableError, match="possibly of another version of gpukiln"):
        regions.read_region(layout, HERE)
