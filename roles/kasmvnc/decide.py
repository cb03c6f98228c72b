"""KasmVNC and a light desktop: packages, settings, scripts, and the unit that nobody enables here."""

import re

from ..plan import Looks, Node, Plan, Role, missing, upstream

PACKAGE = "kasmvncserver"
SETTINGS = "/etc/kasmvnc/kasmvnc.yaml"
FOLDER = "/usr/local/lib/gpukiln"
SCRIPTS = ("kasmvnc-prepare", "kasmvnc-session")
UNIT_FILE = "/etc/systemd/system/kasmvnc@.service"  # a workspace that wants a desktop enables it for its user


def look(role: Role) -> Looks:
    files = [SETTINGS, UNIT_FILE, *(f"{FOLDER}/{name}" for name in SCRIPTS)]
    return {"packages": [PACKAGE, *role["desktop_packages"]], "files": files}


def decide(role: Role, node: Node) -> Plan:
    """`do`: `fetch` says whether KasmVNC's package is wanted, `components` the archive's for the desktop."""
    plan, system = Plan(), role.system
    url, sha256, version = role["url"], role["sha256"], role["version"]
    # Releases have packages for the RHEL family, Amazon Linux not among them; no checksum of those is known.
    if not system.apt:
        return plan.refuse(
            f"Found {system.distribution} {system.version}, wanted Debian or Ubuntu: no package of KasmVNC"
            " with a known checksum fits another system. Leave kasmvnc out there."
        )
    if not (re.match("https?://", url) and re.fullmatch("[0-9a-f]{64}", sha256)):
        return plan.refuse(
            f"Found no package of KasmVNC {version} with a SHA-256 checksum for {role['system']} on"
            f" {role['machine']} (kasmvnc_url {url or 'none'}, kasmvnc_sha256 {sha256 or 'none'}), wanted"
            " both. Nothing is fetched without a checksum: give kasmvnc_url and kasmvnc_sha256."
        )
    fetch = bool(missing(node, [PACKAGE], version))
    plan.do = {"fetch": fetch, "components": ["universe"] if system.distribution == "Ubuntu" else []}
    if fetch:
        plan.lines.append(f"+{PACKAGE} {version} of {url}")
    plan.install(missing(node, role["desktop_packages"]))
    plan.write(node, SETTINGS, role.template("kasmvnc.yaml.j2", port=role["port"]))
    for name in SCRIPTS:
        plan.write(node, f"{FOLDER}/{name}", role.file(name), mode="0755")
    plan.write(node, UNIT_FILE, role.template("kasmvnc@.service.j2", folder=FOLDER, port=role["port"]))
    return plan


def look_came(_role: Role) -> Looks:
    return {"packages": [PACKAGE]}


def decide_came(role: Role, node: Node) -> Plan:
    """Refuse where the package was of another version."""
    plan = Plan()
    if missing(node, [PACKAGE], role["version"]):
        versions = [upstream(package["version"]) for package in node["packages"].get(PACKAGE, [])]
        return plan.refuse(
            f"Found {PACKAGE} {', '.join(versions) or 'missing'} in {role['url']}, wanted {role['version']}."
            " Correct kasmvnc_version or kasmvnc_url."
        )
    return plan
