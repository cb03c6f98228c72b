"""The distribution's own package sources: their components, and lists of repositories that were given up."""

import re

from ..plan import File, Looks, Node, Plan, Role

SOURCES = (
    "/etc/apt/*.list",
    "/etc/apt/*.sources",
    "/etc/apt/sources.list.d/*.list",
    "/etc/apt/sources.list.d/*.sources",
)
RETIRED = tuple(
    f"/etc/apt/sources.list.d/{name}"
    for name in ("libnvidia-container*.list", "nvidia-container-runtime*.list", "nvidia-docker*.list")
)
"""Repositories that NVIDIA gave up. Their keys are gone from many machines, or clash with the successor's
("conflicting values set for option Signed-By"): either way every `apt update` fails."""
FOLDER = "/var/lib/apt/lists"
LISTS = f"{FOLDER}/*_Packages*"
STAMP = "/var/lib/apt/periodic/update-success-stamp"  # of apt's own timer, where it is set up
ENTRY = re.compile(
    r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#\n]*\S)"
)  # options, address, suite, components
ARCHIVE_KEYS = ("debian-archive", "ubuntu-archive")


def look(_role: Role) -> Looks:
    return {"files": list(SOURCES), "ages": [STAMP, FOLDER], "globs": [*RETIRED, LISTS]}


def decide(role: Role, node: Node) -> Plan:
    """`do`: `fetch` says that the package lists have to be fetched, `known` that apt can name packages."""
    plan = Plan()
    retired = retired_lists(node)
    plan.remove(retired)
    for path, facts in node["files"].items():
        text = with_components(facts["text"], role.system.release, role["components"])
        if path not in retired and text != facts["text"]:
            # addresses may hold credentials
            plan.files.append(File(path, text, facts["mode"], secret=True))
    # An image has no lists, in a folder that is as old as their removal.
    stale = bool(plan.files) or not node["globs"][LISTS]
    # Their age counts where a run begins to need them: its later tasks have the same lists.
    plan.do["fetch"] = stale or (role.get("had") is None and _age_s(node) > int(role["lists_valid_s"]))
    # In check mode nothing is fetched.
    plan.do["known"] = not (role.check and stale)
    return plan


def _age_s(node: Node) -> float:
    """Seconds since the lists were fetched, found as Ansible's own module apt does."""
    ages = node["ages"]
    return float(ages[FOLDER] if ages[STAMP] is None else ages[STAMP])


def retired_lists(node: Node) -> list[str]:
    """Lists of repositories that were given up, where a look asked for `RETIRED`."""
    return [path for pattern in RETIRED for path in node["globs"][pattern]]


def with_components(text: str, release: str, components: list[str]) -> str:
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
        return "".join(_stanza(part, release, components) if part.strip() else part for part in stanzas)
    lines = text.splitlines(keepends=True)
    # Ubuntu names each component of a suite in a line of its own
    have: dict[tuple[str, str], set[str]] = {}
    for entry in filter(None, map(ENTRY.match, lines)):
        have.setdefault((entry[2], entry[3]), set()).update(entry[4].split())
    return "".join(_line(line, release, components, have) for line in lines)


def _is_own(suites: list[str], components: list[str], signed_by: str, release: str) -> bool:
    own_suites = all(
        re.match(rf"{re.escape(release)}(-(updates|security|backports))?(/|$)", s) for s in suites
    )
    own_key = not signed_by or any(key in signed_by for key in ARCHIVE_KEYS)
    return bool(suites) and own_suites and own_key and "main" in components


def _stanza(text: str, release: str, components: list[str]) -> str:
    fields = {k.lower(): v for k, v in re.findall(r"(?m)^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t]+\S.*)*)", text)}
    present = fields.get("components", "").split()
    disabled = fields.get("enabled", "yes").strip().lower() in ("no", "false")
    if disabled or "deb" not in fields.get("types", "").split():
        return text
    if not _is_own(fields.get("suites", "").split(), present, fields.get("signed-by", ""), release):
        return text
    missing = [c for c in components if c not in present]
    if not missing:
        return text
    return re.sub(r"(?mi)^(components:.*?)[ \t]*$", lambda m: f"{m[1]} {' '.join(missing)}", text, count=1)


def _line(line: str, release: str, components: list[str], have: dict[tuple[str, str], set[str]]) -> str:
    match = ENTRY.match(line)
    if not match:
        return line
    signed_by = " ".join(re.findall(r"signed-by=(\S+)", match[1] or "", re.IGNORECASE))
    missing = [c for c in components if c not in have[match[2], match[3]]]
    if not missing or not _is_own([match[3]], match[4].split(), signed_by, release):
        return line
    return f"{line[: match.end()]} {' '.join(missing)}{line[match.end() :]}"
