"""The script that cleans an image, on a root of its own: what the lists name is gone afterwards."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpukiln.probe import hygiene
from gpukiln.probe.scripts import CREDENTIALS, IDENTITIES

ROLE = Path(__file__).resolve().parents[2] / "roles/image_hygiene"
SCRIPT = (ROLE / "files/image-hygiene.sh").read_text()
ISCSI = "etc/iscsi/initiatorname.iscsi"


def write(path: Path, text: str = "made by the build\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root that has nothing but busybox, which has all that the script runs, and a user's home."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox here")
    (tmp_path / "bin").mkdir()
    shutil.copy(busybox, tmp_path / "bin/busybox")
    loaded = subprocess.run(["ldd", busybox], capture_output=True, text=True, check=False).stdout
    for library in re.findall(r"(/\S+) \(0x", loaded):  # none where it is static
        (tmp_path / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, tmp_path / library[1:])
    subprocess.run([busybox, "--install", "-s", str(tmp_path / "bin")], check=True)
    for link in (tmp_path / "bin").iterdir():
        if link.is_symlink():
            link.unlink()
            link.symlink_to("busybox")
    write(tmp_path / "bin/getent", "#!/bin/sh\ncat /etc/passwd\n").chmod(0o755)
    write(tmp_path / "etc/passwd", "root:x:0:0::/root:/bin/sh\nadmin:x:1000:1000::/home/admin:/bin/sh\n")
    (tmp_path / "root").mkdir()
    (tmp_path / "home/admin").mkdir(parents=True)
    return tmp_path


def clean(root: Path, *patterns: str, dry: bool = False) -> str:
    options = ["--dry-run"] if dry else []
    done = subprocess.run(
        ["chroot", str(root), "/bin/sh", "-s", "--", *options, "--", *patterns],
        input=SCRIPT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(pattern: str) -> str:
    """A path that a pattern of the lists matches."""
    return pattern.replace("*", "x")


def found_by_the_suite(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(hygiene, "IDENTITIES", [f"{root}{one}" for one in IDENTITIES])
    return [path.removeprefix(str(root)) for path in hygiene._identity_files()]


def test_what_machines_of_one_image_would_share_is_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in IDENTITIES:
        write(root / example(pattern)[1:])
    assert found_by_the_suite(root, monkeypatch) == sorted(example(one) for one in IDENTITIES)
    said = clean(root, *IDENTITIES, dry=True)
    assert found_by_the_suite(root, monkeypatch), "a dry run removes nothing"
    assert clean(root, *IDENTITIES) == said
    assert found_by_the_suite(root, monkeypatch) == []
    assert not (root / ISCSI).exists()


def test_files_of_credentials_are_found_and_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = [str(root / "root"), str(root / "home/admin")]
    monkeypatch.setattr(hygiene, "_homes", lambda: dict(enumerate(homes)))
    monkeypatch.setattr(hygiene, "SECRET_DIRS", ())
    monkeypatch.setattr(hygiene, "SETTINGS", ())
    listed = [one if one.startswith("~") else f"{root}{one}" for one in CREDENTIALS]
    monkeypatch.setattr(hygiene, "CREDENTIALS", listed)
    made = {
        str(write(Path(example(one.replace("~", home)))))
        for one in listed
        for home in (homes if one.startswith("~") else [""])
    }
    assert {row["path"] for row in hygiene.secrets()["found"]} == made
    clean(root, *CREDENTIALS)
    assert hygiene.secrets()["found"] == []
    assert not [path for path in made if Path(path).exists()]


def test_debian_makes_a_new_iscsi_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its startup-checks.sh does not start without the file, and makes a name where it says GenerateName."""
    write(root / "lib/open-iscsi/startup-checks.sh")
    write(root / ISCSI, "InitiatorName=iqn.1993-08.org.debian:01:abcdef\n")
    assert found_by_the_suite(root, monkeypatch) == [f"/{ISCSI}"]
    clean(root, *IDENTITIES)
    assert (root / ISCSI).read_text() == "GenerateName=yes\n"
    assert found_by_the_suite(root, monkeypatch) == []


def test_a_pattern_of_homes_is_removed_from_every_home(root: Path) -> None:
    files = [write(root / home / ".x/y") for home in ("root", "home/admin")]
    kept = write(root / "srv/.x/y")
    clean(root, "~/.x")
    assert [file.exists() for file in (*files, kept)] == [False, False, True]


def test_the_role_gives_the_script_the_lists_that_the_suite_reads() -> None:
    tasks = (ROLE / "tasks/install.yml").read_text()
    lists = {path.name for path in (ROLE / "files").glob("*.txt")} - {"settings-files.txt"}
    assert set(re.findall(r"[\w-]+\.txt", tasks)) == lists
