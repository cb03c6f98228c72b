"""Machines that say they are another system: Debian with its os-release, kernel names and package manager.

What is real on them: systemd, SSH, the package manager (apt, or Debian's dnf and rpm), DKMS, gpg, dracut.
What stands in: the packages of the vendors (packages.py). A test starts with

    node = Node(here, key, folder, image)   # harness: a booted machine; rpm_base of conftest.py for dnf
    disguise(node, "rocky-9")               # it says so from now on
    fingerprint = publish(node, "/srv/cuda", packages, modules)
    node.play(PLAYBOOK, variables)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.standin.packages import Package, specification

if TYPE_CHECKING:
    from tests.support.harness import Node

BUILD = Path(__file__).with_name("build.py")
EL_TOOLS = "dnf dnf-plugins-core rpm createrepo-c dracut dkms gcc make openssl gpg gpg-agent"
# Nothing here drives hardware, and each depmod, dracut and update-initramfs reads all that the kernel has.
UNUSED_MODULES = (
    "sound drivers/media drivers/infiniband drivers/net drivers/staging drivers/iio drivers/usb drivers/input"
    " drivers/scsi drivers/hwmon drivers/isdn drivers/mtd net/wireless net/mac80211 net/bluetooth"
)
REMOVE_UNUSED = f"cd /lib/modules/*/kernel && sudo rm -rf {UNUSED_MODULES}"
OS_RELEASE: Mapping[str, str] = {
    "ubuntu-22.04": 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION="22.04.5 LTS (Jammy Jellyfish)"\n'
    'VERSION_ID="22.04"\nVERSION_CODENAME=jammy\nUBUNTU_CODENAME=jammy\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
    "ubuntu-24.04": 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION="24.04.1 LTS (Noble Numbat)"\n'
    'VERSION_ID="24.04"\nVERSION_CODENAME=noble\nUBUNTU_CODENAME=noble\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
    "rocky-9": 'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION="9.4 (Blue Onyx)"\n'
    'VERSION_ID="9.4"\nPLATFORM_ID="platform:el9"\nPRETTY_NAME="Rocky Linux 9.4 (Blue Onyx)"\n',
    "amazon-2023": 'NAME="Amazon Linux"\nID="amzn"\nID_LIKE="fedora"\nVERSION="2023"\nVERSION_ID="2023"\n'
    'PLATFORM_ID="platform:al2023"\nPRETTY_NAME="Amazon Linux 2023.6.20241010"\n',
}
RELEASE_FILES = {
    "rocky-9": ("/etc/redhat-release", "Rocky Linux release 9.4 (Blue Onyx)\n"),
    "amazon-2023": ("/etc/system-release", "Amazon Linux release 2023.6.20241010 (Amazon Linux)\n"),
}
KERNELS = {"rocky-9": "5.14.0-427.el9.x86_64", "amazon-2023": "6.1.112-122.189.amzn2023.x86_64"}
# dnf's releasever, which only the installed system-release says. Amazon's repositories are of one release
# each (docs.aws.amazon.com/linux/al2023/ug/deterministic-upgrades-usage.html).
RELEASES = {"rocky-9": "9", "amazon-2023": "2023.6.20241010"}
# The system's own repository. dkms: RHEL has none, it is in EPEL. Amazon has 3.0.3 (amazonlinux/
# amazon-linux-2023, issue 77), and NVIDIA's repository for it a newer one (awslabs/amazon-eks-ami, pull
# request 2284). Amazon's comes first, by a priority: what it has hides others' packages of the name (the COPR
# thimslugga/al2023-extras must be told apart by an exclude; its number here is from memory).
BASE_PACKAGES = ("mokutil 0.6.0-1", "python3-dnf-plugin-versionlock 4.3.1-1")
BASE_REPOSITORY = """\
[{name}]
name={name}
baseurl=file:///srv/base/$releasever
gpgcheck=1
gpgkey=file:///srv/base/{release}/gpgkey
{more}"""
EPEL = ("dkms 3.2.1-1.el9", "nvtop 3.0-1")
AMAZONS_DKMS, CUDAS_DKMS = "dkms 3.0.3-2.amzn2023", "dkms 3.2.1-1.amzn2023"
NEWER_KERNEL = "6.1.150-174.273.amzn2023"

INSTALL_DRIVER = """\
- name: The driver
  hosts: all
  become: true
  gather_subset: [min]
  tasks:
    - name: Install it
      ansible.builtin.include_role: {name: nvidia_driver, tasks_from: install}
