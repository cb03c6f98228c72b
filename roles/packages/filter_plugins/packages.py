"""Filters of the role packages: what is installed, and why something can't be."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Found = dict[str, dict[str, Any]]

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


def packages_of_dpkg(text: str) -> Found:
    """Read what dpkg knows.

    Args:
        text: A line a package: `ii |name|version`, as of `dpkg-query` with Status-Abbrev.

    Returns:
        For each name `installed`, `held`, the full `package_version`, and `version` without epoch and
        revision. One that was removed and left its configuration is there and not installed.
    """
    found: Found = {}
    for line in text.splitlines():
        state, name, full = line.split("|")
        if state[1:2] == "n":
            continue
        found[name] = _entry(full, full.rpartition("-")[0] or full, state[0] == "h")
        found[name]["installed"] = state[1] == "i"
    return found


def packages_of_rpm(packages: Mapping[str, Any], locks: str, names: Sequence[str]) -> Found:
    """Read what rpm knows.

    Args:
        packages: The facts of `ansible.builtin.package_facts`.
        locks: Dnf's versionlock.list.
        names: The packages to tell of.

    Returns:
        The same as `packages_of_dpkg`.
    """
    lines = [line.strip() for line in locks.splitlines()]
    locked = {re.sub(r"-[^-]+-[^-]+$", "", line) for line in lines if line and line[0] not in "#!"}
    return {
        name: _entry(
            f"{packages[name][0]['version']}-{packages[name][0]['release']}",
            packages[name][0]["version"],
            name in locked,
        )
        for name in names
        if name in packages
    }


def _entry(full: str, version: str, held: bool) -> dict[str, Any]:
    return {
        "installed": True,
        "held": held,
        "package_version": full,
        "version": re.sub(r"^\d+:", "", version),
    }


def packages_missing(found: Found, names: Sequence[str], version: str = "") -> list[str]:
    """Tell what has to be installed.

    Args:
        found: What `packages_of_dpkg` or `packages_of_rpm` returned.
        names: The packages wanted.
        version: The version that each must have, empty for any.

    Returns:
        Those that are not installed, or in another version.
    """
    here = {name for name, entry in found.items() if entry["installed"] and version in ("", entry["version"])}
    return [name for name in names if name not in here]


def packages_exact(madison: str, names: Sequence[str], version: str) -> list[str]:
    """Name packages with the full version that apt asks for.

    Args:
        madison: What `apt-cache madison` says: a line a version, `name | version | source`, the newest first.
        names: The packages wanted.
        version: The version that each must have, without epoch and revision.

    Returns:
        For each name `name=version` with epoch and revision, of the newest revision; without both where apt
        knows none, so that it says so itself.
    """
    known: dict[str, str] = {}
    for line in madison.splitlines():
        name, full = (part.strip() for part in line.split("|")[:2])
        if re.fullmatch(rf"(\d+:)?{re.escape(version)}(-[^-]*)?", full):
            known.setdefault(name, full)
    return [f"{name}={known.get(name, version)}" for name in names]


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
    wanted = ", ".join(names) + (f" in version {version}" if version else "")
    return f"Found: {' / '.join(lines[:LINES])}\nWanted: {wanted}. {advice}"


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {
            "packages_of_dpkg": packages_of_dpkg,
            "packages_of_rpm": packages_of_rpm,
            "packages_missing": packages_missing,
            "packages_exact": packages_exact,
            "package_failure": package_failure,
        }
