"""Ubuntu keeps names of branches that lead to another one: the plan refuses them, by the archive's index."""

import gzip
import http.server
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from gpukiln.catalog.bases import base
from gpukiln.catalog.components import load_components
from gpukiln.errors import IncompatibleError, UnavailableError
from gpukiln.sources import ubuntu
from gpukiln.sources.decisions import Decision, Probes, decide_sources
from gpukiln.sources.ubuntu import DebPackage, Index, parse_index, read_archive

NAME = "nvidia-dkms-535-server"
REAL = """\
Package: nvidia-dkms-535-server
Architecture: amd64
Version: 535.309.01-0ubuntu0.22.04.1
Depends: dkms, libc6-dev, nvidia-kernel-source-535-server | nvidia-kernel-source-535-server-open
Description: NVIDIA DKMS package
"""
LEADS_ON = """\
Package: nvidia-dkms-535-server
Architecture: amd64
Version: 535.309.01-0ubuntu0.24.04.2
Depends: nvidia-dkms-580-server
Description: Transitional package for nvidia-dkms-580-server
"""


def index(*packages: DebPackage) -> Index:
    found: Index = {}
    for package in packages:
        found[package.name] = (*found.get(package.name, ()), package)
    return found


def driver(there: Index | None, release: str = "24.04") -> Decision:
    """What the plan decides about the driver on an Ubuntu whose archive has this."""
    [decision] = decide_sources(
        ["nvidia_driver"],
        load_components(),
        replace(base("ubuntu-22.04"), release=release, title=f"Ubuntu {release}"),
        architecture="x86_64",
        strict=True,
        probes=Probes(lambda _: None, lambda _: {}, lambda _: None, lambda *_: there),
    )
    return decision


def test_the_driver_of_its_branch_is_taken_with_its_full_version() -> None:
    found = driver(index(*parse_index(REAL)), "22.04")
    assert found.package_version == "535.309.01-0ubuntu0.22.04.1"
    assert found.source == "Ubuntu archive: nvidia-dkms-535-server"


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (parse_index(LEADS_ON)[0], "installs branch 580, by its dependencies"),
        (DebPackage(NAME, "580.126.20-0ubuntu0.26.04.1"), "installs branch 580, by its version"),
        (DebPackage(NAME, "535.309.01-1", "x", "Transitional package"), "its description says transitional"),
        (DebPackage(NAME, "535.309.01-1", "libnvidia-compute-580-server (= 580.1)"), "installs branch 580"),
        (
            DebPackage("libnvidia-compute-535-server", "535.309.01-1", "libnvidia-compute-580-server"),
            "libnvidia-compute-535-server 535.309.01-1 installs branch 580",
        ),
    ],
)
def test_a_name_that_leads_to_another_branch_is_refused(package: DebPackage, said: str) -> None:
    with pytest.raises(IncompatibleError, match=r"on Ubuntu 24\.04") as caught:
        driver(index(package))
    assert said in caught.value.message
    assert "--base" in caught.value.hint


def test_another_version_or_none_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"has nvidia-dkms-535-server 535\.288\.01-1"):
        driver(index(DebPackage(NAME, "535.288.01-1")))
    with pytest.raises(IncompatibleError, match="has no nvidia-dkms-535-server"):
        driver(index(DebPackage("nvidia-dkms-580-server", "580.1-1")))


def test_an_older_pocket_still_has_the_wanted_version() -> None:
    both = index(*parse_index(REAL), DebPackage(NAME, "535.400.01-0ubuntu0.22.04.1"))
    assert driver(both, "22.04").package_version == "535.309.01-0ubuntu0.22.04.1"


def test_where_nobody_asks_the_role_looks() -> None:
    assert "resolved at build time" in driver(None).source


def test_the_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pocket, text in (("", REAL), ("-security", REAL), ("-updates", LEADS_ON)):
        folder = tmp_path / f"dists/noble{pocket}/restricted/binary-amd64"
        folder.mkdir(parents=True)
        (folder / "Packages.gz").write_bytes(gzip.compress(f"{text}\n{text}".encode()))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    read_archive.cache_clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(ubuntu, "ARCHIVES", {"x86_64": root, "arm64": root})
        found = read_archive("24.04", "x86_64")
        assert found is not None
        with pytest.raises(IncompatibleError, match="installs branch 580"):
            driver(found)
        with pytest.raises(UnavailableError, match=r"arm64/Packages\.gz can't be read"):
            read_archive("24.04", "arm64")
        server.shutdown()
    assert read_archive("30.10", "x86_64") is None
