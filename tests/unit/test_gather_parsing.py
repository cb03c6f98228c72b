"""What tools print, as the facts have it."""

from pathlib import Path

import pytest

from gpukiln.probe import gather
from gpukiln.probe.gather import driver_version, startup_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Startup finished in 370ms (userspace) \ngraphical.target reached", 0.37),
        ("Startup finished in 4.1s (kernel) + 33.1s (userspace) = 37.2s \n", 37.2),
        ("Startup finished in 4.1s (kernel) + 1min 2.5s (userspace) = 1min 6.600s \n", 66.6),
        ("Bootup is not yet finished (org.freedesktop.systemd1.Manager...=0).", None),
    ],
)
def test_startup_time(text: str, seconds: float | None) -> None:
    assert startup_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVIDIA System Management Interface -- v535.309.01", "535.309.01"),
        ("nvidia-persistenced:  version 535.171.04", "535.171.04"),
        ("NVIDIA System Management Interface -- v565.77", "565.77"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", None),
    ],
)
def test_driver_version_of_a_tool_s_first_line(text: str, version: str | None) -> None:
    assert driver_version(text) == version


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (
            "nvidia-current/535.309.01, 6.1.0-44-cloud-amd64, x86_64: installed",
            ("nvidia-current", "535.309.01", "6.1.0-44-cloud-amd64", "installed"),
        ),
        (
            "nvidia, 535.288.01, 5.15.0-100-generic, x86_64: installed (WARNING! Diff)",
            ("nvidia", "535.288.01", "5.15.0-100-generic", "installed (WARNING! Diff)"),
        ),
        ("nvidia-current/535.309.01: added", ("nvidia-current", "535.309.01", None, "added")),
    ],
)
def test_dkms_status_is_understood(
    monkeypatch: pytest.MonkeyPatch, line: str, row: tuple[str | None, ...]
) -> None:
    monkeypatch.setattr(gather, "run", lambda *_argv, **_options: {"rc": 0, "out": line + "\n", "err": ""})
    assert [tuple(r.values()) for r in gather.dkms()["rows"]] == [row]


def test_compilers_are_found_under_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cc", "gcc-12", "x86_64-linux-gnu-gcc-12", "g++", "c++", "clang-16", "clang++", "tcc")
    for name in (*names, "gcc-ranlib-12", "ccache", "gcov", "cpp-12", "make"):
        (tmp_path / name).touch()
    (tmp_path / "gcc").symlink_to("gone")
    monkeypatch.setattr(gather, "FOLDERS", (str(tmp_path),))
    assert gather.compilers() == sorted(str(tmp_path / name) for name in names)
