"""The benchmark of builds: which rows, what is reached in words, and that its changes still fit this tree."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.bake import LATE_ROLE, ONE_MORE, PACKAGE, ROOT, Change, Gpukiln, main
from bench.hand import IMAGE, require_image, run
from bench.others import entries, release_of
from bench.rows import FLOOR, ROWS, Measured, VoidError, chosen, stopwatch, table, verdict

SOURCES = """\
Types: deb
URIs: https://mirror.example/debian-security
Suites: bookworm-security
Components: main contrib

Types: deb
URIs: https://mirror.example/debian
Suites: bookworm
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----
"""


def measured(**seconds: float) -> dict[str, Measured]:
    return {name.replace("_", "-"): Measured(value) for name, value in seconds.items()}


def test_a_row_brings_what_it_goes_on_from() -> None:
    assert chosen("package, floor") == [FLOOR, "cold", "package"]
    assert chosen("") == list(ROWS)
    with pytest.raises(ValueError, match="no row is called quick"):
        chosen("quick")


def test_every_row_is_held_against_rows_that_are_measured_too() -> None:
    order = list(ROWS)
    for name, row in ROWS.items():
        for other in (row.needs, row.mkosi, *row.at_most, *row.below):
            assert not other or order.index(other) < order.index(name), f"{name} before {other}"


@pytest.mark.parametrize(
    ("name", "done", "words"),
    [
        (
            "cold",
            measured(cold=100, mkosi_cold=100, floor=83),
            "<= 1 of mkosi-cold: reached; <= 1.2 of floor: not reached",
        ),
        ("cold", measured(cold=96, floor=80), "<= 1 of mkosi-cold: not measured; <= 1.2 of floor: reached"),
        ("every-role", measured(every_role=35, mkosi_cold=100), "<= 0.35 of mkosi-cold: reached"),
        ("every-role", measured(every_role=36, mkosi_cold=100), "<= 0.35 of mkosi-cold: not reached"),
        ("late-role", measured(late_role=20, mkosi_file=20), "< 1 of mkosi-file: not reached"),
        ("late-role", measured(late_role=19, mkosi_file=20), "< 1 of mkosi-file: reached"),
        ("package", measured(package=26, mkosi_package=100), "<= 0.25 of mkosi-package: not reached"),
        ("nothing", measured(nothing=1.4), "<= 1.5 s: reached"),
        ("nothing", measured(nothing=1.6), "<= 1.5 s: not reached"),
        ("dib-cold", measured(dib_cold=9), ""),
    ],
)
def test_what_is_reached_in_words(name: str, done: dict[str, Measured], words: str) -> None:
    assert verdict(name, done) == words


def test_a_table_has_what_was_measured_and_why_something_was_not() -> None:
    done = {FLOOR: Measured(200, 150.4), "cold": Measured(230, apart_s=90, note="from the stage driver")}
    lines = table([FLOOR, "mkosi-cold", "cold"], done, {"mkosi-cold": "not installed"}).splitlines()
    assert lines[2] == f"| floor | {ROWS[FLOOR].what} | 200.0 | 150 | 1.000 | - |  | - |"
    assert lines[3] == f"| mkosi-cold | {ROWS['mkosi-cold'].what} | void: not installed | | | | | |"
    assert lines[4].startswith(
        "| cold | gpukiln, nothing kept (from the stage driver) | 230.0 | - | 1.150 | - |"
    )
    assert lines[4].endswith("<= 1.2 of floor: reached | 90 |")
    assert len({line.count("|") for line in lines}) == 1


def test_processor_seconds_are_those_of_the_programs() -> None:
    with stopwatch() as result:
        subprocess.run(
            [sys.executable, "-c", "while __import__('time').process_time() < 0.2: pass"], check=True
        )
    assert result[0].cpu_s is not None
    assert 0.2 <= result[0].cpu_s <= result[0].seconds * 2


@pytest.mark.parametrize("change", [LATE_ROLE, PACKAGE])
def test_the_changes_fit_this_tree(change: Change, tmp_path: Path) -> None:
    copy = tmp_path / change.path
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / change.path, copy)
    change.apply(tmp_path)
    assert change.new in copy.read_text()
    with pytest.raises(VoidError, match="correct bench"):
        Change(change.path, "what nobody wrote", "").apply(tmp_path)


def test_the_package_that_is_added_is_not_there_before() -> None:
    assert ONE_MORE not in IMAGE


def test_a_build_that_fails_is_void_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    invoke = tmp_path / "bin/invoke"
    invoke.write_text("#!/bin/sh\necho no room left >&2\nexit 4\n")
    invoke.chmod(0o755)
    gpukiln = Gpukiln(tmp_path / "folder", tmp_path / "log")
    with pytest.raises(VoidError, match="ended with 4: no room left"):
        gpukiln.build()
    invoke.write_text("#!/bin/sh\necho '{\"built\": false}'\n")
    with pytest.raises(VoidError, match="nothing to do"):
        gpukiln.build()
    assert gpukiln.build(built=False)[0].seconds > 0
    assert (gpukiln.tree / "tasks.py").is_file()
    assert not (gpukiln.tree / ".venv").exists()


def test_a_tool_that_fails_is_void_without_credentials(tmp_path: Path) -> None:
    with pytest.raises(VoidError, match=r"sh ended with 3: E: https://mirror\.example .*log") as caught:
        run(tmp_path / "log", "sh", "-c", "echo E: https://me:secret@mirror.example; exit 3")
    assert "secret" not in str(caught.value)


def test_a_tool_that_is_missing_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("mkosi", "disk-image-create"):
        with pytest.raises(VoidError, match=f"{tool} is not installed: .*apt-get install"):
            release_of(tool)
    assert main(["--only", "mkosi-file"]) == 0
    printed = capsys.readouterr().out
    assert "| mkosi-cold | mkosi, nothing kept | void: mkosi is not installed" in printed
    assert "| mkosi-file | mkosi -i, one file changed | void: it goes on from mkosi-cold" in printed


def test_addresses_and_suites_of_a_sources_file() -> None:
    assert entries(SOURCES) == [
        ("https://mirror.example/debian-security", "bookworm-security"),
        ("https://mirror.example/debian", "bookworm"),
    ]


def test_an_image_without_module_or_initramfs_is_void(tmp_path: Path) -> None:
    with pytest.raises(VoidError, match="DKMS built no module"):
        require_image(tmp_path)
    module = tmp_path / "usr/lib/modules/6.1.0/updates/dkms/nvidia-current.ko.xz"
    module.parent.mkdir(parents=True)
    module.touch()
    (tmp_path / "lib").symlink_to("usr/lib")
    with pytest.raises(VoidError, match="no initramfs"):
        require_image(tmp_path)
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot/initrd.img-6.1.0").touch()
    require_image(tmp_path)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "bench").glob("[a-z]*.py")))
def test_every_benchmark_fits_the_package(name: str) -> None:
    assert importlib.import_module(f"bench.{name}")
