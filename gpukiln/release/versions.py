"""The order of package versions by the rules of Debian and RPM, which the library univers has."""

from typing import Literal

from univers.versions import DebianVersion, InvalidVersion, RpmVersion, Version

Direction = Literal["added", "removed", "upgraded", "downgraded", "changed"]


def parse(text: str, os_family: str) -> Version | None:
    """A version that can be compared with others of its family.

    >>> parse("1:2.38.1-5+deb12u3", "debian") > parse("2.40-1", "debian")
    True
    >>> parse("6.1~rc1-1", "debian") < parse("6.1-1", "debian")
    True

    Args:
        text: For example "1:2.38.1-5+deb12u3".
        os_family: debian or redhat.

    Returns:
        The version, or None where the text is no version of that family.
    """
    try:
        # Both orders treat ~ and letters in ways that no tuple of numbers reproduces.
        return DebianVersion(text) if os_family == "debian" else RpmVersion(text)
    except InvalidVersion:
        return None


def direction(old: str | None, new: str | None, os_family: str | None) -> Direction | None:
    """The kind of a change.

    >>> direction("535.216.03", "535.309.01", "debian"), direction("1.10", "1.9", "redhat")
    ('upgraded', 'downgraded')
    >>> direction(None, "1.0", None), direction("1", "1", "debian")
    ('added', None)

    Args:
        old: The version before; None: absent.
        new: The version after; None: absent.
        os_family: debian or redhat; None where both sides are of different families.

    Returns:
        `changed` where the versions differ and can't be ordered; None where nothing changed.
    """
    if old == new:
        return None
    if old is None or new is None:
        return "added" if old is None else "removed"
    before, after = (parse(text, os_family) if os_family else None for text in (old, new))
    # Equal by the rules and different as text, such as 1.0 and 1.00: neither is newer.
    if before is None or after is None or before == after:
        return "changed"
    return "upgraded" if before < after else "downgraded"
