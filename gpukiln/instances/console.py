"""Recognises, in a machine's console, a boot that waits at a prompt or has ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import GpukilnError, UnavailableError
from gpukiln.redact import redact

CAUSES = 8
# ECMA-48 sequences; systemd colours its "[FAILED]"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\n\t\x20-\x7e]")
# The console has earlier boots too: only the text behind the last kernel banner counts.
BOOT = re.compile(r"^(?:\[ *0\.0+\] )?Linux version \d", re.MULTILINE)


@dataclass(frozen=True)
class StopPattern:
    """A state that a boot does not leave by itself.

    Args:
        name: The state's name.
        shown: The text on the console that shows it.
        cause: The lines that give the cause.
    """

    name: str
    shown: re.Pattern[str]
    cause: re.Pattern[str]


def _multiline(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


# Texts of systemd (src/sulogin-shell), dracut (dracut-lib.sh), initramfs-tools (scripts/local), Linux
# (kernel/panic.c, init/do_mounts.c), GRUB (kern/rescue_reader.c, normal/main.c) and cloud-init
# (sources/DataSourceNone.py, config/cc_final_message.py).
STOPS = (
    StopPattern(
        "kernel panic",
        _multiline(r"Kernel panic - not syncing"),
        _multiline(
            r"Kernel panic - not syncing|Cannot open root device|unable to mount root|No working init"
        ),
    ),
    StopPattern(
        "a shell of the initramfs",
        _multiline(
            r"^ *\(initramfs\)|Dropping to a shell|^(?:dracut|switch_root):/.*#"
            r"|^Entering emergency mode\. Exit"
        ),
        _multiline(
            r"ALERT!|Gave up waiting|fsck|dracut-initqueue.*timeout|does not exist|Failed to mount"
            r"|No root device"
        ),
    ),
    StopPattern(
        "emergency mode",
        _multiline(r"You are in (?:emergency|rescue) mode|Welcome to emergency mode"),
        _multiline(
            r"FAILED|DEPEND|TIME|Timed out waiting for device|UNEXPECTED INCONSISTENCY|root account is locked"
        ),
    ),
    StopPattern(
        "the prompt of GRUB",
        _multiline(r"^ *grub(?: rescue)?>|Minimal BASH-like line editing"),
        _multiline(r"^ *error: "),
    ),
    StopPattern(
        "no data source",
        _multiline(r"No instance datasource found|Used fallback datasource|Datasource DataSourceNone"),
        _multiline(r"datasource|DataSourceNone|ci-info: .*(?:eth|ens|enp).*False"),
    ),
)


@dataclass(frozen=True)
class StoppedBoot:
    """A boot that has stopped.

    Args:
        state: For example ``kernel panic``.
        lines: Lines of the console with the cause, at most `CAUSES`, without escape sequences and secrets.
    """

    state: str
    lines: tuple[str, ...]


def strip_control_characters(console: str) -> str:
    r"""Text of a console without escape sequences, control characters and secrets.

    >>> strip_control_characters("[\x1b[0;1;31mFAILED\x1b[0m] Failed to mount /data.\r\n")
    '[FAILED] Failed to mount /data.\n\n'
    """
    return redact(ESCAPES.sub("", console.replace("\r", "\n")))


def stopped_boot(console: str) -> StoppedBoot | None:
    r"""The state in which the last boot on a console stopped.

    Args:
        console: Its text, as EC2's GetConsoleOutput gives it (the last 64 KiB).

    Returns:
        None where the boot continues or has succeeded.

    >>> stopped_boot("Linux version 6.1.0\nKernel panic - not syncing: VFS").state
    'kernel panic'
    >>> stopped_boot("Linux version 6.1.0\nip-10-0-0-1 login: ") is None
    True
    """
    text = strip_control_characters(console)
    begins = [match.start() for match in BOOT.finditer(text)]
    # The last boot decides: a reboot may have cured an earlier one.
    last = text[begins[-1] if begins else 0 :]
    for stop in STOPS:
        if not (shown := stop.shown.search(last)):
            continue
        causes = [line.strip() for line in last.splitlines() if stop.cause.search(line)]
        # A line that the console repeats is shown once.
        unique = list(dict.fromkeys(causes)) or [shown.group().strip()]
        return StoppedBoot(stop.name, tuple(unique[:CAUSES]))
    return None


def console_text(cloud: Cloud, instance_id: str) -> str:
    """The text that a machine wrote on its console.

    Raises:
        UnavailableError: The call failed.
    """
    from botocore.exceptions import ClientError  # noqa: PLC0415 - slow to import

    ec2 = cloud.client("ec2")
    with explain_aws_errors("read the machine's console"):
        try:
            # without `Latest` EC2 answers with a copy that it took some minutes after the boot
            answer: dict[str, Any] = ec2.get_console_output(InstanceId=instance_id, Latest=True)
        except ClientError as error:
            if (
                error.response["Error"]["Code"] != "UnsupportedOperation"
            ):  # instance types that are not Nitro have no `Latest`
                raise
            answer = ec2.get_console_output(InstanceId=instance_id)
    return str(answer.get("Output", ""))


def find_stop(cloud: Cloud, instance_id: str) -> StoppedBoot | None:
    """The state in which a machine's boot stopped; None where it continues or the console can't be read."""
    try:
        return stopped_boot(console_text(cloud, instance_id))
    except GpukilnError:
        return None


def require_booting(cloud: Cloud, instance_id: str) -> None:
    """Raise where a machine's console shows that its boot has stopped.

    Raises:
        UnavailableError: It has; the details are the lines with the cause.
    """
    if stopped := find_stop(cloud, instance_id):
        raise UnavailableError(
            f"{instance_id} does not boot: its console shows {stopped.state}",
            hint="waiting does not help; the lines above are from its console",
            details=stopped.lines,
        )
