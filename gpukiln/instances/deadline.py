"""The time that a build's machine may live: a tag says it, and the machine itself keeps it.

What a build starts is removed when the build ends. The deadline is for when nobody is left to do that: the
machine powers itself off, which terminates it, and `invoke cloud.sweep` finds the rest by the tag.
"""

from datetime import UTC, datetime, timedelta
from email.mime.base import MIMEBase
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText

LIMITS = {  # far above what a build takes, far below a bill that somebody would ask about
    "bake": timedelta(hours=4),
    "verify": timedelta(hours=2),
}
UNIT = "gpukiln-deadline"
# Runs at every boot, early: a machine that was rebooted still ends. cloud-init may run it twice in one boot.
# Without default dependencies the timer does not wait for a boot that hangs.
_SCRIPT = """\
#!/bin/sh
systemctl --quiet is-active {unit}.timer && exit 0
left=$(( {epoch} - $(date +%s) ))
[ "$left" -gt 0 ] || left=1
exec systemd-run --quiet --no-block --unit={unit} --description="The machine's deadline" \\
  --timer-property=DefaultDependencies=no --timer-property=AccuracySec=1s \\
  --property=DefaultDependencies=no --on-active="${{left}}s" systemctl poweroff
"""


def deadline_of(purpose: str) -> datetime:
    """When a machine that is started now must be gone.

    Args:
        purpose: bake or verify.

    Returns:
        The moment, in UTC.
    """
    return datetime.now(UTC) + LIMITS[purpose]


def deadline_text(deadline: datetime) -> str:
    """A deadline as the tag holds it.

    Args:
        deadline: The moment, with a time zone.

    Returns:
        For example 2026-11-21T20:00:00Z.
    """
    return deadline.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shutdown_user_data(deadline: datetime, *more: MIMEBase) -> str:
    """User data by which a machine with cloud-init powers itself off; nothing of it is left in an image.

    MIME, because nodeadm of EKS's images reads user data too and takes any other text for its own settings
    (awslabs/amazon-eks-ami:nodeadm/internal/configprovider/mime.go).

    Args:
        deadline: The moment, with a time zone.
        more: Other parts of it.

    Returns:
        User data, not yet in base64.
    """
    script = MIMEText(
        _SCRIPT.format(unit=UNIT, epoch=int(deadline.timestamp())), "cloud-boothook", "us-ascii"
    )
    return MIMEMultipart("mixed", "gpukiln", [script, *more]).as_string()
