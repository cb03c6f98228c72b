"""The metadata of an rpm repository, read from one that these tests make."""

import gzip
import hashlib
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from gpukiln.errors import UnavailableError
from gpukiln.sources.rpm import read_metadata

PACKAGE = '<package type="rpm"><name>{name}</name><version epoch="3" ver="{ver}" rel="{rel}"/></package>'
PRIMARY = '<metadata xmlns="http://linux.duke.edu/metadata/common" packages="3">{packages}</metadata>'
DATA = (
    '<data type="{kind}"><checksum type="sha256">{digest}</checksum><location href="repodata/{name}"/></data>'
)
REPOMD = '<repomd xmlns="http://linux.duke.edu/metadata/repo">{data}</repomd>'
MODULES = """\
---
document: modulemd
version: 2
data: {name: nvidia-driver, stream: 580-dkms, version: 20260101}
...
---
document: modulemd
version: 2
data: {name: nvidia-driver, stream: 580-open, version: 20260101}
...
---
document: modulemd-defaults
version: 1
data: {module: nvidia-driver, stream: latest-dkms}
"""
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": bytes,
}


def repository(folder: Path, packed: str = ".gz", *, broken: str = "", modules: str = MODULES) -> str:
    rows = [("kmod", "580.1", "1"), ("kmod", "580.1", "2"), ("kmod", "595", "1.el9")]
    packages = "".join(PACKAGE.format(name=name, ver=ver, rel=rel) for name, ver, rel in rows)
    (folder / "repodata").mkdir()
    data = ""
    for kind, end, text in (
        ("primary", "xml", PRIMARY.format(packages=packages)),
        ("modules", "yaml", modules),
        ("other", "xml", "not read"),
    ):
        content = PACKED[packed](text.encode())
        name = f"{kind}.{end}{packed}"
        data += DATA.format(kind=kind, name=name, digest=hashlib.sha256(content).hexdigest())
        (folder / "repodata" / name).write_bytes(content + (b"more" if kind == broken else b""))
    (folder / "repodata/repomd.xml").write_text(REPOMD.format(data=data))
    return folder.as_uri()


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_packages_and_streams_are_read(tmp_path: Path, packed: str) -> None:
    found = read_metadata(f"{repository(tmp_path, packed)}/")
    assert found is not None
    assert found.versions == {"kmod": {"580.1-1", "580.1-2", "595-1.el9"}}
    assert found.streams == {"nvidia-driver": {"580-dkms", "580-open"}}


def test_what_can_not_be_unpacked_is_left_to_the_build(tmp_path: Path) -> None:
    assert read_metadata(repository(tmp_path, ".zst")) is None


def test_a_file_that_is_another_one_is_an_error(tmp_path: Path) -> None:
    address = repository(tmp_path, broken="primary")
    with pytest.raises(
        UnavailableError, match=r"primary\.xml\.gz has the sha256 [0-9a-f]{64}, wanted [0-9a-f]{64}"
    ):
        read_metadata(address)


def test_a_broken_list_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    (tmp_path / "repodata").mkdir()
    with pytest.raises(UnavailableError, match=r"repomd\.xml can't be read"):
        read_metadata(tmp_path.as_uri())
    (tmp_path / "repodata/repomd.xml").write_text("<repomd>")
    with pytest.raises(UnavailableError, match=r"damaged repomd\.xml"):
        read_metadata(tmp_path.as_uri())


def test_a_broken_list_of_modules_is_an_error(tmp_path: Path) -> None:
    address = repository(tmp_path, modules="document: modulemd\ndata: {name: nvidia-driver}\n")
    with pytest.raises(UnavailableError, match="damaged list of modules: 'stream'"):
        read_metadata(address)


def test_credentials_are_not_shown() -> None:
    with pytest.raises(UnavailableError) as caught:
        read_metadata("http://me:secret@127.0.0.1:9/x")
    assert "secret" not in str(caught.value)
