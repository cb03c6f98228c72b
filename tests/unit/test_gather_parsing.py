"""What tools print, as the facts have it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpukiln.probe import base, firmware, gather, libraries
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


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the only programs of a machine, each a shell script."""
    monkeypatch.setattr(base, "PATH", str(tmp_path))

    def program(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return program


def test_packages_of_debian(says: Callable[..., None]) -> None:
    says("dpkg", "exit 0")
    says(
        "dpkg-query", r"printf 'installed\tlibc6\t2.36-9\nconfig-files\tgone\t1\ninstalled\tnvtop\t3.0.1-1\n'"
    )
    says("apt-mark", r"printf 'nvtop\nlibc6:amd64\n'")
    assert gather.packages() == {
        "installed": {"libc6": "2.36-9", "nvtop": "3.0.1-1"},
        "holds": ["libc6", "nvtop"],
    }


def test_packages_of_rpm_have_every_version_of_a_kernel(says: Callable[..., None]) -> None:
    says("rpm", r"printf 'kernel\t6.1-2\nbash\t5.2-1\nkernel\t6.1-1\n'")
    says("dnf", r"printf 'kernel-6.1-1.*\n'")
    assert gather.packages() == {
        "installed": {"bash": "5.2-1", "kernel": "6.1-1, 6.1-2"},
        "holds": ["kernel"],
    }


def test_packages_that_can_not_be_listed_are_an_error(says: Callable[..., None]) -> None:
    says("rpm", "echo no database >&2; exit 1")
    with pytest.raises(RuntimeError, match="exit 1: no database"):
        gather.packages()


MODINFO = r"""
case "$2 $3" in
  "6.1 nvidia-current" | "6.1 nvidia-uvm" | "6.2 nvidia-current") ;;
  *) exit 1 ;;
esac
echo "filename: /lib/modules/$2/$3.ko"
echo "version:  535.309.01"
echo "vermagic: $2 SMP mod_unload"
case "$3" in nvidia-current) echo "firmware:       nvidia/535.309.01/gsp_tu10x.bin" ;; esac
"""


def test_modules_are_found_under_debians_name_and_under_nvidias(
    says: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    says("modinfo", MODINFO)
    monkeypatch.setattr(firmware, "FOLDERS", ())
    monkeypatch.setattr(gather, "kernel", lambda: {"installed": ["6.1", "6.2"]})
    found = gather.modules()
    assert found["6.1"]["nvidia"] == {
        "file": "/lib/modules/6.1/nvidia-current.ko",
        "version": "535.309.01",
        "vermagic": "6.1",
        "firmware": [
            {
                "name": "nvidia/535.309.01/gsp_tu10x.bin",
                "path": None,
                "size": None,
                "version": None,
                "others": [],
            }
        ],
    }
    assert found["6.1"]["nvidia_uvm"]["file"] == "/lib/modules/6.1/nvidia-uvm.ko"
    assert found["6.2"]["nvidia_uvm"] is None
    assert found["6.2"]["nvidia_modeset"] is None


def test_versions_of_the_drivers_user_space(
    says: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libcuda.so.535.309.01"
    library.touch()
    (tmp_path / "libcuda.so.1").symlink_to(library)
    says("nvidia-smi", "echo 'NVIDIA System Management Interface -- v535.309.01'")
    says("ldconfig", rf"printf '\tlibcuda.so.1 (libc6,x86-64) => {tmp_path}/libcuda.so.1\n'")
    monkeypatch.setattr(libraries, "LINKER_FILES", ())
    monkeypatch.setattr(libraries, "ENVIRONMENT_FILES", ())
    found = gather.driver()
    assert (found["nvidia_smi"]["rc"], found["nvidia_smi"]["version"]) == (0, "535.309.01")
    assert found["libraries"] == {"libnvidia-ml.so": [], "libcuda.so": ["535.309.01"]}
    assert found["persistenced"] is None


def test_every_copy_of_a_library_that_programs_load_is_found_with_what_leads_to_it(
    says: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's stubs have the name without a version, and ldconfig(8) links the soname to it."""
    lib, stubs, compat = (tmp_path / name for name in ("lib", "cuda/lib64/stubs", "cuda/compat"))
    for folder, file in (
        (lib, "libcuda.so.535.309.01"),
        (stubs, "libcuda.so"),
        (compat, "libcuda.so.550.54.15"),
    ):
        folder.mkdir(parents=True)
        (folder / file).touch()
        (folder / "libcuda.so.1").symlink_to(file)
    (tmp_path / "cuda.conf").write_text(f"# CUDA\n{stubs}  # to link\n")
    (tmp_path / "cuda.sh").write_text(
        f'# LD_LIBRARY_PATH=/none\nexport LD_LIBRARY_PATH="{compat}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
    )
    monkeypatch.setattr(libraries, "LINKER_FILES", (f"{tmp_path}/*.conf",))
    monkeypatch.setattr(libraries, "ENVIRONMENT_FILES", (f"{tmp_path}/*.sh", "/nonexistent"))
    rows = "".join(rf"\tlibcuda.so.1 (libc6,x86-64) => {folder}/libcuda.so.1\n" for folder in (stubs, lib))
    says("ldconfig", f"printf '{rows}'")
    says("nvidia-smi", "exit 1")
    found = gather.driver()
    assert found["library_files"]["libcuda.so"] == [
        {
            "path": f"{compat}/libcuda.so.1",
            "file": f"{compat}/libcuda.so.550.54.15",
            "version": "550.54.15",
            "stands_in": "compat",
            "named_in": [f"{tmp_path}/cuda.sh"],
        },
        {
            "path": f"{stubs}/libcuda.so.1",
            "file": f"{stubs}/libcuda.so",
            "version": None,
            "stands_in": "stub",
            "named_in": [f"{tmp_path}/cuda.conf"],
        },
        {
            "path": f"{lib}/libcuda.so.1",
            "file": f"{lib}/libcuda.so.535.309.01",
            "version": "535.309.01",
            "stands_in": None,
            "named_in": [],
        },
    ]
    assert found["libraries"] == {"libnvidia-ml.so": [], "libcuda.so": ["535.309.01"]}


@pytest.mark.parametrize(
    ("text", "data", "error"),
    [
        (None, None, "is missing"),
        ("{", None, "is not JSON: "),
        ("[]", None, "is not a JSON object"),
        ('{"schema": 1}', {"schema": 1}, None),
    ],
)
def test_a_record_is_read_or_named(
    text: str | None, data: object, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "read_evidence", lambda _: text)
    found = gather.record()
    assert found["data"] == data
    assert found["error"] is None if error is None else error in found["error"]


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "debian"),
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n', "debian"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n', "redhat"),
        ("ID=arch\n", ""),
    ],
)
def test_the_family_of_a_distribution(text: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "read", lambda _: text)
    assert gather.os_release()["family"] == family


def test_the_file_of_a_process_that_ends_meanwhile_is_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers ESRCH when what was opened is read."""
    with subprocess.Popen(["sleep", "60"]) as process, Path(f"/proc/{process.pid}/stat").open("rb") as file:
        process.kill()
        process.wait()
        monkeypatch.setattr(base, "open", lambda *_: file, raising=False)
        assert base.read(f"/proc/{process.pid}/stat") is None


@pytest.mark.parametrize(
    ("file", "image"),
    [
        ("boot/vmlinuz-6.1.0", True),
        ("lib/modules/6.1.0/vmlinuz", True),
        ("boot/0123abc/6.1.0/linux", True),
        ("boot/vmlinuz-6.1.0-1", False),
        ("boot/System.map-6.1.0", False),
    ],
)
def test_the_image_of_a_kernel(
    file: str, image: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.touch()
    real = gather.glob.glob
    monkeypatch.setattr(gather.glob, "glob", lambda pattern: real(f"{tmp_path}{pattern}"))
    assert gather.kernel_image("6.1.0") == (str(path) if image else None)
