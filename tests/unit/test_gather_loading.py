"""What modprobe would load, as the real kmod says it, and what an initramfs carries."""

import gzip
import lzma
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpukiln.probe import loading

KERNEL = "6.1.0-44-amd64"
GPU = "pci:v000010DEd*sv*sd*bc03sc02i00*"  # an alias of NVIDIA's module
# What Debian's nvidia-alternative has in /etc/modprobe.d/nvidia.conf, for two of the modules.
DEBIAN = """\
install nvidia modprobe -i nvidia-current $CMDLINE_OPTS
install nvidia-uvm modprobe nvidia ; modprobe -i nvidia-current-uvm $CMDLINE_OPTS
remove nvidia modprobe -r -i nvidia-drm nvidia-modeset nvidia-uvm nvidia
"""

needs_kmod = pytest.mark.skipif(not shutil.which("depmod"), reason="no kmod here")


def module(version: str, *aliases: str) -> bytes:
    """A relocatable ELF file that has the two sections which depmod and modinfo read."""
    rows = [
        f"version={version}",
        *(f"alias={alias}" for alias in aliases),
        "depends=",
        f"vermagic={KERNEL} SMP",
    ]
    info = b"".join(row.encode() + b"\0" for row in ["srcversion=1234", *rows])
    names = b"\0.modinfo\0.shstrtab\0.symtab\0.strtab\0"
    symbols = b"\0" * 24
    parts = [(1, 1, info, 0), (10, 3, names, 0), (20, 2, symbols, 4), (28, 3, b"\0", 0)]
    body, sections, offset = b"", b"\0" * 64, 64
    for name, kind, data, link in parts:
        size = 24 if kind == 2 else 0
        sections += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, len(data), link, 1, 8, size)
        body += data + b"\0" * (-len(data) % 8)
        offset = 64 + len(body)
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, offset, 0, 64, 0, 0, 64, 5, 2)
    return head + body + sections


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a kernel's tree and modprobe's configuration, and has the real kmod read them."""
    root, conf = tmp_path / "root", tmp_path / "modprobe.d"

    def make(files: dict[str, bytes], config: str = "") -> None:
        folder = root / "lib/modules" / KERNEL
        (folder / "kernel").mkdir(parents=True)
        conf.mkdir()
        (conf / "a.conf").write_text(config)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)
        (folder / "modules.builtin").touch()
        (folder / "modules.order").touch()
        subprocess.run(["depmod", "-b", root, KERNEL], check=True, capture_output=True)

    def ask(*argv: str, **_: object) -> dict[str, object]:
        where = ["-d", str(root), "-C", str(conf)] if argv[0] == "modprobe" else []
        done = subprocess.run([argv[0], *where, *argv[1:]], capture_output=True, text=True, check=False)
        return {"rc": done.returncode, "out": done.stdout, "err": done.stderr.strip()}

    monkeypatch.setattr(loading, "run", ask)
    monkeypatch.setattr(loading, "check_output", lambda *argv: ask(*argv)["out"])
    monkeypatch.setattr(loading, "TREES", str(root / "lib/modules"))
    monkeypatch.setattr(loading, "bus_gpus", list)
    return make


def names(answer: dict[str, list[str]]) -> list[str]:
    return [Path(file).name for file in answer["files"]]


HEALTHY = {
    "updates/dkms/nvidia.ko": module("535.309.01", GPU),
    "updates/dkms/nvidia-uvm.ko": module("535.309.01"),
    "updates/dkms/nvidia-modeset.ko": module("535.309.01"),
}


@needs_kmod
def test_what_a_healthy_kernel_loads(tree: Callable[..., None]) -> None:
    nouveau = {"kernel/nouveau.ko": module("1", "pci:v000010DEd*sv*sd*bc03sc*i*")}
    tree({**HEALTHY, **nouveau}, "blacklist nouveau\n")
    found = loading.loading()
    assert found["modalias"] == loading.MODALIAS
    assert {name: names(answer) for name, answer in found["kernels"][KERNEL].items()} == {
        "nvidia": ["nvidia.ko"],
        "nvidia_uvm": ["nvidia-uvm.ko"],
        "nvidia_modeset": ["nvidia-modeset.ko"],
        "gpu": ["nvidia.ko"],
    }
    assert found["copies"] == {KERNEL: {}}
    assert "nouveau" in found["blacklist"]


@needs_kmod
@pytest.mark.parametrize(
    ("config", "files", "commands"),
    [
        ("install nvidia /bin/false", [], ["/bin/false"]),
        ("alias nvidia off", [], []),
        ("blacklist nvidia", ["nvidia.ko"], []),
        ("install nvidia /sbin/modprobe -q --ignore-install nvidia && /sbin/modprobe nvidia-uvm", None, []),
    ],
)
def test_what_modprobe_s_configuration_makes_of_it(
    tree: Callable[..., None], config: str, files: list[str] | None, commands: list[str]
) -> None:
    tree(HEALTHY, config + "\n")
    found = loading.loading()["kernels"][KERNEL]["nvidia"]
    assert names(found) == (["nvidia.ko", "nvidia-uvm.ko"] if files is None else files)
    assert (found["commands"], found["error"]) == (commands, None)


@needs_kmod
def test_debian_s_rules_are_followed_to_the_module_that_they_load(tree: Callable[..., None]) -> None:
    current = {name.replace("nvidia", "nvidia-current"): text for name, text in HEALTHY.items()}
    tree(current, DEBIAN)
    found = loading.loading()["kernels"][KERNEL]
    assert names(found["nvidia"]) == ["nvidia-current.ko"]
    assert names(found["nvidia_uvm"]) == ["nvidia-current.ko", "nvidia-current-uvm.ko"]
    assert "not found" in found["nvidia_modeset"]["error"]  # the rule for it was left out above
    assert names(found["gpu"]) == ["nvidia-current.ko"]


@needs_kmod
def test_every_copy_of_a_module_has_its_version(tree: Callable[..., None]) -> None:
    """depmod.d(5): `updates` comes before the rest, whatever is newer."""
    tree({**HEALTHY, "extra/nvidia.ko": module("535.261.03", GPU)}, "softdep nvidia pre: vfio-pci\n")
    found = loading.loading()
    assert names(found["kernels"][KERNEL]["nvidia"]) == ["nvidia.ko"]
    assert [(Path(one["file"]).parent.name, one["version"]) for one in found["copies"][KERNEL]["nvidia"]] == [
        ("extra", "535.261.03"),
        ("dkms", "535.309.01"),
    ]
    assert list(found["copies"][KERNEL]) == ["nvidia"]
    assert found["softdeps"] == ["nvidia pre: vfio-pci"]


@needs_kmod
def test_devices_that_are_given_to_virtual_machines_and_a_rival(tree: Callable[..., None]) -> None:
    nova = {"kernel/nova_core.ko": module("1", "pci:v000010DEd*sv*sd*bc03sc*i*")}
    tree({**HEALTHY, **nova}, "options vfio-pci ids=10de:1eb8,10DE:10F8 disable_vga=1\n")
    found = loading.loading()
    assert found["vfio_ids"] == ["10de:1eb8", "10de:10f8"]
    assert "nova_core.ko" in names(found["kernels"][KERNEL]["gpu"])


def test_options_of_kernels_that_keep_modules_from_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grub.cfg").write_text(
        "linux /boot/vmlinuz-6.1 root=/dev/vda1 ro module_blacklist=nouveau,nvidia "
        "rd.driver.blacklist=nvidia\nlinux /boot/vmlinuz-6.1 single modprobe.blacklist=nvidia_uvm "
        "vfio-pci.ids=10de:1eb8 quiet\n"
    )
    (tmp_path / "grubenv").write_text("kernelopts=module_blacklist=nvidia ro\n")
    monkeypatch.setattr(loading, "BOOT_FILES", (f"{tmp_path}/grub*",))
    monkeypatch.setattr(loading, "in_container", lambda: True)
    assert loading.boot_options() == {
        f"{tmp_path}/grub.cfg": {
            "module_blacklist": ["nouveau", "nvidia"],
            "modprobe.blacklist": ["nvidia_uvm"],
            "vfio-pci.ids": ["10de:1eb8"],
        },
        f"{tmp_path}/grubenv": {"module_blacklist": ["nvidia"]},
    }


def archive(files: dict[str, bytes]) -> bytes:
    """An archive of cpio in the format newc, as the kernel's buffer-format.rst describes it."""
    text = b""
    for name, data in [*files.items(), ("TRAILER!!!", b"")]:
        fields = [0, 0o100644, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        entry = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        text += entry + b"\0" * (-len(entry) % 4) + data + b"\0" * (-len(data) % 4)
    return text + b"\0" * (-len(text) % 512)


MICROCODE = archive({"kernel/x86/microcode/GenuineIntel.bin": b"\1" * 777})


@pytest.mark.parametrize(
    "image",
    [
        lambda main: MICROCODE + gzip.compress(main),
        lambda main: MICROCODE + MICROCODE + lzma.compress(main),
        lambda main: main,
    ],
    ids=["microcode and gzip", "two and xz", "not compressed"],
)
def test_the_driver_s_modules_in_an_initramfs(image: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder = f"usr/lib/modules/{KERNEL}"
    main = archive(
        {
            "init": b"#!/bin/sh\n",
            f"{folder}/nvidia.ko": module("535.261.03"),
            f"{folder}/nvidia-uvm.ko.xz": lzma.compress(module("535.261.03")),
            f"{folder}/nvidia-drm.ko.gz": b"no gzip",
            f"{folder}/nvidiafb.ko": b"no version",
            "etc/modprobe.d/nvidia.conf": b"version=1.2\0",
        }
    )
    path = tmp_path / "initrd.img"
    path.write_bytes(image(main))
    assert loading.modules_in(str(path)) == {
        f"{folder}/nvidia.ko": "535.261.03",
        f"{folder}/nvidia-uvm.ko.xz": "535.261.03",
        f"{folder}/nvidia-drm.ko.gz": None,
    }


def test_an_initramfs_that_is_cut_off_or_none_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "initrd.img"
    path.write_bytes(MICROCODE + archive({"lib/nvidia.ko": module("1.2")})[:100])
    assert loading.modules_in(str(path)) == {}
    path.write_bytes(b"no initramfs")
    assert loading.modules_in(str(path)) == {}
