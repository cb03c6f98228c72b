"""A boot that stopped, by what stands on its console: each text as its program prints it."""

import pytest
from botocore.exceptions import ClientError

from gpukiln.errors import UnavailableError
from gpukiln.instances.console import require_booting, stopped_boot

LINUX = "[    0.000000] Linux version 6.1.0-48-cloud-amd64 (debian-kernel@lists.debian.org)\n"
ESC = "\x1b"

# systemd 252 and 255: an fstab entry of a volume that is not attached
EMERGENCY = f"""{LINUX}[    3.2] systemd[1]: Detected virtualization amazon.
[{ESC}[0;1;31m TIME {ESC}[0m] Timed out waiting for device {ESC}[0;1;39m/dev/xvdf{ESC}[0m.
[{ESC}[0;1;38;5;185mDEPEND{ESC}[0m] Dependency failed for {ESC}[0;1;39m/data{ESC}[0m.
[{ESC}[0;1;38;5;185mDEPEND{ESC}[0m] Dependency failed for {ESC}[0;1;39mLocal File Systems{ESC}[0m.
You are in emergency mode. After logging in, type "journalctl -xb" to view
system logs, "systemctl reboot" to reboot, "systemctl default" or "exit"
to boot into default mode.
Cannot open access to console, the root account is locked.
"""
# Linux: init/do_mounts.c and kernel/panic.c
PANIC = LINUX + (
    '[    1.911] VFS: Cannot open root device "UUID=2f3b" or unknown-block(0,0): error -6\n'
    "[    1.913] Please append a correct root= boot option; here are the available partitions:\n"
    "[    1.917] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)\n"
    "[    1.920] CPU: 0 PID: 1 Comm: swapper/0 Not tainted 6.1.0-48-cloud-amd64\n"
)
# initramfs-tools: scripts/local
INITRAMFS = LINUX + (
    "Begin: Waiting for root file system ... done.\n"
    "Gave up waiting for root file system device.  Common problems:\n"
    " - Boot args (cat /proc/cmdline)\n"
    "ALERT!  UUID=2f3b does not exist.  Dropping to a shell!\n\n\n"
    "BusyBox v1.35.0 (Debian 1:1.35.0-4+b3) built-in shell (ash)\n(initramfs) "
)
# dracut 057, Amazon Linux 2023 and RHEL 9
DRACUT = LINUX + (
    "[  131.4] dracut-initqueue[317]: Warning: dracut-initqueue: timeout, still waiting for hooks:\n"
    "[  195.2] dracut-initqueue[317]: Warning: /dev/disk/by-uuid/2f3b does not exist\n\n"
    'Generating "/run/initramfs/rdsosreport.txt"\n\n'
    "Entering emergency mode. Exit the shell to continue.\n"
    'Type "journalctl" to view system logs.\n\ndracut:/# '
)
GRUB = "Loading GRUB...\nerror: unknown filesystem.\nEntering rescue mode...\ngrub rescue> "
GRUB_NORMAL = (
    "error: file `/boot/grub/x86_64-efi/normal.mod' not found.\n"
    "   Minimal BASH-like line editing is supported.\ngrub> "
)
# cloud-init 22.4: sources/DataSourceNone.py
NO_DATA = LINUX + (
    "[   14.4] cloud-init[955]: Cloud-init v. 22.4.2 running 'modules:final'. Up 14.1 seconds.\n"
    "[   14.4] cloud-init[955]: No instance datasource found! Likely bad things to come!\n"
    "[   14.5] cloud-init[955]: Cloud-init v. 22.4.2 finished. Datasource DataSourceNone.  Up 14.3 seconds\n"
    "[   14.5] cloud-init[955]: [WARNING]: Used fallback datasource\n"
)
WELL = LINUX + (
    "[    9.1] cloud-init[400]: Cloud-init v. 22.4.2 finished. Datasource DataSourceEc2Local.\n"
    "\nip-10-0-0-5 login: "
)


@pytest.mark.parametrize(
    ("text", "state", "first", "last"),
    [
        (
            EMERGENCY,
            "emergency mode",
            "Timed out waiting for device /dev/xvdf",
            "the root account is locked.",
        ),
        (PANIC, "kernel panic", 'Cannot open root device "UUID=2f3b"', "on unknown-block(0,0)"),
        (
            INITRAMFS,
            "a shell of the initramfs",
            "Gave up waiting",
            "UUID=2f3b does not exist.  Dropping to a shell!",
        ),
        (
            DRACUT,
            "a shell of the initramfs",
            "timeout, still waiting",
            "/dev/disk/by-uuid/2f3b does not exist",
        ),
        (GRUB, "the prompt of GRUB", "error: unknown filesystem.", "error: unknown filesystem."),
        (GRUB_NORMAL, "the prompt of GRUB", "normal.mod' not found.", "normal.mod' not found."),
        (NO_DATA, "no data source", "No instance datasource found!", "Used fallback datasource"),
    ],
)
def test_a_stopped_boot_is_recognised_with_the_lines_that_name_the_cause(text, state, first, last):
    stopped = stopped_boot(text.replace("\n", "\r\n"))
    assert stopped is not None
    assert stopped.state == state
    assert first in stopped.lines[0]
    assert stopped.lines[-1].endswith(last)
    assert not any(ESC in line for line in stopped.lines)


@pytest.mark.parametrize(
    "text",
    [
        "",
        WELL,
        LINUX,
        "[    0.0] Command line: root=UUID=2f3b panic=10",
        PANIC + WELL,
        GRUB.replace("grub rescue> ", ""),
    ],
)
def test_a_boot_that_goes_on_is_waited_for(text):
    assert stopped_boot(text) is None


class Ec2:
    """GetConsoleOutput of a type that is not Nitro refuses `Latest`, as EC2's API reference says."""

    def __init__(self, text):
        self.text = text

    def get_console_output(self, **request):
        if "Latest" in request:
            answer = {"Error": {"Code": "UnsupportedOperation", "Message": "not supported"}}
            raise ClientError(answer, "GetConsoleOutput")
        return {"Output": self.text}


class Cloud:
    def __init__(self, text):
        self.text = text

    def client(self, _):
        return Ec2(self.text)


def test_the_error_names_state_and_lines_without_secrets():
    with pytest.raises(
        UnavailableError, match="i-1 does not boot: its console shows kernel panic"
    ) as refused:
        require_booting(Cloud(PANIC.replace("UUID=2f3b", "root password=hunter2")), "i-1")
    assert "hunter2" not in "".join(refused.value.details)
    require_booting(Cloud(WELL), "i-1")
