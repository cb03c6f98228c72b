"""The driver's role on systems with apt whose packages stand in: sources, branches, pins, holds and removal.

What is real and what stands in is said in standin/platforms.py.
"""

import errno
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.harness import Node
from tests.support.standin import packages
from tests.support.standin.driver import NEW, OLD, cuda_repository, drivers, module_field, module_version
from tests.support.standin.platforms import INSTALL_DRIVER, disguise, publish

pytestmark = pytest.mark.e2e

SIGNER = "gpukiln module signing key of"
FLAVOUR = "amd64"
DPKG = "dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\\n' '*nvidia*' '*cuda*' | grep ^.i"


@pytest.fixture(scope="module")
def ubuntu(here, key, tmp_path_factory):
    with Node(here, key, tmp_path_factory.mktemp("ubuntu")) as node:
        node.kernel = disguise(node, "ubuntu-22.04")
        listed = "deb [signed-by=/srv/ubuntu/gpgkey] file:/srv/ubuntu /\n"
        node.write("/etc/apt/sources.list.d/ubuntu.list", listed)
        cuda = [*packages.cuda_apt("535.288.01"), *packages.cuda_apt(OLD), *packages.cuda_apt(NEW)]
        node.fingerprint = publish(node, "/srv/cuda", cuda)
        yield node


def archive(node, *made):
    """What Ubuntu's archive has from now on."""
    publish(node, "/srv/ubuntu", made)
    node.read("sudo apt-get -q update")


def test_precompiled_modules_of_another_release_give_way_to_dkms(ubuntu):
    driver = packages.ubuntu_archive(OLD, "0ubuntu0.22.04.1", ubuntu.kernel, FLAVOUR, modules="535.288.01")
    archive(ubuntu, *driver)
    said = " ".join(ubuntu.converge(INSTALL_DRIVER).stdout.split())
    assert f"linux-modules-nvidia-535-server-{FLAVOUR} does not go with driver {OLD}: " in said
    assert "nvidia-kernel-common-535-server (<= 535.288.01-1)" in said
    assert drivers(ubuntu, DPKG) == {OLD}
    assert "linux-modules-nvidia" not in ubuntu.read(DPKG)
    assert module_version(ubuntu) == OLD


def test_ubuntu_prefers_canonicals_signed_modules(ubuntu):
    """Also where DKMS stood in for them."""
    versions = (OLD, "580.159.03")
    made = [packages.ubuntu_archive(one, "0ubuntu0.22.04.1", ubuntu.kernel, FLAVOUR) for one in versions]
    archive(ubuntu, *made[0], *made[1])
    ubuntu.converge(INSTALL_DRIVER)
    assert "nvidia-dkms" not in ubuntu.read(DPKG)
    assert "/kernel/nvidia-535-server/" in ubuntu.read(f"sudo modinfo -k {ubuntu.kernel} -n nvidia")
    assert drivers(ubuntu, DPKG) == {OLD}
    assert "linux-modules-nvidia-535-server-amd64" in ubuntu.read("apt-mark showhold")
    assert not ubuntu.read("ls -d /var/lib/dkms/nvidia 2>/dev/null || echo").strip()


def test_ubuntu_moves_to_another_branch_with_dkms(ubuntu):
    ubuntu.apply(
        INSTALL_DRIVER,
        nvidia_driver_branch=580,
        nvidia_driver_version="580.159.03",
        nvidia_driver_build="dkms",
    )
    assert drivers(ubuntu, DPKG) == {"580.159.03"}
    assert "linux-modules-nvidia" not in ubuntu.read(DPKG)
    assert module_version(ubuntu) == "580.159.03"


def test_nvidias_repository_gives_the_wanted_release_and_not_the_newest(ubuntu):
    # 580.159.03 is newer than both; of 535 the older of two releases
    ubuntu.converge(
        INSTALL_DRIVER,
        nvidia_driver_source="nvidia",
        nvidia_driver_version="535.288.01",
        nvidia_driver_repository=cuda_repository(ubuntu.fingerprint),
        nvidia_driver_fabric_manager="always",
    )
    assert drivers(ubuntu, DPKG) == {"535.288.01"}
    assert "nvidia-fabricmanager-535" in ubuntu.read("apt-mark showhold")
    assert ubuntu.read("systemctl is-enabled nvidia-fabricmanager").strip() == "enabled"