"""


def disguise(node: "Node", platform: str, *, base: Iterable[Package] = ()) -> str:
    """Make a machine say that it is another system.

    Args:
        node: A Debian machine; for a system with dnf, one that `install_rpm_tools` has prepared.
        platform: A key of `OS_RELEASE`.
        base: More packages of the system's own repository, with rpm.

    Returns:
        The release of its one kernel.
    """
    if platform in KERNELS:
        _become_rpm(node, platform, base)
    else:
        node.read(REMOVE_UNUSED)
        # lsb_release would say Debian
        node.read("sudo apt-get -q update && sudo apt-get -qy remove lsb-release")
        node.read("sudo apt-get -qy install gcc gpg gpg-agent && sudo depmod $(ls /lib/modules)")
    node.write("/etc/os-release", OS_RELEASE[platform])
    return node.read("ls /lib/modules").strip()


def package(text: str, **more: Any) -> Package:
    """A package of a name and a version.

    Args:
        text: Both, with a space between them.
        more: The rest of it.
    """
    name, version = text.split()
    return Package(name, version, **more)


def install_rpm_tools(node: "Node") -> None:
    """Install dnf, and what the roles build modules with there: the same for each system with dnf."""
    debian = node.read("ls /lib/modules").strip()
    node.read(REMOVE_UNUSED)
    # dracut's package makes an initramfs of every kernel in /boot, which takes long and would be thrown away.
    node.read(f"sudo mv /boot/vmlinuz-{debian} /srv/vmlinuz && sudo rm -f /boot/initrd.img-*")
    node.read(f"sudo apt-get -q update && sudo apt-get -qy install {EL_TOOLS} linux-headers-{debian}")


def _become_rpm(node: "Node", platform: str, more: Iterable[Package]) -> None:
    kernel, release = KERNELS[platform], RELEASES[platform]
    is_amazon = platform == "amazon-2023"
    debian = node.read("ls /lib/modules").strip()
    file, text = RELEASE_FILES[platform]
    # Debian's kernel under the system's own name; its headers build what DKMS builds.
    node.read(
        f"sudo mv /lib/modules/{debian} /lib/modules/{kernel} && sudo mv /srv/vmlinuz /boot/vmlinuz-{kernel}"
        f" && sudo depmod {kernel}"
    )
    node.write("/etc/dracut.conf.d/fast.conf", 'compress="cat"\n')
    node.write(file, text)
    # What would tell Ansible and the roles that this is Debian.
    node.read(
        "sudo rm -f /etc/debian_version /usr/bin/apt-get /usr/bin/apt /usr/bin/apt-cache /usr/bin/lsb_release"
    )
    node.write("/etc/rpm/macros", "%_dbpath /var/lib/rpm\n")
    node.read("sudo mkdir -p /etc/pki/rpm-gpg /etc/yum.repos.d && sudo rpm --initdb")
    version = kernel.rpartition(".")[0]
    name = "kernel" if is_amazon else "kernel-core"
    base = [
        # What every scriptlet needs is there, only rpm does not know it.
        Package(
            "system-release", f"{release}-0", provides=("/bin/sh", f"system-release(releasever) = {release}")
        ),
        Package(name, version),
        Package("kernel-devel", version),
        *map(package, BASE_PACKAGES),
        *more,
    ]
    if is_amazon:
        base.append(package(AMAZONS_DKMS))
        newer = [Package(kernel, NEWER_KERNEL) for kernel in ("kernel", "kernel-devel")]
        publish(node, "/srv/base/latest", newer, kind="rpm")
    folder = f"/srv/base/{release}"
    publish(node, folder, base, kind="rpm")
    node.read(
        f"sudo rpm --install --nosignature {folder}/system-release-*.rpm {folder}/{name}-{version}.*.rpm"
    )
    text = BASE_REPOSITORY.format(
        name="amazonlinux" if is_amazon else "baseos",
        release=release,
        more="priority=10\n" if is_amazon else "",
    )
    node.write("/etc/yum.repos.d/base.repo", text)


def publish(
    node: "Node",
    folder: str,
    packages: Iterable[Package],
    modules: str | None = None,
    *,
    kind: str = "apt",
    release: Mapping[str, str] | None = None,
    carried: Sequence[str] = (),
) -> str:
    """Build a signed repository on a machine.

    Args:
        node: The machine.
        folder: Where, on the machine.
        modules: Module metadata, for rpm.
        kind: apt or rpm.
        release: Fields of an apt repository's Release file: Origin, Label, Suite, Codename.
        carried: Patterns of rpm files of another repository, which keep that one's signature.

    Returns:
        The fingerprint of the key, which is in the folder as gpgkey.
    """
    node.write("/srv/specification.json", json.dumps(specification(packages, modules, release, carried)))
    node.write("/srv/build.py", BUILD.read_text())
    return node.read(f"sudo python3 /srv/build.py {kind} {folder} /srv/specification.json").strip()
