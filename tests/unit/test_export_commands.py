"""ami.export and ami.import as they are typed: exit codes, JSON, what is told."""

import json

import pytest

from gpukiln.cli.main import command
from gpukiln.clouds import select
from tests.support.exit_codes import code_of
from tests.support.exports import BIOS_TABLE, boot_disk, image_with_disk
from tests.support.release_cloud import HOME, Cloud, images


@pytest.fixture
def typed(empty_cloud, monkeypatch, capsys, tmp_path):  # noqa: ARG001 - it begins empty
    """Run a command; returns its exit code, output and errors."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(select, "make_cloud", lambda _name, region, **_: Cloud(region))

    def run(name, *arguments, **options):
        code = code_of(command(f"ami.{name}"), *arguments, **options)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_a_disk_leaves_and_comes_back(typed, tmp_path):
    image_id, disk = image_with_disk(mib=64)
    boot_disk(disk, BIOS_TABLE)
    output = tmp_path / "a.qcow2"
    where = {"output": str(output), "region": HOME}
    code, out, err = typed("export", image_id, dry_run=True, **where)
    assert (code, list(tmp_path.glob("*.qcow2*"))) == (0, [])
    assert "verified" in out
    assert "dry run: nothing was written" in err
    assert out.count("will be missing: ") == 1  # one reason, one line
    planned = json.loads(typed("export", image_id, dry_run=True, json=True, **where)[1])
    assert (planned["image_id"], planned["to"], planned["verified"]) == (image_id, "qcow2", True)

    code, out, err = typed("export", image_id, json=True, **where)
    document = json.loads(out)
    assert (code, document["bytes"], document["blocks_read"]) == (0, output.stat().st_size, None)
    assert f"SHA-256 {document['sha256']}" in err
    code, out, err = typed("export", image_id, **where)
    assert (code, "error: " in err, "--force" in err) == (6, True, True)
    code, out, _ = typed("export", image_id, force=True, **where)
    assert (code, "with it: a.qcow2.sha256" in out) == (0, True)

    code, out, err = typed("import", str(output), region=HOME, dry_run=True)
    assert (code, len(images(HOME))) == (0, 1)
    code, out, err = typed("import", str(output), region=HOME, json=True)
    document = json.loads(out)
    assert (code, document["found"], document["boot_mode"]) == (0, False, "legacy-bios")
    assert f"invoke ami.verify {document['image_id']} --region {HOME} --cloud embedded" in err
    code, out, _ = typed("import", str(output), region=HOME)
    assert (code, out.startswith(f"{document['image_id']} "), "(exists already)" in out) == (0, True, True)


def test_a_relative_path_is_of_the_folder_where_it_is_typed(typed, tmp_path, monkeypatch):
    image_id, disk = image_with_disk(mib=64)
    boot_disk(disk, BIOS_TABLE)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert typed("export", image_id, output="here.qcow2", region=HOME)[0] == 0
    assert "here.qcow2" in {file.name for file in folder.iterdir()}
    assert typed("import", "here.qcow2", region=HOME, dry_run=True)[0] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": "64 apples"}, "is not an amount of memory"),
        ({"size": "0GiB"}, "is not more than 0"),
        ({"size": "64"}, "wanted with its unit, such as 64GiB"),
        ({"datasource": "ec2"}, "datasource 'ec2' is not one of"),
        ({"datasource": "none"}, "no user could log in"),
        ({"to": "ova"}, "there is no such format"),
    ],
)
def test_what_is_typed_wrong_ends_with_2(typed, tmp_path, options, says):
    image_id, _ = image_with_disk(mib=64)
    code, _, err = typed("export", image_id, output=str(tmp_path / "a.raw"), region=HOME, **options)
    assert code == 2
    assert says in err
    assert "next: " in err or "one of" in err


def test_a_key_goes_along(typed, tmp_path, monkeypatch):
    from gpukiln.exports import run  # noqa: PLC0415 - what is replaced

    seen = {}
    monkeypatch.setattr(run, "prepare", lambda disk, **options: seen.update(options, disk=disk))
    key = tmp_path / "id.pub"
    key.write_text("ssh-ed25519 AAAA somebody\n")
    image_id, _ = image_with_disk(mib=64)
    options = {"datasource": "none", "ssh_key": str(key), "size": "2GiB"}
    code, _, err = typed("export", image_id, output=str(tmp_path / "a.raw"), region=HOME, **options)
    assert code == 0, err
    assert (seen["datasource"], seen["size_gib"], seen["ssh_keys"]) == (
        "none",
        2,
        ("ssh-ed25519 AAAA somebody",),
    )
    about = json.loads((tmp_path / "a.raw.json").read_text())
    assert about["changed"] == {"datasource": "none", "ssh_keys": 1, "size_gib": 2}
