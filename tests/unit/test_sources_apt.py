"""This machine's Debian mirror: its address, and the versions it has."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukiln.errors import UnavailableError
from gpukiln.sources import apt

POLICY = """\
nvidia-kernel-dkms:
  Installed: (none)
  Candidate: 535.309.01-0+deb12u1
  Version table:
     535.309.01-0+deb12u1 500
        500 http://mirror.test/debian-security bookworm-security/non-free amd64 Packages
     535.261.03-1 500
        500 http://mirror.test/debian bookworm/non-free amd64 Packages
nowhere:
  Installed: (none)
  Candidate: (none)
  Version table:
"""

ONE_LINE = """\
# the archive
deb http://mirror.test/debian bookworm main
deb [signed-by=/k.gpg arch=amd64] https://me:secret@mirror.test/debian-security bookworm-security main  # x
deb-src http://mirror.test/debian bookworm main
deb https://elsewhere.test/apt cloud-sdk-bookworm main
"""

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.test/debian
Suites: trixie trixie-updates trixie-backports
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Types: deb deb-src
URIs: http://mirror.test/debian-security
Suites: trixie-security
Components: main

Enabled: no
Types: deb
URIs: http://off.test/debian
Suites: trixie
Components: main
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_one_line_sources(etc: Path) -> None:
    (etc / "sources.list").write_text(ONE_LINE)
    assert apt.debian_sources(etc=etc) == (
        "Types: deb\nURIs: http://mirror.test/debian\nSuites: bookworm\n"
        "Components: main contrib non-free non-free-firmware\n"
        "\n"
        "Types: deb\nURIs: https://me:secret@mirror.test/debian-security\nSuites: bookworm-security\n"
        "Components: main contrib non-free non-free-firmware\nSigned-By: /k.gpg\n"
    )


def test_deb822_sources_of_another_release(etc: Path) -> None:
    (etc / "sources.list.d/debian.sources").write_text(DEB822)
    text = apt.debian_sources(etc=etc)
    assert [line for line in text.splitlines() if line.startswith("Suites")] == [
        "Suites: bookworm",
        "Suites: bookworm-updates",
        "Suites: bookworm-security",
    ]
    assert "off.test" not in text
    assert text.count("Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n") == 2


def test_the_same_entry_twice_is_one(etc: Path) -> None:
    for name in ("a.list", "b.list"):
        (etc / "sources.list.d" / name).write_text("deb http://mirror.test/debian bookworm main\n")
    assert apt.debian_sources(etc=etc).count("URIs") == 1


@pytest.mark.parametrize("text", ["", "deb http://archive.test/ubuntu jammy main\n"])
def test_a_machine_without_debian_is_told(etc: Path, text: str) -> None:
    (etc / "sources.list").write_text(text)
    with pytest.raises(UnavailableError, match="no Debian archive found"):
        apt.debian_sources(etc=etc)


def test_credentials_are_not_shown() -> None:
    shown = apt.strip_credentials("E: Failed to fetch https://me:secret@host/x and http://host/a@b")
    assert shown == "E: Failed to fetch https://host/x and http://host/a@b"


def test_policy() -> None:
    assert apt.parse_policy(POLICY) == {"nvidia-kernel-dkms": "535.309.01-0+deb12u1"}


@pytest.mark.parametrize(
    ("version", "upstream"),
    [
        ("535.309.01-0+deb12u1", "535.309.01"),
        ("535.309.01-1~deb12u1", "535.309.01"),
        ("1:2.3-4-5", "2.3-4"),
        ("20.10.24+dfsg1-1+deb12u1+b6", "20.10.24+dfsg1"),
        ("3.0", "3.0"),
    ],
)
def test_upstream_version(version: str, upstream: str) -> None:
    assert apt.upstream_version(version) == upstream


def test_no_apt_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="found no apt-get"):
        apt.candidate_versions(["x"], cache=tmp_path)


needs_apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="no apt on this machine")


@pytest.fixture
def archive() -> Iterator[Path]:
    """A flat repository that apt's own user can read, which pytest's folders are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def publish(archive: Path, version: str) -> str:
    (archive / "Packages").write_text(
        f"Package: nvtop\nVersion: {version}\nArchitecture: amd64\nMaintainer: a <a@b.test>\n"
        f"Filename: ./nvtop.deb\nSize: 1\nSHA256: {'0' * 64}\nDescription: x\n"
    )
    # copy:, as file: makes apt's list a link to this file, so that nothing would be kept
    return f"Types: deb\nURIs: copy:{archive}\nSuites: ./\nTrusted: yes\n"


@needs_apt
def test_candidates_come_from_the_archive_and_lists_are_kept_for_an_hour(archive: Path) -> None:
    sources, cache = publish(archive, "3.0.1-1"), archive / "cache"
    assert apt.candidate_versions(["nvtop", "none"], cache=cache, sources=sources) == {"nvtop": "3.0.1-1"}
    publish(archive, "3.0.2-1")
    os.utime(archive / "Packages", (time.time() + 5,) * 2)
    assert apt.candidate_versions(["nvtop"], cache=cache, sources=sources) == {"nvtop": "3.0.1-1"}
    found = apt.candidate_versions(["nvtop"], cache=cache, sources=sources, refresh=True)
    assert found == {"nvtop": "3.0.2-1"}


@needs_apt
def test_apt_reads_its_lists_once(archive: Path) -> None:
    """It makes its cache anew when what it was made of has another time."""
    sources, cache = publish(archive, "3.0.1-1"), archive / "cache"

    def times() -> list[int]:
        assert apt.candidate_versions(["nvtop"], cache=cache, sources=sources) == {"nvtop": "3.0.1-1"}
        made = [cache / name for name in ("status", "archive.sources", "pkgcache.bin")]
        return [file.stat().st_mtime_ns for file in made]

    assert times() == times()


@needs_apt
def test_files_that_may_hold_credentials_are_private(archive: Path) -> None:
    apt.candidate_versions(["nvtop"], cache=archive / "cache", sources=publish(archive, "1-1"))
    for name in ("archive.sources", "apt.conf"):
        assert (archive / "cache" / name).stat().st_mode & 0o077 == 0


@needs_apt
def test_a_mirror_that_can_not_be_reached_is_told_without_its_password(archive: Path) -> None:
    sources = "Types: deb\nURIs: http://me:secret@127.0.0.1:9/debian\nSuites: bookworm\nComponents: main\n"
    with pytest.raises(UnavailableError, match="the Debian mirror can't be used") as caught:
        apt.candidate_versions(["nvtop"], cache=archive / "cache", sources=sources)
    assert "secret" not in "\n".join([caught.value.message, *caught.value.details])
    assert not (archive / "cache/fetched").exists()
