"""The driver's role on systems with dnf whose packages stand in: streams, branches, locks and removal.

What is real and what stands in is said in standin/platforms.py.
"""

from contextlib import contextmanager

import pytest

from tests.support.harness import Node
from tests.support.standin import packages
from tests.support.standin.driver import NEW, OLD, cuda_repository, drivers, module_version
from tests.support.standin.platforms import (
    CUDAS_DKMS,
    EPEL,
    INSTALL_DRIVER,
    NEWER_KERNEL,
    RELEASES,
    disguise,
    package,
    publish,
)

pytestmark = pytest.mark.e2e

RPM = "rpm -qa --qf '%{name} %{version}\\n' | grep -i nvidia"


@contextmanager
def rpm_machine(here, key, image, folder, platform, streams):
    with Node(here, key, folder, image) as node:
        disguise(node, platform)
        made, modules = packages.cuda_rpm(streams)
        if platform == "rocky-9":
            found = [package(one) for one in EPEL]
            node.epel = publish(node, "/srv/epel", found, kind="rpm")
        else:
            made.append(package(CUDAS_DKMS))
        node.fingerprint = publish(node, "/srv/cuda", made, modules, kind="rpm")
        yield node


def sources(node):
    """Where a system with dnf gets the driver and what it is built with."""
    found = {"nvidia_driver_repository": cuda_repository(node.fingerprint)}
    if hasattr(node, "epel"):
        epel = {"url": "file:///srv/epel", "key_url": "file:///srv/epel/gpgkey", "key_fingerprint": node.epel}
        found["nvidia_driver_dkms_repository"] = {
            "rpm": {**epel, "includepkgs": ["dkms"], "distributions": ["rocky"]}
        }
    return found


@pytest.fixture(scope="module")
def rocky(here, key, rpm_base, tmp_path_factory):
    streams = [("535-dkms", OLD), ("535-dkms", "535.288.01"), ("580-open", NEW)]
    with rpm_machine(here, key, rpm_base, tmp_path_factory.mktemp("rocky"), "rocky-9", streams) as node:
        yield node


def test_dnf_takes_the_branchs_stream_and_not_the_newest_release(rocky):
    rocky.converge(INSTALL_DRIVER, **sources(rocky), nvidia_driver_version="535.288.01")
    assert drivers(rocky, RPM) == {"535.288.01"}
    assert module_version(rocky) == "535.288.01"
    locked = rocky.read("sudo dnf -q versionlock list")
    assert "nvidia-driver-cuda" in locked
    assert "kernel-core" in locked
    listed = rocky.read("sudo lsinitrd /boot/initramfs-*.img")
    assert "etc/modprobe.d/gpukiln-nvidia.conf" in listed
    assert "nouveau" not in listed
    assert "includepkgs = dkms" in rocky.read("cat /etc/yum.repos.d/epel-dkms.repo")


def test_dnf_moves_to_another_branch_with_open_modules(rocky):
    variables = {**sources(rocky), "nvidia_driver_branch": 580}
    rocky.apply(
        INSTALL_DRIVER, **variables, nvidia_driver_modules="open", nvidia_driver_fabric_manager="always"
    )
    assert drivers(rocky, RPM) == {NEW}
    assert module_version(rocky) == NEW
    installed = rocky.read(RPM)
    assert "kmod-nvidia-open-dkms" in installed
    assert "kmod-nvidia-latest-dkms" not in installed
    assert "nvidia-fabricmanager" in installed


def test_dnf_moves_back(rocky):
    rocky.apply(INSTALL_DRIVER, **sources(rocky), nvidia_driver_version=OLD)
    assert drivers(rocky, RPM) == {OLD}
    assert module_version(rocky) == OLD


def test_dnf_removes_it(rocky):
    rocky.apply(INSTALL_DRIVER, nvidia_driver_state="absent")
    assert rocky.ssh(RPM).stdout == ""
    assert "nvidia" not in rocky.read("sudo dnf -q versionlock list")


@pytest.fixture(scope="module")
def amazon(here, key, rpm_base, tmp_path_factory):
    streams = [("580-dkms", NEW), ("580-open", NEW)]  # NVIDIA's repository for it begins with 555
    with rpm_machine(here, key, rpm_base, tmp_path_factory.mktemp("amazon"), "amazon-2023", streams) as node:
        yield node


def test_a_branch_that_amazon_linux_does_not_have_is_refused(amazon):
    said = amazon.refused(INSTALL_DRIVER, **sources(amazon))
    assert "Found the streams 580-dkms, 580-open" in said
    assert "wanted 535-dkms" in said
    assert amazon.ssh(RPM).stdout == ""


def test_amazon_linux_gets_the_branch_that_it_has(amazon):
    """With NVIDIA's dkms, though Amazon's own repository comes first; the kernel stays with the release."""
    variables = {**sources(amazon), "nvidia_driver_branch": 580}
    done = amazon.apply(INSTALL_DRIVER, **variables, nvidia_driver_upgrade_kernel=True)
    amazon.rests(INSTALL_DRIVER, **variables)
    assert drivers(amazon, RPM) == {NEW}
    assert module_version(amazon) == NEW
    assert f"dkms {CUDAS_DKMS.split()[1].split('-')[0]}" in amazon.read(
        "rpm -q --qf '%{name} %{version}' dkms"
    )
    said = " ".join(done.stdout.split())
    assert f"The kernel stays: found Amazon Linux held at release {RELEASES['amazon-2023']}" in said
    newer = amazon.read("sudo dnf -q --disableplugin=versionlock --releasever=latest list --upgrades kernel")
    assert NEWER_KERNEL in newer
    assert "6.1.112" in amazon.read("rpm -q kernel kernel-devel")


def test_amazon_linux_that_follows_its_releases_gets_its_kernel(amazon):
    """Shown without the transaction: the stand-in's kernel has no files to boot."""
    amazon.write("/etc/dnf/vars/releasever", "latest\n")
    # In check mode nothing is unlocked.
    amazon.read("sudo dnf -q versionlock clear")
    done = amazon.apply(
        INSTALL_DRIVER,
        "--check",
        **sources(amazon),
        nvidia_driver_branch=580,
        nvidia_driver_upgrade_kernel=True,
    )
    assert "The kernel stays" not in done.stdout
    assert f"+kernel 0:{NEWER_KERNEL}" in done.stdout