def test_open_modules_by_the_gpus(ubuntu):
    ubuntu.apply(
        INSTALL_DRIVER,
        nvidia_driver_source="nvidia",
        nvidia_driver_branch=580,
        nvidia_driver_modules="auto",
        nvidia_driver_gpus=["h100"],
        nvidia_driver_repository=cuda_repository(ubuntu.fingerprint),
    )
    assert drivers(ubuntu, DPKG) == {NEW}
    assert "nvidia-dkms-580-open" in ubuntu.read(DPKG)


def test_a_kernel_without_headers_is_named(ubuntu):
    ubuntu.read("sudo touch /boot/vmlinuz-5.0.0-1-old")
    variables = {
        "nvidia_driver_source": "nvidia",
        "nvidia_driver_branch": 580,
        "nvidia_driver_modules": "open",
        "nvidia_driver_repository": cuda_repository(ubuntu.fingerprint),
    }
    said = ubuntu.refused(INSTALL_DRIVER, **variables)
    assert "Kernel 5.0.0-1-old: found module nvidia in version none, wanted 580.178.04" in said
    assert "linux-headers-RELEASE" in said
    ubuntu.read("sudo rm -f /boot/*5.0.0-1-old")


def test_what_was_built_unsigned_is_signed(ubuntu):
    assert module_field(ubuntu, "signer") != SIGNER
    ubuntu.converge(
        INSTALL_DRIVER,
        nvidia_driver_source="nvidia",
        nvidia_driver_branch=580,
        nvidia_driver_modules="open",
        nvidia_driver_repository=cuda_repository(ubuntu.fingerprint),
        nvidia_driver_sign=True,
        nvidia_driver_certificate_dir=str(ubuntu.folder),
    )
    assert module_field(ubuntu, "signer").startswith(SIGNER)
    [certificate] = ubuntu.folder.glob("*.der")
    read = ["openssl", "x509", "-inform", "DER", "-noout", "-serial", "-in", certificate]
    serial = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    number = serial.strip().partition("=")[2]
    assert module_field(ubuntu, "sig_key").replace(":", "") == number


@pytest.mark.parametrize("place", ["", "/run/gpukiln-signing/module.key"], ids=["node", "image"])
def test_a_given_pair_takes_the_place_of_the_one_before(ubuntu, place):
    """In an image the key is in memory only: a snapshot gives away what its disk once held."""
    pair = {"key": str(ubuntu.folder / "given.priv"), "certificate": str(ubuntu.folder / "given.der")}
    name = f"the fleet's key in {'memory' if place else 'a file'}"
    subject = ["-subj", f"/CN={name}", "-outform", "DER", "-out", pair["certificate"]]
    make = ["openssl", "req", "-new", "-x509", "-nodes", "-newkey", "rsa:2048", "-keyout", pair["key"]]
    subprocess.run([*make, *subject], check=True, capture_output=True)
    run = ubuntu.converge if place else ubuntu.apply
    run(
        INSTALL_DRIVER,
        nvidia_driver_source="nvidia",
        nvidia_driver_branch=580,
        nvidia_driver_modules="open",
        nvidia_driver_repository=cuda_repository(ubuntu.fingerprint),
        nvidia_driver_sign=True,
        nvidia_driver_signing_key=pair["key"],
        nvidia_driver_signing_certificate=pair["certificate"],
        **({"nvidia_driver_private_key": place} if place else {}),
    )
    assert module_field(ubuntu, "signer") == name
    ubuntu.read("sudo sync")
    disk = ubuntu.here.root_disk(ubuntu.instance)
    key = Path(pair["key"]).read_bytes().splitlines()[1]
    assert is_in(disk, name.encode())
    assert is_in(disk, key) is not bool(place)


def is_in(disk, wanted):
    """Whether some bytes are anywhere on a sparse disk, in a file or not."""
    with disk.open("rb") as file:
        position, tail = 0, b""
        while True:
            try:
                position = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole is left
                    return False
                raise
            found = os.pread(file.fileno(), 1 << 20, position)
            if wanted in tail + found:
                return True
            position, tail = position + len(found), found[-len(wanted) :]


def test_a_key_with_another_fingerprint_is_refused(ubuntu):
    repository = cuda_repository(ubuntu.fingerprint)
    repository["apt"]["key_fingerprint"] = "0" * 40
    said = ubuntu.refused(
        INSTALL_DRIVER,
        nvidia_driver_source="nvidia",
        nvidia_driver_branch=580,
        nvidia_driver_repository=repository,
    )
    assert ubuntu.fingerprint in said
    assert "wanted " + "0" * 40 in said


