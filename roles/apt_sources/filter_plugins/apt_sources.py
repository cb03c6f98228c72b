"""Filter of the role apt_sources: adds components to the entries of the distribution's own archive."""

import re
from typing import Any

ENTRY = re.compile(
    r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#\n]*\S)"
)  # options, address, suite, components
ARCHIVE_KEYS = ("debian-archive", "ubuntu-archive")


def apt_with_components(text: str, release: str, wanted: list[str]) -> str:
    """Add components to the distribution's entries of a sources file, and change nothing else.

    An entry is the distribution's own when its suites are of the release, it has the component main, and it
    is signed with the archive's key or names no key. Disabled and source entries stay as they are.

    Args:
        text: The file, in one-line or deb822 form (man sources.list).
        release: The release's code name.

    Returns:
        The file with the components.
    """
    if re.search(r"(?mi)^(types|uris):", text):
        stanzas = re.split(r"(\n[ \t]*\n)", text)
        return "".join(_stanza(part, release, wanted) if part.strip() else part for part in stanzas)
    lines = text.splitlines(keepends=True)
    # Ubuntu names each component of a suite in a line of its own
    have: dict[tuple[str, str], set[str]] = {}
    for entry in filter(None, map(ENTRY.match, lines)):
        have.setdefault((entry[2], entry[3]), set()).update(entry[4].split())
    return "".join(_line(line, release, wanted, have) for line in lines)


def _is_own(suites: list[str], components: list[str], signed_by: str, release: str) -> bool:
    own_suites = all(
        re.match(rf"{re.escape(release)}(-(updates|security|backports))?(/|$)", s) for s in suites
    )
    own_key = not signed_by or any(key in signed_by for key in ARCHIVE_KEYS)
    return bool(suites) and own_suites and own_key and "main" in components


def _stanza(text: str, release: str, wanted: list[str]) -> str:
    fields = {k.lower(): v for k, v in re.findall(r"(?m)^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t]+\S.*)*)", text)}
    present = fields.get("components", "").split()
    disabled = fields.get("enabled", "yes").strip().lower() in ("no", "false")
    if disabled or "deb" not in fields.get("types", "").split():
        return text
    if not _is_own(fields.get("suites", "").split(), present, fields.get("signed-by", ""), release):
        return text
    missing = [c for c in wanted if c not in present]
    if not missing:
        return text
    return re.sub(r"(?mi)^(components:.*?)[ \t]*$", lambda m: f"{m[1]} {' '.join(missing)}", text, count=1)


def _line(line: str, release: str, wanted: list[str], have: dict[tuple[str, str], set[str]]) -> str:
    found = ENTRY.match(line)
    if not found:
        return line
    signed_by = " ".join(re.findall(r"signed-by=(\S+)", found[1] or "", re.IGNORECASE))
    missing = [c for c in wanted if c not in have[found[2], found[3]]]
    if not missing or not _is_own([found[3]], found[4].split(), signed_by, release):
        return line
    return f"{line[: found.end()]} {' '.join(missing)}{line[found.end() :]}"


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {"apt_with_components": apt_with_components}
