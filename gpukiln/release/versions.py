"""The order of package versions: Debian's and RPM's own rules, from a library that has both."""

from typing import Literal

from univers.versions import DebianVersion, InvalidVersion, RpmVersion, Version

Direction = Literal["added", "removed", "upgraded", "downgraded", "changed"]


def parse(text: str, os_family: str) -> Version | None:
    """A version that can be compared with others of its family.

    Args:
        text: For example "1:2.38.1-5+deb12u3".
        os_family: debian or redhat.

    Returns:
        The version, or None where the text is none of that family.
    """
    try:
        return DebianVersion(text) if os_family == "debian" else RpmVersion(text)
    except InvalidVersion:
        return None


def direction(old: str | None, new: str | None, os_family: str | None) -> Direction | None:
    """Which way something went.

    Args:
        old: The version before; None: it was not there.
        new: The version after; None: it is not there.
        os_family: debian or redhat; None where both sides are of different families.

    Returns:
        `changed` where the versions differ and can't be ordered; None where nothing changed.
    """
    if old == new:
        return None
    if old is None or new is None:
        return "added" if old is None else "removed"
    before, after = (parse(text, os_family) if os_family else None for text in (old, new))
    if before is None or after is None or before == after:
        return "changed"
    return "upgraded" if before < after else "downgraded"