def test_the_removal_leaves_nothing(ubuntu):
    ubuntu.apply(INSTALL_DRIVER, nvidia_driver_state="absent")
    assert ubuntu.ssh(DPKG).stdout == ""
    assert ubuntu.read("apt-mark showhold") == ""
    assert ubuntu.read("ls /etc/modprobe.d /etc/apt/preferences.d | grep -c gpukiln || true").strip() == "0"


def test_nvidias_installer_comes_with_its_checksum_and_goes_again(ubuntu):
    file = ubuntu.folder / "driver.run"
    file.write_text(packages.runfile(NEW))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    variables = {
        "nvidia_driver_source": "runfile",
        "nvidia_driver_branch": 580,
        "nvidia_driver_runfile": str(file),
    }
    said = ubuntu.refused(INSTALL_DRIVER, **variables, nvidia_driver_runfile_sha256="0" * 64)
    assert f"Found SHA-256 {digest}" in said
    assert ubuntu.ssh("ls /usr/bin/nvidia-uninstall").returncode != 0

    ubuntu.converge(INSTALL_DRIVER, **variables, nvidia_driver_runfile_sha256=digest)
    assert module_version(ubuntu) == NEW

    ubuntu.apply(INSTALL_DRIVER, nvidia_driver_state="absent")
    assert ubuntu.ssh("ls /usr/bin/nvidia-uninstall").returncode != 0


def test_a_transitional_package_fails_before_anything_is_installed(ubuntu):
    kernel = disguise(ubuntu, "ubuntu-24.04")
    driver = packages.ubuntu_archive("580.173.02", "0ubuntu0.24.04.1", kernel, FLAVOUR)
    archive(ubuntu, *driver, *packages.ubuntu_transitional(OLD, "0ubuntu0.24.04.2", "580"))
    said = ubuntu.refused(INSTALL_DRIVER, nvidia_driver_build="dkms")
    assert "Found that apt would install" in said
    assert "580.173.02" in said
    assert ubuntu.ssh(DPKG).stdout == ""


def test_a_purged_kernel_leaves_what_its_updates_come_by(ubuntu):
    """The modules are there for a newer kernel than the base's; the last of this machine's tests."""
    newer = "6.1.999-1-amd64"
    names = [f"linux-{FLAVOUR}", f"linux-image-{FLAVOUR}", f"linux-headers-{FLAVOUR}"]
    ask = f"dpkg-query -W -f '${{db:Status-Status}} ${{Version}}\\n' {' '.join(names)}"
    driver = packages.ubuntu_archive("580.173.02", "0ubuntu0.24.04.1", newer, FLAVOUR)
    driver.append(packages.ubuntu_image(newer))
    archive(ubuntu, *driver, *packages.ubuntu_kernel(ubuntu.kernel, FLAVOUR, "9.1"))
    # Debian's own package is one of them, and held.
    older = " ".join(f"{name}=9.1" for name in names)
    ubuntu.read(f"sudo apt-get -qy --allow-change-held-packages install {older}")
    variables = {
        "nvidia_driver_branch": 580,
        "nvidia_driver_version": "580.173.02",
        "nvidia_driver_purge_other_kernels": True,
        "nvidia_driver_upgrade_kernel": True,
    }
    said = " ".join(ubuntu.apply(INSTALL_DRIVER, **variables).stdout.split())
    assert f"which linux-{FLAVOUR}, linux-image-{FLAVOUR} still wants. DKMS compiles" in said
    assert ubuntu.read(ask).split() == ["installed", "9.1"] * 3
    assert set(names) <= set(ubuntu.read("apt-mark showhold").split())

    archive(ubuntu, *driver, *packages.ubuntu_kernel(newer, FLAVOUR, "9.2"))
    ubuntu.converge(INSTALL_DRIVER, **variables)
    assert ubuntu.read("ls /boot/vmlinuz-*").split() == [f"/boot/vmlinuz-{newer}"]
    assert ubuntu.read(ask).split() == ["installed", "9.2"] * 3
    assert "nvidia-dkms" not in ubuntu.read(DPKG)
    assert set(names) <= set(ubuntu.read("apt-mark showhold").split())
