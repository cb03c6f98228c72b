"""The deadline of a build's machine: in a tag, and in user data by which the machine powers itself off.

A build removes its resources when it ends. The deadline is for a build that was killed: the machine powers
itself off, which terminates it, and `invoke cloud.sweep` finds the other resources by the tag.
"""

from datetime import UTC, datetime, timedelta
from email.message import Message
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText

LIMITS = {  # several times the longest build, and still a small amount of money
    "bake": timedelta(hours=4),
    "verify": timedelta(hours=2),
}
UNIT = "gpukiln-deadline"
# A boothook runs early in every boot, so a machine that was rebooted still ends; cloud-init may run it twice
# in one boot (hence is-active). Without default dependencies the timer works in a boot that hangs.
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
    """The deadline of a machine that starts now.

    Args:
        purpose: bake or verify.

    Returns:
        The moment, in UTC.
    """
    return datetime.now(UTC) + LIMITS[purpose]


def deadline_text(deadline: datetime) -> str:
    """A deadline as the tag has it.

    Args:
        deadline: The moment, with a time zone.

    >>> deadline_text(datetime(2026, 11, 21, 20, tzinfo=UTC))
    '2026-11-21T20:00:00Z'
    >>> deadline_text(datetime(2026, 11, 21, 20, tzinfo=UTC).astimezone())
    '2026-11-21T20:00:00Z'
    """
    return deadline.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shutdown_user_data(deadline: datetime, *more: Message) -> str:
    """User data by which a machine with cloud-init powers itself off; it leaves nothing in an image.

    MIME, because nodeadm in EKS's images reads user data too and takes any other text as its own
    configuration (awslabs/amazon-eks-ami:nodeadm/internal/configprovider/mime.go).

    Args:
        deadline: The moment, with a time zone.
        more: Other parts of the user data.

    Returns:
        User data, not yet in base64.
    """
    script = MIMEText(
        _SCRIPT.format(unit=UNIT, epoch=int(deadline.timestamp())), "cloud-boothook", "us-ascii"
    )
    return MIMEMultipart("mixed", "gpukiln", [script, *more]).as_string()
