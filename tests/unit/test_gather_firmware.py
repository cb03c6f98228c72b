"""The firmware that a module names is looked for as the kernel does."""

import struct
from pathlib import Path

import pytest

from gpukiln.probe import firmware

NAME = "nvidia/535.309.01/gsp_ga10x.bin"


def gsp(version: str) -> bytes:
    """An ELF file with the section .fwversion, as NVIDIA's GSP firmware is one."""
    names, text = b"\0.fwversion\0.shstrtab\0", version.encode() + b"\0"
    sections = [(0, 0, 0, 0), (1, 1, 64, len(text)), (12, 3, 64 + len(text), len(names))]
    start = 64 + len(text) + len(names)
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head += struct.pack("<HHIQQQIHHHHHH", 0, 243, 1, 0, 0, start, 0, 64, 0, 0, 64, 3, 2)
    rows = (struct.pack("<IIQQQQIIQQ", n, kind, 0, 0, at, size, 0, 0, 1, 0) for n, kind, at, size in sections)
    return head + text + names + b"".join(rows)


@pytest.fixture
def lib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(firmware, "CUSTOM", str(tmp_path / "no-parameter"))
    monkeypatch.setattr(firmware, "FOLDERS", tuple(f"{tmp_path}{folder}" for folder in firmware.FOLDERS))
    return tmp_path / "lib/firmware"


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def find() -> dict[str, object]:
    [found] = firmware.firmware("6.1.0", [NAME])
    assert found.pop("name") == NAME
    return found


def test_a_file_and_the_version_that_it_says(lib: Path) -> None:
    path = write(lib / NAME, gsp("535.309.01"))
    size = path.stat().st_size
    assert find() == {"path": str(path), "size": size, "version": "535.309.01", "others": ["535.309.01"]}
    write(path, gsp("535.261.03"))
    assert find()["version"] == "535.261.03"


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", gsp("1")[:-70], b"\x7fELF\x02" + b"\xff" * 59, b"text" * 40]
)
def test_a_file_that_says_no_version(lib: Path, data: bytes) -> None:
    write(lib / NAME, data)
    assert (find()["size"], find()["version"]) == (len(data), None)


def test_a_file_that_is_missing_and_those_of_other_drivers(lib: Path) -> None:
    assert find() == {"path": None, "size": None, "version": None, "others": []}
    write(lib / "nvidia/535.261.03/gsp_ga10x.bin", b"x")
    write(lib / "nvidia/ga102/gsp/gsp-5.bin", b"nouveau's")
    assert find() == {"path": None, "size": None, "version": None, "others": ["535.261.03"]}


def test_the_kernel_s_order_of_folders_and_suffixes(
    lib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed files come last; what an administrator put into a folder of the kernel's parameter comes "
    "first."""
    for place in (f"{NAME}.xz", NAME, f"6.1.0/{NAME}", f"updates/{NAME}"):
        path = write(lib / place, b"x")
        assert find()["path"] == str(path)
    write(lib / f"updates/{NAME}.zst", b"x")
    assert find()["path"] == str(lib / "updates" / NAME)
    (tmp_path / "parameter").write_text(f"{tmp_path}/custom\n")
    monkeypatch.setattr(firmware, "CUSTOM", str(tmp_path / "parameter"))
    assert find()["path"] == str(lib / "updates" / NAME)
    assert find()["path"] != write(tmp_path / "custom" / NAME, b"x")
    assert find()["path"] == str(tmp_path / "custom" / NAME)
