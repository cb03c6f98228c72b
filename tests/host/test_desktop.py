"""The browser desktop, where the image has one, starts and listens on loopback only."""

import ipaddress

import pytest

from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check

UNAUTHORIZED = 401


@check(
    id="desktop.kasmvnc",
    title="KasmVNC starts in the recorded version, listens on loopback only, and asks for a password",
    layer="desktop",
    profiles=("image", "node", "eks-node", "workspace"),
    needs=("component:kasmvnc", "systemd"),
    causes=(
        "The package was removed or upgraded by hand, or belongs to another release of the distribution.",
        "Another session uses display :1 or the port.",
        "The unit was changed: it sets the address and the port.",
    ),
    fix="`journalctl -u 'kasmvnc@*'` and ~/.vnc/*.log of the user; the role kasmvnc writes the unit.",
)
def test_kasmvnc(facts):
    installed = facts["packages"]["installed"].get("kasmvncserver")
    recorded = facts.component("kasmvnc").get("version")
    assert installed, "kasmvncserver is not installed"
    # Debian's revision is not part of KasmVNC's version.
    has = installed.partition("-")[0]
    assert not recorded or has == recorded, f"found KasmVNC {has}, wanted {recorded}"
    desktop = require_reached(facts["desktop"])
    assert desktop["unit"], "found no unit kasmvnc@.service with a port, wanted the unit of the role kasmvnc"
    if desktop["unit_of"] is None:
        pytest.skip("this machine has no user whose desktop could be started")
    log = f": {desktop['log']}" if desktop["log"] else ""
    assert desktop["listens"], f"{desktop['unit_of']} does not listen on port {desktop['port']}{log}"
    # Users reach the desktop through an SSH tunnel, so that no other machine needs the port.
    open_to = [listener for listener in desktop["listens"] if not _loopback(listener)]
    assert not open_to, f"port {desktop['port']} is open on {', '.join(open_to)}, wanted loopback only"
    http = desktop["http"]
    assert http.get("status") == UNAUTHORIZED, (
        f"without a password {desktop['unit_of']} answers {http.get('status') or http}, wanted {UNAUTHORIZED}"
    )
    facts.note(f"{has}, 127.0.0.1:{desktop['port']}")


def _loopback(address: str) -> bool:
    # ss prints `*` for a socket that listens on all addresses, and %interface after a link-local one.
    return address != "*" and ipaddress.ip_address(address.partition("%")[0]).is_loopback
