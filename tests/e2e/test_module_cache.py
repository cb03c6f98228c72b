"""The module cache and the removal of compilers, by the driver's role on a machine with two kernels.

Real are the role, the cache, apt, DKMS, make, gcc and both kernels' headers. The driver's packages stand in:
their module compiles in seconds (standin/packages.py).
"""

import os
import re

import pytest

from gpukiln.images.module_store import FolderStore
from gpukiln.images.modules import ModuleCache
from tests.support.harness import Node
from tests.support.standin import packages
from tests.support.standin.platforms import INSTALL_DRIVER, disguise, publish

pytestmark = pytest.mark.e2e

VERSION = "535.309.01"
# Stands before the real one and writes down when it compiled for which kernel, and the compiler's command.
MAKE = r"""#!/bin/bash
kernel=$(grep -o "KERNELRELEASE=[^ ]*" <<<"$*")
if [ -n "$kernel" ]; then echo "$(date +%s.%N) ${kernel#*=}" >>/srv/made; fi
/usr/bin/make "$@"
status=$?
if [ -n "$kernel" ]; then
  echo "$(date +%s.%N) ${kernel#*=}" >>/srv/made
  folder=$(grep -o " M=[^ ]*" <<<"$*")
  grep -hE "^(saved)?cmd_" "${folder#*=}/.nvidia.o.cmd" >>/srv/compiler
fi
exit $status
"""


class Machine(Node):
    """Says that it is Ubuntu 22.04, and has two kernels."""

    def prepare(self):
        first = disguise(self, "ubuntu-22.04")
        publish(self, "/srv/ubuntu", packages.ubuntu_archive(VERSION, "0ubuntu0.22.04.1", first, "amd64"))
        listed = "deb [signed-by=/srv/ubuntu/gpgkey] file:/srv/ubuntu /\n"
        self.write("/etc/apt/sources.list.d/ubuntu.list", listed)
        self.read("sudo apt-get -q update")
        found = self.read("apt-cache pkgnames linux-headers-6.1.0-").split()
        flavour = re.compile(r"linux-headers-(\S+-\d+-amd64)")  # neither the cloud's nor the realtime kernel
        names = {match[1] for name in found if (match := flavour.fullmatch(name))}
        second = max(names - {first})
        # no initramfs is older than the role's configuration: building one is not what is looked at here
        self.read(f"sudo touch /boot/vmlinuz-{second}")
        self.read(f"sudo touch -d 2099-01-01 /boot/initrd.img-{first} /boot/initrd.img-{second}")
        self.write("/usr/local/bin/make", MAKE)
        self.read("sudo chmod 0755 /usr/local/bin/make")
        self.kernels = [first, second]

    def install(self, cache_dir="", **variables):
        chosen = {"nvidia_driver_build": "dkms", "nvidia_driver_module_cache_dir": str(cache_dir)}
        done = self.apply(INSTALL_DRIVER, **chosen, **variables)
        return done.stdout

    def bake(self, store, **variables):
        """What a build does with the cache: who needed what, by kernel, and what was said."""
        told = []
        self.read("sudo rm -f /srv/made")
        cache = ModuleCache(store, self.folder / "modules", VERSION)
        cache.offer(told.append)
        self.install(cache.folder, **variables)
        uses = cache.collect("a-build", told.append)
        assert {use.kernel for use in uses} == set(self.kernels)
        return {use.kernel: use for use in uses}, told

    def forget(self):
        """Nothing is compiled any more, as on a new machine with the packages."""
        self.read(f"sudo dkms remove -m nvidia -v {VERSION} --all")
        assert self.built() == set()

    def built(self):
        """Kernels whose module DKMS installed and modinfo finds."""
        status = self.read("sudo dkms status")
        installed = re.findall(rf"(?m)^nvidia/{VERSION}, ([^,]+), x86_64: installed$", status)
        return {
            kernel
            for kernel in installed
            if self.ssh(f"sudo modinfo -k {kernel} -F version nvidia").stdout.strip() == VERSION
        }

    def compiled(self):
        """Kernel to when its compilation began and ended."""
        moments = {}
        for line in self.read("cat /srv/made 2>/dev/null || test ! -e /srv/made").splitlines():
            moment, kernel = line.split()
            moments.setdefault(kernel, []).append(float(moment))
        return moments


@pytest.fixture(scope="module")
def machine(here, key, tmp_path_factory):
    with Machine(here, key, tmp_path_factory.mktemp("cache")) as node:
        node.prepare()
        yield node


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the entries."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def store(folder):
    return FolderStore(folder)


def test_what_the_cache_does_not_have_is_compiled_for_all_kernels_at_once_and_kept(machine, store):
    uses, told = machine.bake(store)
    assert {use.reason for use in uses.values()} == {"the cache had no entry; they are kept"}, told
    assert machine.built() == set(machine.kernels)
    moments = machine.compiled()
    assert set(moments) == set(machine.kernels)
    (begin, end), (other_begin, other_end) = moments.values()
    assert os.cpu_count() == 1 or (begin < other_end and other_begin < end), moments
    assert len(store.names(VERSION)) == 4
    commands = machine.read("cat /srv/compiler").splitlines()
    assert len(commands) == 2
    for command in commands:  # of several such options the last counts
        assert re.findall(r" (-g(?:\d|dwarf\S*)?)(?= )", command)[-1] == "-g0", command


def test_what_the_cache_has_is_loaded_and_nothing_is_compiled(machine, store):
    machine.forget()
    uses, told = machine.bake(store)
    assert all(use.cached for use in uses.values()), told
    assert machine.built() == set(machine.kernels)
    assert machine.compiled() == {}


def test_a_damaged_entry_is_refused_and_compiled_anew_and_then_the_compilers_go(machine, store, folder):
    machine.forget()
    entry = max(folder.glob("*/*.tar.gz"))
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    uses, told = machine.bake(store, nvidia_driver_keep_build_tools=False)
    [refused] = [use for use in uses.values() if not use.cached]
    assert told[0].startswith(f"refused the modules {entry.name[:12]} of the cache: its checksum is "), told
    assert refused.reason.startswith("the cache's entry was refused: its checksum is ")
    assert refused.reason.endswith("they are kept")
    assert set(machine.compiled()) == {refused.kernel}
    assert machine.built() == set(machine.kernels)
    assert machine.ssh("ls /usr/bin/*gcc* /usr/bin/cc /usr/bin/as").stdout == ""
    assert not machine.ssh("ls -d /usr/src/linux-headers-*").stdout
    assert "dkms" in machine.read("dpkg --audit && dpkg -l dkms | grep ^ii")


def test_a_machine_without_compilers_stays_as_it_is_and_builds_for_a_later_kernel(machine):
    said = machine.install(nvidia_driver_keep_build_tools=False)
    assert re.search(r"changed=0 .*failed=0", said), said[-6000:]
    later = machine.kernels[1]
    machine.read(f"sudo dkms remove -m nvidia -v {VERSION} -k {later}")
    said = machine.read(f"sudo /etc/kernel/postinst.d/zz-gpukiln-no-compiler {later} 2>&1")
    assert f"apt-get install gcc linux-headers-{later}" in said
    machine.read(f"sudo DEBIAN_FRONTEND=noninteractive apt-get -qy install gcc linux-headers-{later}")
    assert machine.built() == set(machine.kernels)
    assert machine.ssh("ls /usr/bin/gcc").returncode == 0
