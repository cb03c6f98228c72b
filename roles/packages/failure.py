"""Why packages can't be installed, and what to do about it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# What package managers say, and what to do about it; the first that fits.
CAUSES = (
    (
        r"enough free space|No space left|more space |Disk Requirements",
        "Free space on the node: `df -h /var/cache /usr /boot` shows where it is missing.",
    ),
    (
        r"Held packages were changed|held broken packages|you have held",
        "`apt-mark showhold` on the node lists what is held; `apt-mark unhold NAME` lets it move.",
    ),
    (
        r"Could not get lock|lockfile is held|transaction lock|dpkg frontend lock",
        "Another package manager is at work on the node: run this again when it is done.",
    ),
    (
        r"Failed to fetch|Could not resolve|Cannot download|Curl error|Connection (refused|timed out)",
        "Check the node's network and proxy, and the addresses in its repositories.",
    ),
    (
        r"not signed|GPG|BADSIG|NO_PUBKEY|signature",
        "Install nothing from this repository until its vendor has explained the signature.",
    ),
    (
        r"No package matching|Unable to locate|no (available )?installation candidate|no available version"
        r"|was not found|No package \S+ available|Unable to find a match|specified packages",
        "The node's repositories don't have it: `apt-cache policy NAME` or `dnf --showduplicates list NAME` "
        "shows what they have. Is a repository missing, or its version another one?",
    ),
    (
        r"conflict|unmet dependencies|nothing provides|obsoletes|broken packages|Depsolve",
        "Something that is installed is in the way: remove or update what is named, or leave this out.",
    ),
)
ELSE = "/var/log/apt/term.log or /var/log/dnf.log on the node has all of it."
NOISE = re.compile(r"^(Reading|Building|Calculating|W:|\d+ upgraded|Get:|Selecting|\(Reading)")
LINES = 6


def package_failure(result: Mapping[str, Any], names: Sequence[str], version: str = "") -> str:
    """Say why packages could not be installed, and what to do.

    Args:
        result: The failed task's result, of apt, dnf or a command.
        names: The packages that were wanted.
        version: Their version, empty for any.

    Returns:
        One message: found, wanted, next step.
    """
    said = "\n".join(str(result.get(key) or "") for key in ("msg", "stderr", "module_stderr"))
    said = "\n".join(
        [re.sub(r"^'?/usr/bin/apt-get.*failed: ", "", said), *map(str, result.get("failures") or ())]
    )
    lines = [line.strip() for line in dict.fromkeys(said.splitlines()) if line.strip()]
    lines = [line for line in lines if not NOISE.match(line)] or lines or ["no message"]
    advice = next((text for pattern, text in CAUSES if re.search(pattern, said, re.IGNORECASE)), ELSE)
    asked = ", ".join(names) + (f" in version {version}" if version else "")
    return f"Found: {' / '.join(lines[:LINES])}\nWanted: {asked}. {advice}"
