"""What QEMU runs guests with: KVM if a guest boots with it, else TCG; and how many processors they have."""

import contextlib
import functools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import UnavailableError
from gpukiln.parsing import parse_json
from gpukiln.state import state_home

MOST_PROCESSORS = 255  # of QEMU's machine types for PCs
PROBE_S = 20  # seconds for a kernel to print its first line under KVM
# With ERMS, Linux and glibc copy by `rep movsb`, which TCG runs one byte at a time (QEMU,
# target/i386/tcg/translate.c): a boot took 98 s of processor time with ERMS and 86 s without. FSRM, which
# QEMU 10 offers, goes with it: with FSRM alone, memmove of Linux 6.1 overruns its length, and it never boots
# (https://lore.kernel.org/all/20230113203427.1111689-1-dverkamp@chromium.org/).
TCG = ("-accel", "tcg,thread=multi", "-cpu", "max,erms=off,fsrm=off")
KVM = ("-accel", "kvm", "-cpu", "host")
PROCESSORS = "GPUKILN_MACHINE_CPUS"
"""Environment variable: processors of each virtual machine.

With TCG each of them is a thread. Where threads outnumber cores, guests spin on locks whose holder is not
scheduled: three machines that boot at once on two cores take 61 s of processor time each with two
processors, and 46 s with one.
"""


def arguments(vcpus: int) -> tuple[str, ...]:
    """QEMU's arguments for the accelerator and for this many processors.

    /dev/kvm may exist and still not run a guest, so a kernel is booted once per boot of this computer, and
    the result is stored.
    """
    if _kvm_works():
        return *KVM, "-smp", str(vcpus)
    # For a guest that can have only one processor, TCG translates atomic instructions, which Linux uses as
    # memory barriers on x86, into plain ones (QEMU, tcg/tcg-op-ldst.c, CF_PARALLEL). Devices run in another
    # thread, so that the guest can miss that a device waits for a notification, and its network stalls.
    # A second processor that can be hot-plugged keeps the barriers. QEMU 8.1 fixed only mfence:
    # https://gitlab.com/qemu-project/qemu/-/commit/c914d46d0a645e7c633292146f4e38c945d4f847
    return *TCG, "-smp", "1,maxcpus=2" if vcpus == 1 else str(vcpus)


def processors() -> int:
    """Processors of a virtual machine: those of this computer, or as many as the environment says.

    Raises:
        UnavailableError: The environment has no number of processors.
    """
    text = os.environ.get(PROCESSORS, "")
    if not text:
        return os.cpu_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PROCESSORS:
        raise UnavailableError(
            f"{PROCESSORS} is {text!r}, wanted a number from 1 to {MOST_PROCESSORS}",
            hint=f"unset {PROCESSORS}",
        )
    return int(text)


@functools.cache
def _kvm_works() -> bool:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK) or not _has_virtualization():
        return False
    layout = Layout(state_home())
    answer_file = layout.root / "kvm.json"
    # The answer holds for one boot: a kernel or its modules may change with the next.
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError, ValueError):
        answer = parse_json(answer_file.read_text())
        if answer["boot_id"] == boot_id:
            return bool(answer["works"])
    # Any disk has a kernel to try; without one TCG is used this time and nothing is stored.
    disks = sorted(layout.snapshots.glob("*.raw"))
    if not disks:
        return False
    works = _boots_with_kvm(disks[0])
    answer_file.write_text(json.dumps({"boot_id": boot_id, "works": works}))
    return works


def _has_virtualization(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor runs guests: Intel's vmx, AMD's svm.

    Without them /dev/kvm can only belong to PVM, a hypervisor for guests with a paravirtualized kernel. It
    interprets the instructions of other kernels: one printed nothing in 20 s, with a core busy. Its patches:
    https://lore.kernel.org/lkml/20240226143630.33643-1-jiangshanlai@gmail.com/
    """
    flags = {
        flag for line in cpuinfo.read_text().splitlines() if line.startswith("flags") for flag in line.split()
    }
    return not flags.isdisjoint({"vmx", "svm"})


def _boots_with_kvm(disk: Path) -> bool:
    with tempfile.NamedTemporaryFile(prefix="gpukiln-kvm-") as console:
        qemu = subprocess.Popen(
            [
                *("qemu-system-x86_64", *KVM, "-m", "512", "-nodefaults", "-display", "none"),
                *(
                    "-drive",
                    # snapshot=on: the guest writes to a temporary file, never to the disk.
                    f"file={disk},format=raw,if=virtio,snapshot=on",
                    "-serial",
                    f"file:{console.name}",
                ),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + PROBE_S
            while time.monotonic() < deadline and qemu.poll() is None:
                if b"Linux version" in Path(console.name).read_bytes():
                    return True
                time.sleep(0.2)
            return False
        finally:
            qemu.kill()
            qemu.wait()
